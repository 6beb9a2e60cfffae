"""Ring attention (arXiv 2310.01889): keys and values travel round the ranks, each computing with what it holds.

Splits: the sequence over n ranks; every rank keeps the queries, keys and values of its own part, C = S / n tokens.
Collectives per layer and microbatch, with |K|, |V| a rank's own in compute dtype:
    forward     n - 1 permutes of |K| + |V|
    backward    n - 1 permutes of |K| + |V|, n of |dK| + |dV|: in float32, but the last, which takes the whole sums home
                in compute dtype
Rounds that a sliding window or no document reaches are left out. With r left, a window's send r - 1 and r permutes for
n - 1 and n; which ones documents leave is known at run time only, and a permute over several ranks then goes by powers
of two. Where the compiler knows the rounds, a permute is issued before the tiles that it hides behind. Memory does not
grow with n: the backward pass sends keys and values round again. On TPUs, without a window, rounds are the splash
kernel's (halves.py), whose results are rounded to compute dtype before they are added up.
Limits: no permute may stand in a branch that ranks take differently, so not under pipeline schedules that branch.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.kernels import tiled
from jaxpar.kernels.attention import RESULT, delta, heads_first, module
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel.context.halves import Halves, merged


@dataclass(frozen=True)
class Ring:
    """A ring over every `stride`-th rank of a mesh axis."""

    axis: str
    ranks: int
    """Of the ring."""
    stride: int
    shifts: tuple[int, ...]
    """Ascending from 0: the distances over which some rank needs keys."""
    skips_documents: bool
    """Whether to find out, from the segments, after which round no document reaches further."""
    mask: AttentionMask
    scale: float
    all_axes: tuple[str, ...]
    """Of the mesh: a round is left out where no device needs it."""
    block: int = tiled.BLOCK
    halves: Halves | None = None
    """Where a kernel of the platform's attends, not tiles."""

    def permute(self, tree: PyTree, hop: int | Int[Array, ""]) -> PyTree:
        """Everything `hop` ranks on. What is known at run time only goes by powers of two, every device taking the
        same ones."""
        if not isinstance(hop, int):
            for bit in range((self.ranks - 1).bit_length()):
                is_set = (hop >> bit) & 1
                tree = lax.fori_loop(0, is_set, lambda _, tree, hop=1 << bit: self.permute(tree, hop), tree)
            return tree
        size = self.ranks * self.stride
        pairs = [(i, (i + hop * self.stride) % size) for i in range(size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)

    def index(self) -> Int[Array, ""]:
        return lax.axis_index(self.axis) // self.stride

    def tokens_of(self, tokens: Tokens, rank: Int[Array, ""]) -> Tokens:
        """A rank's part of the whole sequence's."""
        part = tokens.positions.shape[1] // self.ranks
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank * part, part, axis=1), tokens)

    def rounds(self, tokens: Tokens) -> "tuple[int, ...] | _Rounds":
        """The shifts that are computed with."""
        if not self.skips_documents:
            return self.shifts
        mine = self.index()
        q_tokens = self.tokens_of(tokens, mine)
        shifts = jnp.asarray(self.shifts, jnp.int32)

        @jax.vmap
        def is_needed(shift: Int[Array, ""]) -> Bool[Array, ""]:
            k_tokens = self.tokens_of(tokens, (mine - shift) % self.ranks)
            return jnp.any(tiled.active_tiles(q_tokens, k_tokens, self.mask, self.block))

        needed = lax.pmax((is_needed(shifts) | (shifts == 0)).astype(jnp.int32), self.all_axes)
        return _Rounds(shifts[jnp.nonzero(needed, size=shifts.size)], jnp.sum(needed, dtype=jnp.int32))


class _Rounds(NamedTuple):
    """Known at run time only, and the same on every device: the first `total` of the shifts, ascending from 0."""

    shifts: Int[Array, " N"]
    total: Int[Array, ""]


def attention(
    ring: Ring,
    q: Float[Array, "B C H K"],
    k: Float[Array, "B C G K"],
    v: Float[Array, "B C G K"],
    tokens: Tokens,
) -> tuple[Float[Array, "B C H K"], Int[Array, ""]]:
    """In a region that is manual over the ring's axis: attention of this rank's queries over the whole sequence, whose
    `tokens` [B, S] are in the order in which the ranks hold them; and the number of tiles computed."""
    return _attention(ring, q, k, v, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring, q, k, v, tokens):
    out, _, tiles = _outputs(ring, q, k, v, tokens)
    return out, tiles


