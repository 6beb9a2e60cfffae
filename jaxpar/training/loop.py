"""The loop over steps. The devices are never waited for but to read the metrics of the step before."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxpar.parallel.batch import Batch
from jaxpar.training.metrics import Meter
from jaxpar.training.step import StepMetrics, TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


def run(
    step: Step,
    state: TrainState,
    batch_of: Callable[[int], Batch],
    meter: Meter,
    *,
    first: int,
    stop_at: int,
    save: Callable[[TrainState], None],
    save_every: int,
    report: Callable[[dict[str, Any]], None],
    should_stop: Callable[[int], bool],
) -> TrainState:
    """Steps first + 1 to stop_at, a row of metrics reported for each; saved every `save_every` steps and at the end,
    which is where `should_stop(step)` says so."""
    # On CPU devices a step that waits for its turn on the cores can hold up the collectives of the one that runs.
    ahead = 0 if jax.default_backend() == "cpu" else 1
    pending: deque[tuple[int, StepMetrics]] = deque()

    def finished(down_to: int) -> Iterator[dict[str, Any]]:
        while len(pending) > down_to:
            yield meter.row(*pending.popleft())

    for number in range(first + 1, stop_at + 1):
        state, metrics = step(state, batch_of(number - 1))
        pending.append((number, metrics))
        last = number == stop_at or should_stop(number)
        save_now = last or (save_every and number % save_every == 0)
        for row in finished(0 if save_now else ahead):
            report(row)
        if save_now:
            save(state)
        if last:
            break
    return state
