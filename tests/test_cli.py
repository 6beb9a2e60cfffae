"""The `jaxpar` command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar import verify
from jaxpar.config import Config, ParallelConfig
from meshes import parse_mesh
from models.presets import preset, preset_names

ROOT = Path(__file__).parent.parent


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
