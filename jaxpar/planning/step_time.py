"""How long a step takes, and where the time goes: kernels, traffic that nothing hides, the pipeline's bubble, the update.

    step      = pipeline + once + update
    pipeline  = M t + (P - 1) t' / C     M microbatches; t of the slowest stage, t' of a mean one; C chunks
    t         = kernels + traffic that nothing hides, of one microbatch
    exposed   = traffic - overlap x min(traffic, kernels beside it)

A collective moves bytes at its busbw (nccl-tests, doc/PERFORMANCE.md: all-gather, reduce-scatter and all-to-all send
(n - 1) / n of the whole buffer, an all-reduce twice that) over the level of the hierarchy that the axis crosses, and
waits the latency of a ring's n - 1 hops, or of a tree's 2 log2(n) where that is less. Weights gathered and gradients
scattered per microbatch have that microbatch's kernels beside them; those moved once per step have one microbatch's.
Source of the bubble: Megatron-LM (arXiv 2104.04473), section 2.2; schedules without a closed form are simulated.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.parallel.pipeline.kinds import make
from jaxpar.parallel.pipeline.simulate import Times, simulate
from jaxpar.planning.calibration import Calibration
from jaxpar.planning.flops import attention_flops_per_token, matmul_flops_per_token, recomputed_flops_per_token
from jaxpar.planning.job import Job
from jaxpar.planning.kernel_time import (
    LayerSeconds,
    Seconds,
    head_seconds,
    layer_seconds,
    num_moe_layers,
    rates,
)
from jaxpar.planning.traffic import Traffic, TrafficSettings, activation_traffic, weight_traffic
from meshes.mesh import MESH_AXES
from models.count import num_parameters

_RING_BUBBLES = {"1f1b": 1.0, "gpipe": 1.0, "eager-1f1b": 1.0, "interleaved-1f1b": 1.0, "looped-bfs": 1.0}
"""Schedules whose bubble is (P - 1) / C microbatches."""
_UPDATE_BYTES = {"adamw": 30.0, "lion": 22.0, "sgd": 14.0}
"""Read and written per parameter: master copy, moments and gradient in 4 bytes each, the weight in 2."""
_UPDATE_SECONDS = 5e-3
"""Of the step's own: the update's launch, the norm of all gradients, the loss's sum and the next batch."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, of the slowest device."""

    matmul: float
    attention: float
    elementwise: float
    recompute: float
    head: float
    overhead: float
    """What the framework adds to its kernels."""
    exposed: Mapping[str, float]
    """By axis, "+" between joined ones: traffic that nothing hides."""
    hidden: Mapping[str, float]
    """By axis: traffic beside compute, which is no part of the step."""
    bubble: float
    optimizer: float
    jitter: float
    """What waiting for the slowest of many servers costs."""
    step: float
    tokens_per_second_per_device: float
    mfu: float
    """Model FLOPs, a causal mask's half of attention's, over the peak of the job's precision."""
    hfu: float

    @property
    def compute(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.recompute + self.head + self.overhead


def predict(job: Job, calibration: Calibration) -> StepTime:
    """The time of a step of a job that `Job.check` passes.

    Raises:
      ValueError: the chip does not multiply in the job's precision, or the cluster has too few devices.
    """
    speeds = rates(job, calibration)
    framework, overlap = calibration.framework, calibration.chip.overlap
    dense, moe = layer_seconds(job, calibration, speeds)
    head = head_seconds(job, calibration, speeds)
    model, stages, microbatches = job.model, job.mesh["pipe"], job.num_microbatches
    num_moe = num_moe_layers(model)
    layer = _mean(dense, moe, num_moe / model.num_layers)
    again = _recomputed_share(job) * (layer.matmul.forward + layer.attention.forward)
    if not job.remat_policy.keeps_all:
        again += layer.elementwise.forward
    per_layer = framework.overhead * (layer.all.total + again)
    layers, heads = _slowest_stage(job, per_layer, framework.overhead * head.total)
    kernels = layers * per_layer + heads * framework.overhead * head.total

    exposed: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)

    def account(axes: str, seconds: float, beside: float, times: float) -> float:
        """Counts traffic of `times` microbatches; what is exposed, of one."""
        first = axes.split("+", 1)[0]
        covered = overlap * min(seconds, beside) if first in framework.overlaps else 0.0
        exposed[axes] += times * (seconds - covered)
        hidden[axes] += times * covered
        return seconds - covered

    per_microbatch = job.zero == 3 and (stages == 1 or job.reshard_after_forward)
    weights, activations = _traffic(job)
    share = layers / model.num_layers
    slow = kernels
    for axes, ops in activations.items():
        slow += account(axes, share * _seconds(job, calibration, axes, ops, layers), kernels, microbatches)
    if num_moe:
        seconds = _expert_seconds(job, calibration) * num_moe * share
        slow += account("expert", seconds, kernels, microbatches)
    if per_microbatch:
        for axes, ops in weights.items():
            data = {op: size for op, size in ops.items() if op != "all-reduce"}
            slow += account(axes, share * _seconds(job, calibration, axes, data, 2 * layers), kernels, microbatches)
    # An interleaved pipeline's chunks are done one after another over its first and last P microbatches.
    window = kernels * (min(stages, microbatches) if job.chunks > 1 else 1)
    once = 0.0
    for axes, ops in weights.items():
        rest = {op: size for op, size in ops.items() if not per_microbatch or op == "all-reduce"}
        once += account(axes, share * _seconds(job, calibration, axes, rest, layers), window, 1)
    hop = _hop_seconds(job, calibration)
    slow += account("pipe", hop, kernels, microbatches) if stages > 1 else 0.0

    bubble = _bubble(job, slow * (model.num_layers + heads) / ((layers + heads) * stages) if stages > 1 else slow)
    update = _update_seconds(job, calibration)
    ideal = microbatches * slow + bubble + once + update
    servers = max(1.0, job.num_devices / job.cluster.levels[0].size)
    jitter = ideal * calibration.chip.jitter * math.log2(servers)
    step = ideal + jitter
    matmul, forward = matmul_flops_per_token(model), attention_flops_per_token(model, job.seq_len, causal=True)
    recomputed = recomputed_flops_per_token(model, job.seq_len, job.remat_policy)
    rate = job.tokens_per_step / step / job.num_devices
    peak = job.cluster.chip.peak_flops.get(job.precision, job.cluster.chip.peak_flops["bfloat16"])
    times = microbatches * layers
    return StepTime(
        matmul=times * layer.matmul.total,
        attention=times * layer.attention.total,
        elementwise=times * layer.elementwise.total,
        recompute=times * again,
        head=microbatches * heads * head.total,
        overhead=microbatches * kernels * (1 - 1 / framework.overhead),
        exposed=dict(exposed),
        hidden=dict(hidden),
        bubble=bubble,
        optimizer=update,
        jitter=jitter,
        step=step,
        tokens_per_second_per_device=rate,
        mfu=rate * 3 * (matmul + forward) / peak,
        hfu=rate * (3 * (matmul + forward) + recomputed) / peak,
    )


