"""The functional boundary: an NNX model as pure functions over a plain tree of parameters.

Everything after this file (gradients, optimizers, checkpoints) sees nested dicts of arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.numerics import widened
from jaxpar.parallel import zero
from jaxpar.parallel.axes import gathered_axes
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.pipeline import executor, looped, slices
from jaxpar.parallel.vocab import Objective
from models.config import ModelConfig
from models.transformer import Reported, Told, Transformer, auxiliary_loss


@dataclass(frozen=True)
class Model:
    """A Transformer on a layout. `dtype` is the master parameters'."""

    config: ModelConfig
    layout: Layout
    dtype: jnp.dtype
    objective: Objective = field(default_factory=Objective)

    @property
    def sends_ragged(self) -> bool:
        """Whether there are ragged all-to-alls in a step."""
        return self.config.num_experts > 0 and self.layout.dispatch.is_ragged(self.layout.axis_size("expert"))

    @cached_property
    def _abstract(self) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))

    def _build(self, key: jax.Array) -> Transformer:
        layout, config = self.layout, self.config
        padded_vocab, layer_order = layout.padded_vocab(config.vocab_size), layout.layer_order(config.num_units)
        return Transformer(config, padded_vocab, layer_order, key, self.dtype)

    def _module(self, params: PyTree) -> Transformer:
        graph, state = self._abstract
        return nnx.merge(
            graph,
            jax.tree.map(
                lambda variable, value: variable.replace(value), state, nnx.State(params), is_leaf=_is_variable
            ),
        )

    def _declared(self, function) -> PyTree:
        """function(Param) for each parameter, as a plain tree."""
        return nnx.to_pure_dict(jax.tree.map(function, self._abstract[1], is_leaf=_is_variable))

    @cached_property
    def abstract(self) -> PyTree:
        """Shapes, dtypes and shardings."""
        return self._declared(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=self._sharding(p)))

    @cached_property
    def names(self) -> PyTree:
        """Each dim's logical name, `layers` included."""
        return self._declared(lambda p: ("layers",) * (len(p.shape) - len(p.axes)) + p.axes)

    @cached_property
    def specs(self) -> PyTree:
        """Where each parameter is kept, `layers` included."""
        return self._declared(lambda p: self.layout.parameter_spec(p.axes, p.shape))

    @cached_property
    def owed(self) -> PyTree:
        """The axes over which each gradient stays unsummed until the end of a step."""

        def owed(p: Any) -> tuple[str, ...]:
            return self.layout.owed_axes(self.layout.parameter_spec(p.axes, p.shape), p.summed_over, p.summed_sizes)

        return self._declared(owed)

    @property
    def keeps_whole_weights(self) -> bool:
        """Whether a step computes with whole copies of the weights, kept beside the master parameters (ZeRO-1, 2)."""
        return self.layout.mesh is not None and self.layout.zero < 3

    def whole(self, params: PyTree) -> PyTree:
        """Those copies: kernels and embeddings in compute dtype, vectors as they are."""

        def copy(param: Array, names: tuple[str | None, ...]) -> Array:
            dtype = self.layout.compute_dtype if "embed" in names else param.dtype
            return zero.whole(param, dtype, gathered_axes(names))

        return jax.tree.map(copy, params, self.names)

    @cached_property
    def abstract_whole(self) -> PyTree:
        """Shapes, dtypes and shardings of `whole`."""

        def like(param: Any) -> jax.ShapeDtypeStruct:
            sharding = self._sharding(param)
            dtype = self.layout.compute_dtype if "embed" in param.axes else param.dtype
            assert sharding is not None
            spec = self.layout.whole_spec(sharding.spec, param.axes)
            return jax.ShapeDtypeStruct(param.shape, dtype, sharding=self.layout.sharding(spec))

        return self._declared(like)

    def _sharding(self, param: Any) -> NamedSharding | None:
        return self.layout.sharding(self.layout.parameter_spec(param.axes, param.shape))

    def init(self, seed: int) -> PyTree:
        """Parameters made where they will lie, bitwise the same on every mesh."""
        # Traced under no mesh: there the compiler cuts the random draws as their results are cut, so that no device
        # ever holds a whole parameter; under one, a draw is typed as whole everywhere.
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            return self.init_function()(jax.random.key(seed))

    def init_function(self) -> Callable[[jax.Array], PyTree]:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(self._build(key))), out_shardings=shardings)

    def loss(self, params: PyTree, batch: Batch) -> tuple[Float[Array, ""], Reported]:
        """(what is minimised, what is reported), sums over the batch's loss_weights; in the layout's region, of this
        rank's tokens."""
        return self._module(params).loss(batch, self.layout, self.objective)

    def through_pipeline(self, params: PyTree, batch: Batch, fill: float = 0.0) -> tuple[Reported, PyTree]:
        """(what is reported, gradients) of a step's microbatches [M, B, S] by the layout's schedule; in its region. For
        `fill` see executor.run."""
        layout = self.layout.in_stages()
        schedule = layout.schedule
        assert schedule is not None
        before = jax.tree.map(
            lambda _, spec, names: layout.cuts_before_stages(spec, names), params, self.computed_specs, self.names
        )
        params = jax.tree.map(layout.before_stages, params, before, self.names)
        blocks = params["blocks"]
        ends = {name: tree for name, tree in params.items() if name != "blocks"}
        pieces = self.pieces(params, layout)
        if layout.slices:
            sliced = slices.Functions(pieces.embed, self._slice_of_stage(params, layout), pieces.head)
            outcome = slices.run(schedule, layout.slices, sliced, ends, blocks, batch, fill)
        elif schedule.kind in looped.KINDS:
            outcome = looped.run(schedule, pieces, ends, blocks, batch, fill)
        else:
            outcome = executor.run(
                schedule, pieces, ends, blocks, batch, keeps_residuals=layout.keeps_residuals, fill=fill
            )
        loss, told, by_ends, by_blocks = outcome
        grads = jax.tree.map(layout.summed, {**by_ends, "blocks": by_blocks}, before)
        return Reported(loss, told), grads

    def pieces(self, params: PyTree, layout: Layout) -> executor.Functions:
        """The model as a pipeline takes it; of `params` the values do not count where a piece is given its own."""
        specs = jax.tree.leaves(self.computed_specs["blocks"], is_leaf=_is_spec)
        names = jax.tree.leaves(self.names["blocks"], is_leaf=lambda node: isinstance(node, tuple))
        cuts = [layout.cuts_in_stages(spec, axes) for spec, axes in zip(specs, names, strict=True)]

        def module(own: PyTree) -> Transformer:
            return self._module({**params, **own})

        def stage(blocks: PyTree, x: Array, microbatch: Batch, part: Int[Array, ""]) -> tuple[Array, Array, Told]:
            x, told = module({}).stack(nnx.State(blocks), x, microbatch, layout, part)
            return x, auxiliary_loss(told, widened(x.dtype)), told

        def is_weight(_: Array, names: tuple[str | None, ...]) -> bool:
            return "embed" in names and "experts" not in names

        return executor.Functions(
            embed=lambda ends, microbatch: module(ends).embed(microbatch, layout),
            stage=stage,
            head=lambda ends, x, microbatch: module(ends).head_loss(x, microbatch, layout, self.objective),
            are_weights=jax.tree.map(is_weight, params["blocks"], self.names["blocks"]),
            summed=lambda grads: {number: layout.summed(grad, cuts[number]) for number, grad in grads.items()},
            are_ends_spread=layout.spreads_head,
        )

    def _slice_of_stage(self, params: PyTree, layout: Layout) -> Callable[..., tuple[Array, PyTree, Array, Told]]:
        """See slices.Functions."""

        def stage(
            blocks: PyTree, x: Array, before: PyTree, microbatch: Batch, earlier: Batch, part: Int[Array, ""]
        ) -> tuple[Array, PyTree, Array, Told]:
            module = self._module(params)
            x, told, made = module.stack_after(nnx.State(blocks), x, before, microbatch, earlier, layout, part)
            return x, made, auxiliary_loss(told, widened(x.dtype)), told

        return stage

    def logits_at(self, params: PyTree, batch: Batch, place: Int[Array, ""]) -> Float[Array, "B V"]:
        """Of arrays on the mesh [B, S]."""
        layout = self.layout

        def local(params: PyTree, batch: Batch, place: Array) -> Array:
            return self._module(params).logits_at(batch, place, layout)

        params = self.computed_with(params)
        specs = self.computed_specs, layout.spec("batch", "seq"), P()
        return layout.region(local, specs, layout.spec("batch", None))(params, batch, place)

    def computed_with(self, params: PyTree) -> PyTree:
        """What a forward pass takes, made of master parameters."""
        return self.whole(params) if self.keeps_whole_weights else params

    @cached_property
    def computed_specs(self) -> PyTree:
        if not self.keeps_whole_weights:
            return self.specs
        return self._declared(lambda p: self.layout.whole_spec(self.layout.parameter_spec(p.axes, p.shape), p.axes))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)
