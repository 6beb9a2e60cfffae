"""How long a step takes, and where the time goes: kernels, traffic that nothing hides, a pipeline's bubble, the update.

    step      = (M t + (P - 1) t' / C + once + update) (1 + jitter log2(servers))
    t         = kernels + exposed traffic of one microbatch in the slowest stage; t' in a mean one; C chunks
    exposed   = traffic - overlap x min(traffic, kernels beside it)

How long traffic takes by itself is in link_time. Weights gathered and gradients scattered per microbatch have that
microbatch's kernels beside them; those moved once per step the first and the last microbatch's, or those of the first
and last P in an interleaved pipeline, whose chunks are done one after another. Each axis is taken to have those kernels
for itself: that fits published runs a little better than to let each second of them hide but one.

Source of the bubble: Megatron-LM (arXiv 2104.04473), section 2.2, and planning/schedules.py.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpar.planning.calibration import Calibration
from jaxpar.planning.flops import (
    attention_flops_per_token,
    head_matmul_flops_per_token,
    matmul_flops_per_token,
    recomputed_flops_per_token,
)
from jaxpar.planning.job import Job, Numbers
from jaxpar.planning.job_traffic import (
    MicrobatchTraffic,
    gathers_each_time,
    least_microbatch_traffic,
    microbatch_traffic,
)
from jaxpar.planning.kernel_time import (
    LayerSeconds,
    Seconds,
    head_seconds,
    layer_seconds,
    peak_flops,
    rates,
)
from jaxpar.planning.link_time import collective_seconds, place
from jaxpar.planning.schedules import bubble as schedule_bubble
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

    layers: Numbers
    heads: Numbers
    layer: LayerSeconds
    again: Numbers
    """What a layer's backward pass computes again."""
    head: Seconds
    overhead: float

    @property
    def kernels(self) -> Numbers:
        layers = self.layers * (self.layer.total + self.again)
        return self.overhead * (layers + self.heads * self.head.total)

    def mean_share(self, model: ModelConfig, stages: int) -> Numbers:
        """A mean stage's time over this one's."""
        return (model.num_layers + self.heads) / ((self.layers + self.heads) * stages)


class _Ledger:
    """Adds up traffic, beside compute and not."""

    def __init__(self, job: Job, calibration: Calibration):
        self.exposed: dict[str, Numbers] = defaultdict(float)
        self.hidden: dict[str, Numbers] = defaultdict(float)
        self._overlaps: dict[str, Numbers] = dict.fromkeys(calibration.framework.overlaps, calibration.chip.overlap)
        if "expert" in self._overlaps:
            # Tokens travel to experts beside another chunk's kernels, where they leave the server, or beside none.
            stride, size = place(job, "expert")
            self._overlaps["expert"] *= (job.chunks > 1) * (stride * size > job.cluster.levels[0].size)

    def charge(self, axes: str, seconds: Numbers, beside: Numbers, times: Numbers) -> Numbers:
        """Traffic of `times` microbatches, each with `beside` seconds of kernels; what is exposed of one."""
        covered = self._overlaps.get(axes.split("+", 1)[0], 0.0) * np.minimum(seconds, beside)
        self.exposed[axes] = self.exposed[axes] + times * (seconds - covered)
        self.hidden[axes] = self.hidden[axes] + times * covered
        return seconds - covered


@dataclass(frozen=True, eq=False)
class _Step:
    """Seconds."""

    microbatch: Numbers
    """One in the slowest stage: kernels, and what is exposed."""
    bubble: Numbers
    once: Numbers
    update: Numbers
    jitter: Numbers
    """Of the rest."""
    num_microbatches: Numbers

    @property
    def ideal(self) -> Numbers:
        return self.num_microbatches * self.microbatch + self.bubble + self.once + self.update

    @property
    def total(self) -> Numbers:
        return self.ideal * (1 + self.jitter)


def _step(
    job: Job, calibration: Calibration, stage: _Stage, ledger: _Ledger, traffic: MicrobatchTraffic, idle: Numbers
) -> _Step:
    """idle: the schedule's bubble."""
    microbatch = stage.kernels + _per_microbatch(job, calibration, stage, ledger, traffic)
    return _Step(
        microbatch,
        bubble=stage.mean_share(job.model, job.mesh["pipe"]) * microbatch * idle,
        once=_once(job, calibration, stage, ledger, traffic),
        update=_update_seconds(job, calibration),
        jitter=calibration.chip.jitter * np.log2(np.maximum(1.0, job.num_devices / job.cluster.levels[0].size)),
        num_microbatches=job.num_microbatches,
    )


