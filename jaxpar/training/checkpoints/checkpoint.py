"""Checkpoints, through Orbax: the one file that knows it.

What is written does not depend on the mesh: every parameter has its true size, padding of the vocabulary cut off, and
its layers in order; arrays stand in one flat dict by their path in the state. So any mesh reads what any other wrote.

A checkpoint is written under another name, its digests are taken, and then it is given its own: <step> is a whole
checkpoint, or was damaged since.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from orbax.checkpoint import v1 as ocp

from jaxpar import toml
from jaxpar.config import Config
from jaxpar.parallel.axes import mesh_axes
from jaxpar.training.checkpoints import integrity
from jaxpar.training.distributed.processes import from_each, from_first
from jaxpar.training.model import Model
from jaxpar.training.step import TrainState, abstract_state, with_whole_weights

log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\d+\.(unfinished|replaced|removed)\b")


class Checkpoints:
    """The checkpoints of a run, `directory`/<step>. A context: leaving it waits for the one that is being written.

    All processes make the same calls, and see the same directory.
    """

    def __init__(
        self,
        directory: Path,
        model: Model,
        optimizer: optax.GradientTransformation,
        config: Config,
        data_fingerprint: str = "",
    ):
        """Raises ValueError where the optimizer's state cannot be stored without the vocabulary's padding."""
        self.directory = directory.absolute()
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.data_fingerprint = data_fingerprint
        self.last_saved: int | None = None
        """The step of the newest whole checkpoint that this object wrote or restored."""
        self._shapes = _true_shapes(model, optimizer)
        self._layer_order = model.layout.layer_order(model.config.num_units)
        self._verified: int | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._saves = 0

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown()
        if self._saves:  # else the directory may be another's, who is writing in it
            with contextlib.suppress(OSError):
                self._clear()

    def latest(self) -> int | None:
        """As the function `latest`; `restore` does not verify that step again."""
        self._verified = latest(self.directory)
        return self._verified

    def save(self, state: TrainState) -> None:
        """Begin to write a checkpoint; returns when the state is copied, so that a step may donate it.

        Waits for the one before. Where it cannot be written, the log says so, and nothing is raised.
        """
        self.wait()
        self._saves += 1
        step = int(state.step)
        data = self.config.data
        metadata = {
            "config": toml.dumps(self.config),
            "data": self.data_fingerprint,
            "position": {
                "step": step,
                "sequences": step * data.batch_size,
                "tokens": step * data.batch_size * data.seq_len,
            },
        }
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clear()
            arrays = {
                path: _cut(self._reordered(leaf, np.argsort(self._layer_order)), self._shapes[path])
                for path, leaf in _flat(dataclasses.replace(state, whole=None)).items()
            }
            written = ocp.save_async(self._unfinished(step), arrays, overwrite=True, custom_metadata=metadata)
        except Exception as error:  # Orbax and its storage raise of every kind
            self._failed(step, error)
        else:
            self._writing = self._writer.submit(self._finish, step, written)

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole, or has failed."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def restore(self, step: int) -> TrainState:
        """The state on this model's own mesh, whatever mesh wrote it. Raises ValueError where it is damaged or does not
        fit."""
        path = self.directory / str(step)
        if step != self._verified and (problem := _problem(path)):
            raise ValueError(f"checkpoint {path} is damaged: {problem}; give another, or start over with --no-resume")
        abstract = dataclasses.replace(abstract_state(self.model, self.optimizer), whole=None)
        stored = {name: _stored(leaf, self._shapes[name]) for name, leaf in _flat(abstract).items()}
        there = describe(path)
        if self.data_fingerprint != there.data_fingerprint:
            raise ValueError(
                f"checkpoint {path} is of other text than --data {self.config.data.source} has now; bring it back, or "
                "start over with --no-resume"
            )
        if odd := _difference(there.arrays, stored):
            raise ValueError(
                f"checkpoint {path} is of another model or optimizer: {odd}; take another --run-dir, or start over "
                "with --no-resume"
            )
        arrays = ocp.load(path, stored)
        leaves = [
            self._reordered(_pad(arrays[name], leaf), self._layer_order) for name, leaf in _flat(abstract).items()
        ]
        state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        if int(state.step) != step:
            raise ValueError(f"checkpoint {path} is of step {int(state.step)}; rename it so, or move it away")
        self.last_saved = step
        return with_whole_weights(self.model, state)

    def _reordered(self, leaf: Array, order: np.ndarray) -> Array:
        """The leaf with its layers in that order: they are what is cut over `pipe`."""
        sharding = leaf.sharding
        is_stacked = isinstance(sharding, NamedSharding) and "pipe" in mesh_axes(sharding.spec)
        if not is_stacked or np.array_equal(order, np.arange(order.size)):
            return leaf
        return jax.jit(lambda leaf: leaf.at[order].get(out_sharding=sharding))(leaf)

    def _unfinished(self, step: int) -> Path:
        return self.directory / f"{step}.unfinished"

    def _finish(self, step: int, written: ocp.AsyncResponse[None]) -> None:
        unfinished, count = self._unfinished(step), jax.process_count()
        try:
            written.result()
            try:
                integrity.write_share(unfinished, jax.process_index(), count)
            finally:
                self._meet("digested")  # also after a failure, for which the others must not wait
            try:
                if jax.process_index() == 0:
                    integrity.seal(unfinished, count)
                    self._publish(step)
            finally:
                self._meet("published")
            if (self.directory / str(step)).is_dir():  # process 0 may have failed
                self.last_saved = step
        except Exception as error:
            self._failed(step, error)

    def _publish(self, step: int) -> None:
        """Give a whole checkpoint its name."""
        final = self.directory / str(step)
        if final.exists():  # and was passed over when the run went on from an earlier one
            final.rename(final.with_name(f"{step}.replaced"))
        self._unfinished(step).rename(final)
        _sync(self.directory)
        try:
            self._prune(step)
        except OSError as error:
            log.warning("old checkpoints in %s not removed: %s", self.directory, _reason(error))

    def _prune(self, step: int) -> None:
        run = self.config.run
        if run.keep_checkpoints:
            # Later steps are no checkpoints of this run as it went on: they do not count, and are done again.
            for old in [other for other in steps(self.directory) if other <= step][: -run.keep_checkpoints]:
                if not (run.keep_every and old % run.keep_every == 0):
                    (self.directory / str(old)).rename(self.directory / f"{old}.removed")
        self._clear()

    def _clear(self) -> None:
        """Remove what is left of checkpoints that were never finished, or are no longer kept."""
        if jax.process_index() == 0:
            for child in self.directory.iterdir():
                if _LEFTOVER.match(child.name):
                    shutil.rmtree(child)

    def _failed(self, step: int, error: Exception) -> None:
        have = "none is" if self.last_saved is None else f"step {self.last_saved} is the last"
        log.warning("checkpoint of step %d not saved: %s; training goes on, %s saved", step, _reason(error), have)
        with contextlib.suppress(OSError):  # threads of a failed save may still write; the next save tries again
            self._clear()

    def _meet(self, where: str) -> None:
        """Wait for the other processes; not over the devices, which are at work."""
        key = f"{self.directory} {self._saves} {where}"
        asyncio.run(ocp.multihost.sync_global_processes(key, operation_id="checkpoint"))


def steps(directory: Path) -> list[int]:
    """The steps that have a directory, rising."""
    if not directory.is_dir():
        return []
    return sorted(int(child.name) for child in directory.iterdir() if child.name.isdigit() and child.is_dir())


def latest(directory: Path) -> int | None:
    """The step of the newest whole checkpoint, read to its last byte; None where there are no checkpoints.

    The log says which were passed over, and why. Raises ValueError where there are some, but not one that is whole.
    """
    found = json.loads(from_first("checkpoints", lambda: json.dumps(steps(directory))))
    for step in reversed(found):
        problem = _problem(directory / str(step))
        if problem is None:
            return step
        log.warning("checkpoint %s is passed over: %s", directory / str(step), problem)
    if found:
        raise ValueError(
            f"{directory} has no whole checkpoint, of {len(found)}: bring one back, or start over with --no-resume"
        )
    return None


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds."""

    config: str
    """As TOML."""
    position: dict[str, int]
    """Where in the data the run stood: steps done, sequences and tokens seen."""
    data_fingerprint: str
    arrays: dict[str, jax.ShapeDtypeStruct]
    """By path in the state."""


