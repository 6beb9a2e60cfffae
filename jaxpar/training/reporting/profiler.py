"""`--profile START:STOP`: a trace of some steps, for XProf (`xprof --logdir RUN/profile`) or TensorBoard."""

from dataclasses import dataclass, field
from pathlib import Path

import jax


def parse_steps(text: str, stop_at: int) -> range:
    """The steps of `START:STOP`, both included, or none of an empty text. Raises ValueError for any other form, and
    for steps outside of the run."""
    if not text:
        return range(0)
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise ValueError(f"--profile {text} is not START:STOP; give two steps, as in 10:12")
    if not 1 <= int(start) <= int(stop) <= stop_at:
        raise ValueError(f"--profile {text} must be steps in order, from 1 to the run's last, {stop_at}")
    return range(int(start), int(stop) + 1)


@dataclass
class Profile:
    """Traces the steps `steps`, or what a resumed run has left of them."""

    steps: range
    directory: Path
    _tracing: bool = field(default=False, init=False)

    def due(self, done: int) -> bool:
        """Whether the trace starts or ends after step `done`, so that its work should have come to an end."""
        return (done + 1 in self.steps) != self._tracing

    def turn(self, done: int) -> None:
        """Start or end the trace where that is due."""
        if not self.due(done):
            return
        if self._tracing:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(self.directory)
        self._tracing = not self._tracing

    def close(self) -> None:
        """Write what was traced of a run that ends early."""
        self.turn(done=-1)
