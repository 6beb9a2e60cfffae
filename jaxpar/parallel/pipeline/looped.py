"""GPipe (arXiv 1811.06965) and its looped form, breadth first (arXiv 2211.05953), by autodiff through one loop.

Splits: as executor.py. Every stage computes a chunk in every tick, in no branch, so that anything may stand in a stage:
a ring of attention sends by permutes, which no branch may hold. A stage that has nothing to do computes on zeros, and
what comes of it is dropped: that is the bubble's time, the schedule's own. The backward pass is the loop's transpose,
last tick first.
Ticks: (C - 1) max(M, P) + M + P - 1, each way. With more microbatches than stages, what comes round to the first stage
waits M - P ticks for its next chunk.
Collectives per step, in bytes of one microbatch's activation A = B x S x D of a rank, in compute dtype:
    collective-permute  A per tick, each way
    reduce-scatter      M A (rounded up to P microbatches), once: each stage takes M / P of the last stage's outputs to
                        the head; an all-gather of as much back
    all-reduce          the gradients of embedding, final norm and head, once
    those of FSDP       weights are gathered once for all forward passes (a loop's constants are made before it) and in
                        each tick's backward pass, where their gradients are reduced; without `reshard_after_forward`
                        both once
    those of the others: per tick and layer, in the bubble's too
Memory: what remat keeps of a chunk's layers, once per tick. With several chunks a chunk's input alone is kept and all
of it computed again, since what is kept of a tick would else have the chunk's weights in it.
Limits: as many layers in each chunk; the embedding whole on every stage and looked up on the first. With several
chunks a tick's weight gradients are added into the whole stage's.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.numerics import widened
from jaxpar.parallel.pipeline import trees
from jaxpar.parallel.pipeline.executor import AXIS, Functions
from jaxpar.parallel.pipeline.program import Branch
from jaxpar.parallel.pipeline.schedule import Schedule

KINDS = ("gpipe", "looped-bfs")


def num_ticks(schedule: Schedule) -> int:
    """Each way."""
    others = schedule.num_chunks - 1
    busiest = max(schedule.num_microbatches, schedule.num_stages)
    return others * busiest + schedule.num_microbatches + schedule.num_stages - 1


def run(
    schedule: Schedule, functions: Functions, ends: PyTree, layers: PyTree, batch: PyTree, fill: float = 0.0
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    """As executor.run, of a schedule whose kind is one of KINDS."""
    assert schedule.kind in KINDS
    layers = trees.by_chunk(layers, schedule.num_chunks)
    differentiated = jax.value_and_grad(partial(_loss, schedule, functions, ends, layers, batch, fill), (0, 1), True)
    (_, (reported, told)), (by_ends, by_layers) = differentiated(trees.zeros(ends), trees.zeros(layers))
    told, by_layers = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), (told, by_layers))
    return lax.psum(reported, AXIS), told, by_ends, by_layers


def _loss(
    schedule: Schedule,
    functions: Functions,
    ends: PyTree,
    layers: PyTree,
    batch: PyTree,
    fill: float,
    end_totals: PyTree,
    layer_totals: PyTree,
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], PyTree]]:
    """(this rank's addend of what is minimised, (of what is reported, what its layers told))."""
    num_stages, num_microbatches, num_chunks = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    stage = lax.axis_index(AXIS)
    ticks_of_round, last_round = max(num_microbatches, num_stages), num_ticks(schedule) - num_microbatches
    num_waiting = (ticks_of_round - num_stages) if num_chunks > 1 else 0
    # The last stage's outputs go nowhere in the only chunk.
    pairs = tuple((i, (i + 1) % num_stages) for i in range(num_stages if num_chunks > 1 else num_stages - 1))

    def chunk_of(layer_totals: PyTree, x: Array, chunk: Array, microbatch: PyTree) -> tuple[Array, Array, PyTree]:
        own = trees.at(trees.summed_in(layer_totals, layers), chunk)
        return functions.stage(own, x, microbatch=microbatch, part=chunk * num_stages + stage)

    if num_chunks > 1:
        chunk_of = jax.checkpoint(chunk_of, prevent_cse=False)

    def tick(carry: PyTree, number: Array) -> tuple[PyTree, None]:
        arrived, waiting, outputs, minimised, told = carry
        step = number - stage
        chunk, microbatch = jnp.clip(step // ticks_of_round, 0, num_chunks - 1), step % ticks_of_round
        is_busy = (step >= 0) & (step < num_chunks * ticks_of_round) & (microbatch < num_microbatches)
        own = trees.at(batch, jnp.minimum(microbatch, num_microbatches - 1))
        if num_waiting:
            waited, waiting = trees.exchange(waiting, arrived, number % num_waiting)
            arrived = jnp.where(stage == 0, waited, arrived)
        x = trees.when(
            Branch.LOOK_UP,
            (stage == 0) & (chunk == 0),
            lambda x: functions.embed(trees.summed_in(end_totals, ends), microbatch=own),
            arrived,
        )
        # Selected on the way in and out: neither what an idle stage is given nor its gradient counts.
        x = jnp.where(is_busy, x, jnp.zeros((), x.dtype))
        y, added, of_layers = chunk_of(layer_totals, x, chunk, own)
        y, added, of_layers = jax.tree.map(
            lambda new, idle: jnp.where(is_busy, new, jnp.asarray(idle, new.dtype)),
            (y, added, of_layers),
            (fill, 0, jax.tree.map(lambda _: 0, of_layers)),
        )
        # From the tick on in which the last stage's first output of the last chunk comes, one slot after another.
        outputs = trees.put(outputs, y, jnp.maximum(number - last_round, 0))
        told = trees.add_at(told, lax.stop_gradient(of_layers), chunk)
        return (trees.hop(y, AXIS, pairs), waiting, outputs, minimised + added.astype(minimised.dtype), told), None

    first = trees.at(batch, 0)
    activation = jax.eval_shape(functions.embed, ends, microbatch=first)
    of_layers = jax.eval_shape(functions.stage, trees.at(layers, 0), activation, microbatch=first, part=0)[2]
    told = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_chunks, *leaf.shape), leaf.dtype), of_layers)

    def empty(*count: int) -> Array:
        return jnp.full((*count, *activation.shape), fill, activation.dtype)

    none = jnp.zeros((), widened(activation.dtype))
    start = empty(), empty(num_waiting), empty(num_microbatches), none, trees.zeros(told)
    (_, _, outputs, minimised, told), _ = lax.scan(tick, start, jnp.arange(num_ticks(schedule), dtype=jnp.int32))

    def head(sums: tuple[Array, Array], each: tuple[Array, PyTree]) -> tuple[tuple[Array, Array], None]:
        x, microbatch = each
        return trees.add(sums, functions.head(trees.summed_in(end_totals, ends), x, microbatch=microbatch)), None

    share = -(-num_microbatches // num_stages)
    padded = jax.tree.map(partial(_padded, share * num_stages), (outputs, batch))
    xs = _spread(padded[0]), jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, stage * share, share), padded[1])
    (of_head, reported), _ = lax.scan(head, (none, none), xs)
    return minimised + of_head, (reported, told)


def _padded(length: int, array: Array) -> Array:
    """With zeros up to a length of the first dim: a microbatch without weight."""
    return jnp.pad(array, [(0, length - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])


@jax.custom_vjp
def _spread(outputs: Float[Array, "M B S D"]) -> Float[Array, "M/P B S D"]:
    """To each stage its equal part of the last stage's."""
    mine = jnp.where(_is_last(), outputs, jnp.zeros((), outputs.dtype))
    return lax.psum_scatter(mine, AXIS, scatter_dimension=0, tiled=True)


def _spread_backward(_: None, cotangent: Array) -> tuple[Array]:
    gathered = lax.all_gather(cotangent, AXIS, axis=0, tiled=True)
    return (jnp.where(_is_last(), gathered, jnp.zeros((), gathered.dtype)),)


def _is_last() -> Any:
    return lax.axis_index(AXIS) == lax.axis_size(AXIS) - 1


_spread.defvjp(lambda outputs: (_spread.fun(outputs), None), _spread_backward)
