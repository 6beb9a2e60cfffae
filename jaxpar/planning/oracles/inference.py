"""Attention, its cache, softmax and speculative decoding."""

from collections.abc import Sequence
from typing import Any

from jaxpar.planning import serving
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule
from models.published import shape as published


@rule("inference_attention", batch="B", seq="S", heads="H", head_dim="D")
def flash(batch: int, seq: int, heads: int, head_dim: int) -> Quantities:
    forward = serving.attention_flops(batch, seq, heads, head_dim)
    causal = serving.attention_flops(batch, seq, heads, head_dim, causal=True)
    backward = serving.FLASH_BACKWARD
    return {
        VALUE: forward,
        "fwd": forward,
        "fwd_causal": causal,
        "bwd": backward * forward,
        "bwd_causal": backward * causal,
        "fwd_bwd": (1 + backward) * forward,
        "fwd_bwd_causal": (1 + backward) * causal,
    }


@rule("inference_attention", drafted="gamma", cost="c")
def speculative(alpha: float, drafted: int, cost: float = 0.0, c_hat: float = 0.0) -> Quantities:
    speedup = serving.speculative_speedup(alpha, drafted, cost)
    return {
        VALUE: speedup,
        "speedup": speedup,
        "speed": speedup,
        "tokens": serving.speculative_tokens(alpha, drafted),
        "ops": serving.speculative_operations(alpha, drafted, c_hat),
    }


@rule("inference_attention", element_bytes="bytes")
def cache_per_token(layers: int, kv_heads: int, head_dim: int, element_bytes: float = 2) -> Quantities:
    found = serving.kv_bytes_per_token(layers, kv_heads, head_dim, element_bytes)
    return {VALUE: found, "bytes": found}


@rule("inference_attention", element_bytes="bytes")
def cache_of_model(model: str, element_bytes: float = 2) -> Quantities:
    found = published(model)
    per_token = serving.kv_bytes_per_token(found.num_layers, found.kv_heads, found.head_dim, element_bytes)
    return {VALUE: per_token, "bytes": per_token}


@rule("inference_attention", gigabytes="kv_GB")
def cache_slots(gigabytes: float, hidden: int, layers: int, model: str = "") -> Quantities:
    """In thousands of tokens, GB read as GiB, 16 bits."""
    found = gigabytes * 2**30 / serving.kv_bytes_per_token(layers, 1, hidden)
    return {"slots_k": found / 1e3, "slots": found, VALUE: found / 1e3}


@rule("inference_attention")
def softmax_accesses() -> Quantities:
    known: dict[str, Any] = {name: list(counts) for name, counts in serving.SOFTMAX_ACCESSES.items()}
    return {**known, "ratio": serving.SOFTMAX_ACCESSES["safe"][1] / serving.SOFTMAX_ACCESSES["online"][1]}


@rule("inference_attention")
def online_softmax(blocks: Sequence[Sequence[float]], x: Sequence[float] = ()) -> Quantities:
    maximum, total = serving.online_softmax(blocks)
    return {"m": maximum, "d": total}
