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
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.kernels import fp8
from jaxpar.numerics import widened
from jaxpar.parallel import data
from jaxpar.parallel.axes import mesh_axes

AXES = frozenset({"tensor"})


def project(
    equation: str, x: Float[Array, "B S _"], weight: Float[Array, "..."], out: P, is_fp8: bool = False
) -> Float[Array, "..."]:
    """Column-parallel: x, whole over `tensor` and owing its gradient's sum over it, times a weight cut by columns."""
    if not AXES & mesh_axes(jax.typeof(weight).sharding.spec):
        # Every rank computes the whole product, so its share of x's gradient is whole, not an addend.
        out = P(*(None if part == "tensor" else part for part in out.partitions))
        x = jax.reshard(x, P(*jax.typeof(x).sharding.spec.partitions))
    return product(equation, out, x, weight, is_fp8)


def project_back(
    equation: str,
    x: Float[Array, "B S ..."],
    weight: Float[Array, "..."],
    addends: P,
    out: P,
    is_fp8: bool = False,
) -> Float[Array, "B S D"]:
    """Row-parallel: each rank's addend, then the sum over `tensor`, scattered along the sequence where `out` says."""
    return jax.reshard(product(equation, addends, x, weight, is_fp8), out)


def product(
    equation: str, out: P | None, x: Float[Array, "..."], weight: Float[Array, "..."], is_fp8: bool = False
) -> Float[Array, "..."]:
    """einsum(equation, x, weight), summed in at least float32 and rounded to x's dtype once.

    With `is_fp8` the operands of all three products are rounded to 8-bit floats first, see kernels.fp8.
    """
    return _product(equation, out, is_fp8, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(equation, out, is_fp8, x, weight):
    return _einsum(equation, out, is_fp8, x, weight)


def _einsum(equation, out, is_fp8, x, y, kinds=(fp8.FORWARD, fp8.FORWARD)):
    wide = widened(x.dtype)
    if not is_fp8:
        return jnp.einsum(equation, x, y, out_sharding=out, preferred_element_type=wide).astype(x.dtype)
    (x8, x_scale), (y8, y_scale) = map(fp8.quantize, (x, y), kinds)
    result = jnp.einsum(equation, x8, y8, out_sharding=out, preferred_element_type=wide)
    return data.times(result, x_scale * y_scale).astype(x.dtype)


def _product_forward(equation, out, is_fp8, x, weight):
    return _einsum(equation, out, is_fp8, x, weight), (x, weight)


def _product_backward(equation, out, is_fp8, residuals, cotangent):
    # Written out, since autodiff's weight gradient is a transpose of (cotangent x input), for which the CPU backend
    # has no fast kernel.
    x, weight = residuals
    kinds = fp8.BACKWARD, fp8.FORWARD
    operands, y_dims = equation.split("->")
    x_dims, w_dims = operands.split(",")
    return (
        _einsum(f"{y_dims},{w_dims}->{x_dims}", out and _cotangent_spec(x), is_fp8, cotangent, weight, kinds),
        _einsum(f"{x_dims},{y_dims}->{w_dims}", out and _cotangent_spec(weight), is_fp8, x, cotangent, kinds[::-1]),
    )


def _cotangent_spec(x):
    spec = jax.typeof(x).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)


_product.defvjp(_product_forward, _product_backward)