def predict(job: Job, calibration: Calibration) -> StepTime:
    """The time of a step of a job that `Job.check` passes.

    Raises:
      ValueError: the chip does not multiply in the job's precision, or the cluster has too few devices.
    """
    model, times = job.model, job.num_microbatches
    stage, ledger = _slowest_stage(job, calibration), _Ledger(job, calibration)
    idle = schedule_bubble(job.pipeline, job.mesh["pipe"], times, job.chunks)
    step = _step(job, calibration, stage, ledger, microbatch_traffic(job), idle)

    rate = job.tokens_per_step / float(step.total) / job.num_devices
    per_token = matmul_flops_per_token(model) + attention_flops_per_token(model, job.seq_len, causal=True)
    recomputed = recomputed_flops_per_token(model, job.seq_len, job.remat_policy)
    if _reruns(job, calibration):
        recomputed += _forward_flops_per_token(job)
    mfu = rate * 3 * per_token / peak_flops(job.cluster.chip, job.precision)
    return StepTime(
        matmul=float(times * stage.layers * stage.layer.matmul.total),
        attention=float(times * stage.layers * stage.layer.attention.total),
        elementwise=float(times * stage.layers * stage.layer.elementwise.total),
        recompute=float(times * stage.layers * stage.again),
        head=float(times * stage.heads * stage.head.total),
        overhead=float(times * stage.kernels * (1 - 1 / stage.overhead)),
        exposed={axes: float(seconds) for axes, seconds in ledger.exposed.items()},
        hidden={axes: float(seconds) for axes, seconds in ledger.hidden.items()},
        bubble=float(step.bubble),
        optimizer=float(step.update),
        jitter=float(step.ideal * step.jitter),
        step=float(step.total),
        tokens_per_second_per_device=rate,
        mfu=mfu,
        hfu=mfu * (1 + recomputed / (3 * per_token)),
    )


def steps(job: Job, calibration: Calibration, idle: Numbers) -> Numbers:
    """Seconds of the steps of many jobs, of one mesh; predict's. idle: of each, its schedule's bubble."""
    return _steps(job, calibration, microbatch_traffic(job), idle)


def least_steps(job: Job, calibration: Calibration, idle: Numbers) -> Numbers:
    """Of many jobs, of one mesh or several, what `steps` are never shorter than: see least_microbatch_traffic."""
    return _steps(job, calibration, least_microbatch_traffic(job), idle)


def _steps(job: Job, calibration: Calibration, traffic: MicrobatchTraffic, idle: Numbers) -> Numbers:
    stage = _slowest_stage(job, calibration)
    return _step(job, calibration, stage, _Ledger(job, calibration), traffic, idle).total


def _slowest_stage(job: Job, calibration: Calibration) -> _Stage:
    """Stages of equal depth where the layers divide, the slowest then the head's; else with as many layers fewer beside
    the head as its time is worth."""
    speeds, model, stages = rates(job, calibration), job.model, job.mesh["pipe"]
    dense, experts = layer_seconds(job, calibration, speeds)
    layer = dense.mixed(experts, num_moe_layers(model) / model.num_layers)
    again = _recomputed_share(job) * (layer.matmul.forward + layer.attention.forward)
    if not job.remat_policy.keeps_all:
        again = again + layer.elementwise.forward
    if _reruns(job, calibration):
        again = again + layer.matmul.forward + layer.attention.forward + layer.elementwise.forward
    head = head_seconds(job, calibration, speeds)

    def stage(layers: Numbers, heads: Numbers) -> _Stage:
        return _Stage(layers, heads, layer, again, head, calibration.framework.overhead)

    if stages == 1 or model.num_layers % stages == 0:
        return stage(model.num_layers / stages, 1)
    worth = head.total / (layer.total + again)
    last = np.maximum(0, np.floor((model.num_layers + worth) / stages - worth))
    others = np.ceil((model.num_layers - last) / (stages - 1))
    is_last = stage(last, 1).kernels >= stage(others, 0).kernels
    return stage(np.where(is_last, last, others), np.where(is_last, 1, 0))


