"""The search for a layout: exact, without trying them all.

A job's step takes at least its kernels and its schedule's bubble, which are quickly told, as is its memory. What a mesh
leaves open waits in a heap by the least time of all that fits: first one setting with one kind of remat, which is opened
into numbers of microbatches and chunks, these into schedules, whose time is predicted. What comes out of the heap with
a predicted time is the fastest that is left. So meshes are found in order of their best time, and with them the front
of time and memory: a job is on it if it takes less memory than all that came before. What is neither of a mesh that is
still wanted, nor may take less memory than was found, is not opened.
"""

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxpar.parallel.context import ContextStrategy
from jaxpar.planning import space
from jaxpar.planning.calibration import Calibration, calibration_table
from jaxpar.planning.conventions import CONVENTIONS, Convention
from jaxpar.planning.job import Job
from jaxpar.planning.memory import PARTS, Cases, Footprint, Memory, memory, memory_limit
from jaxpar.planning.schedules import bubble
from jaxpar.planning.space import Rejection, Request, Setting
from jaxpar.planning.step_time import StepTime, kernel_seconds, predict

GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """A job with what it costs."""

    job: Job
    memory: Memory
    time: StepTime

    @property
    def bytes(self) -> float:
        return self.memory.fullest.total


@dataclass(frozen=True)
class Plan:
    """What was found, fastest first."""

    ranked: tuple[Choice, ...]
    """The best of each mesh; of a mesh that was asked for and does not fit, what comes nearest."""
    front: tuple[Choice, ...]
    """Of all, each faster than those that take less memory."""
    rejections: tuple[Rejection, ...]
    num_meshes: int

    def counts(self) -> Counter[str]:
        """Meshes that fell out, by kind of reason."""
        return Counter(rejection.kind for rejection in self.rejections)


@dataclass(frozen=True)
class _Node:
    """In the heap: a setting with its remat; of these, microbatches and chunks; or a whole job, whose time is known."""

    setting: Setting
    remat: str
    least_bytes: float
    microbatches: int = 0
    chunks: int = 0
    pipeline: str = ""


def plan(request: Request, top: int = 10, framework: str = "jaxpar") -> Plan:
    """The `top` fastest meshes that fit, and the front. Raises ValueError for what `Request.check` and predict do."""
    request.check()
    return _Search(request, CONVENTIONS[framework], calibration_table().of(request.cluster.chip, framework)).run(top)


