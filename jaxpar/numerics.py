"""Choices of dtype that several parts share."""

import jax.numpy as jnp


def widened(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype for sums, norms and softmaxes over values of `dtype`: float32, or float64 where they are that."""
    return jnp.dtype("float64") if jnp.dtype(dtype) == jnp.float64 else jnp.dtype("float32")
