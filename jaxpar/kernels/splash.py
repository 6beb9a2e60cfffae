"""Attention by the splash kernel of Pallas, on TPUs: a whole causal sequence in its own order, with documents."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from jaxpar.kernels.attention import RESULT
from jaxpar.kernels.mask import AttentionMask

LANES = 128
BLOCK = 512
"""Most queries, and most keys, of a tile."""


def limit(head_dim: int, dtype: jnp.dtype, mask: AttentionMask, has_documents: bool, seq_len: int) -> str | None:
    """What keeps splash attention from it; None where nothing does."""
    if dtype.itemsize > 4:
        return f"it takes floats of up to 32 bits, not {dtype}"
    if head_dim % LANES:
        return f"it takes head_dim a multiple of {LANES}, not {head_dim}"
    if seq_len % LANES:
        return f"it takes sequences of a multiple of {LANES}, not {seq_len}"
    if not mask.causal:
        return "it is used with causal masks"
    return None


def attention(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    segment_ids: Int[Array, "B S"],
    mask: AttentionMask,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B S H K"]:
    """Causal by place in the array, which in a document is causal by position. `interpret`: without a TPU, slowly."""
    batch, seq_len, heads, dim = q.shape
    num_kv_heads = k.shape[2]
    square = (seq_len, seq_len)
    one = masks.CausalMask(square) if mask.window is None else masks.LocalMask(square, (mask.window - 1, 0), 0)
    size = next(n for n in range(BLOCK, 0, -LANES) if seq_len % n == 0)
    splash = kernel.make_splash_mqa_single_device(
        mask=masks.MultiHeadMask([one] * (heads // num_kv_heads)),
        block_sizes=kernel.BlockSizes(
            block_q=size,
            block_kv=size,
            block_kv_compute=size,
            block_q_dkv=size,
            block_kv_dkv=size,
            block_kv_dkv_compute=size,
            block_q_dq=size,
            block_kv_dq=size,
        ),
        attn_logits_soft_cap=mask.soft_cap,
        residual_checkpoint_name=RESULT,
        interpret=interpret,
    )
    groups = (q * jnp.asarray(scale, q.dtype)).reshape(batch, seq_len, num_kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    over_kv_heads = jax.vmap(splash, in_axes=(0, 0, 0, None))
    out = jax.vmap(over_kv_heads)(groups, k, v, kernel.SegmentIds(segment_ids, segment_ids))
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
