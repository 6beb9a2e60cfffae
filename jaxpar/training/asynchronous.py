"""A train step of an asynchronous pipeline: a window of M microbatches with the optimizer's updates among them.

What a step is, where parallel.pipeline.asynchronous has the updates' formulas:
- The loss of an update is the mean over the valid tokens of its own microbatches. The reported one is the mean over the
  window's tokens, of each microbatch at the weights that it was run with.
- The learning rate goes by train steps: all updates of a window take its step's. All else that an optimizer counts,
  Adam's bias correction, weight decay and averages of the parameters, goes by updates.
- The gradient's norm is the root mean square of those of the window's updates, each stage's at its own time.

The optimizer must be elementwise: it updates each rank's parts of what a stage has, and sees nothing else.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.config import Config
from jaxpar.numerics import widened
from jaxpar.parallel import fsdp
from jaxpar.parallel.axes import mesh_axes
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.pipeline import asynchronous, executor
from jaxpar.parallel.pipeline.asynchronous import Parts
from jaxpar.training.model import Model
from models.transformer import Reported

OPTIMIZERS = ("adamw", "lion", "sgd")
_NAMES = Parts(("embedding", "position_embedding"), ("blocks",), ("final_norm", "head"))
"""Of parameters, their first words."""


class Window(NamedTuple):
    """What a step makes."""

    reported: Reported
    gradients: PyTree
    """The root mean square, over the updates, of the norm of each parameter's gradient."""
    num_tokens: Float[Array, ""]
    params: PyTree
    opt_state: PyTree


def check(config: Config) -> None:
    """Raise ValueError, in one line, for what an asynchronous pipeline cannot have."""
    kind, optimizer, run = f"--pipeline {config.parallel.pipeline}", config.optimizer, config.run
    if optimizer.name not in OPTIMIZERS:
        raise ValueError(
            f"{kind} updates each stage by itself, which --optimizer {optimizer.name} cannot; these can: "
            f"{', '.join(OPTIMIZERS)}"
        )
    if optimizer.clip_norm:
        raise ValueError(
            f"--optimizer.clip-norm {optimizer.clip_norm:g} needs the norm of all stages' gradients, but {kind} "
            "updates each stage by itself; set --optimizer.clip-norm 0"
        )
    if config.parallel.zero != 3:
        raise ValueError(f"--zero {config.parallel.zero} keeps one version of the weights, {kind} several; take 3")
    if run.precision == "float16":
        raise ValueError(f"{kind} has no loss scale for --precision float16; take bfloat16 or float32")
    if run.params_dtype == "bfloat16":
        raise ValueError(f"{kind} does not round its updates stochastically; leave --params-dtype at auto")
    for flag, is_asked in (
        ("--spread-head", config.parallel.spread_head),
        ("--pipeline-residuals", config.parallel.pipeline_residuals),
    ):
        if is_asked:
            raise ValueError(f"{flag} does not go with {kind}; leave it out")
    if config.model.num_experts:
        raise ValueError(
            f"{config.model.name} is a mixture of experts, whose losses {kind} does not know; take a synchronous kind, "
            "such as 1f1b"
        )
    if config.model.tie_embeddings:
        raise ValueError(
            f"{config.model.name} ties its embedding to the head, but {kind} updates them at different times, on the "
            "first and the last stage; set --model.no-tie-embeddings"
        )


def make_window(
    model: Model, optimizer: optax.GradientTransformation, opt_specs: PyTree
) -> Callable[[PyTree, PyTree, Int[Array, ""], Batch], Window]:
    """The function (params, opt_state, steps done, batch [M, B, S]) -> Window, of arrays on the mesh; `opt_specs` says
    where opt_state lies."""
    in_specs = model.specs, opt_specs, P(), model.layout.stacked_batch_spec()
    whole = jax.tree.map(lambda _: P(), model.abstract)
    reported = Reported(P(), P("pipe"))  # type: ignore[arg-type]  # specs in the place of arrays
    out_specs = Window(reported, whole, P(), model.specs, opt_specs)  # type: ignore[arg-type]
    return model.layout.region(partial(_local, model, optimizer, opt_specs), in_specs, out_specs)


class _State(NamedTuple):
    """What a part's updates keep."""

    opt_state: PyTree
    """Of the whole tree of parameters, those of other parts without elements."""
    squares: PyTree
    """Of each parameter's gradient, of this rank's elements, summed over the updates."""


