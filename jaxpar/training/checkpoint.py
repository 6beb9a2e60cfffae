"""Checkpoints, through Orbax: the one file that knows it.

What is written does not depend on the mesh: every parameter has its true size, padding of the vocabulary cut off, and
arrays stand in one flat dict by their path in the state. So any mesh reads what any other wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree
from orbax.checkpoint import v1 as ocp

from jaxpar.training import optimizer as optimizers
from jaxpar.training.model import Model
from jaxpar.training.step import TrainState, abstract_state


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, `directory`/<step>, each written whole or not at all."""

    directory: Path
    model: Model
    optimizer: optax.GradientTransformation

    def latest(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        if not self.directory.is_dir():
            return None
        with ocp.training.Checkpointer(self.directory.absolute()) as checkpointer:
            steps = [checkpoint.step for checkpoint in checkpointer.checkpoints]
        # A directory may be there that no checkpoint was ever finished in: Orbax writes its metadata last.
        whole = [step for step in steps if (self.directory / str(step) / "_CHECKPOINT_METADATA").exists()]
        return max(whole, default=None)

    def save(self, state: TrainState) -> None:
        arrays = jax.tree.map(_cut, _flat(state), self._true_shapes())
        with ocp.training.Checkpointer(self.directory.absolute()) as checkpointer:
            checkpointer.save(int(state.step), arrays)

    def restore(self, step: int) -> TrainState:
        """The state on this model's own mesh, whatever mesh wrote it. Raises ValueError where it does not fit."""
        abstract = abstract_state(self.model, self.optimizer)
        stored = jax.tree.map(_stored, _flat(abstract), self._true_shapes())
        try:
            with ocp.training.Checkpointer(self.directory.absolute()) as checkpointer:
                arrays = checkpointer.load(step, stored)
        except Exception as error:  # Orbax and its storage raise of every kind
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise ValueError(
                f"checkpoint {self.directory / str(step)} cannot be restored, being damaged or of another model; move "
                f"it away to go on from the one before, or start over with --no-resume ({reason})"
            ) from error
        leaves = [_pad(arrays[path], leaf) for path, leaf in _flat(abstract).items()]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def _true_shapes(self) -> dict[str, tuple[int, ...]]:
        """Each leaf's shape without padding, by path."""
        vocab_size = self.model.config.vocab_size

        def true(leaf: jax.ShapeDtypeStruct, names: Sequence[str | None]) -> jax.ShapeDtypeStruct:
            shape = tuple(vocab_size if name == "vocab" else dim for name, dim in zip(names, leaf.shape))
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        abstract = abstract_state(self.model, self.optimizer)
        params = jax.tree.map(true, abstract.params, self.model.names)
        opt_state = optimizers.true_shapes(self.optimizer, params)
        shapes = _flat(TrainState(abstract.step, params, opt_state))
        return {path: leaf.shape for path, leaf in shapes.items()}


def _flat(state: TrainState) -> dict[str, Any]:
    """The state's leaves by path, in the tree's own order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _stored(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The leaf as it is stored: of its true shape, whole over the axes that do not divide that."""
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_fitting(leaf.sharding, leaf.shape, shape))


def _fitting(sharding: NamedSharding | None, padded: tuple[int, ...], true: tuple[int, ...]) -> NamedSharding | None:
    if sharding is None or padded == true:
        return sharding
    kept = (part if a == b else None for part, a, b in zip(sharding.spec.partitions, padded, true))
    return NamedSharding(sharding.mesh, P(*kept))


def _cut(leaf: Array, shape: tuple[int, ...]) -> Array:
    def cut(leaf: Array) -> Array:
        return leaf[tuple(slice(size) for size in shape)]

    return _resized(cut, leaf, leaf.shape, shape) if leaf.shape != shape else leaf


def _pad(leaf: Array, like: jax.ShapeDtypeStruct) -> Array:
    def pad(leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, to - size) for size, to in zip(leaf.shape, like.shape)])

    if leaf.shape == like.shape:
        return leaf
    out = _resized(pad, leaf, like.shape, leaf.shape)
    return jax.device_put(out, like.sharding)


def _resized(function: Callable[[Array], Array], leaf: Array, padded: PyTree, true: PyTree) -> Array:
    """function(leaf) with the padded dims whole on every device."""
    sharding = _fitting(leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None, padded, true)
    return jax.jit(function)(leaf if sharding is None else jax.device_put(leaf, sharding))
