"""When work is bound by FLOPs, by memory or by links: the smallest batch, the largest degree of a split.

Source of all but where another is named: How to Scale Your Model (jax-ml.github.io/scaling-book), "Rooflines",
"Training" and "GPUs". Intensities are FLOPs per byte; batches are in tokens.
"""

import math


def intensity(flops: float, bandwidth: float) -> float:
    """FLOPs that the chip does while one byte moves: a matmul's critical batch with 2-byte weights."""
    return flops / bandwidth


def critical_batch(flops: float, memory_bandwidth: float, weight_bytes: float = 2) -> float:
    """Tokens from which on a large matmul is bound by FLOPs: 2 FLOPs a token for each weight's bytes."""
    return intensity(flops, memory_bandwidth) * weight_bytes / 2


def matmul_critical_batch(flops: float, bandwidth: float, inner: int, outer: int, element_bytes: float = 2) -> float:
    """The same for [B, inner] x [inner, outer], with the activations' bytes counted."""
    per_token = 2.0 * inner * outer / flops - element_bytes * (inner + outer) / bandwidth
    return element_bytes * inner * outer / bandwidth / per_token


def matmul_seconds(
    rows: float, inner: float, outer: float, flops: float, bandwidth: float, element_bytes: float = 2
) -> tuple[float, float]:
    """(compute, memory) of [rows, inner] x [inner, outer]."""
    moved = element_bytes * (rows * inner + inner * outer + rows * outer)
    return 2.0 * rows * inner * outer / flops, moved / bandwidth


def dot_intensity(rows: float, inner: float, outer: float, element_bytes: float = 2) -> float:
    """A matmul's FLOPs per byte that it moves."""
    return 2.0 * rows * inner * outer / (element_bytes * (rows * inner + inner * outer + rows * outer))


def data_parallel_batch(
    link_intensity: float, axes: int = 1, experts: float = 1, experts_per_token: float = 1
) -> float:
    """Tokens per device under which data parallelism or FSDP waits for links, with so many torus axes; experts multiply
    the weights that move for a token's FLOPs."""
    return link_intensity / axes * experts / experts_per_token


def tensor_parallel_limit(mlp_dim: float, link_intensity: float, axes: int = 1) -> float:
    """The largest degree of tensor parallelism that compute hides."""
    return mlp_dim * axes / link_intensity


def mixed_batch(link_intensity: float, mlp_dim: float, fsdp_axes: int = 2, tensor_axes: int = 1) -> float:
    """Tokens per device under which even the best mix of FSDP and tensor parallelism waits: 4 a^2 / (F Mx My)."""
    return 4 * link_intensity**2 / (mlp_dim * fsdp_axes * tensor_axes)


def optimal_fsdp(batch: float, num_devices: float, mlp_dim: float, fsdp_axes: int = 2, tensor_axes: int = 1) -> float:
    """The degree of FSDP that moves least beside tensor parallelism: sqrt(B N Mx / (F My))."""
    return math.sqrt(batch * num_devices * fsdp_axes / (mlp_dim * tensor_axes))


def pipeline_seconds(batch: float, embed_dim: float, bandwidth: float, microbatches: int, stages: int) -> float:
    """Of sending activations through a pipeline: 2 B D / (W M) (M + S - 2)."""
    return 2.0 * batch * embed_dim / (bandwidth * microbatches) * (microbatches + stages - 2)


def ring_attention_block(flops: float, bandwidth: float) -> float:
    """Tokens of a block from which on its compute hides the ring's sends: F / B. A device holds six of them. Source:
    Ring Attention (arXiv 2310.01889), section 3, table 2."""
    return flops / bandwidth


RING_ATTENTION_BLOCKS = 6


def attention_equals_mlp_length(embed_dim: float) -> float:
    """Keys per query at which causal-free attention's products cost as much as the q, k, v, o projections: T = 2 D."""
    return 2 * embed_dim


def attention_dominates_length(embed_dim: float) -> float:
    """The sequence length from which attention's products exceed all matmuls (MLPs of 4 D, in full): T = 8 D."""
    return 8 * embed_dim


# AI-Hypercomputer/maxtext, docs/guides/optimization/sharding.md: each is FLOPs per byte of one strategy.
def fsdp_intensity(tokens_per_device: float, sparsity: float = 1) -> float:
    return tokens_per_device / sparsity


def tensor_intensity(mlp_dim: float, tensor: float) -> float:
    return mlp_dim / tensor


def expert_mlp_intensity(mlp_dim: float, expert: float) -> float:
    return 4 * mlp_dim / expert


def pipeline_intensity(layers_per_stage: float, mlp_dim: float, experts_per_token: float = 1) -> float:
    return 1.5 * layers_per_stage * mlp_dim * experts_per_token


def context_gather_intensity(seq_len: float, num_heads: float, num_kv_heads: float, context: float) -> float:
    return seq_len * num_heads / (num_kv_heads * context)
