"""Attention where every device holds the whole sequence of its own batch rows and heads: no collective.

Kv heads that `tensor` does not divide arrive whole on every rank and are repeated to lcm(G, tensor), of which each rank
takes its own: free forward, one all-reduce over `tensor` of dK and dV (B x S x G x K each) backward.
"""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.kernels.attention import AttentionMask, dot_product_attention
from jaxpar.parallel.axes import mesh_axes
from jaxpar.parallel.batch import Batch

if TYPE_CHECKING:
    from jaxpar.parallel.layout import Layout


def attention(
    layout: "Layout",
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    batch: Batch,
    mask: AttentionMask,
    scale: float,
) -> Float[Array, "B S H K"]:
    """As `kernels.attention.dot_product_attention`, on each device's own rows and heads."""

    def local(q, k, v, positions, segment_ids):
        return dot_product_attention(q, k, v, positions, positions, segment_ids, segment_ids, mask, scale)

    if layout.mesh is None:
        return local(q, k, v, batch.positions, batch.segment_ids)
    k, v = (_cut_heads(layout, x) for x in (k, v))
    tokens, heads = layout.spec("batch", "seq"), layout.spec("batch", "seq", "heads", "head_dim")
    # Its inputs are cut over every axis that they differ on, so there is no replication for vma types to track.
    local = jax.shard_map(local, in_specs=(heads, heads, heads, tokens, tokens), out_specs=heads, check_vma=False)
    return local(q, k, v, batch.positions, batch.segment_ids)


def _cut_heads(layout: "Layout", x: Float[Array, "B S G K"]) -> Float[Array, "B S G K"]:
    if "tensor" in mesh_axes(jax.typeof(x).sharding.spec):
        return x
    num_heads = x.shape[2]
    repeats = math.lcm(num_heads, layout.axis_size("tensor")) // num_heads
    cut = layout.spec("batch", "seq", "kv_heads", "head_dim")
    return x.at[:, :, jnp.arange(num_heads * repeats) // repeats].get(out_sharding=cut)
