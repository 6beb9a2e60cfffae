"""Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): all-to-all from a cut sequence to cut heads and back.

Splits: the sequence over n ranks between attentions, the heads in them: each rank sees the whole sequence of H / n.
Collectives per layer and microbatch: one all-to-all each of a rank's q, k, v and output, each way: (n - 1) / n of them
is sent. Kv heads that n does not divide are repeated to lcm(G, n) first, which is the least.
Limits: n must divide the query heads that `tensor` leaves to a rank.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def to_heads(
    x: Float[Array, "B C H K"], axis: str, group: int, groups: list[list[int]] | None
) -> Float[Array, "B C*U H/U K"]:
    """From C tokens of all heads to the group's tokens of 1/U of them, heads being repeated as U needs it."""
    heads = x.shape[2]
    repeats = math.lcm(heads, group) // heads
    x = jnp.repeat(x, repeats, axis=2) if repeats > 1 else x
    return lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True, axis_index_groups=groups)


def to_tokens(x: Float[Array, "B C*U H/U K"], axis: str, groups: list[list[int]] | None) -> Float[Array, "B C H K"]:
    return lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True, axis_index_groups=groups)


def rank_groups(ranks: int, group: int) -> list[list[int]] | None:
    """Consecutive ranks trade with each other; None where that is all of them."""
    if group == ranks:
        return None
    return [list(range(first, first + group)) for first in range(0, ranks, group)]


def check_heads(num_heads: int, tensor: int, group: int) -> None:
    """Raise ValueError where a rank's query heads do not divide by the group."""
    if num_heads // tensor % group:
        fits = [n for n in range(1, group + 1) if group % n == 0 and num_heads // tensor % n == 0]
        raise ValueError(
            f"Ulysses over {group} ranks deals out the query heads of a rank of `tensor`, {num_heads} / {tensor} = "
            f"{num_heads // tensor}, which {group} does not divide; the nearest number of ranks that does: {fits[-1]}"
        )
