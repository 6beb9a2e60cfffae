"""A pipeline schedule is data: a table, tick x stage -> action.

The table is lockstep, as one SPMD program runs it: in a tick every stage does one action or none, and what an action
sends is there for the next tick. It holds no times; `simulate` puts them to it, in lockstep or with each stage going on
as soon as its inputs are there, in the order of its column.

The model is cut into P x C parts, C chunks on each of P stages. A part's forward pass of a microbatch needs the part
before it, its backward pass the part after it; a weight gradient (W) may wait for its own backward pass as long as it
likes. With token slices (TeraPipe) a slice's forward pass also needs the slice before it in the same part, for its keys
and values, and its backward pass the slice after it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, NamedTuple

Placement = Literal["loop", "v"]


class Op(IntEnum):
    """What a stage does in a tick; the numbers are the branches of the executor's switch."""

    NOP = 0
    F = 1
    B = 2
    """The gradient of the inputs alone."""
    W = 3
    """The gradient of the weights alone."""
    BW = 4
    """Both."""


@dataclass(frozen=True)
class Action:
    op: Op
    microbatch: int
    chunk: int = 0
    slice: int = 0

    def label(self, num_chunks: int = 1, num_slices: int = 1) -> str:
        """`F3`: microbatch 3; `F3.1`: of chunk 1, where there are several; `F3:2`: token slice 2."""
        chunk = f".{self.chunk}" if num_chunks > 1 else ""
        return f"{self.op.name}{self.microbatch}{chunk}" + (f":{self.slice}" if num_slices > 1 else "")


class Task(NamedTuple):
    """A piece of work, wherever it is done. A BW action does two of them, B and W."""

    op: Op
    part: int
    microbatch: int
    slice: int


@dataclass(frozen=True)
class Schedule:
    """`table[tick][stage]`; None is a bubble. Placement `loop`: chunk c of stage s is part c P + s of the model, and
    part k's outputs go to the next stage, from the last round to the first. `v`, of two chunks: chunk 0 of stage s is
    part s, chunk 1 part 2P - 1 - s, so that the second half runs backwards and the turn stays on the last stage.
    """

    kind: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    num_slices: int
    placement: Placement
    table: tuple[tuple[Action | None, ...], ...]

    @property
    def num_ticks(self) -> int:
        return len(self.table)

    @property
    def num_parts(self) -> int:
        return self.num_stages * self.num_chunks

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradient is computed apart from its input gradient."""
        return any(action.op is Op.W for _, _, action in self.actions())

    def part(self, stage: int, chunk: int) -> int:
        """The part of the model, of P x C, that a stage holds as its chunk."""
        return part_of(self.placement, self.num_stages, stage, chunk)

    def locate(self, part: int) -> tuple[int, int]:
        """(stage, chunk) of a part: the inverse of `part`."""
        chunk, place = divmod(part, self.num_stages)
        return (self.num_stages - 1 - place if self.placement == "v" and chunk == 1 else place), chunk

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """(tick, stage, action) of every action, by tick."""
        for tick, row in enumerate(self.table):
            for stage, action in enumerate(row):
                if action is not None:
                    yield tick, stage, action

    def order(self, stage: int) -> list[Action]:
        """A stage's actions, one after another."""
        return [row[stage] for row in self.table if row[stage] is not None]  # type: ignore[misc]

    def tasks(self, stage: int, action: Action) -> tuple[Task, ...]:
        """What an action does: one task, or B and W."""
        ops = (Op.B, Op.W) if action.op is Op.BW else (action.op,)
        part = self.part(stage, action.chunk)
        return tuple(Task(op, part, action.microbatch, action.slice) for op in ops)

    def needs(self, stage: int, action: Action) -> list[Task]:
        """The tasks of other actions that must be done before this one."""
        return needs(action.op, self.part(stage, action.chunk), action, self.num_parts, self.num_slices)

    @cached_property
    def tick_of(self) -> dict[Task, int]:
        """The tick that does each task."""
        return {task: tick for tick, stage, action in self.actions() for task in self.tasks(stage, action)}


def part_of(placement: Placement, num_stages: int, stage: int, chunk: int) -> int:
    """See Schedule."""
    return chunk * num_stages + (num_stages - 1 - stage if placement == "v" and chunk == 1 else stage)


def needs(op: Op, part: int, action: Action, num_parts: int, num_slices: int) -> list[Task]:
    """The tasks before op of the action's microbatch and slice in a part."""
    microbatch, piece = action.microbatch, action.slice
    if op is Op.W:
        return [Task(Op.B, part, microbatch, piece)]
    if op is Op.F:
        needed = [Task(Op.F, part - 1, microbatch, piece)] if part > 0 else []
        return [*needed, Task(Op.F, part, microbatch, piece - 1)] if piece > 0 else needed
    needed = [Task(Op.F, part, microbatch, piece)]
    if part < num_parts - 1:
        needed.append(Task(Op.B, part + 1, microbatch, piece))
    if piece < num_slices - 1:
        needed.append(Task(Op.B, part, microbatch, piece + 1))
    return needed


def from_orders(
    kind: str,
    orders: Sequence[Sequence[Action]],
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    num_slices: int = 1,
    placement: Placement = "loop",
    hop_ticks: int = 1,
) -> Schedule:
    """The shortest table in which each stage acts in the given order; `orders` has one per stage.

    hop_ticks: ticks from an action to one on another stage that needs it; 2 puts a tick between them. ValueError when
    the orders wait for one another for ever.
    """
    num_stages = len(orders)
    empty = Schedule(kind, num_stages, num_microbatches, num_chunks, num_slices, placement, ())
    done: dict[Task, int] = {}
    position = [0] * num_stages
    table: list[tuple[Action | None, ...]] = []

    def ready(stage: int, action: Action, tick: int) -> bool:
        for task in empty.needs(stage, action):
            ticks = 1 if empty.locate(task.part)[0] == stage else hop_ticks
            if task not in done or done[task] + ticks > tick:
                return False
        return True

    while any(at < len(order) for at, order in zip(position, orders)):
        tick = len(table)
        upcoming = [order[at] if at < len(order) else None for at, order in zip(position, orders)]
        row = [action if action and ready(stage, action, tick) else None for stage, action in enumerate(upcoming)]
        for stage, action in enumerate(row):
            if action:
                position[stage] += 1
                done.update((task, tick) for task in empty.tasks(stage, action))
        if not any(any(past) for past in (*table[len(table) - hop_ticks + 1 :], row)):
            stage, action = next((s, action) for s, action in enumerate(upcoming) if action)
            raise ValueError(f"{kind} is stuck at tick {tick}: stage {stage} waits for ever to run {action.label()}")
        table.append(tuple(row))
    return Schedule(kind, num_stages, num_microbatches, num_chunks, num_slices, placement, tuple(table))
