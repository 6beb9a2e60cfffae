"""Seconds of collectives on a job's cluster: where an axis lies, what joins its groups, how long their bytes take.

A collective moves bytes at its busbw (nccl-tests, doc/PERFORMANCE.md: all-gather, reduce-scatter and all-to-all send
(n - 1) / n of the whole buffer, an all-reduce twice that) over the levels of the hierarchy that its axis crosses, and
waits the latency of a ring's n - 1 hops, or of a tree's 2 log2(n) where that is less.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxpar.planning.calibration import Calibration
from jaxpar.planning.collectives import bus_factor
from jaxpar.planning.job import Job, Numbers
from meshes.clusters import Cluster
from meshes.mesh import MESH_AXES


def place(job: Job, axes: str) -> tuple[int, int]:
    """(stride, size) of the groups of one or several axes."""
    names = axes.split("+")
    inside = MESH_AXES[MESH_AXES.index(names[-1]) + 1 :]
    return math.prod(job.mesh[axis] for axis in inside), math.prod(job.mesh[axis] for axis in names)


def collective_seconds(
    job: Job, calibration: Calibration, axes: str, ops: Mapping[str, Numbers], count: float
) -> Numbers:
    """Of the collectives of one group of axes, all of an operation's bytes in `count` equal ones."""
    stride, size = place(job, axes)
    joins = _link(job.cluster, stride, size)
    ring = joins.hop * np.minimum(size - 1, 2 * np.log2(size))
    total: Numbers = 0.0
    for op, num_bytes in ops.items():
        is_there = (num_bytes > 0) * (size > 1)
        if op == "collective-permute":
            seconds, latency = num_bytes / joins.bandwidth, joins.hop
        elif op == "all-to-all":
            seconds, latency = num_bytes * joins.all_to_all, joins.hop
        else:
            seconds, latency = bus_factor(op.replace("-", "_"), size) * num_bytes / joins.bandwidth, ring
        total = total + is_there * (seconds / calibration.chip.network + count * latency)
    return total


@dataclass(frozen=True, eq=False)
class _Link:
    """What joins the groups of a mesh's axes."""

    bandwidth: Numbers
    """Of a ring."""
    hop: Numbers
    """Seconds of its latency."""
    all_to_all: Numbers
    """Seconds per byte: unlike a ring's, each device's bytes for other servers leave through its own network card."""


def _link(cluster: Cluster, stride: Numbers, size: Numbers) -> _Link:
    """Of one group, or of each where stride and size are arrays."""
    strides, sizes = np.broadcast_arrays(stride, size)
    found = _links(cluster, tuple(strides.ravel().tolist()), tuple(sizes.ravel().tolist()))
    return _Link(*found.reshape(3, *sizes.shape))


@functools.lru_cache(maxsize=4096)
def _links(cluster: Cluster, strides: tuple[int, ...], sizes: tuple[int, ...]) -> Float[np.ndarray, "3 N"]:
    places = list(zip(strides, sizes))
    known = {
        place: (cluster.bandwidth(*place), cluster.latency(*place), _all_to_all(cluster, *place))
        for place in set(places)
    }
    return np.array([known[place] for place in places]).T


def _all_to_all(cluster: Cluster, stride: int, size: int) -> float:
    total, inside, crossed = 0.0, 1, cluster.level_of(stride, size)
    for level in cluster.levels:
        reached = size if level is crossed else max(inside, min(size, level.size // stride))
        within = level is cluster.levels[0] and reached > 1
        bandwidth = cluster.bandwidth(stride, reached) if within else level.bandwidth
        total += (reached - inside) / size / bandwidth
        if level is crossed:
            break
        inside = reached
    return total
