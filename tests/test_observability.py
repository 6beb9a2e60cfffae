"""The loop and what is seen of it: rows, time, evaluation, stops, divergence, traces, trackers, reports."""

import base64
import dataclasses
import gzip
import io
import json
import math
import os
import re
import signal
import struct
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxpar import toml
from jaxpar.config import Config, DataConfig, OptimizerConfig, ParallelConfig, RunConfig
from jaxpar.training import loop, optimizers, setup
from jaxpar.training.distributed.interrupt import StopOnSignal
from jaxpar.training.reporting import html_report, progress, trackers
from jaxpar.training.reporting.memory import DeviceMemory
from jaxpar.training.reporting.metrics import Meter
from jaxpar.training.reporting.norms import group_norms
from jaxpar.training.reporting.profiler import Profile, parse_steps
from jaxpar.training.step import init_state, make_step
from jaxpar.verify import random_batch
from meshes import PeakFlops
from models.config import ModelConfig

MODEL = ModelConfig(vocab_size=250, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48)
CONFIG = Config(
    model=MODEL,
    data=DataConfig(batch_size=4, seq_len=16),
    optimizer=OptimizerConfig(warmup_steps=1),
    parallel=ParallelConfig(mesh="data=2,fsdp=2"),
    run=RunConfig(precision="float32", steps=6),
)
KEYS = ["step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds"]
KEYS += ["mfu", "mfu_causal", "hfu", "eval_loss", "memory_bytes", "data_seconds"]


class Training:
    """A real step on four devices; `run` gives the final state and keeps the rows and the steps saved."""

    def __init__(self):
        self.mesh = setup.make_mesh(CONFIG, jax.devices()[:4])
        model = setup.make_model(CONFIG, self.mesh)
        tx = optimizers.make(CONFIG.optimizer, CONFIG.run.steps, model.names)
        self.learning_rate = optimizers.schedule(CONFIG.optimizer, CONFIG.run.steps)
        with jax.set_mesh(self.mesh):
            self.initial = init_state(model, tx, 0)
            sharding = model.layout.sharding(model.layout.stacked_batch_spec())
            self.batch = jax.tree.map(lambda x: jax.device_put(x, sharding), random_batch(CONFIG))
            self.step = jax.jit(make_step(model, tx, 1.0)).lower(self.initial, self.batch).compile()
        self.memory = DeviceMemory(list(self.mesh.devices.flat), self.step)

    def run(self, rows: list, saved: list, *, step=None, state=None, first=0, stop_at=4, report=None, **settings):
        meter = Meter(CONFIG, 4, PeakFlops(1e12, "test"), self.learning_rate, first * 64, self.memory.peak_bytes)
        defaults = {
            "save": lambda state: saved.append(int(state.step)),
            "save_every": 0,
            "evaluate": None,
            "eval_every": 0,
            "profile": Profile(range(0), Path()),
            "should_stop": lambda step: False,
        }
        with jax.set_mesh(self.mesh):
            return loop.run(
                step or self.step,
                state or self.initial,
                lambda number: (self.batch, 0.25),
                meter,
                first=first,
                stop_at=stop_at,
                report=rows.append,
                **defaults | settings,
            )


@pytest.fixture(scope="module")
def training() -> Training:
    return Training()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # on the latter the loop runs a step ahead of its rows
def test_rows_and_what_is_not_in_a_steps_time(training, monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rows, saved = [], []

    def evaluate(state):
        time.sleep(0.3)
        return {"eval_loss": float(state.step), "eval_perplexity": 2.0, "eval_bits_per_byte": 3.0}

    def save(state):
        time.sleep(0.3)
        saved.append((int(state.step), len(rows)))

    start = time.perf_counter()
    training.run(rows, saved, evaluate=evaluate, eval_every=3, save=save, save_every=2)
    seconds = time.perf_counter() - start
    assert saved == [(2, 2), (4, 4)]  # a checkpoint's row is there before it
    evaluated = [*KEYS, "eval_perplexity", "eval_bits_per_byte"]
    assert [list(row) for row in rows] == [KEYS, KEYS, evaluated, evaluated]
    assert [row["eval_loss"] for row in rows] == [None, None, 3.0, 4.0]
    assert [row["data_seconds"] for row in rows] == [0.25] * 4
    assert 0 < sum(row["step_seconds"] for row in rows) <= seconds - 4 * 0.3
    assert rows[3]["loss"] < rows[0]["loss"] - 0.05


def test_memory_is_that_of_one_device_and_cheap(training):
    def per_device(tree) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    held = per_device((training.initial, training.batch))
    assert 2 * held < training.memory.peak_bytes() < 10 * held  # this step donates nothing: old and new state
    start = time.perf_counter()
    for _ in range(100):
        training.memory.peak_bytes()
    assert time.perf_counter() - start < 0.1
    assert str(training.memory).endswith("KiB a device, by the compiler's account of the step")


def test_a_stop_that_is_asked_for_saves_the_step(training):
    rows, saved = [], []
    state = training.run(
        rows, saved, should_stop=lambda step: len(rows) >= 1, evaluate=lambda state: 1 / 0, eval_every=0
    )
    assert int(state.step) == 2
    assert [row["step"] for row in rows] == [1, 2]
    assert saved == [2]


def test_signals_ask_once_and_end_the_second_time(capfd):
    with StopOnSignal() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested()
        assert stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "SIGINT: stopping after this step; once more: at once\n"
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def poisoned(step, at: int):
    """The step whose parameters are NaN after `at` steps."""

    def run(state, batch):
        state, metrics = step(state, batch)
        if int(state.step) == at:
            state = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * np.float32("nan"), state.params))
        return state, metrics

    return run


