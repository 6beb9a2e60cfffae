"""Step times against arithmetic by hand, and against what must hold whatever the numbers."""

import dataclasses
import math
import time

import pytest

from jaxpar.planning.calibration import Calibration, ChipCalibration, FrameworkCalibration, calibration_table
from jaxpar.planning.job import Job
from jaxpar.planning.kernel_time import UNFUSED, head_seconds, layer_seconds, peak_flops, product, rates
from jaxpar.planning.plots import mfu, parts, step_time
from jaxpar.planning.step_time import StepTime, predict
from meshes.chips import CHIPS, chip
from meshes.clusters import cluster_of, load_cluster
from meshes.mesh import MESH_AXES
from models.presets import preset

CHIP = ChipCalibration({"bfloat16": 0.5, "float8": 0.5}, 0.25, 2.0, 0.5, 1.0, 0.0, 0.0, "")
"""No overlap and no jitter, round shares."""
FRAMEWORK = FrameworkCalibration(1.0, True, "flash-2", MESH_AXES, "")
PLAIN = Calibration(CHIP, FRAMEWORK)


def mesh(**sizes):
    return dict.fromkeys(MESH_AXES, 1) | sizes


def job(cluster="dgx-h100", **changes):
    settings = {"model": preset("llama3-8b"), "mesh": mesh(), "seq_len": 4096, "batch_size": 1, "remat": "none"}
    return Job(cluster=load_cluster(cluster), **settings | changes).check()


JOBS = {
    "ddp": job(mesh=mesh(data=64), batch_size=64),
    "fsdp": job(mesh=mesh(fsdp=64), batch_size=128, num_microbatches=2, remat="full"),
    "tensor": job(mesh=mesh(fsdp=8, tensor=8), batch_size=16),
    "context": job(mesh=mesh(fsdp=8, context=8), batch_size=8, seq_len=32768),
    "pipe": job(mesh=mesh(data=8, pipe=8), batch_size=128, num_microbatches=16, zero=1),
    "interleaved": job(
        mesh=mesh(data=2, pipe=4, tensor=8),
        batch_size=64,
        num_microbatches=32,
        pipeline="interleaved-1f1b",
        chunks=4,
    ),
    "experts": job(
        model=preset("llama3-8b").replace(num_experts=64, num_experts_per_token=4, expert_mlp_dim=2048),
        mesh=mesh(data=2, expert=32),
        batch_size=64,
    ),
}
ALL = pytest.mark.parametrize("given", JOBS.values(), ids=JOBS)


def test_product_by_hand():
    speeds = rates(job(), PLAIN)
    flops, bandwidth = 0.5 * 989.4e12, 0.5 * job().cluster.chip.memory_bandwidth
    m, k, n = 4096, 1024, 2048
    found = product(speeds, m, k, n)
    assert found.forward == pytest.approx(2 * m * k * n / flops + 2 * (m * k + k * n + m * n) / bandwidth)
    # dx reads dy and the weight and writes dx; dw reads x and dy, and adds to a sum in 4 bytes.
    moved = 2 * (m * n + k * n + m * k) + 2 * (m * k + m * n) + 8 * k * n
    assert found.backward == pytest.approx(2 * 2 * m * k * n / flops + moved / bandwidth)


def test_narrow_products_pay_for_casts():
    wide, narrow = (rates(job(precision=precision), PLAIN) for precision in ("bfloat16", "float8"))
    large = [product(speeds, 65536, 16384, 16384).total for speeds in (wide, narrow)]
    small = [product(speeds, 65536, 1024, 1024).total for speeds in (wide, narrow)]
    assert 1.8 < large[0] / large[1] < 2
    assert small[0] / small[1] < 1.4


def test_attention_by_hand():
    model = job().model
    dense, _ = layer_seconds(job(), PLAIN, rates(job(), PLAIN))
    flops = 4096 * 4 * model.num_heads * model.head_dim * 4096 / 2 * (1 + 128 / 4096)
    assert dense.attention.forward == pytest.approx(flops / (0.25 * 989.4e12))
    assert dense.attention.backward == pytest.approx(2.5 * dense.attention.forward)
    newest = dataclasses.replace(PLAIN, framework=dataclasses.replace(FRAMEWORK, attention="newest"))
    faster, _ = layer_seconds(job(), newest, rates(job(), newest))
    assert dense.attention.total / faster.attention.total == pytest.approx(2)


def test_unfused_attention_moves_its_scores():
    unfused = dataclasses.replace(PLAIN, framework=dataclasses.replace(FRAMEWORK, attention=UNFUSED))
    found = [
        layer_seconds(each, unfused, rates(each, unfused))[0].attention.total for each in (job(), job(seq_len=8192))
    ]
    assert found[1] == pytest.approx(4 * found[0])


