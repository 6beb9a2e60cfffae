"""One training step: the loss of a step's microbatches, their gradients summed once, an optimizer's update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.parallel.batch import Batch
from jaxpar.training import optimizer as optimizers
from jaxpar.training.model import Model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes."""

    step: Int[Array, ""]
    """Steps done."""
    params: PyTree
    opt_state: PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    loss: Float[Array, ""]
    """Cross-entropy per valid token, in nats."""
    grad_norm: Float[Array, ""]
    """Global, before clipping."""
    num_tokens: Float[Array, ""]
    """Valid tokens of this step."""


def loss_and_grads(model: Model, params: PyTree, batch: Batch) -> tuple[Array, PyTree, Array]:
    """(loss, gradients, valid tokens) of a batch of stacked microbatches [M, B, S].

    The loss is one sum over tokens divided by the count of valid ones in the whole step, which is known before the
    first backward pass: neither microbatches nor shards of unequal counts weigh more than their tokens.
    """
    layout = model.layout
    num_tokens = jnp.sum(batch.loss_weights)
    weights = (batch.loss_weights / jnp.maximum(num_tokens, 1.0)).astype(model.dtype)
    batch = Batch(batch.tokens, batch.targets, batch.positions, batch.segment_ids, weights)
    params = layout.owe(params, model.owed)
    value_and_grad = jax.value_and_grad(model.loss)

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, value_and_grad(params, microbatch)), None

    if batch.tokens.shape[0] == 1:
        loss, grads = value_and_grad(params, jax.tree.map(lambda x: x[0], batch))
    else:
        zeros = jnp.zeros((), model.dtype), layout.zeros_owed(params, model.dtype)
        (loss, grads), _ = lax.scan(add, zeros, batch)
    return loss, layout.settle(grads), num_tokens


def make_step(
    model: Model, optimizer: optax.GradientTransformation, clip_norm: float
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The function to compile: (state, batch [M, B, S]) -> (state of the same types, metrics)."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        loss, grads, num_tokens = loss_and_grads(model, state.params, batch)
        grad_norm = optax.tree.norm(grads)
        grads = optimizers.clip(grads, grad_norm, clip_norm)
        with jax.numpy_dtype_promotion("standard"):  # optax counts on it; our own code runs under "strict"
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), StepMetrics(loss, grad_norm, num_tokens)

    return step


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of a state: optimizer state lies as its parameter does."""
    opt_state = optax.tree.map_params(
        optimizer,
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
        jax.eval_shape(optimizer.init, model.abstract),
        model.abstract,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=model.layout.whole()),
    )
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=model.layout.whole())
    return TrainState(step, model.abstract, opt_state)


def init_state(model: Model, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Step 0, made where it will lie."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer))
    params = model.init(seed)
    zeros = jax.jit(
        lambda params: (jnp.zeros((), jnp.int32), optimizer.init(params)),
        out_shardings=(shardings.step, shardings.opt_state),
    )
    step, opt_state = zeros(params)
    return TrainState(step, params, opt_state)
