"""Does a mesh give the numbers of one device, and send what its strategies say? On a small model of the same structure.

The numbers come from emulated CPU devices in float64; the traffic from the same step compiled for H100s, without any.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.audit.compile import lower
from jaxpar.audit.hlo import read_collectives, summarize
from jaxpar.audit.topology import gpu_devices
from jaxpar.config import Config, DataConfig, OptimizerConfig
from jaxpar.parallel.axes import BATCH_AXES, PARAMETER_RULES, mesh_axes, partition_spec
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.fsdp import IN_ONE, Folds
from jaxpar.parallel.pipeline import looped
from jaxpar.parallel.pipeline.kinds import KINDS
from jaxpar.parallel.pipeline.program import Program
from jaxpar.parallel.pipeline.schedule import Schedule
from jaxpar.parallel.pipeline.stack import slots_of
from jaxpar.parallel.remat import Remat
from jaxpar.planning.traffic import Stages, Traffic, TrafficSettings, ideal_expert_bytes, step_traffic
from jaxpar.training import pipelines, setup
from jaxpar.training.gradients import loss_and_grads
from jaxpar.training.model import Model
from jaxpar.training.precision import Precision

TOLERANCE = 1e-9
"""Of the loss, and of each gradient relative to its scale, in float64."""
TRAFFIC_TOLERANCE = 0.01
"""Of each collective's bytes; and what none expects may be this share of them all."""
SCALARS_BYTES = 1024
"""What losses and norms may add to a collective that they are combined with: no formula counts them."""
MAX_DEVICES = 32
_EXCHANGES = ("all-to-all", "ragged-all-to-all")


@dataclass(frozen=True)
class Target:
    """What a step is compiled for, as far as its traffic depends on that."""

    platform: str
    device_kind: str = ""
    folds: Folds = IN_ONE
    masks_by_place: bool = False


H100 = Target("gpu")


@dataclass(frozen=True)
class Verdict:
    """What `jaxpar verify` prints."""

    init_bitwise_equal: bool
    loss_error: float
    max_gradient_error: float
    worst_parameter: str
    collectives: dict[str, dict[str, dict[str, int]]]
    collectives_expected: dict[str, dict[str, dict[str, int]]]
    ok: bool
    note: str = ""


def verify(config: Config, mesh: Mapping[str, int]) -> Verdict:
    """Hold a layout against one device. The process must have `math.prod(mesh.values())` CPU devices and x64 on."""
    kind = KINDS.get(config.parallel.pipeline)
    if kind is not None and not kind.synchronous:
        raise ValueError(
            f"--pipeline {kind.name} changes the weights between a microbatch and the next, so its numbers are not one "
            "device's and there is nothing to verify; take a synchronous kind, such as 1f1b"
        )
    setup.make_model(dataclasses.replace(config, data=_small_data(config, mesh, scale=1)), setup.make_mesh(config))
    numbers = compare(small(config, mesh, scale=1))
    compiled = small(config, mesh, scale=32)
    found, expected = compiled_traffic(compiled, mesh), expected_traffic(compiled, mesh)
    correct = (
        numbers["init_bitwise_equal"]
        and numbers["loss_error"] <= TOLERANCE
        and numbers["max_gradient_error"] <= TOLERANCE
    )
    held, note, schedule = found, "", pipelines.make_schedule(compiled, mesh["pipe"])
    if schedule is not None and not has_formulas(schedule):
        held = {"pipe": {op: found["pipe"][op] for op in expected["pipe"]}}
        note = f"of {schedule.kind} only the stages' hops are held against their formula"
    elif config.model.num_experts and mesh["expert"] > 1:
        sent = sum(ops.get(op, 0) for ops in [expected.get("expert", {})] for op in _EXCHANGES)
        ideal = ideal_expert_bytes(compiled.model, traffic_settings(compiled, mesh))
        note = (
            f"buffers exchanged over expert hold {sent:,} bytes, {sent / ideal:.2f} times what balanced routing sends "
            "forward and backward"
        )
    return Verdict(
        **numbers,
        collectives=found,
        ok=correct and agree(held, expected),
        note=note,
        collectives_expected={
            axes: {op: {"bytes": size} for op, size in ops.items()} for axes, ops in expected.items()
        },
    )


