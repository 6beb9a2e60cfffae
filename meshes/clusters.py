"""Clusters: how devices are joined, from one server out, and at what speed a group of them can talk.

A cluster is a list of levels, innermost first (server, rack, pod, cluster), each with the devices in one of its units
and what a device can send beyond the next smaller unit. Devices are numbered so that each unit is a contiguous range;
a group of a mesh axis is `size` devices at a `stride` (the product of the axes inside it).

A ring over whole servers enters and leaves each server once, through all of the server's network cards: a group with
g devices in each unit has g times one card's bandwidth there, up to what the links inside give (so NCCL's rings on
8 x 400 Gb/s reach about 370 GB/s). An all-to-all gains nothing so: each device sends what leaves through its own card,
at its level's bandwidth. Within a TPU pod the links form a torus: a group that fills one of its dims sends both ways
round it, a group of several dims uses the links of each.
"""

import difflib
import math
from dataclasses import dataclass, replace

from meshes.chips import CHIPS, chip
from meshes.spec import Chip

# Of one hop of a ring: NCCL's tuning model, src/graph/tuning.cc (hwLatencies: ring, Simple protocol).
_NVLINK_LATENCY = 3.4e-6
_NETWORK_LATENCY = 14e-6
# How to Scale Your Model, "How to Think About TPUs": about 1 us a hop.
_ICI_LATENCY = 1e-6

