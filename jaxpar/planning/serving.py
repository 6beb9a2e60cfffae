"""Decoding: KV caches, the rooflines of a step, speculative decoding, attention's FLOPs and its softmax."""

import math
from collections.abc import Sequence


def kv_bytes_per_token(num_layers: float, num_kv_heads: float, head_dim: float, element_bytes: float = 2) -> float:
    """Of K and V of one token, all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * element_bytes


def decode_step_seconds(
    batch: float, parameter_bytes: float, kv_bytes: float, num_parameters: float, flops: float, bandwidth: float
) -> float:
    """Of one token for each sequence of a batch: the caches are always read, the weights once for all. kv_bytes is one
    sequence's; flops and bandwidth those of all devices. Source: How to Scale Your Model, "Inference"."""
    return batch * kv_bytes / bandwidth + max(2 * batch * num_parameters / flops, parameter_bytes / bandwidth)


def speculative_tokens(acceptance: float, drafted: int) -> float:
    """Tokens that one run of the target yields on average: (1 - a^(g+1)) / (1 - a). Source: Leviathan et al. (arXiv
    2211.17192), equation 1."""
    if acceptance == 1:
        return drafted + 1.0
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def speculative_speedup(acceptance: float, drafted: int, cost_ratio: float = 0.0) -> float:
    """In time, c being the draft's time over the target's. Source: Leviathan et al. (arXiv 2211.17192), theorem 3.8."""
    return speculative_tokens(acceptance, drafted) / (drafted * cost_ratio + 1)


def speculative_operations(acceptance: float, drafted: int, operations_ratio: float = 0.0) -> float:
    """Operations over those without drafts. Source: Leviathan et al. (arXiv 2211.17192), theorem 3.11."""
    return (drafted * operations_ratio + drafted + 1) / speculative_tokens(acceptance, drafted)


FLASH_BACKWARD = 2.5
"""FlashAttention's backward pass over its forward: five products for two, scores computed again."""


def attention_flops(batch: float, seq_len: float, num_heads: float, head_dim: float, causal: bool = False) -> float:
    """Forward, of Q K^T and scores x V."""
    return 4 * batch * seq_len**2 * num_heads * head_dim / (2 if causal else 1)


SOFTMAX_ACCESSES = {"naive": (2, 3), "safe": (3, 4), "online": (2, 3)}
"""(passes over the input, memory accesses per element). Source: Milakov and Gimelshein (1805.02867), section 3."""


def online_softmax(blocks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(maximum, sum of exponentials under it), block by block. Source: Milakov and Gimelshein (arXiv 1805.02867),
    algorithm 3."""
    maximum, total = -math.inf, 0.0
    for block in blocks:
        larger = max(maximum, *block)
        total = total * math.exp(maximum - larger) + sum(math.exp(x - larger) for x in block)
        maximum = larger
    return maximum, total
