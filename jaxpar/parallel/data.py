"""Data parallelism: gradients stay addends until the step's last microbatch, then are summed once.

Splits: the batch over `data`, n ranks, every parameter whole on each (or cut over other axes: HSDP, arXiv 2304.11277).
Collectives per step, however many microbatches: one all-reduce of each rank's gradients, G bytes in the dtype that
they are accumulated in (a ring moves 2 (n - 1) / n of it). Vectors (norms, biases) owe their sum over every axis that
tokens are cut over, `tensor` too under sequence parallelism, and pay it here.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.numerics import widened
from jaxpar.parallel.axes import axes_of


def owe(weight: Float[Array, "..."], axes: frozenset[str]) -> Float[Array, "..."]:
    """The same weight, typed so that its gradient comes as addends over `axes`. No traffic."""
    return jax.reshard(weight, P(*jax.typeof(weight).sharding.spec.partitions, reduced=axes))


def zeros_owed(weight: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Zeros with the type of the gradient of a weight that `owe` typed."""
    spec = jax.typeof(weight).sharding.spec
    out = P(*spec.partitions, unreduced=spec.reduced) if spec.reduced else None
    return jnp.zeros(weight.shape, dtype, out_sharding=out) if out else jnp.zeros_like(weight, dtype=dtype)


def times(x: Float[Array, "..."], factor: Float[Array, ""]) -> Float[Array, "..."]:
    """x * factor, where x may be addends."""
    owed = jax.typeof(x).sharding.spec.unreduced
    factor = factor.astype(x.dtype)
    return x * (jax.reshard(factor, P(reduced=owed)) if owed else factor)


def settle(gradient: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sum the addends: an all-reduce over the axes that the gradient's type still owes."""
    return jax.reshard(gradient, P(*jax.typeof(gradient).sharding.spec.partitions))


@jax.custom_vjp
def scale(x: Float[Array, "B S ..."], vector: Float[Array, "..."]) -> Float[Array, "B S ..."]:
    """x * vector, broadcast over x's first dims."""
    return x * _broadcastable(x, vector)


def _scale_forward(x, vector):
    return scale(x, vector), (x, vector)


def _scale_backward(residuals, cotangent):
    x, vector = residuals
    return cotangent * _broadcastable(x, vector), _sum_to(cotangent * x, vector)


scale.defvjp(_scale_forward, _scale_backward)


@jax.custom_vjp
def shift(x: Float[Array, "B S ..."], vector: Float[Array, "..."]) -> Float[Array, "B S ..."]:
    """x + vector, broadcast over x's first dims."""
    return x + _broadcastable(x, vector)


def _shift_forward(x, vector):
    return shift(x, vector), vector


def _shift_backward(vector, cotangent):
    return cotangent, _sum_to(cotangent, vector)


shift.defvjp(_shift_forward, _shift_backward)


def _broadcastable(x, vector):
    spec = jax.typeof(vector).sharding.spec
    plain = jax.reshard(vector, P(*spec.partitions)) if spec.reduced else vector
    return lax.expand_dims(plain.astype(x.dtype), range(x.ndim - vector.ndim))


def _sum_to(cotangent, vector):
    """The gradient of a broadcast vector: a local sum, left as addends over the axes that the vector owes."""
    dims = tuple(range(cotangent.ndim - vector.ndim))
    spec = jax.typeof(vector).sharding.spec
    if not spec.reduced:
        return lax.reduce_sum(cotangent.astype(widened(vector.dtype)), dims).astype(vector.dtype)
    cut = jax.typeof(cotangent).sharding.spec
    axes = tuple(axis for partition in cut.partitions for axis in axes_of(partition) if axis in spec.reduced)
    # In a manual region: outside, the compiler may sum a copy of the cotangent that it has gathered for another
    # use, and every rank's addend is then the whole sum.
    stacked = jax.shard_map(
        lambda local: lax.reduce_sum(local.astype(widened(vector.dtype)), dims)[None].astype(vector.dtype),
        in_specs=P(*cut.partitions),
        out_specs=P(axes, *spec.partitions),
        check_vma=False,
    )(cotangent)
    # Where an owed axis does not cut the cotangent (kv heads whole on every rank), the sum counts on one rank alone.
    return jax.reshard(addends(stacked, P(*spec.partitions)), P(*spec.partitions, unreduced=spec.reduced))


def addends(stacked: Float[Array, "N ..."], spec: P) -> Float[Array, "..."]:
    """An array of each rank's addend [N, ...], cut over its first dim, typed as their sum that is still owed."""
    axes = frozenset(axes_of(jax.typeof(stacked).sharding.spec.partitions[0]))
    return lax.reduce_sum(stacked, (0,), out_sharding=P(*spec.partitions, unreduced=axes))
