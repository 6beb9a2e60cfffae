"""How long a step takes, and where the time goes: kernels, traffic that nothing hides, a pipeline's bubble, the update.

    step      = (M t + (P - 1) t' / C + once + update) (1 + jitter log2(servers))
    t         = kernels + exposed traffic of one microbatch in the slowest stage; t' in a mean one; C chunks
    exposed   = traffic - overlap x min(traffic, kernels beside it)

A collective moves bytes at its busbw (nccl-tests, doc/PERFORMANCE.md: all-gather, reduce-scatter and all-to-all send
(n - 1) / n of the whole buffer, an all-reduce twice that) over the levels of the hierarchy that its axis crosses, and
waits the latency of a ring's n - 1 hops, or of a tree's 2 log2(n) where that is less. Weights gathered and gradients
scattered per microbatch have that microbatch's kernels beside them; those moved once per step the first and the last
microbatch's, or those of the first and last P in an interleaved pipeline, whose chunks are done one after another.
Source of the bubble: Megatron-LM (arXiv 2104.04473), section 2.2, and planning/schedules.py.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpar.planning.calibration import Calibration
from jaxpar.planning.collectives import bus_factor
from jaxpar.planning.flops import (
    attention_flops_per_token,
    head_matmul_flops_per_token,
    matmul_flops_per_token,
    recomputed_flops_per_token,
)
from jaxpar.planning.job import Job
from jaxpar.planning.kernel_time import (
    LayerSeconds,
    Seconds,
    head_seconds,
    layer_seconds,
    peak_flops,
    rates,
)
from jaxpar.planning.schedules import bubble as schedule_bubble
from jaxpar.planning.traffic import Stages, Traffic, TrafficSettings, activation_traffic, step_traffic, weight_traffic
from meshes.mesh import MESH_AXES
from models.config import ModelConfig
from models.count import num_moe_layers, num_parameters

_UPDATE_BYTES = {"adamw": 30.0, "lion": 22.0, "sgd": 14.0}
"""Read and written per parameter: master copy, moments and gradient in 4 bytes each, the weight in 2."""
_UPDATE_SECONDS = 5e-3
"""Once per step: the update's launch, the norm of all gradients, the loss's sum, the next batch."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, of the slowest device."""

    matmul: float
    """Of the layers' products with weights."""
    attention: float
    elementwise: float
    recompute: float
    head: float
    """The head's product and the loss."""
    overhead: float
    """What the framework adds to its kernels."""
    exposed: Mapping[str, float]
    """By axis, "+" between joined ones: traffic that nothing hides."""
    hidden: Mapping[str, float]
    """By axis: traffic beside compute, which is no part of the step."""
    bubble: float
    optimizer: float
    jitter: float
    """What many servers wait for the slowest."""
    step: float
    tokens_per_second_per_device: float
    mfu: float
    """Model FLOPs, a causal mask's half of attention's, over the peak of the job's precision."""
    hfu: float

    @property
    def compute(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.recompute + self.head + self.overhead


@dataclass(frozen=True)
class _Stage:
    """The slowest stage: what it holds, and the seconds of one microbatch's kernels, the framework's part included."""

    layers: float
    heads: float
    layer: LayerSeconds
    again: float
    """What a layer's backward pass computes again."""
    head: Seconds
    overhead: float

    @property
    def layer_total(self) -> float:
        return self.overhead * (self.layer.total + self.again)

    @property
    def kernels(self) -> float:
        return self.layers * self.layer_total + self.heads * self.overhead * self.head.total

    def mean_share(self, model: ModelConfig, stages: int) -> float:
        """A mean stage's time over this one's."""
        return (model.num_layers + self.heads) / ((self.layers + self.heads) * stages)


class _Ledger:
    """Adds up traffic, beside compute and not."""

    def __init__(self, job: Job, calibration: Calibration):
        self.exposed: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)
        self._overlap = calibration.chip.overlap
        self._axes = set(calibration.framework.overlaps)
        # Tokens travel to experts beside another chunk's kernels, where they leave the server, or beside none.
        stride, size = _place(job, "expert")
        if job.chunks == 1 or stride * size <= job.cluster.levels[0].size:
            self._axes.discard("expert")

    def charge(self, axes: str, seconds: float, beside: float, times: int) -> float:
        """Traffic of `times` microbatches, each with `beside` seconds of kernels; what is exposed of one."""
        covered = self._overlap * min(seconds, beside) if axes.split("+", 1)[0] in self._axes else 0.0
        self.exposed[axes] += times * (seconds - covered)
        self.hidden[axes] += times * covered
        return seconds - covered


