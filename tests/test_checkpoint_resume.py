"""A run that was stopped goes on as if it never had been."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_train import ROOT, check_equal, metrics, train

RUN = [
    *("--model", "tiny", "--precision", "float32", "--steps", "20", "--batch-size", "8", "--seq-len", "32"),
    *("--model.num-layers", "1", "--run.sample-tokens", "0", "--warmup-steps", "2"),
]
MESH = ("--emulate", "4", "--mesh", "fsdp=2,tensor=2")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A directory with a text, an undisturbed run and one that was stopped."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "text.txt").write_text(" ".join(f"{n} times {n} is {n * n}," for n in range(2000)))
    for run_dir, args in (
        ("whole", ["--checkpoint-every", "6", "--keep-checkpoints", "1"]),
        ("half", ["--stop-at", "10"]),
    ):
        done = train(folder, run_dir, *MESH, *args, settings=RUN)
        assert done.returncode == 0, done.stderr
    return folder


def test_bitwise_on_the_same_mesh(work):
    shutil.copytree(work / "half", work / "resumed")
    done = train(work, "resumed", *MESH, settings=RUN)
    assert done.returncode == 0, done.stderr
    assert "resumed resumed after step 10" in done.stdout
    check_equal(metrics(work, "resumed"), metrics(work, "whole"), rtol=0)
    assert [path.name for path in (work / "whole" / "checkpoints").iterdir()] == ["20"]


def test_on_another_mesh_from_the_newest_whole_checkpoint(work):
    shutil.copytree(work / "half", work / "moved")
    shutil.copytree(work / "whole" / "checkpoints" / "20", work / "moved" / "checkpoints" / "20")
    (work / "moved" / "checkpoints" / "20" / "commit_success.txt").write_text("?")
    done = train(work, "moved", "--emulate", "2", "--mesh", "fsdp=2", settings=RUN)
    assert done.returncode == 0, done.stderr
    assert re.search("20 is passed over: commit_success.txt is damaged", done.stderr)
    check_equal(metrics(work, "moved"), metrics(work, "whole"), rtol=1e-5)


def test_a_run_that_cannot_save_says_so_and_goes_on(work):
    """Its checkpoints are larger than the largest file that it may write; its metrics are not."""
    shutil.copytree(work / "half", work / "full")
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1));"
        f"runpy.run_path('{ROOT}/train.py', run_name='__main__')"
    )
    args = ["--data", "text.txt", "--run-dir", "full", *RUN, *MESH, "--checkpoint-every", "5"]
    env = os.environ | {"XDG_CACHE_HOME": str(work / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", limited, *args]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    for step in (15, 20):
        assert re.search(f"checkpoint of step {step} not saved: .*; training goes on, step 10 is the last", done.stderr)
    assert "error: step 20 is done, but not saved (the last checkpoint: of step 10)" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    check_equal(metrics(work, "full"), metrics(work, "whole"), rtol=0)
    assert [path.name for path in (work / "full" / "checkpoints").iterdir()] == ["10"]