def _outputs(ring, q, k, v, tokens):
    mine, halves = ring.index(), ring.halves
    q_tokens, dtype, held = ring.tokens_of(tokens, mine), q.dtype, (k, v)
    if halves is not None:
        q, held = halves.laid_out(q, k, v)

    def compute(shift, held):
        k_tokens = ring.tokens_of(tokens, (mine - shift) % ring.ranks)
        if halves is not None:
            return halves.forward(_is_own(shift), mine >= shift, q, held, q_tokens, k_tokens)
        return tiled.forward(q, held[0], held[1], q_tokens, k_tokens, ring.mask, ring.scale, ring.block)

    out, lse, tiles = _go_round(ring, ring.rounds(tokens), held, compute, _merged, lambda carry, hop: carry)
    if halves is not None:
        out, lse = (module("splash").ungrouped(x) for x in (out, lse))
    return out.astype(dtype), lse, tiles


def _is_own(shift):
    """Whether it is the round before the first hop: of the others the loops count the shift."""
    return isinstance(shift, int) and shift == 0


def _merged(a, b):
    """What `compute` gives of two ranks' keys, of both."""
    return *merged(a[:2], b[:2]), a[2] + b[2]


def _forward(ring, q, k, v, tokens):
    out, lse, tiles = _outputs(ring, q, k, v, tokens)
    out, lse = checkpoint_name(out, RESULT), checkpoint_name(lse, RESULT)
    return (out, tiles), (q, k, v, tokens, out, lse)


def _backward(ring, residuals, cotangents):
    (q, k, v, tokens, out, lse), (cotangent, _) = residuals, cotangents
    mine, rounds, halves = ring.index(), ring.rounds(tokens), ring.halves
    q_tokens, dtype, held = ring.tokens_of(tokens, mine), q.dtype, (k, v)
    if halves is not None:
        q, held = halves.laid_out(q, k, v)
        out, lse, cotangent = (module("splash").by_kv_heads(x, k.shape[2]) for x in (out, lse, cotangent))
    else:
        deltas = delta(out, cotangent)

    def compute(shift, held):
        k_tokens = ring.tokens_of(tokens, (mine - shift) % ring.ranks)
        if halves is not None:
            return halves.backward(_is_own(shift), mine >= shift, q, held, out, lse, cotangent, q_tokens, k_tokens)
        return tiled.backward(
            q, held[0], held[1], lse, deltas, cotangent, q_tokens, k_tokens, ring.mask, ring.scale, ring.block
        )

    def add(carry, more):
        return jax.tree.map(jnp.add, carry, more)

    def travel(carry, hop):
        """The sums for the keys that a rank holds go on with them."""
        return carry[0], *ring.permute(carry[1:], hop)

    dq, dk, dv = _go_round(ring, rounds, held, compute, add, travel)
    dk, dv = _home(ring, rounds, (dk.astype(dtype), dv.astype(dtype)))
    if halves is not None:
        dq = module("splash").ungrouped(dq) * jnp.asarray(halves.scale, dq.dtype)
        dk, dv = (heads_first(x) for x in (dk, dv))
    return dq.astype(dtype), dk, dv, None


_attention.defvjp(_forward, _backward)


def _go_round(
    ring: Ring, rounds: tuple[int, ...] | _Rounds, held: PyTree, compute: Callable, add: Callable, travel: Callable
):
    """compute(shift, what was held `shift` ranks before) for each of the rounds' shifts, added up; `travel` sends of
    the sum what goes with the held."""
    if isinstance(rounds, _Rounds):  # no prefetch: which permute is the last is known at run time only

        def one(n, state):
            held, carry = state
            shift, hop = rounds.shifts[n], rounds.shifts[n] - rounds.shifts[n - 1]
            held = ring.permute(held, hop)
            return held, add(travel(carry, hop), compute(shift, held))

        return lax.fori_loop(1, rounds.total, one, (held, compute(0, held)))[1]

    hops = [after - before for before, after in itertools.pairwise(rounds)]
    if not hops:
        return compute(0, held)

    def step(hop, next_hop, shift, state):
        held, carry = state
        following = ring.permute(held, next_hop)
        return following, add(travel(carry, hop), compute(shift, held))

    state = ring.permute(held, hops[0]), compute(0, held)
    if set(hops) == {1}:
        state = lax.fori_loop(1, len(hops), partial(step, 1, 1), state)
    else:
        for hop, next_hop, shift in zip(hops, hops[1:], rounds[1:]):
            state = step(hop, next_hop, shift, state)
    held, carry = state
    return add(travel(carry, hops[-1]), compute(rounds[-1], held))


def _home(ring: Ring, rounds: tuple[int, ...] | _Rounds, sums: PyTree) -> PyTree:
    """Back to the rank whose keys they are for."""
    if isinstance(rounds, _Rounds):
        return ring.permute(sums, -rounds.shifts[rounds.total - 1] % ring.ranks)
    return ring.permute(sums, -rounds[-1]) if rounds[-1] else sums
