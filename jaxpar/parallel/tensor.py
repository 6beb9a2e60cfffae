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

from jaxpar.kernels import fp8
from jaxpar.numerics import widened

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
    return lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) if is_cut else lax.psum(x, AXIS)


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


@jax.custom_vjp
def once(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x, for a product that every rank computes whole: its gradient counts on one rank alone."""
    return x


once.defvjp(
    lambda x: (x, None),
    lambda _, cotangent: (jnp.where(lax.axis_index(AXIS) == 0, cotangent, jnp.zeros((), cotangent.dtype)),),
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


def product(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    fp8_axes: tuple[str, ...] | None = None,
) -> Float[Array, "..."]:
    """einsum(equation, x, weight), summed in at least float32 and rounded to x's dtype once.

    With `fp8_axes` the operands of all three products are rounded to 8-bit floats first, scaled by their largest value
    over these mesh axes, see kernels.fp8.
    """
    return _product(equation, fp8_axes, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation, fp8_axes, x, weight):
    return _einsum(equation, fp8_axes, x, weight)


def _einsum(equation, fp8_axes, x, y, kinds=(fp8.FORWARD, fp8.FORWARD)):
    wide = widened(x.dtype)
    if fp8_axes is None:
        return jnp.einsum(equation, x, y, preferred_element_type=wide).astype(x.dtype)
    (x8, x_scale), (y8, y_scale) = (fp8.quantize(operand, kind, fp8_axes) for operand, kind in zip((x, y), kinds))
    result = jnp.einsum(equation, x8, y8, preferred_element_type=wide)
    return (result * (x_scale * y_scale).astype(wide)).astype(x.dtype)


def _product_forward(equation, fp8_axes, x, weight):
    return _einsum(equation, fp8_axes, x, weight), (x, weight)


def _product_backward(equation, fp8_axes, residuals, cotangent):
    # Written out, since autodiff's weight gradient is a transpose of (cotangent x input), for which the CPU backend
    # has no fast kernel.
    x, weight = residuals
    kinds = fp8.BACKWARD, fp8.FORWARD
    operands, y_dims = equation.split("->")
    x_dims, w_dims = operands.split(",")
    return (
        _einsum(f"{y_dims},{w_dims}->{x_dims}", fp8_axes, cotangent, weight, kinds),
        _einsum(f"{x_dims},{y_dims}->{w_dims}", fp8_axes, x, cotangent, kinds[::-1]),
    )


_product.defvjp(_product_forward, _product_backward)
