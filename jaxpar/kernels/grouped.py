"""Grouped matmul: rows in consecutive groups of any sizes, each group times a matrix of its own.

`jax.lax.ragged_dot` is a grouped product on TPUs but for its weight gradient, and nowhere else: elsewhere it multiplies
all rows by all matrices. So on TPUs the weight gradient is Megablox's (arXiv 2211.15841 is the idea's), on NVIDIA GPUs
all three products are the Pallas kernels here.

A tile of rows that holds several groups is done once for each, with the others' rows masked: R rows in G groups take at
most R / tile + G - 1 tiles, whatever the groups' sizes; rows that follow the last group take none.
"""

import functools
import logging
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxpar.numerics import widened

log = logging.getLogger(__name__)

Kernel = Literal["dense", "tpu", "triton"]
"""dense: plain JAX, correct on every backend, as many times the FLOPs as there are groups."""
_OF_PLATFORM: dict[str, Kernel] = {"gpu": "triton", "tpu": "tpu"}

ROWS, COLUMNS, DEPTH = 128, 128, 64
"""Most of a tile on GPUs: rows and columns of the result, and what is summed over in one step."""
LANES = 128
LEAST = 16
"""Of a tile's sides, for a GPU's matrix units."""


def choose(platform: str, dtype: jnp.dtype, dims: tuple[int, ...]) -> Kernel:
    """The platform's own kernel where it can multiply matrices of these dims, else `dense`, which the log says."""
    kernel = _OF_PLATFORM.get(platform, "dense")
    least = {"dense": 1, "tpu": LANES, "triton": LEAST}[kernel]
    limit = None
    if kernel != "dense" and dtype.itemsize > 4:
        limit = f"it takes floats of up to 32 bits, not {dtype}"
    elif odd := [dim for dim in dims if dim % least]:
        limit = f"it takes dims of a multiple of {least}, not {odd[0]}"
    _log_choice(kernel, limit)
    return kernel if limit is None else "dense"


@functools.cache
def _log_choice(kernel: Kernel, limit: str | None) -> None:
    log.info("grouped matmul: %s", kernel if limit is None else f"dense, not {kernel}: {limit}")


