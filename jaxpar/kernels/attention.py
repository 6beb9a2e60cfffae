"""Attention on one device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.numerics import widened


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees; positions and segments decide, never the order in an array."""

    causal: bool = True
    window: int | None = None
    """A query sees this many positions, its own included."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap) (Gemma 2, arXiv 2408.00118)."""


def dot_product_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segment_ids: Int[Array, "B T"],
    k_segment_ids: Int[Array, "B S"],
    mask: AttentionMask,
    scale: float,
) -> Float[Array, "B T H K"]:
    """softmax(scale * q k^T) v over the keys that the mask admits, scores in at least float32.

    G kv heads serve H = G * r query heads in order, without K or V being repeated (GQA, arXiv 2305.13245). Memory is
    B * H * T * S scores. A query must see at least one key: itself, as every causal mask grants.
    """
    num_kv_heads = k.shape[2]
    wide = widened(q.dtype)
    grouped = q.reshape(*q.shape[:2], num_kv_heads, -1, q.shape[-1])
    scores = jnp.einsum("btgrk,bsgk->bgrts", grouped, k, preferred_element_type=wide) * jnp.asarray(scale, wide)
    if mask.soft_cap is not None:
        scores = mask.soft_cap * jnp.tanh(scores / mask.soft_cap)
    visible = _visible(q_positions, k_positions, q_segment_ids, k_segment_ids, mask)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", weights, v).reshape(q.shape)


def _visible(q_positions, k_positions, q_segment_ids, k_segment_ids, mask: AttentionMask):
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    visible = q_segment_ids[:, :, None] == k_segment_ids[:, None, :]
    if mask.causal:
        visible &= distance >= 0
    if mask.window is not None:
        visible &= jnp.abs(distance) < mask.window
    return visible
