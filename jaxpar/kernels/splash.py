"""Attention by the splash kernel of Pallas, on TPUs: of all or some of a causal sequence's tokens to all of them, with
documents."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    mask: AttentionMask,
    scale: float,
    queries: Queries,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """Keys in the sequence's own order. Causal by place in the sequence, which in a document is causal by position.
    `interpret`: without a TPU, slowly."""
    num_kv_heads, num_keys = k.shape[1:3]
    square = num_keys, num_keys
    one = masks.CausalMask(square) if mask.window is None else masks.LocalMask(square, (mask.window - 1, 0), 0)
    one.q_sequence = queries.places.astype(np.int32)
    sizes = q.shape[2] // num_kv_heads, q.shape[1], num_keys
    splash = _kernel(one, sizes, mask.soft_cap, interpret, queries.num_parts, residual_checkpoint_name=RESULT)
    if queries.num_parts > 1:
        infos, settings = splash.tree_flatten()
        splash = splash.tree_unflatten(settings, [_part(info, queries) for info in infos])
    scaled = by_kv_heads(q * jnp.asarray(scale, q.dtype), num_kv_heads)
    return ungrouped(_over_kv_heads(splash)(scaled, k, v, kernel.SegmentIds(q_segments, k_segments)))


def _kernel(
    one: masks.Mask,
    sizes: tuple[int, int, int],
    soft_cap: float | None,
    interpret: bool,
    num_parts: int = 1,
    **settings: Any,
) -> kernel.SplashAttentionKernel:
    """For the query heads of one kv head, each under the same mask; of (heads, queries, keys)."""
    num_heads, num_queries, num_keys = sizes
    shared = math.gcd(num_queries, num_keys)
    size = next(n for n in range(BLOCK, 0, -LANES) if shared % n == 0)
    return kernel.make_splash_mqa(
        mask=masks.MultiHeadMask([one] * num_heads),
        head_shards=1,
        q_seq_shards=num_parts,
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
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
        **settings,
    )


def _over_kv_heads(function: Callable) -> Callable:
    """Of (q, k, v, segments, ...) of one kv head: of all of a batch's."""

    def batched(q: Array, k: Array, v: Array, segments: kernel.SegmentIds, *further: Array) -> Any:
        over_heads = jax.vmap(function, in_axes=(0, 0, 0, None, *[0] * len(further)))
        return jax.vmap(over_heads)(q, k, v, segments, *further)

    return batched


def by_kv_heads(x: Float[Array, "B T H ..."], num_kv_heads: int) -> Float[Array, "B G R T ..."]:
    """As the kernel takes queries: those of one kv head together."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], num_kv_heads, -1, *x.shape[3:]), 1, 3)


def ungrouped(x: Float[Array, "B G R T ..."]) -> Float[Array, "B T H ..."]:
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


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


Seen = Literal["all", "up to its own place", "before its own place"]
"""Which keys of a part a query of a part sees."""


def part_forward(
    q: Float[Array, "B G R T K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    seen: Seen,
    soft_cap: float | None,
    interpret: bool,
) -> tuple[Float[Array, "B G R T K"], Float[Array, "B G R T"]]:
    """(attention to these keys alone, rounded to q's dtype, the scores' log-sum-exp in float32), to be merged with that
    to others, of queries that are scaled. One that sees no key has some finite output and a log-sum-exp far below any
    other."""
    splash = _part_kernel(seen, q, k, soft_cap, interpret, save_residuals=True)
    out, (lse,) = _over_kv_heads(splash)(q, k, v, kernel.SegmentIds(q_segments, k_segments))
    return out, lse


def part_backward(
    q: Float[Array, "B G R T K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    out: Float[Array, "B G R T K"],
    lse: Float[Array, "B G R T"],
    cotangent: Float[Array, "B G R T K"],
    seen: Seen,
    soft_cap: float | None,
    interpret: bool,
) -> tuple[Float[Array, "B G R T K"], Float[Array, "B G S K"], Float[Array, "B G S K"]]:
    """What these keys add to the gradients of q, as it is scaled, k and v; `out` and `lse` are over ALL keys that a
    query sees."""
    splash = _part_kernel(seen, q, k, soft_cap, interpret)
    names = "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function"
    settings: dict[str, Any] = {name: splash.kwargs[name] for name in (*names, "attn_logits_soft_cap", "interpret")}

    def gradients(q: Array, k: Array, v: Array, segments: Any, out: Array, lse: Array, cotangent: Array):
        kept = q, k, v, segments, None, out, lse, splash.dq_mask_info, splash.dkv_mask_info
        # Splash's own differentiation knows no log-sum-exp over more keys than its own.
        return kernel._splash_attention_bwd(**settings, res=kept, do=cotangent)[3:6]

    segments = kernel.SegmentIds(q_segments, k_segments)
    return _over_kv_heads(gradients)(q, k, v, segments, out, lse, cotangent)


def _part_kernel(
    seen: Seen, q: Array, k: Array, soft_cap: float | None, interpret: bool, **settings: Any
) -> kernel.SplashAttentionKernel:
    num_heads, num_queries, num_keys = q.shape[2], q.shape[3], k.shape[2]
    shape = num_queries, num_keys
    one = masks.FullMask(shape) if seen == "all" else masks.CausalMask(shape, -1 if seen.startswith("before") else 0)
    return _kernel(one, (num_heads, num_queries, num_keys), soft_cap, interpret, **settings)
