"""8-bit floats for matmuls (arXiv 2209.05433): one scale per tensor, of its own largest value."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
"""Values get more digits, gradients more range."""


def quantize(x: Float[Array, "..."], dtype: jnp.dtype) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """(x / scale rounded to `dtype`, scale), the scale bringing the largest value of the whole tensor, over all its
    shards, to the format's largest."""
    spec = jax.typeof(x).sharding.spec
    plain = jax.reshard(x, P(*spec.partitions)) if spec.reduced else x
    wide = plain.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide))
    limit = float(jnp.finfo(dtype).max)
    scale = jnp.where(largest > 0, largest / limit, jnp.float32(1.0))
    rounded = (wide / scale).astype(dtype)
    return (jax.reshard(rounded, spec) if spec.reduced else rounded), scale
