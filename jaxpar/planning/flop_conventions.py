"""The FLOPs per token that published numbers are made with, by name: they differ by what they count.

| convention | weights | attention | recomputed |
|---|---|---|---|
| palm | that multiply: layers and head | in full | |
| megatron-2021 | GPT's 12 l h^2, head on padded vocabulary | in full | a forward pass of the layers |
| korthikanti | the same | in full | |
| llm-foundry | all parameters, embedding too | in full | (HFU: a third of all) |
| nvidia-bridge, maxtext | that multiply, of the experts that a token visits | causal half | |
| torchtitan | all but the input embedding | in full | |
| nanogpt | all but learned positions | in full | |

A training step is three forward passes; FLOPs are per token, of the forward and the backward pass together.
"""

from collections.abc import Callable
from dataclasses import dataclass

from models.shapes import Shape


@dataclass(frozen=True)
class Convention:
    """A way to count a step's FLOPs."""

    name: str
    flops_per_token: Callable[[Shape, int], float]
    """Of a shape at a sequence length."""
    source: str


def with_attention(num_parameters: float, num_layers: int, attention_dim: int, seq_len: int, causal: bool) -> float:
    """6 N + 12 L (H Q) T, the second half as large where only the causal half counts; H Q is heads x head dim."""
    return 6.0 * num_parameters + (6 if causal else 12) * num_layers * attention_dim * seq_len


def gpt_flops_per_token(
    num_layers: int, embed_dim: int, vocab_size: int, seq_len: int, recompute: str = "none"
) -> float:
    """72 l h^2 (1 + s/6h + v/12hl) of a GPT with 4h wide MLPs.

    recompute: "none"; "selective", attention's products once more (s/3h, as the paper counts it); "full", the layers'
    forward pass once more, 96 l h^2 (1 + s/6h + v/16lh). Sources: Korthikanti et al. (arXiv 2205.05198), equations 7
    and 8; Narayanan et al. (arXiv 2104.04473), section 5.1.
    """
    matmuls, attention = 72.0 * num_layers * embed_dim**2, 12.0 * num_layers * embed_dim * seq_len
    head = 6.0 * embed_dim * vocab_size
    if recompute == "full":
        return 4 / 3 * (matmuls + attention) + head
    if recompute == "selective":
        return matmuls + 2 * attention + head
    if recompute == "none":
        return matmuls + attention + head
    raise ValueError(f"recompute {recompute!r}: it must be none, selective or full")


def gpt_parameters(num_layers: int, embed_dim: int, vocab_size: int, seq_len: int) -> float:
    """12 l h^2 (1 + 13/12h + (V + s)/12lh). Source: Narayanan et al. (arXiv 2104.04473), section 2, equation 2."""
    return 12.0 * num_layers * embed_dim**2 + 13.0 * num_layers * embed_dim + (vocab_size + seq_len) * embed_dim


def _attention_dim(shape: Shape) -> int:
    return shape.num_heads * shape.head_dim


def _palm(shape: Shape, seq_len: int) -> float:
    return with_attention(shape.matmul_parameters, shape.num_layers, _attention_dim(shape), seq_len, causal=False)


def _megatron(shape: Shape, seq_len: int) -> float:
    return gpt_flops_per_token(shape.num_layers, shape.embed_dim, shape.vocab_size, seq_len, "full")


def _korthikanti(shape: Shape, seq_len: int) -> float:
    return gpt_flops_per_token(shape.num_layers, shape.embed_dim, shape.vocab_size, seq_len)


def _llm_foundry(shape: Shape, seq_len: int) -> float:
    return with_attention(shape.parameters, shape.num_layers, shape.embed_dim, seq_len, causal=False)


def _causal(shape: Shape, seq_len: int) -> float:
    return 6.0 * shape.matmul_parameters + 3 * shape.attention_flops_per_token(seq_len, causal=True)


def _torchtitan(shape: Shape, seq_len: int) -> float:
    active = shape.active_parameters - (0 if shape.tied else shape.embedding)
    return with_attention(active, shape.num_layers, _attention_dim(shape), seq_len, causal=False)


def _nanogpt(shape: Shape, seq_len: int) -> float:
    counted = shape.parameters - shape.extras
    return with_attention(counted, shape.num_layers, _attention_dim(shape), seq_len, causal=False)


CONVENTIONS = {
    convention.name: convention
    for convention in (
        Convention("palm", _palm, "PaLM (arXiv 2204.02311), appendix B"),
        Convention(
            "megatron-2021", _megatron, "Narayanan et al. (arXiv 2104.04473), section 5.1; with full recomputation"
        ),
        Convention("korthikanti", _korthikanti, "Korthikanti et al. (arXiv 2205.05198), equation 7"),
        Convention("llm-foundry", _llm_foundry, "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"),
        Convention(
            "nvidia-bridge", _causal, "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, by its numbers"
        ),
        Convention("maxtext", _causal, "AI-Hypercomputer/maxtext, docs/reference/performance_metrics.md"),
        Convention("torchtitan", _torchtitan, "pytorch/torchtitan, torchtitan/models/utils.py"),
        Convention("nanogpt", _nanogpt, "karpathy/nanoGPT, model.py, estimate_mfu"),
    )
}


def convention(name: str) -> Convention:
    """ValueError, with the known ones, for a name that is not one of them."""
    if name not in CONVENTIONS:
        raise ValueError(f"no FLOP convention is called {name!r}; known: {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def utilization(flops_per_token: float, tokens_per_second: float, num_devices: float, peak_flops: float) -> float:
    """The share of the peak of all devices that so many tokens a second, of all devices together, are."""
    return flops_per_token * tokens_per_second / (num_devices * peak_flops)
