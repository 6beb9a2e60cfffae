"""The audit of a layout: the program that the real compiler makes for the real machine, held against the plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.audit.compile import Parameter, Program, compile_step
from jaxpar.audit.estimate import Estimate, estimate
from jaxpar.audit.hlo import UNKNOWN, Collective, collectives_of
from jaxpar.audit.hlo_text import Module
from jaxpar.audit.planned import (
    branches_taken,
    cluster_of,
    filled_rows,
    is_tiled,
    job_of,
    note_of,
    step_flops,
    tiles_per_call,
    with_slots,
)
from jaxpar.audit.topology import Topology
from jaxpar.audit.work import Duplicates, Kernel, Work
from jaxpar.config import Config
from jaxpar.parallel.axes import STATE_RULES, TOKEN_AXES, gathered_axes
from jaxpar.parallel.fsdp import IN_ONE, Folds
from jaxpar.parallel.parameter import MOST_PARTS
from jaxpar.planning import flops as model_flops
from jaxpar.planning.calibration import calibration_table
from jaxpar.planning.memory import Memory, memory
from jaxpar.planning.traffic import Traffic
from jaxpar.training import pipelines
from jaxpar.verify import Target, expected_traffic, has_formulas
from meshes.chips import peak_of

SURPRISING = 0.01
"""Share of all traffic, or of all parameters' bytes, from which on something unexpected is a surprise."""

Totals = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class Surprise:
    kind: str
    """`unclaimed traffic`, `replicated parameter` or `gathered activation`."""
    what: str
    bytes: int
    """Per device and step; of a parameter, what each device holds of it."""


@dataclass(frozen=True)
class Audit:
    """Of one device and one step."""

    topology: str
    program: Program
    plan: Memory
    limit: int
    flops: float
    planned_flops: float
    estimated_cycles: float | None
    kernels: tuple[Kernel, ...]
    duplicates: Duplicates
    collectives: Totals
    """{axes: {op: {"count", "bytes", "overlapped_bytes"}}}"""
    exposed: tuple[Collective, ...]
    """That no matmul hides, with most bytes first."""
    planned: Traffic
    note: str
    """What the plan leaves out."""
    surprises: tuple[Surprise, ...]
    seconds: Estimate
    mfu: float

    @property
    def fits(self) -> bool:
        return self.program.total <= self.limit

    def overlapped(self, axes: str) -> float:
        """The share of an axis's bytes beside which a matmul runs."""
        found = self.collectives[axes].values()
        return sum(op["overlapped_bytes"] for op in found) / max(1, sum(op["bytes"] for op in found))

    def as_json(self) -> dict[str, Any]:
        program = self.program
        return {
            "topology": self.topology,
            "mesh": {axis: size for axis, size in program.mesh.items() if size > 1},
            "compiler": program.versions,
            "compiler_options": program.options,
            "attention": program.attention,
            "compile_seconds": program.compile_seconds,
            "memory_bytes": {
                "arguments": program.arguments,
                "temporaries": program.temporaries,
                "outputs": program.outputs - program.aliased,
                "total": program.total,
                "limit": self.limit,
            },
            "planned_memory_bytes": self.plan.summary()["total"],
            "fits": self.fits,
            "flops": self.flops,
            "planned_flops": self.planned_flops,
            "estimated_cycles": self.estimated_cycles,
            "remat_duplicates": {"count": self.duplicates.count, "flops": self.duplicates.flops},
            "kernels": [{"target": k.target, "op_name": k.op_name, "flops": k.flops} for k in self.kernels],
            "collectives": self.collectives,
            "planned_collectives": {
                axes: {op: {"bytes": size} for op, size in ops.items()} for axes, ops in self.planned.items()
            },
            "note": self.note,
            "surprises": [{"kind": s.kind, "what": s.what, "bytes": s.bytes} for s in self.surprises],
            "estimated_step_seconds": self.seconds.step,
            "estimated_seconds": {"compute": self.seconds.compute, "exposed": dict(self.seconds.exposed)},
            "estimated_mfu": self.mfu,
        }


def audit(config: Config, topology: Topology, timeout: float, use_cache: bool = True) -> Audit:
    """Compile the config's train step for a topology, and read it. Raises ValueError as `compile_step`."""
    program = compile_step(config, topology, timeout, use_cache)
    return read(program, config, topology)


def read(program: Program, config: Config, topology: Topology) -> Audit:
    """The audit of a compiled step. Raises ValueError for a program whose traffic depends on the data."""
    mesh = program.mesh
    cluster = cluster_of(topology)
    job = job_of(config, cluster, mesh)
    dynamic_trips = tiles_per_call(job) if is_tiled(job, program.attention) else 1.0
    by_place = program.attention == "splash" and not is_tiled(job, program.attention)
    target = Target(topology.platform, program.device_kind, program.folds, by_place)
    work = Work(Module.parse(program.hlo), branches_taken(config, mesh), dynamic_trips, filled_rows(job))
    collectives = collectives_of(work, mesh, program.slices)
    planned = expected_traffic(config, mesh, target)
    schedule = pipelines.make_schedule(config, mesh["pipe"])
    claims_all = schedule is None or has_formulas(schedule)
    chip = cluster.chip
    calibration = calibration_table().of(chip).chip
    seconds = estimate(work, collectives, mesh, cluster, calibration, job.precision)
    of_model = model_flops.step_flops(config.model, job.tokens_per_step, job.seq_len, config.parallel.remat)
    plan = memory(job)
    found = totals(collectives)
    exposed = sorted((c for c in collectives if not c.beside), key=lambda c: -c.bytes * c.count)
    return Audit(
        topology=topology.text,
        program=program,
        plan=plan,
        limit=plan.limit,
        flops=work.flops,
        planned_flops=step_flops(with_slots(job), program.attention, config.parallel.spread_head),
        estimated_cycles=work.estimated_cycles,
        kernels=tuple(work.kernels()),
        duplicates=work.duplicates,
        collectives=found,
        exposed=tuple(exposed),
        planned=planned,
        note=note_of(config, mesh),
        surprises=tuple(
            (
                *unclaimed(found if claims_all else _of_planned(found, planned), planned),
                *replicated(program.parameters, mesh),
                *gathered_activations(collectives, program.parameters, mesh, program.folds),
            )
        ),
        seconds=seconds,
        mfu=model_flops.mfu(of_model.model_causal, seconds.step, job.num_devices, peak_of(chip, job.precision)),
    )


