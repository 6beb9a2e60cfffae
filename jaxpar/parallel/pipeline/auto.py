"""A search for the table with the smallest bubble under a memory limit.

The heuristic of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 3.1), over its grid of choices; with
1F1B's memory the paper calls the result ZB-1p, with twice that ZB-2p.
"""

import itertools
import math
from dataclasses import replace

from jaxpar.parallel.pipeline.kinds import gpipe, one_f_one_b, zero_bubble
from jaxpar.parallel.pipeline.schedule import Action, Op, Schedule, from_orders
from jaxpar.parallel.pipeline.simulate import Times, check_deferred_size, simulate

_SLACK = 1e-9
"""Of sums of rounded times."""


def auto(
    num_stages: int,
    num_microbatches: int,
    times: Times | None = None,
    memory_limit: float = math.inf,
    deferred_size: float = 0.5,
) -> Schedule:
    """The table, of one chunk per stage, with the shortest longest stage (simulate.Report.cost) that was found.

    memory_limit: per stage, in activations of one microbatch in one stage, of which a deferred weight gradient holds
    deferred_size. ValueError when not even one microbatch fits.
    """
    if min(num_stages, num_microbatches) < 1:
        raise ValueError(f"{num_stages} stages with {num_microbatches} microbatches are no pipeline; take at least 1")
    times = (times or Times()).check(num_stages)
    check_deferred_size(deferred_size)
    if not memory_limit >= 1:
        raise ValueError(f"memory limit {memory_limit:g} is below one microbatch's activations; take at least 1")
    searches = [
        _Search(num_stages, num_microbatches, times, memory_limit, deferred_size, *choice)
        for choice in itertools.product((False, True), repeat=3)
    ]
    found = min(searches, key=lambda search: search.run()).orders
    known = [zero_bubble(num_stages, num_microbatches, eager) for eager in (False, True)]
    known += [one_f_one_b(num_stages, num_microbatches), gpipe(num_stages, num_microbatches)]
    best, best_cost = None, math.inf
    for table in [*known, from_orders("auto", found, num_microbatches)]:
        report = simulate(table, times, deferred_size)
        if max(report.peak_memory) <= memory_limit + _SLACK and report.cost < best_cost - _SLACK:
            best, best_cost = table, report.cost
    assert best is not None
    return replace(best, kind="auto")


