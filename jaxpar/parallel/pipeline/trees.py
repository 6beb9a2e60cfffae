"""What the loops over ticks do with trees of arrays: read and write slots, add, and choose without copies."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.numerics import widened
from jaxpar.parallel.pipeline.program import Branch


def by_chunk(layers: PyTree, num_chunks: int) -> PyTree:
    """Each leaf [C x layers per chunk, ...] as [C, layers per chunk, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(num_chunks, -1, *leaf.shape[1:]), layers)


def at(tree: PyTree, index: Any) -> PyTree:
    """Each leaf's part at an index of its first dim; the only one as it is, uncopied."""

    def one(leaf: Array) -> Array:
        if leaf.shape[0] == 1:
            return leaf[0]
        return lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    return jax.tree.map(one, tree)


def put(buffers: PyTree, values: PyTree, index: Any) -> PyTree:
    """With the values at an index of the first dim."""
    return jax.tree.map(lambda buffer, value: lax.dynamic_update_index_in_dim(buffer, value, index, 0), buffers, values)


def add(totals: PyTree, addends: PyTree) -> PyTree:
    return jax.tree.map(lambda total, addend: total + addend.astype(total.dtype), totals, addends)


def add_at(totals: PyTree, addends: PyTree, index: Any) -> PyTree:
    """To the parts at an index of the first dim; a dict's addends may lack some of its keys."""
    if isinstance(totals, dict):
        return {key: add_at(total, addends[key], index) if key in addends else total for key, total in totals.items()}
    return put(totals, add(at(totals, index), addends), index)


def zeros(tree: PyTree) -> PyTree:
    """Where sums over what is like `tree` start: in at least float32."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, widened(leaf.dtype)), tree)


def when(branch: Branch, condition: Array, change: Callable, *operands: PyTree) -> Any:
    """change(*operands), or the operands; the conditional has the branch's name (see Program.taken).

    XLA takes the first branch to come before the second: only where the first makes nothing new can the second write
    over what both are given.
    """
    with jax.named_scope(branch):
        return lax.cond(~condition, lambda *same: same if len(same) > 1 else same[0], change, *operands)


def summed_in(totals: PyTree, tree: PyTree) -> PyTree:
    """`tree`, whose gradient is `totals`' in its place: what AD adds up over a loop is then in the totals' dtype."""
    return jax.tree.map(lambda total, value: _summed_in(total, value, total.dtype), totals, tree)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _summed_in(total: Float[Array, "..."], value: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    return value


_summed_in.defvjp(
    lambda total, value, dtype: (value, None), lambda dtype, _, cotangent: (cotangent.astype(dtype), None)
)


@jax.custom_vjp
def exchange(
    buffer: Float[Array, "N ..."], value: Float[Array, "..."], slot: Int[Array, ""]
) -> tuple[Float[Array, "..."], Float[Array, "N ..."]]:
    """(what was in the slot, the buffer with the value there); its own transpose."""
    return at(buffer, slot), put(buffer, value, slot)


def _exchange_backward(slot, cotangents):
    taken, buffer = cotangents
    value, buffer = exchange(buffer, taken, slot)
    return buffer, value, None


exchange.defvjp(lambda buffer, value, slot: ((at(buffer, slot), put(buffer, value, slot)), slot), _exchange_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def hop(x: Float[Array, "..."], axis: str, pairs: tuple[tuple[int, int], ...]) -> Float[Array, "..."]:
    """From rank to rank, pairs (from, to); zeros where nothing comes."""
    return lax.ppermute(x, axis, pairs)


hop.defvjp(
    lambda x, axis, pairs: (lax.ppermute(x, axis, pairs), None),
    lambda axis, pairs, _, cotangent: (lax.ppermute(cotangent, axis, [(to, source) for source, to in pairs]),),
)
