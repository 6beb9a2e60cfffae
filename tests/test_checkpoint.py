"""What one mesh writes any other reads, at the model's true sizes; and which run goes on where."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from jaxpar import toml
from jaxpar.config import Config, DataConfig, OptimizerConfig, ParallelConfig, RunConfig
from jaxpar.training import optimizers, setup
from jaxpar.training.checkpoints import checkpoint, export
from jaxpar.training.checkpoints.checkpoint import Checkpoints
from jaxpar.training.checkpoints.run_directory import RunDirectory
from jaxpar.training.model import Model
from jaxpar.training.step import TrainState, init_state
from jaxpar.verify import true_sizes
from models.config import ModelConfig

# 250 is padded to 256 on most meshes, to 768 where tensor=3.
MODEL = ModelConfig(vocab_size=250, embed_dim=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, mlp_dim=48)


@functools.cache
def model_of(mesh: str | None, devices: int, changes: tuple) -> Model:
    config = Config(
        model=MODEL.replace(**dict(changes)),
        data=DataConfig(batch_size=12, seq_len=12),
        parallel=ParallelConfig(mesh=mesh or ""),
        run=RunConfig(precision="float32"),
    )
    return setup.make_model(config, mesh and setup.make_mesh(config, jax.devices()[:devices]))


def checkpoints(tmp_path, mesh: str | None, devices: int, tx=None, run=None, **changes) -> Checkpoints:
    model = model_of(mesh, devices, tuple(changes.items()))
    config = Config(model=model.config, data=DataConfig(batch_size=12, seq_len=12), run=run or RunConfig())
    return Checkpoints(
        tmp_path / "checkpoints", model, tx or optimizers.make(config.optimizer, 10, model.names), config
    )


@functools.cache
def _state_of(model: Model) -> TrainState:
    """A state whose moments are no zeros: they would be restored as well by anything."""
    state = init_state(model, optimizers.make(OptimizerConfig(), 10, model.names), seed=1)
    moments = state.opt_state[0]
    fill = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree))
    opt_state = (moments._replace(mu=fill(state.params), nu=fill(state.params)), *state.opt_state[1:])
    return dataclasses.replace(state, step=state.step + 7, opt_state=opt_state)


def state_of(at: Checkpoints) -> TrainState:
    return _state_of(at.model)


def at_step(state: TrainState, step: int) -> TrainState:
    return dataclasses.replace(state, step=state.step * 0 + step)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> tuple[Checkpoints, TrainState]:
    """A checkpoint of step 7."""
    with checkpoints(tmp_path_factory.mktemp("source"), "fsdp=4,tensor=2", 8) as made:
        state = state_of(made)
        assert made.latest() is None
        made.save(state)
    return made, state


@pytest.mark.parametrize(("mesh", "devices"), [("data=2,fsdp=2,tensor=2", 8), ("fsdp=2,tensor=3", 6), ("data=1", 1)])
def test_a_checkpoint_is_read_on_any_mesh(source, mesh, devices):
    source, state = source
    target = checkpoints(source.directory.parent, mesh, devices)
    restored = target.restore(target.latest())
    assert target.last_saved == 7
    assert jax.tree.map(jax.typeof, restored) == jax.tree.map(jax.typeof, state_of(target))
    for part in (lambda s: s.params, lambda s: s.opt_state[0].mu, lambda s: s.opt_state[0].nu):
        got, want = true_sizes(target.model, part(restored)), true_sizes(source.model, part(state))
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert int(restored.step) == 7
    embedding = np.asarray(restored.params["embedding"])
    assert np.all(embedding[250:] == 0)


def test_what_is_stored_has_no_padding_and_says_of_which_run_it_is(tmp_path):
    with checkpoints(tmp_path, "fsdp=2,tensor=3", 6) as source:
        source.save(state_of(source))
    assert source.model.abstract["embedding"].shape == (768, 32)
    stored = checkpoint.describe(source.directory / "7")
    assert stored.arrays["params.embedding"].shape == (250, 32)
    assert stored.arrays["opt_state.0.mu.embedding"].shape == (250, 32)
    assert stored.position == {"step": 7, "sequences": 84, "tokens": 1008}
    assert stored.config == toml.dumps(source.config)


def test_a_factored_state_is_stored_at_its_true_size_or_not_at_all(tmp_path):
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=32)
    with checkpoints(tmp_path, None, 1, tx) as at:
        state = jax.tree.map(lambda leaf: leaf + 1, init_state(at.model, tx, seed=1))
        at.save(state)
    stored = checkpoint.describe(at.directory / "1").arrays
    assert {leaf.shape for name, leaf in stored.items() if name.endswith("v_row.embedding")} == {(32,)}
    assert {leaf.shape for name, leaf in stored.items() if name.endswith("v_col.embedding")} == {(250,)}
    restored = at.restore(1)
    assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, state)
    for (path, got), want in zip(jax.tree.leaves_with_path(restored), jax.tree.leaves(state), strict=True):
        cut = tuple(slice(250 if size == 256 else size) for size in want.shape)
        np.testing.assert_array_equal(np.asarray(got)[cut], np.asarray(want)[cut], err_msg=str(path))
    # 250 < 252 < 256: which dim is the row depends on the padding.
    with pytest.raises(ValueError, match=r"cannot be stored; take --model\.vocab-size 256"):
        checkpoints(tmp_path, None, 1, tx, embed_dim=252)


def test_the_next_step_may_donate_a_state_that_is_being_written(tmp_path):
    clobber = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0 - 1, state), donate_argnums=0)
    with checkpoints(tmp_path, "fsdp=4,tensor=2", 8) as at:
        state = jax.jit(lambda state: jax.tree.map(jnp.copy, state))(state_of(at))
        want = jax.tree.map(np.array, state)
        at.save(state)
        state = clobber(state)
        assert int(state.step) == -1
        at.wait()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, at.restore(7)), want)


@pytest.mark.parametrize(
    ("keep", "left"),
    [((0, 0), [1, 2, 3, 4, 5, 6]), ((1, 0), [6]), ((2, 0), [5, 6]), ((2, 3), [3, 5, 6]), ((1, 2), [2, 4, 6])],
)
def test_old_checkpoints_are_removed(tmp_path, keep, left):
    run = RunConfig(keep_checkpoints=keep[0], keep_every=keep[1])
    with checkpoints(tmp_path, "data=1", 1, run=run, num_layers=1) as at:
        state = state_of(at)
        for step in range(1, 7):
            at.save(at_step(state, step))
    assert sorted(path.name for path in at.directory.iterdir()) == [str(step) for step in left]


def test_a_step_that_is_done_again_replaces_its_damaged_checkpoint(tmp_path):
    """And what lies after it, damaged too, does not count among those that are kept."""
    with checkpoints(tmp_path, "data=1", 1, run=RunConfig(keep_checkpoints=2), num_layers=1) as at:
        state = state_of(at)
        at.save(at_step(state, 2))
        at.wait()
        for step in (4, 6):
            (at.directory / str(step)).mkdir()
        (at.directory / "notes").mkdir()
        assert at.latest() == 2
        at.save(at_step(state, 3))
        at.save(at_step(state, 4))
        at.wait()
        assert at.latest() == 4
    assert sorted(path.name for path in at.directory.iterdir()) == ["3", "4", "6", "notes"]


def test_a_checkpoint_of_another_model_is_refused_in_one_line(source):
    message = r"7 is of another model or optimizer: .*mlp\.\w+ is float32\[2, \S+ \d+\] there, .* here; take another"
    with pytest.raises(ValueError, match=message) as caught:
        checkpoints(source[0].directory.parent, "data=1", 1, mlp_dim=96).restore(7)
    assert "\n" not in str(caught.value)
    other = checkpoints(source[0].directory.parent, "data=1", 1, optax.sgd(1.0, momentum=0.9))
    with pytest.raises(ValueError, match=r"opt_state\.0\.trace\.\S+ is absent there, float32\[\S.* here"):
        other.restore(7)


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
    monkeypatch.setattr("time.strftime", lambda _: "now")
    assert RunDirectory.choose(Config()).path.match("runs/now-tiny")
    assert RunDirectory.choose(Config()).path.match("runs/now-tiny-1")


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="run cannot be written: File exists; take another"):
        RunDirectory.choose(at(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": OptimizerConfig(beta2=0.99)}, r"optimizer\.beta2 = 0\.95, not 0\.99"),
        ({"data": DataConfig(seq_len=64)}, r"data\.seq_len = 128, not 64"),
        ({"model": ModelConfig(num_layers=2)}, r"model\.num_layers = 4, not 2"),
        ({"seed": 1}, r"run\.seed = 0, not 1"),
        ({"precision": "float32"}, r"run\.precision = 'bfloat16', not 'float32'"),
        ({"params_dtype": "bfloat16"}, r"run\.params_dtype = 'auto', not 'bfloat16'"),
    ],
)
def test_a_run_of_other_settings_is_not_resumed(tmp_path, change, message):
    write_run(tmp_path, at(tmp_path))
    groups = {name: value for name, value in change.items() if dataclasses.is_dataclass(value)}
    with pytest.raises(ValueError, match=message):
        RunDirectory.choose(dataclasses.replace(at(tmp_path, **(change if not groups else {})), **groups))
    other = dataclasses.replace(at(tmp_path, steps=7), parallel=ParallelConfig(mesh="fsdp=8", grad_accumulation=2))
    assert RunDirectory.choose(other).path == tmp_path / "run"


def test_the_config_of_an_older_version_is_read(tmp_path):
    """One that has not every setting."""
    path = write_run(tmp_path, at(tmp_path)).path / "config.toml"
    settings = ("ema", "params_dtype", "eval_fraction")
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith(settings)))
    assert RunDirectory.choose(at(tmp_path)).path == tmp_path / "run"
    with pytest.raises(ValueError, match=r"optimizer\.ema = 0\.0, not 0\.9"):
        RunDirectory.choose(dataclasses.replace(at(tmp_path), optimizer=OptimizerConfig(ema=0.9)))


def test_metrics_of_steps_that_are_done_again_are_dropped(tmp_path):
    run = write_run(tmp_path, at(tmp_path))
    for step in range(1, 6):
        run.append_metrics({"step": step, "loss": 1.0})
    with run.metrics.open("a") as file:
        file.write('3\n{"step": 6, "lo')  # no row, and a crash in the middle of a line
    run.start(at(tmp_path), 3)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2, 3]


def test_schedule_frees_average_is_what_is_exported(tmp_path):
    """Training holds y; what is good is x, which is made of it and z (here another tree of numbers)."""
    model = model_of(None, 1, ())
    tx = optimizers.make(OptimizerConfig(name="schedule-free", schedule="constant"), 10, model.names)
    with checkpoints(tmp_path, None, 1, tx) as at:
        state = init_state(model, tx, seed=1)
        opt_state = optax.tree.map_params(tx, lambda leaf: leaf * 2 + 1, state.opt_state)
        state = at_step(dataclasses.replace(state, opt_state=opt_state), 3)
        at.save(state)
        at.wait()
    export.convert(at.directory / "3", to := tmp_path / "model.safetensors")
    want = true_sizes(model, optimizers.evaluation_params(state.opt_state, state.params))
    found = safetensors.numpy.load_file(to)
    assert found.keys() == {name.strip(".") for name in want}
    for name, value in want.items():
        np.testing.assert_allclose(found[name.strip(".")], value, rtol=1e-5, atol=1e-5)
        assert np.abs(value - np.asarray(true_sizes(model, state.params)[name])).max() > 0.01
