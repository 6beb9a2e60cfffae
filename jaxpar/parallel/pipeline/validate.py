"""What makes a table a schedule, and where its values lie in the meantime."""

from collections import Counter
from dataclasses import dataclass

from jaxpar.parallel.pipeline.schedule import Op, Schedule, Task


def validate(schedule: Schedule) -> None:
    """ValueError, naming tick and stage, unless every microbatch (and slice) passes through every part once each way,
    with its weight gradient, each action after what it needs, and no buffer slot is overwritten while alive.

    That a stage does at most one action in a tick is in the table's form.
    """
    for tick, row in enumerate(schedule.table):
        if len(row) != schedule.num_stages:
            raise ValueError(f"{schedule.kind}: tick {tick} has not {schedule.num_stages} stages, but {len(row)}")
    tick_of = schedule.tick_of
    expected = {
        Task(op, part, microbatch, piece)
        for op in (Op.F, Op.B, Op.W)
        for part in range(schedule.num_parts)
        for microbatch in range(schedule.num_microbatches)
        for piece in range(schedule.num_slices)
    }
    done = Counter(task for _, stage, action in schedule.actions() for task in schedule.tasks(stage, action))
    wrong = sorted(task for task in expected | set(done) if done[task] != (task in expected))
    if wrong:
        op, part, microbatch, piece = wrong[0]
        raise ValueError(
            f"{schedule.kind}: {op.name} of microbatch {microbatch}, slice {piece} in part {part} runs "
            f"{done[wrong[0]]} times, not {int(wrong[0] in expected)}"
        )
    for tick, stage, action in schedule.actions():
        for task in schedule.needs(stage, action):
            if tick_of[task] >= tick:
                label = action.label(schedule.num_chunks, schedule.num_slices)
                raise ValueError(
                    f"{schedule.kind}: {label} runs on stage {stage} in tick {tick}, but needs {task.op.name} of part "
                    f"{task.part}, which runs in tick {tick_of[task]}"
                )
    slots = assign_slots(schedule)
    for buffers in (slots.inputs, slots.gradients, slots.residuals, slots.deferred):
        last: dict[tuple[int, int], int] = {}
        for lease in sorted(buffers.values(), key=lambda lease: lease.first):
            place = lease.stage, lease.slot
            assert last.get(place, -1) < lease.first, f"{schedule.kind}: slot {place} overwritten at tick {lease.first}"
            last[place] = lease.last


@dataclass(frozen=True)
class Lease:
    """A slot of a stage's buffer, held from the start of tick `first` to the end of tick `last`."""

    stage: int
    slot: int
    first: int
    last: int


@dataclass(frozen=True)
class Slots:
    """Where each value lies, by the task that uses or makes it; each buffer has the fewest slots possible.

    A value that another stage sent in tick t lies in its slot from tick t + 1. Written before the actions of its first
    tick and read in its last, a slot can be written again for the tick after.
    """

    inputs: dict[Task, Lease]
    """By F: a part's input, from arrival (the model's first part: from F) until B has used it."""
    residuals: dict[Task, Lease]
    """By F: what a forward pass keeps for its backward pass, from F until B, where that is not recomputed."""
    gradients: dict[Task, Lease]
    """By B: the gradient of a part's output, from arrival until B has used it (the last part's: from F on)."""
    deferred: dict[Task, Lease]
    """By W: what a weight gradient needs, from its B until it runs; none where both are one action."""

    def count(self, buffer: dict[Task, Lease], num_stages: int) -> tuple[int, ...]:
        """Slots that each stage needs of one of the buffers."""
        return tuple(
            max((lease.slot + 1 for lease in buffer.values() if lease.stage == stage), default=0)
            for stage in range(num_stages)
        )


def assign_slots(schedule: Schedule) -> Slots:
    """Slots for all that a table keeps between ticks, the fewest that will do: an interval takes the lowest slot that
    is free when it begins, which needs as many slots as intervals ever overlap."""
    tick_of = schedule.tick_of
    inputs, residuals, gradients, deferred = {}, {}, {}, {}
    for task, tick in tick_of.items():
        _, part, microbatch, piece = task
        backward = Task(Op.B, part, microbatch, piece)
        if task.op is Op.F:
            before = Task(Op.F, part - 1, microbatch, piece)
            inputs[task] = (tick_of[before] + 1 if part > 0 else tick, tick_of[backward])
            residuals[task] = (tick, tick_of[backward])
        elif task.op is Op.B:
            is_last = part == schedule.num_parts - 1
            source = Task(Op.F, part, microbatch, piece) if is_last else Task(Op.B, part + 1, microbatch, piece)
            gradients[task] = (tick_of[source] + 1, tick)
        elif task.op is Op.W and tick > tick_of[backward]:
            deferred[task] = (tick_of[backward], tick)
    return Slots(*(_color(schedule, spans) for spans in (inputs, residuals, gradients, deferred)))


def _color(schedule: Schedule, spans: dict[Task, tuple[int, int]]) -> dict[Task, Lease]:
    leases: dict[Task, Lease] = {}
    free_from: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    for task, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        stage, _ = schedule.locate(task.part)
        slots = free_from[stage]
        slot = next((i for i, tick in enumerate(slots) if tick <= first), len(slots))
        slots[slot : slot + 1] = [last + 1]
        leases[task] = Lease(stage, slot, first, last)
    return leases
