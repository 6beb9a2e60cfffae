"""Attention on one device, by one kernel or another."""

import importlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.kernels import tiled
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.numerics import widened

log = logging.getLogger(__name__)

Kernel = Literal["tiled", "cudnn", "splash"]
_OF_PLATFORM: dict[str, Kernel] = {"gpu": "cudnn", "tpu": "splash"}

RESULT = "attention"
"""The name, for remat policies, of the output with the floats that spare its recomputation."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values that were made before, and what masks need to know of their tokens. A place that holds nothing
    has a segment of its own."""

    k: Float[Array, "B P G K"]
    v: Float[Array, "B P G K"]
    tokens: Tokens

    def before(
        self, k: Float[Array, "B S G K"], v: Float[Array, "B S G K"], tokens: Tokens
    ) -> tuple[Float[Array, "B P+S G K"], Float[Array, "B P+S G K"], Tokens]:
        """Those, then these."""
        pairs = (self.k, self.v, self.tokens), (k, v, tokens)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *pairs)


def choose(
    asked: Literal["auto"] | Kernel,
    platform: str,
    *,
    head_dim: int,
    dtype: jnp.dtype,
    mask: AttentionMask,
    has_documents: bool,
    seq_len: int,
    is_in_order: bool,
) -> Kernel:
    """What attends where a device has all of a sequence: `asked`, or for auto the platform's own kernel within its
    limits, else tiles; the log says which. Raises ValueError for a kernel that cannot do what is asked of it."""
    kernel = _OF_PLATFORM.get(platform, "tiled") if asked == "auto" else asked
    limit = None
    if kernel != "tiled":
        if platform != {own: name for name, own in _OF_PLATFORM.items()}[kernel]:
            limit = f"it does not run on {platform}"
        elif kernel == "cudnn" and not is_in_order:
            limit = "it takes sequences in their own order: --context-order contiguous"
        else:
            limit = module(kernel).limit(head_dim, dtype, mask, has_documents, seq_len)
    if limit is not None and asked != "auto":
        raise ValueError(f"--attention {kernel}: {limit}; take --attention auto or tiled")
    log.info("attention: %s", kernel if limit is None else f"tiled, not {kernel}: {limit}")
    return kernel if limit is None else "tiled"


def module(kernel: Kernel):
    """Imported when it is used: a platform's kernels come with what that platform needs."""
    return importlib.import_module(f"jaxpar.kernels.{kernel}")


def whole_sequence(
    kernel: Kernel,
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    tokens: Tokens,
    mask: AttentionMask,
    scale: float,
    block: int,
) -> tuple[Float[Array, "B S H K"], Int[Array, ""]]:
    """`counted` of a sequence to itself, in its own order, by this kernel; the platforms' own count no tiles."""
    if kernel == "tiled":
        return counted(q, k, v, tokens, tokens, mask, scale, block)
    if kernel == "splash":
        k, v = heads_first(k), heads_first(v)
        return by_splash(q, k, v, tokens.segment_ids, tokens.segment_ids, mask, scale, np.arange(q.shape[1]))
    return module(kernel).attention(q, k, v, mask, scale), jnp.zeros((), jnp.int32)


def heads_first(x: Float[Array, "B S G K"]) -> Float[Array, "B G S K"]:
    """Keys or values as splash takes them; and back."""
    return x.transpose(0, 2, 1, 3)


def by_splash(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    mask: AttentionMask,
    scale: float,
    places: Int[np.ndarray, " S"],
    num_parts: int = 1,
    index: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, "B T H K"], Int[Array, ""]]:
    """Of queries at the places in the sequence that part `index` of `places` says, to keys in the sequence's order."""
    splash = module("splash")
    queries = splash.Queries(places, num_parts, index)
    out = splash.attention(q, k, v, q_segments, k_segments, mask, scale, queries)
    return out, jnp.zeros((), jnp.int32)


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    mask: AttentionMask,
    scale: float,
) -> Float[Array, "B T H K"]:
    """softmax(scale * q k^T) v over the keys that the mask admits; a query that sees none gives 0.

    G kv heads serve H = G * r query heads in order, without K or V being repeated (GQA, arXiv 2305.13245). Kept for the
    backward pass: q, k, v, the output and a float per query and head.
    """
    return counted(q, k, v, q_tokens, k_tokens, mask, scale)[0]


def counted(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    mask: AttentionMask,
    scale: float,
    block: int = tiled.BLOCK,
) -> tuple[Float[Array, "B T H K"], Int[Array, ""]]:
    """As `attention`, and the number of tiles that its forward pass computed."""
    return _attention(mask, scale, block, q, k, v, q_tokens, k_tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(mask, scale, block, q, k, v, q_tokens, k_tokens):
    out, _, tiles = tiled.forward(q, k, v, q_tokens, k_tokens, mask, scale, block)
    return out.astype(q.dtype), tiles


def _forward(mask, scale, block, q, k, v, q_tokens, k_tokens):
    out, lse, tiles = tiled.forward(q, k, v, q_tokens, k_tokens, mask, scale, block)
    out, lse = checkpoint_name(out.astype(q.dtype), RESULT), checkpoint_name(lse, RESULT)
    return (out, tiles), (q, k, v, q_tokens, k_tokens, out, lse)


def _backward(mask, scale, block, residuals, cotangents):
    (q, k, v, q_tokens, k_tokens, out, lse), (cotangent, _) = residuals, cotangents
    dq, dk, dv = tiled.backward(q, k, v, lse, delta(out, cotangent), cotangent, q_tokens, k_tokens, mask, scale, block)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attention.defvjp(_forward, _backward)


def delta(out: Float[Array, "B T H K"], cotangent: Float[Array, "B T H K"]) -> Float[Array, "B T H"]:
    """What the softmax's backward pass subtracts of each query's row."""
    wide = widened(out.dtype)
    return jnp.sum(out.astype(wide) * cotangent.astype(wide), axis=-1)
