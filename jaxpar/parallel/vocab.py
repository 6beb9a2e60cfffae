"""The two ends of a model, cut over the vocabulary (Megatron-LM, arXiv 1909.08053 §3).

Splits: the table's and the head's vocab over `tensor`, t ranks; their embed over the FSDP axes, n ranks.
Collectives per microbatch, in bytes of one activation A = B x S x D of a rank:
    lookup          forward: all-gather of ids over the FSDP axes, reduction of A over `tensor` (reduce-scatter under
                    sequence parallelism), all-to-all over the FSDP axes; backward: all-to-all, all-gather of A over
                    `tensor` under sequence parallelism. The table itself (V x D) never moves.
    cross-entropy   as one column-parallel matmul: A gathered, its gradient reduced over `tensor`; three floats a token
                    reduced over `tensor`; the head gathered once and its gradient reduce-scattered once, outside of
                    the loop over chunks.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxpar.numerics import widened
from jaxpar.parallel import data
from jaxpar.parallel.axes import BATCH_AXES, TOKEN_AXES, axes_of
from jaxpar.parallel.tensor import AXES as TENSOR

if TYPE_CHECKING:
    from jaxpar.parallel.layout import Layout

CHUNK_BYTES = 64 * 2**20
"""Most bytes of one chunk's logits on a device, in float32."""


