"""Attention by cuDNN's fused kernels, on NVIDIA GPUs: a whole causal sequence in its own order, without documents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.kernels.mask import AttentionMask

MAX_HEAD_DIM = 128


def limit(head_dim: int, dtype: jnp.dtype, mask: AttentionMask, has_documents: bool, seq_len: int) -> str | None:
    """What keeps cuDNN from it; None where nothing does."""
    if dtype.itemsize != 2:
        return f"it takes 16-bit floats, not {dtype}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"it takes head_dim a multiple of 8 up to {MAX_HEAD_DIM}, not {head_dim}"
    if has_documents:
        return "it knows no documents within a sequence"
    if mask.soft_cap is not None or not mask.causal:
        return "it takes causal masks without soft cap"
    return None


def attention(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: AttentionMask,
    scale: float,
) -> Float[Array, "B S H K"]:
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, local_window_size=window, implementation="cudnn"
    )


def is_kernel(primitive, *inputs, **params) -> bool:
    """A `jax.checkpoint` policy: attention's RESULT is what this kernel gives, which JAX gives no name."""
    return primitive.name == "dot_product_attention_fwd_wrapper"
