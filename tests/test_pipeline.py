"""The pipeline's executor: every schedule that runs gives the numbers of one device, does what its table says and no
more, and lets nothing out of a slot that holds nothing."""

import contextlib
import dataclasses
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_ladder import check_same, config, num_devices

from jaxpar import verify
from jaxpar.audit import hlo, hlo_text
from jaxpar.audit.compile import lower
from jaxpar.audit.topology import gpu_devices
from jaxpar.config import OptimizerConfig
from jaxpar.parallel.pipeline import executor
from jaxpar.parallel.pipeline.kinds import KINDS, make
from jaxpar.parallel.pipeline.program import Branch, Program
from jaxpar.parallel.pipeline.schedule import Op
from jaxpar.parallel.product import product
from jaxpar.training import optimizers, setup
from jaxpar.training.checkpoints.checkpoint import Checkpoints
from jaxpar.training.evaluate import make_eval_step
from jaxpar.training.step import init_state
from jaxpar.verify import true_sizes
from meshes import build_mesh, parse_mesh

RUNS = [name for name, kind in KINDS.items() if kind.synchronous and not kind.needs_slices]


def chunks_of(kind: str) -> int:
    return KINDS[kind].chunks[0]


def with_layers(num_layers: int, model: str, mesh: str = "", **parallel):
    made = config(model, mesh, **parallel)
    return dataclasses.replace(made, model=made.model.replace(num_layers=num_layers))


@pytest.mark.parametrize(
    ("mesh", "parallel", "model"),
    [
        ("pipe=2,fsdp=2,tensor=2", {"pipeline": "1f1b", "grad_accumulation": 4}, "qwen"),
        ("data=2,pipe=2,tensor=2", {"pipeline": "zb-h1", "grad_accumulation": 2, "zero": 1}, "gpt2"),
        ("pipe=2,context=2", {"pipeline": "eager-1f1b", "grad_accumulation": 4, "sequence_parallel": False}, "tiny"),
        (
            "pipe=2,fsdp=2",
            {"pipeline": "zb-v", "grad_accumulation": 4, "remat": "none", "pipeline_residuals": True},
            "tiny",
        ),
        (
            "pipe=2,fsdp=2,tensor=2",
            {"pipeline": "zb-h1", "grad_accumulation": 4, "spread_head": True, "reshard_after_forward": "always"},
            "qwen",
        ),
        pytest.param(
            "pipe=2,data=2",
            {"pipeline": "1f1b", "grad_accumulation": 2, "spread_head": True, "zero": 1},
            "gpt2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipe=2,context=2",
            {"pipeline": "interleaved-1f1b", "chunks": 2, "context_strategy": "ulysses"},
            "tiny",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipe=4,fsdp=2", {"pipeline": "dualpipe-v", "grad_accumulation": 4}, "tiny", marks=pytest.mark.slow
        ),
    ],
)
def test_training_is_that_of_one_device(mesh, parallel, model):
    num_layers = 8 if "dualpipe" in parallel["pipeline"] else 4
    check_same(with_layers(num_layers, model, mesh, **parallel), with_layers(num_layers, model), 1e-9)


def test_evaluation_and_sampling_go_through_the_stages():
    outcomes = []
    for mesh in "pipe=2,tensor=2", None:
        asked = with_layers(5, "qwen", mesh or "", pipeline="zb-v", grad_accumulation=2)
        devices = setup.make_mesh(asked, jax.devices()[:4]) if mesh else None
        model = setup.make_model(asked, devices)
        batch = jax.device_put(verify.random_batch(asked), model.layout.sharding(model.layout.stacked_batch_spec()))
        with jax.set_mesh(devices) if devices is not None else contextlib.nullcontext():
            params = model.init(0)
            nll, _ = jax.jit(make_eval_step(model))(params, batch)
            one = jax.tree.map(lambda x: x[0], batch)
            outcomes.append((nll, jax.jit(model.logits_at)(params, one, jnp.asarray(7))[:, :250]))
    for got, want in zip(*jax.device_get(outcomes), strict=True):
        assert np.all(np.abs(want).max() > 0.1)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


# What the executor does with a model of its own: linear layers with a bend, over as many stages as a test asks for.

WIDTH, ROWS = 4, 3


