"""Pipeline parallelism: any schedule, in one loop over its ticks (GPipe, arXiv 1811.06965; 1F1B, arXiv 2006.09503).

Splits: the layers over `pipe`, P stages of C chunks each; every rank of a stage runs the same branch of a tick. What an
action makes hops to its neighbour by a permute outside of the branches, beside one that does not need it (see hops.py),
and lies in a buffer of the schedule's own size until it is used; so does what lies between the pieces of a backward
pass (see backward.py), and, if asked for, what a forward pass keeps for it. Else a backward pass computes its chunk's
forward pass again.
Collectives per step, in bytes of one microbatch's activation A = B x S x D of a rank, in compute dtype:
    collective-permute  A per tick for outputs and for gradients, in a V for each twice, as both go either way; whether
                        the tick sends anything or not
    all-gather          embedding and head, whose vocabulary is cut over `pipe`, once; their gradients are
                        reduce-scattered, once
    all-reduce          the gradients of the final norm and other vectors, which only the ends of the model have, once
    with spread ends    2 all-reduces of A per microbatch each for embedding (the sum of all stages' parts of the
                        vocabulary, the gradient's broadcast) and head (the broadcast, the gradient's sum) in place of
                        the gathers; three floats a token for the loss
Within a branch only collectives among the ranks of one stage are right: stages are at different branches then, and a
permute is one operation of all devices. So attention under `context` gathers or exchanges, and never sends around.
Limits: as many slots for layers in each chunk (stack.py). With several chunks an action copies its weights out of
the stack.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.parallel.pipeline import trees
from jaxpar.parallel.pipeline.backward import Kept, WeightsApart
from jaxpar.parallel.pipeline.hops import Hops
from jaxpar.parallel.pipeline.program import Branch, Buffer, Program
from jaxpar.parallel.pipeline.schedule import Op, Schedule

AXIS = "pipe"


@dataclass(frozen=True)
class Functions:
    """A model in three pieces. `ends` are the parameters of the first and the last."""

    embed: Callable[..., Float[Array, "B S D"]]
    """(ends, microbatch=)"""
    stage: Callable[..., tuple[Float[Array, "B S D"], Float[Array, ""], PyTree]]
    """(layers of one chunk, input, microbatch=, part=: which of the model's) -> (output, what it adds to what is
    minimised, what its layers tell: of each a leading dim, summed over the microbatches)"""
    head: Callable[..., tuple[Float[Array, ""], Float[Array, ""]]]
    """(ends, output of the last layer, microbatch=) -> (what is minimised, what is reported), sums over tokens"""
    are_weights: PyTree
    """Of the layers' leaves: which are weights of a `product`, whose gradient can wait."""
    summed: Callable[[PyTree], PyTree] = lambda gradients: gradients
    """Such gradients, by number among the leaves, as the layers lie: where they are cut, summed over their ranks."""
    are_ends_spread: bool = False
    """Whether `embed` and `head` are the work of all stages together, each with its part of the vocabulary: `embed`
    gives all of them the same, `head` takes the same of all, and gives each the input's gradient by its part."""


def run(
    schedule: Schedule,
    functions: Functions,
    ends: PyTree,
    layers: PyTree,
    batch: PyTree,
    *,
    keeps_residuals: bool = False,
    fill: float = 0.0,
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    """(what is reported, its sum over the microbatches; what this rank's layers told; gradients by ends; by layers), in
    at least float32; in a region that is manual over `pipe`.

    A rank holds `layers` [C x layers per chunk, ...], chunk by chunk. Gradients by `ends` are left unsummed over
    `pipe`. `batch` has leading dim M. keeps_residuals: a forward pass keeps what its backward pass needs; else that
    computes it again. `fill` is what lies in slots that hold nothing.
    """
    program = Program.of(schedule)
    stage, layers = lax.axis_index(AXIS), trees.by_chunk(layers, schedule.num_chunks)
    first = trees.at(batch, 0)
    activation = jax.eval_shape(functions.embed, ends, microbatch=first)
    chunk = _Chunk.of(functions, trees.at(layers, 0), activation, first, program.ops, keeps_residuals)
    reported = jax.eval_shape(functions.head, ends, activation, microbatch=first)[1]
    told = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((schedule.num_chunks, *leaf.shape), leaf.dtype), chunk.told)

    hops = Hops(program, AXIS)

    def tick(carry: PyTree, rows: PyTree) -> tuple[PyTree, None]:
        mail, state = carry
        row = jax.tree.map(lambda column: column[stage], rows["own"])
        microbatch = trees.at(batch, row["microbatch"])
        if functions.are_ends_spread:
            at_ends = _spread_ends(functions, ends, batch, row, rows["ends"])
        else:
            at_ends = _own_ends(functions, ends, microbatch, row)
        own = _Stage(functions, chunk, layers, microbatch, fill, row)

        def forward(inputs: Array, state: _State) -> tuple[Array, Array, _State]:
            x = at_ends.look_up(trees.at(inputs, row["slots"]["inputs"]))
            y, told, residuals = own.forward(x, state.told, state.residuals)
            y, loss, by_ends = at_ends.score(y, state.loss, state.by_ends)
            return x, y, state._replace(loss=loss, told=told, residuals=residuals, by_ends=by_ends)

        def backward(x: Array, gradients: Array, state: _State) -> tuple[Array, _State]:
            dx, deferred, by_layers = own.backward(x, gradients, state.residuals, state.deferred, state.by_layers)
            return dx, state._replace(deferred=deferred, by_layers=by_layers)

        def end(dx: Array, state: _State) -> _State:
            return state._replace(by_ends=at_ends.pull_back(dx, state.by_ends))

        return hops.tick(row, mail, state, forward, backward, end), None

    def slots(name: Buffer, of: PyTree) -> PyTree:
        count = program.num_slots[name]
        return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), fill, leaf.dtype), of)

    kept = slots("residuals", chunk.residuals), slots("deferred", chunk.operands)
    state = _State(*kept, *trees.zeros((reported, told, ends, layers)))
    (_, state), _ = lax.scan(tick, (hops.none(activation, fill), state), program.rows())
    told, by_layers = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), (state.told, state.by_layers))
    return lax.psum(state.loss, AXIS), told, state.by_ends, by_layers


