"""Asynchronous pipelines: PipeDream (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503). Nobody waits for the
gradients of a whole step: a stage updates its weights between one microbatch and the next.

Splits: as executor.py does. In the formulas t counts updates of M microbatches in a row, f is the optimizer's update:
    PipeDream   w(t+1) = w(t) - f(gradient at w_1(t-P+1), ..., w_P(t)); section 3.3, weight stashing
                every microbatch's gradient is an update; stage s runs P-1-s behind, and what a microbatch's forward
                pass took is kept for its backward pass: P - s versions
    2BW         w(t+1) = w(t) - f(gradient at w(t-1)); section 3.1, double buffering
                an update has the gradients of at least P microbatches, and the next ones' are of the weights before
                it, which are there on every stage by then: two versions, the same ones everywhere
The embedding is the first stage's, final norm and head are the last one's. A lookup's backward pass takes no weights,
the head's follows its forward pass at once: under PipeDream they need no stash.
The pipeline drains after M microbatches, so that metrics, evaluation and checkpoints see one model, of which all of it
has had all updates. Both formulas hold from one drain to the next, w(t) = w(0) for t < 0: M should be many times P.
Collectives, in bytes: per tick A for outputs and for gradients, as in executor.py; per update of a stage the all-reduce
of its own gradients over `data` and whatever else owes them; per M microbatches one all-reduce over `pipe` of the
embedding, final norm, head and of what the optimizer keeps of them, before which those with a vocabulary, cut over
`pipe` in between, are gathered. FSDP's weights are gathered in each action, since they change.
Memory: every rank has as many versions as the stage with the most (P under PipeDream), in the parameters' own dtype;
gradients are kept under 2BW alone.
Limits: one chunk; an action copies its version of the weights out of the stack; a backward pass computes its stage's
forward pass again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.numerics import widened
from jaxpar.parallel.pipeline import trees
from jaxpar.parallel.pipeline.executor import AXIS, Functions
from jaxpar.parallel.pipeline.hops import Hops
from jaxpar.parallel.pipeline.program import Branch, Program, Table
from jaxpar.parallel.pipeline.schedule import Op, Schedule

Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""(weights, state, gradients) -> (weights, state), of the rank's own part; in a branch that one stage takes alone."""


class Parts(NamedTuple):
    """One for each part of a model that is updated by itself: what the first stage has beside its layers, any stage's
    layers, what the last stage has."""

    first: Any
    layers: Any
    last: Any