def totals(collectives: Sequence[Collective]) -> Totals:
    """As `hlo.summarize`, with the bytes beside which a matmul runs."""
    found: Totals = {}
    for each in collectives:
        empty = {"count": 0, "bytes": 0, "overlapped_bytes": 0}
        total = found.setdefault("+".join(each.axes), {}).setdefault(each.op, empty)
        total["count"] += each.count
        total["bytes"] += each.bytes * each.count
        total["overlapped_bytes"] += each.bytes * each.count if each.beside else 0
    return found


def _of_planned(found: Totals, planned: Traffic) -> Totals:
    return {axes: {op: found[axes][op] for op in ops if op in found.get(axes, {})} for axes, ops in planned.items()}


def unclaimed(found: Mapping[str, Mapping[str, Mapping[str, int]]], planned: Traffic) -> list[Surprise]:
    """Traffic beyond what the strategies' formulas say, from 1% of it all."""
    all_bytes = sum(op["bytes"] for ops in found.values() for op in ops.values())
    surprises = []
    for axes, ops in found.items():
        beyond = {op: total["bytes"] - planned.get(axes, {}).get(op, 0) for op, total in ops.items()}
        # Of a gather or a reduce-scatter a compiler may make an all-reduce.
        missing = sum(
            max(0, size - ops.get(op, {"bytes": 0})["bytes"])
            for op, size in planned.get(axes, {}).items()
            if op in ("all-gather", "reduce-scatter")
        )
        if "all-reduce" in beyond:
            beyond["all-reduce"] -= missing
        for op, size in beyond.items():
            if size > SURPRISING * all_bytes:
                claimed = planned.get(axes, {}).get(op, 0)
                said = f"{claimed / 1e9:.2f} GB are planned" if claimed else "no strategy sends that"
                of = "devices in no axis's groups" if axes == "+".join(UNKNOWN) else axes
                what = f"{op} over {of}: {ops[op]['bytes'] / 1e9:.2f} GB; {said}"
                surprises.append(Surprise("unclaimed traffic", what, size))
    return surprises


def replicated(parameters: Sequence[Parameter], mesh: Mapping[str, int]) -> list[Surprise]:
    """Parameters that an axis of the rules does not cut, from 1% of all parameters' bytes."""
    all_bytes = sum(each.num_bytes for each in parameters)
    surprises = []
    for each in parameters:
        if each.missing and each.num_bytes > SURPRISING * all_bytes:
            cut = math.prod(mesh[axis] for axis in each.axes)
            what = f"{each.name} {list(each.shape)} is whole over {'+'.join(each.missing)}, which does not divide it"
            surprises.append(Surprise("replicated parameter", what, each.num_bytes // cut))
    return surprises


def gathered_activations(
    collectives: Sequence[Collective], parameters: Sequence[Parameter], mesh: Mapping[str, int], folds: Folds = IN_ONE
) -> list[Surprise]:
    """All-gathers over axes that cut weights and batch, of what has no weight's size, from 1% of all traffic."""
    all_bytes = sum(each.bytes * each.count for each in collectives)
    sizes: set[int] = set()
    for parameter in parameters:
        others = [axis for axis in parameter.axes if axis not in gathered_axes(parameter.logical)]
        whole = math.prod(parameter.shape) // math.prod(mesh[axis] for axis in others)
        is_layers = parameter.logical[0] == "layers"
        layers = parameter.shape[0] // mesh["pipe"] if is_layers else 1
        over_stages = 1 if is_layers else math.prod(mesh[axis] for axis in others if axis == "pipe")
        sizes |= {whole, whole // layers, whole * over_stages}  # all that a stage has, a layer's, a model's end
        # What the first of several steps gives.
        axes = tuple(axis for axis in STATE_RULES["embed"] if axis in parameter.axes and axis not in others)
        parts = [math.prod(step.num_ranks(mesh) for step in folds.gathers(axes)[n:]) for n in (1, 2)]
        sizes |= {size // part for size in (whole, whole // layers) for part in parts}
        if "mlp" in parameter.logical:
            sizes |= {whole // layers // parts for parts in range(2, MOST_PARTS + 1)}
    surprises = []
    for each in collectives:
        is_over_weights = not {*each.axes} - TOKEN_AXES and "context" not in each.axes
        if each.op != "all-gather" or not is_over_weights:
            continue
        # Compilers join gathers: of weights with one of token ids.
        strange = [size for size in each.elements if size not in sizes]
        num_bytes = each.bytes * each.count * sum(strange) // sum(each.elements)
        if num_bytes > SURPRISING * all_bytes:
            what = f"{each.name} ({each.op_name}) over {'+'.join(each.axes)}: {max(strange):,} elements, no weight's"
            surprises.append(Surprise("gathered activation", what, num_bytes))
    return surprises
