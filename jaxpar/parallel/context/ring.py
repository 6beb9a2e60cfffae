"""Ring attention (arXiv 2310.01889): keys and values travel round the ranks, each computing with what it holds.

Splits: the sequence over n ranks; every rank keeps the queries, keys and values of its own part, C = S / n tokens.
Collectives per layer and microbatch, with |K|, |V| a rank's own in compute dtype, |dK|, |dV| in float32:
    forward     n - 1 permutes of |K| + |V|; recomputed, n - 2: the backward pass shares the first
    backward    n - 1 permutes of |K| + |V|, n - 1 of |dK| + |dV|, and of these one more, in compute dtype, home
Rounds that a sliding window or no document reaches are left out, and then send nothing. A permute is issued before the
tiles that it hides behind. Memory does not grow with n: the backward pass sends keys and values round again.
Limits: no permute may stand in a branch that ranks take differently, so not under pipeline schedules that branch.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.kernels import tiled
from jaxpar.kernels.attention import RESULT, delta
from jaxpar.kernels.mask import AttentionMask, Tokens


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

    def permute(self, tree: PyTree, hop: int) -> PyTree:
        """Everything `hop` ranks on."""
        size = self.ranks * self.stride
        pairs = [(i, (i + hop * self.stride) % size) for i in range(size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)

    def index(self) -> Int[Array, ""]:
        return lax.axis_index(self.axis) // self.stride

    def tokens_of(self, tokens: Tokens, rank: Int[Array, ""]) -> Tokens:
        """A rank's part of the whole sequence's."""
        part = tokens.positions.shape[1] // self.ranks
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank * part, part, axis=1), tokens)

    def num_rounds(self, tokens: Tokens) -> Int[Array, ""] | int:
        """Of the shifts, how many are computed with."""
        if not self.skips_documents:
            return len(self.shifts)
        mine = self.index()
        q_tokens = self.tokens_of(tokens, mine)

        def is_needed(shift: int) -> Bool[Array, ""]:
            k_tokens = self.tokens_of(tokens, (mine - shift) % self.ranks)
            return jnp.any(tiled.active_tiles(q_tokens, k_tokens, self.mask))

        needed = jnp.stack([is_needed(shift) for shift in self.shifts])
        rounds = jnp.max(jnp.where(needed, jnp.arange(1, len(self.shifts) + 1), 1))
        return lax.pmax(rounds, self.all_axes)


def attention(
    ring: Ring,
    q: Float[Array, "B C H K"],
    k: Float[Array, "B C G K"],
    v: Float[Array, "B C G K"],
    tokens: Tokens,
) -> Float[Array, "B C H K"]:
    """In a region that is manual over the ring's axis: attention of this rank's queries over the whole sequence, whose
    `tokens` [B, S] are in the order in which the ranks hold them."""
    return _attention(ring, q, k, v, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring, q, k, v, tokens):
    return _outputs(ring, q, k, v, tokens)[0]


def _outputs(ring, q, k, v, tokens):
    mine = ring.index()
    q_tokens = ring.tokens_of(tokens, mine)

    def compute(shift, held):
        k_tokens = ring.tokens_of(tokens, (mine - shift) % ring.ranks)
        return tiled.forward(q, held[0], held[1], q_tokens, k_tokens, ring.mask, ring.scale)[:2]

    out, lse = _go_round(ring, ring.num_rounds(tokens), (k, v), compute, _merged, lambda carry, hop: carry)
    return out.astype(q.dtype), lse


def _merged(a, b):
    """Two softmaxes over different keys as one: outputs [B, C, H, K] and log-sum-exps [B, C, H]."""
    lse = jnp.logaddexp(a[1], b[1])
    shift = jnp.where(lse == -jnp.inf, 0.0, lse)
    return a[0] * jnp.exp(a[1] - shift)[..., None] + b[0] * jnp.exp(b[1] - shift)[..., None], lse


def _forward(ring, q, k, v, tokens):
    out, lse = (checkpoint_name(x, RESULT) for x in _outputs(ring, q, k, v, tokens))
    return out, (q, k, v, tokens, out, lse)


def _backward(ring, residuals, cotangent):
    q, k, v, tokens, out, lse = residuals
    mine, rounds = ring.index(), ring.num_rounds(tokens)
    q_tokens, deltas = ring.tokens_of(tokens, mine), delta(out, cotangent)

    def compute(shift, held):
        k_tokens = ring.tokens_of(tokens, (mine - shift) % ring.ranks)
        return tiled.backward(q, held[0], held[1], lse, deltas, cotangent, q_tokens, k_tokens, ring.mask, ring.scale)

    def add(carry, more):
        return jax.tree.map(jnp.add, carry, more)

    def travel(carry, hop):
        """The sums for the keys that a rank holds go on with them."""
        return carry[0], *ring.permute(carry[1:], hop)

    dq, dk, dv = _go_round(ring, rounds, (k, v), compute, add, travel)
    dk, dv = _home(ring, rounds, (dk.astype(k.dtype), dv.astype(v.dtype)))
    return dq.astype(q.dtype), dk, dv, None


_attention.defvjp(_forward, _backward)


def _go_round(ring: Ring, rounds: Array | int, held: PyTree, compute: Callable, add: Callable, travel: Callable):
    """compute(shift, what was held `shift` ranks before) for the first `rounds` shifts, added up; `travel` sends of the
    sum what goes with the held."""
    if not isinstance(rounds, int):  # no prefetch: which permute is the last is known at run time only

        def one(shift, state):
            held, carry = state
            held = ring.permute(held, 1)
            return held, add(travel(carry, 1), compute(shift, held))

        return lax.fori_loop(1, rounds, one, (held, compute(0, held)))[1]

    hops = [after - before for before, after in itertools.pairwise(ring.shifts)]
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
        for hop, next_hop, shift in zip(hops, hops[1:], ring.shifts[1:]):
            state = step(hop, next_hop, shift, state)
    held, carry = state
    return add(travel(carry, hops[-1]), compute(ring.shifts[-1], held))


def _home(ring: Ring, rounds: Array | int, sums: PyTree) -> PyTree:
    """Back to the rank whose keys they are for."""
    if isinstance(rounds, int):
        return ring.permute(sums, -ring.shifts[-1]) if ring.shifts[-1] else sums
    # A distance that is known at run time only goes by powers of two, every device taking the same ones.
    distance = (ring.ranks + 1 - rounds) % ring.ranks
    for bit in range((ring.ranks - 1).bit_length()):
        is_set = (distance >> bit) & 1
        sums = lax.fori_loop(0, is_set, lambda _, sums, hop=1 << bit: ring.permute(sums, hop), sums)
    return sums
