"""Random bits that depend on nothing but numbers: the same on every mesh, and in whatever order they are drawn."""

import jax.numpy as jnp
from jaxtyping import Array, UInt32


def mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A permutation of the 32-bit integers in which every bit depends on all (MurmurHash3's finaliser, Appleby)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
