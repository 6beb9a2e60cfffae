"""Closed forms of what stages hold, against every schedule's own table."""

import numpy as np
import pytest

from jaxpar.parallel.pipeline.kinds import KINDS, make
from jaxpar.parallel.pipeline.simulate import Times, memory_over, simulate
from jaxpar.planning.schedules import DEFERRED_SIZE, bubble, stashes

RUNS = [name for name, kind in KINDS.items() if kind.synchronous and not kind.needs_slices]


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 3), (2, 8), (4, 2), (4, 4), (4, 6), (4, 11), (6, 20), (8, 12)]
)
def test_peaks_are_the_tables(kind, stages, microbatches):
    for chunks in {1: (1,), 2: (2,) if KINDS[kind].chunks[1] == 2 else (2, 3)}[KINDS[kind].chunks[0]]:
        schedule = make(kind, stages, microbatches, chunks)
        held = [memory_over(schedule, stage, DEFERRED_SIZE) for stage in range(stages)]
        found = stashes(kind, stages, microbatches, chunks)
        np.testing.assert_allclose(found.activations, [max(each.activations for each in stage) for stage in held])
        np.testing.assert_allclose(found.memory, [max(each.memory for each in stage) for stage in held])
        waiting = max(max(each.deferred for each in stage) for stage in held)
        is_close = kind == "dualpipe-v" and microbatches < 2 * stages  # an upper bound there
        assert found.waiting.max() >= waiting if is_close else found.waiting.max() == pytest.approx(waiting)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize(
    ("stages", "microbatches"), [(2, 1), (2, 8), (4, 2), (4, 4), (4, 7), (4, 8), (6, 5), (6, 9), (8, 13), (8, 20)]
)
def test_bubbles_are_the_simulators(kind, stages, microbatches):
    chunks = KINDS[kind].chunks[0]
    report = simulate(make(kind, stages, microbatches, chunks), Times(1 / 3, 1 / 3, 1 / 3))
    found = bubble(kind, stages, microbatches, chunks)
    assert found == pytest.approx(report.makespan - microbatches)
