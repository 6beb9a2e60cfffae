"""GPipe and looped forms by autodiff through a loop without branches: the numbers of one device, whatever stands in a
stage, and nothing out of a slot that holds nothing."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from test_ladder import check_same
from test_pipeline import by_one_device, by_pipeline, functions, toy, with_layers

from jaxpar import verify
from jaxpar.audit import hlo
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.pipeline import looped
from jaxpar.parallel.pipeline.kinds import make
from jaxpar.training import setup
from jaxpar.training.evaluate import make_eval_step
from meshes import parse_mesh


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", None), ("looped-bfs", 2), ("looped-bfs", 3)])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 3), (4, 4), (4, 10)])
def test_nan_in_what_holds_nothing(kind, chunks, stages, microbatches):
    """Microbatches fewer than, as many as, more than the stages, and no multiple of them."""
    schedule = make(kind, stages, microbatches, chunks)
    problem = toy(2 * schedule.num_parts, microbatches)
    want = by_one_device(*problem)
    got = by_pipeline(schedule, functions(), *problem, fill=np.nan, run=looped.run)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max())


@pytest.mark.parametrize(
    ("mesh", "parallel", "model", "packs"),
    [
        ("pipe=2,context=2,tensor=2", {"grad_accumulation": 4}, "qwen", True),
        ("data=2,pipe=2,fsdp=2,tensor=2", {"grad_accumulation": 2, "reshard_after_forward": False}, "tiny", False),
        (
            "pipe=2,fsdp=2,context=2",
            {"pipeline": "looped-bfs", "chunks": 2, "grad_accumulation": 4, "zero": 1},
            "gpt2",
            False,
        ),
        pytest.param(
            "pipe=4,context=2",
            {"grad_accumulation": 2, "context_strategy": "hybrid=2x1", "remat": "none"},
            "tiny",
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data=2,pipe=2,fsdp=2",
            {"pipeline": "looped-bfs", "chunks": 2, "remat": "dots", "reshard_after_forward": False},
            "qwen",
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipe=4,fsdp=2", {"grad_accumulation": 8, "context_strategy": "ulysses"}, "tiny", True, marks=pytest.mark.slow
        ),
        pytest.param(
            "pipe=2,context=4,tensor=2",
            {"pipeline": "looped-bfs", "chunks": 2, "context_strategy": "allgather", "sequence_parallel": False},
            "tiny",
            True,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_that_of_one_device(mesh, parallel, model, packs):
    def of(config):
        return dataclasses.replace(config, data=dataclasses.replace(config.data, pack_documents=packs))

    check_same(of(with_layers(4, model, mesh, **{"pipeline": "gpipe"} | parallel)), of(with_layers(4, model)), 1e-9)
