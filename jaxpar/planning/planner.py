"""The search for a layout: exact, without predicting them all.

A job's step takes at least its kernels, what its activations and tokens to experts take to travel, and its schedule's
bubble. That and its memory are quickly told of all: settings that differ in their mesh alone are taken together, with
all numbers of microbatches and all schedules, as arrays. Each setting with one kind of remat then waits in a heap by
the least time of what fits of it. If it is first its steps are predicted, and it waits by the least of those; if it is
first again, that is the fastest that is left. So layouts are found in order of their best time, and with them the front
of time and memory: a job is on it if it takes less memory than all that came before. What is neither of a layout that
is still wanted, nor may take less memory than was found, is dropped.
"""

import functools
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxpar.planning import space
from jaxpar.planning.calibration import Calibration, calibration_table
from jaxpar.planning.conventions import Convention, convention
from jaxpar.planning.job import Job
from jaxpar.planning.memory import PARTS, Cases, Footprint, Memory, memory, memory_limit
from jaxpar.planning.schedules import bubble
from jaxpar.planning.space import Rejection, Request, Setting
from jaxpar.planning.step_time import StepTime, least_steps, predict, steps

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


def plan(request: Request, top: int = 10, framework: str = "jaxpar") -> Plan:
    """The `top` fastest layouts that fit, and the front. Raises ValueError for what `Request.check` and predict do."""
    request.check()
    calibration = calibration_table().of(request.cluster.chip, framework)
    return _Search(request, convention(framework), calibration).run(top)


@dataclass(frozen=True, eq=False)
class _Table:
    """A setting with a kind of remat, by numbers of microbatches and schedules."""

    setting: Setting
    remat: tuple[str, bool]
    """See space.remats."""
    counts: tuple[int, ...]
    """Of microbatches."""
    bytes: Float[np.ndarray, "M K"]
    seconds: Float[np.ndarray, "M K"]
    """Of a step, infinite where it does not fit."""
    least_bytes: float
    is_exact: bool = False
    """Or seconds are the least that a step may take."""

    def best(self, limit: float) -> "_Entry":
        """Of what takes less than so many bytes the fastest, of several as fast the smallest."""
        seconds = np.where(self.bytes < limit, self.seconds, math.inf)
        least = seconds.min()
        size = np.where(seconds == least, self.bytes, math.inf)
        row, column = divmod(int(size.argmin()), size.shape[1])
        return _Entry(float(least), float(size[row, column]), row, column)


class _Entry(NamedTuple):
    seconds: float
    bytes: float
    row: int
    column: int


@dataclass(frozen=True, eq=False)
class _Family:
    """Settings that differ in their mesh alone, by numbers of microbatches and schedules."""

    request: Request
    numbers: tuple[int, ...]
    """Of the settings' meshes, among all."""
    settings: tuple[Setting, ...]
    counts: tuple[int, ...]
    """Of microbatches: all that any of the meshes may have."""
    schedules: tuple[tuple[str, int], ...]

    @staticmethod
    def of(request: Request, members: Sequence[tuple[int, Setting]]) -> "_Family":
        """members: settings of the same `family`, each with the number of its mesh."""
        numbers, settings = zip(*members)
        counts = sorted({count for each in settings for count in space.microbatches(request, each.mesh)})
        return _Family(request, numbers, settings, tuple(counts), space.schedules(request, settings[0].mesh["pipe"]))

    @property
    def stages(self) -> int:
        return self.settings[0].mesh["pipe"]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.settings), len(self.counts), len(self.schedules)

    @functools.cached_property
    def divides(self) -> Bool[np.ndarray, "N M 1 1"]:
        """Whether the batch divides into so many microbatches."""
        job = self.jobs(("none", False))
        return np.equal(job.batch_size % (job.batch_ranks * job.num_microbatches), 0)

    def jobs(self, remat: tuple[str, bool]) -> Job:
        """All."""
        return space.jobs(self.request, space.together(self.settings), self.counts, remat, self.schedules)

    def job(self, n: int, place: int, remat: tuple[str, bool]) -> Job:
        """Of one setting the one at this place among microbatches and schedules."""
        row, column = divmod(place, len(self.schedules))
        return space.job(self.request, self.settings[n], self.counts[row], remat, *self.schedules[column])


