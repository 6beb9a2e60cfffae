"""`jaxpar audit`: a step compiled for machines that are not here, read, and held against the plan."""

import dataclasses
import json
import subprocess

import pytest

from jaxpar import cli
from jaxpar.audit import report
from jaxpar.audit.compile import Parameter, compile_step
from jaxpar.audit.hlo import read_collectives
from jaxpar.audit.hlo_text import Module
from jaxpar.audit.planned import cluster_of, job_of, note_of, step_flops
from jaxpar.audit.topology import Topology
from jaxpar.audit.work import Duplicates, Work, touched_bytes
from jaxpar.config import Config, DataConfig, ParallelConfig
from jaxpar.planning.memory import memory
from jaxpar.verify import expected_traffic
from meshes import parse_mesh
from models.config import ModelConfig

H100 = Topology.parse("h100:1x8")
MODEL = ModelConfig(
    vocab_size=512, embed_dim=1024, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=128, mlp_dim=4096
)
CONFIG = Config(model=MODEL, data=DataConfig(batch_size=16, seq_len=2048), parallel=ParallelConfig(mesh="fsdp=8"))
KEYS = {"compile_seconds", "memory_bytes", "planned_memory_bytes", "fits", "flops", "estimated_cycles", "collectives"}
KEYS |= {"planned_collectives", "surprises", "remat_duplicates", "estimated_step_seconds", "estimated_mfu"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def on_h100s(cache):
    return report.audit(CONFIG, H100, 300)


def check_traffic(found):
    for axes, ops in found.planned.items():
        for op, size in ops.items():
            assert found.collectives[axes][op]["bytes"] == pytest.approx(size, rel=0.01, abs=1024)
    assert found.surprises == ()


def test_the_program_does_what_the_plan_says(on_h100s):
    assert on_h100s.program.attention == "cudnn"
    assert on_h100s.flops == pytest.approx(on_h100s.planned_flops, rel=0.02)
    check_traffic(on_h100s)
    assert on_h100s.fits
    assert 0 < on_h100s.mfu < 1
    assert on_h100s.seconds.step > on_h100s.seconds.compute > 0
    # Kernels as cuDNN has them: forward twice, backward once, each text once or more.
    kernels = {kernel.target for kernel in on_h100s.kernels}
    assert kernels == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}


def test_some_transfers_run_beside_matmuls_and_some_do_not(on_h100s):
    assert 0.2 < on_h100s.overlapped("fsdp") < 1
    assert all(each.beside == "" for each in on_h100s.exposed)
    module = Module.parse(on_h100s.program.hlo)
    hidden = [c for c in read_collectives(on_h100s.program.hlo, on_h100s.program.mesh) if c.beside]
    assert all(c.beside in module.computations[c.window.computation.name].instructions for c in hidden)


def test_what_was_compiled_is_kept(on_h100s):
    again = compile_step(CONFIG, H100, 300)
    assert again.was_cached
    assert dataclasses.replace(again, was_cached=False) == on_h100s.program


def test_the_command(on_h100s, tmp_path, capsys):
    args = ["audit", "--topology", "h100:1x8", "--mesh", "fsdp=8", "--json", "--strict"]
    args += ["--batch-size", "16", "--seq-len", "2048"]
    for name in ("vocab-size", "embed-dim", "num-layers", "num-heads", "num-kv-heads", "head-dim", "mlp-dim"):
        args += [f"--model.{name}", str(getattr(MODEL, name.replace("-", "_")))]
    page, text = tmp_path / "audit.html", tmp_path / "step.hlo"
    with pytest.raises(SystemExit) as stop:
        cli.main([*args, "--html", str(page), "--hlo", str(text)])
    assert stop.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= KEYS
    assert found["memory_bytes"].keys() == {"arguments", "temporaries", "outputs", "total", "limit"}
    assert found["collectives"]["fsdp"]["all-gather"].keys() == {"count", "bytes", "overlapped_bytes"}
    assert found["collectives"] == on_h100s.collectives
    assert text.read_text() == on_h100s.program.hlo
    assert page.read_text().count("data:image/svg+xml;base64,") == 3