class _State(NamedTuple):
    """What a stage keeps, and sums up.

    Sums pass through conditionals of two branches, the first of which leaves them alone (see trees.when): those XLA
    updates in place, where it copies what passes through a switch, in every branch.
    """

    residuals: PyTree
    deferred: PyTree
    loss: Array
    """What is reported."""
    told: PyTree
    by_ends: PyTree
    by_layers: PyTree


class _Ends(NamedTuple):
    """What a tick does at the model's ends, if anything."""

    look_up: Callable[[Array], Array]
    """(input) -> it, or the embeddings"""
    score: Callable[[Array, Array, PyTree], tuple[Array, Array, PyTree]]
    """(output, loss, gradients by ends) -> (the output, or its gradient; both)"""
    pull_back: Callable[[Array, PyTree], PyTree]
    """(gradient by the input, gradients by ends) -> these"""


def _own_ends(functions: Functions, ends: PyTree, microbatch: PyTree, row: dict[str, Any]) -> _Ends:
    """The first stage looks up, the last one does the head's work with its last layers'."""
    embed, head = partial(functions.embed, microbatch=microbatch), partial(functions.head, microbatch=microbatch)

    def add_head(y: Array, loss: Array, by_ends: PyTree) -> tuple[Array, Array, PyTree]:
        minimised, pull, reported = jax.vjp(head, ends, y, has_aux=True)
        of_ends, dy = pull(jnp.ones_like(minimised))
        return dy, loss + reported.astype(loss.dtype), trees.add(by_ends, of_ends)

    def look_up(x: Array) -> Array:
        return trees.when(Branch.LOOK_UP, row["looks_up"], lambda x: embed(ends), x)

    def pull_back(dx: Array, by_ends: PyTree) -> PyTree:
        def add_embedding(by_ends: PyTree) -> PyTree:
            return trees.add(by_ends, jax.vjp(embed, ends)[1](dx)[0])

        return trees.when(Branch.EMBEDDING, row["ends_backward"], add_embedding, by_ends)

    return _Ends(look_up, partial(trees.when, Branch.HEAD, row["is_scored"], add_head), pull_back)


def _spread_ends(
    functions: Functions, ends: PyTree, batch: PyTree, row: dict[str, Any], shared: dict[str, Any]
) -> _Ends:
    """All stages look up and score together what one of them is at: a branch that all take alike."""

    def of_all(value: Array, mine: Array) -> Array:
        return lax.psum(jnp.where(mine, value, jnp.zeros((), value.dtype)), AXIS)

    def at(function: Callable, event: str) -> Callable:
        return partial(function, microbatch=trees.at(batch, shared[event]["microbatch"]))

    def add_head(y: Array, loss: Array, by_ends: PyTree) -> tuple[Array, Array, PyTree]:
        mine = row["is_scored"]
        minimised, pull, reported = jax.vjp(at(functions.head, "is_scored"), ends, of_all(y, mine), has_aux=True)
        of_ends, dy = pull(jnp.ones_like(minimised))
        reported = jnp.where(mine, reported, jnp.zeros((), reported.dtype)).astype(loss.dtype)
        return jnp.where(mine, lax.psum(dy, AXIS), y), loss + reported, trees.add(by_ends, of_ends)

    def look_up(x: Array) -> Array:
        def embedded(x: Array) -> Array:
            return jnp.where(row["looks_up"], at(functions.embed, "looks_up")(ends), x)

        return trees.when(Branch.LOOK_UP, shared["looks_up"]["happens"], embedded, x)

    def pull_back(dx: Array, by_ends: PyTree) -> PyTree:
        def add_embedding(by_ends: PyTree) -> PyTree:
            pull = jax.vjp(at(functions.embed, "ends_backward"), ends)[1]
            return trees.add(by_ends, pull(of_all(dx, row["ends_backward"]))[0])

        return trees.when(Branch.EMBEDDING, shared["ends_backward"]["happens"], add_embedding, by_ends)

    return _Ends(look_up, partial(trees.when, Branch.HEAD, shared["is_scored"]["happens"], add_head), pull_back)


