"""The work of a pipeline's parts: what `parallel.pipeline.partition` takes as times where none are measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.parallel.pipeline.simulate import Times
from jaxpar.parallel.remat import Remat
from jaxpar.planning.flops import (
    attention_flops_per_token,
    head_matmul_flops_per_token,
    layers_matmul_flops_per_token,
    recomputed_flops_per_token,
)
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


def stage_times(config: ModelConfig, seq_len: int, layers_per_stage: Sequence[int], remat: Remat) -> Times:
    """Times of F, B and W, in FLOPs per token, of stages of one chunk: attention's products have no weights, so their
    backward pass is B's alone, as is what remat does again. The last stage's F has the head, both passes of it, as it
    runs there; the first one's B the embedding's gradient."""
    num_layers, work = config.num_layers, part_work(config, seq_len)
    matmuls = layers_matmul_flops_per_token(config) / num_layers
    attention = attention_flops_per_token(config, seq_len, causal=True) / num_layers
    again = recomputed_flops_per_token(config, seq_len, remat) / num_layers
    forward = [n * (matmuls + attention) for n in layers_per_stage]
    backward = [n * (matmuls + 2 * attention + again) for n in layers_per_stage]
    forward[-1] += work.head
    backward[0] += work.embedding
    return Times(forward, backward, [n * matmuls for n in layers_per_stage])


def slice_flops(config: ModelConfig, length: int, before: int) -> float:
    """Forward FLOPs of all layers for a slice of `length` tokens that follows `before` others, attention causal."""
    keys = length * before + length * (length + 1) / 2
    if config.sliding_window is not None:
        keys = sum(min(before + 1 + i, config.sliding_window) for i in range(length))
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim * keys
    return layers_matmul_flops_per_token(config) * length + attention