def lookup(layout: "Layout", table: Float[Array, "V D"], ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """table[ids] in compute dtype. The table's gradient comes in the table's own type, summed in its own dtype."""
    if layout.mesh is None:
        return table.astype(layout.compute_dtype)[ids]
    return _lookup(layout, jax.typeof(table), table, ids)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(layout, stored, table, ids):
    """Every rank looks up its own columns for its whole FSDP group, then an all-to-all trades rows for columns."""
    vocab_axes, embed_axes = map(axes_of, stored.sharding.spec.partitions)
    scattered = bool(vocab_axes) and layout.sequence_parallel

    def local(table, ids):
        rows, inside = _local_rows(table.shape[0], vocab_axes, _gather_rows(ids, embed_axes))
        x = jnp.where(inside[..., None], table[rows], jnp.zeros((), table.dtype))
        if scattered:
            x = lax.psum_scatter(x, vocab_axes, scatter_dimension=1, tiled=True)
        elif vocab_axes:
            x = lax.psum(x, vocab_axes)
        return lax.all_to_all(x, embed_axes, split_axis=0, concat_axis=2, tiled=True) if embed_axes else x

    ids_spec, out_spec = _lookup_specs(layout, vocab_axes)
    table = jax.reshard(table, P(*stored.sharding.spec.partitions)).astype(layout.compute_dtype)
    return jax.shard_map(local, in_specs=(P(vocab_axes, embed_axes), ids_spec), out_specs=out_spec, check_vma=False)(
        table, jax.reshard(ids, ids_spec)
    )


def _lookup_forward(layout, stored, table, ids):
    return _lookup(layout, stored, table, ids), ids


def _lookup_backward(layout, stored, ids, cotangent):
    spec = stored.sharding.spec
    vocab_axes, embed_axes = map(axes_of, spec.partitions)
    owed = tuple(axis for axis in layout.mesh.axis_names if axis in spec.reduced)

    def local(ids, cotangent):
        if embed_axes:
            cotangent = lax.all_to_all(cotangent, embed_axes, split_axis=2, concat_axis=0, tiled=True)
        if vocab_axes and layout.sequence_parallel:
            cotangent = lax.all_gather(cotangent, vocab_axes, axis=1, tiled=True)
        num_rows = stored.shape[0] // layout.axis_size(*vocab_axes)
        rows, inside = _local_rows(num_rows, vocab_axes, _gather_rows(ids, embed_axes))
        wide = widened(stored.dtype)
        addend = jnp.where(inside[..., None], cotangent.astype(wide), jnp.zeros((), wide))
        summed = jnp.zeros((1, num_rows, cotangent.shape[-1]), wide).at[0, rows].add(addend)
        return summed.astype(stored.dtype)

    ids_spec, out_spec = _lookup_specs(layout, vocab_axes)
    stacked = jax.shard_map(
        local, in_specs=(ids_spec, out_spec), out_specs=P(owed, vocab_axes, embed_axes), check_vma=False
    )(jax.reshard(ids, ids_spec), cotangent)
    return data.addends(stacked, P(*spec.partitions)), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def _lookup_specs(layout, vocab_axes):
    """A rank of a cut table sees the ids of its whole `tensor` group; of a whole table, its own part of the stream."""
    ids = layout.spec("batch", "seq" if vocab_axes else "residual_seq")
    return ids, layout.spec("batch", "residual_seq", "embed")


def _gather_rows(ids, embed_axes):
    return lax.all_gather(ids, embed_axes, axis=0, tiled=True) if embed_axes else ids


def _local_rows(num_rows, vocab_axes, ids):
    offset = lax.axis_index(vocab_axes) * num_rows if vocab_axes else 0
    inside = (ids >= offset) & (ids < offset + num_rows)
    return jnp.where(inside, ids - offset, 0), inside


@dataclass(frozen=True)
class Objective:
    """What is minimised beside the cross-entropy, per token."""

    z_loss: float = 0.0
    """Times the square of the logits' log-sum-exp (PaLM, arXiv 2204.02311, section 5)."""
    label_smoothing: float = 0.0
    """Share of the target's probability that all tokens get alike (arXiv 1512.00567, section 7)."""


def cross_entropy(
    layout: "Layout",
    x: Float[Array, "B S D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B S"],
    weights: Float[Array, "B S"],
    vocab_size: int,
    objective: Objective,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum(weights * objective), sum(weights * cross-entropy)), of which the first has the gradient.

    The cross-entropy is log sum exp(logits) - logits[target], logits = x head, those past `vocab_size` being -inf.
    x as `Layout.enter_tensor` gives it, the head as `Layout.gather` does. The sequence goes by in chunks, whose
    gradients are made in the same pass and kept: three matmuls, none twice, and never more logits than a chunk's.
    """
    return _cross_entropy(layout, vocab_size, objective, x, head, targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _cross_entropy(layout, vocab_size, objective, x, head, targets, weights):
    def chunk(_, inputs):
        x, targets, weights = inputs
        losses, _ = _chunk_loss(layout, vocab_size, objective, x, head, targets)
        return None, jax.tree.map(lambda loss: loss * weights, losses)

    losses = lax.scan(chunk, None, _chunks(layout, head.shape[1], (x, targets, weights)))[1]
    return jax.tree.map(jnp.sum, losses)


def _cross_entropy_forward(layout, vocab_size, objective, x, head, targets, weights):
    dx_spec = layout.spec("batch", "seq", None, None, unreduced=TENSOR)
    head_spec = layout.spec(None, "vocab", unreduced=TOKEN_AXES)
    wide = widened(head.dtype)

    def chunk(dhead, inputs):
        x, targets, weights = inputs
        losses, dlogits = _chunk_loss(layout, vocab_size, objective, x, head, targets)
        dlogits = (dlogits * weights[..., None].astype(wide)).astype(x.dtype)
        dx = jnp.einsum("bncv,dv->bncd", dlogits, head, out_sharding=dx_spec, preferred_element_type=wide)
        dx = dx.astype(x.dtype)
        dhead += jnp.einsum("bncd,bncv->dv", x, dlogits, out_sharding=head_spec, preferred_element_type=wide)
        return dhead, (dx, jax.tree.map(lambda loss: loss * weights, losses))

    start = jnp.zeros(head.shape, wide, out_sharding=head_spec)
    dhead, (dx, losses) = lax.scan(chunk, start, _chunks(layout, head.shape[1], (x, targets, weights)))
    dx = lax.reshape(jnp.moveaxis(dx, 0, 2), x.shape, out_sharding=layout.spec("batch", "seq", None, unreduced=TENSOR))
    return jax.tree.map(jnp.sum, losses), (dx, dhead.astype(head.dtype))


def _cross_entropy_backward(layout, vocab_size, objective, residuals, cotangents):
    dx, dhead = residuals
    return data.times(dx, cotangents[0]), data.times(dhead, cotangents[0]), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _chunk_loss(layout, vocab_size, objective, x, head, targets):
    """((objective, cross-entropy), each [B, N, C]; the first one's gradient by the logits [B, N, C, V]), in at least
    float32."""
    cut = layout.spec("batch", "seq", None, "vocab")
    logits = jnp.einsum("bncd,dv->bncv", x, head, out_sharding=cut, preferred_element_type=widened(x.dtype))
    token = jnp.arange(head.shape[1], dtype=targets.dtype, out_sharding=layout.spec("vocab"))[None, None, None]
    is_true = token < vocab_size
    if head.shape[1] > vocab_size:
        logits = jnp.where(is_true, logits, -jnp.inf)
    is_target = token == targets[..., None]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - largest
    exp = jnp.exp(shifted)
    total = jnp.sum(exp, axis=-1)
    zero = jnp.zeros((), shifted.dtype)
    at_target = jnp.sum(jnp.where(is_target, shifted, zero), axis=-1)
    nll = jnp.log(total) - at_target
    softmax = exp / total[..., None]
    loss, gradient = nll, softmax - is_target.astype(exp.dtype)
    if objective.label_smoothing:
        share = objective.label_smoothing
        mean = jnp.sum(jnp.where(is_true, shifted, zero), axis=-1) / vocab_size
        loss = loss + share * (at_target - mean)
        gradient = gradient + share * (is_target.astype(exp.dtype) - is_true.astype(exp.dtype) / vocab_size)
    if objective.z_loss:
        log_sum_exp = jnp.log(total) + largest[..., 0]
        loss = loss + objective.z_loss * log_sum_exp**2
        gradient = gradient + 2 * objective.z_loss * log_sum_exp[..., None] * softmax
    return (loss, nll), gradient


def _chunks(layout, padded_vocab, arrays):
    """Each [B, S, ...] as [chunks, B, context ranks, S / ranks / chunks, ...]: every rank goes through its own part."""
    ranks = layout.axis_size("context")
    batch, seq = arrays[0].shape[0] // layout.axis_size(*BATCH_AXES), arrays[0].shape[1] // ranks
    position_bytes = 4 * batch * padded_vocab // layout.axis_size(*TENSOR)
    num_chunks = next(
        n for n in range(1, seq + 1) if seq % n == 0 and (seq // n * position_bytes <= CHUNK_BYTES or n == seq)
    )

    def split(array):
        spec = jax.typeof(array).sharding.spec if layout.mesh is not None else P()
        tail = (None,) * (array.ndim - 2)
        out = layout.spec("batch", "seq", None, None, *tail, reduced=spec.reduced)
        parts = lax.reshape(
            array, (array.shape[0], ranks, num_chunks, seq // num_chunks, *array.shape[2:]), out_sharding=out
        )
        return jnp.moveaxis(parts, 2, 0)

    return jax.tree.map(split, arrays)
