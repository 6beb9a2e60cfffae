"""A step's loss and gradients, whatever part of a weight each rank keeps."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jaxpar import noise
from jaxpar.numerics import widened
from jaxpar.parallel import zero
from jaxpar.parallel.batch import Batch, Routing
from jaxpar.parallel.zero import Weight
from jaxpar.training.model import Model
from models.transformer import Reported


def loss_and_grads(
    model: Model,
    params: PyTree,
    batch: Batch,
    *,
    whole: PyTree | None = None,
    scale: Float[Array, ""] | None = None,
    step: Int[Array, ""] | int = 0,
) -> tuple[Reported, PyTree, Array]:
    """(what is reported, gradients, valid tokens) of a batch of stacked microbatches [M, B, S].

    The loss is one sum over tokens divided by the count of valid ones in the whole step, which is known before the
    first backward pass: neither microbatches nor shards of unequal counts weigh more than their tokens. Gradients lie
    as `params` do, in at least float32.

    Args:
      whole: under ZeRO-1 and 2 `model.whole(params)`, where that is at hand.
      scale: what the loss is multiplied by throughout, it and the gradients divided by at the end.
      step: what noise is drawn for.
    """
    if whole is None:
        whole = model.computed_with(params)
    layout = model.layout
    # Under ZeRO-1 and 2 the master parameters count for nothing here but where they lie.
    in_specs = model.computed_specs, layout.stacked_batch_spec(), P(), P()
    reported_specs = Reported(P(), P("pipe"))  # type: ignore[arg-type]  # specs in the place of arrays
    function = layout.region(lambda *parts: _local(model, *parts), in_specs, (reported_specs, model.specs, P()))
    scale = jnp.ones((), widened(model.dtype)) if scale is None else scale
    return function(whole, batch, scale, jnp.asarray(step, jnp.int32))


def _local(model: Model, weights: PyTree, batch: Batch, scale: Array, step: Array) -> tuple[Reported, PyTree, Array]:
    """One rank's part."""
    layout, wide = model.layout, widened(model.dtype)
    num_tokens = layout.sum_over_tokens(jnp.sum(batch.loss_weights))
    # The scale is in the weights: what it must keep from underflow is there from the first short number on.
    loss_weights = batch.loss_weights.astype(wide) * (scale.astype(wide) / jnp.maximum(num_tokens, 1.0).astype(wide))
    batch = dataclasses.replace(batch, loss_weights=loss_weights)
    if model.config.num_experts:
        batch = dataclasses.replace(batch, routing=_routing(model, batch, scale.astype(wide), step))
    by, as_weights = differentiated(model, weights)

    value_and_grad = jax.value_and_grad(lambda by, microbatch: model.loss(as_weights(by), microbatch), has_aux=True)

    def add(total: PyTree, microbatch: Batch) -> tuple[PyTree, None]:
        (_, reported), grads = value_and_grad(by, microbatch)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, (reported, grads)), None

    first = jax.tree.map(lambda x: x[0], batch)
    if layout.schedule is not None:
        reported, grads = model.through_pipeline(by, batch)
    elif batch.tokens.shape[0] == 1:
        (_, reported), grads = value_and_grad(by, first)
    else:
        like = jax.eval_shape(value_and_grad, by, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, widened(x.dtype)), (like[0][1], like[1]))
        (reported, grads), _ = lax.scan(add, zeros, batch)
    if model.keeps_whole_weights and layout.zero == 1:
        grads = jax.tree.map(
            lambda g, spec, names: layout.summed(g, layout.token_cuts(spec, names)), grads, model.specs, model.names
        )
    grads = layout.settle(grads, model.owed)
    grads = jax.tree.map(lambda g: g.astype(wide) / scale.astype(wide), grads)
    loss, told = jax.tree.map(layout.sum_over_tokens, reported)
    if "auxiliary_loss" in told:
        told["auxiliary_loss"] = told["auxiliary_loss"] / scale.astype(told["auxiliary_loss"].dtype)
    return Reported(loss / scale.astype(loss.dtype), told), grads, num_tokens


def _routing(model: Model, batch: Batch, scale: Array, step: Array) -> Routing:
    """Of a step's microbatches [M, B, S]."""
    layout = model.layout
    num_microbatches, batch_size, seq_len = batch.tokens.shape
    num_tokens = batch.tokens.size * layout.num_parts("batch") * layout.num_parts("seq")
    shares = jnp.broadcast_to(scale / num_tokens, batch.tokens.shape)
    if not model.config.router_jitter:
        return Routing(shares)
    # A token draws the same wherever it lies, and in whatever microbatch.
    per_microbatch = batch_size * layout.num_parts("batch")
    first = layout.part_index("batch") * batch_size
    microbatch = jnp.arange(num_microbatches, dtype=jnp.int32)[:, None, None]
    row = microbatch * per_microbatch + first + jnp.arange(batch_size, dtype=jnp.int32)[None, :, None]
    token = row * (seq_len * layout.num_parts("seq")) + layout.places(seq_len)[None, None]
    return Routing(shares, noise.mixed(token.astype(jnp.uint32) + noise.mixed(step.astype(jnp.uint32))))


def differentiated(model: Model, weights: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """What the gradient is taken by, and how it stands for the model's weights: themselves, but under ZeRO-2, where
    each layer's gradient is reduced to this rank's part as soon as it is there."""
    layout = model.layout
    if not (model.keeps_whole_weights and layout.zero == 2):
        return weights, lambda by: by

    def part(weight: Array, spec: P, names: tuple[str | None, ...]) -> Array:
        cuts = layout.token_cuts(spec, names)
        if not cuts:
            return weight
        shape = list(weight.shape)
        for dim, axes in cuts:
            shape[dim] //= layout.axis_size(*axes)
        return jnp.zeros(shape, layout.reduce_dtype)

    def pair(weight: Array, part: Array, spec: P, names: tuple[str | None, ...]) -> Array | Weight:
        if not (cuts := layout.token_cuts(spec, names)):
            return part
        # The embedding's and the head's when all their uses are summed.
        both = Weight(weight, part)
        return both if names[0] == "layers" else zero.gather(both, cuts, layout.reduce_dtype)

    parts = jax.tree.map(part, weights, model.specs, model.names)
    return parts, lambda parts: jax.tree.map(pair, weights, parts, model.specs, model.names)
