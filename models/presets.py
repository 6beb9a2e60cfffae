"""Published models by name, and a model of one's own from a TOML file.

Each is the configuration of the model hub's checkpoint of that name (the base model, where instruction-tuned
ones differ); GPT-3 is that of its paper (arXiv 2005.14165, table 2.1), with dense attention in every layer.
"""

import difflib
import re
from pathlib import Path

from jaxpar import toml
from models.config import ModelConfig

_SIZES = ("embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")

_GPT = ModelConfig(
    vocab_size=50257,
    max_seq_len=1024,
    norm="layernorm",
    mlp="gelu",
    positions="learned",
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)
_LLAMA2 = ModelConfig(vocab_size=32000, max_seq_len=4096)
_LLAMA3 = ModelConfig(vocab_size=128256, max_seq_len=8192, rope_theta=500_000.0)
_LLAMA3_1 = _LLAMA3.replace(
    max_seq_len=131072,
    rope_scaling_factor=8.0,
    rope_low_freq_factor=1.0,
    rope_high_freq_factor=4.0,
    rope_original_seq_len=8192,
)
_QWEN2_5 = ModelConfig(vocab_size=152064, max_seq_len=131072, norm_eps=1e-6, rope_theta=1_000_000.0, qkv_bias=True)
_QWEN2_5_TIED = _QWEN2_5.replace(vocab_size=151936, tie_embeddings=True)
_QWEN3 = ModelConfig(vocab_size=151936, max_seq_len=40960, norm_eps=1e-6, rope_theta=1_000_000.0, qk_norm=True)
_MISTRAL = ModelConfig(vocab_size=32000, max_seq_len=32768, sliding_window=4096)

_MIXTRAL = _MISTRAL.replace(sliding_window=None, rope_theta=1_000_000.0, num_experts=8)
_QWEN3_MOE = _QWEN3.replace(num_experts=128, num_experts_per_token=8, balancing_loss_weight=0.001)
_OLMOE = ModelConfig(
    vocab_size=50304,
    max_seq_len=4096,
    qk_norm=True,
    qk_norm_over="heads",
    num_experts=64,
    num_experts_per_token=8,
    expert_mlp_dim=1024,
    normalize_expert_weights=False,
    router_z_loss_weight=0.001,
)

_8B = (4096, 32, 32, 8, 128, 14336)
_70B = (8192, 80, 64, 8, 128, 28672)
_405B = (16384, 126, 128, 8, 128, 53248)

