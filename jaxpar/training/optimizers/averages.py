"""Averages of the parameters over the steps, and which parameters are evaluated."""

from typing import NamedTuple

import jax
import optax
from jaxtyping import Array, PyTree

from jaxpar.numerics import widened


class AverageState(NamedTuple):
    params: PyTree


def average_params(decay: float) -> optax.GradientTransformation:
    """Last in a chain: keeps average <- decay x average + (1 - decay) x parameters, from the initial ones on, in at
    least float32. It counts each update before the sum is rounded to the parameters' dtype."""

    def init(params: PyTree) -> AverageState:
        # A copy: a step donates its state, and no buffer twice.
        return AverageState(jax.tree.map(lambda p: p.astype(widened(p.dtype)).copy(), params))

    def update(updates: PyTree, state: AverageState, params: PyTree) -> tuple[PyTree, AverageState]:
        def average(old: Array, param: Array, change: Array) -> Array:
            return old + (1.0 - decay) * (param.astype(old.dtype) + change.astype(old.dtype) - old)

        return updates, AverageState(jax.tree.map(average, state.params, params, updates))

    return optax.GradientTransformation(init, update)


def evaluation_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The parameters to evaluate, sample from and export: their average where one is kept (Schedule-Free's x, arXiv
    2405.15682, or the exponential one), else themselves. Of the types of `params`, however the state is cut."""
    kinds = AverageState, optax.contrib.ScheduleFreeState
    for state in jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(state, AverageState):
            return jax.tree.map(_as, state.params, params)
        if isinstance(state, optax.contrib.ScheduleFreeState):
            alike = state._replace(z=jax.tree.map(_as, state.z, params))
            return jax.tree.map(_as, optax.contrib.schedule_free_eval_params(alike, params), params)
    return params


def _as(value: Array, like: Array) -> Array:
    value = value.astype(like.dtype)
    sharding = jax.typeof(like).sharding
    return value if jax.typeof(value).sharding == sharding else jax.reshard(value, sharding)
