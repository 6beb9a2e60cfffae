"""Attention on one device."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.kernels import tiled
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.numerics import widened

RESULT = "attention"
"""The name, for remat policies, of the output with the floats that spare its recomputation."""


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
    return _attention(mask, scale, q, k, v, q_tokens, k_tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(mask, scale, q, k, v, q_tokens, k_tokens):
    return tiled.forward(q, k, v, q_tokens, k_tokens, mask, scale)[0].astype(q.dtype)


def _forward(mask, scale, q, k, v, q_tokens, k_tokens):
    out, lse, _ = tiled.forward(q, k, v, q_tokens, k_tokens, mask, scale)
    out, lse = checkpoint_name(out.astype(q.dtype), RESULT), checkpoint_name(lse, RESULT)
    return out, (q, k, v, q_tokens, k_tokens, out, lse)


def _backward(mask, scale, residuals, cotangent):
    q, k, v, q_tokens, k_tokens, out, lse = residuals
    dq, dk, dv = tiled.backward(q, k, v, lse, delta(out, cotangent), cotangent, q_tokens, k_tokens, mask, scale)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attention.defvjp(_forward, _backward)


def delta(out: Float[Array, "B T H K"], cotangent: Float[Array, "B T H K"]) -> Float[Array, "B T H"]:
    """What the softmax's backward pass subtracts of each query's row."""
    wide = widened(out.dtype)
    return jnp.sum(out.astype(wide) * cotangent.astype(wide), axis=-1)
