"""The loop over steps. The devices are never waited for but to read the metrics of the step before."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from jaxpar.parallel.batch import Batch
from jaxpar.training.reporting.metrics import Meter
from jaxpar.training.reporting.profiler import Profile
from jaxpar.training.step import StepMetrics, TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
Row = dict[str, Any]


def run(
    step: Step,
    state: TrainState,
    batch_of: Callable[[int], tuple[Batch, float]],
    meter: Meter,
    *,
    first: int,
    stop_at: int,
    save: Callable[[TrainState], None],
    save_every: int,
    evaluate: Callable[[TrainState], Row] | None,
    eval_every: int,
    profile: Profile,
    should_stop: Callable[[int], bool],
    report: Callable[[Row], None],
) -> TrainState:
    """Steps first + 1 to stop_at, a row of metrics reported for each.

    `batch_of` gives a step's batch (counted from 0) and the seconds that it was waited for. What `evaluate` returns is
    added to its step's row, every `eval_every` steps and at `stop_at`. The state is saved every `save_every` steps and
    at the end, which is `stop_at` or the first step for which `should_stop` says so.

    Raises ValueError where a loss, or a parameter that would be saved, is not finite, after the row was reported.
    """
    # On CPU devices a step that waits for its turn on the cores can hold up the collectives of the one that runs.
    ahead = 0 if jax.default_backend() == "cpu" else 1
    pending: deque[tuple[int, StepMetrics, float]] = deque()
    saved = first

    def finished(down_to: int) -> Iterator[Row]:
        while len(pending) > down_to:
            yield meter.row(*pending.popleft())

    profile.turn(first)
    meter.start()
    for number in range(first + 1, stop_at + 1):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            batch, data_seconds = batch_of(number - 1)
            state, metrics = step(state, batch)
        pending.append((number, metrics, data_seconds))
        last = should_stop(number) or number == stop_at
        eval_now = number == stop_at or _due(number, eval_every)
        save_now = last or _due(number, save_every)
        for row in finished(0 if save_now or eval_now or profile.due(number) else ahead):
            if evaluate is not None and eval_now and row["step"] == number:
                with meter.paused():
                    row |= evaluate(state)
            report(row)
            if not math.isfinite(row["loss"]):
                raise ValueError(f"the loss of step {row['step']} is {row['loss']}; {_remedy(saved)}")
        with meter.paused():
            profile.turn(number)
            if save_now:
                # A last step's finite loss says nothing of the parameters that it leaves.
                if not all_finite(state.params):
                    raise ValueError(f"step {number} left parameters that are nan or infinite; {_remedy(saved)}")
                save(state)
                saved = number
        if last:
            break
    return state


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


@jax.jit
def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether no leaf holds NaN or infinity."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _remedy(saved: int) -> str:
    return (
        f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint yet"
    ) + "; start over (--no-resume) with a lower --learning-rate, more --warmup-steps or --precision float32"