def _mean(dense: LayerSeconds, moe: LayerSeconds, share: float) -> LayerSeconds:
    if dense is moe or not share:
        return dense

    def mix(a: Seconds, b: Seconds) -> Seconds:
        return a * (1 - share) + b * share

    return LayerSeconds(
        mix(dense.matmul, moe.matmul), mix(dense.attention, moe.attention), mix(dense.elementwise, moe.elementwise)
    )


def _recomputed_share(job: Job) -> float:
    """Of the layers' forward FLOPs."""
    full = job.model.num_layers * 0.0 + recomputed_flops_per_token(job.model, job.seq_len, job.remat_policy)
    return full / (
        matmul_flops_per_token(job.model)
        - 2.0 * job.model.vocab_size * job.model.embed_dim
        + attention_flops_per_token(job.model, job.seq_len, causal=False)
    )


def _slowest_stage(job: Job, layer: float, head: float) -> tuple[float, float]:
    """(layers, heads) of the stage that takes longest: stages of equal depth where the layers divide, the head's with
    one more kernel; else as many layers fewer beside the head as its time is worth."""
    num_layers, stages = job.model.num_layers, job.mesh["pipe"]
    if stages == 1:
        return num_layers, 1.0
    if num_layers % stages == 0:
        return num_layers / stages, 1.0
    last = math.floor((num_layers * layer + head) / (stages * layer) - head / layer + 1e-9)
    others = math.ceil((num_layers - last) / (stages - 1))
    return (last, 1.0) if last * layer + head >= others * layer else (others, 0.0)


@functools.lru_cache(maxsize=4096)
def _cached_traffic(config, mesh: tuple[int, ...], **settings) -> tuple[Traffic, Traffic]:
    made = TrafficSettings(mesh=dict(zip(MESH_AXES, mesh, strict=True)), num_microbatches=1, **settings)
    return weight_traffic(config, made), activation_traffic(config, made)