def describe(path: Path) -> Stored:
    """What is in a whole checkpoint."""
    found = ocp.metadata(path.absolute())
    arrays = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in found.metadata.items()}
    kept = found.custom_metadata
    return Stored(kept["config"], kept["position"], kept["data"], arrays)


def read(path: Path, name: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """One array of a whole checkpoint, in the host's memory."""
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return ocp.load(path.absolute(), {name: np.broadcast_to(np.zeros((), like.dtype), like.shape)})[name]


def _problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, each process reading its share."""
    own = integrity.damage(path, jax.process_index(), jax.process_count())
    problems = from_each(f"checkpoint {path.name} is whole", own or "")
    return own or ("another process cannot read it whole" if any(problems) else None)


def _true_shapes(model: Model, optimizer: optax.GradientTransformation) -> dict[str, tuple[int, ...]]:
    """Each leaf's shape without padding, by path."""
    vocab_size = model.config.vocab_size

    def true(leaf: jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        shape = tuple(vocab_size if name == "vocab" else dim for name, dim in zip(names, leaf.shape))
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    abstract = dataclasses.replace(abstract_state(model, optimizer), whole=None)
    params = jax.tree.map(true, abstract.params, model.names)
    opt_state = jax.eval_shape(optimizer.init, params)
    shapes = {
        path: leaf.shape
        for path, leaf in _flat(dataclasses.replace(abstract, params=params, opt_state=opt_state)).items()
    }
    sizes = (vocab_size, model.layout.padded_vocab(vocab_size))
    for path, leaf in _flat(abstract).items():
        # A factored state may be shaped after which dim is the longest, or long enough.
        shape = shapes[path]
        if len(shape) != len(leaf.shape) or any(a != b and (a, b) != sizes for a, b in zip(shape, leaf.shape)):
            raise ValueError(
                f"{path} has shape {leaf.shape} with the vocabulary padded to {sizes[1]}, {shape} at its true size "
                f"{vocab_size}, so that it cannot be stored; take --model.vocab-size {sizes[1]}, or another --optimizer"
            )
    return shapes


def _flat(state: TrainState) -> dict[str, Any]:
    """The state's leaves by path, in the tree's own order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _stored(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The leaf as it is stored: of its true shape, whole over the axes that do not divide that."""
    sharding = leaf.sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_fitting(sharding, leaf.shape, shape))


def _difference(there: dict[str, jax.ShapeDtypeStruct], here: dict[str, jax.ShapeDtypeStruct]) -> str | None:
    """The first array that two states do not have alike."""

    def text(arrays: dict[str, jax.ShapeDtypeStruct], name: str) -> str:
        return f"{arrays[name].dtype.name}{list(arrays[name].shape)}" if name in arrays else "absent"

    for name in [*here, *there]:
        if text(there, name) != text(here, name):
            return f"{name} is {text(there, name)} there, {text(here, name)} here"
    return None


def _fitting(sharding: Any, padded: tuple[int, ...], true: tuple[int, ...]) -> Any:
    """The sharding with the padded dims whole."""
    if not isinstance(sharding, NamedSharding) or padded == true:
        return sharding
    kept = (part if a == b else None for part, a, b in zip(sharding.spec.partitions, padded, true))
    return NamedSharding(sharding.mesh, P(*kept), memory_kind=sharding.memory_kind)


def _cut(leaf: Array, shape: tuple[int, ...]) -> Array:
    if leaf.shape == shape:
        return leaf
    return _resize(jax.device_put(leaf, _fitting(leaf.sharding, leaf.shape, shape)), shape)


def _pad(leaf: Array, like: jax.ShapeDtypeStruct) -> Array:
    if leaf.shape == like.shape:
        return leaf
    return jax.device_put(_resize(leaf, like.shape), like.sharding)


@functools.partial(jax.jit, static_argnames="shape")
def _resize(leaf: Array, shape: tuple[int, ...]) -> Array:
    """The leaf cut, or padded with zeros; its dims that change are whole on every device."""
    padding = [(0, max(0, to - size)) for size, to in zip(leaf.shape, shape)]
    return jnp.pad(leaf[tuple(slice(size) for size in shape)], padding)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]


def _sync(directory: Path) -> None:
    """See a directory's names onto the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