def test_an_injected_collective_is_a_surprise(on_h100s):
    """An all-gather of what is no weight, and a permute, over axes that send none such."""
    entry = on_h100s.program.hlo.index("\nENTRY ")
    at = on_h100s.program.hlo.index("\n", entry + 1) + 1
    injected = (
        "  %q = bf16[77,16384]{1,0} custom-call()\n"
        "  %g = bf16[616,16384]{1,0} all-gather(%q), replica_groups=[1,8]<=[8], dimensions={0}\n"
        "  %a = bf16[77,16384,16]{2,1,0} custom-call()\n"
        "  %b = bf16[77,16384,16]{2,1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}\n"
    )
    hlo = on_h100s.program.hlo[:at] + injected + on_h100s.program.hlo[at:]
    found = report.read(dataclasses.replace(on_h100s.program, hlo=hlo), CONFIG, H100)
    kinds = [(surprise.kind, surprise.bytes) for surprise in found.surprises]
    assert ("unclaimed traffic", 77 * 16384 * 16 * 2) in kinds
    assert ("gathered activation", 616 * 16384 * 2) in kinds


def test_a_parameter_that_is_not_cut_is_a_surprise():
    whole = Parameter("head", (64, 100), ("embed", "vocab"), ("fsdp",), ("tensor",), 25600)
    small = dataclasses.replace(whole, name="bias", num_bytes=25)
    found = report.replicated([whole, small], {"fsdp": 4, "tensor": 2})
    assert [(s.what.split()[0], s.bytes) for s in found] == [("head", 6400)]


def test_a_tpu_slice(cache):
    model = MODEL.replace(vocab_size=256, embed_dim=256, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=1024)
    config = dataclasses.replace(CONFIG, model=model, data=DataConfig(batch_size=16, seq_len=128))
    topology = Topology.parse("v5e:2x4")
    found = report.audit(config, topology, 300)
    assert found.program.attention == "splash"
    assert found.estimated_cycles is not None
    assert found.estimated_cycles > 1e4
    # The compiler may keep what the backward pass would do again.
    kept = job_of(config, cluster_of(topology), found.program.mesh).replace(remat="none")
    assert step_flops(kept, "splash", False) <= found.flops <= 1.02 * found.planned_flops
    assert "libtpu" in found.program.versions
    check_traffic(found)
    # Of a chip's memory, not of all that was ever there.
    assert 0 < found.program.temporaries < found.program.total < 0.1 * found.limit


@pytest.mark.parametrize("flag", ["--hlo", "--html"])
def test_where_nothing_can_be_written_is_said_first(flag, tmp_path, capsys):
    for path in tmp_path, tmp_path / "absent" / "file":
        with pytest.raises(SystemExit):
            cli.main(["audit", "--topology", "h100:1x8", flag, str(path)])
        assert f"cannot write {path}" in capsys.readouterr().err


def test_slices_of_tpus(cache):
    """A slice's program, whose hosts sum the gradients with the other's."""
    model = MODEL.replace(vocab_size=256, num_layers=2)
    parallel = ParallelConfig(mesh="data=2,fsdp=8", dcn_mesh="data=2")
    config = dataclasses.replace(CONFIG, model=model, data=DataConfig(batch_size=16, seq_len=256), parallel=parallel)
    found = report.audit(config, Topology.parse("2*v5p:2x2x2"), 300)
    assert found.collectives["data"]["all-reduce"]["bytes"] == pytest.approx(found.planned["data"]["all-reduce"], 0.01)
    assert found.collectives["data"]["all-reduce"]["bytes"] > 1e6
    assert found.collectives["fsdp"]["all-gather"]["bytes"] == pytest.approx(found.planned["fsdp"]["all-gather"], 0.01)
    assert found.surprises == ()


def test_emulated_devices(cache):
    """Which send 16-bit floats as 32-bit ones."""
    found = report.audit(CONFIG, Topology.parse("cpu:8"), 300)
    assert found.program.attention == "tiled"
    assert found.flops == pytest.approx(found.planned_flops, rel=0.02)
    assert found.estimated_cycles is None
    check_traffic(found)


