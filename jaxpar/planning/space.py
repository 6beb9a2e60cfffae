"""Every way to lay a model on a cluster that could be asked for: meshes, and for each what else is to be chosen.

`tensor` lies on the fastest links and must stay there: it reduces an activation four times a layer, with nothing beside
it. Then come `context`, `expert`, `fsdp`, `pipe` and `data`, in the order of the mesh, which is that of what they send
per layer; so each axis has the fastest links that are left (Llama 3, arXiv 2407.21783, section 3.3.2, places its own
alike). A mesh that cannot be is told with its reason.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import Order, multiple
from jaxpar.parallel.pipeline.kinds import KINDS
from jaxpar.planning.job import Job
from meshes.clusters import Cluster
from meshes.mesh import MESH_AXES
from models.config import ModelConfig

REMATS = ("none", "dots", "save=attention", "full", "sqrt")
PIPELINES = tuple(kind.name for kind in KINDS.values() if kind.synchronous and not kind.needs_slices)


@dataclass(frozen=True)
class Request:
    """What is to be planned; what is None is to be chosen."""

    model: ModelConfig
    cluster: Cluster
    num_devices: int
    seq_len: int
    batch_size: int
    """Sequences per step, over all devices."""
    mesh: Mapping[str, int] | None = None
    pipeline: str | None = None
    chunks: int | None = None
    num_microbatches: int | None = None
    remat: str | None = None
    zero: int | None = None
    context: str | None = None
    """As parallel.context.ContextStrategy.parse."""
    order: Order = "zigzag"
    precision: str = "bfloat16"

    def check(self) -> "Request":
        """Itself. ValueError, in one line, for what cannot be planned."""
        for name, value in (
            ("--devices", self.num_devices),
            ("--seq-len", self.seq_len),
            ("--batch-size", self.batch_size),
            ("--microbatches", self.num_microbatches),
            ("--chunks", self.chunks),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is not positive; take at least 1")
        if self.num_devices > self.cluster.num_devices:
            raise ValueError(
                f"--devices {self.num_devices} exceeds {self.cluster.name}, which has {self.cluster.num_devices}; take "
                "fewer"
            )
        if self.mesh is not None and math.prod(self.mesh.values()) != self.num_devices:
            raise ValueError(
                f"--mesh has {math.prod(self.mesh.values())} devices, --devices says {self.num_devices}; make them "
                "equal"
            )
        if self.pipeline is not None and self.pipeline not in PIPELINES:
            raise ValueError(f"--pipeline {self.pipeline} cannot be planned; take one of {', '.join(PIPELINES)}")
        if self.zero not in (None, 1, 2, 3):
            raise ValueError(f"--zero {self.zero} is no stage of ZeRO; take 1, 2 or 3")
        if self.batch_size % (self.num_microbatches or 1):
            raise ValueError(
                f"--batch-size {self.batch_size} is not divisible by --microbatches {self.num_microbatches}; take a "
                "divisor"
            )
        return self


@dataclass(frozen=True)
class Setting:
    """A mesh and what its memory and traffic depend on besides; microbatches, schedule and remat are left open."""

    mesh: Mapping[str, int] = field(hash=False)
    zero: int
    reshard_after_forward: bool
    context: ContextStrategy

    @property
    def family(self) -> tuple[int, int, bool, ContextStrategy]:
        """The same for settings that can be taken `together`."""
        return self.mesh["pipe"], self.zero, self.reshard_after_forward, self.context


@dataclass(frozen=True)
class Rejection:
    """A mesh that is none, or that nothing makes fit."""

    mesh: Mapping[str, int]
    kind: str
    """One of few, to be counted."""
    reason: str
    excess: float = 0.0
    """Bytes too many, of a mesh that does not fit."""


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def meshes(request: Request) -> Iterator[Mapping[str, int]]:
    """Every mesh of so many devices, or the one asked for. In a dense model `expert` is `fsdp` by another name."""
    if request.mesh is not None:
        yield {axis: request.mesh.get(axis, 1) for axis in MESH_AXES}
        return

    def rest(axes: tuple[str, ...], devices: int) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: devices}
            return
        for size in divisors(devices):
            if axes[-1] == "expert" and size > 1 and not request.model.num_experts:
                continue
            for others in rest(axes[:-1], devices // size):
                yield {**others, axes[-1]: size}

    yield from rest(MESH_AXES, request.num_devices)


def obstacle(request: Request, mesh: Mapping[str, int]) -> Rejection | None:
    """What keeps a mesh from being one, before memory is asked."""
    model, tensor, context, expert = request.model, mesh["tensor"], mesh["context"], mesh["expert"]
    ranks = mesh["data"] * mesh["fsdp"] * expert

    def cannot(kind: str, reason: str) -> Rejection:
        return Rejection(mesh, kind, reason)

    hidden = math.gcd(model.mlp_dim, model.expert_mlp_dim) if model.num_experts else model.mlp_dim
    for size, what in (model.num_heads, "heads"), (hidden, "of the MLP's width"):
        if size % tensor:
            return cannot("indivisible: tensor", f"tensor={tensor} does not divide {size} {what}")
    innermost = request.cluster.levels[0]
    if tensor > innermost.size and tensor > 1:
        beyond = request.cluster.level_of(1, tensor)
        slow, fast = (level.bandwidth / 1e9 for level in (beyond, innermost))
        return cannot(
            "crosses a slow link",
            f"tensor={tensor} crosses from one {innermost.name} of {innermost.size} to another, at {slow:.0f} GB/s, "
            f"not {fast:.0f}",
        )
    parts = math.lcm(multiple(request.order, context), context * tensor)
    if request.seq_len % parts:
        return cannot("indivisible: sequence", f"{request.seq_len} tokens do not divide into {parts} parts")
    if model.num_experts % expert and expert > 1:
        return cannot("indivisible: expert", f"expert={expert} does not divide {model.num_experts} experts")
    if request.batch_size % (ranks * (request.num_microbatches or 1)):
        times = f" x {request.num_microbatches} microbatches" if request.num_microbatches else ""
        return cannot(
            "indivisible: batch", f"{request.batch_size} sequences do not divide over {ranks} ranks of the batch{times}"
        )
    if not schedules(request, mesh["pipe"]):
        asked = " and what was asked of it" if request.pipeline or request.chunks else ""
        return cannot("too many stages", f"{model.num_layers} layers are too few for pipe={mesh['pipe']}{asked}")
    return None


def schedules(request: Request, num_stages: int) -> tuple[tuple[str, int], ...]:
    """Pairs of a pipeline's kind and its chunks. Several chunks, if they are not asked for, only where layers divide
    over them, or do with embedding and head as two more (Llama 3, arXiv 2407.21783, section 3.3.2): a part that has one
    layer more than others makes them wait, and the more parts, the longer."""
    return _schedules(request.model.num_layers, num_stages, request.pipeline, request.chunks)


@functools.cache
def _schedules(num_layers: int, num_stages: int, kind: str | None, chunks: int | None) -> tuple[tuple[str, int], ...]:
    if num_stages == 1:
        return ((kind or "1f1b", 1),) if chunks in (None, 1) else ()

    def is_even(parts: int) -> bool:
        return num_layers % parts == 0 or (parts > 2 and (num_layers + 2) % parts == 0)

    found = []
    for name in PIPELINES if kind is None else (kind,):
        least, most = KINDS[name].chunks
        for count in range(least, min(most or num_layers, (num_layers + 2) // num_stages) + 1):
            fits = is_even(num_stages * count) or (count in (1, chunks) and num_stages * count <= num_layers)
            if fits and chunks in (None, count):
                found.append((name, count))
    return tuple(found)


def settings(request: Request, mesh: Mapping[str, int]) -> Iterator[Setting]:
    """All of a mesh. Under ZeRO-1 and 2 `data` and `fsdp` are one, so that only `data` is tried, unless the mesh is
    given; ZeRO-2 does not go with `pipe`, where weights are gathered once a step whatever they are cut over."""
    for zero in (request.zero,) if request.zero else (3, 1, 2):
        is_cut = zero == 3 and mesh["fsdp"] * mesh["expert"] * mesh["context"] > 1
        if zero < 3 and mesh["fsdp"] > 1 and request.mesh is None:
            continue
        if zero == 2 and mesh["pipe"] > 1:
            continue
        for reshard in (True, False) if is_cut and mesh["pipe"] == 1 else (False,):
            for context in _strategies(request, mesh):
                yield Setting(mesh, zero, reshard, context)


def together(alike: Sequence[Setting]) -> Setting:
    """Of settings that differ in their mesh alone, but for `pipe`: one whose axes' sizes are arrays [N, 1, 1, 1], for
    numbers of microbatches, schedules and stages to broadcast with."""
    sizes = {axis: np.array([each.mesh[axis] for each in alike])[:, None, None, None] for axis in MESH_AXES}
    return replace(alike[0], mesh={**sizes, "pipe": alike[0].mesh["pipe"]})  # type: ignore[dict-item]  # see Job


def microbatches(request: Request, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Numbers that the batch divides into."""
    if request.num_microbatches is not None:
        return (request.num_microbatches,)
    return divisors(request.batch_size // (mesh["data"] * mesh["fsdp"] * mesh["expert"]))


def _strategies(request: Request, mesh: Mapping[str, int]) -> list[ContextStrategy]:
    ranks, heads = mesh["context"], request.model.num_heads // mesh["tensor"]
    if request.context is not None or ranks == 1:
        return [ContextStrategy.parse(request.context or "auto", request.order, ranks, branches=mesh["pipe"] > 1)]
    # A ring, Ulysses over all ranks, and over as many as lie on the innermost level: what leaves it goes round a ring.
    inside = max(1, request.cluster.levels[0].size // mesh["tensor"])
    groups = {1, math.gcd(ranks, inside), ranks} if mesh["pipe"] == 1 else {ranks}
    exchanged = [ContextStrategy(group=n, order=request.order) for n in sorted(groups) if heads % n == 0]
    return [ContextStrategy(kind="allgather", order=request.order), *exchanged]


def remats(request: Request, num_stages: int) -> tuple[tuple[str, bool], ...]:
    """Kinds of remat, each with whether a pipeline's stage keeps its residuals or runs its forward pass again."""
    if request.remat is not None:
        return ((request.remat, False), (request.remat, True))[: 2 if num_stages > 1 else 1]
    if num_stages == 1:
        return tuple((text, False) for text in REMATS)
    return (*((text, True) for text in REMATS), ("none", False), ("full", False))


def job(
    request: Request,
    setting: Setting,
    num_microbatches: int,
    remat: tuple[str, bool],
    pipeline: str = "1f1b",
    chunks: int = 1,
) -> Job:
    """remat: one of `remats`."""
    return Job(
        request.model,
        request.cluster,
        setting.mesh,
        request.seq_len,
        request.batch_size,
        num_microbatches=num_microbatches,
        precision=request.precision,
        pipeline=pipeline,
        chunks=chunks,
        remat=remat[0],
        pipeline_residuals=remat[1],
        zero=setting.zero,
        reshard_after_forward=setting.reshard_after_forward,
        context=setting.context,
    )


def jobs(
    request: Request,
    setting: Setting,
    counts: Sequence[int],
    remat: tuple[str, bool],
    schedules: Sequence[tuple[str, int]],
) -> Job:
    """With each of these numbers of microbatches [M, 1, 1] and schedules [K, 1] at once; see Job."""
    chunks = np.array([each for _, each in schedules])[:, None]
    return job(request, setting, 1, remat).replace(num_microbatches=np.array(counts)[:, None, None], chunks=chunks)
