"""A schedule as numbers for a loop over ticks: tick x stage -> operation, microbatch, chunk, token slice, and slots."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxpar.parallel.pipeline.schedule import Action, Op, Schedule, Task
from jaxpar.parallel.pipeline.validate import Lease, Slots, assign_slots

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


Pass = Literal["forward", "backward"]


class Hop(NamedTuple):
    """The way of what a pass makes to the stage so many places on (around the ring); 0: it stays. The last part's
    forward pass makes the gradient of its own output."""

    made_by: Pass
    shift: int


class Arrival(NamedTuple):
    hop: Hop
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
    """The slot in which to put, in a tick, what arrives in it."""
    hops: Mapping[Hop, tuple[tuple[int, int], ...]]
    """The pairs of stages (from, to) that send."""
    patient: frozenset[Pass]
    """Those whose results nobody needs in the next tick already, but what a forward pass leaves at home."""
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
    def permutes(self) -> int:
        """Of one activation, in all ticks."""
        return len(self.op) * sum(hop.shift > 0 for hop in self.hops)

    def is_late(self, hop: Hop) -> bool:
        """Whether what a tick makes is under way in the next tick, from its beginning on, and not in its own."""
        return _is_late(hop, self.patient)

    def is_urgent(self, hop: Hop) -> bool:
        """Whether it arrives before a tick's backward pass, and not at the tick's end."""
        return hop.made_by == "backward" and hop.made_by not in self.patient

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
        messages = list(_messages(schedule, slots))
        impatient = {
            each.hop.made_by
            for each in messages
            if each.used == each.made + 1 and (each.hop.shift or each.hop.made_by == "backward")
        }
        patient = frozenset(get_args(Pass)) - impatient
        arrivals: dict[Arrival, Table] = {}
        hops: defaultdict[Hop, set[tuple[int, int]]] = defaultdict(set)
        for each in messages:
            slots_of = arrivals.setdefault(Arrival(each.hop, each.buffer), unused(each.buffer))
            slots_of[each.made + _is_late(each.hop, patient), each.to.stage] = each.to.slot
            hops[each.hop].add((each.source, each.to.stage))
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
            {hop: tuple(sorted(pairs)) for hop, pairs in sorted(hops.items())},
            patient,
            num_slots,
            schedule.num_parts,
        )


class _Message(NamedTuple):
    hop: Hop
    buffer: Buffer
    made: int
    """In which tick."""
    used: int
    """In which tick first."""
    source: int
    """The stage that sends."""
    to: Lease


def _is_late(hop: Hop, patient: frozenset[Pass]) -> bool:
    return hop.made_by == "backward" or (hop.shift > 0 and hop.made_by in patient)


def _messages(schedule: Schedule, slots: Slots) -> Iterator[_Message]:
    for tick, stage, action in schedule.actions():
        part = schedule.part(stage, action.chunk)
        if waiting := _waiting(action, part, schedule.num_parts):
            buffer, task = waiting
            leases: dict[Task, Lease] = getattr(slots, buffer)
            to = leases[task]
            hop = Hop("forward" if action.op is Op.F else "backward", (to.stage - stage) % schedule.num_stages)
            yield _Message(hop, buffer, tick, schedule.tick_of[task], stage, to)


def _waiting(action: Action, part: int, num_parts: int) -> tuple[Buffer, Task] | None:
    """Who waits for what an action makes: the last part's forward pass makes the gradient of its own output."""
    if action.op is Op.F:
        if part < num_parts - 1:
            return "inputs", Task(Op.F, part + 1, action.microbatch, action.slice)
        return "gradients", Task(Op.B, part, action.microbatch, action.slice)
    if action.op is Op.W or part == 0:
        return None
    return "gradients", Task(Op.B, part - 1, action.microbatch, action.slice)
