"""Ctrl-C and SIGTERM: the step is finished and saved before the process leaves."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """A context, on the main thread: after the first signal `requested` is true; the second ends the process as if
    there were no context."""

    def __init__(self) -> None:
        self.reason = ""
        """The signal's name."""
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        return bool(self.reason)

    def __enter__(self) -> "StopOnSignal":
        self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        self._restore()
        # Not print: the signal may have come while that was at work.
        os.write(2, f"{self.reason}: stopping after this step; once more: at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