def functions(count=lambda name: None) -> executor.Functions:
    def stage(layers, x, microbatch, part):
        def layer(x, weight):
            x = jnp.sin(product("rd,de->re", x, weight))
            return x, jnp.sum(microbatch["weights"][:, None] * jnp.square(x))

        count("stage")
        x, told = jax.lax.scan(layer, x, layers)
        return x, jnp.sum(told), {"squares": told}

    def head(ends, x, microbatch):
        loss = jnp.sum(microbatch["weights"][:, None] * jnp.square(x @ ends["head"]))
        return loss, 2 * loss

    return executor.Functions(lambda ends, microbatch: ends["table"][microbatch["ids"]], stage, head, are_weights=True)


def toy(num_layers: int, num_microbatches: int):
    rng = np.random.default_rng(0)
    ends = {"table": rng.normal(size=(5, WIDTH)), "head": rng.normal(size=(WIDTH, WIDTH))}
    layers = rng.normal(size=(num_layers, WIDTH, WIDTH))
    shape = num_microbatches, ROWS
    return ends, layers, {"ids": rng.integers(0, 5, shape), "weights": rng.random(shape)}


def by_pipeline(schedule, functions, ends, layers, batch, fill, run=executor.run, **settings):
    """(reported, told, gradients), layers in order."""
    mesh = build_mesh(f"pipe={schedule.num_stages}", "", jax.devices()[: schedule.num_stages])
    size = layers.shape[0] // schedule.num_parts
    parts = [schedule.part(s, c) for s in range(schedule.num_stages) for c in range(schedule.num_chunks)]
    order = np.concatenate([np.arange(part * size, (part + 1) * size) for part in parts])

    def local(ends, layers, batch):
        loss, told, by_ends, by_layers = run(schedule, functions, ends, layers, batch, fill=fill, **settings)
        return loss, jax.tree.map(lambda g: jax.lax.psum(g, "pipe"), by_ends), (told["squares"], by_layers)

    with jax.set_mesh(mesh):
        placed = jax.device_put(layers[order], NamedSharding(mesh, P("pipe")))
        mapped = jax.shard_map(local, in_specs=(P(), P("pipe"), P()), out_specs=(P(), P(), P("pipe")), check_vma=False)
        loss, by_ends, by_layers = jax.device_get(jax.jit(mapped)(ends, placed, batch))
    return loss, by_ends, *(each[np.argsort(order)] for each in by_layers)


def by_one_device(ends, layers, batch):
    parts = functions()

    def loss(ends, layers):
        def of(microbatch):
            x, added, told = parts.stage(layers, parts.embed(ends, microbatch), microbatch, part=0)
            minimised, reported = parts.head(ends, x, microbatch)
            return minimised + added, (reported, told["squares"])

        added, sums = jax.lax.map(of, batch)
        return jnp.sum(added), jax.tree.map(lambda each: jnp.sum(each, 0), sums)

    (_, (reported, told)), (by_ends, by_layers) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        ends, layers
    )
    return reported, by_ends, told, by_layers


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize(
    ("stages", "microbatches", "keeps_residuals"),
    [(2, 1, False), (4, 4, True), (4, 10, False), pytest.param(2, 5, True, marks=pytest.mark.slow)],
)
def test_every_kind_with_nan_in_what_holds_nothing(kind, stages, microbatches, keeps_residuals):
    """Microbatches fewer than, as many as, more than the stages, and no multiple of them."""
    schedule = make(kind, stages, microbatches, chunks_of(kind))
    problem = toy(2 * schedule.num_parts, microbatches)
    want = by_one_device(*problem)
    got = by_pipeline(schedule, functions(), *problem, np.nan, keeps_residuals=keeps_residuals)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max())


@pytest.mark.parametrize("kind", RUNS)
def test_what_a_pass_makes_hops_apart(kind):
    """One way each where parts go in a loop, both ways in a V; and what needs no hurry has a tick to itself."""
    program = Program.of(make(kind, 4, 8, chunks_of(kind)))
    hops = [hop for hop in program.hops if hop.shift]
    assert program.permutes == len(hops) * len(program.op)
    if kind in ("zb-v", "dualpipe-v"):
        assert hops == [("backward", 1), ("backward", 3), ("forward", 1), ("forward", 3)]
    else:
        assert hops == [("backward", 3), ("forward", 1)]
    assert program.patient == ({"forward", "backward"} if kind in ("eager-1f1b", "interleaved-1f1b") else set())


@pytest.mark.parametrize("kind", RUNS)
def test_a_stage_runs_what_its_table_says_once(kind):
    schedule = make(kind, 4, 6, chunks_of(kind))
    program = Program.of(schedule)
    for stage in range(4):
        taken = Counter(map(Op, program.op[:, stage]))
        each = 6 * schedule.num_chunks
        assert taken[Op.F] == taken[Op.B] + taken[Op.BW] == taken[Op.W] + taken[Op.BW] == each
        if kind in ("zb-h1", "zb-h2", "zb-v"):
            assert taken[Op.BW] == 0


