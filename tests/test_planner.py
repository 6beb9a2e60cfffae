"""The search finds what trying everything finds; what falls out says why; `jaxpar plan` prints it."""

import json
import math
import time

import numpy as np
import pytest

from jaxpar.cli import main
from jaxpar.parallel.axes import BATCH_AXES
from jaxpar.planning import space
from jaxpar.planning.calibration import calibration_table
from jaxpar.planning.conventions import CONVENTIONS
from jaxpar.planning.memory import Cases, Footprint, memory
from jaxpar.planning.planner import plan
from jaxpar.planning.schedules import bubble
from jaxpar.planning.space import Request
from jaxpar.planning.step_time import least_steps, predict, steps
from meshes import MESH_AXES
from meshes.clusters import load_cluster
from models.config import ModelConfig
from models.presets import preset

SMALL = ModelConfig(
    vocab_size=8192, embed_dim=4096, num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336
)
MIXTURE = SMALL.replace(num_experts=2, num_experts_per_token=2, expert_mlp_dim=7168)


def layout_of(job) -> tuple[int, ...]:
    return tuple(job.mesh[axis] for axis in MESH_AXES if axis not in ("data", "fsdp"))


def tried(request: Request, framework: str):
    """(seconds, bytes, job) of all that fits."""
    calibration, convention = calibration_table().of(request.cluster.chip, framework), CONVENTIONS[framework]
    for mesh in space.meshes(request):
        if space.obstacle(request, mesh) is not None:
            continue
        for setting in space.settings(request, mesh):
            for count in space.microbatches(request, mesh):
                for remat in space.remats(request, mesh["pipe"]):
                    for kind, chunks in space.schedules(request, mesh["pipe"]):
                        job = space.job(request, setting, count, remat, kind, chunks).check()
                        found = memory(job, convention)
                        if found.fits:
                            yield predict(job, calibration).step, found.fullest.total, job


@pytest.mark.parametrize(
    ("model", "devices", "batch_size", "framework"),
    [(SMALL, 8, 4, "jaxpar"), (MIXTURE, 4, 4, "jaxpar"), (SMALL, 8, 2, "megatron-core")],
)
def test_the_search_finds_what_trying_everything_finds(model, devices, batch_size, framework):
    request = Request(model, load_cluster("dgx-h100"), devices, 16384, batch_size)
    everything = sorted(tried(request, framework), key=lambda each: each[0])
    best: dict[tuple[int, ...], float] = {}
    front: list[tuple[float, float]] = []
    for seconds, size, job in everything:
        best.setdefault(layout_of(job), seconds)
        if not front or size < front[-1][1]:
            front.append((seconds, size))
    assert len(everything) > 500
    found = plan(request, top=6, framework=framework)
    assert [choice.time.step for choice in found.ranked] == pytest.approx(list(best.values())[:6], rel=1e-9)
    assert [layout_of(choice.job) for choice in found.ranked] == list(best)[:6]
    assert [choice.bytes for choice in found.front][-1] == pytest.approx(front[-1][1], rel=1e-9)
    # Of jobs that take as long, whichever comes first: what is found is as fast and as small as any.
    for choice in found.front:
        assert not any(s < choice.time.step * (1 - 1e-9) and b <= choice.bytes * (1 + 1e-9) for s, b in front)
    for seconds, size in front:
        assert any(c.time.step <= seconds * (1 + 1e-9) and c.bytes <= size * (1 + 1e-9) for c in found.front)


LLAMA3 = Request(preset("llama3-405b"), load_cluster("llama3-h100"), 16384, 8192, 2048)


MIXTURE3 = Request(preset("qwen3-235b-a22b"), load_cluster("llama3-h100"), 16384, 4096, 8192)


@pytest.mark.slow
@pytest.mark.parametrize("request_", [LLAMA3, MIXTURE3], ids=["dense", "mixture"])
def test_a_search_takes_seconds(request_):
    """Over all axes and schedules: of one core 2 and 7 seconds, to which what else runs on it may add its share."""
    start = time.process_time()
    found = plan(request_, top=5)
    assert len(found.ranked) == 5
    assert time.process_time() - start < 20


