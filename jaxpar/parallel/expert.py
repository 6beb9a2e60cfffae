"""Expert parallelism: tokens go to the ranks that hold their experts, and what those give comes back.

Splits: experts over `expert`, n ranks, which also cut the batch; an expert's width over `tensor`, its embed over
(context, fsdp). Its gradient has every token of its group of expert ranks in it, and is summed over the others alone.
Two kinds of dispatch:
    capacity    (GShard, arXiv 2006.16668; Switch, arXiv 2101.03961) each expert takes `capacity` tokens of a sequence,
                by order of arrival or of score; what overflows is left to the residual stream, and counted
    dropless    (MegaBlocks, arXiv 2211.15841) every token, sorted by expert, in grouped matmuls
Collectives per layer and microbatch over `expert`, for T tokens of a rank, k experts a token, E experts, width D in
compute dtype; forward, and the same again backward, and once more what remat recomputes:
    capacity            2 all-to-alls of E x B x C x D, B sequences and C slots for each: C = capacity, or under
                        `context` min(capacity, tokens of the rank's part)
    dropless, gather    all-gather of n T x D (and of n T x k ids and weights), reduce-scatter of n T x D
    dropless, ragged    ragged all-to-alls of T x k x D out, and back of a buffer for the most that can arrive,
                        n T x min(k, E / n) x D, of which only what did arrive is sent
Balanced routing needs T x k x D x (n - 1) / n each way: `ideal_bytes`.
Under `context` the chosen experts are gathered over it (T x k ids), for a sequence's order is that of all its ranks.
Limits: E must be a multiple of n. `tensor` ranks dispatch the same tokens, each for its part of an expert's width.
Under `context` a rank's buffer has slots for all that a sequence may send, as if the others sent nothing. Experts'
products are in compute dtype, under fp8 too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.kernels import grouped
from jaxpar.numerics import widened
from jaxpar.parallel.product import product

AXIS = "expert"
RESULT = "mlp_out"
"""The name, for remat policies, of what experts give, back at their tokens."""

Multiply = Callable[[Float[Array, "... D"], Float[Array, "e D F"]], Float[Array, "... F"]]
Ffn = Callable[[Float[Array, "... D"], Multiply], Float[Array, "... D"]]


@dataclass(frozen=True)
class ExpertStrategy:
    dispatch: Literal["capacity", "dropless"] = "dropless"
    capacity_factor: float = 1.25
    """Slots of an expert, in units of what balanced routing sends it."""
    capacity_order: Literal["arrival", "score"] = "arrival"
    """Who gets an expert's slots: the tokens that come first in the sequence, or those of the largest weight for it
    (V-MoE, arXiv 2106.05974, section 3.2), which looks at later tokens."""
    exchange: Literal["gather", "ragged"] = "gather"
    """Of dropless, between ranks: ragged where the backend has `ragged_all_to_all`."""

    def is_ragged(self, ranks: int) -> bool:
        """Whether so many ranks send ragged all-to-alls."""
        return self.dispatch == "dropless" and self.exchange == "ragged" and ranks > 1


def capacity(seq_len: int, num_experts: int, num_experts_per_token: int, factor: float) -> int:
    """Tokens of one sequence that an expert takes at most."""
    # Of a product that floats round up by a hair, the ceiling would be one too many.
    return max(1, math.ceil(seq_len * num_experts_per_token * factor / num_experts - 1e-9))


def capacity_slots(whole: int, num_tokens: int) -> int:
    """Slots for them in the buffer of a rank that has so many of the sequence's tokens."""
    return min(whole, num_tokens)