@dataclass(frozen=True)
class _Stage:
    """What a stage's layers do in a tick, if anything; what they make is `fill` else."""

    functions: Functions
    chunk: "_Chunk"
    layers: PyTree
    microbatch: PyTree
    fill: float
    row: dict[str, Any]

    def forward(self, x: Array, told: PyTree, residuals: PyTree) -> tuple[Array, PyTree, PyTree]:
        """(output, what layers told, what is kept for backward passes)"""
        number = self.row["chunk"]

        def change(_: Array, told: PyTree, residuals: PyTree) -> tuple[Array, PyTree, PyTree]:
            y, of_layers, kept = self.chunk.forward(*self._own(), x)
            return y, trees.add_at(told, of_layers, number), trees.put(residuals, kept, self._slot("residuals"))

        return trees.when(Branch.FORWARD, self.row["op"] == Op.F, change, self._nothing(x), told, residuals)

    def backward(
        self, x: Array, gradients: Array, residuals: PyTree, deferred: PyTree, by_layers: PyTree
    ) -> tuple[Array, PyTree, PyTree]:
        """(gradient by the input, what weight gradients wait for, gradients by layers)"""
        op, ops, number = self.row["op"], self.chunk.ops, self.row["chunk"]
        structure = jax.tree.structure(by_layers)
        totals = dict(enumerate(jax.tree.leaves(by_layers)))

        def backward(together: bool) -> tuple[Array, dict[int, Array], PyTree]:
            dy, kept = trees.at(gradients, self._slot("gradients")), trees.at(residuals, self._slot("residuals"))
            return self.chunk.backward(*self._own(), x, dy, kept, together)

        def of_both(_: Array, totals: dict[int, Array]) -> tuple[Array, dict[int, Array]]:
            dx, gradients, operands = backward(together=True)
            return dx, trees.add_at(totals, {**gradients, **self._of_weights(operands)}, number)

        def of_input(_: Array, others: dict[int, Array], deferred: PyTree) -> tuple[Array, dict[int, Array], PyTree]:
            dx, gradients, operands = backward(together=False)
            return dx, trees.add_at(others, gradients, number), trees.put(deferred, operands, self._slot("deferred"))

        def of_weights(weights: dict[int, Array]) -> dict[int, Array]:
            return trees.add_at(weights, self._of_weights(trees.at(deferred, self._slot("deferred"))), number)

        dx = self._nothing(x)
        if Op.BW in ops:
            dx, totals = trees.when(Branch.BOTH, op == Op.BW, of_both, dx, totals)
        if Op.B in ops:
            weights = {leaf: totals[leaf] for leaf in self.chunk.operands}
            others = {leaf: total for leaf, total in totals.items() if leaf not in weights}
            dx, others, deferred = trees.when(Branch.INPUT, op == Op.B, of_input, dx, others, deferred)
            weights = trees.when(Branch.WEIGHTS, op == Op.W, of_weights, weights)
            totals = {**weights, **others}
        return dx, deferred, jax.tree.unflatten(structure, [totals[leaf] for leaf in range(len(totals))])

    def _own(self) -> tuple[PyTree, PyTree, Array]:
        return trees.at(self.layers, self.row["chunk"]), self.microbatch, self.row["part"]

    def _slot(self, buffer: Buffer) -> Array:
        return self.row["slots"][buffer]

    def _nothing(self, x: Array) -> Array:
        return jnp.full(x.shape, self.fill, x.dtype)

    def _of_weights(self, operands: PyTree | None) -> dict[int, Array]:
        return self.functions.summed(self.chunk.of_weights(operands))