def predict(job: Job, calibration: Calibration) -> StepTime:
    """The time of a step of a job that `Job.check` passes.

    Raises:
      ValueError: the chip does not multiply in the job's precision, or the cluster has too few devices.
    """
    model, stages, microbatches = job.model, job.mesh["pipe"], job.num_microbatches
    stage = _slowest_stage(job, calibration)
    kernels, ledger = stage.kernels, _Ledger(job, calibration)
    slow = kernels + _per_microbatch(job, calibration, stage, ledger)
    once = _once(job, calibration, stage, ledger)
    bubble = stage.mean_share(model, stages) * slow * schedule_bubble(job.pipeline, stages, microbatches, job.chunks)
    update = _update_seconds(job, calibration)
    ideal = microbatches * slow + bubble + once + update
    jitter = ideal * _jitter(job, calibration)

    rate = job.tokens_per_step / (ideal + jitter) / job.num_devices
    per_token = matmul_flops_per_token(model) + attention_flops_per_token(model, job.seq_len, causal=True)
    recomputed = recomputed_flops_per_token(model, job.seq_len, job.remat_policy)
    if _reruns(job, calibration):
        recomputed += _forward_flops_per_token(job)
    mfu = rate * 3 * per_token / peak_flops(job.cluster.chip, job.precision)
    times = microbatches * stage.layers
    return StepTime(
        matmul=times * stage.layer.matmul.total,
        attention=times * stage.layer.attention.total,
        elementwise=times * stage.layer.elementwise.total,
        recompute=times * stage.again,
        head=microbatches * stage.heads * stage.head.total,
        overhead=microbatches * kernels * (1 - 1 / stage.overhead),
        exposed=dict(ledger.exposed),
        hidden=dict(ledger.hidden),
        bubble=bubble,
        optimizer=update,
        jitter=jitter,
        step=ideal + jitter,
        tokens_per_second_per_device=rate,
        mfu=mfu,
        hfu=mfu * (1 + recomputed / (3 * per_token)),
    )


def kernel_seconds(job: Job, calibration: Calibration) -> tuple[float, float]:
    """(the slowest stage's kernels for one microbatch, a mean stage's as the bubble counts it): with M of the first and
    the schedule's bubble of the second predict's step is never shorter."""
    stage = _slowest_stage(job, calibration)
    kernels = stage.kernels * (1 + _jitter(job, calibration))
    return kernels, kernels * stage.mean_share(job.model, job.mesh["pipe"])


def _jitter(job: Job, calibration: Calibration) -> float:
    return calibration.chip.jitter * math.log2(max(1.0, job.num_devices / job.cluster.levels[0].size))


def _slowest_stage(job: Job, calibration: Calibration) -> _Stage:
    """Stages of equal depth where the layers divide, the slowest then the head's; else with as many layers fewer beside
    the head as its time is worth."""
    speeds, model, stages = rates(job, calibration), job.model, job.mesh["pipe"]
    dense, experts = layer_seconds(job, calibration, speeds)
    layer = dense.mixed(experts, num_moe_layers(model) / model.num_layers)
    again = _recomputed_share(job) * (layer.matmul.forward + layer.attention.forward)
    if not job.remat_policy.keeps_all:
        again += layer.elementwise.forward
    if _reruns(job, calibration):
        again += layer.matmul.forward + layer.attention.forward + layer.elementwise.forward
    head = head_seconds(job, calibration, speeds)

    def stage(layers: float, heads: float) -> _Stage:
        return _Stage(layers, heads, layer, again, head, calibration.framework.overhead)

    if stages == 1 or model.num_layers % stages == 0:
        return stage(model.num_layers / stages, 1)
    worth = head.total / (layer.total + again)
    last = max(0, math.floor((model.num_layers + worth) / stages - worth))
    others = math.ceil((model.num_layers - last) / (stages - 1))
    return max(stage(last, 1), stage(others, 0), key=lambda each: each.kernels)


def _reruns(job: Job, calibration: Calibration) -> bool:
    return calibration.framework.reruns_stages and job.mesh["pipe"] > 1 and not job.pipeline_residuals


