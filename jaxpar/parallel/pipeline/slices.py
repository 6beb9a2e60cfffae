"""TeraPipe: a pipeline of token slices (arXiv 2102.07988).

Splits: the layers over `pipe`, P stages, as executor.py; each microbatch along the sequence into K slices, which follow
one another through the stages: a causal layer needs of a slice's earlier tokens their keys and values alone. So a
bubble is P - 1 slices long, however few microbatches there are. All slices forward, then all backward, the last first.
A stage keeps the keys and values of each slice. A backward pass computes its slice again on them, and adds their
gradients up; an earlier slice's backward pass takes them as those of the keys and values that it made.
Slices may be of any lengths, which the program knows: a stage branches on a slice's number and does its own work alone.
Collectives per step, in bytes of one microbatch's activation A = B x S x D of a rank and the longest slice's share s:
    collective-permute  2 s A per tick, for outputs and gradients, whether the tick sends anything or not
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.parallel.pipeline import trees
from jaxpar.parallel.pipeline.executor import AXIS
from jaxpar.parallel.pipeline.hops import Hops
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

    hops = Hops(program, AXIS)

    def tick(carry: PyTree, rows: PyTree) -> tuple[PyTree, None]:
        mail, state = carry
        row = jax.tree.map(lambda column: column[stage], rows)
        own = _Stage(cuts, functions, ends, layers, row, trees.at(batch, row["microbatch"]))
        return hops.tick(row, mail, state, own.forward, own.backward, own.end), None

    def empty(count: int, like: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), fill, leaf.dtype), like)

    kept = empty(schedule.num_microbatches * schedule.num_slices, made)
    owed = empty(schedule.num_slices, jax.eval_shape(trees.zeros, made))
    state = _State(kept, owed, *map(trees.zeros, (reported, told, ends, layers)))
    rows = {**program.rows()["own"], "piece": jnp.asarray(program.piece)}
    (_, state), _ = lax.scan(tick, (hops.none(activation, fill), state), rows)
    return lax.psum(state.loss, AXIS), state.told, state.by_ends, state.by_layers


class _State(NamedTuple):
    """What a stage keeps, and sums up. What is large passes through conditionals of two branches, see trees.when."""

    kept: PyTree
    """What all slices made."""
    owed: PyTree
    """The gradients by what the slices of one microbatch made."""
    loss: Array
    told: PyTree
    by_ends: PyTree
    by_layers: PyTree


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


@dataclass(frozen=True)
class _Stage:
    """What a stage does in a tick, if anything; what it makes is `fill` else."""

    cuts: _Cuts
    functions: Functions
    ends: PyTree
    layers: PyTree
    row: dict[str, Any]
    microbatch: PyTree

    def forward(self, inputs: Array, state: _State) -> tuple[Array, Array, _State]:
        cuts, row = self.cuts, self.row

        def of_slice(number: int, x: Array, kept: PyTree) -> tuple[Array, PyTree, PyTree]:
            before = cuts.joined(number, kept, self._first_place)
            (y, made, _), told = self._layers(number, self.layers, cuts.taken(number, x, 1), before)
            return cuts.placed(number, y, 1), jax.tree.map(partial(cuts.placed, number, dim=_TOKENS), made), told

        def head(number: int, y: Array) -> tuple[Array, Array, PyTree]:
            function = partial(self.functions.head, microbatch=cuts.own(number, self.microbatch))
            minimised, pull, reported = jax.vjp(function, self.ends, cuts.taken(number, y, 1), has_aux=True)
            of_ends, dy = pull(jnp.ones_like(minimised))
            return cuts.placed(number, dy, 1), reported, of_ends

        def change(_: Array, kept: PyTree, told: PyTree) -> tuple[Array, PyTree, PyTree]:
            y, made, of_layers = self._by_slice(of_slice, x, kept)
            return y, trees.put(kept, made, self._first_place + row["piece"]), trees.add(told, of_layers)

        def add_head(y: Array, loss: Array, by_ends: PyTree) -> tuple[Array, Array, PyTree]:
            dy, reported, of_ends = self._by_slice(head, y)
            return dy, trees.add(loss, reported), trees.add(by_ends, of_ends)

        def look_up(x: Array) -> Array:
            return self._by_slice(lambda number: self._embed(number, self.ends))

        x = trees.at(inputs, row["slots"]["inputs"])
        x = trees.when(Branch.LOOK_UP, row["looks_up"], look_up, x)
        y, kept, told = trees.when(Branch.FORWARD, row["op"] == Op.F, change, self._nothing(x), state.kept, state.told)
        y, loss, by_ends = trees.when(Branch.HEAD, row["is_scored"], add_head, y, state.loss, state.by_ends)
        return x, y, state._replace(kept=kept, loss=loss, told=told, by_ends=by_ends)

    def backward(self, x: Array, gradients: Array, state: _State) -> tuple[Array, _State]:
        cuts, row, last = self.cuts, self.row, len(self.cuts.lengths) - 1

        def of_slice(number: int, x: Array, dy: Array, kept: PyTree, owed: PyTree) -> tuple[Array, PyTree, PyTree]:
            inputs = self.layers, cuts.taken(number, x, 1), cuts.joined(number, kept, self._first_place)
            (_, made, minimised), pull, _ = jax.vjp(partial(self._layers, number), *inputs, has_aux=True)
            if number == last:
                of_made = jax.tree.map(jnp.zeros_like, made)
            else:
                taken = jax.tree.map(partial(cuts.taken, number, dim=_TOKENS), trees.at(owed, number))
                of_made = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), taken, made)
            by_own, dx, of_before = pull((cuts.taken(number, dy, 1), of_made, jnp.ones_like(minimised)))
            return cuts.placed(number, dx, 1), by_own, cuts.parted(number, of_before, owed)

        def change(_: Array, owed: PyTree, by_layers: PyTree) -> tuple[Array, PyTree, PyTree]:
            dy = trees.at(gradients, row["slots"]["gradients"])
            dx, by_own, of_before = self._by_slice(of_slice, x, dy, state.kept, owed)
            # A microbatch's last slice is the first to come back.
            owed = jax.tree.map(lambda total: jnp.where(row["piece"] == last, jnp.zeros_like(total), total), owed)
            return dx, trees.add(owed, of_before), trees.add(by_layers, by_own)

        dx, owed, by_layers = trees.when(
            Branch.BOTH, row["op"] == Op.BW, change, self._nothing(x), state.owed, state.by_layers
        )
        return dx, state._replace(owed=owed, by_layers=by_layers)

    def end(self, dx: Array, state: _State) -> _State:
        def add_embedding(by_ends: PyTree) -> PyTree:
            def of_slice(number: int) -> PyTree:
                return jax.vjp(partial(self._embed, number), self.ends)[1](dx)[0]

            return trees.add(by_ends, self._by_slice(of_slice))

        by_ends = trees.when(Branch.EMBEDDING, self.row["ends_backward"], add_embedding, state.by_ends)
        return state._replace(by_ends=by_ends)

    @property
    def _first_place(self) -> Array:
        """In `kept`, of the microbatch's first slice."""
        return self.row["microbatch"] * len(self.cuts.lengths)

    def _by_slice(self, function: Callable, *operands: PyTree) -> PyTree:
        branches = [partial(function, number) for number in range(len(self.cuts.lengths))]
        return lax.switch(self.row["piece"], branches, *operands)

    def _embed(self, number: int, ends: PyTree) -> Array:
        return self.cuts.placed(
            number, self.functions.embed(ends, microbatch=self.cuts.own(number, self.microbatch)), 1
        )

    def _layers(self, number: int, layers: PyTree, x: Array, before: PyTree) -> tuple[PyTree, PyTree]:
        tokens, earlier = self.cuts.own(number, self.microbatch), self.cuts.earlier(number, self.microbatch)
        y, made, minimised, told = self.functions.stage(
            layers, x, before, microbatch=tokens, earlier=earlier, part=self.row["part"]
        )
        return (y, made, minimised), told

    def _nothing(self, x: Array) -> Array:
        return jnp.full(x.shape, self.cuts.fill, x.dtype)
