"""Attention over a mesh: heads cut over `tensor`, rows over the batch axes, the sequence over `context`.

Every mesh axis is manual in it, so that a strategy is written as what one rank does (`context/`). Kv heads that
`tensor` does not divide arrive whole on every rank and are repeated to lcm(G, tensor), of which each takes its own:
free forward, one all-reduce over `tensor` of dK and dV (B x S x G x K each) backward.
"""

import math
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.kernels import attention as on_one_device
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel import context
from jaxpar.parallel.axes import mesh_axes

if TYPE_CHECKING:
    from jaxpar.parallel.layout import Layout


def attention(
    layout: "Layout",
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    tokens: Tokens,
    mask: AttentionMask,
    scale: float,
) -> Float[Array, "B S H K"]:
    """As `kernels.attention.attention`, over the whole sequence, whose `tokens` are whole on every context rank."""
    if layout.mesh is None:
        return on_one_device.attention(q, k, v, tokens, tokens, mask, scale)
    k, v = (_cut_heads(layout, x) for x in (k, v))
    everywhere, heads = layout.spec("batch", None), layout.spec("batch", "seq", "heads", "head_dim")
    body = partial(
        context.attention,
        layout.context,
        dict(layout.mesh.shape),
        layout.attention_kernel,
        layout.packs_documents,
        mask,
        scale,
    )
    # Its inputs are cut over every axis that they differ on, so there is no replication for vma types to track.
    local = jax.shard_map(body, in_specs=(heads, heads, heads, everywhere), out_specs=heads, check_vma=False)
    return local(q, k, v, tokens)


def _cut_heads(layout: "Layout", x: Float[Array, "B S G K"]) -> Float[Array, "B S G K"]:
    if "tensor" in mesh_axes(jax.typeof(x).sharding.spec):
        return x
    num_heads = x.shape[2]
    repeats = math.lcm(num_heads, layout.axis_size("tensor")) // num_heads
    cut = layout.spec("batch", "seq", "kv_heads", "head_dim")
    return x.at[:, :, jnp.arange(num_heads * repeats) // repeats].get(out_sharding=cut)
