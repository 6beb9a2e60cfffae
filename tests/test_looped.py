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
from jaxpar.audit import hlo, hlo_text
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.pipeline import looped
from jaxpar.parallel.pipeline.kinds import make
from jaxpar.training import setup
from jaxpar.training.evaluate import make_eval_step
from meshes import parse_mesh


@pytest.mark.parametrize(
    ("kind", "chunks"), [("gpipe", None), ("looped-bfs", 2), pytest.param("looped-bfs", 3, marks=pytest.mark.slow)]
)
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
        pytest.param(
            "data=2,pipe=2,fsdp=2,tensor=2",
            {"grad_accumulation": 2, "reshard_after_forward": False},
            "tiny",
            False,
            marks=pytest.mark.slow,
        ),
        (
            "pipe=2,fsdp=2,context=2",
            {"pipeline": "looped-bfs", "chunks": 2, "grad_accumulation": 4, "reshard_after_forward": False},
            "gpt2",
            False,
        ),
        pytest.param("data=2,pipe=2,fsdp=2", {"grad_accumulation": 4, "zero": 1}, "tiny", True, marks=pytest.mark.slow),
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
            "pipe=4,fsdp=2",
            {"grad_accumulation": 8, "context_strategy": "ulysses"},
            "tiny",
            True,
            marks=pytest.mark.slow,
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


def test_evaluation_with_a_ring_in_every_stage():
    """The stages relay, every rank at work: no permute is in a branch there either."""
    outcomes = []
    for mesh in "pipe=2,context=2", None:
        asked = with_layers(4, "qwen", mesh or "", pipeline="gpipe", grad_accumulation=2)
        devices = setup.make_mesh(asked, jax.devices()[:4]) if mesh else None
        model = setup.make_model(asked, devices)
        batch = verify.random_batch(asked).in_order(model.layout.sequence_order(16))
        batch = jax.device_put(batch, model.layout.sharding(model.layout.stacked_batch_spec()))
        with jax.set_mesh(devices) if devices is not None else contextlib.nullcontext():
            outcomes.append(jax.jit(make_eval_step(model))(model.init(0), batch))
    (nll, tokens), (want, want_tokens) = jax.device_get(outcomes)
    assert tokens == want_tokens > 100
    np.testing.assert_allclose(nll, want, rtol=1e-9)


def collectives_in_branches(text: str) -> set[str]:
    """The operations of a compiled program that are in a conditional, of which there must be some."""
    module = hlo_text.Module.parse(text)

    def reached(name: str) -> set[str]:
        return {name}.union(*(reached(callee) for _, _, callee in module.computations[name].calls))

    branches = {
        name
        for computation in module.computations.values()
        for instruction, _, callee in computation.calls
        if instruction.opcode == "conditional"
        for name in reached(callee)
    }
    assert branches
    return {each.opcode.removesuffix("-start") for name in branches for each in module.computations[name].collectives}


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), pytest.param("looped-bfs", 2, marks=pytest.mark.slow)])
def test_what_stages_send_as_compiled_for_gpus(kind, chunks):
    """A hop per tick and direction, as many bytes as said, and no permute, of pipe or ring, in a branch."""
    asked = with_layers(8, "tiny", pipeline=kind, chunks=chunks, grad_accumulation=4)
    asked = dataclasses.replace(asked, model=asked.model.replace(embed_dim=256))
    mesh = parse_mesh("pipe=4,context=2", 8)
    text = verify.compiled_step(asked, mesh).as_text()
    found = hlo.summarize(hlo.read_collectives(text, mesh))
    hops = found["pipe"]["collective-permute"]
    assert hops["count"] == 2 * looped.num_ticks(make(kind, 4, 4, chunks)) == 2 * (7 if chunks == 1 else 11)
    assert hops["bytes"] == verify.expected_traffic(asked, mesh)["pipe"]["collective-permute"]
    assert found["context"]["collective-permute"]["bytes"] > 0
    assert "collective-permute" not in collectives_in_branches(text)


def test_auto_is_the_ring_where_nothing_branches():
    for kind, chunks, want in ("gpipe", 1, "exchange"), ("looped-bfs", 2, "exchange"), ("1f1b", 1, "allgather"):
        asked = with_layers(4, "tiny", "pipe=2,context=2", pipeline=kind, chunks=chunks)
        strategy = setup.make_model(asked, setup.make_mesh(asked, jax.devices()[:4])).layout.context
        assert strategy == ContextStrategy(kind=want)
    asked = with_layers(4, "tiny", "pipe=2,context=2", context_strategy="ring")
    with pytest.raises(ValueError, match="take allgather or ulysses, or --pipeline gpipe or looped-bfs"):
        setup.make_model(asked, setup.make_mesh(asked, jax.devices()[:4]))