class _Search:
    def __init__(self, request: Request, convention: Convention, calibration: Calibration):
        self._request, self._convention, self._calibration = request, convention, calibration
        self._limit = memory_limit(request.cluster.chip, convention)
        self._ticket = itertools.count()
        self._heap: list[tuple[float, int, _Node]] = []
        self._kernels: dict[tuple[float, int, int, str], tuple[float, float]] = {}

    def run(self, top: int) -> Plan:
        rejections, count, nearest = [], 0, None
        for mesh in space.meshes(self._request):
            count += 1
            if (rejection := space.obstacle(self._request, mesh)) is None and (
                nearest := self._admit(mesh)
            ) is not None:
                rejection = Rejection(mesh, "does not fit", _too_large(nearest.memory))
            if rejection is not None:
                rejections.append(rejection)
        ranked: dict[tuple[int, ...], Choice] = {}
        front: list[Choice] = []
        least = math.inf
        while self._heap:
            _, _, node = heapq.heappop(self._heap)
            mesh_key = tuple(node.setting.mesh.values())
            is_wanted = len(ranked) < top and mesh_key not in ranked
            if not is_wanted and node.least_bytes >= least:
                continue
            if not node.microbatches:
                self._open(node)
            elif not node.pipeline:
                self._predict(node)
            else:
                choice = self._choice(self._job(node, node.pipeline))
                if is_wanted:
                    ranked[mesh_key] = choice
                if node.least_bytes < least:
                    front.append(choice)
                    least = node.least_bytes
        if self._request.mesh is not None and nearest is not None:
            return Plan((nearest,), (), tuple(rejections), count)
        return Plan(tuple(ranked.values()), tuple(front), tuple(rejections), count)

    def _admit(self, mesh: Mapping[str, int]) -> Choice | None:
        """Puts what fits of a mesh into the heap; where nothing does, returns what comes nearest."""
        counts, schedules = space.microbatches(self._request, mesh), space.schedules(self._request, mesh["pipe"])
        fits, smallest = False, (math.inf, _Node(Setting(mesh, 0, False, ContextStrategy()), "", 0.0))
        for setting in space.settings(self._request, mesh):
            footprint = self._footprint(setting)
            for remat in space.remats(self._request) if footprint.least.min() <= self._limit else ("full",):
                total = _fullest(footprint, remat)
                if total.min() <= self._limit:
                    fits = True
                    bounds = np.where(total <= self._limit, self._bounds(setting, remat), math.inf)
                    self._push(float(bounds.min()), _Node(setting, remat, float(total.min())))
                elif not fits and total.min() < smallest[0]:
                    m, k = np.unravel_index(total.argmin(), total.shape)
                    kind, chunks = schedules[k]
                    smallest = float(total.min()), _Node(setting, remat, float(total.min()), counts[m], chunks, kind)
        return None if fits else self._choice(self._job(smallest[1], smallest[1].pipeline))

    def _open(self, node: _Node) -> None:
        """Into microbatches and chunks."""
        mesh = node.setting.mesh
        total = _fullest(self._footprint(node.setting), node.remat)
        bounds = self._bounds(node.setting, node.remat)
        chunks = np.array([chunks for _, chunks in space.schedules(self._request, mesh["pipe"])])
        for row, count in enumerate(space.microbatches(self._request, mesh)):
            for each in set(chunks.tolist()):
                is_in = (total[row] <= self._limit) & (chunks == each)
                if is_in.any():
                    bound, least = float(bounds[row][is_in].min()), float(total[row][is_in].min())
                    self._push(bound, _Node(node.setting, node.remat, least, count, each))

    def _predict(self, node: _Node) -> None:
        """Into schedules: of one number of chunks they differ in their bubble alone."""
        mesh, stages = node.setting.mesh, node.setting.mesh["pipe"]
        total = _fullest(self._footprint(node.setting), node.remat)
        row = space.microbatches(self._request, mesh).index(node.microbatches)
        schedules = space.schedules(self._request, stages)
        for k, (kind, chunks) in enumerate(schedules):
            if chunks == node.chunks and total[row, k] <= self._limit:
                time = predict(self._job(node, kind), self._calibration).step
                leaf = _Node(node.setting, node.remat, float(total[row, k]), node.microbatches, chunks, kind)
                self._push(time, leaf)

    def _bounds(self, setting: Setting, remat: str) -> Float[np.ndarray, "M K"]:
        """Least seconds of a step, by microbatches and schedules."""
        mesh = setting.mesh
        stages = mesh["pipe"]
        counts = space.microbatches(self._request, mesh)
        slowest, mean = np.array([self._kernel_seconds(setting, count, remat) for count in counts]).T
        idle = _bubbles(stages, counts, space.schedules(self._request, stages))
        return (np.array(counts) * slowest)[:, None] + idle * mean[:, None]

    def _kernel_seconds(self, setting: Setting, count: int, remat: str) -> tuple[float, float]:
        job = self._job(_Node(setting, remat, 0.0, count, 1), "1f1b")
        key = job.microbatch_tokens, setting.mesh["tensor"], setting.mesh["pipe"], remat
        if key not in self._kernels:
            self._kernels[key] = kernel_seconds(job, self._calibration)
        return self._kernels[key]

    def _footprint(self, setting: Setting) -> Footprint:
        mesh = setting.mesh
        cases = Cases.of(
            self._request.model.num_layers,
            mesh["pipe"],
            space.microbatches(self._request, mesh),
            space.schedules(self._request, mesh["pipe"]),
            self._convention.is_one_program,
        )
        return Footprint(space.job(self._request, setting, 1, "none"), self._convention, cases)

    def _job(self, node: _Node, pipeline: str) -> Job:
        return space.job(self._request, node.setting, node.microbatches, node.remat, pipeline, node.chunks)

    def _choice(self, job: Job) -> Choice:
        return Choice(job, memory(job, self._convention), predict(job, self._calibration))

    def _push(self, bound: float, node: _Node) -> None:
        heapq.heappush(self._heap, (bound, next(self._ticket), node))


def _fullest(footprint: Footprint, remat: str) -> Float[np.ndarray, "M K"]:
    return footprint.with_remat(remat).total.max(-1)


@functools.cache
def _bubbles(
    num_stages: int, microbatches: tuple[int, ...], schedules: tuple[tuple[str, int], ...]
) -> Float[np.ndarray, "M K"]:
    return np.array([[bubble(kind, num_stages, m, chunks) for kind, chunks in schedules] for m in microbatches])


def _too_large(found: Memory) -> str:
    fullest = found.fullest
    parts = {part: getattr(fullest, part) for part in PARTS}
    most = max(parts, key=lambda part: parts[part])
    return (
        f"needs {fullest.total / GIB:,.1f} GiB at least, {(fullest.total - found.limit) / GIB:,.1f} too many; "
        f"{parts[most] / GIB:,.1f} are {most}"
    )
