"""What collectives cost by their algorithm: bus factors, rings, tori and trees. Bytes and seconds; bandwidth one way.

A collective's bytes are those of the whole buffer (see `traffic`).
"""

import math
from collections.abc import Sequence

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")


def bus_factor(op: str, ranks: int) -> float:
    """Bytes through each device's link, over the buffer's: what turns nccl-tests' algorithm bandwidth into its bus
    bandwidth. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md."""
    if op not in COLLECTIVES:
        raise ValueError(f"no collective is called {op!r}; known: {', '.join(COLLECTIVES)}")
    if op in ("broadcast", "reduce", "sendrecv"):
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if op == "all_reduce" else share


def ring_seconds(op: str, num_bytes: float, ranks: int, bandwidth: float, hop_latency: float = 0.0) -> float:
    """Of a ring (a pipelined chain for broadcast and reduce), its hops' latencies in a row."""
    hops = (2 if op == "all_reduce" else 1) * (ranks - 1)
    return num_bytes * bus_factor(op, ranks) / bandwidth + hops * hop_latency


def tree_seconds(num_bytes: float, ranks: int, bandwidth: float, hop_latency: float = 0.0) -> float:
    """Of an all-reduce over a pipelined double binary tree: a ring's bytes at scale, log2(n) hops up and down. Source:
    NVIDIA, Massively Scale Your Deep Learning Training with NCCL 2.4."""
    return 2 * num_bytes / bandwidth + 2 * math.log2(ranks) * hop_latency


def torus_gather_seconds(
    num_bytes: float, link: float, axes: Sequence[int] = (), bidirectional: bool = True, hop_latency: float = 0.0
) -> float:
    """Of an all-gather or reduce-scatter over whole torus axes of these sizes, at a link's bandwidth one way.

    With wraparound both ways carry half of each shard: bytes / (2 link x axes); without, each shard goes n - 1 hops one
    way. Never faster than its hops' latencies. Source: How to Scale Your Model, "Sharded Matrices".
    """
    hops = sum(size // 2 if bidirectional else size - 1 for size in axes)
    if bidirectional:
        seconds = num_bytes / (2 * link * max(1, len(axes)))
    else:
        ranks = math.prod(axes)
        seconds = num_bytes * (ranks - 1) / ranks / (link * max(1, len(axes)))
    return max(seconds, hops * hop_latency)


def torus_all_to_all_seconds(num_bytes: float, link: float) -> float:
    """Over one wrapped axis, of any size: a quarter of an all-gather's, since the mean way is a quarter of the ring.
    Source: How to Scale Your Model, "Sharded Matrices"."""
    return torus_gather_seconds(num_bytes, link) / 4


def level_bandwidth(units: int, bandwidth: float) -> float:
    """An all-gather's bytes per second at one level of a tree whose `units` each send at `bandwidth`: a unit need not
    receive its own share. Source: How to Scale Your Model, "GPUs"."""
    return bandwidth * units / (units - 1)


def tree_levels_seconds(num_bytes: float, levels: Sequence[tuple[int, float]]) -> float:
    """Of an all-gather over (units, bandwidth of a unit) at each level: the slowest one's."""
    return num_bytes / min(level_bandwidth(units, bandwidth) for units, bandwidth in levels)
