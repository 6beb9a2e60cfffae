"""The main job as a user runs it: commands in processes of their own."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
KEYS = ["step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds"]
KEYS += ["mfu", "mfu_causal", "hfu", "eval_loss", "memory_bytes", "data_seconds"]
SETTINGS = [
    *("--model", "tiny", "--precision", "float32", "--steps", "4", "--batch-size", "16", "--seq-len", "32"),
    *("--seed", "0", "--model.num-layers", "2", "--run.sample-tokens", "8", "--warmup-steps", "2"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A directory with text that takes part in every run, and a cache of compiled programs for all of them."""
    folder = tmp_path_factory.mktemp("train")
    rng = np.random.default_rng(0)
    words = ["mesh", "axis", "shard", "gather", "reduce", "scatter", "token", "batch"]
    (folder / "text.txt").write_text(" ".join(rng.choice(words, 4000)))
    return folder


def train(work: Path, run_dir: str, *args: str, settings: list[str] = SETTINGS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), "--data", "text.txt", "--run-dir", run_dir, *settings, *args]
    env = os.environ | {"XDG_CACHE_HOME": str(work / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=300, check=False)


def metrics(work: Path, run_dir: str) -> list[dict]:
    return [json.loads(line) for line in (work / run_dir / "metrics.jsonl").read_text().splitlines()]


def check_equal(rows: list[dict], want: list[dict], rtol: float) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in want]
    for key in ("loss", "grad_norm", "learning_rate", "tokens"):
        np.testing.assert_allclose([row[key] for row in rows], [row[key] for row in want], rtol=rtol, err_msg=key)


@pytest.fixture(scope="module")
def single(work) -> list[dict]:
    """The rows of an undisturbed run on one device."""
    done = train(work, "single", "--emulate", "1", "--mesh", "data=1")
    assert done.returncode == 0, done.stderr
    return metrics(work, "single")


def test_a_run_leaves_what_it_should(work, single):
    assert [row["step"] for row in single] == [1, 2, 3, 4]
    for row in single:
        assert list(row) == KEYS
        assert row["step_seconds"] > 0
        assert 0 < row["mfu_causal"] < row["mfu"] < row["hfu"]
        assert row["tokens_per_second"] == pytest.approx(16 * 32 / row["step_seconds"])
    assert abs(single[0]["loss"] - np.log(256)) < 0.1
    assert single[-1]["loss"] < single[0]["loss"] - 0.1
    config = tomllib.loads((work / "single" / "config.toml").read_text())
    assert list(config) == ["model", "data", "optimizer", "parallel", "run"]
    assert (config["model"]["num_layers"], config["parallel"]["mesh"]) == (2, "data=1")
    assert (work / "single" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (work / "single" / "checkpoints" / "4").is_dir()


def test_eight_devices_give_the_numbers_of_one(work, single):
    done = train(work, "eight", "--emulate", "8", "--mesh", "data=2,fsdp=2,tensor=2", "--grad-accumulation", "2")
    assert done.returncode == 0, done.stderr
    check_equal(metrics(work, "eight"), single, 1e-5)


def test_a_stopped_run_goes_on_on_another_mesh(work, single):
    stopped = train(work, "resumed", "--emulate", "8", "--mesh", "fsdp=2,tensor=4", "--stop-at", "2")
    assert stopped.returncode == 0, stopped.stderr
    assert [row["step"] for row in metrics(work, "resumed")] == [1, 2]
    done = train(work, "resumed", "--emulate", "4", "--mesh", "data=2,fsdp=2", "--resume", "--checkpoint-every", "3")
    assert done.returncode == 0, done.stderr
    assert "resumed resumed after step 2" in done.stdout
    check_equal(metrics(work, "resumed"), single, 1e-5)
    steps = sorted(int(path.name) for path in (work / "resumed" / "checkpoints").iterdir() if path.name.isdigit())
    assert steps == [2, 3, 4]

    again = train(work, "resumed", "--emulate", "1")
    assert "is at step 4 already: nothing to do" in again.stdout
    assert metrics(work, "resumed")[-1]["step"] == 4


def test_a_config_is_reloadable(work, single):
    done = train(work, "reloaded", "--config", "single/config.toml", "--stop-at", "2", settings=[])
    assert done.returncode == 0, done.stderr
    check_equal(metrics(work, "reloaded"), single[:2], 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--run-dir", "single", "--emulate", "1", "--learning-rate", "1"], "optimizer.learning_rate = 0.003, not 1.0"),
        (["--emulate", "8", "--mesh", "data=3,fsdp=2"], "8 devices"),
        (["--emulate", "2", "--stepz", "3"], "unknown flag --stepz; did you mean '--steps'?"),
    ],
)
def test_bad_input_is_one_line_and_no_run(work, single, args, message):
    done = train(work, "bad", *args)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert not (work / "bad").exists()
