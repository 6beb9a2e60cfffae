"""One training step: gradients, an optimizer's update, and the state that goes from one step to the next."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.config import Config
from jaxpar.numerics import widened
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.pipeline import kinds
from jaxpar.training import asynchronous, optimizers
from jaxpar.training.gradients import loss_and_grads
from jaxpar.training.model import Model
from jaxpar.training.precision import LossScale, round_stochastically
from jaxpar.training.reporting.norms import group_norms
from models.moe import figures
from models.transformer import balanced


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes."""

    step: Int[Array, ""]
    """Steps done."""
    params: PyTree
    """The master copy."""
    opt_state: PyTree
    whole: PyTree | None = None
    """`model.whole(params)` under ZeRO-1 and 2."""
    loss_scale: LossScale | None = None
    """In float16."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    loss: Float[Array, ""]
    """Cross-entropy per valid token, in nats."""
    grad_norm: Float[Array, ""]
    """Global, before clipping; of several updates the root mean square."""
    num_tokens: Float[Array, ""]
    """Valid tokens of this step."""
    norms: dict[str, tuple[Array, Array]] | None = None
    """Of each group of parameters and of its gradient, where asked for."""
    routing: dict[str, Float[Array, ""]] = field(default_factory=dict)
    """Of mixtures of experts, see models.moe.figures."""


def make_step(
    model: Model, optimizer: optax.GradientTransformation, clip_norm: float, log_norms: bool = False
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The function to compile: (state, batch [M, B, S]) -> (state of the same types, metrics)."""
    if kinds.is_asynchronous(model.layout.schedule):
        assert clip_norm == 0
        return _make_asynchronous_step(model, optimizer, log_norms)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        scale = state.loss_scale.scale if state.loss_scale is not None else None
        reported, grads, num_tokens = loss_and_grads(
            model, state.params, batch, whole=state.whole, scale=scale, step=state.step
        )
        told = jax.tree.map(lambda leaf: jax.reshard(leaf, P()), reported.told) if model.layout.mesh else reported.told
        grad_norm = optax.tree.norm(grads)
        norms = None
        if log_norms:
            of_params, of_grads = group_norms(state.params), group_norms(grads)
            norms = {group: (of_params[group], of_grads[group]) for group in of_params}
        grads = optimizers.clip(grads, grad_norm, clip_norm)
        params = wide(state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax counts on it; our own code runs under "strict"
            updates, opt_state = optimizer.update(grads, state.opt_state, params)
            params = optax.apply_updates(params, updates)
        params = balanced(model.config, params, reported.told)
        if model.dtype == jnp.bfloat16:
            params = round_stochastically(params, model.dtype, state.step)
        loss_scale = None
        if state.loss_scale is not None:
            is_finite = jnp.isfinite(grad_norm)
            loss_scale = state.loss_scale.after(is_finite)
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(is_finite, new, old), (params, opt_state), (state.params, state.opt_state)
            )
        whole = model.whole(params) if model.keeps_whole_weights else None
        state = TrainState(state.step + 1, params, opt_state, whole, loss_scale)
        return state, StepMetrics(reported.loss, grad_norm, num_tokens, norms, figures(model.config, told))

    return step


def _make_asynchronous_step(
    model: Model, optimizer: optax.GradientTransformation, log_norms: bool
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    opt_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_state(model, optimizer).opt_state)
    window = asynchronous.make_window(model, optimizer, opt_specs)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        reported, gradients, num_tokens, params, opt_state = window(state.params, state.opt_state, state.step, batch)
        norms = None
        if log_norms:
            of_params, of_grads = group_norms(state.params), group_norms(gradients)
            norms = {group: (of_params[group], of_grads[group]) for group in of_params}
        metrics = StepMetrics(reported.loss, optax.tree.norm(gradients), num_tokens, norms)
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


def wide(params: PyTree) -> PyTree:
    """What an optimizer sees of the parameters: in at least float32."""
    return jax.tree.map(lambda p: p.astype(widened(p.dtype)), params)


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of a state: optimizer state lies as its parameter does."""

    def like(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=model.layout.whole())

    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, widened(leaf.dtype), sharding=leaf.sharding), model.abstract
    )
    opt_state = optimizers.abstract_state(optimizer, params, model.layout.mesh)
    return TrainState(
        step=like(jax.ShapeDtypeStruct((), jnp.int32)),
        params=model.abstract,
        opt_state=opt_state,
        whole=model.abstract_whole if model.keeps_whole_weights else None,
        loss_scale=jax.tree.map(like, jax.eval_shape(LossScale.initial)) if _is_scaled(model) else None,
    )


def abstract_batch(config: Config, model: Model) -> Batch:
    """Shapes [M, B, S], dtypes and shardings of a step's batch."""
    microbatches = config.parallel.grad_accumulation
    shape = (microbatches, config.data.batch_size // microbatches, config.data.seq_len)
    sharding = model.layout.sharding(model.layout.stacked_batch_spec())

    def like(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Batch(like(jnp.int32), like(jnp.int32), like(jnp.int32), like(jnp.int32), like(jnp.float32))


def with_whole_weights(model: Model, state: TrainState) -> TrainState:
    """The state with what ZeRO-1 and 2 keep beside its master parameters."""
    whole = jax.jit(model.whole)(state.params) if model.keeps_whole_weights else None
    return dataclasses.replace(state, whole=whole)


def _is_scaled(model: Model) -> bool:
    return model.layout.compute_dtype == jnp.float16


def init_state(model: Model, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Step 0, made where it will lie."""
    params = model.init(seed)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer))

    def start(params: PyTree) -> TrainState:
        whole = model.whole(params) if model.keeps_whole_weights else None
        loss_scale = LossScale.initial() if _is_scaled(model) else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(wide(params)), whole, loss_scale)

    return jax.jit(start, out_shardings=shardings, donate_argnums=0)(params)
