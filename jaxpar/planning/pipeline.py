"""The work of a pipeline's parts: what `parallel.pipeline.partition` takes as times where none are measured."""

from dataclasses import dataclass

from jaxpar.planning.flops import attention_flops_per_token, head_matmul_flops_per_token, layers_matmul_flops_per_token
from models.config import ModelConfig


@dataclass(frozen=True)
class PartWork:
    """FLOPs per token, forward and backward, of one layer, of the embedding and of the head."""

    layer: float
    embedding: float
    head: float


def part_work(config: ModelConfig, seq_len: int) -> PartWork:
    """Products of the layers and the head as in `flops`, attention causal; of the embedding, whose lookup is free, the
    additions into its gradient."""
    layers = layers_matmul_flops_per_token(config) + attention_flops_per_token(config, seq_len, causal=True)
    return PartWork(
        layer=3 * layers / config.num_layers,
        embedding=float(config.embed_dim),
        head=3 * head_matmul_flops_per_token(config),
    )


@dataclass(frozen=True)
class PassFlops:
    """FLOPs per token of all layers, in a pipeline's three passes."""

    forward: float
    backward: float
    """Of the inputs' gradients alone (B)."""
    weight: float
    """Of the weights' gradients alone (W)."""


def pass_flops(config: ModelConfig, seq_len: int) -> PassFlops:
    """What a product costs in each pass: one of weights as much in all three, attention's, of two inputs, none in W and
    twice the forward pass's in B. Attention in full.

    Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), table 1: for sequences of s, per sequence and layer,
    s h (24 h + 4 s), s h (24 h + 8 s) and 24 s h^2.
    """
    weights, attention = layers_matmul_flops_per_token(config), attention_flops_per_token(config, seq_len, causal=False)
    return PassFlops(weights + attention, weights + 2 * attention, weights)


def slice_flops(config: ModelConfig, length: int, before: int) -> float:
    """Forward FLOPs of all layers for a slice of `length` tokens that follows `before` others, attention causal."""
    keys = length * before + length * (length + 1) / 2
    if config.sliding_window is not None:
        keys = sum(min(before + 1 + i, config.sliding_window) for i in range(length))
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim * keys
    return layers_matmul_flops_per_token(config) * length + attention
