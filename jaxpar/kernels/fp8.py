"""8-bit floats for matmuls (arXiv 2209.05433): one scale per tensor, of its own largest value."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
"""Values get more digits, gradients more range."""


def quantize(
    x: Float[Array, "..."], dtype: jnp.dtype, axes: tuple[str, ...] = ()
) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """(x / scale rounded to `dtype`, scale), the scale bringing the largest value of the whole tensor, over all its
    parts on these mesh axes, to the format's largest."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide))
    if axes:
        largest = lax.pmax(largest, axes)
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(dtype).max), jnp.float32(1.0))
    return (wide / scale).astype(dtype), scale
