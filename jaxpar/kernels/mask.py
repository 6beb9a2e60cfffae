"""Which keys a query sees: by positions and segments alone, never by the order in an array."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class AttentionMask:
    causal: bool = True
    window: int | None = None
    """A query sees this many positions, its own included."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap) (Gemma 2, arXiv 2408.00118)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """What a mask needs to know of queries or keys."""

    positions: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]


def visible(q: Tokens, k: Tokens, mask: AttentionMask) -> Bool[Array, "B T S"]:
    distance = q.positions[:, :, None] - k.positions[:, None, :]
    seen = q.segment_ids[:, :, None] == k.segment_ids[:, None, :]
    if mask.causal:
        seen &= distance >= 0
    if mask.window is not None:
        seen &= jnp.abs(distance) < mask.window
    return seen
