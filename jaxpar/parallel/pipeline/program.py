"""A schedule as numbers for a loop over ticks: tick x stage -> operation, microbatch, chunk, token slice, and slots."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxpar.parallel.pipeline.schedule import Action, Op, Schedule, Task
from jaxpar.parallel.pipeline.validate import Lease, assign_slots

Buffer = Literal["inputs", "gradients", "residuals", "deferred"]
Table = Int[np.ndarray, "T P"]


class Branch(StrEnum):
    """What a stage may do in a tick, by the names that the compiled program's conditionals have."""

    FORWARD = "pipe_forward"
    BOTH = "pipe_both"
    INPUT = "pipe_input"
    WEIGHTS = "pipe_weights"
    LOOK_UP = "pipe_look_up"
    HEAD = "pipe_head"
    EMBEDDING = "pipe_embedding"
    UPDATE = "pipe_update"


class Arrival(NamedTuple):
    """What comes from the stage so many places before (around the ring), into a buffer."""

    shift: int
    buffer: Buffer


@dataclass(frozen=True)
class Program:
    """A slot's number past a buffer's last is a place for what nobody reads."""

    ops: frozenset[Op]
    """All that there are, NOP among them."""
    op: Table
    part: Table
    microbatch: Table
    chunk: Table
    piece: Table
    """The token slice."""
    slots: Mapping[Buffer, Table]
    """Of the part's input and of its output's gradient, to read; of what a forward pass keeps and of what a weight
    gradient waits for, to write and later to read."""
    looked_up: Table
    """The slot in which the first part keeps its own input."""
    arrivals: Mapping[Arrival, Table]
    """The slot in which to put, at the end of a tick, what was sent in it."""
    hops: Mapping[int, tuple[tuple[int, int], ...]]
    """The pairs of stages (from, to) that are so many places apart, other than 0, and send."""
    num_slots: Mapping[Buffer, int]
    num_parts: int

    def rows(self) -> dict[str, Any]:
        """What a loop goes by, each with a leading dim of ticks: `own` with a dim of stages, `ends` for all stages: by
        which of a model's ends has work in a tick, whether it has, and of which microbatch."""
        events = self._events
        own = {
            "op": self.op,
            "part": self.part,
            "chunk": self.chunk,
            "microbatch": self.microbatch,
            "slots": dict(self.slots),
            "looked_up": self.looked_up,
            "arrivals": tuple(self.arrivals.values()),
            **events,
        }
        ends = {
            name: {"happens": event.any(axis=1), "microbatch": np.where(event, self.microbatch, 0).max(axis=1)}
            for name, event in events.items()
        }
        return jax.tree.map(jnp.asarray, {"own": own, "ends": ends})

    @property
    def _events(self) -> dict[str, Table]:
        """Which stage is at one of the model's ends."""
        is_first, is_last, is_forward = self.part == 0, self.part == self.num_parts - 1, self.op == Op.F
        return {
            "looks_up": is_forward & is_first,
            "is_scored": is_forward & is_last,
            "ends_backward": ((self.op == Op.B) | (self.op == Op.BW)) & is_first,
        }

    @property
    def taken(self) -> dict[str, Fraction]:
        """The share of ticks in which a branch is taken, by its name: by the first stage, as by any (one may do B and W
        where another does BW, which sends as much), and at the model's ends by the stage that has them."""
        ops = {Branch.FORWARD: Op.F, Branch.BOTH: Op.BW, Branch.INPUT: Op.B, Branch.WEIGHTS: Op.W}
        events = {Branch.LOOK_UP: "looks_up", Branch.HEAD: "is_scored", Branch.EMBEDDING: "ends_backward"}
        times = {branch: self.op[:, 0] == op for branch, op in ops.items()}
        times |= {branch: self._events[event] for branch, event in events.items()}
        return {str(branch): Fraction(int(each.sum()), len(self.op)) for branch, each in times.items()}

    @classmethod
    def of(cls, schedule: Schedule) -> "Program":
        """Of a valid schedule."""
        slots = assign_slots(schedule)
        num_slots: dict[Buffer, int] = {
            buffer: max(slots.count(getattr(slots, buffer), schedule.num_stages)) for buffer in get_args(Buffer)
        }
        shape = schedule.num_ticks, schedule.num_stages

        def unused(buffer: Buffer) -> Table:
            return np.full(shape, num_slots[buffer], np.int32)

        op, parts, microbatch, chunk, piece = (np.zeros(shape, np.int32) for _ in range(5))
        used: dict[Buffer, Table] = {buffer: unused(buffer) for buffer in get_args(Buffer)}
        looked_up = unused("inputs")
        arrivals: dict[Arrival, Table] = {}
        hops: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)

        for tick, stage, action in schedule.actions():
            at, part = (tick, stage), schedule.part(stage, action.chunk)
            op[at], parts[at], microbatch[at], chunk[at] = action.op, part, action.microbatch, action.chunk
            piece[at] = action.slice
            forward, backward, weights = (
                Task(each, part, action.microbatch, action.slice) for each in (Op.F, Op.B, Op.W)
            )
            (looked_up if action.op is Op.F and part == 0 else used["inputs"])[at] = slots.inputs[forward].slot
            used["residuals"][at] = slots.residuals[forward].slot
            if action.op is not Op.F:
                used["gradients"][at] = slots.gradients[backward].slot
            if weights in slots.deferred:
                used["deferred"][at] = slots.deferred[weights].slot
            if sent := _sent(action, part, schedule.num_parts):
                buffer, task = sent
                leases: dict[Task, Lease] = getattr(slots, buffer)
                to = leases[task]
                shift = (to.stage - stage) % schedule.num_stages
                arrivals.setdefault(Arrival(shift, buffer), unused(buffer))[tick, to.stage] = to.slot
                if shift:
                    hops[shift].add((stage, to.stage))
        return cls(
            frozenset({Op.NOP, *(action.op for _, _, action in schedule.actions())}),
            op,
            parts,
            microbatch,
            chunk,
            piece,
            used,
            looked_up,
            arrivals,
            {shift: tuple(sorted(pairs)) for shift, pairs in sorted(hops.items())},
            num_slots,
            schedule.num_parts,
        )


def _sent(action: Action, part: int, num_parts: int) -> tuple[Buffer, Task] | None:
    """Who waits for what an action makes: the last part's forward pass makes the gradient of its own output."""
    if action.op is Op.F:
        if part < num_parts - 1:
            return "inputs", Task(Op.F, part + 1, action.microbatch, action.slice)
        return "gradients", Task(Op.B, part, action.microbatch, action.slice)
    if action.op is Op.W or part == 0:
        return None
    return "gradients", Task(Op.B, part - 1, action.microbatch, action.slice)
