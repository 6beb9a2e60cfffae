"""Muon (Jordan et al. 2024; arXiv 2502.16982): the momentum of each matrix, orthogonalized by Newton-Schulz steps.

The steps are products of whole matrices, and a matrix is cut over several devices. So the layers are dealt out: each
mesh axis moves from a matrix's own dims to the layers', by an all-to-all of the device's own shard, and back after.
An axis that does not divide the layers cuts the matrix's longer side, and its products are cut with it: 15 transfers
of the shorter side squared. Axes that hold copies (`data`) share the work as well, for an all-gather of the result.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.parallel.axes import axes_of
from jaxpar.training.optimizers.matrices import Matrix

log = logging.getLogger(__name__)

NUM_STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
RMS = 0.2
"""Of an update, as AdamW's are, so that one learning rate and weight decay serve both (arXiv 2502.16982, sec. 2.2)."""


class MuonState(NamedTuple):
    num_updates: Int[Array, ""]
    mu: PyTree


def scale_by_muon(beta: float, eps: float, matrices: PyTree) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalized, at a root mean square of 0.2; `matrices` says how each parameter is one."""

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        num_updates = state.num_updates + 1
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        ahead = jax.tree.map(
            lambda m, g: beta * m + (1 - beta) * g,
            optax.tree.bias_correction(mu, beta, num_updates + 1),
            optax.tree.bias_correction(grads, beta, num_updates),
        )

        def direction(x: Array, matrix: Matrix) -> Array:
            return RMS * math.sqrt(max(_size(x, matrix.rows), _size(x, matrix.columns))) * orthogonalize(x, matrix, eps)

        return jax.tree.map(direction, ahead, matrices), MuonState(num_updates, mu)

    return optax.GradientTransformation(init, update)


def orthogonalize(x: Float[Array, "..."], matrix: Matrix, eps: float) -> Float[Array, "..."]:
    """Each matrix of a stack with its singular values brought near 1 (within 0.3), of x's own type."""
    dealt = Dealt.of(x, matrix)
    for spec in dealt.specs[1:]:
        x = jax.reshard(x, spec)
    norm = jnp.sqrt(jnp.sum(x * x, matrix.rows + matrix.columns, keepdims=True))
    x = x / (norm + eps)
    for _ in range(NUM_STEPS):
        a, b, c = COEFFICIENTS
        gram = jnp.einsum(dealt.gram, x, x, out_sharding=dealt.by_rows)
        square = jnp.einsum(dealt.square, gram, dealt.gathered(gram), out_sharding=dealt.by_rows)
        polynomial = dealt.gathered(b * gram + c * square)
        x = a * x + jnp.einsum(dealt.product, polynomial, x, out_sharding=dealt.specs[-1])
    for spec in reversed(dealt.specs[:-1]):
        x = jax.reshard(x, spec)
    return x


@dataclass(frozen=True)
class Dealt:
    """How a stack of matrices lies while it is orthogonalized."""

    specs: tuple[P | None, ...]
    """From a parameter's own to the last, one mesh axis moved at a time: that is an all-to-all, while a reshard of
    several at once is compiled to an all-gather of the whole stack."""
    by_rows: P | None
    """Of Gram matrices (the shorter side's), cut by rows as X's longer side is."""
    whole: P | None
    """Of Gram matrices before a product."""
    gram: str
    """einsum's X X^T, where X has the shorter side as rows."""
    square: str
    """Of a Gram matrix."""
    product: str
    """A Gram matrix times X."""

    @classmethod
    def of(cls, x: Array, matrix: Matrix) -> "Dealt":
        """For an array of any sharding, or of none."""
        shorter, longer = sorted((matrix.rows, matrix.columns), key=lambda dims: _size(x, dims))
        num_stacked = x.ndim - len(shorter) - len(longer)
        dims, spare = ascii_lowercase[: x.ndim], ascii_lowercase[x.ndim :]
        stack = dims[:num_stacked]
        s = "".join(dims[dim] for dim in shorter)
        t, u = spare[: len(s)], spare[len(s) : 2 * len(s)]
        other = dims.translate(str.maketrans(s, t))
        equations = (
            f"{dims},{other}->{stack + s + t}",
            f"{stack + s + t},{stack + t + u}->{stack + s + u}",
            f"{stack + s + t},{other}->{dims}",
        )
        sharding = jax.typeof(x).sharding
        if sharding.mesh.empty:
            return cls((None,), None, None, *equations)
        row, column = (max(side, key=lambda dim: x.shape[dim]) for side in (shorter, longer))
        specs = deal(x.shape, num_stacked, sharding.spec, sharding.mesh.shape, column, row)
        parts = specs[-1].partitions
        rows = (parts[column] if dim == row else None for dim in shorter)
        return cls(specs, P(*parts[:num_stacked], *rows), P(*parts[:num_stacked]), *equations)

    def gathered(self, gram: Float[Array, "..."]) -> Float[Array, "..."]:
        return gram if self.whole is None else jax.reshard(gram, self.whole)


def _size(x: Array, dims: tuple[int, ...]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


def deal(
    shape: tuple[int, ...], num_stacked: int, spec: P, mesh_shape: Mapping[str, int], longer: int, shorter: int
) -> tuple[P, ...]:
    """The specs on the way from `spec` to one whose mesh axes cut the stack's dims or, where they do not divide those,
    dim `longer`, whose parts then divide dim `shorter` too; an axis that does neither is left with copies."""
    parts = [list(axes_of(part)) for part in (*spec.partitions, *[None] * (len(shape) - len(spec.partitions)))]
    dims = [longer, *(dim for dim in range(num_stacked, len(shape)) if dim != longer)]
    axes = [axis for dim in dims for axis in reversed(parts[dim])]
    used = {axis for part in parts for axis in part}
    axes += [axis for axis, size in mesh_shape.items() if axis not in used and size > 1]
    specs = [spec]

    def divides(dim: int, axes: list[str]) -> bool:
        return shape[dim] % math.prod(mesh_shape[axis] for axis in axes) == 0

    for axis in axes:
        kept = axis in parts[longer]
        on_longer = parts[longer] if kept else [*parts[longer], axis]
        stacked = next((dim for dim in range(num_stacked) if divides(dim, [*parts[dim], axis])), None)
        if stacked is None and kept and divides(shorter, on_longer):
            continue
        for part in parts:
            if axis in part:
                part.remove(axis)
        if stacked is not None:
            parts[stacked].append(axis)
        elif not kept and divides(longer, on_longer) and divides(shorter, on_longer):
            parts[longer].append(axis)
        else:
            log.info("Muon's matrices of shape %s are orthogonalized on every rank of %s alike", shape, axis)
        specs.append(P(*(tuple(part) or None for part in parts)))
    return tuple(specs)