def _traffic(job: Job) -> tuple[Traffic, Traffic]:
    """Of one microbatch through all layers: what moves weights, what moves activations."""
    reshard = job.reshard_after_forward and not (job.zero < 3)
    return _cached_traffic(
        job.model,
        tuple(job.mesh[axis] for axis in MESH_AXES),
        batch_size=job.batch_size // job.num_microbatches,
        seq_len=job.seq_len,
        compute_bytes=job.compute_bytes,
        reduce_bytes=job.reduce_bytes,
        sequence_parallel=job.sequence_parallel,
        reshard_after_forward=reshard,
        remat="none" if job.remat == "selective" else job.remat,
        zero=job.zero,
        context=job.context,
    )


def _seconds(job: Job, calibration: Calibration, axes: str, ops: Mapping[str, int], count: float) -> float:
    """Of the collectives of one group of axes; `count` of each operation, for the latency."""
    names = axes.split("+")
    size = math.prod(job.mesh[axis] for axis in names)
    stride = math.prod(job.mesh[axis] for axis in MESH_AXES[MESH_AXES.index(names[-1]) + 1 :])
    bandwidth = job.cluster.bandwidth(stride, size) * calibration.chip.network
    hop = job.cluster.latency(stride, size)
    hops = min(size - 1, 2 * math.log2(size))
    total = 0.0
    for op, num_bytes in ops.items():
        if op == "collective-permute":
            total += num_bytes / bandwidth + count * hop
            continue
        if op == "all-to-all":
            total += num_bytes * _per_byte(job, stride, size) / calibration.chip.network + count * hop
            continue
        factor = (size - 1) / size * (2 if op == "all-reduce" else 1)
        total += factor * num_bytes / bandwidth + count * hops * hop
    return total


def _per_byte(job: Job, stride: int, size: int) -> float:
    """Seconds per byte of an all-to-all: what a device sends beyond each unit goes through its own card there."""
    total, inside = 0.0, 1
    crossed = job.cluster.level_of(stride, size)
    for level in job.cluster.levels:
        reached = size if level is crossed else max(inside, min(size, level.size // stride))
        bandwidth = job.cluster.bandwidth(stride, reached) if level is job.cluster.levels[0] else level.bandwidth
        total += (reached - inside) / size / bandwidth
        inside = reached
        if level is crossed:
            break
    return total


def _expert_seconds(job: Job, calibration: Calibration) -> float:
    """Tokens to their experts and back, forward and backward, in one layer of one microbatch."""
    tensor = job.mesh["tensor"] if job.sequence_parallel else 1
    routed = job.microbatch_tokens / tensor * job.model.num_experts_per_token
    num_bytes = 4 * routed * job.model.embed_dim * job.compute_bytes
    if job.mesh["expert"] == 1:
        return 0.0
    return _seconds(job, calibration, "expert", {"all-to-all": int(num_bytes)}, 4)


def _hop_seconds(job: Job, calibration: Calibration) -> float:
    """Activations in and gradients out of a stage's chunks, of one microbatch."""
    if job.mesh["pipe"] == 1:
        return 0.0
    part = job.mesh["tensor"] if job.sequence_parallel else 1
    num_bytes = job.microbatch_tokens // part * job.model.embed_dim * job.compute_bytes
    hops = 2 * job.chunks
    return _seconds(job, calibration, "pipe", {"collective-permute": hops * num_bytes}, hops)


def _bubble(job: Job, stage: float) -> float:
    """Idle seconds of the slowest stage, given a mean stage's for one microbatch."""
    stages = job.mesh["pipe"]
    if stages == 1:
        return 0.0
    if job.pipeline in _RING_BUBBLES:
        return (stages - 1) * stage / job.chunks
    return stage * _simulated_bubble(job.pipeline, stages, job.num_microbatches, job.chunks)


@functools.lru_cache(maxsize=1024)
def _simulated_bubble(kind: str, stages: int, microbatches: int, chunks: int) -> float:
    """In units of one microbatch's forward and backward pass through a stage, whose B and W take as long as its F."""
    report = simulate(make(kind, stages, microbatches, chunks), Times(1 / 3, 1 / 3, 1 / 3))
    return report.makespan - microbatches


def _update_seconds(job: Job, calibration: Calibration) -> float:
    """Reading and writing a device's part of the optimizer's state."""
    sharded = math.prod(job.mesh[axis] for axis in ("pipe", "fsdp", "expert", "context", "tensor"))
    if job.zero < 3:
        sharded *= job.mesh["data"]
    size = num_parameters(job.model) / sharded
    memory = job.cluster.chip.memory_bandwidth * calibration.chip.memory
    return _UPDATE_SECONDS + size * _UPDATE_BYTES[job.optimizer] / memory
