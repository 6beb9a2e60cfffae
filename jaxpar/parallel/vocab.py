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

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.numerics import widened
from jaxpar.parallel import tensor

CHUNK_BYTES = 64 * 2**20
"""Most bytes of one chunk's logits on a device, in float32, where a quarter of the head is not more: each chunk reads
and writes the head's whole gradient, which is to cost less than its matmuls."""


@dataclass(frozen=True)
class Table:
    """How an embedding table and what is looked up in it lie."""

    dtype: jnp.dtype
    """Of its result."""
    vocab_axes: tuple[str, ...] = ()
    """That cut its rows."""
    embed_axes: tuple[str, ...] = ()
    """That cut its columns, and the tokens."""
    is_scattered: bool = False
    """Whether the result is cut along the sequence over `tensor`; the ids are where that does not cut the rows."""

    @property
    def scatters(self) -> bool:
        """Whether the ranks' addends are summed to such parts."""
        return self.is_scattered and tensor.AXIS in self.vocab_axes

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Over which they are summed whole."""
        return tuple(axis for axis in self.vocab_axes if not (self.scatters and axis == tensor.AXIS))


def lookup(at: Table, table: Float[Array, "v d"], ids: Int[Array, "B S"]) -> Float[Array, "B S_ D"]:
    """Rows of the whole table. Every rank looks up its own columns for its whole FSDP group, then an all-to-all trades
    rows for columns. The gradient of this rank's part is summed in at least float32."""
    return _lookup(at, table.shape[0], table.dtype, table, ids)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _lookup(at, num_rows, dtype, table, ids):
    rows, inside = _local_rows(num_rows, at.vocab_axes, _gather_rows(ids, at.embed_axes))
    x = jnp.where(inside[..., None], table.astype(at.dtype)[rows], jnp.zeros((), at.dtype))
    if at.scatters:
        x = lax.psum_scatter(x, tensor.AXIS, scatter_dimension=1, tiled=True)
    x = lax.psum(x, at.summed_axes) if at.summed_axes else x
    return lax.all_to_all(x, at.embed_axes, split_axis=0, concat_axis=2, tiled=True) if at.embed_axes else x


def _lookup_forward(at, num_rows, dtype, table, ids):
    return _lookup(at, num_rows, dtype, table, ids), ids