def _local(
    model: Model,
    optimizer: optax.GradientTransformation,
    opt_specs: PyTree,
    params: PyTree,
    opt_state: PyTree,
    step: Int[Array, ""],
    batch: Batch,
) -> Window:
    """One rank's part."""
    # Weights change: those of FSDP are gathered each time. The ends are one stage's for as long as a window lasts.
    layout = dataclasses.replace(model.layout, gathered_over=frozenset({executor.AXIS}))
    wide, specs = widened(model.dtype), (model.specs, opt_specs)
    assert layout.schedule is not None
    params, opt_state = jax.tree_util.tree_map_with_path(partial(_whole_end, layout), (params, opt_state), specs)
    of_update = asynchronous.updates_of(layout.schedule)
    num_updates = int(of_update[-1]) + 1
    counts = layout.sum_over_tokens(jnp.sum(batch.loss_weights, (1, 2))).astype(wide)
    totals = jax.ops.segment_sum(counts, of_update, num_updates)[of_update]
    num_tokens = jnp.sum(counts)
    loss_weights = batch.loss_weights.astype(wide) / jnp.maximum(totals, 1.0)[:, None, None]
    batch = dataclasses.replace(batch, loss_weights=loss_weights)
    shares = totals / jnp.maximum(num_tokens, 1.0)

    def update(weights: PyTree, state: _State, gradients: PyTree) -> tuple[PyTree, _State]:
        gradients = layout.settle(gradients, {name: _without_pipe(model.owed[name]) for name in weights})
        gradients = jax.tree.map(lambda g: g.astype(wide), gradients)
        squares = jax.tree.map(lambda total, g: total + jnp.sum(jnp.square(g)), state.squares, gradients)
        others = jax.tree.map(lambda leaf: leaf[:0], params)
        with jax.numpy_dtype_promotion("standard"):  # as in training.step
            changes, new = optimizer.update({**others, **gradients}, state.opt_state, {**others, **weights})
            weights = optax.apply_updates(weights, {name: changes[name] for name in weights})
        return weights, _State(_at_step(new, step), squares)

    parts = Parts(*({name: params[name] for name in params if _part_of(name) == part} for part in Parts._fields))
    states = Parts(
        *(
            _State(_only(opt_state, part), jax.tree.map(lambda _: jnp.zeros((), wide), own))
            for part, own in zip(Parts._fields, parts, strict=True)
        )
    )
    pieces = model.pieces(params, layout)

    def stage(layers: PyTree, x: Array, **where: PyTree) -> tuple[Array, Array, PyTree]:
        return pieces.stage(layers["blocks"], x, **where)

    loss, told, parts, states = asynchronous.run(
        layout.schedule,
        dataclasses.replace(pieces, stage=stage),
        Parts(update, update, update),
        parts,
        states,
        batch,
        shares,
    )
    squares = {name: tree for state in states for name, tree in state.squares.items()}
    sums = jax.tree_util.tree_map_with_path(partial(_sum_over_cuts, layout), squares, model.specs)
    params = {name: tree for part in parts for name, tree in part.items()}
    opt_state = _at_step(_joined(Parts(*(state.opt_state for state in states))), step + 1)
    params, opt_state = jax.tree_util.tree_map_with_path(partial(_own_end, layout), (params, opt_state), specs)
    return Window(
        jax.tree.map(layout.sum_over_tokens, Reported(loss, told)),
        jax.tree.map(lambda total: jnp.sqrt(total / num_updates), sums),
        num_tokens,
        params,
        opt_state,
    )


def _part_of(name: str) -> str:
    """Which of the Parts a parameter is in, by its name's first word."""
    return next(part for part, names in zip(Parts._fields, _NAMES, strict=True) if name in names)


def _without_pipe(owed: PyTree) -> PyTree:
    """The axes over which a gradient is a sum of one stage's ranks."""
    return jax.tree.map(
        lambda axes: tuple(axis for axis in axes if axis != executor.AXIS),
        owed,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _cuts(layout: Layout, path: tuple, spec: P) -> fsdp.Cuts:
    """The dims of a leaf that are cut over stages, and are not layers."""
    return layout.cuts_before_stages(spec, ("layers" if _owner(path) == "layers" else None,))


def _whole_end(layout: Layout, path: tuple, leaf: Array, spec: P) -> Array:
    """A leaf as the stages have it in a window."""
    for dim, axes in _cuts(layout, path, spec):
        leaf = lax.all_gather(leaf, axes, axis=dim, tiled=True)
    return leaf


def _own_end(layout: Layout, path: tuple, leaf: Array, spec: P) -> Array:
    """This rank's part of it."""
    for dim, axes in _cuts(layout, path, spec):
        size = leaf.shape[dim] // layout.axis_size(*axes)
        leaf = lax.dynamic_slice_in_dim(leaf, lax.axis_index(axes) * size, size, dim)
    return leaf


def _sum_over_cuts(layout: Layout, path: tuple, square: Array, spec: P) -> Array:
    """Over the ranks that have other elements of a parameter."""
    whole_over = frozenset() if _owner(path) == "layers" else {executor.AXIS}
    axes = layout.present(mesh_axes(spec) - whole_over)
    return lax.psum(square, axes) if axes else square


def _only(opt_state: PyTree, part: str) -> PyTree:
    """The state with no elements of what belongs to other parts."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if _owner(path) in (None, part) else leaf[:0], opt_state
    )


def _joined(states: Parts) -> PyTree:
    """Each parameter's state from its part; what all of them count, from the layers'."""

    def join(path: tuple, *leaves: Array) -> Array:
        return leaves[Parts._fields.index(_owner(path) or "layers")]

    return jax.tree_util.tree_map_with_path(join, *states)


def _owner(path: tuple) -> str | None:
    """Which part a leaf of parameters or an optimizer's state is of; None for a count."""
    names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    first = next(names, None)
    return None if first is None else _part_of(first)


def _at_step(opt_state: PyTree, step: Int[Array, ""]) -> PyTree:
    """The state with the learning rate's count at a step, which every update moves on."""

    def is_schedule(node: PyTree) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda node: node._replace(count=step) if is_schedule(node) else node, opt_state, is_leaf=is_schedule
    )
