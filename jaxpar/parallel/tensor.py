"""Tensor and sequence parallelism (Megatron-LM: arXiv 1909.08053 §3; sequence parallel: arXiv 2205.05198 §4.2).

Splits: heads and mlp over `tensor`, t ranks: the first matmul of a half block by columns, the second by rows, so that
only the second one's result is a sum over `tensor`. The residual stream between them is cut along the sequence
(sequence parallelism) or whole on every rank.
Collectives per layer and microbatch, in bytes of one activation A = B x S x D of a rank, in compute dtype:
    forward         2 all-reduces of A;    under sequence parallelism 2 all-gathers and 2 reduce-scatters
    backward        the same
    full remat      1 more all-reduce;     2 all-gathers and 1 reduce-scatter (the last sum is not needed again)
Under sequence parallelism the backward pass gathers the row-parallel outputs' cotangents and reduce-scatters the
column-parallel inputs'; gathered inputs are residuals unless remat recomputes them.
Limits: heads and mlp must be multiples of t. Kv heads need not: their kernels are then whole on every rank.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpar.parallel import collectives

AXIS = "tensor"


# Each is the other's transpose; AD through the collectives themselves would sum a second time what is one sum.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: Float[Array, "B S_ D"], is_cut: bool) -> Float[Array, "B S D"]:
    """From the residual stream (`is_cut` along the sequence, or whole) to the input of column-parallel weights, whose
    gradient is a sum over the ranks."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True) if is_cut else x


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(x: Float[Array, "B S D"], is_cut: bool) -> Float[Array, "B S_ D"]:
    """From the ranks' addends, of row-parallel weights, to the residual stream."""
    return collectives.reduce_scatter(x, AXIS, 1) if is_cut else lax.psum(x, AXIS)


enter.defvjp(
    lambda x, is_cut: (enter.fun(x, is_cut), None),
    lambda is_cut, _, cotangent: (leave.fun(cotangent, is_cut),),
)
leave.defvjp(
    lambda x, is_cut: (leave.fun(x, is_cut), None),
    lambda is_cut, _, cotangent: (enter.fun(cotangent, is_cut),),
)


@jax.custom_vjp
def total(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The ranks' sum, for what each does with it of its own: their gradients are addends."""
    return lax.psum(x, AXIS)


total.defvjp(
    lambda x: (total.fun(x), None),
    lambda _, cotangent: (total.fun(cotangent),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def once(x: Float[Array, "..."], axis: str) -> Float[Array, "..."]:
    """x, which every rank of an axis computes whole, or uses so: its gradient counts on one rank alone."""
    return x


once.defvjp(
    lambda x, axis: (x, None),
    lambda axis, _, cotangent: (jnp.where(lax.axis_index(axis) == 0, cotangent, jnp.zeros((), cotangent.dtype)),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def own_heads(x: Float[Array, "B S G K"], num_heads: int, heads_per_rank: int) -> Float[Array, "B S g K"]:
    """This rank's of `num_heads` kv heads, which are whole on every rank, repeated to `heads_per_rank` on each.
    Backward: the sum over the ranks."""
    return x[:, :, _own_heads(num_heads, heads_per_rank)]


def _own_heads(num_heads, heads_per_rank):
    repeats = heads_per_rank * lax.axis_size(AXIS) // num_heads
    return (lax.axis_index(AXIS) * heads_per_rank + jnp.arange(heads_per_rank, dtype=jnp.int32)) // repeats


def _own_heads_backward(num_heads, heads_per_rank, _, cotangent):
    zeros = jnp.zeros((*cotangent.shape[:2], num_heads, cotangent.shape[3]), cotangent.dtype)
    return (lax.psum(zeros.at[:, :, _own_heads(num_heads, heads_per_rank)].add(cotangent), AXIS),)


own_heads.defvjp(
    lambda x, num_heads, heads_per_rank: (own_heads.fun(x, num_heads, heads_per_rank), None), _own_heads_backward
)