class _Search:
    """One walk of the heuristic, for one point of the grid.

    delay_b: warm up with one more forward pass even where it delays the first backward pass.
    skip_f: a stage that is two or more forward passes ahead of the next may leave one out.
    patient: an idle gap shorter than W stays where it does not make the longest bubble of all stages longer.
    """

    def __init__(
        self,
        num_stages: int,
        num_microbatches: int,
        times: Times,
        limit: float,
        deferred_size: float,
        delay_b: bool,
        skip_f: bool,
        patient: bool,
    ) -> None:
        self.num_stages, self.num_microbatches = num_stages, num_microbatches
        self.limit, self.deferred_size, self.hop = limit + _SLACK, deferred_size, times.hop
        self.delay_b, self.skip_f, self.patient = delay_b, skip_f, patient
        stages = range(num_stages)
        one = Schedule("auto", num_stages, num_microbatches, 1, 1, "loop", ())
        self.time = {(op, s): times.of(one, s, Action(op, 0)) for op in (Op.F, Op.B, Op.W) for s in stages}
        self.orders: list[list[Action]] = [[] for _ in stages]
        self.ends: dict[Op, list[list[float]]] = {op: [[] for _ in stages] for op in (Op.F, Op.B, Op.W)}
        self.clock, self.bubble, self.memory = [[0.0] * num_stages for _ in range(3)]

    def run(self) -> float:
        """Fills `orders`; returns the longest time of a stage."""
        stages, backwards = range(self.num_stages), range(self.num_stages - 1, -1, -1)
        for stage, count in enumerate(self._warm_up()):
            for _ in range(count):
                self._do(Op.F, stage)
        for stage in backwards:
            self._do(Op.B, stage)
        for _ in range(1, self.num_microbatches):
            for stage in self._stages_with_f():
                self._make_room(stage)
                self._fill(stage, self._arrival(Op.F, stage))
                self._do(Op.F, stage)
            for stage in backwards:
                self._fill(stage, self._arrival(Op.B, stage))
                # The first stage keeps nobody waiting: it may do what it has before its last backward passes.
                while stage == 0 and self._count(Op.F, 0) == self.num_microbatches and self._waiting(0):
                    self._do(Op.W, 0)
                self._do(Op.B, stage)
        for stage in stages:
            while self._waiting(stage):
                self._do(Op.W, stage)
        return max(self.clock[stage] - self.ends[Op.F][stage][0] + self.time[Op.F, stage] for stage in stages)

    def _warm_up(self) -> list[int]:
        """How many forward passes each stage does before its first backward pass: as many as fit into the wait for it
        and into memory, one more than the next stage while there are any."""
        counts = [1] * self.num_stages
        arrival = 0.0
        start = [sum(self.time[Op.F, s] + self.hop for s in range(stage)) for stage in range(self.num_stages)]
        for stage in reversed(range(self.num_stages)):
            end, forward = start[stage] + self.time[Op.F, stage], self.time[Op.F, stage]
            shortest_gap = _SLACK if self.delay_b else forward - _SLACK
            while (
                counts[stage] < self.num_microbatches
                and counts[stage] + 1 <= self.limit
                and arrival - end >= shortest_gap
            ):
                end += forward
                counts[stage] += 1
            arrival = max(end, arrival) + self.time[Op.B, stage] + self.hop
        for stage in range(1, self.num_stages):
            ahead = counts[stage - 1]
            counts[stage] = min(counts[stage], ahead if ahead == self.num_microbatches else max(1, ahead - 1))
        return counts

    def _stages_with_f(self) -> range:
        """The stages that do a forward pass in this round: the last ones, none of which the next one leaves waiting."""
        first = self.num_stages
        while first > 0 and self._count(Op.F, first - 1) < self.num_microbatches and self._wants_f(first - 1):
            first -= 1
        return range(first, self.num_stages)

    def _wants_f(self, stage: int) -> bool:
        if not self.skip_f or stage == self.num_stages - 1:
            return True
        if self._count(Op.F, stage) < self._count(Op.F, stage + 1) + 2:
            return True
        # What comes back from the next stage after its own forward and backward pass.
        back = self.clock[stage + 1] + self.time[Op.F, stage + 1] + self.time[Op.B, stage + 1] + self.hop
        if self.clock[stage] >= back:
            return False
        weights = 0
        while self.memory[stage] + 1 - weights * self.deferred_size > self.limit and weights < self._waiting(stage):
            weights += 1
        if self.clock[stage] + self.time[Op.F, stage] + weights * self.time[Op.W, stage] <= back:
            return True
        return back - self.clock[stage] > max(self.bubble) - self.bubble[stage]

    def _make_room(self, stage: int) -> None:
        while self.memory[stage] + 1 > self.limit:
            assert self._waiting(stage)
            self._do(Op.W, stage)

    def _fill(self, stage: int, arrival: float) -> None:
        """Weight gradients into the gap until the arrival; the last one may reach over it."""
        while self._waiting(stage) and self.clock[stage] + self.time[Op.W, stage] <= arrival:
            self._do(Op.W, stage)
        gap = arrival - self.clock[stage]
        if self._waiting(stage) and gap > 0:
            hidden = gap <= max(self.bubble) - self.bubble[stage]
            if not (self.patient and hidden):
                self._do(Op.W, stage)

    def _do(self, op: Op, stage: int) -> None:
        self.orders[stage].append(Action(op, self._count(op, stage)))
        start = max(self.clock[stage], self._arrival(op, stage))
        if self._count(Op.F, stage):
            self.bubble[stage] += start - self.clock[stage]
        self.clock[stage] = start + self.time[op, stage]
        self.ends[op][stage].append(self.clock[stage])
        self.memory[stage] += {Op.F: 1, Op.B: self.deferred_size - 1, Op.W: -self.deferred_size}[op]

    def _arrival(self, op: Op, stage: int) -> float:
        """When the neighbour's output for the next pass is here."""
        neighbour = {Op.F: stage - 1, Op.B: stage + 1}.get(op, -1)
        if not 0 <= neighbour < self.num_stages:
            return 0.0
        return self.ends[op][neighbour][self._count(op, stage)] + self.hop

    def _count(self, op: Op, stage: int) -> int:
        return len(self.ends[op][stage])

    def _waiting(self, stage: int) -> int:
        return self._count(Op.B, stage) - self._count(Op.W, stage)