def _recomputed_share(job: Job) -> float:
    """Of the layers' forward FLOPs."""
    return recomputed_flops_per_token(job.model, job.seq_len, job.remat_policy) / _forward_flops_per_token(job)


def _forward_flops_per_token(job: Job) -> float:
    """Of all layers, attention in full."""
    attention = attention_flops_per_token(job.model, job.seq_len, causal=False)
    return matmul_flops_per_token(job.model) - head_matmul_flops_per_token(job.model) + attention


def _per_microbatch(job: Job, calibration: Calibration, stage: _Stage, ledger: _Ledger) -> float:
    """Exposed seconds of one microbatch's traffic: activations, tokens to experts, hops, and weights that are gathered
    each time."""
    share, kernels, times = stage.layers / job.model.num_layers, stage.kernels, job.num_microbatches
    weights, activations = _traffic(job)
    exposed = 0.0
    for axes, ops in activations.items():
        seconds = share * _seconds(job, calibration, axes, ops, job.model.num_layers)
        exposed += ledger.charge(axes, seconds, kernels, times)
    if job.mesh["expert"] > 1 and job.model.num_experts:
        seconds = share * num_moe_layers(job.model) * _expert_seconds(job, calibration)
        exposed += ledger.charge("expert", seconds, kernels, times)
    if job.mesh["pipe"] > 1:
        exposed += ledger.charge("pipe", _hop_seconds(job, calibration), kernels, times)
    if _gathers_each_time(job):
        for axes, ops in weights.items():
            gathers = {op: size for op, size in ops.items() if op != "all-reduce"}
            seconds = share * _seconds(job, calibration, axes, gathers, 2 * job.model.num_layers)
            exposed += ledger.charge(axes, seconds, kernels, times)
    return exposed


def _once(job: Job, calibration: Calibration, stage: _Stage, ledger: _Ledger) -> float:
    """Exposed seconds of what is moved once per step."""
    share, rounds = stage.layers / job.model.num_layers, min(job.mesh["pipe"], job.num_microbatches)
    window = stage.kernels * (rounds if job.chunks > 1 else 1)
    exposed = 0.0
    for axes, ops in _traffic(job)[0].items():
        rest = {op: size for op, size in ops.items() if op == "all-reduce" or not _gathers_each_time(job)}
        if rest:
            seconds = share * _seconds(job, calibration, axes, rest, job.model.num_layers)
            exposed += ledger.charge(axes, seconds, window, 1)
    return exposed


