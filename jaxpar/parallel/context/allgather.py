"""All-gather attention (Llama 3, arXiv 2407.21783, section 3.3.2): each rank gathers all keys and values.

Splits: the sequence over n ranks; queries stay, keys and values are whole on every rank while a layer attends.
Collectives per layer and microbatch, with |K|, |V| a rank's own: all-gather of n (|K| + |V|) forward, reduce-scatter of
as much back. It may stand in a branch of a pipeline schedule, and any mask costs the same.
Limits: memory of a layer's whole K and V, small where there are few kv heads.
"""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxpar.parallel import collectives
from jaxpar.parallel.context.order import Order, in_sequence


def gather(x: Shaped[Array, "B C ..."], axis: str, groups: list[list[int]] | None = None) -> Shaped[Array, "B S ..."]:
    """Every rank's part, in the order of the ranks, or of the one group that has them all in another."""
    return collectives.all_gather(x, axis, 1, groups)


def gather_in_sequence(order: Order, x: Shaped[Array, "B C ..."], axis: str, ranks: int) -> Shaped[Array, "B S ..."]:
    """Every rank's part, in the sequence's own order: in zigzag's the ranks' first halves, then their second ones the
    other way round, each of which comes so, where putting all of them in order would take several passes over them."""
    if order != "zigzag":
        return in_sequence(order, gather(x, axis), ranks)
    first, second = jnp.split(x, 2, axis=1)
    return jnp.concatenate([gather(first, axis), gather(second, axis, [list(reversed(range(ranks)))])], axis=1)
