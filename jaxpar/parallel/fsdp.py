"""Fully sharded data parallelism (ZeRO-3: arXiv 1910.02054; PyTorch FSDP: arXiv 2304.11277).

Splits: every kernel's `embed` dim over (expert, context, fsdp), n ranks; the batch lies over the same axes.
Collectives per step, in bytes of the whole weight W of a tensor rank (a ring moves (n - 1) / n of it):
    all-gather      W x compute dtype, per microbatch: in the forward pass and again in the backward pass
                    (`reshard_after_forward`), or once
    reduce-scatter  W x reduction dtype, per microbatch
On TPUs a reduce-scatter goes along one dimension of the torus after another (`Folds`), which moves as much: of one over
a whole slice their compiler makes an all-reduce, of which each rank keeps a part. Over a torus of three dimensions it
makes one of an all-gather, too, which then goes along the nearest ranks first, and along two dimensions at once.
An expert's kernel is cut over (context, fsdp), and gathered over those alone: `expert` cuts the experts.
Limits: an embed dim that the axes do not divide is not cut over them; its gradient is then summed once a step.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.parallel.axes import TOKEN_AXES

GATHERED = "gathered_weight"

Cuts = tuple[tuple[int, tuple[str, ...]], ...]
"""Which dims of an array are cut over which mesh axes, in the order in which they are gathered."""
_MOST_AT_ONCE = 2
"""Dimensions of a torus that TPUs gather along at once."""
Folds = tuple[tuple[str, tuple[int, ...]], ...]
"""Mesh axes whose ranks lie along several dimensions of a torus, with their lengths, slowest first."""


def gather(
    weight: Float[Array, "..."], cuts: Cuts, compute_dtype: jnp.dtype, reduce_dtype: jnp.dtype, folds: Folds = ()
) -> Float[Array, "..."]:
    """The weight in compute dtype, whole over the axes in `cuts`. Its gradient comes reduced to this rank's part, in
    `reduce_dtype`; the sum over further axes is left to the end of the step."""
    return _gather(weight, cuts, weight.dtype, compute_dtype, reduce_dtype, folds)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _gather(weight, cuts, dtype, compute_dtype, reduce_dtype, folds):
    return gathered(weight, cuts, compute_dtype, folds)


def gathered(
    weight: Float[Array, "..."], cuts: Cuts, compute_dtype: jnp.dtype, folds: Folds = ()
) -> Float[Array, "..."]:
    """Likewise, for what is not differentiated."""
    weight = weight.astype(compute_dtype)
    lengths = {axis: factors for axis, factors in folds if len(factors) > _MOST_AT_ONCE}
    for dim, axes in cuts:
        if not any(axis in lengths for axis in axes):
            weight = lax.all_gather(weight, axes, axis=dim, tiled=True)
            continue
        for axis in reversed(axes):
            *slow, fastest = lengths.get(axis, (1,))
            for groups in reversed(_steps((math.prod(slow), fastest) if slow else ())):
                weight = lax.all_gather(weight, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return checkpoint_name(weight, GATHERED)


def _forward(weight, cuts, dtype, compute_dtype, reduce_dtype, folds):
    # Not _gather itself: a remat policy must see the gather, and does not see into a custom_vjp's primal.
    return gathered(weight, cuts, compute_dtype, folds), None


def _backward(cuts, dtype, compute_dtype, reduce_dtype, folds, _, cotangent):
    return (reduce_scatter(cotangent.astype(reduce_dtype), cuts, folds).astype(dtype),)


_gather.defvjp(_forward, _backward)


def reduce_scatter(addends: Float[Array, "..."], cuts: Cuts, folds: Folds = ()) -> Float[Array, "..."]:
    """This rank's part of the sum over the ranks: what was gathered last is cut first."""
    sizes = dict(folds)
    for dim, axes in reversed(cuts):
        if not any(axis in sizes for axis in axes):
            addends = lax.psum_scatter(addends, axes, scatter_dimension=dim, tiled=True)
            continue
        for axis in axes:
            for groups in _steps(sizes.get(axis, ())):
                addends = lax.psum_scatter(addends, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return addends


def _steps(factors: tuple[int, ...]) -> list[list[list[int]] | None]:
    """The groups of ranks of each step: those whose places along the axis differ in one digit, the slowest first."""
    if len(factors) < 2:
        return [None]
    ranks = np.arange(math.prod(factors)).reshape(factors)
    return [np.moveaxis(ranks, digit, -1).reshape(-1, size).tolist() for digit, size in enumerate(factors)]


def save_all_but_gathered(primitive, *inputs, **params) -> bool:
    """A `jax.checkpoint` policy. Both ends of a gather are refused: the name, and the all-gather that it names, told
    by its axes (from one of K and V by a weight's fewer dims, from one of tokens by being tiled)."""
    if primitive.name == "name":
        return params["name"] != GATHERED
    is_weights = primitive.name == "all_gather" and params["tiled"] and inputs[0].ndim < 4
    return not (is_weights and TOKEN_AXES & {*params["axis_name"]})