def test_a_loss_that_is_nan_ends_the_run_with_its_row(training):
    rows, saved = [], []
    message = r"^the loss of step 3 is nan; the last checkpoint is of step 1; start over \(--no-resume\) with a lower"
    with pytest.raises(ValueError, match=message):
        training.run(rows, saved, step=poisoned(training.step, 1), save_every=5, first=1)
    assert [row["step"] for row in rows] == [2, 3]
    assert math.isnan(rows[-1]["loss"])
    assert saved == []


def test_parameters_that_are_nan_are_not_saved(training):
    rows, saved = [], []
    with pytest.raises(ValueError, match=r"^step 2 left parameters that are nan or infinite; there is no checkpoint"):
        training.run(rows, saved, step=poisoned(training.step, 2), save_every=2)
    assert [row["step"] for row in rows] == [1, 2]
    assert np.isfinite(rows[-1]["loss"])
    assert saved == []


def test_group_norms_on_a_mesh(training):
    with jax.set_mesh(training.mesh):
        norms = jax.jit(group_norms)(training.initial.params)
    params = jax.device_get(training.initial.params)
    assert {"embedding", "head", "final_norm", "blocks.attention", "blocks.mlp"} <= norms.keys()
    attention = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params["blocks"]["attention"])])
    np.testing.assert_allclose(norms["blocks.attention"], np.linalg.norm(attention.astype(float)), rtol=1e-6)
    np.testing.assert_allclose(
        math.fsum(float(norm) ** 2 for norm in norms.values()),
        sum(np.sum(leaf.astype(float) ** 2) for leaf in jax.tree.leaves(params)),
        rtol=1e-6,
    )
    meter = Meter(CONFIG, 4, PeakFlops(1e12, "test"), training.learning_rate, 0, lambda: None)
    metrics = SimpleNamespace(
        routing={}, loss=1.0, grad_norm=1.0, num_tokens=4.0, norms={"head": (np.float32(2), np.float32(3))}
    )
    assert meter.row(1, metrics, 0.0)["norms"] == {"head": [2.0, 3.0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "--profile 3 is not START:STOP; give two steps, as in 10:12"),
        ("a:b", "--profile a:b is not START:STOP"),
        ("0:2", "--profile 0:2 must be steps in order, from 1 to the run's last, 4"),
        ("3:2", "must be steps in order"),
        ("3:5", "must be steps in order"),
    ],
)
def test_a_profile_that_cannot_be_is_said_at_once(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_steps(text, 4)


@pytest.mark.parametrize(("first", "stop_early", "traced"), [(0, False, {2, 3}), (2, False, {3}), (0, True, {2})])
def test_a_profile_traces_its_steps(training, tmp_path, first, stop_early, traced):
    rows = []
    profile = Profile(parse_steps("2:3", 4), tmp_path / "profile")
    with closing(profile):
        training.run(rows, [], first=first, profile=profile, should_stop=lambda step: stop_early and len(rows) == 1)
    (path,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {int(event["args"]["step_num"]) for event in events if event.get("name") == "train"} == traced
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert not list(tmp_path.glob("profile/*.trace.json.gz"))


def tensorboard_scalars(folder: Path) -> dict[tuple[str, int], float]:
    from tensorboardX.proto.event_pb2 import Event

    scalars = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:  # TFRecord: length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    scalars[value.tag, event.step] = value.simple_value
    return scalars


def test_tensorboard_has_every_number(training, tmp_path, caplog):
    rows = []
    with closing(trackers.Trackers.start(["tensorboard"], tmp_path, CONFIG, first=0)) as tracking:
        training.run(rows, [], stop_at=2, evaluate=lambda state: {"eval_loss": 2.5}, eval_every=2)
        rows[1]["norms"] = {"blocks.mlp": [2.0, 0.5]}
        for row in rows:
            tracking.log(row)

        tracking.trackers["broken"] = SimpleNamespace(log=lambda step, scalars: 1 / 0)
        tracking.log({"step": 3, "loss": 1.0})
        tracking.log({"step": 4, "loss": 0.5})
    assert [record.message for record in caplog.records] == [
        "tracker broken failed at step 3 and is left out: division by zero"
    ]
    scalars = tensorboard_scalars(tmp_path / "tensorboard")
    for row in rows:
        for key in KEYS[1:]:
            if row[key] is not None:
                np.testing.assert_allclose(scalars[key, row["step"]], row[key], rtol=1e-6)
    assert ("eval_loss", 1) not in scalars
    assert scalars["eval_loss", 2] == 2.5
    assert (scalars["norms/params/blocks.mlp", 2], scalars["norms/grads/blocks.mlp", 2]) == (2.0, 0.5)
    assert scalars["loss", 4] == 0.5


def test_trackers_that_cannot_be_are_said_at_once(monkeypatch, tmp_path):
    assert trackers.parse_trackers(" tensorboard, tensorboard,") == ("tensorboard",)
    with pytest.raises(ValueError, match=r"^--trackers: unknown tracker 'tensorbord'; did you mean 'tensorboard'\?$"):
        trackers.parse_trackers("tensorbord")
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(ValueError, match=r"^--trackers tensorboard does not start: .*; or leave it out$"):
        trackers.Trackers.start(["tensorboard"], tmp_path, CONFIG, first=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--trackers wandb: wandb is not installed; pip install wandb$"):
        trackers.parse_trackers("wandb")


def test_lines_show_an_evaluation_where_there_was_one(training):
    console = Console(file=io.StringIO(), width=200)
    rows = []
    training.run(rows, [], stop_at=2)
    with progress.ProgressReport(console, 0, 100) as bar:
        for number, eval_loss in ((3, None), (4, 2.5), (5, None)):
            bar.update(rows[0] | {"step": number, "eval_loss": eval_loss})
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 4/100", "step 5/100"]
    assert lines[0].endswith("eval loss 2.5000")
    assert "eval" not in lines[1]


def test_the_report_is_one_page_of_what_there_is(training, tmp_path):
    rows = []
    training.run(rows, [], evaluate=lambda state: {"eval_loss": float(state.step)}, eval_every=2)
    older = {key: rows[0][key] for key in ("step", "loss", "tokens", "tokens_per_second")}
    odd = rows[3] | {"step": 5, "loss": math.nan, "grad_norm": math.inf, "memory_bytes": None, "tokens": 320}
    config = toml.dumps(dataclasses.replace(CONFIG, run=dataclasses.replace(CONFIG.run, trackers="<b>")))
    path = tmp_path / "report.html"
    html_report.write_report([older, *rows[1:], odd], config, path)
    page = path.read_text()
    pictures = re.findall(r'<img alt="([^"]+) over steps" src="data:image/svg\+xml;base64,([^"]+)">', page)
    assert [title for title, _ in pictures] == [plot.title for plot in html_report.plots(rows)]
    assert all(b"</svg>" in base64.b64decode(picture) for _, picture in pictures)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    for label, value in {
        "parameters": "31,520",
        "mesh": "data=2,fsdp=2",
        "devices": "4",
        "steps": "5",
        "tokens": "320",
        "best loss": f"{rows[3]['loss']:.4f}",
        "best eval loss": "2.0000",
    }.items():
        assert f"<dt>{label}</dt><dd>{value}</dd>" in page
    html_report.write_report([older], config, path)
    assert path.read_text().count("<img") == 2
    html_report.write_report([], config, path)
    assert path.read_text().count("<img") == 0


def test_a_curve_is_smoothed_and_keeps_its_ends():
    steps = np.arange(1, 100_001)
    values = 1 + 4 * np.exp(-steps / 5000)
    values[::1000] = 1000
    at, smooth = html_report.smoothed(steps, values)
    assert len(at) == html_report.MAX_POINTS
    assert at[-1] == steps[-1]
    np.testing.assert_allclose(smooth, 1 + 4 * np.exp(-at / 5000), rtol=0.05)
    kept, _ = html_report.thinned(steps, values)
    assert (len(kept), kept[0], kept[-1]) == (html_report.MAX_POINTS, 1, 100_000)