_THREE_TIERS = {"HDR": 40**3 // 4, "NDR": 64**3 // 4}
"""Ports of a non-blocking three-tier tree of InfiniBand switches of 40 or 64 ports."""


@dataclass(frozen=True)
class Level:
    """One level of a cluster."""

    name: str
    size: int
    """Devices in one unit of it."""
    bandwidth: float
    """Bytes/s that each device can send, one way, to the others of its unit that no smaller unit joins."""
    latency: float
    """Seconds of one hop."""


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, and what joins them."""

    name: str
    chip: Chip
    levels: tuple[Level, ...]
    """Innermost first; on TPUs the first is the pod, whose bandwidth is that of a ring along one dim of its torus."""
    source: str
    torus: tuple[int, ...] = ()
    """Dims of one pod, in devices, innermost last; empty where a switch joins the devices."""

    @property
    def num_devices(self) -> int:
        return self.levels[-1].size

    def level_of(self, stride: int, size: int) -> Level:
        """The level that a mesh axis of this size crosses, given the product of the axes inside it.

        Raises:
          ValueError: the cluster has no so many devices.
        """
        span = stride * size
        for level in self.levels:
            if span <= level.size:
                return level
        raise ValueError(
            f"an axis of {size} outside of {stride} devices spans {span}, but {self.name} has {self.num_devices}: "
            "take smaller axes"
        )

    def bandwidth(self, stride: int, size: int) -> float:
        """Bytes/s, one way, at which a ring over a group of a mesh axis moves data through each of its devices."""
        slowest, inside = math.inf, 1
        for level in self.levels[: self.levels.index(self.level_of(stride, size)) + 1]:
            in_unit = min(size, level.size // stride)  # devices of the group
            if in_unit > 1:
                is_torus = self.torus and level is self.levels[0]
                beyond = self._torus_bandwidth(stride, in_unit) if is_torus else level.bandwidth * inside
                slowest, inside = min(slowest, beyond), in_unit
        return slowest

    def latency(self, stride: int, size: int) -> float:
        """Seconds of one hop, at the level that the axis crosses."""
        return self.level_of(stride, size).latency

    def part(self, num_devices: int) -> "Cluster":
        """The cluster's first devices; of a torus, the slice nearest to a cube. Itself if it is no larger.

        Raises:
          ValueError: the cluster has no so many devices.
        """
        if num_devices > self.num_devices:
            raise ValueError(f"{self.name} has {self.num_devices} devices, not {num_devices}: take fewer")
        levels = [level for level in self.levels if level.size < num_devices]
        last = self.levels[len(levels)] if len(levels) < len(self.levels) else self.levels[-1]
        torus = _slice(self.torus, num_devices) if self.torus and num_devices < self.levels[0].size else self.torus
        return replace(self, levels=(*levels, replace(last, size=num_devices)), torus=torus)

    def _torus_bandwidth(self, stride: int, size: int) -> float:
        """Of a group within one pod: both ways round each dim that it fills, one way along one that it shares."""
        per_way = self.levels[0].bandwidth / 2
        total, inner = 0.0, 1
        for dim in reversed(self.torus):
            overlap = min(stride * size, inner * dim) // max(stride, inner)
            if overlap > 1:
                # Dims of 2 have one link; rings close where a dim is a multiple of 4 (3-D) or a whole pod's side (2-D).
                total += 2 * per_way if overlap == dim and _wraps(self.torus, self.chip.torus, dim) else per_way
            inner *= dim
        return total or per_way


def _wraps(torus: tuple[int, ...], pod: tuple[int, ...], dim: int) -> bool:
    return dim % 4 == 0 if len(torus) == 3 else dim in pod


def _slice(torus: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    """The shape of so many devices, within a torus, whose longest side is shortest; flat where none fits."""
    if len(torus) == 1:
        return (num_devices,) if num_devices <= torus[0] else ()
    shapes = [
        (first, *rest)
        for first in range(1, min(torus[0], num_devices) + 1)
        if num_devices % first == 0
        for rest in [_slice(torus[1:], num_devices // first)]
        if rest
    ]
    return min((tuple(sorted(shape)) for shape in shapes), key=lambda shape: (max(shape), -min(shape)), default=())


def cluster_of(known: Chip, devices_per_server: int | None = None) -> Cluster:
    """A cluster of any chip: servers as its vendor builds them, or of so many devices, on one network without
    oversubscription; TPUs and Trainium in whole pods."""
    size = known.devices_per_server if devices_per_server is None else devices_per_server
    if size < 1:
        raise ValueError(f"devices_per_server is {size}: a server has at least 1")
    if known.torus and devices_per_server is None:
        return _pods(f"{known.name.lower()}-pods", known)
    inner = Level("server", size, known.link.total, _NVLINK_LATENCY)
    outer = Level("cluster", size * _THREE_TIERS["NDR"] // 8, known.network, _NETWORK_LATENCY)
    return Cluster(f"{known.name.lower()}-cluster", known, (inner, outer), known.source)


def _pods(name: str, known: Chip, num_pods: int = 64) -> Cluster:
    """Pods of a chip with a torus, over a data-centre network. Where two devices share a chip they share its links, and
    lie next to each other in the innermost dim."""
    torus = (*known.torus[:-1], known.torus[-1] * known.devices_per_chip)
    size = math.prod(torus)
    pod = Level("pod", size, 2 * known.link.bandwidth, _ICI_LATENCY)
    network = Level("cluster", size * num_pods, known.network, _NETWORK_LATENCY)
    return Cluster(name, known, (pod, network), known.source, torus)


def _servers(name: str, known: str, size: int, unit: int, tiers: str, source: str) -> Cluster:
    """Servers (or racks) of `size` GPUs, joined to scalable units and these to a non-blocking tree of three tiers."""
    found = chip(known)
    levels = (
        Level("rack" if size > 16 else "server", size, found.link.total, _NVLINK_LATENCY),
        Level("pod", size * unit, found.network, _NETWORK_LATENCY),
        Level("cluster", size * unit * (_THREE_TIERS[tiers] // (size * unit)), found.network, _NETWORK_LATENCY),
    )
    return Cluster(name, found, levels, source)


_H100 = chip("H100-SXM")
_CLUSTERS = (
    Cluster(
        "llama3-h100",
        _H100,
        (
            Level("server", 8, _H100.link.total, _NVLINK_LATENCY),
            Level("rack", 16, _H100.network, _NETWORK_LATENCY),
            Level("pod", 3072, _H100.network, _NETWORK_LATENCY),
            Level("cluster", 24576, _H100.network / 7, _NETWORK_LATENCY),
        ),
        "The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.1: 8 GPUs a server, 2 servers a rack, 192 racks a "
        "pod, 8 pods over a layer oversubscribed 1:7",
    ),
    _servers("dgx-a100", "A100-80GB", 8, 20, "HDR", "NVIDIA DGX SuperPOD reference architecture, DGX A100"),
    _servers("dgx-a100-40gb", "A100-40GB", 8, 20, "HDR", "NVIDIA DGX SuperPOD reference architecture, DGX A100"),
    _servers("dgx-h100", "H100-SXM", 8, 32, "NDR", "NVIDIA DGX SuperPOD reference architecture, DGX H100"),
    _servers("dgx-h200", "H200", 8, 32, "NDR", "NVIDIA DGX SuperPOD reference architecture, DGX H200"),
    _servers("dgx-b200", "B200", 8, 32, "NDR", "NVIDIA DGX SuperPOD reference architecture, DGX B200"),
    _servers("dgx-b300", "B300", 8, 72, "NDR", "NVIDIA DGX SuperPOD reference architecture, DGX B300"),
    _servers("gb200-nvl72", "GB200", 72, 8, "NDR", "NVIDIA DGX SuperPOD reference architecture, DGX GB200"),
    _servers("gb300-nvl72", "GB300", 72, 8, "NDR", "NVIDIA DGX SuperPOD reference architecture, DGX GB300"),
    *(_pods(f"{kind}-pod", chip(kind)) for kind in ("v4", "v5e", "v5p", "v6e", "v7x")),
)


def cluster_names() -> list[str]:
    """The presets' names; `load_cluster` also takes any chip's."""
    return [known.name for known in _CLUSTERS]


def load_cluster(name: str) -> Cluster:
    """The cluster of a preset's name, such as "llama3-h100" or "dgx-a100", or of a chip's, in its vendor's servers.

    Raises:
      ValueError: no such cluster; names the nearest, and all that there are.
    """
    by_name = {known.name: known for known in _CLUSTERS}
    key = name.lower().removeprefix("tpu-")
    if key in by_name:
        return by_name[key]
    try:
        return cluster_of(chip(name))
    except ValueError:
        close = difflib.get_close_matches(key, [*by_name, *(known.name.lower() for known in CHIPS)], n=1, cutoff=0.0)[0]
        raise ValueError(
            f"no cluster is called '{name}': did you mean '{close}'? The clusters are {', '.join(by_name)}; "
            "a chip's name gives its vendor's servers"
        ) from None