def updates_of(schedule: Schedule) -> Int[np.ndarray, " M"]:
    """Which update, from 0 on, each microbatch's gradient is for: PipeDream one each, 2BW as many as have at least P
    microbatches, of as equal numbers as possible."""
    num_microbatches = schedule.num_microbatches
    if schedule.kind == "pipedream":
        return np.arange(num_microbatches)
    assert schedule.kind == "pipedream-2bw"
    split = np.array_split(np.arange(num_microbatches), max(1, num_microbatches // schedule.num_stages))
    return np.repeat(np.arange(len(split)), [len(each) for each in split])


@dataclass(frozen=True)
class Versions:
    """Which weights an action uses; a version is the number of updates that it has had."""

    reads: Table
    latest: Table
    """Of the action's stage, before it."""
    closes: Bool[np.ndarray, "T P"]
    """Whether the microbatch is the last one of its update."""
    num_updates: int
    num_kept: Parts
    """How many of the latest versions are ever read or updated: version v lies in slot v modulo that."""

    @classmethod
    def of(cls, schedule: Schedule) -> "Versions":
        update = updates_of(schedule)
        shape = schedule.num_ticks, schedule.num_stages
        reads, latest = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        closes, is_forward = np.zeros(shape, bool), np.zeros(shape, bool)
        num_done, taken = [0] * schedule.num_stages, {}
        for tick, stage, action in schedule.actions():
            at, microbatch = (tick, stage), action.microbatch
            if action.op is Op.F:
                is_forward[at] = True
                before = max(0, update[microbatch] - 1)
                taken[stage, microbatch] = num_done[stage] if schedule.kind == "pipedream" else before
            reads[at], latest[at] = taken[stage, microbatch], num_done[stage]
            closes[at] = microbatch + 1 == len(update) or update[microbatch + 1] > update[microbatch]
            assert reads[at] <= latest[at]
            num_done[stage] += bool(action.op is Op.BW and closes[at])
        age = latest - reads
        of_ends = np.where(is_forward, age, 0)
        num_kept = Parts(*(int(each.max()) + 1 for each in (of_ends[:, 0], age, of_ends[:, -1])))
        return cls(reads, latest, closes, int(update[-1]) + 1, num_kept)


class _Kept(NamedTuple):
    """What a rank has of one of the parts."""

    versions: PyTree
    """[num_kept, ...]"""
    state: PyTree
    sums: PyTree | None
    """Gradients of the update that comes next; None where every microbatch's is one."""


def run(
    schedule: Schedule,
    functions: Functions,
    updates: Parts,
    weights: Parts,
    states: Parts,
    batch: PyTree,
    shares: Float[Array, " M"],
    fill: float = 0.0,
) -> tuple[Float[Array, ""], PyTree, Parts, Parts]:
    """(what is reported, of each microbatch at the weights that it was run with, their sum weighted by `shares`; what
    this rank's layers told, likewise; weights; states) after all updates; in a region that is manual over `pipe`.

    Args:
      updates: an Update for each part; `states` is what they keep.
      weights: this rank's; `first` and `last` whole on all stages, before and after.
      functions: `embed` takes weights.first, and must be linear in it; `head` takes weights.last.
      batch: leading dim M.
      fill: what lies in slots that hold nothing.
    """
    program, versions = Program.of(schedule), Versions.of(schedule)
    stage = lax.axis_index(AXIS)
    one = trees.at(batch, 0)
    activation = jax.eval_shape(functions.embed, weights.first, microbatch=one)
    reported = jax.eval_shape(functions.head, weights.last, activation, microbatch=one)[1]
    told = jax.eval_shape(functions.stage, weights.layers, activation, microbatch=one, part=0)[2]

    def zeros(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, widened(leaf.dtype)), tree)

    def kept(weights: PyTree, state: PyTree, count: int) -> _Kept:
        def stacked(leaf: Array) -> Array:
            return jnp.full((count, *leaf.shape), fill, leaf.dtype).at[0].set(leaf)

        sums = None if versions.num_updates == schedule.num_microbatches else zeros(weights)
        return _Kept(jax.tree.map(stacked, weights), state, sums)

    hops = Hops(program, AXIS)

    def tick(carry: PyTree, rows: PyTree) -> tuple[PyTree, None]:
        mail, state = carry
        row = jax.tree.map(lambda column: column[stage], rows)
        own = _Stage(functions, updates, fill, row, *trees.at((batch, shares), row["microbatch"]))
        return hops.tick(row, mail, state, own.forward, own.backward, own.end), None

    of_versions = {"reads": versions.reads, "latest": versions.latest, "closes": versions.closes}
    rows = {**program.rows()["own"], **jax.tree.map(jnp.asarray, of_versions)}
    state = zeros(reported), zeros(told), Parts(*map(kept, weights, states, versions.num_kept))
    (_, (loss, told, parts)), _ = lax.scan(tick, (hops.none(activation, fill), state), rows)

    def of_stage(owner: int, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: lax.psum(jnp.where(stage == owner, x, jnp.zeros((), x.dtype)), AXIS), tree)

    ends = [
        (trees.at(part.versions, versions.num_updates % count), part.state)
        for part, count in zip(parts, versions.num_kept, strict=True)
    ]
    ends[0], ends[2] = of_stage(0, ends[0]), of_stage(schedule.num_stages - 1, ends[2])
    return lax.psum(loss, AXIS), told, *(Parts(*each) for each in zip(*ends, strict=True))


_State = tuple[Array, PyTree, Parts]
"""What is reported, what layers told, what a rank has of each part; they pass through conditionals as executor's."""


@dataclass(frozen=True)
class _Stage:
    """What a stage does in a tick, if anything; what it makes is `fill` else."""

    functions: Functions
    updates: Parts
    fill: float
    row: dict[str, Any]
    microbatch: PyTree
    share: Float[Array, ""]

    def forward(self, inputs: Array, state: _State) -> tuple[Array, Array, _State]:
        loss, told, (first, layers, last) = state
        row = self.row

        def change(_: Array, told: PyTree) -> tuple[Array, PyTree]:
            y, _, of_layers = self._layers(self._read(layers), x)
            return y, trees.add(told, self._share_of(of_layers))

        def add_head(y: Array, loss: Array, last: _Kept) -> tuple[Array, Array, _Kept]:
            head = partial(self.functions.head, microbatch=self.microbatch)
            minimised, pull, reported = jax.vjp(head, self._read(last), y, has_aux=True)
            gradients, dy = pull(jnp.ones_like(minimised))
            loss = trees.add(loss, self._share_of(reported))
            return dy, loss, self._advanced(last, self.updates.last, gradients)

        x = trees.at(inputs, row["slots"]["inputs"])
        x = trees.when(Branch.LOOK_UP, row["looks_up"], lambda x: self._embed(self._read(first)), x)
        y, told = trees.when(Branch.FORWARD, row["op"] == Op.F, change, self._nothing(x), told)
        y, loss, last = trees.when(Branch.HEAD, row["is_scored"], add_head, y, loss, last)
        return x, y, (loss, told, Parts(first, layers, last))

    def backward(self, x: Array, gradients: Array, state: _State) -> tuple[Array, _State]:
        loss, told, (first, layers, last) = state
        row = self.row

        def change(_: Array, layers: _Kept) -> tuple[Array, _Kept]:
            (_, minimised), pull = jax.vjp(lambda *by: self._layers(*by)[:2], self._read(layers), x)
            dy = trees.at(gradients, row["slots"]["gradients"])
            by_layers, dx = pull((dy, jnp.ones_like(minimised)))
            return dx, self._advanced(layers, self.updates.layers, by_layers)

        dx, layers = trees.when(Branch.BOTH, row["op"] == Op.BW, change, self._nothing(x), layers)
        return dx, (loss, told, Parts(first, layers, last))

    def end(self, dx: Array, state: _State) -> _State:
        loss, told, (first, layers, last) = state

        def add_embedding(first: _Kept) -> _Kept:
            (by_first,) = jax.vjp(self._embed, self._read(first))[1](dx)
            return self._advanced(first, self.updates.first, by_first)

        first = trees.when(Branch.EMBEDDING, self.row["ends_backward"], add_embedding, first)
        return loss, told, Parts(first, layers, last)

    def _embed(self, first: PyTree) -> Array:
        return self.functions.embed(first, microbatch=self.microbatch)

    def _layers(self, layers: PyTree, x: Array) -> tuple[Array, Array, PyTree]:
        return self.functions.stage(layers, x, microbatch=self.microbatch, part=self.row["part"])

    def _nothing(self, x: Array) -> Array:
        return jnp.full(x.shape, self.fill, x.dtype)

    def _read(self, part: _Kept) -> PyTree:
        return _version(part, self.row["reads"])

    def _share_of(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf * self.share.astype(leaf.dtype), tree)

    def _advanced(self, part: _Kept, update: Update, gradients: PyTree) -> _Kept:
        latest = self.row["latest"]

        def apply(stack: PyTree, state: PyTree, gradients: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            new, state = update(_version(part, latest), state, gradients)
            slot = (latest + 1) % _num_kept(part)
            stack = jax.tree.map(lambda leaf, value: trees.put(leaf, value, slot), stack, new)
            return stack, state, jax.tree.map(jnp.zeros_like, gradients)

        if part.sums is None:
            return _Kept(*apply(part.versions, part.state, gradients)[:2], None)
        sums = trees.add(part.sums, gradients)
        return _Kept(*trees.when(Branch.UPDATE, self.row["closes"], apply, part.versions, part.state, sums))


def _num_kept(part: _Kept) -> int:
    return jax.tree.leaves(part.versions)[0].shape[0]


def _version(part: _Kept, version: Int[Array, ""]) -> PyTree:
    return trees.at(part.versions, version % _num_kept(part))
