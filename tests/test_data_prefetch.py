"""Batches come in order and ahead of time; what fails, fails in its own step."""

import threading
import time

import pytest

from jaxpar.data import Prefetcher


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_batches_come_in_order(depth):
    with Prefetcher(lambda step: step, 5, 12, depth) as prefetcher:  # type: ignore[arg-type, return-value]
        assert [prefetcher.next() for _ in range(7)] == list(range(5, 12))
        with pytest.raises(AssertionError, match="no step after the last"):
            prefetcher.next()


def test_so_many_are_made_ahead_and_not_more():
    made = threading.Semaphore(0)
    steps = []

    def make(step):
        steps.append(step)
        made.release()
        return step

    with Prefetcher(make, 0, 100, depth=2) as prefetcher:
        for wanted in (2, 3, 4):
            assert made.acquire(timeout=10)
            if wanted == 2:
                assert made.acquire(timeout=10)
            assert steps == list(range(wanted))
            prefetcher.next()
        assert made.acquire(timeout=10)
    assert steps == list(range(5))


def test_waiting_is_measured():
    with Prefetcher(lambda step: time.sleep(0.05), 0, 3, depth=1) as prefetcher:  # type: ignore[arg-type, return-value]
        prefetcher.next()
        prefetcher.next()
        assert 0.01 < prefetcher.wait_seconds < 1
        time.sleep(0.3)
        prefetcher.next()
        assert prefetcher.wait_seconds < 0.01


def test_an_error_surfaces_in_the_step_that_asks_for_the_batch():
    def make(step):
        if step == 2:
            raise ValueError("no such sample")
        return step

    with Prefetcher(make, 0, 10, depth=3) as prefetcher:
        assert [prefetcher.next(), prefetcher.next()] == [0, 1]
        with pytest.raises(ValueError, match="no such sample"):
            prefetcher.next()
        assert prefetcher.next() == 3


def test_closing_ends_the_thread():
    before = threading.active_count()
    prefetcher = Prefetcher(lambda step: time.sleep(0.01), 0, 10**6, depth=5)  # type: ignore[arg-type, return-value]
    assert threading.active_count() == before + 1
    prefetcher.close()
    assert threading.active_count() == before