def small(config: Config, mesh: Mapping[str, int], scale: int) -> Config:
    """The config with a model of the same structure and least sizes: what an axis divides or not, it still does."""
    model, tensor = config.model, mesh["tensor"]

    def same_cut(name: str, size: int, candidates: Any) -> int:
        def cut(size: int) -> frozenset[str]:
            return mesh_axes(partition_spec((name,), PARAMETER_RULES, mesh, (size,)))

        return next(n for n in candidates if cut(n) == cut(size))

    group = model.num_heads // model.num_kv_heads
    fewest = min(model.num_kv_heads, 2)
    num_kv_heads = same_cut(
        "kv_heads", model.num_kv_heads, (n for n in itertools.count(fewest) if n * group % tensor == 0)
    )
    data, counts = _small_data(config, mesh, scale), _units_per_part(config, mesh)
    num_dense_layers = min(model.num_dense_layers, 1)
    shrunk = model.replace(
        vocab_size=512 if model.vocab_size % 256 == 0 else 500,
        embed_dim=same_cut("embed", model.embed_dim, itertools.count(32 * scale, 2)),
        num_layers=num_dense_layers + sum(counts) * (model.moe_every if model.num_experts else 1),
        num_dense_layers=num_dense_layers,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=8 * scale,
        mlp_dim=tensor * -(-48 * scale // tensor),
        expert_mlp_dim=tensor * -(-24 * scale // tensor),
        max_seq_len=data.seq_len,
        rope_original_seq_len=data.seq_len,
        sliding_window=None if model.sliding_window is None else data.seq_len // 3,
    )
    uneven = ",".join(map(str, counts)) if len({*counts}) > 1 else ""
    parallel = dataclasses.replace(config.parallel, layers_per_stage=uneven)
    return dataclasses.replace(config, model=shrunk, data=data, parallel=parallel)


def _units_per_part(config: Config, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """As unequal as the config's: more than one in the largest part, if it has as many, and more than remat has in a
    group."""
    counts = pipelines.layers_per_part(config, pipelines.make_schedule(config, mesh["pipe"]))
    fewest = max(3 if len(counts) == 1 else 2, Remat.parse(config.parallel.remat, max(counts)).every + 1)
    fewer = min(max(0, max(counts) - fewest), min(counts) - 1)
    return tuple(count - fewer for count in counts)


def _small_data(config: Config, mesh: Mapping[str, int], scale: int) -> DataConfig:
    tensor = mesh["tensor"]
    rows = math.prod(mesh[axis] for axis in BATCH_AXES) * config.parallel.grad_accumulation
    seq_len = 2 * scale * tensor * mesh["context"] * -(-12 // tensor)
    return dataclasses.replace(config.data, batch_size=2 * rows, seq_len=seq_len)


def compare(config: Config) -> dict[str, Any]:
    """One float64 loss and its gradients, on the config's mesh and without a mesh."""
    exact = dataclasses.replace(
        config.run, precision="float64", params_dtype="auto", reduce_dtype="auto", matmul="auto"
    )
    config = dataclasses.replace(config, run=exact)
    mesh = setup.make_mesh(config)
    model, reference = setup.make_model(config, mesh), setup.make_model(config, None)
    batch = random_batch(config)

    want_params = reference.init(config.run.seed)
    want_reported, want = jax.jit(lambda p, b: loss_and_grads(reference, p, b)[:2])(want_params, batch)
    params = model.init(config.run.seed)
    with jax.set_mesh(mesh):
        sharding = model.layout.sharding(model.layout.stacked_batch_spec())
        ordered = batch.in_order(model.layout.sequence_order(config.data.seq_len))
        placed = jax.tree.map(lambda x: jax.device_put(x, sharding), ordered)
        reported, grads = jax.jit(lambda p, b: loss_and_grads(model, p, b)[:2])(params, placed)
    errors = gradient_errors(true_sizes(model, grads), true_sizes(reference, want))
    worst = max(errors, key=lambda name: errors[name])
    equal = jax.tree.map(
        lambda a, b: bool(np.array_equal(a, b)), true_sizes(model, params), true_sizes(reference, want_params)
    )
    return {
        "init_bitwise_equal": all(equal.values()),
        "loss_error": abs(float(reported.loss) / float(want_reported.loss) - 1),
        "max_gradient_error": errors[worst],
        "worst_parameter": worst,
    }


def random_batch(config: Config) -> Batch:
    """Random tokens with about half of them counted, rows of no counted token among them; in documents of random
    lengths, where the config packs them."""
    rng = np.random.default_rng(config.run.seed)
    shape = (
        config.parallel.grad_accumulation,
        config.data.batch_size // config.parallel.grad_accumulation,
        config.data.seq_len,
    )
    tokens = rng.integers(0, config.model.vocab_size, (*shape[:2], shape[2] + 1), dtype=np.int32)
    weights = rng.integers(0, 2, shape) * rng.integers(0, 4, (*shape[:2], 1)).clip(0, 1)
    places = np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape)
    is_first = (rng.random(shape) < 4 / shape[2]) & config.data.pack_documents
    begins = np.maximum.accumulate(np.where(is_first, places, 0), axis=-1)
    fields: dict[str, Any] = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "positions": places - begins,
        "segment_ids": np.cumsum(is_first, axis=-1, dtype=np.int32),
        "loss_weights": weights.astype(np.float32),
    }
    return Batch(**fields)


def true_sizes(model: Model, params: PyTree) -> dict[str, np.ndarray]:
    """The parameters by path, on the host, without padding, layers in order."""
    slots = slots_of(model.layout.layer_order(model.config.num_units))

    def true(leaf: Any, names: tuple[str | None, ...]) -> np.ndarray:
        whole = np.asarray(leaf)[tuple(slice(model.config.vocab_size if name == "vocab" else None) for name in names)]
        return whole[slots] if names[0] == "layers" else whole

    cut = jax.tree.map(true, params, model.names)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(cut)
    }


def gradient_errors(grads: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Per parameter: max |difference| / max(max |its gradient|, 1e-3 x the largest of any parameter). NaN is infinite.

    Some gradients are zero by mathematics (a key bias under softmax): those are held against the others' scale.
    """
    largest = max(float(np.abs(g).max()) for g in want.values())
    assert largest > 0, "the reference's gradients are all zero: nothing is compared"

    def error(name: str) -> float:
        difference = float(np.abs(grads[name] - want[name]).max())
        return (
            difference / max(float(np.abs(want[name]).max()), 1e-3 * largest) if difference == difference else math.inf
        )

    return {name: error(name) for name in want}


def compiled_traffic(config: Config, mesh: Mapping[str, int]) -> dict[str, dict[str, dict[str, int]]]:
    """The collectives of the train step as compiled for H100s: {axes: {op: {"count", "bytes"}}} per device."""
    schedule = pipelines.make_schedule(config, mesh["pipe"])
    taken = Program.of(schedule).taken if schedule is not None else {}
    return summarize(read_collectives(compiled_step(config, mesh).as_text(), mesh, taken))


def compiled_step(config: Config, mesh: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Any:
    """The train step, compiled for devices that need not be here: H100s, by default."""
    # Rounds of a ring that documents spare depend on the text: what is counted is the most that is sent.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, pack_documents=False))
    size = math.prod(mesh.values())
    if devices is None:
        devices = gpu_devices(f"h100:{size // 8}x8" if size % 8 == 0 else f"h100:1x{size}")
    sizes = ",".join(f"{axis}={n}" for axis, n in mesh.items())
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, mesh=sizes, dcn_mesh=""),
        # What a layout's strategies send is the same with any optimizer; Muon's own exchanges are not among it.
        optimizer=OptimizerConfig(clip_norm=config.optimizer.clip_norm),
    )
    with jax.enable_x64(config.run.precision == "float64"):
        lowered, *_ = lower(config, devices, jax.default_backend())
        return lowered.compile()


def expected_traffic(config: Config, mesh: Mapping[str, int], target: Target = H100) -> Traffic:
    """What the strategies' formulas say that `compiled_traffic` finds."""
    settings, schedule = traffic_settings(config, mesh, target), pipelines.make_schedule(config, mesh["pipe"])
    if schedule is None or has_formulas(schedule):
        return step_traffic(config.model, settings)
    if lengths := pipelines.slice_lengths(config, mesh, schedule):
        settings = dataclasses.replace(settings, seq_len=max(lengths))
    return {"pipe": {"collective-permute": step_traffic(config.model, settings)["pipe"]["collective-permute"]}}


def has_formulas(schedule: Schedule) -> bool:
    """Whether the formulas have all of its traffic, not the hops alone."""
    has_others = schedule.kind in looped.KINDS or schedule.num_slices > 1
    is_updated_between = schedule.num_stages > 1 and schedule.kind in KINDS and not KINDS[schedule.kind].synchronous
    return not has_others and not is_updated_between


def traffic_settings(config: Config, mesh: Mapping[str, int], target: Target = H100) -> TrafficSettings:
    dtypes, schedule = Precision.of(config.run), pipelines.make_schedule(config, mesh["pipe"])
    stages = None
    if schedule is not None:
        is_looped = schedule.kind in looped.KINDS
        stages = Stages(
            permutes=2 * looped.num_ticks(schedule) if is_looped else Program.of(schedule).permutes,
            num_chunks=schedule.num_chunks,
            layers_per_chunk=max(pipelines.layers_per_part(config, schedule)),
            keeps_residuals=config.parallel.pipeline_residuals,
            spreads_head=config.parallel.spread_head,
        )
    return TrafficSettings(
        mesh=mesh,
        batch_size=config.data.batch_size,
        seq_len=config.data.seq_len,
        num_microbatches=config.parallel.grad_accumulation,
        compute_bytes=dtypes.compute.itemsize if target.platform != "cpu" else max(4, dtypes.compute.itemsize),
        reduce_bytes=dtypes.reduce.itemsize if target.platform != "cpu" else max(4, dtypes.reduce.itemsize),
        sequence_parallel=config.parallel.sequence_parallel,
        reshard_after_forward=pipelines.reshards(config.parallel.reshard_after_forward, mesh["pipe"]),
        remat=config.parallel.remat,
        zero=config.parallel.zero,
        context=pipelines.context_strategy(config, mesh, schedule),
        dispatch=setup.expert_strategy(config, target.platform, target.device_kind),
        folds=target.folds,
        masks_by_place=target.masks_by_place,
        stages=stages,
    )


def agree(found: Mapping[str, Mapping[str, Mapping[str, int]]], expected: Traffic) -> bool:
    """Whether every expected collective has its bytes, and what is unexpected is next to nothing."""
    total = sum(size for ops in expected.values() for size in ops.values())
    keys = {(axes, op) for side in (found, expected) for axes, ops in side.items() for op in ops}

    def close(axes: str, op: str) -> bool:
        want = expected.get(axes, {}).get(op, 0)
        have = found.get(axes, {}).get(op, {}).get("bytes", 0)
        return abs(have - want) <= (TRAFFIC_TOLERANCE * want + SCALARS_BYTES if want else TRAFFIC_TOLERANCE * total)

    return all(close(axes, op) for axes, op in keys)