def _lookup_backward(at, num_rows, dtype, ids, cotangent):
    if at.embed_axes:
        cotangent = lax.all_to_all(cotangent, at.embed_axes, split_axis=2, concat_axis=0, tiled=True)
    if at.scatters:
        cotangent = lax.all_gather(cotangent, tensor.AXIS, axis=1, tiled=True)
    rows, inside = _local_rows(num_rows, at.vocab_axes, _gather_rows(ids, at.embed_axes))
    wide = widened(dtype)
    addend = jnp.where(inside[..., None], cotangent.astype(wide), jnp.zeros((), wide))
    return jnp.zeros((num_rows, cotangent.shape[-1]), wide).at[rows].add(addend).astype(dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


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
    axes: tuple[str, ...],
    x: Float[Array, "B S D"],
    head: Float[Array, "D v"],
    targets: Int[Array, "B S"],
    weights: Float[Array, "B S"],
    vocab_size: int,
    objective: Objective,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum(weights * objective), sum(weights * cross-entropy)) over this rank's tokens; the first has the gradient.

    The cross-entropy is log sum exp(logits) - logits[target], logits = x head, those past `vocab_size` being -inf;
    `axes` are those that the head's columns are cut over. The sequence goes by in chunks, whose gradients are
    made in the same pass and kept: three matmuls, none twice, and never more logits than a chunk's.
    """
    return _cross_entropy(axes, vocab_size, objective, x, head, targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _cross_entropy(axes, vocab_size, objective, x, head, targets, weights):
    def chunk(_, inputs):
        x, targets, weights = inputs
        losses, _ = _chunk_loss(axes, vocab_size, objective, x, head, targets)
        return None, jax.tree.map(lambda loss: loss * weights, losses)

    losses = lax.scan(chunk, None, _chunks(head.shape, (x, targets, weights)))[1]
    return jax.tree.map(jnp.sum, losses)


def _cross_entropy_forward(axes, vocab_size, objective, x, head, targets, weights):
    wide = widened(head.dtype)

    def chunk(dhead, inputs):
        x, targets, weights = inputs
        losses, dlogits = _chunk_loss(axes, vocab_size, objective, x, head, targets)
        dlogits = (dlogits * weights[..., None].astype(wide)).astype(x.dtype)
        dx = jnp.einsum("bcv,dv->bcd", dlogits, head, preferred_element_type=wide).astype(x.dtype)
        dhead += jnp.einsum("bcd,bcv->dv", x, dlogits, preferred_element_type=wide)
        return dhead, (dx, jax.tree.map(lambda loss: loss * weights, losses))

    dhead, (dx, losses) = lax.scan(chunk, jnp.zeros(head.shape, wide), _chunks(head.shape, (x, targets, weights)))
    dx = jnp.moveaxis(dx, 0, 1).reshape(x.shape)
    return jax.tree.map(jnp.sum, losses), (dx, dhead.astype(head.dtype))


def _cross_entropy_backward(axes, vocab_size, objective, residuals, cotangents):
    dx, dhead = (gradient * cotangents[0].astype(gradient.dtype) for gradient in residuals)
    return dx, dhead, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _chunk_loss(axes, vocab_size, objective, x, head, targets):
    """((objective, cross-entropy), each [B, C]; the first one's gradient by the logits [B, C, v]), in at least
    float32."""
    logits = jnp.einsum("bcd,dv->bcv", x, head, preferred_element_type=widened(x.dtype))
    offset = lax.axis_index(axes) * head.shape[1] if axes else 0

    def over_vocab(reduce, collective, values):
        local = reduce(values, axis=-1)
        return collective(local, axes) if axes else local

    token = (jnp.arange(head.shape[1], dtype=targets.dtype) + offset)[None, None]
    is_true = token < vocab_size
    logits = jnp.where(is_true, logits, -jnp.inf)
    is_target = token == targets[..., None]
    largest = over_vocab(jnp.max, lax.pmax, logits)[..., None]
    shifted = logits - largest
    exp = jnp.exp(shifted)
    total = over_vocab(jnp.sum, lax.psum, exp)
    zero = jnp.zeros((), shifted.dtype)
    at_target = over_vocab(jnp.sum, lax.psum, jnp.where(is_target, shifted, zero))
    nll = jnp.log(total) - at_target
    softmax = exp / total[..., None]
    loss, gradient = nll, softmax - is_target.astype(exp.dtype)
    if objective.label_smoothing:
        share = objective.label_smoothing
        mean = over_vocab(jnp.sum, lax.psum, jnp.where(is_true, shifted, zero)) / vocab_size
        loss = loss + share * (at_target - mean)
        gradient = gradient + share * (is_target.astype(exp.dtype) - is_true.astype(exp.dtype) / vocab_size)
    if objective.z_loss:
        log_sum_exp = jnp.log(total) + largest[..., 0]
        loss = loss + objective.z_loss * log_sum_exp**2
        gradient = gradient + 2 * objective.z_loss * log_sum_exp[..., None] * softmax
    return (loss, nll), gradient


def _chunks(head_shape, arrays):
    """Each [B, S, ...] as [chunks, B, S / chunks, ...]."""
    batch, seq = arrays[0].shape[:2]
    dim, num_columns = head_shape
    row, most = 4 * batch * num_columns, max(CHUNK_BYTES, dim * num_columns)
    num_chunks = next(n for n in range(1, seq + 1) if seq % n == 0 and (seq // n * row <= most or n == seq))

    def split(array):
        parts = array.reshape(array.shape[0], num_chunks, seq // num_chunks, *array.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    return jax.tree.map(split, arrays)