def job_traffic(job: Job) -> dict[str, int]:
    """Bytes that each device moves per step, by mesh axis, "+" between joined ones: collectives' whole buffers, as
    `traffic` counts them. A pipeline's hops are those that carry something."""
    stages = None
    if job.mesh["pipe"] > 1:
        num_parts = job.mesh["pipe"] * job.chunks
        stages = Stages(
            permutes=2 * job.num_microbatches * job.chunks,
            num_chunks=job.chunks,
            layers_per_chunk=-(-job.model.num_units // num_parts),
            keeps_residuals=job.pipeline_residuals,
        )
    settings = TrafficSettings(
        mesh=job.mesh,
        batch_size=job.batch_size,
        seq_len=job.seq_len,
        num_microbatches=job.num_microbatches,
        compute_bytes=job.compute_bytes,
        reduce_bytes=job.reduce_bytes,
        sequence_parallel=job.sequence_parallel,
        reshard_after_forward=job.reshard_after_forward,
        remat="none" if job.remat_policy.keeps_all else job.remat,
        zero=job.zero,
        context=job.context,
        stages=stages,
    )
    return {axes: sum(ops.values()) for axes, ops in step_traffic(job.model, settings).items()}


def _gathers_each_time(job: Job) -> bool:
    return job.zero == 3 and (job.mesh["pipe"] == 1 or job.reshard_after_forward)


def _traffic(job: Job) -> tuple[Traffic, Mapping[str, Mapping[str, float]]]:
    """Of one microbatch through all layers: what moves weights, what moves activations."""
    remat = job.remat_policy
    common = job.model, tuple(job.mesh[axis] for axis in MESH_AXES), job.compute_bytes, job.reduce_bytes, job.zero
    weights = _cached_traffic(
        weight_traffic,
        *common,
        reshard_after_forward=job.reshard_after_forward and job.zero == 3,
        remat=job.remat if remat.every > 1 else "full",
    )
    # Proportional to a microbatch's tokens: made once for them all.
    activations = _cached_traffic(
        activation_traffic,
        *common,
        batch_size=job.batch_size,
        seq_len=job.seq_len,
        sequence_parallel=job.sequence_parallel,
        remat="none" if remat.keeps_all else job.remat,
        context=job.context,
    )
    times = job.num_microbatches
    return weights, {axes: {op: size / times for op, size in ops.items()} for axes, ops in activations.items()}


@functools.lru_cache(maxsize=65536)
def _cached_traffic(
    traffic: Callable[[ModelConfig, TrafficSettings], Traffic],
    config: ModelConfig,
    mesh: tuple[int, ...],
    compute_bytes: int,
    reduce_bytes: int,
    zero: int,
    batch_size: int = 1,
    seq_len: int = 1,
    **settings,
) -> Traffic:
    sizes = dict(zip(MESH_AXES, mesh, strict=True))
    own = {"compute_bytes": compute_bytes, "reduce_bytes": reduce_bytes, "zero": zero, **settings}
    return traffic(config, TrafficSettings(sizes, batch_size, seq_len, num_microbatches=1, **own))


def _place(job: Job, axes: str) -> tuple[int, int]:
    """(stride, size) of the groups of one or several axes."""
    names = axes.split("+")
    inside = MESH_AXES[MESH_AXES.index(names[-1]) + 1 :]
    return math.prod(job.mesh[axis] for axis in inside), math.prod(job.mesh[axis] for axis in names)


def _seconds(job: Job, calibration: Calibration, axes: str, ops: Mapping[str, float], count: float) -> float:
    """Of the collectives of one group of axes, all of an operation's bytes in `count` equal ones."""
    stride, size = _place(job, axes)
    bandwidth = job.cluster.bandwidth(stride, size) * calibration.chip.network
    hop = job.cluster.latency(stride, size)
    latency = count * hop * min(size - 1, 2 * math.log2(size))
    total = 0.0
    for op, num_bytes in ops.items():
        if op == "collective-permute":
            total += num_bytes / bandwidth + count * hop
        elif op == "all-to-all":
            total += num_bytes * _all_to_all(job, stride, size) / calibration.chip.network + count * hop
        else:
            total += bus_factor(op.replace("-", "_"), size) * num_bytes / bandwidth + latency
    return total


def _all_to_all(job: Job, stride: int, size: int) -> float:
    """Seconds per byte: unlike a ring's, each device's bytes for other servers leave through its own network card."""
    total, inside, crossed = 0.0, 1, job.cluster.level_of(stride, size)
    for level in job.cluster.levels:
        reached = size if level is crossed else max(inside, min(size, level.size // stride))
        within = level is job.cluster.levels[0] and reached > 1
        bandwidth = job.cluster.bandwidth(stride, reached) if within else level.bandwidth
        total += (reached - inside) / size / bandwidth
        if level is crossed:
            break
        inside = reached
    return total


def _expert_seconds(job: Job, calibration: Calibration) -> float:
    """Tokens to their experts and back, forward and backward, in one layer of one microbatch."""
    part = job.mesh["tensor"] if job.sequence_parallel else 1
    routed = job.microbatch_tokens / part * job.model.num_experts_per_token
    num_bytes = 4 * routed * job.model.embed_dim * job.compute_bytes
    return _seconds(job, calibration, "expert", {"all-to-all": num_bytes}, 4)


def _hop_seconds(job: Job, calibration: Calibration) -> float:
    """Activations into a stage's chunks and gradients out of them, of one microbatch."""
    hops = 2 * job.chunks
    return _seconds(job, calibration, "pipe", {"collective-permute": hops * _hop_bytes(job)}, hops)


def _hop_bytes(job: Job) -> float:
    part = job.mesh["tensor"] if job.sequence_parallel else 1
    return job.microbatch_tokens / part * job.model.embed_dim * job.compute_bytes


def _update_seconds(job: Job, calibration: Calibration) -> float:
    """Reading and writing a device's part of the optimizer's state."""
    axes = ("pipe", "fsdp", "expert", "context", "tensor", *(("data",) if job.zero < 3 else ()))
    part = num_parameters(job.model) / math.prod(job.mesh[axis] for axis in axes)
    memory = job.cluster.chip.memory_bandwidth * calibration.chip.memory
    return _UPDATE_SECONDS + part * _UPDATE_BYTES[job.optimizer] / memory
