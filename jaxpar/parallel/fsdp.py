"""Fully sharded data parallelism (ZeRO-3: arXiv 1910.02054; PyTorch FSDP: arXiv 2304.11277).

Splits: every kernel's `embed` dim over (expert, context, fsdp), n ranks; the batch lies over the same axes.
Collectives per step, in bytes of the whole weight W of a tensor rank (a ring moves (n - 1) / n of it):
    all-gather      W x compute dtype, per microbatch: in the forward pass and again in the backward pass
                    (`reshard_after_forward`), or once
    reduce-scatter  W x reduction dtype, per microbatch
On TPUs a reduce-scatter goes along one dimension of the torus after another (`Folds`), which moves as much: of one over
a whole slice their compiler makes an all-reduce, of which each rank keeps a part. So it does of an all-gather along
three dimensions, which goes in two steps.
An expert's kernel is cut over (context, fsdp), and gathered over those alone: `expert` cuts the experts.
Limits: an embed dim that the axes do not divide is not cut over them; its gradient is then summed once a step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.parallel import collectives
from jaxpar.parallel.axes import TOKEN_AXES

GATHERED = "gathered_weight"
LANES = 128
"""Of a row of a TPU's memory."""

Cuts = tuple[tuple[int, tuple[str, ...]], ...]
"""Which dims of an array are cut over which mesh axes, in the order in which they are gathered."""


class Step(NamedTuple):
    """Of a collective that goes in several."""

    axes: tuple[str, ...]
    factors: tuple[int, ...] = ()
    """Of the one axis's size, slowest first; none where all of its ranks meet."""
    digit: int = 0
    """Those meet whose places along it differ in this digit alone."""

    @property
    def groups(self) -> list[list[int]] | None:
        if len(self.factors) < 2:
            return None
        ranks = np.arange(math.prod(self.factors)).reshape(self.factors)
        return np.moveaxis(ranks, self.digit, -1).reshape(-1, self.factors[self.digit]).tolist()

    def num_ranks(self, sizes: Mapping[str, int]) -> int:
        """That meet, on a mesh of these sizes."""
        return self.factors[self.digit] if self.factors else math.prod(sizes[axis] for axis in self.axes)


@dataclass(frozen=True)
class Folds:
    """How the torus of a TPU slice has collectives go in steps; by default they go in one."""

    factors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Mesh axes that a reduce-scatter takes in steps, with the steps' sizes, slowest first."""
    wide: frozenset[frozenset[str]] = frozenset()
    """Sets of axes that a gather takes in steps."""

    def scatters(self, axes: tuple[str, ...]) -> list[Step]:
        """In order."""
        factors = dict(self.factors)
        if not any(axis in factors for axis in axes):
            return [Step(axes)]
        return [
            Step((axis,), own, digit)
            for axis in axes
            for own in [factors.get(axis, ())]
            for digit in range(max(1, len(own)))
        ]

    def gathers(self, axes: tuple[str, ...]) -> list[Step]:
        """In order: the least first."""
        if frozenset(axes) not in self.wide:
            return [Step(axes)]
        if len(axes) > 1:
            return [*self.gathers(axes[-1:]), *self.gathers(axes[:-1])]
        *slow, fast = dict(self.factors)[axes[0]]
        return [Step(axes, (math.prod(slow), fast), digit) for digit in (1, 0)] if slow else [Step(axes)]


IN_ONE = Folds()


def gather(
    weight: Float[Array, "..."], cuts: Cuts, compute_dtype: jnp.dtype, reduce_dtype: jnp.dtype, folds: Folds = IN_ONE
) -> Float[Array, "..."]:
    """The weight in compute dtype, whole over the axes in `cuts`. Its gradient comes reduced to this rank's part, in
    `reduce_dtype`; the sum over further axes is left to the end of the step."""
    return _gather(weight, cuts, weight.dtype, compute_dtype, reduce_dtype, folds)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _gather(weight, cuts, dtype, compute_dtype, reduce_dtype, folds):
    return gathered(weight, cuts, compute_dtype, folds)


def gathered(
    weight: Float[Array, "..."], cuts: Cuts, compute_dtype: jnp.dtype, folds: Folds = IN_ONE
) -> Float[Array, "..."]:
    """Likewise, for what is not differentiated."""
    weight = weight.astype(compute_dtype)
    for dim, axes in cuts:
        for step in folds.gathers(axes):
            weight = lax.all_gather(weight, step.axes, axis=dim, tiled=True, axis_index_groups=step.groups)
    return checkpoint_name(weight, GATHERED)


def _forward(weight, cuts, dtype, compute_dtype, reduce_dtype, folds):
    # Not _gather itself: a remat policy must see the gather, and does not see into a custom_vjp's primal.
    return gathered(weight, cuts, compute_dtype, folds), None


def _backward(cuts, dtype, compute_dtype, reduce_dtype, folds, _, cotangent):
    return (reduce_scatter(cotangent.astype(reduce_dtype), cuts, folds).astype(dtype),)


_gather.defvjp(_forward, _backward)


def reduce_scatter(addends: Float[Array, "..."], cuts: Cuts, folds: Folds = IN_ONE) -> Float[Array, "..."]:
    """This rank's part of the sum over the ranks: what was gathered last is cut first."""
    for dim, axes in reversed(cuts):
        for step in folds.scatters(axes):
            if folds == IN_ONE:
                addends = lax.psum_scatter(addends, step.axes, scatter_dimension=dim, tiled=True)
            else:
                addends = _scatter_on_torus(addends, step, dim)
    return addends


def _scatter_on_torus(x: Float[Array, "..."], step: Step, dim: int) -> Float[Array, "..."]:
    """One step, of an array in a form of which TPUs' compiler makes no all-reduce and a slice: which it does within a
    stack, before two dims more, and where a part is less than a row of the memory."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if math.prod(before) > 1 and len(after) > 1:
        x = x.reshape(*before, x.shape[dim], -1)
    num_ranks = len(step.groups[0]) if step.groups else lax.axis_size(step.axes)
    if dim == x.ndim - 1 == 1 and x.shape[1] // num_ranks % LANES:
        return collectives.reduce_scatter(x.T, step.axes, 0, step.groups).T
    return collectives.reduce_scatter(x, step.axes, dim, step.groups).reshape(*before, -1, *after)


def save_all_but_gathered(primitive, *inputs, **params) -> bool:
    """A `jax.checkpoint` policy. Both ends of a gather are refused: the name, and the all-gather that it names, told
    by its axes (from one of K and V by a weight's fewer dims, from one of tokens by being tiled)."""
    if primitive.name == "name":
        return params["name"] != GATHERED
    is_weights = primitive.name == "all_gather" and params["tiled"] and inputs[0].ndim < 4
    return not (is_weights and TOKEN_AXES & {*params["axis_name"]})