def arrivals(num_tokens: int, ranks: int, num_experts: int, num_experts_per_token: int) -> int:
    """Rows of a buffer for all that `ranks` ranks of so many tokens may send to one: a token's experts differ."""
    return num_tokens * ranks * min(num_experts_per_token, num_experts // ranks)


def ideal_bytes(num_tokens: int, num_experts_per_token: int, width: int, ranks: int, item_bytes: int) -> float:
    """What a rank sends, forward and backward, out and back, if every expert gets as many tokens."""
    return 4 * num_tokens * num_experts_per_token * width * item_bytes * (ranks - 1) / ranks


@dataclass(frozen=True)
class Place:
    """How the tokens of a region lie."""

    ranks: int = 1
    """Of `expert`."""
    context_ranks: int = 1
    order: Int[np.ndarray, " S"] | None = None
    """Which token of a sequence lies at each place of its arrays, over all context ranks; None where there is one."""


def experts(
    strategy: ExpertStrategy,
    kernel: grouped.Kernel,
    place: Place,
    num_experts: int,
    x: Float[Array, "B S D"],
    weights: Float[Array, "B S k"],
    ids: Int[Array, "B S k"],
    ffn: Ffn,
) -> tuple[Float[Array, "B S D"], Int[Array, ""]]:
    """(each token's sum of weight x ffn, over its experts; how many pairs of token and expert were left out).

    `ffn(rows, multiply)` is given tokens by expert, to multiply them by this rank's experts' kernels. Weights have at
    least float32.
    """
    x, weights = x.reshape(-1, x.shape[-1]), weights.reshape(-1, weights.shape[-1])
    if strategy.dispatch == "capacity":
        slots, num_slots = _slots(strategy, place, num_experts, weights.reshape(ids.shape), ids)
        out = _by_capacity(place, num_experts, x, weights, slots.reshape(weights.shape), num_slots, ffn)
        dropped = jnp.sum(slots == num_slots, dtype=jnp.int32)
    else:
        through = _by_ragged_exchange if strategy.is_ragged(place.ranks) else _by_gathering
        out = through(kernel, place, num_experts, x, weights, ids.reshape(weights.shape), ffn)
        dropped = jnp.zeros((), jnp.int32)
    return out.reshape(*ids.shape[:2], -1), dropped


def _by_capacity(place, num_experts, x, weights, slots, num_slots, ffn):
    source = _inverse(slots, num_slots)
    rows = take(x, source, slots).reshape(num_experts, num_slots // num_experts, -1)
    if place.ranks > 1:
        rows = trade(rows, 0, 1)
    rows = ffn(rows, partial(product, "ecd,edf->ecf"))
    if place.ranks > 1:
        rows = trade(rows, 1, 0)
    return combine(checkpoint_name(rows.reshape(num_slots, -1), RESULT), weights, slots, source)


def _by_gathering(kernel, place, num_experts, x, weights, ids, ffn):
    num_rows = arrivals(x.shape[0], place.ranks, num_experts, ids.shape[1])
    num_own = num_experts // place.ranks
    if place.ranks > 1:
        x, weights = gather_tokens(x), gather_tokens(weights)
        ids = gather_tokens.fun(ids) - lax.axis_index(AXIS) * num_own
        ids = jnp.where((ids >= 0) & (ids < num_own), ids, num_own)
    source, slots, sizes = _by_expert(ids, num_own, num_rows)
    rows = ffn(take(x, source, slots), lambda rows, weight: grouped.product(kernel, rows, weight, sizes))
    out = combine(checkpoint_name(rows, RESULT), weights, slots, source)
    return sum_tokens(out) if place.ranks > 1 else out


def _by_ragged_exchange(kernel, place, num_experts, x, weights, ids, ffn):
    num_rows = arrivals(x.shape[0], place.ranks, num_experts, ids.shape[1])
    source, slots, sizes = _by_expert(ids, num_experts, ids.size)
    out, back, arrived = _routes(sizes, place.ranks)
    rows = send(take(x, source, slots), ids.size, num_rows, out, back)
    rows = ffn(rows, lambda rows, weight: grouped.product(kernel, rows, weight, arrived))
    return combine(checkpoint_name(send(rows, num_rows, ids.size, back, out), RESULT), weights, slots, source)


# Where a token goes --------------------------------------------------------------------------------------------------


def _slots(
    strategy: ExpertStrategy,
    place: Place,
    num_experts: int,
    weights: Float[Array, "B S k"],
    ids: Int[Array, "B S k"],
) -> tuple[Int[Array, "B S k"], int]:
    """(the row of each pair in a buffer [E, B x C], the number of rows for a pair that is left out; that number)."""
    batch, seq_len, per_token = ids.shape
    whole = capacity(seq_len * place.context_ranks, num_experts, per_token, strategy.capacity_factor)
    scores = lax.stop_gradient(weights) if strategy.capacity_order == "score" else None
    if place.order is None:
        positions = _positions(ids, scores, num_experts)
        is_kept = positions < whole
    else:
        of_all = [_in_sequence_order(mine, place.order) for mine in (ids, scores) if mine is not None]
        positions = _positions(of_all[0], of_all[1] if scores is not None else None, num_experts)
        first = lax.axis_index("context") * seq_len
        is_kept = lax.dynamic_slice_in_dim((positions < whole)[:, place.order], first, seq_len, axis=1)
        positions = _positions(jnp.where(is_kept, ids, num_experts), None, num_experts + 1)
    num_slots = capacity_slots(whole, seq_len)
    row = jnp.arange(batch, dtype=ids.dtype)[:, None, None]
    slots = (ids * batch + row) * num_slots + positions
    size = num_experts * batch * num_slots
    return jnp.where(is_kept, slots, size), size


def _in_sequence_order(mine: Array, order: Int[np.ndarray, " S"]) -> Array:
    whole = jnp.moveaxis(lax.all_gather(mine, "context"), 0, 1)
    return whole.reshape(mine.shape[0], -1, mine.shape[2])[:, np.argsort(order)]


def _positions(ids: Int[Array, "B S k"], scores: Float[Array, "B S k"] | None, num_groups: int) -> Int[Array, "B S k"]:
    """How many pairs of the same sequence and expert come before each: earlier ones, or of a larger score."""
    flat = ids.reshape(ids.shape[0], -1)
    places = jnp.broadcast_to(jnp.arange(flat.shape[1], dtype=ids.dtype), flat.shape)
    keys = (flat,) if scores is None else (flat, -scores.reshape(flat.shape))
    group, *_, pair = lax.sort((*keys, places), dimension=1, is_stable=True, num_keys=len(keys))
    row = jnp.arange(flat.shape[0], dtype=ids.dtype)[:, None]
    counts = jnp.zeros((flat.shape[0], num_groups), ids.dtype).at[row, flat].add(1)
    first = jnp.cumsum(counts, axis=1, dtype=ids.dtype) - counts
    position = places - jnp.take_along_axis(first, group, axis=1)
    return jnp.zeros_like(flat).at[row, pair].set(position).reshape(ids.shape)


def _by_expert(
    ids: Int[Array, "T k"], num_groups: int, num_rows: int
) -> tuple[Int[Array, " N"], Int[Array, "T k"], Int[Array, " G"]]:
    """Pairs sorted by expert, in order within one: (the pair of each row, the row of each pair, rows of each expert).
    Pairs of group `num_groups` are in no row."""
    flat = ids.reshape(-1)
    group, pair = lax.sort((flat, jnp.arange(flat.size, dtype=ids.dtype)), is_stable=True, num_keys=1)
    source = jnp.where(group < num_groups, pair, flat.size)[:num_rows]
    sizes = jnp.zeros(num_groups, ids.dtype).at[flat].add(1, mode="drop")
    return source, _inverse(source, flat.size, nothing=num_rows).reshape(ids.shape), sizes


def _inverse(index: Int[Array, "..."], size: int, nothing: int | None = None) -> Int[Array, " N"]:
    """At i the place in `index` that holds i; where none does, `nothing`, which is how many places there are."""
    nothing = index.size if nothing is None else nothing
    places = jnp.arange(index.size, dtype=index.dtype)
    return jnp.full(size, nothing, index.dtype).at[index.reshape(-1)].set(places, mode="drop")


Route = tuple[Int[Array, " c"], Int[Array, " c"], Int[Array, " c"], Int[Array, " c"]]
"""Of chunks, one for each rank and each of its experts: where they begin, their sizes, where they begin at the
receiver; and the sizes of those that arrive."""


def _routes(sizes: Int[Array, " E"], ranks: int) -> tuple[Route, Route, Int[Array, " e"]]:
    """(out, back, rows of each of this rank's experts): a rank sends rows sorted by expert, and receives them so."""
    counts = lax.all_gather(sizes, AXIS)
    num_own = sizes.shape[0] // ranks
    rank = lax.axis_index(AXIS)

    def before(x: Int[Array, "..."], axis: int) -> Int[Array, "..."]:
        return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x

    # [sender, receiver, expert]: where a chunk begins at either.
    chunks = counts.reshape(ranks, ranks, num_own)
    at_sender = before(counts, 1).reshape(chunks.shape)
    at_receiver = before(chunks.sum(0, dtype=sizes.dtype), 1)[None] + before(chunks, 0)

    def sent(x: Int[Array, "n n e"]) -> Int[Array, " c"]:
        return lax.dynamic_index_in_dim(x, rank, 0, keepdims=False).reshape(-1)

    def received(x: Int[Array, "n n e"]) -> Int[Array, " c"]:
        return lax.dynamic_index_in_dim(x, rank, 1, keepdims=False).reshape(-1)

    out = sent(at_sender), sent(chunks), sent(at_receiver), received(chunks)
    back = received(at_receiver), received(chunks), received(at_sender), sent(chunks)
    return out, back, received(chunks).reshape(ranks, num_own).sum(0, dtype=sizes.dtype)


# What moves tokens, each with its transpose --------------------------------------------------------------------------


@jax.custom_vjp
def take(x: Float[Array, "T D"], source: Int[Array, " N"], slots: Int[Array, "T k"]) -> Float[Array, "N D"]:
    """The token of the pair at each row, 0 where there is none. Both ways a gather: no addition depends on an order."""
    return _at(x, source // slots.shape[1])


take.defvjp(
    lambda x, source, slots: (take.fun(x, source, slots), slots),
    lambda slots, cotangent: (_sum_pairs(cotangent, None, slots), None, None),
)


@jax.custom_vjp
def combine(
    rows: Float[Array, "N D"], weights: Float[Array, "T k"], slots: Int[Array, "T k"], source: Int[Array, " N"]
) -> Float[Array, "T D"]:
    """Each token's sum of weight x row over its pairs, in at least float32; `source` is the inverse of `slots`."""
    return _sum_pairs(rows, weights, slots)


def _combine_forward(rows, weights, slots, source):
    return combine.fun(rows, weights, slots, source), (rows, weights, slots, source)


def _combine_backward(residuals, cotangent):
    rows, weights, slots, source = residuals
    of_pair = _at(cotangent, source // slots.shape[1]).astype(weights.dtype)
    drows = of_pair * _at(weights.reshape(-1), source)[:, None]
    dweights = [jnp.sum(_at(rows, slot).astype(weights.dtype) * cotangent.astype(weights.dtype), 1) for slot in slots.T]
    return drows.astype(rows.dtype), jnp.stack(dweights, axis=1), None, None


combine.defvjp(_combine_forward, _combine_backward)


def _at(x: Array, index: Array) -> Array:
    return x.at[index].get(mode="fill", fill_value=0)


def _sum_pairs(rows, weights, slots):
    # One of a token's experts after the other: all at once would be k times the tokens' memory, in float32.
    wide = widened(rows.dtype)
    total = jnp.zeros((slots.shape[0], rows.shape[1]), wide)
    for i in range(slots.shape[1]):
        row = _at(rows, slots[:, i]).astype(wide)
        total += row if weights is None else row * weights[:, i, None].astype(wide)
    return total.astype(rows.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def trade(x: Float[Array, "..."], split: int, concat: int) -> Float[Array, "..."]:
    """All-to-all over `expert`: dim `split` in parts, one for each rank, dim `concat` of the parts that come."""
    return lax.all_to_all(x, AXIS, split_axis=split, concat_axis=concat, tiled=True)


trade.defvjp(
    lambda x, split, concat: (trade.fun(x, split, concat), None),
    lambda split, concat, _, cotangent: (trade.fun(cotangent, concat, split),),
)


@jax.custom_vjp
def gather_tokens(x: Float[Array, "T D"]) -> Float[Array, "nT D"]:
    """The tokens of all expert ranks. Backward: this rank's part of the sum over them."""
    # Not tiled, which is how a remat policy tells it from a weight's.
    return lax.all_gather(x, AXIS).reshape(-1, *x.shape[1:])


@jax.custom_vjp
def sum_tokens(x: Float[Array, "nT D"]) -> Float[Array, "T D"]:
    """This rank's tokens of the sum over the ranks."""
    return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)


gather_tokens.defvjp(
    lambda x: (gather_tokens.fun(x), None),
    lambda _, cotangent: (sum_tokens.fun(cotangent),),
)
sum_tokens.defvjp(
    lambda x: (sum_tokens.fun(x), None),
    lambda _, cotangent: (gather_tokens.fun(cotangent),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def send(x: Float[Array, "N D"], num_here: int, num_there: int, route: Route, reverse: Route) -> Float[Array, "M D"]:
    """x's chunks by a route, from N = `num_here` rows to M = `num_there`, 0 where none arrives; `reverse` takes them
    home."""
    return _sent(x, num_there, route)


def _sent(x, num_rows, route):
    return lax.ragged_all_to_all(x, jnp.zeros((num_rows, x.shape[1]), x.dtype), *route, axis_name=AXIS)


send.defvjp(
    lambda x, num_here, num_there, route, reverse: (_sent(x, num_there, route), reverse),
    lambda num_here, num_there, reverse, cotangent: (_sent(cotangent, num_here, reverse), None, None),
)
