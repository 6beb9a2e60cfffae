"""Rung 6 of the ladder: several processes, connected by gloo, give the losses of one; and end well when one is lost.

Each run is train.py as a user starts it, each process with two emulated devices.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxpar.training.distributed.rendezvous import Rendezvous

ROOT = Path(__file__).parent.parent
MODEL = """
name = "small"
vocab_size = 256
embed_dim = 16
num_layers = 2
num_heads = 4
num_kv_heads = 4
head_dim = 4
mlp_dim = 32
"""
SETTINGS = [
    *("--model", "model.toml", "--data", "text.txt", "--precision", "float64", "--steps", "3", "--batch-size", "8"),
    *("--seq-len", "8", "--warmup-steps", "1", "--run.sample-tokens", "2"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A directory with a model and a text, and a cache of compiled programs for all runs."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "model.toml").write_text(MODEL)
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text(" ".join(rng.choice(["mesh", "axis", "shard", "gather"], 1000)))
    return folder


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(work: Path, run_dir: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "train.py"), "--run-dir", run_dir, *SETTINGS, *args]
    env = os.environ | {"XDG_CACHE_HOME": str(work / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=work, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def start_all(work: Path, run_dir: str, num_processes: int, *args: str) -> list[subprocess.Popen[str]]:
    together = ["--emulate", "2", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(num_processes)]
    return [start(work, run_dir, *together, *args, "--process-id", str(n)) for n in range(num_processes)]


def finish(*processes: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """What each wrote on its standard output and error; all must succeed."""
    try:
        ends = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ends):
        assert process.returncode == 0, errors
    return ends


def curve(work: Path, run_dir: str) -> np.ndarray:
    rows = [json.loads(line) for line in (work / run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return np.array([[row["loss"], row["grad_norm"]] for row in rows])


@pytest.fixture(scope="module")
def single(work) -> np.ndarray:
    """Losses and gradient norms on one device."""
    finish(start(work, "single", "--emulate", "1"))
    losses = curve(work, "single")
    assert losses.shape == (3, 2)
    assert losses[-1, 0] < losses[0, 0] - 0.01
    return losses


def test_four_processes_write_one_run_with_the_numbers_of_one_device(work, single):
    ends = finish(*start_all(work, "four", 4, "--mesh", "data=2,fsdp=2,tensor=2"))
    np.testing.assert_allclose(curve(work, "four"), single, rtol=1e-9)
    assert "step 3/3" in ends[0][0]
    assert [out for out, _ in ends[1:]] == ["", "", ""]
    assert (work / "four" / "loss.png").exists()
    assert 'coordinator = ""' in (work / "four" / "config.toml").read_text()


def test_two_processes_save_and_one_or_two_go_on(work, single):
    """Each of the two has a half of every matmul: `tensor` lies across them."""
    finish(*start_all(work, "resumed", 2, "--mesh", "tensor=4", "--stop-at", "1"))
    finish(
        start(
            work,
            "resumed",
            "--emulate",
            "4",
            "--mesh",
            "data=2,fsdp=2",
            "--zero",
            "2",
            "--remat",
            "sqrt",
            "--stop-at",
            "2",
        )
    )
    finish(*start_all(work, "resumed", 2, "--mesh", "data=2,tensor=2", "--zero", "1", "--resume"))
    np.testing.assert_allclose(curve(work, "resumed"), single, rtol=1e-9)


def test_processes_of_different_settings_do_not_train_together(work):
    port = free_port()
    together = ["--emulate", "2", "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"]
    processes = [start(work, "different", *together, "--process-id", str(n), "--seed", str(n)) for n in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode in (1, 2)  # whichever leaves first, the other may note that too
        assert "process 1 was started with run.seed = 1, process 0 with 0; give all the same" in errors
    assert not (work / "different").exists()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_others_with_a_line_that_names_it(work, lost):
    processes = start_all(work, f"lost{lost}", 2, "--steps", "100000")
    metrics = work / f"lost{lost}" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 150
        while not (metrics.exists() and metrics.read_text()):
            assert time.monotonic() < deadline
            assert processes[0].poll() is None, processes[0].communicate()[1]
            time.sleep(0.1)
        processes[lost].kill()
        began = time.monotonic()
        _, errors = processes[1 - lost].communicate(timeout=60)
        assert time.monotonic() - began < 20
    finally:
        for process in processes:
            process.kill()
    assert processes[1 - lost].returncode != 0
    assert f"error: process {1 - lost} of 2: process {lost} has gone" in errors


def test_sigterm_to_one_process_saves_all(work):
    processes = start_all(work, "stopped", 2, "--steps", "100000")
    metrics = work / "stopped" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()) and processes[0].poll() is None:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    (out, _), _ = finish(*processes)
    last = len(curve(work, "stopped"))
    assert f"stopped after step {last}, which is saved" in out
    assert (work / "stopped" / "checkpoints" / str(last)).is_dir()


def meet(*processes: Rendezvous, timeout_seconds: float = 10) -> list[str]:
    """What goes wrong for each of the processes, each a thread here; "" for those that meet."""

    def one(process: Rendezvous) -> str:
        try:
            for connection in process.meet(timeout_seconds).connections.values():
                connection.close()
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_processes_that_do_not_meet_are_told_why():
    def of(process_id: int, num_processes: int = 3, at: str = f"127.0.0.1:{free_port()}") -> Rendezvous:
        return Rendezvous(at, num_processes, process_id)

    assert meet(of(2), of(0), of(1)) == ["", "", ""]
    assert meet(of(0), of(1), of(1)) == ["two processes have --process-id 1; number them from 0 on"] * 3
    assert set(meet(of(0), of(1, 4))) == {
        "process 1 was started with --num-processes 4, process 0 with 3; give all the same"
    }
    missing = meet(of(0), of(1), timeout_seconds=0.5)
    assert missing[0] == missing[1]
    assert missing[0].startswith("of 3 processes, process 2 did not come to 127.0.0.1:")
    (alone,) = meet(of(2), timeout_seconds=0.5)
    assert "process 2 of 3 did not reach process 0 at" in alone
    assert "Connection refused" in alone
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (in_use,) = meet(of(0, at=f"127.0.0.1:{taken.getsockname()[1]}"))
    assert "Address already in use" in in_use
    assert "\n" not in in_use
    for bad in ("localhost", "localhost:0", ":1234", "localhost:http", "no.such.host.invalid:1234"):
        (refused,) = meet(of(0, at=bad))
        assert refused.startswith("--coordinator")
        assert bad in refused