def product(
    kernel: Kernel, rows: Float[Array, "R D"], matrices: Float[Array, "G D F"], sizes: Int[Array, " G"]
) -> Float[Array, "R F"]:
    """Row i times the matrix of the group that it is in, summed in at least float32 and rounded to rows' dtype once.

    Rows after sum(sizes) give 0, whatever they hold.
    """
    return _product(kernel, False, rows, matrices, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(kernel, interpret, rows, matrices, sizes):
    return _times(kernel, interpret, rows, matrices, sizes, False)


def _forward(kernel, interpret, rows, matrices, sizes):
    return _times(kernel, interpret, rows, matrices, sizes, False), (rows, matrices, sizes)


def _backward(kernel, interpret, residuals, cotangent):
    rows, matrices, sizes = residuals
    return (
        _times(kernel, interpret, cotangent, matrices, sizes, True),
        _outer(kernel, interpret, rows, cotangent, sizes).astype(matrices.dtype),
        None,
    )


_product.defvjp(_forward, _backward)


def _times(kernel, interpret, rows, matrices, sizes, is_transposed):
    """rows [R, D] by matrices [G, D, F], or [G, F, D] where transposed."""
    if kernel == "triton":
        out = _times_on_gpu(rows, matrices, sizes, is_transposed, interpret)
    else:
        contracted = ((1,), (2 if is_transposed else 1,)), ((), ())
        dims = lax.RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
        wide = widened(rows.dtype)
        out = lax.ragged_dot_general(rows, matrices, sizes, dims, preferred_element_type=wide).astype(rows.dtype)
    return jnp.where(_in_groups(rows, sizes), out, jnp.zeros((), out.dtype))


def _outer(kernel, interpret, rows, cotangent, sizes):
    """[G, D, F]: of each group the sum of its rows' outer products, in at least float32."""
    if kernel == "triton":
        return _outer_on_gpu(rows, cotangent, sizes, interpret)
    # Rows of no group may hold anything, and a product with 0 would keep a NaN.
    rows, cotangent = (jnp.where(_in_groups(x, sizes), x, jnp.zeros((), x.dtype)) for x in (rows, cotangent))
    wide = widened(rows.dtype)
    if kernel == "tpu":
        return _outer_on_tpu(rows, cotangent, sizes, interpret)
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
    return lax.ragged_dot_general(rows, cotangent, sizes, dims, preferred_element_type=wide)


def _in_groups(rows, sizes):
    return (jnp.arange(rows.shape[0], dtype=sizes.dtype) < jnp.sum(sizes, dtype=sizes.dtype))[:, None]


# TPUs ----------------------------------------------------------------------------------------------------------------


def _outer_on_tpu(rows, cotangent, sizes, interpret):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # it logs when it is imported where no TPU is

    short = -rows.shape[0] % LANES
    rows, cotangent = (jnp.pad(x, ((0, short), (0, 0))) for x in (rows, cotangent))
    tiling = LANES, *(block(x.shape[1], 512) for x in (rows, cotangent))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # it counts on both
        out = tgmm(rows.T, cotangent, sizes, widened(rows.dtype), tiling, interpret=interpret)
    # The matrix of an empty group is never written.
    return jnp.where((sizes > 0)[:, None, None], out, jnp.zeros((), out.dtype))


# GPUs ----------------------------------------------------------------------------------------------------------------


def block(size: int, most: int) -> int:
    """The largest power of two, `most` at the most, that divides a dim."""
    return min(most, size & -size)


def visits(sizes: Int[Array, " G"], num_rows: int, tile: int) -> tuple[Int[Array, " V"], Int[Array, " V"]]:
    """(group, tile of rows) of each tile to be done; the group is G for those that are not needed."""
    ends = jnp.cumsum(sizes, dtype=sizes.dtype)
    first = (ends - sizes) // tile
    counts = jnp.where(sizes > 0, (ends + tile - 1) // tile - first, 0)
    until = jnp.cumsum(counts, dtype=sizes.dtype)
    visit = jnp.arange(-(-num_rows // tile) + sizes.shape[0] - 1, dtype=sizes.dtype)
    group = jnp.searchsorted(until, visit, side="right").astype(sizes.dtype)
    at = jnp.minimum(group, sizes.shape[0] - 1)
    return group, first[at] + visit - (until - counts)[at]


def _times_on_gpu(rows, matrices, sizes, is_transposed, interpret):
    num_rows, depth = rows.shape
    columns = matrices.shape[1 if is_transposed else 2]
    tile, wide, step = ROWS, block(columns, COLUMNS), block(depth, DEPTH)
    group, at = visits(sizes, num_rows, tile)
    ends = jnp.cumsum(sizes, dtype=sizes.dtype)
    starts = ends - sizes
    accumulated = widened(rows.dtype)

    def kernel(group_ref, at_ref, start_ref, end_ref, rows_ref, matrices_ref, out_ref):
        visit, column = pl.program_id(0), pl.program_id(1) * wide
        group = group_ref[visit]

        @pl.when(group < matrices.shape[0])
        def _():
            first = at_ref[visit] * tile
            row = first + jnp.arange(tile, dtype=jnp.int32)
            inside = ((row >= start_ref[group]) & (row < end_ref[group]))[:, None]

            def add(i, total):
                summed = pl.ds(i * step, step)
                x = triton.load(rows_ref.at[pl.ds(first, tile), summed], mask=inside, other=0.0)
                if is_transposed:
                    w = triton.load(matrices_ref.at[group, pl.ds(column, wide), summed]).T
                else:
                    w = triton.load(matrices_ref.at[group, summed, pl.ds(column, wide)])
                return total + triton.dot(x, w).astype(accumulated)

            total = lax.fori_loop(0, depth // step, add, jnp.zeros((tile, wide), accumulated))
            triton.store(out_ref.at[pl.ds(first, tile), pl.ds(column, wide)], total.astype(rows.dtype), mask=inside)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_rows, columns), rows.dtype),
        grid=(group.shape[0], columns // wide),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="grouped_product",
    )(group, at, starts, ends, rows, matrices)


def _outer_on_gpu(rows, cotangent, sizes, interpret):
    depth, columns = rows.shape[1], cotangent.shape[1]
    deep, wide, step = block(depth, ROWS), block(columns, COLUMNS), DEPTH
    ends = jnp.cumsum(sizes, dtype=sizes.dtype)
    starts = ends - sizes
    accumulated = widened(rows.dtype)

    def kernel(start_ref, end_ref, rows_ref, cotangent_ref, out_ref):
        group, i, j = (pl.program_id(dim) for dim in range(3))
        start, end = start_ref[group], end_ref[group]

        def add(at, total):
            row = at * step + jnp.arange(step, dtype=jnp.int32)
            inside = ((row >= start) & (row < end))[:, None]
            at_rows = pl.ds(at * step, step)
            x = triton.load(rows_ref.at[at_rows, pl.ds(i * deep, deep)], mask=inside, other=0.0)
            dy = triton.load(cotangent_ref.at[at_rows, pl.ds(j * wide, wide)], mask=inside, other=0.0)
            return total + triton.dot(x.T, dy).astype(accumulated)

        zeros = jnp.zeros((deep, wide), accumulated)
        total = lax.fori_loop(start // step, (end + step - 1) // step, add, zeros)
        triton.store(out_ref.at[group, pl.ds(i * deep, deep), pl.ds(j * wide, wide)], total)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((sizes.shape[0], depth, columns), accumulated),
        grid=(sizes.shape[0], depth // deep, columns // wide),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="grouped_outer",
    )(starts, ends, rows, cotangent)