def test_a_branch_runs_its_stage_once():
    """Counted as the branches are traced (a backward pass traces its forward pass with it), and once for shapes."""
    calls = Counter()
    schedule = make("zb-h1", 2, 3)
    problem = toy(2, 3)
    by_pipeline(schedule, functions(lambda name: calls.update([name])), *problem, fill=0.0)
    assert calls["stage"] == 1 + 3


def test_a_tick_as_compiled_for_gpus():
    """Two permutes a tick, each beside a branch, none in one; and where a tick has no weight gradient, nothing of a
    parameter's size is copied: sums are in the loop's own buffers throughout."""
    asked = config("tiny", pipeline="1f1b", grad_accumulation=4)
    model = asked.model.replace(num_layers=4, embed_dim=256, mlp_dim=512)
    asked = dataclasses.replace(asked, model=model)
    text = verify.compiled_step(asked, parse_mesh("pipe=4,fsdp=2", 8)).as_text()
    module = hlo_text.Module.parse(text)
    ticks = [c for c in module.computations.values() if any(i.opcode == "conditional" for i, _, _ in c.calls)]
    assert len(ticks) == 1

    def reached(name: str) -> set[str]:
        return {name}.union(*(reached(callee) for _, _, callee in module.computations[name].calls))

    def permutes(names: set[str]) -> int:
        collectives = [i.opcode.removesuffix("-start") for name in names for i in module.computations[name].collectives]
        return collectives.count("collective-permute")

    branches = [(role, callee) for i, role, callee in ticks[0].calls if i.opcode == "conditional"]
    assert len(branches) == 2 * 5  # look up, forward, backward, head, embedding's gradient
    assert permutes(reached(ticks[0].name)) == 2
    assert permutes(set().union(*(reached(branch) for _, branch in branches))) == 0
    assert [set(beside) for beside in hidden_by(text, "pipe=4,fsdp=2")] == [
        {Branch.LOOK_UP, Branch.FORWARD, Branch.HEAD},
        {Branch.BOTH},
    ]

    activation = 16 // 4 // 2 * 16 * 256
    idle = [ticks[0].name, *(branch for role, branch in branches if role == "true_computation")]
    copied = [
        math.prod(map(int, dims.split(",")))
        for name in idle
        for i in module.computations[name].instructions.values()
        if i.opcode == "copy" and (dims := i.type.partition("[")[2].partition("]")[0])
    ]
    assert all(size <= activation for size in copied)
    assert activation < 256 * 256 // 2  # a kernel's part


@pytest.mark.parametrize(
    ("kind", "chunks", "hidden"),
    [
        ("zb-v", 2, [{Branch.FORWARD}] * 2 + [{Branch.INPUT, Branch.WEIGHTS}] * 2),
        ("interleaved-1f1b", 2, [{Branch.FORWARD, Branch.BOTH}] * 2),
    ],
)
def test_hops_are_beside_branches_as_compiled_for_gpus(kind, chunks, hidden):
    """Where several may be under way at once: a gradient's beside the forward pass, an output's beside the backward
    pass; beside both where nobody needs it yet."""
    asked = with_layers(8, "tiny", "pipe=4", pipeline=kind, chunks=chunks, grad_accumulation=8)
    lowered, *_ = lower(asked, gpu_devices("h100:1x4"), "cpu")
    text = lowered.compile({"xla_gpu_experimental_parallel_collective_overlap_limit": "8"}).as_text()
    ends = {Branch.LOOK_UP, Branch.HEAD}
    assert [beside - ends for beside in hidden_by(text, "pipe=4")] == hidden


