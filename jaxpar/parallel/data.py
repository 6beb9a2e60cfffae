"""Data parallelism: gradients stay addends until the step's last microbatch, then are summed once.

Splits: the batch over `data`, n ranks, every parameter whole on each (or cut over other axes: HSDP, arXiv 2304.11277).
Collectives per step, however many microbatches: one all-reduce of each rank's gradients, G bytes in reduction dtype (a
ring moves 2 (n - 1) / n of it). Vectors (norms, biases) owe their sum over every axis that tokens are cut over,
`tensor` too under sequence parallelism, and pay it here.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpar.numerics import widened


def settle(gradient: Float[Array, "..."], axes: tuple[str, ...], reduce_dtype: jnp.dtype) -> Float[Array, "..."]:
    """The sum of the ranks' addends over `axes`."""
    return lax.psum(gradient.astype(reduce_dtype), axes) if axes else gradient


@jax.custom_vjp
def scale(x: Float[Array, "B S ..."], vector: Float[Array, "..."]) -> Float[Array, "B S ..."]:
    """x * vector, broadcast over x's first dims. The vector's gradient is summed over this rank's tokens, in at least
    float32."""
    return x * _broadcastable(x, vector)


def _scale_forward(x, vector):
    return scale(x, vector), (x, vector)


def _scale_backward(residuals, cotangent):
    x, vector = residuals
    return cotangent * _broadcastable(x, vector), _sum_to(cotangent * x, vector)


scale.defvjp(_scale_forward, _scale_backward)


@jax.custom_vjp
def shift(x: Float[Array, "B S ..."], vector: Float[Array, "..."]) -> Float[Array, "B S ..."]:
    """x + vector, likewise."""
    return x + _broadcastable(x, vector)


def _shift_forward(x, vector):
    return shift(x, vector), vector


def _shift_backward(vector, cotangent):
    return cotangent, _sum_to(cotangent, vector)


shift.defvjp(_shift_forward, _shift_backward)


def _broadcastable(x, vector):
    return lax.expand_dims(vector.astype(x.dtype), range(x.ndim - vector.ndim))


def _sum_to(cotangent, vector):
    dims = tuple(range(cotangent.ndim - vector.ndim))
    return lax.reduce_sum(cotangent.astype(widened(vector.dtype)), dims).astype(vector.dtype)