def test_tensor_parallelism_cuts_kernels():
    whole, cut = job(), job(mesh=mesh(tensor=8))
    one, eighth = (layer_seconds(each, PLAIN, rates(each, PLAIN))[0] for each in (whole, cut))
    assert eighth.attention.total == pytest.approx(one.attention.total / 8)
    assert eighth.elementwise.total == pytest.approx(one.elementwise.total / 8)
    assert one.matmul.total / 8 < eighth.matmul.total < one.matmul.total / 4
    heads = [head_seconds(each, PLAIN, rates(each, PLAIN)).total for each in (whole, cut)]
    assert heads[0] / 8 < heads[1] < heads[0] / 6


def test_data_parallel_all_reduce_by_hand():
    """Every gradient in 4 bytes round a ring of 8 servers' 64 devices, whose cards give 400 GB/s."""
    given = JOBS["ddp"]
    found = predict(given, PLAIN)
    weights = given.model.vocab_size * 4096 * 2 + 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336) + 65 * 4096
    assert given.cluster.bandwidth(1, 64) == 400e9
    latency = 32 * 2 * math.log2(64) * given.cluster.latency(1, 64)
    assert found.exposed["data"] == pytest.approx(2 * 63 / 64 * 4 * weights / 400e9 + latency, rel=1e-3)


def test_all_to_all_goes_through_each_devices_card():
    given = JOBS["experts"]
    one, two = (
        predict(given.replace(model=given.model.replace(num_experts_per_token=count)), PLAIN).exposed["expert"]
        for count in (4, 5)
    )
    # 24 of 32 ranks are on other servers, 7 others on its own.
    once = given.microbatch_tokens * 4096 * 2 * (24 / 32 / 50e9 + 7 / 32 / 450e9)
    assert two - one == pytest.approx(4 * 32 * once)


def test_overlap_hides_up_to_the_kernels():
    chip_entry = dataclasses.replace(CHIP, overlap=0.8)
    for given in (JOBS["ddp"], JOBS["fsdp"]):
        exposed, hidden = predict(given, PLAIN), predict(given, Calibration(chip_entry, FRAMEWORK))
        assert sum(hidden.exposed.values()) < sum(exposed.exposed.values())
        together = sum(hidden.exposed.values()) + sum(hidden.hidden.values())
        assert together == pytest.approx(sum(exposed.exposed.values()))
    none = dataclasses.replace(FRAMEWORK, overlaps=())
    assert predict(JOBS["fsdp"], Calibration(chip_entry, none)).exposed == predict(JOBS["fsdp"], PLAIN).exposed


def test_bubble_by_hand():
    """(P - 1) / C microbatches of a stage, and the last stage's head makes it the slowest."""
    for name, hops in (("pipe", 7), ("interleaved", 3 / 4)):
        found = predict(JOBS[name], PLAIN)
        given = JOBS[name]
        microbatch = (found.step - found.bubble - found.optimizer - once(found)) / given.num_microbatches
        assert found.bubble < hops * microbatch
        assert found.bubble == pytest.approx(hops * microbatch, rel=0.25)


def once(found: StepTime) -> float:
    """Of the traffic, what a step has once."""
    return sum(seconds for axes, seconds in found.exposed.items() if axes.startswith("data"))


def test_a_pipeline_that_runs_its_stages_again():
    again = dataclasses.replace(FRAMEWORK, reruns_stages=True)
    once_only, twice = predict(JOBS["pipe"], PLAIN), predict(JOBS["pipe"], Calibration(CHIP, again))
    assert once_only.recompute == 0
    forward = twice.recompute / (twice.matmul + twice.attention + twice.elementwise)
    assert 0.3 < forward < 0.36


def test_uneven_stages_leave_layers_out_beside_the_head():
    """126 layers in 16 stages: the head is worth more than a layer."""
    model = preset("llama3-405b")
    given = job("llama3-h100", model=model, mesh=mesh(fsdp=8, pipe=16, tensor=8), batch_size=256, num_microbatches=32)
    even = given.replace(model=model.replace(num_layers=128))
    assert predict(given, PLAIN).step == pytest.approx(predict(even, PLAIN).step, rel=0.08)
    assert predict(given, PLAIN).head == 0


@ALL
def test_parts_add_up_to_the_step(given):
    for calibration in (PLAIN, calibration_table().of(given.cluster.chip)):
        found = predict(given, calibration)
        assert sum(parts(found).values()) == pytest.approx(found.step)
        assert all(seconds >= 0 for seconds in parts(found).values())
        tokens = found.tokens_per_second_per_device * given.num_devices * found.step
        assert tokens == pytest.approx(given.tokens_per_step)
        assert 0 < found.mfu <= found.hfu < 1