@dataclass(frozen=True)
class _Chunk:
    """Passes through the layers of one chunk, and the shapes of what goes from one to another."""

    stage: Callable[..., tuple[tuple[Array, Array], PyTree]]
    """(own layers, microbatch, part, x) -> ((output, what is minimised), told)"""
    ops: frozenset[Op]
    apart: WeightsApart | None
    kept: Kept | None
    minimised: jax.ShapeDtypeStruct
    told: PyTree
    operands: PyTree
    residuals: PyTree

    @classmethod
    def of(
        cls,
        functions: Functions,
        own: PyTree,
        x: Any,
        microbatch: PyTree,
        ops: frozenset[Op],
        keeps_residuals: bool,
    ) -> "_Chunk":
        def stage(own: PyTree, microbatch: PyTree, part: Array, x: Array) -> tuple[tuple[Array, Array], PyTree]:
            y, minimised, told = functions.stage(own, x, microbatch=microbatch, part=part)
            return (y, minimised), told

        part: Any = jax.ShapeDtypeStruct((), jnp.int32)
        (_, minimised), told = jax.eval_shape(stage, own, microbatch, part, x)
        apart, operands = None, {}
        if Op.B in ops:
            apart = WeightsApart.of(stage, own, microbatch, part, x, are_weights=functions.are_weights)
            operands = apart.operands(jax.tree.leaves(own)[0].shape[0])
        self = cls(stage, ops, apart, None, minimised, told, operands, ())
        if not keeps_residuals:
            return self
        kept = Kept.of(lambda *at: self.vjp(*at)[1], own, microbatch, part, x)
        return replace(self, kept=kept, residuals=kept.arrays)

    def vjp(self, own: PyTree, microbatch: PyTree, part: Array, x: Array, together: bool = False) -> tuple[Any, ...]:
        """((output, what is minimised), pull, told)"""
        if together or self.apart is None:
            return jax.vjp(lambda own, x: self.stage(own, microbatch, part, x), own, x, has_aux=True)
        apart = self.apart
        weights, others = apart.parts(own)

        def function(others: PyTree, operands: PyTree, x: Array) -> tuple[tuple[Array, Array], PyTree]:
            return self.stage(apart.joined(own, weights, others, operands), microbatch, part, x)

        places = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.operands)
        return jax.vjp(function, others, places, x, has_aux=True)

    def forward(self, own: PyTree, microbatch: PyTree, part: Array, x: Array) -> tuple[Array, PyTree, PyTree]:
        """(output, told, what is kept)"""
        if self.kept is None:
            (y, _), told = self.stage(own, microbatch, part, x)
            return y, told, ()
        (y, _), pull, told = self.vjp(own, microbatch, part, x)
        return y, told, self.kept.arrays_of(pull)

    def backward(
        self, own: PyTree, microbatch: PyTree, part: Array, x: Array, dy: Array, kept: PyTree, together: bool
    ) -> tuple[Array, dict[int, Array], PyTree]:
        """(gradient by the input; by leaves of the layers; operands of those that are left out)

        together: nothing need be left out. What a forward pass kept is for the one way that it was kept for.
        """
        if self.kept is None:
            pull = self.vjp(own, microbatch, part, x, together)[1]
        else:
            pull, together = self.kept.restore(kept, own, microbatch, part, x), False
        cotangents = dy, jnp.ones(self.minimised.shape, self.minimised.dtype)
        if together or self.apart is None:
            by_own, dx = pull(cotangents)
            return dx, dict(enumerate(jax.tree.leaves(by_own))), None
        others, operands, dx = pull(cotangents)
        return dx, others, operands

    def of_weights(self, operands: PyTree | None) -> dict[int, Array]:
        """Gradients by those of the leaves that `backward` left out."""
        return {} if operands is None or self.apart is None else self.apart.gradients(operands)


def relay(
    schedule: Schedule, run: Callable[[PyTree, Array, Array], tuple[Array, PyTree]], layers: PyTree, x: Array
) -> Array:
    """run(layers of a chunk, x, part) from the first part to the last, one stage at work at a time, the others idle:
    for evaluation and sampling. The result is on all stages; what layers tell is dropped."""
    layers = trees.by_chunk(layers, schedule.num_chunks)
    places = [schedule.locate(part) for part in range(schedule.num_parts)]

    def through(x: Array, place: tuple[Array, Array, Array]) -> tuple[Array, None]:
        stage, chunk, part = place
        y, _ = run(trees.at(layers, chunk), x, part)
        return lax.psum(jnp.where(lax.axis_index(AXIS) == stage, y, jnp.zeros((), y.dtype)), AXIS), None

    stages, chunks = (jnp.array(numbers, jnp.int32) for numbers in zip(*places))
    return lax.scan(through, x, (stages, chunks, jnp.arange(len(places), dtype=jnp.int32)))[0]
