"""Fits the calibration table to published runs: the few numbers that are no physics and no fact of a framework.

Levenberg-Marquardt over the logarithms of the numbers, on log(predicted / measured) of each run. A source's runs count
together as the square root of their number, so that a hundred rows of one do not drown three of another; a run far off
counts less (Huber). Each number has a prior, what the literature or its neighbour lets expect, so that one without data
stays there: that is what keeps the table small and lets it speak of runs it has not seen.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxpar.planning.calibration import CalibrationTable
from jaxpar.planning.job import Job
from jaxpar.planning.runs import Framework, calibration_of, framework_of, job_of, rate_and_mfu
from jaxpar.planning.step_time import predict

HUBER = 0.1
"""Relative error from which a run counts less."""
STEP = 1e-3


@dataclass(frozen=True)
class Number:
    """One fitted number: where it stands in the table, and its prior, of a normal distribution of its logarithm."""

    places: tuple[tuple[str, ...], ...]
    """Paths into the table, all of which hold this one number."""
    prior: float
    width: float


@dataclass(frozen=True)
class Run:
    row: Mapping[str, Any]
    """What was published, but for what was measured."""
    job: Job
    framework: Framework
    key: str
    """What was measured: tokens_per_second_per_device or mfu."""
    measured: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Run":
        framework = framework_of(row)
        key = next(key for key in ("tokens_per_second_per_device", "mfu") if key in row["measured"])
        blind = {name: value for name, value in row.items() if name != "measured"}
        return cls(blind, job_of(blind, framework), framework, key, row["measured"][key])

    def log_error(self, table: CalibrationTable) -> float:
        """log(predicted / measured)."""
        time = predict(self.job, calibration_of(self.row, self.job, self.framework, table))
        rate, mfu = rate_and_mfu(self.job, self.framework, time)
        return math.log((mfu if self.key == "mfu" else rate) / self.measured)


def fit(
    runs: Sequence[Run], table: CalibrationTable, numbers: Sequence[Number], iterations: int = 8
) -> CalibrationTable:
    """The table with its numbers fitted to the runs; they start from where the table has them."""
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.framework.name] = counts.get(run.framework.name, 0) + 1
    weights = np.array([counts[run.framework.name] ** -0.25 for run in runs])
    logs = np.array([math.log(_get(table, number.places[0])) for number in numbers])
    priors = np.array([math.log(number.prior) for number in numbers])
    widths = np.array([number.width for number in numbers])

    def residuals(logs: Float[np.ndarray, " P"]) -> Float[np.ndarray, " R"]:
        current = with_numbers(table, numbers, np.exp(logs))
        errors = np.array([run.log_error(current) for run in runs])
        # The square root of Huber's loss, whose sum of squares is the loss.
        large = np.abs(errors) > HUBER
        errors[large] = np.sign(errors[large]) * np.sqrt(2 * HUBER * np.abs(errors[large]) - HUBER**2)
        return np.concatenate([weights * errors / HUBER, (logs - priors) / widths])

    damping, now = 1e-2, residuals(logs)
    for _ in range(iterations):
        jacobian = np.stack([(residuals(logs + STEP * unit) - now) / STEP for unit in np.eye(len(numbers))], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ now
        while damping < 1e4:
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = residuals(logs + change)
            if trial @ trial < now @ now:
                break
            damping *= 10
        else:
            break
        gain, logs, now, damping = now @ now - trial @ trial, logs + change, trial, damping / 10
        if gain < 1e-3 * (now @ now):
            break
    return with_numbers(table, numbers, np.exp(logs))


def with_numbers(
    table: CalibrationTable, numbers: Sequence[Number], values: Sequence[float] | Float[np.ndarray, " P"]
) -> CalibrationTable:
    for number, value in zip(numbers, values, strict=True):
        for place in number.places:
            table = _set(table, place, float(value))
    return table


def _get(node: Any, path: Sequence[str]) -> Any:
    for name in path:
        node = node[name] if isinstance(node, Mapping) else getattr(node, name)
    return node


def _set(node: Any, path: Sequence[str], value: float) -> Any:
    """A copy of the node with this one number changed."""
    if not path:
        return value
    name, *rest = path
    inside = _set(_get(node, [name]), rest, value)
    return {**node, name: inside} if isinstance(node, Mapping) else dataclasses.replace(node, **{name: inside})
