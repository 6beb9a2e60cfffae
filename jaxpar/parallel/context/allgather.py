"""All-gather attention (Llama 3, arXiv 2407.21783, section 3.3.2): each rank gathers all keys and values.

Splits: the sequence over n ranks; queries stay, keys and values are whole on every rank while a layer attends.
Collectives per layer and microbatch, with |K|, |V| a rank's own: all-gather of n (|K| + |V|) forward, reduce-scatter of
as much back. It may stand in a branch of a pipeline schedule, and any mask costs the same.
Limits: memory of a layer's whole K and V, small where there are few kv heads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxpar.parallel.context.order import Order, in_sequence


def gather(x: Shaped[Array, "B C ..."], axis: str) -> Shaped[Array, "B S ..."]:
    """Every rank's part, in the order of the ranks."""
    return lax.all_gather(x, axis, axis=1, tiled=True)


def gather_in_sequence(order: Order, x: Float[Array, "B G C K"], axis: str, ranks: int) -> Float[Array, "B G S K"]:
    """Every rank's part, in the sequence's own order: in zigzag's the ranks' first halves, then their second ones the
    other way round, each of which comes so, where putting all in order takes several passes over it."""
    forwards = tuple(range(ranks))
    if order != "zigzag":
        return in_sequence(order, _gather(x, axis, forwards), ranks, 2)
    first, second = jnp.split(x, 2, axis=2)
    return jnp.concatenate([_gather(first, axis, forwards), _gather(second, axis, forwards[::-1])], axis=2)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x, axis, order):
    """Of the ranks in this order, along dim 2."""
    return lax.all_gather(x, axis, axis=2, tiled=True, axis_index_groups=[list(order)])


def _gather_forward(x, axis, order):
    return _gather(x, axis, order), None


def _gather_backward(axis, order, _, cotangent):
    # The ranks' parts side by side: of a reduce-scatter within heads TPUs' compiler makes an all-reduce.
    batch, heads, _, width = cotangent.shape
    parts = jnp.moveaxis(cotangent.reshape(batch, heads, len(order), -1, width), 2, 0)
    return (lax.psum_scatter(parts, axis, axis_index_groups=[list(order)]),)


_gather.defvjp(_gather_forward, _gather_backward)