def test_time_runs_out(cache, monkeypatch):
    def stuck(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired(args, timeout)

    monkeypatch.setattr(subprocess, "run", stuck)
    with pytest.raises(ValueError, match=r"h100:1x8 took more than 5 s and was ended; give a longer --timeout"):
        compile_step(CONFIG, H100, 5)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5x:2x4", "chip 'v5x' of topology 'v5x:2x4' is none of .* did you mean 'v5"),
        ("v5e", "topology 'v5e' is not CHIP:"),
        ("2*h100:1x8", "is not CHIP:HOSTSxGPUS"),
        ("v5p:4", "is not CHIP:XxY or CHIP:XxYxZ"),
        ("cpu:2x2", "is not CHIP:SHAPE"),
    ],
)
def test_a_topology_that_is_none(topology, message):
    with pytest.raises(ValueError, match=message) as caught:
        Topology.parse(topology)
    assert "\n" not in str(caught.value)


def test_what_the_child_refuses_is_said_in_one_line(cache):
    with pytest.raises(ValueError, match="v5e:3x5' is none that libtpu knows") as caught:
        compile_step(CONFIG, Topology.parse("v5e:3x5"), 100)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="multiplies to 8, but there are 16 devices"):
        compile_step(CONFIG, Topology.parse("h100:2x8"), 100)


def module(body: str, computations: str = "") -> Module:
    return Module.parse(f"HloModule m, num_partitions=1\n\n{computations}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")


CONVOLUTION = "  %c = f32[{out}] convolution(%a, %b), window={{{window}}}, dim_labels={labels}"


@pytest.mark.parametrize(
    ("left", "right", "body", "flops"),
    [
        (
            "8,4",
            "4,6",
            "  %c = f32[8,6] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            2 * 8 * 4 * 6,
        ),
        ("8,4", "4,6", CONVOLUTION.format(out="8,6", window="", labels="bf_io->bf"), 2 * 8 * 4 * 6),
        # A batch dim as a window that meets each input once.
        (
            "3,8,4",
            "3,4,6",
            CONVOLUTION.format(out="3,8,6", window="size=3 stride=2 pad=0_0 lhs_dilate=3", labels="0bf_0io->0bf"),
            2 * 3 * 8 * 4 * 6,
        ),
        (
            "8,4",
            "4,6",
            '  %c = f32[8,6] custom-call(%a, %b), custom_call_target="__cublas$gemm", '
            'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}',
            2 * 8 * 4 * 6,
        ),
    ],
)
def test_flops_of_matmuls_in_every_form(left, right, body, flops):
    operands = f"  %a = f32[{left}] parameter(0)\n  %b = f32[{right}] parameter(1)\n"
    assert Work(module(operands + body)).flops == flops


@pytest.mark.parametrize(
    ("left", "right", "call"),
    [
        ("8,4", "3,4,6", "%ragged-dot-none.1 = f32[8,6] custom-call(%a, %b)"),
        ("8,4", "8,6", "%tgmm.8 = f32[3,4,6] custom-call(%i, %a, %b)"),
        (
            "8,4",
            "3,4,6",
            '%call = f32[8,6] custom-call(%i, %a, %b), custom_call_target="__gpu$xla.gpu.triton", '
            'backend_config={name = "grouped_product"}',
        ),
    ],
)
def test_flops_of_grouped_products_are_those_of_filled_rows(left, right, call):
    operands = f"  %i = s32[2] parameter(2)\n  %a = f32[{left}] parameter(0)\n  %b = f32[{right}] parameter(1)\n"
    assert Work(module(f"{operands}  {call}"), filled=0.25).flops == 0.25 * 2 * 8 * 4 * 6


def test_an_all_reduce_in_the_place_of_a_gather_is_no_surprise():
    def found(size):
        return {"fsdp": {op: {"bytes": n} for op, n in (("all-gather", 900), ("all-reduce", size))}}

    planned = {"fsdp": {"all-gather": 1000}}
    assert report.unclaimed(found(100), planned) == []
    assert [surprise.bytes for surprise in report.unclaimed(found(200), planned)] == [100]


