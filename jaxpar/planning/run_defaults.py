"""What published runs leave out, filled in as their framework would: one table, and rules for models known by size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshes.spec import Chip
from models.config import ModelConfig
from models.count import num_parameters


@dataclass(frozen=True)
class Framework:
    """What a source's runs did where they do not say."""

    name: str
    """Of the calibration's entry."""
    mark: str
    """Part of `source` that tells these runs."""
    remat: str
    convention: str
    """Of flop_conventions: how it counts the FLOPs in its MFU."""
    reduce_bytes: int = 4
    pipeline: str = "interleaved-1f1b"
    microbatch: int = 1
    optimizer_sharded: bool = False
    """Over `data`, where parameters are whole there."""
    reasons: str = ""


FRAMEWORKS = (
    Framework(
        "llm-foundry",
        "llm-foundry",
        remat="full",
        convention="llm-foundry",
        reduce_bytes=2,
        reasons="its tables give microbatch and remat; mixed_precision PURE reduces gradients in bfloat16",
    ),
    Framework(
        "megatron-bridge",
        "Megatron-Bridge",
        remat="selective",
        convention="nvidia-bridge",
        reduce_bytes=2,
        reasons="its recipes recompute nothing but attention; grad_reduce_in_fp32 is off; FLOPs halve a causal mask's",
    ),
    Framework(
        "megatron-2021",
        "Narayanan et al. 2021",
        remat="full",
        convention="palm",
        microbatch=4,
        reasons="the paper's section 3.5: full recomputation; section 2.2: interleaved, with the fewest chunks; "
        "equation 3 counts attention in full",
    ),
    Framework(
        "megatron-core",
        "Megatron-LM",
        remat="selective",
        convention="palm",
        reduce_bytes=2,
        optimizer_sharded=True,
        reasons="flash attention, which makes selective recomputation free, and overlapped reductions of a sharded "
        "optimizer, taken as in bfloat16; counts as in 2021",
    ),
    Framework(
        "torchtitan",
        "torchtitan",
        remat="selective",
        convention="torchtitan",
        reasons="its tables give microbatch and remat",
    ),
    Framework(
        "llama3",
        "2407.21783",
        remat="none",
        convention="nvidia-bridge",
        reasons="section 3.3.2: no recomputation; a chunk of one layer with the embedding and the head as two more; "
        "stages without resharding between forward and backward",
    ),
    Framework(
        "maxtext",
        "maxtext",
        remat="full",
        convention="palm",
        reasons="its scripts (configs/v5e, v5p) give remat, batch and model by size; attention counts in full",
    ),
    Framework(
        "jaxpar", "", remat="full", convention="palm", pipeline="1f1b", reasons="any other source: our own defaults"
    ),
)

_MAXTEXT_BATCH = {"TPU-v5e": {16: 6, 32: 4, 64: 2, 128: 1}, "": {32: 7, 64: 3, 128: 1, 256: 1, 512: 2, 1024: 2}}
"""Sequences per device, by chip and billions of parameters: MaxText/configs/{v5e,v5p}/*.sh."""
_MAXTEXT_REMAT = {"TPU-v5e": {16: "full", 32: "full", 64: "full", 128: "dots"}, "": {256: "dots", 1024: "full"}}
"""From the same scripts; `minimal` keeps the products' results, on the device or (v5e, 128B) in the host's memory."""
_MEGATRON_SHAPES = ((3.6e9, 102), (18.4e9, 154), (145.6e9, 154), (529.6e9, 195), (1008e9, 200))
"""Width over depth by parameters: Megatron-LM (arXiv 2104.04473), Table 1."""


def maxtext_model(parameters: float) -> ModelConfig:
    """MaxText's global_parameter_scale: a model of 1 billion, whose heads and MLP, then width, then depth double."""
    power = round(math.log2(parameters / 1e9))
    depth, rest = divmod(power, 3)
    heads = 16 * 2 ** (depth + (rest > 0))
    return ModelConfig(
        name=f"maxtext-{2**power}b",
        vocab_size=32000,
        embed_dim=2048 * 2 ** (depth + (rest > 1)),
        num_layers=16 * 2**depth,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        mlp_dim=7168 * heads // 16,
    )


def gpt_of_size(parameters: float, stages: int) -> ModelConfig:
    """A GPT of so many parameters with Megatron's ratio of width to depth, an even number of layers in each stage, and
    heads for 8 ranks of a server."""
    sizes, ratios = zip(*_MEGATRON_SHAPES)
    logs = [math.log(size) for size in sizes]
    ratio = _interpolate(math.log(parameters), logs, ratios)
    unit = 2 * stages
    layers = max(1, round((parameters / 12 / ratio**2) ** (1 / 3) / unit)) * unit
    width = max(1, round(math.sqrt(parameters / 12 / layers) / 1024)) * 1024
    return ModelConfig(
        name=f"gpt-{parameters / 1e9:.0f}b",
        vocab_size=51200,
        embed_dim=width,
        num_layers=layers,
        num_heads=width // 128,
        num_kv_heads=width // 128,
        head_dim=128,
        mlp_dim=4 * width,
        mlp="gelu",
        norm="layernorm",
        tie_embeddings=True,
    )


def _interpolate(x: float, xs: list[float], ys: tuple[float, ...]) -> float:
    for low, high, a, b in zip(xs, xs[1:], ys, ys[1:]):
        if x <= high:
            return a + (b - a) * max(0.0, (x - low) / (high - low))
    return ys[-1]


def default_chunks(model: ModelConfig, stages: int, framework: Framework) -> int:
    """Chunks of a stage where a run that may interleave does not say: Llama 3's one layer each; in Megatron a divisor
    of the stage's layers, as near as may be to four (in 2021, the fewest that interleave)."""
    if framework.pipeline != "interleaved-1f1b":
        return 1
    if framework.name == "llama3":
        return (model.num_layers + 2) // stages
    depth = max(1, model.num_layers // stages)
    divisors = [count for count in range(1, depth + 1) if depth % count == 0]
    if framework.name == "megatron-2021":
        return divisors[min(1, len(divisors) - 1)]
    return min(divisors, key=lambda count: abs(math.log(count / 4)))


def _maxtext(by_chip: Mapping[str, Mapping[int, Any]], known: Chip, model: ModelConfig) -> Any:
    """The entry of the size, or of the next larger one."""
    sizes = by_chip.get(known.name, by_chip[""])
    size = num_parameters(model) / 1e9
    return sizes[min((entry for entry in sizes if entry >= size), default=max(sizes))]


def default_microbatch(known: Chip, model: ModelConfig, framework: Framework) -> int:
    """Sequences."""
    return _maxtext(_MAXTEXT_BATCH, known, model) if framework.name == "maxtext" else framework.microbatch


def default_microbatches(stages: int) -> int:
    """Where no batch is given: enough that the bubble is small (GPipe, arXiv 1811.06965, section 2.3)."""
    return 4 * stages if stages > 1 else 1


def remat_of(remat: str | None, known: Chip, model: ModelConfig, framework: Framework) -> str:
    if remat == "minimal":  # MaxText's name
        return "dots"
    if remat is None:
        return _maxtext(_MAXTEXT_REMAT, known, model) if framework.name == "maxtext" else framework.remat
    if remat == "selective" and framework.name == "torchtitan":
        return "save=query,value,mlp_gate,mlp_out,attention"  # per operation: attention and every other product
    return remat
