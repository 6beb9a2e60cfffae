"""The search for a layout: exact, without trying them all.

A job's step takes at least its kernels and its schedule's bubble, which are quickly told, as is its memory. What a
mesh leaves open waits in a heap by the least time of all that fits: first one setting with one kind of remat, opened
into numbers of microbatches and chunks, these into schedules, whose time is predicted. What comes out of the heap with
a predicted time is the fastest that is left. So layouts are found in order of their best time, and with them the front
of time and memory: a job is on it if it takes less memory than all that came before. What is neither of a layout that
is still wanted, nor may take less memory than was found, is not opened.
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

from jaxpar.planning import space
from jaxpar.planning.calibration import Calibration, calibration_table
from jaxpar.planning.conventions import Convention, convention
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
        return float(self.memory.fullest.total)


@dataclass(frozen=True)
class Plan:
    """What was found, fastest first."""

    ranked: tuple[Choice, ...]
    """The best of each way to cut the model: of meshes that differ in how `data` and `fsdp` share what is left, which
    is a setting like ZeRO, one. Of a mesh that was asked for and does not fit, what comes nearest."""
    front: tuple[Choice, ...]
    """Of all, each faster than those that take less memory."""
    rejections: tuple[Rejection, ...]
    num_meshes: int

    def counts(self) -> Counter[str]:
        """Meshes that fell out, by kind of reason."""
        return Counter(rejection.kind for rejection in self.rejections)


@dataclass(frozen=True, eq=False)
class _Table:
    """A setting with a kind of remat: bytes, and least seconds, by microbatches and schedules; infinite what does not
    fit."""

    setting: Setting
    remat: tuple[str, bool]
    """See space.remats."""
    bytes: Float[np.ndarray, "M K"]
    seconds: Float[np.ndarray, "M K"]


@dataclass(frozen=True)
class _Node:
    """In the heap: a table; of it, one number of microbatches and of chunks; or one schedule, whose time is known."""

    table: _Table
    least_bytes: float
    row: int = -1
    columns: tuple[int, ...] = ()
    is_known: bool = False


def plan(request: Request, top: int = 10, framework: str = "jaxpar") -> Plan:
    """The `top` fastest layouts that fit, and the front. Raises ValueError for what `Request.check` and predict do."""
    request.check()
    calibration = calibration_table().of(request.cluster.chip, framework)
    return _Search(request, convention(framework), calibration).run(top)


class _Search:
    def __init__(self, request: Request, convention: Convention, calibration: Calibration):
        self._request, self._convention, self._calibration = request, convention, calibration
        self._limit = memory_limit(request.cluster.chip, convention)
        self._ticket = itertools.count()
        self._heap: list[tuple[float, int, _Node]] = []
        self._kernels: dict[tuple[int, int, int, int, tuple[str, bool]], tuple[float, float]] = {}

    def run(self, top: int) -> Plan:
        rejections: list[Rejection] = []
        count = 0
        nearest: Job | None = None
        for mesh in space.meshes(self._request):
            count += 1
            if (rejection := space.obstacle(self._request, mesh)) is None and (
                nearest := self._admit(mesh)
            ) is not None:
                rejection = _too_large(mesh, memory(nearest, self._convention))
            if rejection is not None:
                rejections.append(rejection)
        ranked: dict[tuple[int, ...], Choice] = {}
        front: list[Choice] = []
        least = math.inf
        while self._heap:
            _, _, node = heapq.heappop(self._heap)
            key = tuple(size for axis, size in node.table.setting.mesh.items() if axis not in ("data", "fsdp"))
            is_wanted = len(ranked) < top and key not in ranked
            if not is_wanted and node.least_bytes >= least:
                continue
            if node.row < 0:
                self._open(node.table)
            elif not node.is_known:
                self._predict(node)
            else:
                choice = self._choice(self._job(node.table, node.row, node.columns[0]))
                if is_wanted:
                    ranked[key] = choice
                if node.least_bytes < least:
                    front.append(choice)
                    least = node.least_bytes
        if self._request.mesh is not None and nearest is not None:
            return Plan((self._choice(nearest),), (), tuple(rejections), count)
        return Plan(tuple(ranked.values()), tuple(front), tuple(rejections), count)

    def _admit(self, mesh: Mapping[str, int]) -> Job | None:
        """Puts what fits of a mesh into the heap; where nothing does, returns what comes nearest."""
        fits, smallest = False, math.inf
        nearest: tuple[_Table, int, int] | None = None
        for setting in space.settings(self._request, mesh):
            footprint = self._footprint(setting)
            for remat in space.remats(self._request, mesh["pipe"]):
                total = np.max(footprint.with_remat(*remat).total, axis=-1)
                least = float(total.min())
                if least <= self._limit:
                    fits = True
                    seconds = np.where(total <= self._limit, self._seconds(setting, remat), math.inf)
                    table = _Table(setting, remat, total, seconds)
                    self._push(float(seconds.min()), _Node(table, least))
                elif not fits and least < smallest:
                    row, column = np.unravel_index(total.argmin(), total.shape)
                    smallest, nearest = least, (_Table(setting, remat, total, total), int(row), int(column))
                if np.min(footprint.least) > self._limit:
                    break
        assert fits or nearest is not None
        return None if fits or nearest is None else self._job(*nearest)

    def _open(self, table: _Table) -> None:
        """Into microbatches and chunks: schedules of as many differ in their bubble alone."""
        by_chunks = _columns(space.schedules(self._request, table.setting.mesh["pipe"]))
        for row, seconds in enumerate(table.seconds):
            for columns in by_chunks:
                fitting = tuple(k for k in columns if seconds[k] < math.inf)
                if fitting:
                    least = min(float(table.bytes[row, k]) for k in fitting)
                    self._push(min(float(seconds[k]) for k in fitting), _Node(table, least, row, fitting))

    def _predict(self, node: _Node) -> None:
        """Into schedules."""
        table, row = node.table, node.row
        stages = table.setting.mesh["pipe"]
        schedules = space.schedules(self._request, stages)
        count = space.microbatches(self._request, table.setting.mesh)[row]
        found = predict(self._job(table, row, node.columns[0]), self._calibration)
        idle = [bubble(schedules[k][0], stages, count, schedules[k][1]) for k in node.columns]
        late = found.step / (found.step - found.jitter)
        for k, each in zip(node.columns, idle):
            time = found.step + (each / idle[0] - 1) * found.bubble * late if idle[0] else found.step
            self._push(time, _Node(table, float(table.bytes[row, k]), row, (k,), is_known=True))

    def _seconds(self, setting: Setting, remat: tuple[str, bool]) -> Float[np.ndarray, "M K"]:
        """Least of a step, by microbatches and schedules: kernels, and the schedule's bubble."""
        stages, counts = setting.mesh["pipe"], space.microbatches(self._request, setting.mesh)
        slowest, mean = np.array([self._kernel_seconds(setting, count, remat) for count in counts]).T
        idle = _bubbles(stages, counts, space.schedules(self._request, stages))
        return (np.array(counts) * slowest)[:, None] + idle * mean[:, None]

    def _kernel_seconds(self, setting: Setting, count: int, remat: tuple[str, bool]) -> tuple[float, float]:
        mesh = setting.mesh
        ranks = mesh["data"] * mesh["fsdp"] * mesh["expert"] * mesh["context"] * count
        key = ranks, mesh["expert"], mesh["tensor"], mesh["pipe"], remat
        if key not in self._kernels:
            self._kernels[key] = kernel_seconds(space.job(self._request, setting, count, remat), self._calibration)
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
        return Footprint(space.job(self._request, setting, 1, ("none", False)), self._convention, cases)

    def _job(self, table: _Table, row: int, column: int) -> Job:
        mesh = table.setting.mesh
        count = space.microbatches(self._request, mesh)[row]
        schedule = space.schedules(self._request, mesh["pipe"])[column]
        return space.job(self._request, table.setting, count, table.remat, *schedule)

    def _choice(self, job: Job) -> Choice:
        return Choice(job, memory(job, self._convention), predict(job, self._calibration))

    def _push(self, bound: float, node: _Node) -> None:
        heapq.heappush(self._heap, (bound, next(self._ticket), node))


@functools.cache
def _columns(schedules: tuple[tuple[str, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Of schedules, those with as many chunks together."""
    chunks = sorted({chunks for _, chunks in schedules})
    return tuple(tuple(k for k, (_, own) in enumerate(schedules) if own == each) for each in chunks)


@functools.cache
def _bubbles(
    num_stages: int, microbatches: tuple[int, ...], schedules: tuple[tuple[str, int], ...]
) -> Float[np.ndarray, "M K"]:
    return np.array([[bubble(kind, num_stages, m, chunks) for kind, chunks in schedules] for m in microbatches])


def _too_large(mesh: Mapping[str, int], found: Memory) -> Rejection:
    fullest = found.fullest
    parts = {part: getattr(fullest, part) for part in PARTS}
    most, excess = max(parts, key=lambda part: parts[part]), float(fullest.total) - found.limit
    needs, over, most_of = (size / GIB for size in (fullest.total, excess, parts[most]))
    reason = f"needs {needs:,.1f} GiB at least, {over:,.1f} too many; {most_of:,.1f} are {most}"
    return Rejection(mesh, "does not fit", reason, excess)
