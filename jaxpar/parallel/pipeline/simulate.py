"""What a schedule costs: time, bubble and memory, for given times of F, B and W."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.parallel.pipeline.schedule import Action, Op, Schedule, Task

_LONGEST = 1e100
"""So that sums of times are finite."""


@dataclass(frozen=True)
class Times:
    """Of one microbatch in a whole stage, in any unit: one number for all stages or one each. A chunk takes 1/C of it.

    backward is the input gradient's alone (B), weight the weight gradient's (W); a BW action takes both.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    hop: float = 0.0
    """From one stage to another. It overlaps with compute: only a stage that has nothing else to do waits for it."""
    slices: Sequence[float] | None = None
    """Each token slice's share of a microbatch's time; equal ones by default."""

    def check(self, num_stages: int, num_slices: int = 1) -> "Times":
        """Itself. ValueError where a time is negative, or the numbers do not match the schedule's."""
        for name in ("forward", "backward", "weight"):
            times = getattr(self, name)
            if isinstance(times, Sequence) and len(times) != num_stages:
                raise ValueError(f"{len(times)} {name} times for {num_stages} stages; give one, or one per stage")
            if not all(0 <= time <= _LONGEST for time in (times if isinstance(times, Sequence) else [times])):
                raise ValueError(f"{name} time {times} is out of range; take 0 to {_LONGEST:g}")
        if not 0 <= self.hop <= _LONGEST:
            raise ValueError(f"hop time {self.hop} is out of range; take 0 to {_LONGEST:g}")
        if self.slices is not None and len(self.slices) != num_slices:
            raise ValueError(f"{len(self.slices)} shares of time for {num_slices} token slices; give one per slice")
        if not any(self._of(op, stage) for op in (Op.F, Op.BW) for stage in range(num_stages)):
            raise ValueError("every time is 0; give a positive one")
        return self

    def of(self, schedule: Schedule, stage: int, action: Action) -> float:
        """The time of one action."""
        share = self.slices[action.slice] / sum(self.slices) if self.slices else 1 / schedule.num_slices
        return self._of(action.op, stage) * share / schedule.num_chunks

    def _of(self, op: Op, stage: int) -> float:
        if op is Op.BW:
            return self._of(Op.B, stage) + self._of(Op.W, stage)
        times = {Op.F: self.forward, Op.B: self.backward, Op.W: self.weight}[op]
        return times[stage] if isinstance(times, Sequence) else times


@dataclass(frozen=True)
class Span:
    """One action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    """A schedule's time and memory.

    Of the bubble there are three conventions. of_total: the idle share of all stages' time until the last ends (GPipe:
    (P-1)/(M+P-1)). of_ideal: the same idle time over the busy time (Megatron-LM: (P-1)/M). longest_stage: Zero
    Bubble's (arXiv 2401.10241, section 5.3), (cost - busy) / cost, where cost is the longest time of one stage from the
    start of its first action to the end of its last, and busy what the busiest stage works. As its authors' program
    counts, cost leaves hops back to the first stage (loop placement) out for all but every P-th microbatch, so it
    is below the makespan's where chunks are several and hops cost something.
    """

    makespan: float
    """Each stage goes on as soon as its inputs are there, in its order."""
    lockstep_makespan: float
    """The slowest action of each tick, summed: hops overlap, but every stage waits for the tick's end."""
    cost: float
    bubble_of_total: float
    bubble_of_ideal: float
    bubble_longest_stage: float
    utilisation: float
    """The share of all stages' time that is busy: what the pipeline leaves of MFU at most."""
    peak_activations: tuple[float, ...]
    """Per stage, in activations of one microbatch in one stage (a chunk's or a slice's is its share): from the start of
    F to the end of B."""
    peak_deferred: tuple[float, ...]
    """Per stage, in the same unit: weight gradients that wait while another action runs."""
    peak_memory: tuple[float, ...]
    """Per stage, of both together, a deferred weight gradient counted as `deferred_size` activations."""
    timeline: tuple[tuple[Span, ...], ...]
    """Per stage."""


