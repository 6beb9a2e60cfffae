"""Pipeline parallelism: any schedule, in one loop over its ticks (GPipe, arXiv 1811.06965; 1F1B, arXiv 2006.09503).

Splits: the layers over `pipe`, P stages of C chunks each; every rank of a stage runs the same branch of a tick. What an
action makes hops to its neighbour by a permute outside of the branches, and lies in a buffer of the schedule's own
size until it is used. A backward pass computes its chunk's forward pass again; B and W apart (Zero Bubble, arXiv
2401.10241) each do, and W the input gradients between its layers, too.
Collectives per step, in bytes of one microbatch's activation A = B x S x D of a rank, in compute dtype:
    collective-permute  A per tick and direction, whether the tick sends anything or not
    all-reduce          the gradients of embedding, final norm and head, which only the ends of the model have, once
    those of FSDP and the others: once in each action, that is, weights are gathered per microbatch
Within a branch only collectives among the ranks of one stage are right: stages are at different branches then, and a
permute is one operation of all devices. So attention under `context` gathers or exchanges, and never sends around.
Limits: as many slots for layers in each chunk (stack.py); embedding and head whole on every stage, computed on one.
With several chunks an action copies its chunk's weights out of the stack.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.numerics import widened
from jaxpar.parallel.pipeline.program import Program
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


def run(
    schedule: Schedule, functions: Functions, ends: PyTree, layers: PyTree, batch: PyTree, fill: float = 0.0
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    """(what is reported, its sum over the microbatches; what this rank's layers told; gradients by ends; by layers), in
    at least float32; in a region that is manual over `pipe`.

    A rank holds `layers` [C x layers per chunk, ...], chunk by chunk. Gradients by `ends` are left unsummed over
    `pipe`. `batch` has leading dim M; `fill` is what lies in slots that hold nothing.
    """
    program = Program.of(schedule)
    stage, layers = lax.axis_index(AXIS), _by_chunk(layers, schedule.num_chunks)
    activation = jax.eval_shape(functions.embed, ends, microbatch=_at(batch, 0))
    reported = jax.eval_shape(functions.head, ends, activation, microbatch=_at(batch, 0))[1]
    told = jax.eval_shape(functions.stage, _at(layers, 0), activation, microbatch=_at(batch, 0), part=0)[2]
    told = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((schedule.num_chunks, *leaf.shape), leaf.dtype), told)

    def tick(carry: PyTree, rows: PyTree) -> tuple[PyTree, None]:
        buffers, sums = carry
        row = jax.tree.map(lambda column: column[stage], rows)
        x, dy = (_at(buffers[name], row["slots"][name]) for name in ("inputs", "gradients"))
        microbatch = _at(batch, row["microbatch"])
        x, made, sums = _act(functions, program.ops, fill, ends, layers, row, microbatch, x, dy, sums)
        arrived = {shift: lax.ppermute(made, AXIS, pairs) for shift, pairs in program.hops.items()}
        buffers = dict(buffers, inputs=_put(buffers["inputs"], x, row["looked_up"]))
        for (shift, name), slot in zip(program.arrivals, row["arrivals"]):
            buffers[name] = _put(buffers[name], arrived.get(shift, made), slot)
        return (buffers, sums), None

    def zeros(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, widened(leaf.dtype)), tree)

    buffers = {
        name: jnp.full((count + 1, *activation.shape), fill, activation.dtype)
        for name, count in program.num_slots.items()
    }
    rows = {
        "op": program.op,
        "part": program.part,
        "is_last": program.part == schedule.num_parts - 1,
        "chunk": program.chunk,
        "microbatch": program.microbatch,
        "slots": dict(program.slots),
        "looked_up": program.looked_up,
        "arrivals": tuple(program.arrivals.values()),
    }
    start = buffers, (zeros(reported), zeros(told), zeros(ends), zeros(layers))
    (_, (loss, *sums)), _ = lax.scan(tick, start, jax.tree.map(jnp.asarray, rows))
    told, by_ends, by_layers = sums
    told, by_layers = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), (told, by_layers))
    return lax.psum(loss, AXIS), told, by_ends, by_layers


def _act(
    functions: Functions,
    ops: frozenset[Op],
    fill: float,
    ends: PyTree,
    layers: PyTree,
    row: dict[str, Any],
    microbatch: PyTree,
    x: Array,
    dy: Array,
    sums: tuple[Array, PyTree, PyTree, PyTree],
) -> tuple[Array, Array, tuple[Array, PyTree, PyTree, PyTree]]:
    """A stage's tick: (its input, what it sends on, sums).

    Sums pass through conditionals of two branches, the first of which leaves them alone (see _when): those XLA updates
    in place, where it copies what passes through a switch, in every branch.
    """
    loss, told, by_ends, by_layers = sums
    op, is_first, is_last = row["op"], row["part"] == 0, row["is_last"]
    embed = partial(functions.embed, microbatch=microbatch)
    stage = partial(functions.stage, microbatch=microbatch, part=row["part"])
    head = partial(functions.head, microbatch=microbatch)
    nothing = jnp.full(x.shape, fill, x.dtype)

    def own() -> PyTree:
        return _at(layers, row["chunk"])

    def pulled(function: Callable, dy: Array, *by: PyTree) -> tuple[PyTree, ...]:
        (_, minimised), pull, _ = jax.vjp(function, *by, has_aux=True)
        return pull((dy, jnp.ones_like(minimised)))

    def parts(weights: PyTree, x: Array) -> tuple[tuple[Array, Array], PyTree]:
        y, minimised, told = stage(weights, x)
        return (y, minimised), told

    def of_input(x: Array, dy: Array) -> Array:
        weights = own()
        return pulled(lambda x: parts(weights, x), dy, x)[0]

    def of_both(x: Array, dy: Array) -> tuple[Array, PyTree]:
        by_own, dx = pulled(parts, dy, own(), x)
        return dx, by_own

    def of_weights(x: Array, dy: Array) -> tuple[Array, PyTree]:
        return nothing, pulled(lambda own: parts(own, x), dy, own())[0]

    def forward(x: Array, told: PyTree) -> tuple[Array, PyTree]:
        y, _, of_layers = stage(own(), x)
        return y, _add_at(told, of_layers, row["chunk"])

    def add_layers(made: Array, by_layers: PyTree) -> tuple[Array, PyTree]:
        made, by_own = _choose(op, {o: f for o, f in ((Op.BW, of_both), (Op.W, of_weights)) if o in ops}, x, dy)
        return made, _add_at(by_layers, by_own, row["chunk"])

    def add_head(y: Array, loss: Array, by_ends: PyTree) -> tuple[Array, Array, PyTree]:
        minimised, pull, reported = jax.vjp(head, ends, y, has_aux=True)
        of_ends, dy = pull(jnp.ones_like(minimised))
        return dy, loss + reported.astype(loss.dtype), _add(by_ends, of_ends)

    def add_embedding(by_ends: PyTree) -> PyTree:
        return _add(by_ends, jax.vjp(embed, ends)[1](made)[0])

    is_forward, gives_input, gives_weights = op == Op.F, (op == Op.B) | (op == Op.BW), (op == Op.W) | (op == Op.BW)
    x = _when(is_forward & is_first, lambda x: embed(ends), x)
    light = {
        Op.NOP: lambda x, dy, told: (nothing, told),
        Op.F: lambda x, dy, told: forward(x, told),
        Op.B: lambda x, dy, told: (of_input(x, dy), told),
    }
    made, told = _choose(op, {o: f for o, f in light.items() if o in ops}, x, dy, told)
    made, by_layers = _when(gives_weights, add_layers, made, by_layers)
    made, loss, by_ends = _when(is_forward & is_last, add_head, made, loss, by_ends)
    by_ends = _when(gives_input & is_first, add_embedding, by_ends)
    return x, made, (loss, told, by_ends, by_layers)


def _when(condition: Array, change: Callable, *operands: PyTree) -> Any:
    """change(*operands), or the operands.

    XLA takes the first branch to come before the second: only where the first makes nothing new can the second write
    over what both are given.
    """
    return lax.cond(~condition, lambda *same: same if len(same) > 1 else same[0], change, *operands)


def _choose(op: Array, functions: Mapping[Op, Callable], *operands: PyTree) -> Any:
    """The op's function of the operands, or the first one where it has none."""
    index = sum((op == each).astype(jnp.int32) * i for i, each in enumerate(functions))
    return lax.switch(index, list(functions.values()), *operands)


def relay(
    schedule: Schedule, run: Callable[[PyTree, Array, Array], tuple[Array, PyTree]], layers: PyTree, x: Array
) -> Array:
    """run(layers of a chunk, x, part) from the first part to the last, one stage at work at a time, the others idle:
    for evaluation and sampling. The result is on all stages; what layers tell is dropped."""
    layers = _by_chunk(layers, schedule.num_chunks)
    places = [schedule.locate(part) for part in range(schedule.num_parts)]

    def through(x: Array, place: tuple[Array, Array, Array]) -> tuple[Array, None]:
        stage, chunk, part = place
        y, _ = run(_at(layers, chunk), x, part)
        return lax.psum(jnp.where(lax.axis_index(AXIS) == stage, y, jnp.zeros((), y.dtype)), AXIS), None

    stages, chunks = (jnp.array(numbers, jnp.int32) for numbers in zip(*places))
    return lax.scan(through, x, (stages, chunks, jnp.arange(len(places), dtype=jnp.int32)))[0]


def _by_chunk(layers: PyTree, num_chunks: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.reshape(num_chunks, -1, *leaf.shape[1:]), layers)


def _at(tree: PyTree, index: Any) -> PyTree:
    """Each leaf's part at an index of its first dim; the only one as it is, uncopied."""

    def at(leaf: Array) -> Array:
        if leaf.shape[0] == 1:
            return leaf[0]
        return lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    return jax.tree.map(at, tree)


def _put(buffer: Array, value: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(buffer, value, index, 0)


def _add(totals: PyTree, addends: PyTree) -> PyTree:
    return jax.tree.map(lambda total, addend: total + addend.astype(total.dtype), totals, addends)


def _add_at(totals: PyTree, addends: PyTree, chunk: Array) -> PyTree:
    """To the parts at a chunk."""
    return jax.tree.map(
        lambda total, addend: _put(total, _at(total, chunk) + addend.astype(total.dtype), chunk), totals, addends
    )