class _Search:
    def __init__(self, request: Request, convention: Convention, calibration: Calibration):
        self._request, self._convention, self._calibration = request, convention, calibration
        self._limit = memory_limit(request.cluster.chip, convention)
        self._heap: list[tuple[float, bool, float, int, _Table]] = []
        """By least seconds. Of what is as fast, first comes what is not known exactly, as it may turn out smaller, then
        what is smaller; and so as not to compare tables, a number."""
        self._ticket = itertools.count()
        self._nearest: dict[int, tuple[float, Job | None]] = {}
        """Of each mesh by its number, what takes the fewest bytes: how many, and, if they are too many, which job."""

    def run(self, top: int) -> Plan:
        meshes = list(space.meshes(self._request))
        rejections: dict[int, Rejection] = {}
        families: dict[Hashable, list[tuple[int, Setting]]] = defaultdict(list)
        for number, mesh in enumerate(meshes):
            if (obstacle := space.obstacle(self._request, mesh)) is not None:
                rejections[number] = obstacle
                continue
            for setting in space.settings(self._request, mesh):
                families[setting.family].append((number, setting))
        for members in families.values():
            self._admit(_Family.of(self._request, members))
        too_large = {number: job for number, (_, job) in self._nearest.items() if job is not None}
        for number, job in too_large.items():
            rejections[number] = _too_large(meshes[number], memory(job, self._convention))
        reasons = tuple(rejections[number] for number in sorted(rejections))
        if self._request.mesh is not None and too_large:
            return Plan((self._choice(too_large[0]),), (), reasons, len(meshes))
        return Plan(*self._take(top), reasons, len(meshes))

    def _admit(self, family: "_Family") -> None:
        """Puts all of a family that fits into the heap."""
        stages, counts, schedules = family.stages, family.counts, family.schedules
        cases = Cases.of(self._request.model.num_layers, stages, counts, schedules, self._convention.is_one_program)
        footprint = Footprint(family.jobs(("none", False)), self._convention, cases)
        idle = _bubbles(stages, counts, schedules)[..., None]
        for remat in space.remats(self._request, stages):
            total = np.max(footprint.with_remat(*remat).total, axis=-1, keepdims=True)
            size = np.where(family.divides, np.broadcast_to(total, (*family.shape, 1)), math.inf)[..., 0]
            self._keep_nearest(family, remat, size)
            smallest = size.min(axis=(1, 2))
            if smallest.min() > self._limit:
                continue
            least = least_steps(family.jobs(remat), self._calibration, idle)
            seconds = np.where(size <= self._limit, np.broadcast_to(least, (*family.shape, 1))[..., 0], math.inf)
            bounds = seconds.min(axis=(1, 2))
            for n in np.flatnonzero(bounds < math.inf).tolist():
                table = _Table(family.settings[n], remat, counts, size[n], seconds[n], float(smallest[n]))
                heapq.heappush(self._heap, (float(bounds[n]), False, 0.0, next(self._ticket), table))

    def _keep_nearest(self, family: "_Family", remat: tuple[str, bool], size: Float[np.ndarray, "N M K"]) -> None:
        flat = size.reshape(len(family.settings), -1)
        places, least = flat.argmin(axis=1).tolist(), flat.min(axis=1).tolist()
        for n, number in enumerate(family.numbers):
            if least[n] < self._nearest.get(number, (math.inf, None))[0]:
                self._nearest[number] = least[n], None if least[n] <= self._limit else family.job(n, places[n], remat)

    def _take(self, top: int) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
        """Out of the heap: the best of each layout, and the front."""
        ranked: dict[tuple[int, ...], Choice] = {}
        front: list[Choice] = []
        limit = math.inf  # of the bytes of what the front still lacks
        while self._heap:
            bound, _, _, _, table = heapq.heappop(self._heap)
            key = tuple(size for axis, size in table.setting.mesh.items() if axis not in ("data", "fsdp"))
            is_wanted = len(ranked) < top and key not in ranked
            if not is_wanted and table.least_bytes >= limit:
                continue
            found = table.best(math.inf if is_wanted else limit)
            if found.seconds == bound and table.is_exact:
                choice = self._choice(self._job(table, found))
                if is_wanted:
                    ranked[key] = choice
                if found.bytes < limit:
                    front.append(choice)
                    limit = found.bytes
                found = table.best(limit)
            elif found.seconds == bound:
                table = self._predicted(table)
                found = table.best(math.inf if is_wanted else limit)
            if found.seconds < math.inf:
                place = found.seconds, table.is_exact, found.bytes, next(self._ticket)
                heapq.heappush(self._heap, (*place, table))
        return tuple(ranked.values()), tuple(front)

    def _predicted(self, table: _Table) -> _Table:
        stages = table.setting.mesh["pipe"]
        schedules = space.schedules(self._request, stages)
        job = space.jobs(self._request, table.setting, table.counts, table.remat, schedules)
        seconds = steps(job, self._calibration, _bubbles(stages, table.counts, schedules)[..., None])
        of_all = np.broadcast_to(seconds, (*table.bytes.shape, 1))[..., 0]
        return replace(table, seconds=np.where(table.seconds < math.inf, of_all, math.inf), is_exact=True)

    def _job(self, table: _Table, entry: _Entry) -> Job:
        schedule = space.schedules(self._request, table.setting.mesh["pipe"])[entry.column]
        return space.job(self._request, table.setting, table.counts[entry.row], table.remat, *schedule)

    def _choice(self, job: Job) -> Choice:
        return Choice(job, memory(job, self._convention), predict(job, self._calibration))


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