def simulate(schedule: Schedule, times: Times | None = None, deferred_size: float = 0.5) -> Report:
    """Runs a valid table through the clock.

    deferred_size: memory of what a waiting weight gradient needs, in activations of the same microbatch. ValueError
    for times that do not match, and a size that is no share.
    """
    times = (times or Times()).check(schedule.num_stages, schedule.num_slices)
    check_deferred_size(deferred_size)
    timeline = run(schedule, times)
    busy = [sum(span.end - span.start for span in spans) for spans in timeline]
    makespan = max(spans[-1].end for spans in timeline)
    total = schedule.num_stages * makespan
    counted = run(schedule, times, rounds_only=True) if schedule.num_chunks > 1 and times.hop else timeline
    cost = max(spans[-1].end - spans[0].start for spans in counted)
    held = [memory_over(schedule, stage, deferred_size) for stage in range(schedule.num_stages)]
    return Report(
        makespan=makespan,
        lockstep_makespan=lockstep_makespan(schedule, times),
        cost=cost,
        bubble_of_total=1 - sum(busy) / total,
        bubble_of_ideal=(total - sum(busy)) / sum(busy),
        bubble_longest_stage=(cost - max(busy)) / cost,
        utilisation=sum(busy) / total,
        peak_activations=tuple(max(each.activations for each in stage) for stage in held),
        peak_deferred=tuple(max(each.deferred for each in stage) for stage in held),
        peak_memory=tuple(max(each.memory for each in stage) for stage in held),
        timeline=timeline,
    )


def lockstep_makespan(schedule: Schedule, times: Times) -> float:
    """See Report."""
    return sum(
        max((times.of(schedule, stage, action) for stage, action in enumerate(row) if action), default=0.0)
        for row in schedule.table
    )


def run(schedule: Schedule, times: Times, rounds_only: bool = False) -> tuple[tuple[Span, ...], ...]:
    """When each action runs if its stage does it as soon as it can.

    rounds_only: Zero Bubble's count, see Report.
    """
    end_of: dict[Task, float] = {}
    timeline: list[list[Span]] = [[] for _ in range(schedule.num_stages)]
    for _, stage, action in schedule.actions():
        spans = timeline[stage]
        start = spans[-1].end if spans else 0.0
        for task in schedule.needs(stage, action):
            sender, chunk = schedule.locate(task.part)
            wraps = schedule.placement == "loop" and chunk != action.chunk
            if rounds_only and wraps and action.microbatch % schedule.num_stages:
                continue
            start = max(start, end_of[task] + (times.hop if sender != stage else 0.0))
        end = start + times.of(schedule, stage, action)
        spans.append(Span(action, start, end))
        end_of.update((task, end) for task in schedule.tasks(stage, action))
    return tuple(map(tuple, timeline))


def check_deferred_size(size: float) -> None:
    """ValueError unless it is a share of an activation."""
    if not 0 <= size <= 1:
        raise ValueError(f"deferred size {size:g} is not a share of an activation; take 0 to 1")


class Held(NamedTuple):
    """What a stage holds while one of its actions runs, as Report counts it, and as memory after it."""

    activations: float
    deferred: float
    memory: float
    memory_after: float


def memory_over(schedule: Schedule, stage: int, deferred_size: float) -> list[Held]:
    """By the stage's actions in order."""
    unit = 1 / (schedule.num_chunks * schedule.num_slices)
    held, live, waiting = [], 0, 0
    for action in schedule.order(stage):
        live += action.op is Op.F
        waiting -= action.op is Op.W
        now = live, waiting
        live -= action.op in (Op.B, Op.BW)
        waiting += action.op is Op.B
        memory, after = (unit * (a + deferred_size * w) for a, w in (now, (live, waiting)))
        held.append(Held(now[0] * unit, now[1] * unit, memory, after))
    return held
