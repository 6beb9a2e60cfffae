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
ITERATIONS = 10


@dataclass(frozen=True)
class Number:
    """One fitted number: where it stands in the table, and its prior, of a normal distribution of its logarithm."""

    places: tuple[tuple[str, ...], ...]
    """Paths into the table, all of which hold this one number."""
    prior: float
    width: float
    why: str
    """Of the prior."""


def _of_chips(field: str, *names: str) -> tuple[tuple[str, ...], ...]:
    return tuple(("chips", name, *field.split(".")) for name in names)


_GPUS = ("A100", "H100-SXM", "GB200", "GB300")
_TPUS = ("TPU-v5e", "TPU-v5p")
_CUBLAS = "large products under cuBLAS and the chip's power limit"
_NARROW = "as in 16 bits, less what scaling costs"
_NO_RUN = "no run: what its 8-bit products and Hopper's two precisions suggest"
NUMBERS = (
    Number(_of_chips("matmul.bfloat16", "A100"), 0.85, 0.1, _CUBLAS),
    Number(_of_chips("matmul.bfloat16", "H100-SXM"), 0.72, 0.1, _CUBLAS),
    Number(_of_chips("matmul.float8", "H100-SXM"), 0.62, 0.15, _NARROW),
    Number(_of_chips("matmul.bfloat16", "GB200"), 0.65, 0.1, _NO_RUN),
    Number(_of_chips("matmul.float8", "GB200"), 0.62, 0.15, _NARROW),
    Number(_of_chips("matmul.float4", "GB200"), 0.5, 0.2, _NARROW),
    Number(_of_chips("matmul.bfloat16", "GB300"), 0.75, 0.1, _NO_RUN),
    Number(_of_chips("matmul.float8", "GB300"), 0.62, 0.15, _NARROW),
    Number(_of_chips("matmul.float4", "GB300"), 0.5, 0.2, _NARROW),
    Number(_of_chips("matmul.bfloat16", "TPU-v5e"), 0.9, 0.1, "systolic arrays lose little in large products"),
    Number(_of_chips("matmul.bfloat16", "TPU-v5p"), 0.9, 0.1, "systolic arrays lose little in large products"),
    Number(_of_chips("attention", "A100"), 0.58, 0.15, "FlashAttention-2 (arXiv 2307.08691), figure 4"),
    Number(_of_chips("attention", "H100-SXM"), 0.34, 0.15, "FlashAttention-2 (arXiv 2307.08691), figure 7"),
    Number(_of_chips("attention", "GB200", "GB300"), 0.34, 0.15, "as Hopper"),
    Number(_of_chips("attention", *_TPUS), 0.5, 0.15, "between a product's share and Hopper's"),
    Number(_of_chips("memory", *_GPUS, *_TPUS), 0.8, 0.15, "what streaming kernels reach"),
    Number(_of_chips("network", *_GPUS, *_TPUS), 0.75, 0.15, "nccl-tests' bus bandwidth over the links'"),
    Number(_of_chips("overlap", *_GPUS, *_TPUS), 0.8, 0.15, "collectives take some of the chip's units and bandwidth"),
    Number(_of_chips("jitter", *_GPUS), 0.01, 1.0, "a percent for each doubling"),
    Number(_of_chips("jitter", *_TPUS), 0.01, 1.0, "a percent for each doubling"),
    *(
        Number((("frameworks", name, "overhead"),), 1.05, 0.07, "some percent beside the kernels")
        for name in (
            "llm-foundry",
            "megatron-bridge",
            "megatron-2021",
            "megatron-core",
            "torchtitan",
            "llama3",
            "maxtext",
            "jaxpar",
        )
    ),
)


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


def fit(runs: Sequence[Run], table: CalibrationTable, numbers: Sequence[Number] = NUMBERS) -> CalibrationTable:
    """The table with its numbers fitted to the runs, from their priors on; what else it says stays."""
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.framework.name] = counts.get(run.framework.name, 0) + 1
    weights = np.array([counts[run.framework.name] ** -0.25 for run in runs])
    logs = priors = np.array([math.log(number.prior) for number in numbers])
    widths = np.array([number.width for number in numbers])

    def residuals(logs: Float[np.ndarray, " P"]) -> Float[np.ndarray, " R"]:
        current = with_numbers(table, numbers, np.exp(logs))
        errors = np.array([run.log_error(current) for run in runs])
        # The square root of Huber's loss, whose sum of squares is the loss.
        large = np.abs(errors) > HUBER
        errors[large] = np.sign(errors[large]) * np.sqrt(2 * HUBER * np.abs(errors[large]) - HUBER**2)
        return np.concatenate([weights * errors / HUBER, (logs - priors) / widths])

    damping, now = 1e-2, residuals(logs)
    for _ in range(ITERATIONS):
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


def get(node: Any, path: Sequence[str]) -> Any:
    """The number at a path into the table."""
    for name in path:
        node = node[name] if isinstance(node, Mapping) else getattr(node, name)
    return node


def _set(node: Any, path: Sequence[str], value: float) -> Any:
    """A copy of the node with this one number changed."""
    if not path:
        return value
    name, *rest = path
    inside = _set(get(node, [name]), rest, value)
    return {**node, name: inside} if isinstance(node, Mapping) else dataclasses.replace(node, **{name: inside})
