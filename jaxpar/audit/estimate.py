"""How long a compiled step takes: what it computes, by the compiler's cycles or a roofline, and what it sends exposed.

    step     = compute + exposed
    compute  = cycles / clock where the compiler states cycles (TPUs), and kernels at their share of the peak; else, of
               each kernel, max(FLOPs / peak, bytes / bandwidth), each times the share that the planner's calibration
               has for the chip
    exposed  = of each collective, its time on the topology's links less the compute between its start and its end;
               compute hides one collective at a time

An estimate of a schedule, not a simulation: launches, and one stage's waits for another, are not in it. A pipeline's
bubble is not either: its ticks are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpar.audit.hlo import UNKNOWN, Collective
from jaxpar.audit.hlo_text import Computation, Instruction
from jaxpar.audit.work import Work, own_cycles, runs_on_its_own, touched_bytes
from jaxpar.planning.calibration import ChipCalibration
from jaxpar.planning.collectives import bus_factor
from meshes.chips import peak_of
from meshes.clusters import Cluster
from meshes.mesh import MESH_AXES

CLOCKS = {"TPU-v4": 1.05e9, "TPU-v5e": 1.5e9, "TPU-v5p": 1.75e9, "TPU-v6e": 1.75e9, "TPU7x": 1.75e9}
"""Hz: peak FLOP/s over 2 x multipliers, 4 arrays of 128 x 128 a core up to v5p (How to Scale Your Model, "How to Think
About TPUs"; of v4 Jouppi et al., arXiv 2304.01433). What came after is taken to run as v5p does."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step."""

    compute: float
    exposed: Mapping[str, float]
    """By axes."""
    hidden: Mapping[str, float]

    @property
    def step(self) -> float:
        return self.compute + sum(self.exposed.values())


def estimate(
    work: Work,
    collectives: Sequence[Collective],
    mesh: Mapping[str, int],
    cluster: Cluster,
    calibration: ChipCalibration,
    precision: str,
) -> Estimate:
    """Of one run of a program on a mesh of a cluster's devices."""
    chip = cluster.chip
    share = calibration.matmul.get(precision, calibration.matmul["bfloat16"])
    peak = peak_of(chip, precision) * share
    kernel_peak = peak_of(chip, "bfloat16") * min(1.0, calibration.attention * calibration.newest_attention)
    bandwidth = chip.memory_bandwidth * calibration.memory
    has_cycles = work.estimated_cycles is not None
    inside = _inside_kernels(work)

    def seconds(computation: Computation, instruction: Instruction) -> float:
        if computation.name in inside or not runs_on_its_own(instruction):
            return 0.0
        if instruction.opcode.endswith(("-start", "-done", "-update")) or instruction in computation.collectives:
            return 0.0
        if instruction.opcode == "custom-call":
            return work.own_flops(computation, instruction) / 2 / kernel_peak  # they skip what the mask hides
        if has_cycles:
            return own_cycles(computation, instruction) / CLOCKS[chip.name]
        flops = work.of(work.own_flops, computation, instruction)
        return max(flops / peak, touched_bytes(work.module, computation, instruction) / bandwidth)

    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    left: dict[tuple[str, str], float] = {}
    for each in collectives:
        axes = "+".join(each.axes)
        needed = _transfer_seconds(each, mesh, cluster, calibration.network)
        covered = 0.0
        for beside in each.window.between if each.window is not None else ():
            assert each.window is not None
            key = each.window.computation.name, beside.name
            have = left.setdefault(key, work.of(seconds, each.window.computation, beside))
            used = min(have, needed - covered)
            left[key] -= used
            covered += used
        exposed[axes] = exposed.get(axes, 0.0) + each.count * (needed - covered)
        hidden[axes] = hidden.get(axes, 0.0) + each.count * covered
    return Estimate(work.total(seconds), exposed, hidden)


def _inside_kernels(work: Work) -> frozenset[str]:
    """Computations that are a part of one kernel: of fusions, and of what reductions do with two elements."""
    return frozenset(
        callee
        for computation in work.module.computations.values()
        for caller, role, callee in computation.calls
        if caller.opcode == "fusion" or (role == "to_apply" and caller.opcode != "call")
    )


def _transfer_seconds(collective: Collective, mesh: Mapping[str, int], cluster: Cluster, network: float) -> float:
    """Of one execution, on the slowest link that its axes cross."""
    # Groups that no axes make may reach over all of them.
    names = [
        axis
        for axis in MESH_AXES
        if mesh[axis] > 1 and axis in (MESH_AXES if collective.axes == UNKNOWN else collective.axes)
    ]
    size = math.prod(mesh[axis] for axis in names)
    stride = math.prod(mesh[axis] for axis in MESH_AXES[MESH_AXES.index(names[-1]) + 1 :])
    hop = cluster.latency(stride, size)
    bandwidth = cluster.bandwidth(stride, size) * network
    if collective.op in ("collective-permute", "collective-broadcast"):
        return collective.bytes / bandwidth + hop
    op = collective.op.removeprefix("ragged-").replace("-", "_")
    return bus_factor(op, size) * collective.bytes / bandwidth + hop
