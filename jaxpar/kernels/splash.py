"""Attention by the splash kernel of Pallas, on TPUs: of all or some of a causal sequence's tokens to all of them, with
documents."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
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


@dataclass(frozen=True)
class Queries:
    """Which tokens of the sequence the queries are: part `index` of the `num_parts` equal ones of `places`."""

    places: Int[np.ndarray, " S"]
    num_parts: int = 1
    index: Int[Array, ""] | int = 0


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    mask: AttentionMask,
    scale: float,
    queries: Queries,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """Keys in the sequence's own order. Causal by place in the sequence, which in a document is causal by position.
    `interpret`: without a TPU, slowly."""
    batch, num_queries, heads, dim = q.shape
    seq_len, num_kv_heads = k.shape[1:3]
    square = (seq_len, seq_len)
    one = masks.CausalMask(square) if mask.window is None else masks.LocalMask(square, (mask.window - 1, 0), 0)
    one.q_sequence = queries.places.astype(np.int32)
    size = next(n for n in range(BLOCK, 0, -LANES) if num_queries % n == 0)
    splash = kernel.make_splash_mqa(
        mask=masks.MultiHeadMask([one] * (heads // num_kv_heads)),
        head_shards=1,
        q_seq_shards=queries.num_parts,
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
    if queries.num_parts > 1:
        infos, settings = splash.tree_flatten()
        splash = splash.tree_unflatten(settings, [_part(info, queries) for info in infos])
    groups = (q * jnp.asarray(scale, q.dtype)).reshape(batch, num_queries, num_kv_heads, -1, dim)
    groups = groups.transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    over_kv_heads = jax.vmap(splash, in_axes=(0, 0, 0, None))
    out = jax.vmap(over_kv_heads)(groups, k, v, kernel.SegmentIds(q_segments, k_segments))
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _part(info: MaskInfo, queries: Queries) -> MaskInfo:
    """Of the lists of tiles to compute, which cover all parts' queries, this part's."""

    def cut(x: Any, dim: int) -> Any:
        if x is None:
            return None
        size = x.shape[dim] // queries.num_parts
        return lax.dynamic_slice_in_dim(x, queries.index * size, size, axis=dim)

    return info._replace(
        data_next=cut(info.data_next, 1),
        mask_next=cut(info.mask_next, 1),
        block_mask=cut(info.block_mask, 1),
        q_sequence=cut(info.q_sequence, 0),
    )
