"""The `jaxpar` command."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxpar import cli, verify
from jaxpar.config import Config, ParallelConfig
from jaxpar.training import setup
from jaxpar.training.checkpoints import export
from jaxpar.training.checkpoints.checkpoint import Checkpoints
from jaxpar.training.step import init_state
from jaxpar.verify import true_sizes
from meshes import parse_mesh
from models.config import ModelConfig
from models.count import num_parameters
from models.presets import preset, preset_names

ROOT = Path(__file__).parent.parent
SMALL = ModelConfig(vocab_size=250, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=24)


def jaxpar(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from jaxpar.cli import main; main()", *args]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_models():
    done = jaxpar("models", "--json")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert set(counts) == set(preset_names())
    assert counts["llama3-8b"] == 8030261248
    assert "8,030,261,248" in jaxpar("models").stdout


def test_verify():
    done = jaxpar("verify", "--mesh", "data=2,fsdp=2,tensor=2", "--model", "qwen2.5-0.5b", "--json")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["ok"] is True
    assert verdict["init_bitwise_equal"] is True
    assert 0 < verdict["max_gradient_error"] < 1e-9
    assert verdict["worst_parameter"]
    assert verdict["collectives"]["data"]["all-reduce"]["count"] >= 1
    for axes, ops in verdict["collectives_expected"].items():
        for op, size in ops.items():
            assert verdict["collectives"][axes][op]["bytes"] == pytest.approx(size["bytes"], rel=0.01, abs=1024)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["verify", "--mesh", "fsdp=4,tenser=2"], "did you mean 'tensor'?"),
        (["verify", "--mesh", "fsdp=64"], "64 devices; verify runs it on emulated ones, 32 at most"),
        (["verify", "--mesh", "tensor=3", "--model", "llama3-8b"], "num-heads 32 is not divisible by tensor=3"),
        (["models", "--jsn"], "unknown flag --jsn"),
    ],
)
def test_bad_input_is_one_line(args, message):
    done = jaxpar(*args)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_layout_does_not_pass():
    mesh = parse_mesh("data=2,fsdp=4", 8)
    config = Config(model=preset("llama3-8b"), parallel=ParallelConfig(mesh="data=2,fsdp=4"))
    expected = verify.expected_traffic(verify.small(config, mesh, scale=32), mesh)
    found = {axes: {op: {"count": 1, "bytes": size} for op, size in ops.items()} for axes, ops in expected.items()}
    assert verify.agree(found, expected)
    doubled = found | {"data": {"all-reduce": {"count": 1, "bytes": 2 * expected["data"]["all-reduce"]}}}
    assert not verify.agree(doubled, expected)
    surplus = found | {"fsdp+tensor": {"all-gather": {"count": 1, "bytes": expected["data"]["all-reduce"]}}}
    assert not verify.agree(surplus, expected)


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "tensor=16", "fsdp=3"])
def test_a_shrunk_model_keeps_its_structure(name, mesh):
    config = Config(model=preset(name))
    sizes = parse_mesh(mesh, 8 if "4" in mesh else 16 if "16" in mesh else 3)
    if config.model.num_heads % sizes["tensor"]:
        return  # not a layout that could be verified
    small = verify.small(config, sizes, scale=1).model.check()
    assert small.num_heads // small.num_kv_heads == config.model.num_heads // config.model.num_kv_heads
    assert (small.num_kv_heads % sizes["tensor"] == 0) == (config.model.num_kv_heads % sizes["tensor"] == 0)
    assert (small.embed_dim % sizes["fsdp"] == 0) == (config.model.embed_dim % sizes["fsdp"] == 0)
    assert small.num_heads % sizes["tensor"] == small.mlp_dim % sizes["tensor"] == 0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run with whole checkpoints of steps 1 and 2 and a damaged one of step 3; it keeps a moving average."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    config = Config(model=SMALL)
    model = setup.make_model(config, setup.make_mesh(config, jax.devices()[:2]))
    tx = optax.chain(optax.sgd(0.1), average_params(0.9))
    with Checkpoints(path / "checkpoints", model, tx, config) as checkpoints:
        state = init_state(model, tx, seed=0)
        for step in (1, 2, 3):
            checkpoints.save(dataclasses.replace(state, step=state.step + step))
    (path / "checkpoints" / "3" / "state" / "_METADATA").write_text("{}")
    return path


def average_params(decay: float) -> optax.GradientTransformation:
    """Of the initial parameters alone: twice these, to be told from them."""
    return optax.GradientTransformation(
        lambda params: AverageState(jax.tree.map(lambda p: p * 2, params)), lambda updates, state, _: (updates, state)
    )


class AverageState(NamedTuple):
    params: dict


def test_checkpoint_ls(run_dir):
    done = jaxpar("checkpoint", "ls", str(run_dir), "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert [(row["step"], row["damage"]) for row in listed] == [
        (1, None),
        (2, None),
        (3, "state/_METADATA is damaged"),
    ]
    files = [path for path in (run_dir / "checkpoints" / "1").rglob("*") if path.is_file()]
    assert listed[0]["size"] == sum(path.stat().st_size for path in files)
    assert 0 <= time.time() - listed[0]["time"] < 600
    table = jaxpar("checkpoint", "ls", str(run_dir)).stdout
    assert "damaged: state/_METADATA is damaged" in table
    assert "0d 00:0" in table


def test_checkpoint_show(run_dir):
    done = jaxpar("checkpoint", "show", str(run_dir), "--json")
    assert done.returncode == 0, done.stderr
    assert "3 is passed over: state/_METADATA is damaged" in done.stderr
    shown = json.loads(done.stdout)
    count = num_parameters(SMALL)
    assert (shown["count"], shown["bytes"], shown["state_bytes"]) == (count, 4 * count, 8 * count + 4)
    assert shown["position"] == {"step": 2, "sequences": 32, "tokens": 4096}
    assert shown["config"]["model"]["vocab_size"] == 250
    assert shown["parameters"]["embedding"] == {"shape": [250, 16], "dtype": "float32", "count": 4000}
    text = jaxpar("checkpoint", "show", str(run_dir / "checkpoints" / "1")).stdout
    assert "step 1 of 200, 2,048 tokens of stdlib" in " ".join(text.split())
    assert f"{count:,} parameters, {4 * count:,} bytes" in text


@pytest.mark.parametrize(("dtype", "ema"), [(None, False), ("bfloat16", False), ("float16", True)])
def test_checkpoint_convert(run_dir, tmp_path, dtype, ema):
    to = tmp_path / "model.safetensors"
    flags = [*(["--dtype", dtype] if dtype else []), *(["--ema"] if ema else [])]
    done = jaxpar("checkpoint", "convert", str(run_dir / "checkpoints" / "2"), "--to", str(to), *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"model.safetensors: {to.stat().st_size:,} bytes\n")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]

    config = Config(model=SMALL)
    model = setup.make_model(config, None)
    want = true_sizes(model, jax.tree.map(lambda p: p * (1 + ema), model.init(seed=0)))
    got = load_file(to)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value.astype(jnp.dtype(dtype or "float32")), err_msg=name)
        assert got[name].dtype == (dtype or "float32")
    with safe_open(to, "numpy") as file:
        metadata = file.metadata()
    assert tomllib.loads(metadata["config"])["model"]["vocab_size"] == 250
    assert metadata["step"] == "2"


def test_a_file_is_overwritten_only_when_told_to(run_dir, tmp_path, monkeypatch):
    to = tmp_path / "model.safetensors"
    to.write_text("precious")
    with pytest.raises(ValueError, match=r"exists; give --force to overwrite it, or another --to"):
        export.convert(run_dir / "checkpoints" / "2", to)
    assert to.read_text() == "precious"
    monkeypatch.chdir(run_dir)  # Orbax wants absolute paths, a user does not
    size = export.convert(Path("checkpoints") / "2", to, "float32", force=True)
    assert to.stat().st_size == size > 8


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ls", "."], ". is not a run directory, having no checkpoints/"),
        (["show", "RUN/checkpoints/9"], "has no checkpoint of step 9; there: 1, 2, 3"),
        (["show", "RUN/checkpoints/3"], "3 is damaged: state/_METADATA is damaged; give another"),
        (["convert", "RUN", "--to", "x.safetensors", "--dtype", "bfloat15"], "did you mean 'bfloat16'?"),
        (["convert", "RUN", "--to", "x.bin"], "end it with .safetensors"),
        (["convert", "RUN", "--to", "absent/x.safetensors"], "cannot write absent/x.safetensors: No such file"),
        (["convert", "RUN"], "required: --to"),
        (["convert", "RUN", "--to", "x.safetensors", "--emma"], "unknown flag --emma; known: --dtype, --ema"),
        (["lst", "RUN"], "invalid choice: 'lst'"),
    ],
)
def test_bad_input_about_checkpoints_is_one_line(run_dir, capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(["checkpoint", *(arg.replace("RUN", str(run_dir)) for arg in args)])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    assert message in lines[-1]
