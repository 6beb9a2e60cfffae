"""The functional boundary: an NNX model as pure functions over a plain tree of parameters.

Everything after this file (gradients, optimizers, checkpoints) sees nested dicts of arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.parallel.batch import Batch
from jaxpar.parallel.layout import Layout
from models.config import ModelConfig
from models.transformer import Transformer


@dataclass(frozen=True)
class Model:
    """A Transformer on a layout. `dtype` is the master parameters'."""

    config: ModelConfig
    layout: Layout
    dtype: jnp.dtype

    @cached_property
    def _abstract(self) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))

    def _build(self, key: jax.Array) -> Transformer:
        return Transformer(self.config, self.layout.padded_vocab(self.config.vocab_size), key, self.dtype)

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
    def owed(self) -> PyTree:
        """The axes over which each gradient stays unsummed until the end of a step."""

        def axes(param):
            sharding = self._sharding(param)
            return self.layout.owed_axes(sharding.spec, param.summed_over) if sharding else frozenset()

        return self._declared(axes)

    def _sharding(self, param: Any) -> NamedSharding | None:
        if self.layout.mesh is None:
            return None
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

    def loss(self, params: PyTree, batch: Batch) -> Float[Array, ""]:
        return self._module(params).loss(batch, self.layout)

    def logits_at(self, params: PyTree, batch: Batch, index: Int[Array, ""]) -> Float[Array, "B V"]:
        return self._module(params).logits_at(batch, index, self.layout)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