def _reruns(job: Job, calibration: Calibration) -> bool:
    return calibration.framework.reruns_stages and job.mesh["pipe"] > 1 and not job.pipeline_residuals


def _recomputed_share(job: Job) -> float:
    """Of the layers' forward FLOPs."""
    return recomputed_flops_per_token(job.model, job.seq_len, job.remat_policy) / _forward_flops_per_token(job)


def _forward_flops_per_token(job: Job) -> float:
    """Of all layers, attention in full."""
    attention = attention_flops_per_token(job.model, job.seq_len, causal=False)
    return matmul_flops_per_token(job.model) - head_matmul_flops_per_token(job.model) + attention


def _per_microbatch(
    job: Job, calibration: Calibration, stage: _Stage, ledger: _Ledger, traffic: MicrobatchTraffic
) -> Numbers:
    """Exposed seconds of one microbatch's traffic: activations, tokens to experts, hops, and weights that are gathered
    each time."""
    share, kernels, times = stage.layers / job.model.num_layers, stage.kernels, job.num_microbatches
    exposed: Numbers = 0.0
    for axes, ops in traffic.activations.items():
        seconds = share * collective_seconds(job, calibration, axes, ops, job.model.num_layers)
        exposed = exposed + ledger.charge(axes, seconds, kernels, times)
    if job.model.num_experts and np.any(np.greater(job.mesh["expert"], 1)):
        seconds = share * num_moe_layers(job.model) * _expert_seconds(job, calibration)
        exposed = exposed + ledger.charge("expert", seconds, kernels, times)
    if job.mesh["pipe"] > 1:
        exposed = exposed + ledger.charge("pipe", _hop_seconds(job, calibration), kernels, times)
    if gathers_each_time(job):
        for axes, ops in traffic.weights.items():
            gathers = {op: size for op, size in ops.items() if op != "all-reduce"}
            seconds = share * collective_seconds(job, calibration, axes, gathers, 2 * job.model.num_layers)
            exposed = exposed + ledger.charge(axes, seconds, kernels, times)
    return exposed


def _once(job: Job, calibration: Calibration, stage: _Stage, ledger: _Ledger, traffic: MicrobatchTraffic) -> Numbers:
    """Exposed seconds of what is moved once per step."""
    share, rounds = stage.layers / job.model.num_layers, np.minimum(job.mesh["pipe"], job.num_microbatches)
    window = stage.kernels * np.where(np.greater(job.chunks, 1), rounds, 1)
    exposed: Numbers = 0.0
    for axes, ops in traffic.weights.items():
        rest = {op: size for op, size in ops.items() if op == "all-reduce" or not gathers_each_time(job)}
        if rest:
            seconds = share * collective_seconds(job, calibration, axes, rest, job.model.num_layers)
            exposed = exposed + ledger.charge(axes, seconds, window, 1)
    return exposed


def _expert_seconds(job: Job, calibration: Calibration) -> Numbers:
    """Tokens to their experts and back, forward and backward, in one layer of one microbatch."""
    part = job.mesh["tensor"] if job.sequence_parallel else 1
    routed = job.microbatch_tokens / part * job.model.num_experts_per_token
    num_bytes = 4 * routed * job.model.embed_dim * job.compute_bytes
    return collective_seconds(job, calibration, "expert", {"all-to-all": num_bytes}, 4)


def _hop_seconds(job: Job, calibration: Calibration) -> Numbers:
    """Activations into a stage's chunks and gradients out of them, of one microbatch."""
    hops = 2 * job.chunks
    return collective_seconds(job, calibration, "pipe", {"collective-permute": hops * _hop_bytes(job)}, hops)


def _hop_bytes(job: Job) -> Numbers:
    part = job.mesh["tensor"] if job.sequence_parallel else 1
    return job.microbatch_tokens / part * job.model.embed_dim * job.compute_bytes


def _update_seconds(job: Job, calibration: Calibration) -> Numbers:
    """Reading and writing a device's part of the optimizer's state."""
    axes = ("pipe", "fsdp", "expert", "context", "tensor", *(("data",) if job.zero < 3 else ()))
    part = num_parameters(job.model) / math.prod(job.mesh[axis] for axis in axes)
    memory = job.cluster.chip.memory_bandwidth * calibration.chip.memory
    return _UPDATE_SECONDS + part * _UPDATE_BYTES[job.optimizer] / memory
