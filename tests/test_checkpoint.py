"""What one mesh writes any other reads, at the model's true sizes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxpar.config import Config, DataConfig, OptimizerConfig, ParallelConfig, RunConfig
from jaxpar.training import optimizer, setup
from jaxpar.training.checkpoint import Checkpoints
from jaxpar.training.run_directory import RunDirectory
from jaxpar.training.step import TrainState, init_state
from jaxpar.verify import true_sizes
from models.config import ModelConfig

# 250 is padded to 256 on most meshes, to 768 where tensor=3.
MODEL = ModelConfig(vocab_size=250, embed_dim=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, mlp_dim=48)


def checkpoints(tmp_path, mesh: str, devices: int, **model) -> Checkpoints:
    config = Config(
        model=MODEL.replace(**model),
        data=DataConfig(batch_size=12, seq_len=12),
        parallel=ParallelConfig(mesh=mesh),
        run=RunConfig(precision="float32"),
    )
    made = setup.make_model(config, setup.make_mesh(config, jax.devices()[:devices]))
    return Checkpoints(tmp_path / "checkpoints", made, optimizer.make(config.optimizer, 10, made.names))


def state_of(at: Checkpoints) -> TrainState:
    """A state whose moments are no zeros: they would be restored as well by anything."""
    state = init_state(at.model, at.optimizer, seed=1)
    moments = state.opt_state[0]
    fill = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree))
    opt_state = (moments._replace(mu=fill(state.params), nu=fill(state.params)), *state.opt_state[1:])
    return dataclasses.replace(state, step=state.step + 7, opt_state=opt_state)


@pytest.mark.parametrize(("mesh", "devices"), [("data=2,fsdp=2,tensor=2", 8), ("fsdp=2,tensor=3", 6), ("data=1", 1)])
def test_a_checkpoint_is_read_on_any_mesh(tmp_path, mesh, devices):
    source = checkpoints(tmp_path, "fsdp=4,tensor=2", 8)
    state = state_of(source)
    assert source.latest() is None
    source.save(state)
    (source.directory / "9").mkdir()  # no checkpoint was finished there
    assert source.latest() == 7

    target = checkpoints(tmp_path, mesh, devices)
    restored = target.restore(7)
    assert jax.tree.map(jax.typeof, restored) == jax.tree.map(jax.typeof, state_of(target))
    for part in (lambda s: s.params, lambda s: s.opt_state[0].mu, lambda s: s.opt_state[0].nu):
        got, want = true_sizes(target.model, part(restored)), true_sizes(source.model, part(state))
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert int(restored.step) == 7
    embedding = np.asarray(restored.params["embedding"])
    assert np.all(embedding[250:] == 0)


def test_what_is_stored_has_no_padding(tmp_path):
    source = checkpoints(tmp_path, "fsdp=2,tensor=3", 6)
    source.save(state_of(source))
    stored = json.loads((source.directory / "7" / "state" / "_METADATA").read_text())
    shapes = {entry["key_metadata"][0]["key"]: entry["value_metadata"] for entry in stored["tree_metadata"].values()}
    assert source.model.abstract["embedding"].shape == (768, 32)
    assert shapes["params.embedding"]["write_shape"][0] == 250


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path):
    source = checkpoints(tmp_path, "data=1", 1)
    source.save(state_of(source))
    with pytest.raises(ValueError, match="cannot be restored") as caught:
        checkpoints(tmp_path, "data=1", 1, mlp_dim=96).restore(7)
    assert "\n" not in str(caught.value)


def write_run(tmp_path, config: Config) -> RunDirectory:
    run = RunDirectory.choose(config)
    run.start(config, 0)
    (run.checkpoints / "3").mkdir(parents=True)
    return run


def at(tmp_path, **run) -> Config:
    return Config(run=RunConfig(directory=str(tmp_path / "run"), **run))


def test_a_run_directory_resumes_by_itself_or_starts_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="has no checkpoint; give its --run-dir"):
        RunDirectory.choose(at(tmp_path, resume="require"))
    assert not RunDirectory.choose(at(tmp_path)).has_checkpoint
    write_run(tmp_path, at(tmp_path))
    assert RunDirectory.choose(at(tmp_path)).has_checkpoint
    assert RunDirectory.choose(at(tmp_path, resume="require")).path == tmp_path / "run"
    assert RunDirectory.choose(at(tmp_path, resume="never")).path == tmp_path / "run-1"
    assert RunDirectory.choose(Config()).path.match("runs/*-tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": OptimizerConfig(beta2=0.99)}, r"optimizer\.beta2 = 0\.95, not 0\.99"),
        ({"data": DataConfig(seq_len=64)}, r"data\.seq_len = 128, not 64"),
        ({"model": ModelConfig(num_layers=2)}, r"model\.num_layers = 4, not 2"),
    ],
)
def test_a_run_of_other_settings_is_not_resumed(tmp_path, change, message):
    write_run(tmp_path, at(tmp_path))
    with pytest.raises(ValueError, match=message):
        RunDirectory.choose(dataclasses.replace(at(tmp_path), **change))
    other_mesh = dataclasses.replace(at(tmp_path), parallel=ParallelConfig(mesh="fsdp=8", grad_accumulation=2))
    assert RunDirectory.choose(other_mesh).path == tmp_path / "run"


def test_metrics_of_steps_that_are_done_again_are_dropped(tmp_path):
    run = write_run(tmp_path, at(tmp_path))
    for step in range(1, 6):
        run.append_metrics({"step": step, "loss": 1.0})
    with run.metrics.open("a") as file:
        file.write('3\n{"step": 6, "lo')  # no row, and a crash in the middle of a line
    run.start(at(tmp_path), 3)
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
