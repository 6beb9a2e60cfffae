"""TeraPipe: a pipeline of token slices (arXiv 2102.07988).

Splits: the layers over `pipe`, P stages, as executor.py; each microbatch along the sequence into K slices, which follow
one another through the stages: a causal layer needs of a slice's earlier tokens their keys and values alone. So a
bubble is P - 1 slices long, however few microbatches there are. All slices forward, then all backward, the last first.
A stage keeps the keys and values of each slice. A backward pass computes its slice again on them, and adds their
gradients up; an earlier slice's backward pass takes them as those of the keys and values that it made.
Slices may be of any lengths, which the program knows: a stage branches on a slice's number and does its own work alone.
Collectives per step, in bytes of one microbatch's activation A = B x S x D of a rank and the longest slice's share s:
    collective-permute  s A per tick and direction, whether the tick sends anything or not
    all-reduce          the gradients of embedding, final norm and head, once
    those of FSDP and the others: once in each action, that is, weights are gathered per slice
Memory: as GPipe's, every microbatch's inputs and, beside them, keys and values.
Limits: no permute in a branch, as executor.py; `context` cuts the same dim. One branch is compiled for each slice and
direction. Attention to what came before is in tiles, see kernels/tiled.py, on every platform.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.parallel.pipeline import trees
from jaxpar.parallel.pipeline.executor import AXIS
from jaxpar.parallel.pipeline.program import Branch, Program
from jaxpar.parallel.pipeline.schedule import Op, Schedule


@dataclass(frozen=True)
class Functions:
    """A model in three pieces, each of one slice. `ends` are the parameters of the first and the last."""

    embed: Callable[..., Float[Array, "B s D"]]
    """(ends, microbatch=)"""
    stage: Callable[..., tuple[Float[Array, "B s D"], PyTree, Float[Array, ""], PyTree]]
    """(layers, input, what it made of the tokens before, None of the first slice, microbatch=, earlier=: the tokens
    before, part=: which of the model's) -> (output, what it made: each [L, B, s, ...], what it adds to what is
    minimised, what its layers tell)"""
    head: Callable[..., tuple[Float[Array, ""], Float[Array, ""]]]
    """(ends, output of the last layer, microbatch=) -> (what is minimised, what is reported), sums over tokens"""


def run(
    schedule: Schedule,
    lengths: Sequence[int],
    functions: Functions,
    ends: PyTree,
    layers: PyTree,
    batch: PyTree,
    fill: float = 0.0,
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    """As executor.run, of a schedule of slices of these lengths; `batch` has leaves [M, B, S]."""
    assert schedule.num_chunks == 1
    assert len(lengths) == schedule.num_slices
    program, cuts = Program.of(schedule), _Cuts(tuple(lengths), fill)
    stage, longest = lax.axis_index(AXIS), lengths.index(max(lengths))
    first = trees.at(batch, 0)
    of_longest = {"microbatch": cuts.own(longest, first)}
    activation = jax.eval_shape(functions.embed, ends, **of_longest)
    _, made, _, told = jax.eval_shape(
        functions.stage, layers, activation, None, **of_longest, earlier=cuts.earlier(0, first), part=0
    )
    reported = jax.eval_shape(functions.head, ends, activation, **of_longest)[1]

    def tick(carry: PyTree, rows: PyTree) -> tuple[PyTree, None]:
        buffers, kept, owed, sums = carry
        row = jax.tree.map(lambda column: column[stage], rows)
        x, dy = (trees.at(buffers[name], row["slots"][name]) for name in ("inputs", "gradients"))
        microbatch = trees.at(batch, row["microbatch"])
        x, sent, kept, owed, sums = _act(cuts, functions, ends, layers, row, microbatch, x, dy, kept, owed, sums)
        arrived = {shift: lax.ppermute(sent, AXIS, pairs) for shift, pairs in program.hops.items()}
        buffers = dict(buffers, inputs=trees.put(buffers["inputs"], x, row["looked_up"]))
        for (shift, name), slot in zip(program.arrivals, row["arrivals"]):
            buffers[name] = trees.put(buffers[name], arrived.get(shift, sent), slot)
        return (buffers, kept, owed, sums), None

    def empty(count: int, like: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), fill, leaf.dtype), like)

    buffers = {name: empty(count + 1, activation) for name, count in program.num_slots.items()}
    rows = {
        "op": program.op,
        "part": program.part,
        "is_last": program.part == schedule.num_parts - 1,
        "microbatch": program.microbatch,
        "piece": program.piece,
        "slots": dict(program.slots),
        "looked_up": program.looked_up,
        "arrivals": tuple(program.arrivals.values()),
    }
    kept = empty(schedule.num_microbatches * schedule.num_slices, made)
    owed = empty(schedule.num_slices, jax.eval_shape(trees.zeros, made))
    start = buffers, kept, owed, tuple(map(trees.zeros, (reported, told, ends, layers)))
    (*_, (loss, *sums)), _ = lax.scan(tick, start, jax.tree.map(jnp.asarray, rows))
    return lax.psum(loss, AXIS), *sums


@dataclass(frozen=True)
class _Cuts:
    """Where a sequence is cut into slices. In a buffer, each lies at the front of a place for the longest."""

    lengths: tuple[int, ...]
    fill: float
    """What lies behind it."""

    def own(self, number: int, microbatch: PyTree) -> PyTree:
        """Of leaves [B, S]: a slice's tokens."""
        start = sum(self.lengths[:number])
        return jax.tree.map(lambda leaf: leaf[:, start : start + self.lengths[number]], microbatch)

    def earlier(self, number: int, microbatch: PyTree) -> PyTree:
        """The tokens before a slice."""
        return jax.tree.map(lambda leaf: leaf[:, : sum(self.lengths[:number])], microbatch)

    def placed(self, number: int, value: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
        """A slice's value, which has its tokens (or an equal share of them) along a dim, in a place for it."""
        room = value.shape[dim] * max(self.lengths) // self.lengths[number] - value.shape[dim]
        return lax.pad(
            value, jnp.asarray(self.fill, value.dtype), [(0, room if d == dim else 0, 0) for d in range(value.ndim)]
        )

    def taken(self, number: int, place: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
        """The value in a place."""
        return lax.slice_in_dim(place, 0, place.shape[dim] * self.lengths[number] // max(self.lengths), axis=dim)

    def joined(self, number: int, kept: PyTree, first: Array) -> PyTree:
        """What was made of the tokens before a slice, from the places from `first` on; None of none."""
        if number == 0:
            return None
        pieces = [
            jax.tree.map(partial(self.taken, each, dim=_TOKENS), trees.at(kept, first + each)) for each in range(number)
        ]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=_TOKENS), *pieces)

    def parted(self, number: int, joined: PyTree, places: PyTree) -> PyTree:
        """joined's transpose, like all `places` of a microbatch; zeros where nothing is."""
        if number == 0:
            return jax.tree.map(jnp.zeros_like, places)
        exact = replace(self, fill=0.0)
        bounds = list(accumulate(self.lengths[: number - 1]))

        def parted(leaf: Array, place: Array) -> Array:
            pieces = [
                exact.placed(each, piece, _TOKENS) for each, piece in enumerate(jnp.split(leaf, bounds, axis=_TOKENS))
            ]
            return jnp.stack(pieces + [jnp.zeros_like(pieces[0])] * (len(self.lengths) - number)).astype(place.dtype)

        return jax.tree.map(parted, joined, places)


_TOKENS = 2
"""The dim of tokens in what a stage makes: [layers, B, s, ...]."""


def _act(
    cuts: _Cuts,
    functions: Functions,
    ends: PyTree,
    layers: PyTree,
    row: dict[str, Any],
    microbatch: PyTree,
    x: Array,
    dy: Array,
    kept: PyTree,
    owed: PyTree,
    sums: tuple[Array, PyTree, PyTree, PyTree],
) -> tuple[Array, Array, PyTree, PyTree, tuple[Array, PyTree, PyTree, PyTree]]:
    """A stage's tick: (its input, what it sends on, `kept`, what all slices made; `owed`, the gradients by what the
    slices of one microbatch made; sums). What is large passes through conditionals of two branches, see trees.when."""
    loss, told, by_ends, by_layers = sums
    num_slices = len(cuts.lengths)
    is_forward, is_backward = row["op"] == Op.F, row["op"] == Op.BW
    first = row["microbatch"] * num_slices

    def by_slice(function: Callable, *operands: PyTree) -> PyTree:
        return lax.switch(row["piece"], [partial(function, number) for number in range(num_slices)], *operands)

    def embed(number: int, ends: PyTree) -> Array:
        return cuts.placed(number, functions.embed(ends, microbatch=cuts.own(number, microbatch)), 1)

    def stage(number: int, layers: PyTree, x: Array, before: PyTree) -> tuple[PyTree, PyTree]:
        tokens, earlier = cuts.own(number, microbatch), cuts.earlier(number, microbatch)
        y, made, minimised, told = functions.stage(
            layers, x, before, microbatch=tokens, earlier=earlier, part=row["part"]
        )
        return (y, made, minimised), told

    def forward(number: int, x: Array, kept: PyTree) -> tuple[Array, PyTree, PyTree]:
        (y, made, _), told = stage(number, layers, cuts.taken(number, x, 1), cuts.joined(number, kept, first))
        return cuts.placed(number, y, 1), jax.tree.map(partial(cuts.placed, number, dim=_TOKENS), made), told

    def backward(number: int, x: Array, dy: Array, kept: PyTree, owed: PyTree) -> tuple[Array, PyTree, PyTree]:
        inputs = layers, cuts.taken(number, x, 1), cuts.joined(number, kept, first)
        (_, made, minimised), pull, _ = jax.vjp(partial(stage, number), *inputs, has_aux=True)
        if number == num_slices - 1:
            of_made = jax.tree.map(jnp.zeros_like, made)
        else:
            taken = jax.tree.map(partial(cuts.taken, number, dim=_TOKENS), trees.at(owed, number))
            of_made = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), taken, made)
        by_own, dx, of_before = pull((cuts.taken(number, dy, 1), of_made, jnp.ones_like(minimised)))
        return cuts.placed(number, dx, 1), by_own, cuts.parted(number, of_before, owed)

    def head(number: int, y: Array) -> tuple[Array, Array, PyTree]:
        function = partial(functions.head, microbatch=cuts.own(number, microbatch))
        minimised, pull, reported = jax.vjp(function, ends, cuts.taken(number, y, 1), has_aux=True)
        of_ends, dy = pull(jnp.ones_like(minimised))
        return cuts.placed(number, dy, 1), reported, of_ends

    def go_forward(_: Array, kept: PyTree, told: PyTree) -> tuple[Array, PyTree, PyTree]:
        sent, made, of_layers = by_slice(forward, x, kept)
        return sent, trees.put(kept, made, first + row["piece"]), trees.add(told, of_layers)

    def go_backward(_: Array, owed: PyTree, by_layers: PyTree) -> tuple[Array, PyTree, PyTree]:
        sent, by_own, of_before = by_slice(backward, x, dy, kept, owed)
        # A microbatch's last slice is the first to come back.
        owed = jax.tree.map(lambda total: jnp.where(row["piece"] == num_slices - 1, jnp.zeros_like(total), total), owed)
        return sent, trees.add(owed, of_before), trees.add(by_layers, by_own)

    def add_head(sent: Array, loss: Array, by_ends: PyTree) -> tuple[Array, Array, PyTree]:
        dy, reported, of_ends = by_slice(head, sent)
        return dy, trees.add(loss, reported), trees.add(by_ends, of_ends)

    def add_embedding(by_ends: PyTree) -> PyTree:
        return trees.add(by_ends, by_slice(lambda number: jax.vjp(partial(embed, number), ends)[1](sent)[0]))

    x = trees.when(
        Branch.LOOK_UP, is_forward & (row["part"] == 0), lambda x: by_slice(lambda number: embed(number, ends)), x
    )
    sent = jnp.full(x.shape, cuts.fill, x.dtype)
    sent, kept, told = trees.when(Branch.FORWARD, is_forward, go_forward, sent, kept, told)
    sent, owed, by_layers = trees.when(Branch.BOTH, is_backward, go_backward, sent, owed, by_layers)
    sent, loss, by_ends = trees.when(Branch.HEAD, is_forward & row["is_last"], add_head, sent, loss, by_ends)
    by_ends = trees.when(Branch.EMBEDDING, is_backward & (row["part"] == 0), add_embedding, by_ends)
    return x, sent, kept, owed, (loss, told, by_ends, by_layers)
