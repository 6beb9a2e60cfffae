"""A step's loss and gradients, whatever part of a weight each rank keeps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.numerics import widened
from jaxpar.parallel import fsdp
from jaxpar.parallel.axes import TOKEN_AXES, mesh_axes
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.zero import Weight
from jaxpar.training.model import Model


def loss_and_grads(
    model: Model,
    params: PyTree,
    batch: Batch,
    *,
    whole: PyTree | None = None,
    scale: Float[Array, ""] | None = None,
) -> tuple[Array, PyTree, Array]:
    """(cross-entropy, gradients, valid tokens) of a batch of stacked microbatches [M, B, S].

    The loss is one sum over tokens divided by the count of valid ones in the whole step, which is known before the
    first backward pass: neither microbatches nor shards of unequal counts weigh more than their tokens. Gradients are
    typed as `params` are, in at least float32.

    Args:
      whole: under ZeRO-1 and 2 `model.whole(params)`, where that is at hand.
      scale: what the loss is multiplied by on its way back, and the gradients divided by at the end.
    """
    num_tokens = jnp.sum(batch.loss_weights)
    wide = widened(model.dtype)
    weights = (batch.loss_weights / jnp.maximum(num_tokens, 1.0)).astype(wide)
    batch = Batch(batch.tokens, batch.targets, batch.positions, batch.segment_ids, weights)
    if whole is None and model.keeps_whole_weights:
        whole = model.whole(params)
    weights, as_params = weights_of(model, params, whole)

    def objective(weights, microbatch):
        total, cross_entropy = model.loss(as_params(weights), microbatch)
        return total if scale is None else total * scale.astype(total.dtype), cross_entropy

    value_and_grad = jax.value_and_grad(objective, has_aux=True)

    def add(total, microbatch):
        (_, loss), grads = value_and_grad(weights, microbatch)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, (loss, grads)), None

    if batch.tokens.shape[0] == 1:
        (_, loss), grads = value_and_grad(weights, jax.tree.map(lambda x: x[0], batch))
    else:
        zeros = jnp.zeros((), wide), model.layout.zeros_owed(weights, wide)
        (loss, grads), _ = lax.scan(add, zeros, batch)
    grads = jax.tree.map(lambda g: g.astype(wide), _settled(model, grads))
    return loss, grads if scale is None else jax.tree.map(lambda g: g / scale.astype(g.dtype), grads), num_tokens


def weights_of(model: Model, params: PyTree, whole: PyTree | None) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """What the gradient is taken by, and how it stands for the model's parameters."""
    layout = model.layout
    if whole is None:
        return layout.owe(params, model.owed), lambda weights: weights
    if layout.zero == 1:
        return layout.owe(whole, model.whole_owed), lambda weights: weights

    def part(weight: Array, param: Array) -> Array:
        return jnp.zeros_like(param, layout.reduce_dtype) if _is_cut(param) else weight

    def pair(weight: Array, part: Array, param: Array, names: tuple[str | None, ...]) -> Array | Weight:
        if not _is_cut(param):
            return part
        # A layer's gradient is scattered as soon as it is there; the embedding's when all its uses are summed.
        both = Weight(weight, part)
        return both if names[0] == "layers" else layout.gather(both)

    parts = layout.owe(jax.tree.map(part, whole, params), model.owed)
    return parts, lambda parts: jax.tree.map(pair, whole, parts, params, model.names)


def _is_cut(param: Array) -> bool:
    return bool(mesh_axes(jax.typeof(param).sharding.spec) & TOKEN_AXES)


def _settled(model: Model, grads: PyTree) -> PyTree:
    """The sums that are left to the end of the step; ZeRO-1's are scattered to the ranks that keep a part."""
    layout = model.layout

    def to_reduce(gradient: Array) -> Array:
        is_owed = layout.axis_size(*jax.typeof(gradient).sharding.spec.unreduced) > 1
        return gradient.astype(layout.reduce_dtype) if is_owed else gradient

    grads = jax.tree.map(to_reduce, grads)
    if model.keeps_whole_weights and layout.zero == 1:
        grads = jax.tree.map(lambda g, like: fsdp.reduce_scatter(g, like.sharding.spec), grads, model.abstract)
    return layout.settle(grads)
