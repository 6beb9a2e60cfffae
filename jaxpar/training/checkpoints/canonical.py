"""A state as it is stored: arrays of their true sizes, layers in the model's order, whatever the mesh it lies on.

The vocabulary's padding is cut off. A stack of layers that a pipeline holds in another order, or with empty slots, is
put in order while `pipe` cuts another of its dims: moved by all-to-alls, it is never whole on a device (unless no dim
divides by `pipe`), and a number of layers that the stages do not divide needs no padding.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jaxpar.parallel.axes import axes_of, without
from jaxpar.parallel.pipeline.executor import AXIS
from jaxpar.parallel.pipeline.stack import EMPTY, slots_of
from jaxpar.training.model import Model
from jaxpar.training.step import TrainState, abstract_state


@dataclass(frozen=True)
class Form:
    """Of one array of a state on its mesh, and stored."""

    here: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    """Stored."""
    order: Int[np.ndarray, " N"] | None
    """The layer in each slot of its first dim, where the store has another order or number of them."""

    def stored(self) -> jax.ShapeDtypeStruct:
        """What to load: whole over the axes that do not divide its true shape."""
        sharding = self.here.sharding or SingleDeviceSharding(jax.devices()[0])
        return jax.ShapeDtypeStruct(self.shape, self.here.dtype, sharding=self._fitting(self._moved(sharding)))

    def to_store(self, leaf: Array) -> Array:
        """The array as it is stored."""
        if self.order is not None:
            leaf = _in_order(leaf, tuple(slots_of(self.order)), self._moved(leaf.sharding))
        if leaf.shape == self.shape:
            return leaf
        return _resize(jax.device_put(leaf, self._fitting(leaf.sharding)), self.shape)

    def from_store(self, leaf: Array) -> Array:
        """The array on its mesh, of one that was stored."""
        if self.order is not None:
            leaf = _in_slots(leaf, tuple(self.order), self.here.sharding)
        if leaf.shape == self.here.shape:
            return leaf
        return jax.device_put(_resize(leaf, self.here.shape), self.here.sharding)

    def _fitting(self, sharding: Any) -> Any:
        """The sharding with the padded dims whole; layers that are put in order are that already."""
        padded = self.here.shape if self.order is None else (self.shape[0], *self.here.shape[1:])
        if not isinstance(sharding, NamedSharding) or padded == self.shape:
            return sharding
        kept = (part if a == b else None for part, a, b in zip(sharding.spec.partitions, padded, self.shape))
        return NamedSharding(sharding.mesh, P(*kept), memory_kind=sharding.memory_kind)

    def _moved(self, sharding: Any) -> Any:
        """The sharding with `pipe` moved from the layers to the longest dim that it still divides."""
        if self.order is None or not isinstance(sharding, NamedSharding):
            return sharding
        sizes = sharding.mesh.shape
        parts = [list(axes_of(part)) for part in without(sharding.spec, {AXIS}).partitions]
        parts += [[] for _ in range(len(self.shape) - len(parts))]
        dims = [
            dim
            for dim in range(1, len(parts))
            if self.here.shape[dim] % math.prod(sizes[axis] for axis in (*parts[dim], AXIS)) == 0
        ]
        if dims:
            parts[max(dims, key=lambda dim: self.here.shape[dim])].append(AXIS)
        spec = P(*(tuple(part) or None for part in parts))
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def forms(model: Model, optimizer: optax.GradientTransformation) -> dict[str, Form]:
    """Of each array of a state, by its path. Raises ValueError for what an optimizer shapes by the padding."""
    order = model.layout.layer_order(model.config.num_units)
    is_in_order = np.array_equal(order, np.arange(order.size))
    vocab = model.config.vocab_size, model.layout.padded_vocab(model.config.vocab_size)
    # One more than there are slots: what then has more layers is a stack of them.
    probe = {"vocab": vocab[0], "layers": order.size + 1}

    def true(leaf: jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        shape = tuple(probe.get(name or "", dim) for name, dim in zip(names, leaf.shape))
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    abstract = dataclasses.replace(abstract_state(model, optimizer), whole=None)
    params = jax.tree.map(true, abstract.params, model.names)
    opt_state = jax.eval_shape(optimizer.init, params)
    probed = flat(dataclasses.replace(abstract, params=params, opt_state=opt_state))
    made = {}
    for path, here in flat(abstract).items():
        shape = list(probed[path].shape)
        is_stacked = bool(shape) and (shape[0], *here.shape[:1]) == (order.size + 1, order.size)
        if is_stacked:
            shape[0] = order.size
        # A factored state may be shaped after which dim is the longest, or long enough.
        if len(shape) != len(here.shape) or any(a != b and (a, b) != vocab for a, b in zip(shape, here.shape)):
            raise ValueError(
                f"{path} has shape {here.shape} with the vocabulary padded to {vocab[1]}, {tuple(shape)} at its true "
                f"size {vocab[0]}, so that it cannot be stored; take --model.vocab-size {vocab[1]}, or another "
                "--optimizer"
            )
        if is_stacked:
            shape[0] = model.config.num_units
        made[path] = Form(here, tuple(shape), order if is_stacked and not is_in_order else None)
    return made


def flat(state: TrainState) -> dict[str, Any]:
    """The state's leaves by path, in the tree's own order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_order(leaf: Array, slots: tuple[int, ...], sharding: NamedSharding) -> Array:
    """The layers in these slots, lying so."""
    return jax.reshard(leaf, sharding).at[np.array(slots)].get(out_sharding=sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_slots(leaf: Array, order: tuple[int, ...], sharding: NamedSharding) -> Array:
    """Each slot's layer, or zeros, lying so."""
    layers = np.array([leaf.shape[0] if layer == EMPTY else layer for layer in order])  # beyond the stack: the fill
    slots = leaf.at[layers].get(mode="fill", fill_value=0, out_sharding=jax.typeof(leaf).sharding)
    return jax.reshard(slots, sharding)


@functools.partial(jax.jit, static_argnames="shape")
def _resize(leaf: Array, shape: tuple[int, ...]) -> Array:
    """The leaf cut, or padded with zeros; its dims that change are whole on every device."""
    padding = [(0, max(0, to - size)) for size, to in zip(leaf.shape, shape)]
    return jnp.pad(leaf[tuple(slice(size) for size in shape)], padding)