def faster(given, **changes):
    """On a chip that is better in what changes say, times 2."""
    levels = given.cluster.levels
    if "links" in changes:
        levels = tuple(dataclasses.replace(level, bandwidth=2 * level.bandwidth) for level in levels)
    if "latency" in changes:
        levels = tuple(dataclasses.replace(level, latency=level.latency / 2) for level in levels)
    kind = given.cluster.chip
    if "memory" in changes:
        kind = dataclasses.replace(kind, memory_bandwidth=2 * kind.memory_bandwidth)
    if "peak" in changes:
        kind = dataclasses.replace(kind, peak_flops={dtype: 2 * rate for dtype, rate in kind.peak_flops.items()})
    return given.replace(cluster=dataclasses.replace(given.cluster, chip=kind, levels=levels))


@ALL
def test_better_machines_are_never_slower(given):
    calibration = calibration_table().of(given.cluster.chip)
    step = predict(given, calibration).step
    for what in ("links", "latency", "memory", "peak"):
        better = predict(faster(given, **{what: True}), calibration).step
        assert better <= step
        assert what != "peak" or better < step
    assert predict(faster(given, links=1, latency=1, memory=1, peak=1), calibration).step < 0.6 * step


@ALL
def test_more_work_is_never_faster(given):
    calibration = calibration_table().of(given.cluster.chip)
    found = predict(given, calibration)
    deeper = given.replace(model=given.model.replace(num_layers=2 * given.model.num_layers))
    assert predict(deeper, calibration).step > 1.5 * found.step
    assert predict(given.replace(remat="full"), calibration).step >= found.step
    assert predict(given.replace(batch_size=2 * given.batch_size), calibration).step > found.step


def test_slow_links_show_on_the_axis_that_crosses_them():
    """Eight-way tensor parallelism in a server of eight, and over two of four."""
    inside = job(mesh=mesh(fsdp=2, tensor=8), batch_size=2)
    across = inside.replace(cluster=cluster_of(chip("H100-SXM"), 4))
    assert predict(across, PLAIN).exposed["tensor"] > 2 * predict(inside, PLAIN).exposed["tensor"]


def test_every_chip_has_a_calibration():
    table = calibration_table()
    for kind in CHIPS:
        entry = table.of(kind)
        assert 0 < entry.chip.matmul["bfloat16"] <= 1
        assert entry.framework is table.frameworks["jaxpar"]
    assert table.entry_of(chip("A100-40GB")) == "A100"
    assert table.entry_of(chip("B300")) == "GB300"
    assert table.entry_of(chip("TPU-v6e")) == "TPU-v5p"


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match="no framework is called 'megatorn'"):
        calibration_table().of(chip("H100-SXM"), "megatorn")
    with pytest.raises(ValueError, match="A100-80GB has no published peak for float8 products: choose one of bfloat16"):
        predict(job("dgx-a100", precision="float8"), PLAIN)
    with pytest.raises(ValueError, match=r"does not divide into 6 parts .* the nearest that does: 6"):
        job(mesh=mesh(data=3), num_microbatches=2, batch_size=8)
    with pytest.raises(ValueError, match="do not divide over context=3"):
        job(mesh=mesh(context=3))
    with pytest.raises(ValueError, match="has no axis pipe"):
        job(mesh={"data": 1})
    assert peak_flops(chip("V100"), "bfloat16") == chip("V100").peak_flops["float16"]


@pytest.mark.slow
def test_a_thousand_predictions_a_second():
    table = calibration_table().of(chip("H100-SXM"))
    meshes = [mesh(data=2**i, fsdp=64 // 2**i, tensor=t) for i in range(7) for t in (1, 2, 4, 8)]
    jobs = [JOBS["fsdp"].replace(mesh=each, remat=remat) for each in meshes for remat in ("none", "full", "dots")]
    start = time.process_time()
    for each in jobs:
        predict(each, table)
    assert (time.process_time() - start) / len(jobs) < 1e-3


def test_pictures(tmp_path):
    times = {name: predict(given, calibration_table().of(given.cluster.chip)) for name, given in JOBS.items()}
    step_time(times, tmp_path / "step.png")
    mfu({"fsdp": [(8, 0.4), (64, 0.35)]}, tmp_path / "mfu.svg")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "mfu.svg").read_text()
    assert math.isclose(sum(parts(times["fsdp"]).values()), times["fsdp"].step)