_FAMILIES: tuple[tuple[ModelConfig, dict[str, tuple[int, ...]]], ...] = (
    (ModelConfig(vocab_size=256), {"tiny": (128, 4, 8, 4, 16, 256)}),
    (
        _GPT,
        {
            "gpt2": (768, 12, 12, 12, 64, 3072),
            "gpt2-medium": (1024, 24, 16, 16, 64, 4096),
            "gpt2-large": (1280, 36, 20, 20, 64, 5120),
            "gpt2-xl": (1600, 48, 25, 25, 64, 6400),
        },
    ),
    (_GPT.replace(max_seq_len=2048), {"gpt3-175b": (12288, 96, 96, 96, 128, 49152)}),
    (
        _LLAMA2,
        {
            "llama2-7b": (4096, 32, 32, 32, 128, 11008),
            "llama2-13b": (5120, 40, 40, 40, 128, 13824),
            "llama2-70b": _70B,
        },
    ),
    (_LLAMA3, {"llama3-8b": _8B, "llama3-70b": _70B}),
    (_LLAMA3_1, {"llama3-405b": _405B, "llama3.1-8b": _8B, "llama3.1-70b": _70B, "llama3.1-405b": _405B}),
    (
        _LLAMA3_1.replace(rope_scaling_factor=32.0, tie_embeddings=True),
        {
            "llama3.2-1b": (2048, 16, 32, 8, 64, 8192),
            "llama3.2-3b": (3072, 28, 24, 8, 128, 8192),
        },
    ),
    (
        _QWEN2_5_TIED.replace(max_seq_len=32768),
        {
            "qwen2.5-0.5b": (896, 24, 14, 2, 64, 4864),
            "qwen2.5-3b": (2048, 36, 16, 2, 128, 11008),
        },
    ),
    (_QWEN2_5_TIED, {"qwen2.5-1.5b": (1536, 28, 12, 2, 128, 8960)}),
    (_QWEN2_5, {"qwen2.5-7b": (3584, 28, 28, 4, 128, 18944)}),
    (
        _QWEN2_5.replace(norm_eps=1e-5),
        {
            "qwen2.5-14b": (5120, 48, 40, 8, 128, 13824),
            "qwen2.5-32b": (5120, 64, 40, 8, 128, 27648),
            "qwen2.5-72b": (8192, 80, 64, 8, 128, 29568),
        },
    ),
    (
        _QWEN3.replace(tie_embeddings=True),
        {
            "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072),
            "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144),
            "qwen3-4b": (2560, 36, 32, 8, 128, 9728),
        },
    ),
    (
        _QWEN3,
        {
            "qwen3-8b": (4096, 36, 32, 8, 128, 12288),
            "qwen3-14b": (5120, 40, 40, 8, 128, 17408),
            "qwen3-32b": (5120, 64, 64, 8, 128, 25600),
        },
    ),
    (_MISTRAL, {"mistral-7b": _8B}),
    (ModelConfig(num_experts=8), {"tiny-moe": (128, 4, 8, 4, 16, 256)}),
    (_MIXTRAL.replace(expert_mlp_dim=14336, balancing_loss_weight=0.02), {"mixtral-8x7b": _8B}),
    (
        _MIXTRAL.replace(max_seq_len=65536, expert_mlp_dim=16384, balancing_loss_weight=0.001),
        {"mixtral-8x22b": (6144, 56, 48, 8, 128, 16384)},
    ),
    (_QWEN3_MOE.replace(expert_mlp_dim=768), {"qwen3-30b-a3b": (2048, 48, 32, 4, 128, 6144)}),
    (_QWEN3_MOE.replace(expert_mlp_dim=1536), {"qwen3-235b-a22b": (4096, 94, 64, 4, 128, 12288)}),
    (_OLMOE, {"olmoe-1b-7b": (2048, 16, 16, 16, 128, 1024)}),
)

_PRESETS = {
    name: common.replace(name=name, **dict(zip(_SIZES, sizes, strict=True)))
    for common, table in _FAMILIES
    for name, sizes in table.items()
}
_OTHER_NAMES = {
    "gpt3": "gpt3-175b",
    "mistral-7b-v0.1": "mistral-7b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "olmoe-1b-7b-0924": "olmoe-1b-7b",
}


def preset_names() -> list[str]:
    """The names that `preset` knows, as they are published, in lower case."""
    return list(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The published model of this name; organisation, case and separators do not matter: "meta-llama/Llama-3-8B" is
    "llama3-8b". ValueError, with the nearest names, for one that is not known."""
    by_key = {_key(known): known for known in _PRESETS} | {_key(other): n for other, n in _OTHER_NAMES.items()}
    key = _key(name)
    if key in by_key:
        return _PRESETS[by_key[key]]
    nearest = [by_key[near] for near in difflib.get_close_matches(key, by_key)] or preset_names()
    raise ValueError(
        f"no model is called {name!r}; nearest: {', '.join(dict.fromkeys(nearest))}; a file of one's own ends in .toml"
    )


def load_model(text: str) -> ModelConfig:
    """A preset's name, or the path of a TOML file that describes a model (by its suffix, .toml).

    The file's keys are ModelConfig's fields, at the top or in a table [model], beside which other tables may
    stand. `preset = "llama3-8b"` starts from that preset, else fields left out have ModelConfig's defaults;
    the name, if not given, is the file's. ValueError, in one line, for what cannot be read.
    """
    path = Path(text)
    if path.suffix.lower() != ".toml":
        return preset(text)
    document = toml.read(path)
    table = document.pop("model", None)
    if isinstance(table, dict):
        table = {key: value for key, value in document.items() if not isinstance(value, dict)} | table
    elif table is None:
        table = document
    else:
        raise ValueError(f"{path}: model is {table!r}, no table; write [model] and fields, or preset = ...")
    base = table.pop("preset", None)
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path}: preset is {base!r}; it must be a model's name")
    return toml.build(preset(base) if base else ModelConfig(), {"name": path.stem} | table, str(path)).check()


def _key(name: str) -> str:
    """What is left of a name without its organisation, case and separators."""
    return re.sub(r"[-_\s]", "", name.rsplit("/", 1)[-1].lower()).removeprefix("meta")
