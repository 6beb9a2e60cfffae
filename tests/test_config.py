"""Settings: flags, files, and one clear line for each way to get them wrong."""

import jax
import pytest

from jaxpar import toml
from jaxpar.config import Config, load, parse, with_mesh
from jaxpar.training import setup
from meshes import num_devices_of
from models.presets import preset


def parsed(*args: str) -> Config:
    return parse(args, prog="train.py", description="")


def test_defaults_are_the_tiny_model_on_the_standard_library():
    config = parsed()
    assert config == Config()
    assert config.model == preset("tiny")
    assert config.data.source == "stdlib"


def test_short_and_long_flags_are_the_same():
    short = parsed("--mesh", "fsdp=8", "--steps=7", "--no-sequence-parallel", "--batch_size", "8", "--resume")
    long = parsed("--parallel.mesh=fsdp=8", "--run.steps", "7", "--parallel.no-sequence-parallel",
                  "--data.batch-size", "8", "--run.resume", "require")  # fmt: skip
    assert short == long
    assert (short.parallel.mesh, short.run.steps, short.parallel.sequence_parallel) == ("fsdp=8", 7, False)


def test_flags_override_the_preset_which_overrides_the_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(toml.dumps(parsed("--model", "gpt2", "--steps", "9", "--seed", "3")))
    config = parsed("--config", str(file), "--model", "llama3-8b", "--model.num-layers", "2", "--seed", "4")
    assert config.model == preset("llama3-8b").replace(num_layers=2)
    assert (config.run.steps, config.run.seed) == (9, 4)


@pytest.mark.parametrize("name", ["tiny", "gpt2", "mistral-7b", "llama3.2-1b"])
def test_a_config_survives_its_file(tmp_path, name):
    config = with_mesh(parsed("--model", name, "--mesh", "data=2"), {"data": 2, "fsdp": 1})
    file = tmp_path / "config.toml"
    file.write_text(toml.dumps(config))
    # Over another base: what is not in the file must not matter but for what None stands for.
    assert load(file, Config()) == config


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stepz", "3"], "unknown flag --stepz; did you mean '--steps'?"),
        (["--model.num-layer", "3"], "unknown flag --model.num-layer; did you mean '--model.num-layers'?"),
        (["--model", "lama3-8b"], "no model is called 'lama3-8b'; nearest: llama3-8b"),
        (["--model"], "--model needs a value"),
        (["--config", "none.toml"], "cannot read none.toml: No such file or directory"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--batch-size", "-4"], "--batch-size is -4; it must be at least 1"),
        (["--grad-accumulation", "0"], "--grad-accumulation is 0; it must be at least 1"),
        (["--learning-rate", "nan"], "--learning-rate is nan; it must be at least 0, and finite"),
        (["--weight-decay", "inf"], "--weight-decay is inf; it must be at least 0, and finite"),
        (["--optimizer.beta2", "1.5"], "--optimizer.beta2 is 1.5; it must be from 0 to 1"),
        (["--seed", "4294967296"], "--seed is 4294967296; it must be from 0 to 4294967295"),
        (["--emulate", "100000"], "--emulate is 100000; it must be from 0 to 512"),
        (["--steps", "abc"], "invalid literal for int() with base 10: 'abc'"),
        (["--precision", "int8"], "--precision"),
        (["--steps"], "Missing value for argument '--steps/--run.steps'"),
        (["more"], "Unrecognized options: more"),
        (["--model.init-std", "nan"], "model.init_std is nan; it must be at least 0, and finite"),
        (["--model.rope-scaling-factor", "0"], "model.rope_scaling_factor is 0.0; it must be at least 1"),
        (["--stop-at", "300"], "--stop-at 300 is outside of the run: 1 to --steps 200"),
        (["--model", "gpt2", "--seq-len", "2048"], "--seq-len 2048 exceeds the 1024 learned positions of gpt2"),
        (["--model.num-kv-heads", "3"], "model.num_heads 8 is not a multiple of model.num_kv_heads 3; kv heads that"),
        (["--model.head-dim", "7"], "model.head_dim 7 is odd"),
        (["--model.sliding-window", "0"], "model.sliding_window is 0; it must be at least 1"),
    ],
)
def test_bad_settings(args, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r".") as caught:
        parsed(*args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nstepz = 3", "run: unknown key 'stepz'; did you mean 'steps'?"),
        ("[runn]\nsteps = 3", "unknown key 'runn'; did you mean 'run'?"),
        ("run = 3", "run is 3; it must be a table"),
        ("[run]\nsteps = 'many'", "run: steps is 'many'; it must be of type int"),
        (
            "[run]\nprecision = 'half'",
            "run: precision is 'half'; it must be one of bfloat16, float16, float32, float64",
        ),
        ("[run", "is not valid TOML"),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"config\.toml") as caught:
        parsed("--config", str(file))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "args", "message"),
    [
        ("fsdp=8", ["--batch-size", "12"], "--batch-size 12 is not divisible by fsdp=8; the nearest that is: 8 or 16"),
        (
            "data=2,fsdp=4",
            ["--grad-accumulation", "4"],
            "--batch-size 16 is not divisible by data=2 x fsdp=4 x 4 microbatches; the nearest that is: 32",
        ),
        ("data=1", ["--grad-accumulation", "3"], "--batch-size 16 is not divisible by 3 microbatches; the nearest"),
        ("tensor=4", ["--seq-len", "30"], "--seq-len 30 is not divisible by tensor=4; the nearest that is: 28 or 32"),
        (
            "tensor=3",
            ["--seq-len", "30"],
            "--model.num-heads 8 is not divisible by tensor=3; the nearest that is: 6 or 9",
        ),
        ("tensor=4", ["--model.mlp-dim", "250"], "--model.mlp-dim 250 is not divisible by tensor=4"),
        (
            "context=8",
            ["--seq-len", "24"],
            "--seq-len 24 does not divide into the 16 parts of --context-order zigzag over context=8; the nearest that "
            "does: 16 or 32",
        ),
        (
            "context=4,tensor=4",
            ["--context-strategy", "ulysses"],
            "Ulysses over 4 ranks deals out the query heads of a rank of `tensor`, 8 / 4 = 2, which 4 does not divide; "
            "the nearest number of ranks that does: 2",
        ),
        (
            "context=4",
            ["--context-strategy", "hybrid=3x2"],
            "--context-strategy hybrid=3x2: the factors must multiply to context=4: hybrid=4x1, hybrid=2x2, hybrid=1x4",
        ),
        ("context=4", ["--context-strategy", "star"], "it must be one of ring, ulysses, allgather, auto or hybrid=RxU"),
        ("data=1", ["--attention", "splash"], "--attention splash: it does not run on cpu"),
        ("pipe=5", [], "--model.num-layers 4 is too few for pipe=5; each part needs a layer: take 5 or more"),
        ("pipe=2", ["--pipeline", "gpipe", "--spread-head"], "--spread-head does not go with --pipeline gpipe"),
        ("pipe=2", ["--pipeline", "terapipe", "--chunks", "2"], "terapipe"),
        ("pipe=2,context=2", ["--context-strategy", "ring"], "ring"),
    ],
)
def test_sizes_that_a_mesh_cannot_cut(mesh, args, message):
    config = parsed("--mesh", mesh, *args)
    num_devices = num_devices_of(mesh)
    with pytest.raises(ValueError, match=r".") as caught:
        setup.make_model(config, setup.make_mesh(config, jax.devices()[:num_devices]))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
