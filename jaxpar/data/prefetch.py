"""Batches made ahead of the steps that take them."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from jaxpar.parallel.batch import Batch


class Prefetcher:
    """`make(first)`, `make(first + 1)`, ..., of which `depth` are being made, or are ready, before `next` asks.

    One thread makes them in order. What it puts on devices involves no other process, so hosts need not keep in step.
    A depth of 0 makes each when it is asked for.
    """

    wait_seconds: float = 0.0
    """How long the last `next` took."""

    def __init__(self, make: Callable[[int], Batch], first: int, stop: int, depth: int):
        assert depth >= 0
        self._make, self._steps = make, iter(range(first, stop))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(depth):
            self._start_one()

    def next(self) -> Batch:
        """The next batch; raises what making it raised."""
        start = time.perf_counter()
        self._start_one()
        assert self._ahead, "there is no step after the last"
        batch = self._ahead.popleft().result()
        self.wait_seconds = time.perf_counter() - start
        return batch

    def close(self) -> None:
        """Ends the thread, once it has made the batch at hand."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start_one(self) -> None:
        if (step := next(self._steps, None)) is not None:
            self._ahead.append(self._thread.submit(self._make, step))