@pytest.mark.parametrize(("model", "framework"), [(SMALL, "jaxpar"), (MIXTURE, "jaxpar"), (MIXTURE, "megatron-core")])
def test_many_at_once_are_as_each_alone(model, framework):
    """Bytes, and steps, which the search's bound does not exceed."""
    request = Request(model, load_cluster("dgx-h100"), 16, 8192, 8)
    calibration, convention = calibration_table().of(request.cluster.chip, framework), CONVENTIONS[framework]
    families = {}
    for mesh in space.meshes(request):
        if space.obstacle(request, mesh) is None:
            for setting in space.settings(request, mesh):
                families.setdefault(setting.family, []).append(setting)
    remat, tightest = ("full", False), 0.0
    for (stages, *_), alike in families.items():
        schedules, counts = space.schedules(request, stages)[::3], (1, 2)
        many = space.jobs(request, space.together(alike), counts, remat, schedules)
        idle = np.array([[bubble(kind, stages, m, chunks) for kind, chunks in schedules] for m in counts])[..., None]
        least = least_steps(many, calibration, idle)
        cases = Cases.of(model.num_layers, stages, counts, schedules, convention.is_one_program)
        size = Footprint(many, convention, cases).with_remat(*remat).total.max(-1, keepdims=True)
        shape = len(alike), len(counts), len(schedules), 1
        least, size = np.broadcast_to(least, shape), np.broadcast_to(size, shape)
        for n, setting in enumerate(alike):
            found = steps(space.jobs(request, setting, counts, remat, schedules), calibration, idle)
            found = np.broadcast_to(found, shape[1:])
            for row, count in enumerate(counts):
                if request.batch_size % (math.prod(setting.mesh[axis] for axis in BATCH_AXES) * count):
                    continue
                for column, (kind, chunks) in enumerate(schedules):
                    job = space.job(request, setting, count, remat, kind, chunks).check()
                    seconds = predict(job, calibration).step
                    assert found[row, column, 0] == pytest.approx(seconds, rel=1e-12)
                    assert least[n, row, column, 0] <= seconds * (1 + 1e-12)
                    assert size[n, row, column, 0] == pytest.approx(memory(job, convention).fullest.total, rel=1e-12)
                    tightest = max(tightest, least[n, row, column, 0] / seconds)
    assert tightest > 0.99


def test_llama3_405b_at_16384_devices():
    """Meta's own layout (arXiv 2407.21783, table 4) is among the first five."""
    found = plan(LLAMA3, top=5)
    assert (16, 1, 1, 8) in [layout_of(choice.job) for choice in found.ranked]
    assert all(choice.memory.fits for choice in found.ranked)


def test_llama3_405b_on_long_sequences():
    request = Request(preset("llama3-405b"), load_cluster("llama3-h100"), 16384, 131072, 128)
    assert (16, 1, 16, 8) in [layout_of(choice.job) for choice in plan(request, top=5).ranked]


def test_what_falls_out_says_why():
    request = Request(preset("llama3-405b"), load_cluster("dgx-h100"), 64, 8192, 64)
    found = plan(request, top=1)
    reasons = {rejection.kind: rejection for rejection in found.rejections}
    assert "GB/s, not 450" in reasons["crosses a slow link"].reason
    assert reasons["crosses a slow link"].mesh["tensor"] > 8
    too_large = reasons["does not fit"]
    assert "GiB at least" in too_large.reason
    assert too_large.excess > 0
    assert sum(found.counts().values()) + len({tuple(c.job.mesh.values()) for c in found.ranked}) <= found.num_meshes


def run(capsys, *flags: str) -> str:
    main(["plan", *flags])
    return capsys.readouterr().out


ASKED = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "16", "--seq-len", "8192", "--batch-size", "32")


