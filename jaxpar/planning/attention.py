"""What context-parallel attention costs each rank: the tiles that the kernel computes, the bytes that the rank sends.

Bytes sent per rank, layer and sequence, with |x| a rank's own part (S / n tokens, all heads) in compute dtype; |dK| and
|dV| travel in float32, but for the last of their n permutes, home:

    ring        forward   (n - 1) (|K| + |V|)
                backward  (n - 1) (|K| + |V|) + n (|dK| + |dV|)
                r rounds left by a sliding window: r - 1 and r in place of n - 1 and n
                by documents: the distance between rounds goes by powers of two, each a permute
    ulysses     (n - 1) / n (|q| + |k| + |v| + |o|) each way, k and v of lcm(G, n) heads
    allgather   (n - 1) (|K| + |V|) each way
    hybrid=RxU  ulysses over U ranks; a ring of R, whose K and V are U parts of lcm(G, U) / U heads
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.kernels.tiled import admitted, block_size, ends
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import needed_shifts, permutation


@dataclass(frozen=True)
class AttentionSize:
    """Of one sequence through one layer."""

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    compute_bytes: int = 2
    gradient_bytes: int = 4
    """Of K and V's gradients while they travel round a ring."""


@dataclass(frozen=True)
class AttentionPlan:
    tiles_per_rank: list[int]
    """Of the forward pass; the backward pass computes the same ones."""
    flops_per_rank: list[int]
    """Forward, of whole tiles: 4 x queries x keys x heads x head_dim each."""
    bytes_sent_forward: int
    bytes_sent_backward: int


def causal_flops(size: AttentionSize) -> float:
    """Forward FLOPs of all ranks together, if none were spent on what a causal mask hides."""
    return 4 * size.num_heads * size.head_dim * size.seq_len**2 / 2


def documents(seq_len: int, count: int) -> Tokens:
    """A sequence [1, S] of so many documents, of equal lengths to a token; positions start again in each. Numpy's."""
    starts = np.arange(count + 1, dtype=np.int64) * seq_len // count
    segments: Any = np.repeat(np.arange(count), np.diff(starts))
    positions: Any = np.arange(seq_len) - starts[segments]
    return Tokens(positions[None].astype(np.int32), segments[None].astype(np.int32))


def attention_plan(
    strategy: ContextStrategy, ranks: int, size: AttentionSize, mask: AttentionMask, num_documents: int = 1
) -> AttentionPlan:
    """What each rank computes and sends for one sequence of so many documents."""
    group = strategy.group
    order = permutation(strategy.order, size.seq_len, ranks)
    tokens = jax.tree.map(lambda x: x[:, order], documents(size.seq_len, num_documents))
    parts = ranks // group
    k_parts = 1 if strategy.kind == "allgather" else parts
    block = strategy.block_of(size.seq_len, ranks)
    active = _active_tiles(tokens, parts, k_parts, mask, block)
    if strategy.kind != "allgather":
        # A ring leaves out whole rounds, by the parts' positions alone: finer than blocks, which are of many.
        shifts = needed_shifts(strategy.order, size.seq_len, ranks, group, mask.causal, mask.window)
        behind = (np.arange(parts)[:, None] - np.arange(parts)[None]) % parts
        active = active & np.isin(behind, shifts)[:, None, :, None]
    tiles = np.repeat(active.sum(axis=(1, 2, 3)), group)
    q_block = block_size(size.seq_len // parts, block)
    k_block = block_size(size.seq_len // k_parts, block)
    flops_per_tile = 4 * q_block * k_block * (size.num_heads // group) * size.head_dim

    part = size.seq_len // ranks * size.head_dim  # elements of a head
    kv_heads = math.lcm(size.num_kv_heads, group)
    exchanged = 2 * (size.num_heads + kv_heads) * part * size.compute_bytes * (group - 1) // group
    if strategy.kind == "allgather":
        gathered = (ranks - 1) * 2 * size.num_kv_heads * part * size.compute_bytes
        forward, backward = gathered, gathered
    else:
        hops, home = _permutes(strategy, ranks, size, mask, active if num_documents > 1 else None)
        held = 2 * kv_heads * part  # U parts of 1 / U of the heads
        forward = hops * held * size.compute_bytes
        backward = forward + held * (hops * size.gradient_bytes + home * size.compute_bytes)
    return AttentionPlan(
        tiles_per_rank=tiles.tolist(),
        flops_per_rank=(tiles * flops_per_tile).tolist(),
        bytes_sent_forward=exchanged + forward,
        bytes_sent_backward=exchanged + backward,
    )


def _active_tiles(
    tokens: Tokens, q_parts: int, k_parts: int, mask: AttentionMask, block: int
) -> Bool[np.ndarray, "R QB P KB"]:
    """Which blocks of keys each part's blocks of queries are computed with."""
    active: Any = admitted(_ends(tokens, q_parts, block), _ends(tokens, k_parts, block), mask)
    return active.reshape(q_parts, active.shape[1] // q_parts, k_parts, -1)


def _ends(tokens: Tokens, parts: int, block: int) -> tuple[Tokens, Tokens]:
    """The first and the last token of the blocks into which each part is cut, [1, blocks]."""
    length = tokens.positions.shape[1] // parts
    size = block_size(length, block)

    def cut(array: Int[np.ndarray, "1 S"]) -> Int[np.ndarray, "1 N b"]:
        padded = np.pad(array.reshape(parts, length), ((0, 0), (0, -length % size)), mode="edge")
        return padded.reshape(1, -1, size)

    return ends(jax.tree.map(cut, tokens))


def _permutes(
    strategy: ContextStrategy,
    ranks: int,
    size: AttentionSize,
    mask: AttentionMask,
    active: Bool[np.ndarray, "R QB R KB"] | None,
) -> tuple[int, int]:
    """How many permutes a ring takes to all of its rounds, and from the last one home; `active` where documents leave
    out some."""
    parts = ranks // strategy.group
    shifts = needed_shifts(strategy.order, size.seq_len, ranks, strategy.group, mask.causal, mask.window)
    if active is None:
        return len(shifts) - 1, int(shifts[-1] > 0)
    q_part, k_part = np.nonzero(active.any(axis=(1, 3)))
    shifts = tuple(sorted(set(((q_part - k_part) % parts).tolist()) & {*shifts, 0}))
    hops = [after - before for before, after in itertools.pairwise(shifts)]
    return sum(hop.bit_count() for hop in hops), (-shifts[-1] % parts).bit_count()
