"""A pipeline schedule's peak memory and bubble by closed form: `parallel.pipeline.simulate`'s, without a table.

For P stages, M microbatches and C chunks. What stage s (0 first) holds at most, in activations of one microbatch in a
whole stage, M at most:

    gpipe, looped-bfs   M
    1f1b                P - s
    eager-1f1b          2 (P - s) - 1
    interleaved-1f1b    ((C - 1) r + 2 (P - 1 - s) + 1) / C, rounds of r microbatches (P where it divides M)
    zb-h1, zb-h2        as 1f1b and eager-1f1b; beside them s or 2 s weight gradients wait
    zb-v                P; dualpipe-v P + 1/2; with few microbatches (M + 1 + s) / 2

A weight gradient that waits counts as half an activation, as in Zero Bubble's memory limit. The bubble, in forward and
backward passes of one microbatch through a stage, where F, B and W take a third each:

    1f1b, gpipe, eager-1f1b             P - 1
    interleaved-1f1b, looped-bfs        (P - 1 + (C - 1) max(0, P - M)) / C
    zb-h1                               (P - 1 + max(0, P - M)) / 3
    zb-h2                               (P - 1 + max(0, floor((2 P - 1 - M) / 2))) / 3
    zb-v                                (P - 1 + max(0, 3 P - 1 - 2 M)) / 6
    dualpipe-v                          (P - 1 + 2 max(0, 2 P - M - [M <= P])) / 6

Sources: as in parallel/pipeline/kinds.py; the terms for few microbatches are those the tables' own.
"""

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

DEFERRED_SIZE = 0.5


@dataclass(frozen=True, eq=False)
class Stashes:
    """Per stage, in activations of one microbatch in one stage."""

    activations: Float[np.ndarray, " P"]
    memory: Float[np.ndarray, " P"]
    """With what weight gradients that wait need."""
    waiting: Float[np.ndarray, " P"]
    """Weight gradients that wait while another action runs, at most; of zb-v and dualpipe-v on the stage with the most,
    where microbatches are few."""


@functools.cache
def stashes(kind: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Stashes:
    """Raises KeyError for a kind that cannot be run by one program on all stages."""
    after = np.arange(num_stages)[::-1].astype(float)  # stages behind this one
    before = after[::-1]
    most = float(num_microbatches)
    waiting = np.zeros(num_stages)
    match kind:
        case "gpipe" | "looped-bfs":
            held = np.full(num_stages, most)
        case "1f1b" | "zb-h1":
            held = after + 1
        case "eager-1f1b" | "zb-h2":
            held = 2 * after + 1
        case "interleaved-1f1b":
            rounds = max(1, num_microbatches // num_stages)
            warm_up = (num_chunks - 1) * -(-num_microbatches // rounds) + 2 * after
            held = (warm_up + 1) / num_chunks
        case "zb-v" | "dualpipe-v":
            limit = num_stages + (0.5 if kind == "dualpipe-v" else 0.0)
            held = np.minimum(limit, (num_microbatches + 1 + before) / 2)
            share = 0.5 if kind == "dualpipe-v" else 1.0
            waiting = share * np.minimum(before, max(0, num_microbatches - num_stages))
            return Stashes(held := np.minimum(held, most), held, waiting)
        case _:
            raise KeyError(kind)
    held = np.minimum(held, most)
    if kind in ("zb-h1", "zb-h2"):
        waiting = np.minimum((2 if kind == "zb-h2" else 1) * before, most - 1)
    # A microbatch is one or the other.
    return Stashes(held, held + DEFERRED_SIZE * np.minimum(waiting, most - held), waiting)


def bubble(kind: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> float:
    """Idle time of a stage, in passes of one microbatch, forward and backward, through a whole stage.

    Raises KeyError for a kind that cannot be run by one program on all stages.
    """
    hops, missing = num_stages - 1, max(0, num_stages - num_microbatches)
    match kind:
        case "gpipe" | "1f1b" | "eager-1f1b" | "interleaved-1f1b" | "looped-bfs":
            return (hops + (num_chunks - 1) * missing) / num_chunks
        case "zb-h1":
            return (hops + missing) / 3
        case "zb-h2":
            return (hops + max(0, (2 * num_stages - 1 - num_microbatches) // 2)) / 3
        case "zb-v":
            return (hops + max(0, 3 * num_stages - 1 - 2 * num_microbatches)) / 6
        case "dualpipe-v":
            few = max(0, 2 * num_stages - num_microbatches - (num_microbatches <= num_stages))
            return (hops + 2 * few) / 6
        case _:
            raise KeyError(kind)
