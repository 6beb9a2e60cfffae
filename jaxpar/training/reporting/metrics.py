"""What a step is worth: tokens per second and model FLOPs utilisation, from its measured time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import optax

from jaxpar.config import Config
from jaxpar.planning.flops import mfu, step_flops
from jaxpar.training.step import StepMetrics
from meshes import PeakFlops


@dataclass
class Meter:
    """Turns each step's metrics into a row of metrics.jsonl, in order.

    A step's time is from the end of the one before to its own, so it holds whatever the step waited for: data, host,
    devices; but not what goes on while `paused`. MFU by five steps: matmul FLOPs of the forward pass, plus twice that
    for the backward; over the devices' peak; over the measured time.
    """

    config: Config
    num_devices: int
    peak: PeakFlops
    learning_rate: optax.Schedule
    tokens: int
    """Valid tokens that the model has seen so far."""
    memory: Callable[[], int | None]
    """Bytes in use on the fullest device (`DeviceMemory.peak_bytes`)."""
    _last: float = field(default_factory=time.perf_counter, init=False)

    def start(self) -> None:
        """The first step's time begins."""
        self._last = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation, checkpoints, profiles: in no step's time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._last += time.perf_counter() - start

    def row(self, step: int, metrics: StepMetrics, data_seconds: float) -> dict[str, Any]:
        """Waits for the step; `step` counts from 1, `data_seconds` is what it waited for its batch."""
        loss, grad_norm, num_tokens = (float(x) for x in (metrics.loss, metrics.grad_norm, metrics.num_tokens))
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.tokens += int(num_tokens)
        data = self.config.data
        flops = step_flops(self.config.model, data.batch_size * data.seq_len, data.seq_len, self.config.parallel.remat)

        def utilisation(flops: float) -> float:
            return mfu(flops, seconds, self.num_devices, self.peak.per_device)

        row: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": float(self.learning_rate(step - 1)),
            "tokens": self.tokens,
            "tokens_per_second": num_tokens / seconds,
            "step_seconds": seconds,
            "mfu": utilisation(flops.model),
            "mfu_causal": utilisation(flops.model_causal),
            "hfu": utilisation(flops.hardware),
            "eval_loss": None,
            "memory_bytes": self.memory(),
            "data_seconds": data_seconds,
        }
        row |= {name: float(value) for name, value in metrics.routing.items()}
        if metrics.norms is not None:
            row["norms"] = {group: [float(x) for x in pair] for group, pair in metrics.norms.items()}
        return row
