"""All-gather attention (Llama 3, arXiv 2407.21783, section 3.3.2): each rank gathers all keys and values.

Splits: the sequence over n ranks; queries stay, keys and values are whole on every rank while a layer attends.
Collectives per layer and microbatch, with |K|, |V| a rank's own: all-gather of n (|K| + |V|) forward, reduce-scatter of
as much back. It may stand in a branch of a pipeline schedule, and any mask costs the same.
Limits: memory of a layer's whole K and V, small where there are few kv heads.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jaxpar.parallel.context.order import Order, in_sequence


def gather(
    x: Shaped[Array, "..."], axis: str, dim: int = 1, groups: list[list[int]] | None = None
) -> Shaped[Array, "..."]:
    """Every rank's part along a dim, in the order of the ranks, or of the one group that has them all in another."""
    return lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups)


def gather_in_sequence(
    order: Order, x: Shaped[Array, "..."], axis: str, ranks: int, dim: int = 1
) -> Shaped[Array, "..."]:
    """Every rank's part along a dim, in the sequence's own order: in zigzag's the ranks' first halves, then their
    second ones the other way round, each of which comes so, where putting all in order takes several passes over it."""
    if order != "zigzag":
        return in_sequence(order, gather(x, axis, dim), ranks, dim)
    first, second = jnp.split(x, 2, axis=dim)
    backwards = [list(reversed(range(ranks)))]
    return jnp.concatenate([gather(first, axis, dim), gather(second, axis, dim, backwards)], axis=dim)