def test_json(capsys, tmp_path):
    rows = json.loads(run(capsys, *ASKED, "--top", "3", "--json", "--plot", str(tmp_path / "memory.svg")))
    assert len(rows) == 3
    assert all((tmp_path / f"{name}.svg").stat().st_size > 1000 for name in ("memory", "memory-time"))
    for row in rows:
        assert set(row) == {
            "mesh", "pipeline", "microbatches", "remat", "memory_bytes", "traffic_bytes", "seconds",
            "tokens_per_second_per_device", "mfu", "hfu", "fits",
        }  # fmt: skip
        parts = {"parameters", "gradients", "optimizer", "activations", "other"}
        assert set(row["memory_bytes"]) == parts | {"total", "limit"}
        assert sum(row["memory_bytes"][part] for part in parts) == row["memory_bytes"]["total"]
        assert set(row["seconds"]) == {"compute", "exposed", "bubble", "optimizer", "step"}
        parts = dict(row["seconds"])
        step = parts.pop("step")
        assert sum(parts.pop("exposed").values()) + sum(parts.values()) == pytest.approx(step)
        assert math.prod(row["mesh"].values()) == 16
        assert row["fits"] is True
        assert 0.1 < row["mfu"] <= row["hfu"] < 1
        assert (row["pipeline"] is None) == (row["mesh"]["pipe"] == 1)
        assert set(row["traffic_bytes"]) <= {"+".join(axes.split("+")) for axes in row["traffic_bytes"]}
        assert row["tokens_per_second_per_device"] == pytest.approx(32 * 8192 / 16 / row["seconds"]["step"])
    assert [row["seconds"]["step"] for row in rows] == sorted(row["seconds"]["step"] for row in rows)


def test_one_mesh(capsys):
    flags = "--mesh", "fsdp=8,tensor=2", "--remat", "full", "--microbatches", "2", "--zero", "3", "--json"
    (row,) = json.loads(run(capsys, *ASKED, *flags))
    assert (row["mesh"]["fsdp"], row["mesh"]["tensor"]) == (8, 2)
    assert (row["remat"], row["microbatches"]) == ("full", 2)
    assert set(row["traffic_bytes"]) >= {"fsdp", "tensor"}
    (row,) = json.loads(run(capsys, *ASKED, "--mesh", "data=16", "--zero", "3", "--json"))
    assert row["fits"] is False
    assert row["memory_bytes"]["total"] > row["memory_bytes"]["limit"]


def test_tables(capsys):
    text = run(capsys, *ASKED, "--top", "2", "--explain")
    assert "fell out" in text
    assert "crosses a slow link" in text
    assert "within a server, 450 GB/s" in text or "within a pod" in text
    text = run(capsys, *ASKED, "--mesh", "pipe=2,fsdp=8", "--pipeline", "1f1b")
    assert "1f1b" in text
    assert "gradients" in text


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--model", "llama3-8"), "nearest: llama3-8b"),
        (("--cluster", "dgx-h10"), "did you mean 'dgx-h100'"),
        (("--mesh", "fsdp=4"), "multiplies to 4, but there are 16 devices"),
        (("--batch-size", "30", "--microbatches", "4"), "take a divisor"),
        (("--batch-size", "3", "--mesh", "fsdp=16"), "3 sequences do not divide over 16 ranks of the batch"),
        (("--pipeline", "terapipe"), "cannot be planned; take one of gpipe, 1f1b"),
        (("--devices", "100000"), "take fewer"),
        (("--remat", "ful"), "must be one of"),
        (("--precision", "float4"), "choose one of"),
        (("--framework", "megatrn"), "no framework is called"),
        (("--plot", "memory.pdf"), "ends in .png or .svg"),
        (("--model", "llama3-405b"), "nearest is"),
    ],
)
def test_bad_input_is_a_line_with_its_remedy(capsys, flags, complaint):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *ASKED, *flags])
    assert stop.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("error: ")
    assert complaint in told