def hidden_by(text: str, mesh: str) -> list[set[str]]:
    """Of each permute, in order: the branches between its start and its end."""
    found = hlo.read_collectives(text, parse_mesh(mesh, num_devices(mesh)))
    windows = [each.window for each in found if each.op == "collective-permute"]
    return [
        {name for each in window.between for name in Branch if each.op_name.endswith(f"/{name}/cond")}
        for window in windows
        if window is not None
    ]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_a_checkpoint_has_its_layers_in_order(tmp_path, optimizer):
    """Written by chunks in a V, read by a pipeline of other parts, and by none."""

    def states(mesh: str, **parallel):
        asked = with_layers(8, "tiny", mesh, **parallel)
        asked = dataclasses.replace(asked, optimizer=OptimizerConfig(name=optimizer))
        devices = setup.make_mesh(asked, jax.devices()[: num_devices(mesh)])
        model = setup.make_model(asked, devices)
        tx = optimizers.make(asked.optimizer, 20, model.names, model.config.vocab_size)
        return devices, model, tx, Checkpoints(tmp_path, model, tx, asked)

    mesh, model, tx, checkpoints = states("pipe=2,fsdp=2", pipeline="zb-v")
    with jax.set_mesh(mesh), checkpoints:
        state = init_state(model, tx, seed=0)
        want = true_sizes(model, state.params)
        # Moments that tell layers apart, as the parameters do.
        state = dataclasses.replace(state, opt_state=jax.tree.map(marked, state.opt_state))
        checkpoints.save(state)
        checkpoints.wait()
    found = {}
    for name, parallel in ("pipe=2", {"pipeline": "looped-bfs", "chunks": 4}), ("fsdp=2", {}):
        mesh, model, tx, checkpoints = states(name, **parallel)
        with jax.set_mesh(mesh), checkpoints:
            restored = checkpoints.restore(0)
        got = true_sizes(model, restored.params)
        for path, value in want.items():
            np.testing.assert_array_equal(got[path], value, err_msg=path)
        order = np.argsort(model.layout.layer_order(8))
        found[name] = [
            np.asarray(leaf)[order] if leaf.shape[:1] == (8,) else np.asarray(leaf)
            for leaf in jax.tree.leaves(restored.opt_state)
        ]
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def marked(leaf):
    """A stack with its place in memory in each layer's every element."""
    if leaf.shape[:1] != (8,):
        return leaf
    places = jnp.arange(8, dtype=leaf.dtype).reshape(8, *[1] * (leaf.ndim - 1))
    return leaf + jax.device_put(jnp.broadcast_to(places, leaf.shape), leaf.sharding)


@pytest.mark.parametrize(
    ("mesh", "parallel", "complaint"),
    [
        ("pipe=2", {"pipeline": "looped-bfs", "chunks": 4}, "--model.num-layers 6 is too few for pipe=2 x 4 chunks"),
        ("pipe=2", {"layers_per_stage": "3,2"}, "--layers-per-stage 3,2 adds up to 5 layers, not to the model's 6"),
        ("pipe=2", {"layers_per_stage": "2,2,2"}, "--layers-per-stage 2,2,2 has 3 numbers; pipe=2 takes 2"),
        ("pipe=2", {"layers_per_stage": "6,0"}, "--layers-per-stage 6,0 has a part without a layer; give each"),
        ("pipe=2", {"layers_per_stage": "3,-3"}, "--layers-per-stage 3,-3 is no list of numbers; give 2, as in 7,8"),
        (
            "pipe=2",
            {"pipeline": "auto", "chunks": 2},
            "--pipeline auto searches tables of one chunk and slice, not --chunks 2",
        ),
        ("pipe=2", {"pipeline": "auto", "pipeline_memory_limit": 0.5}, "--pipeline-memory-limit 0.5 is below one"),
        ("pipe=2", {"pipeline_memory_limit": 2.0}, "--pipeline-memory-limit 2 has no use with --pipeline 1f1b, whose"),
        ("pipe=2", {"pipeline": "interleaved-1f1b"}, "needs 2 or more chunks per stage, none given"),
        ("pipe=2", {"chunks": 3}, "1f1b needs exactly 1 chunk per stage, not 3; interleaved-1f1b and looped-bfs"),
        ("pipe=2", {"pipeline": "1f1B"}, "did you mean 1f1b?"),
        ("pipe=2", {"zero": 2}, "--zero 2 does not go with pipe=2"),
        ("pipe=2", {"grad_accumulation": 3}, "--batch-size 16 is not divisible by 3 microbatches"),
        ("pipe=2", {"grad_accumulation": 100_000}, "--microbatches 100000 with pipe=2 is more than the 16384 that"),
        ("pipe=2,context=2", {"context_strategy": "ring"}, "take allgather or ulysses"),
        ("pipe=2,context=2", {"context_strategy": "hybrid=1x2"}, "take allgather or ulysses"),
        ("pipe=2", {"remat": "every=4"}, "it takes a number of layers, 1 to 3"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(mesh, parallel, complaint):
    asked = with_layers(6, "tiny", mesh, **parallel)
    with pytest.raises(ValueError, match=r"--|needs|did you mean") as raised:
        setup.make_model(asked, setup.make_mesh(asked, jax.devices()[: 4 if "," in mesh or "4" in mesh else 2]))
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)