LOOP = """\
%body (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4] parameter(0)
  %w = f32[4,4] constant(0)
  ROOT %d = f32[8,4] dot(%p, %w), lhs_contracting_dims={1}, backend_config={"estimated_cycles":"7"}
}

%cond (p: f32[8,4]) -> pred[] {
  %q = f32[8,4] parameter(0)
  ROOT %r = pred[] custom-call(%q)
}
"""


def test_loops_count_as_often_as_they_run():
    start = "  %s = f32[8,4] parameter(0)\n"
    known = '  %l = f32[8,4] while(%s), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    work = Work(module(start + known, LOOP))
    assert (work.flops, work.estimated_cycles) == (5 * 2 * 8 * 4 * 4, 35)


DUPLICATES = """\
%again (q: f32[8,4], w: f32[4,4]) -> f32[8,4] {
  %q = f32[8,4] parameter(0)
  %w = f32[4,4] parameter(1)
  ROOT %dot.1.remat = f32[8,4] dot(%q, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4] parameter(0)
  %v = f32[4,4] constant(0)
  %fusion.7 = f32[8,4] fusion(%p, %v), kind=kOutput, calls=%again.clone
  %fusion.7.remat = f32[8,4] fusion(%p, %v), kind=kOutput, calls=%again
  ROOT %dot.3.remat2.1 = f32[8,4] dot(%fusion.7.remat, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%again.clone (q: f32[8,4], w: f32[4,4]) -> f32[8,4] {
  %q = f32[8,4] parameter(0)
  %w = f32[4,4] parameter(1)
  ROOT %dot.1 = f32[8,4] dot(%q, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%cond (p: f32[8,4]) -> pred[] {
  %q = f32[8,4] parameter(0)
  ROOT %r = pred[] custom-call(%q)
}
"""


def test_what_the_compiler_computes_again():
    """As often as it runs: a fusion once with what is in it, and neither a view nor another's metadata."""
    loop = '  %l = f32[8,4] while(%s), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}\n'
    others = '  %b.remat = f32[4,8] bitcast(%l)\n  %n = f32[4,8] negate(%b.remat), metadata={op_name="jit/.remat"}'
    work = Work(module("  %s = f32[8,4] parameter(0)\n" + loop + others, DUPLICATES))
    assert work.duplicates == Duplicates(count=5 * 2, flops=5 * 2 * 2 * 8 * 4 * 4)
    assert work.flops == 5 * 3 * 2 * 8 * 4 * 4


def test_a_fusion_touches_only_the_slice_that_it_takes():
    fused = """\
%fused (p: f32[100,8], i: s32[]) -> f32[1,8] {
  %p = f32[100,8] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = f32[1,8] dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,8}
}
"""
    text = "  %a = f32[100,8] parameter(0)\n  %b = s32[] parameter(1)\n"
    made = module(text + "  %f = f32[1,8] fusion(%a, %b), kind=kLoop, calls=%fused", fused)
    main = made.computations["main"]
    assert touched_bytes(made, main, main.instructions["f"]) == 32 + 4 + 32


@pytest.mark.parametrize(
    ("parallel", "note"),
    [
        ({"pipeline": "1f1b"}, ""),
        ({"pipeline": "auto"}, "auto: memory is planned as 1f1b's"),
        ({"pipeline": "gpipe"}, "gpipe: of what is sent the stages' hops alone are planned"),
        (
            {"pipeline": "terapipe", "slices": 2},
            "terapipe: memory is planned as gpipe's and of what is sent the stages' hops alone are planned",
        ),
        (
            {"pipeline": "pipedream"},
            "pipedream: memory is planned as 1f1b's and of what is sent the stages' hops alone are planned",
        ),
    ],
    ids=str,
)
def test_every_schedule_has_a_plan_or_a_note_of_what_it_leaves_out(parallel, note):
    config = dataclasses.replace(CONFIG, parallel=ParallelConfig(mesh="pipe=2,fsdp=4", grad_accumulation=2, **parallel))
    mesh = dict(parse_mesh("pipe=2,fsdp=4", 8))
    assert note_of(config, mesh) == note
    plan = memory(job_of(config, cluster_of(H100), mesh))
    assert plan.fullest.total > 0
    assert (set(expected_traffic(config, mesh)) == {"pipe"}) == ("hops" in note)
