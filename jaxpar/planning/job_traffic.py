"""Bytes that a job's devices move: `traffic` of a job as the planner sees it, per step and per microbatch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.planning.job import Job, Numbers
from jaxpar.planning.traffic import (
    Stages,
    Traffic,
    TrafficSettings,
    activation_traffic,
    lookup_traffic,
    step_traffic,
    weight_traffic,
)
from meshes.mesh import MESH_AXES
from models.config import ModelConfig

Bytes = Mapping[str, Mapping[str, Numbers]]
"""By axes and operation."""


@dataclass(frozen=True, eq=False)
class MicrobatchTraffic:
    """Of one microbatch through all layers."""

    weights: Bytes
    activations: Bytes


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


def gathers_each_time(job: Job) -> bool:
    """Weights, for each microbatch."""
    return job.zero == 3 and (job.mesh["pipe"] == 1 or job.reshard_after_forward)


def microbatch_traffic(job: Job) -> MicrobatchTraffic:
    """Of one mesh."""
    mesh = tuple((axis, job.mesh[axis]) for axis in MESH_AXES)
    weights = _cached_traffic(
        weight_traffic,
        job.model,
        mesh,
        compute_bytes=job.compute_bytes,
        reduce_bytes=job.reduce_bytes,
        zero=job.zero,
        reshard_after_forward=job.reshard_after_forward and job.zero == 3,
        remat=job.remat if job.remat_policy.every > 1 else "full",
    )
    lookups = _cached_traffic(
        lookup_traffic,
        job.model,
        mesh,
        batch_size=job.batch_ranks,
        seq_len=job.seq_len,
        compute_bytes=job.compute_bytes,
        zero=job.zero,
        sequence_parallel=job.sequence_parallel,
    )
    return MicrobatchTraffic(weights, _scaled(job, [_streams(job), lookups]))


def least_microbatch_traffic(job: Job) -> MicrobatchTraffic:
    """Of one mesh or many: without weights and lookups of embeddings, which move by what divides what."""
    return MicrobatchTraffic({}, _scaled(job, [_streams(job)]))


def _scaled(job: Job, traffics: Sequence[Bytes]) -> Bytes:
    """Sums of what moves as each rank of the batch has one sequence, for as many tokens as a microbatch has."""
    times = job.microbatch_tokens / (job.seq_len // job.mesh["context"])
    total: dict[str, dict[str, Numbers]] = {}
    for traffic in traffics:
        for axes, ops in traffic.items():
            own = total.setdefault(axes, {})
            for op, num_bytes in ops.items():
                own[op] = own.get(op, 0.0) + num_bytes * times
    return total


def _streams(job: Job) -> Bytes:
    """activation_traffic of one sequence, by what it depends on alone."""
    settings = {
        "seq_len": job.seq_len,
        "compute_bytes": job.compute_bytes,
        "sequence_parallel": job.sequence_parallel,
        "remat": "none" if job.remat_policy.keeps_all else job.remat,
        "context": job.context,
    }
    sizes = np.broadcast_arrays(job.mesh["context"], job.mesh["tensor"])
    pairs = list(zip(*(size.ravel().tolist() for size in sizes)))
    known: dict[tuple[int, int], Traffic] = {}
    for pair in set(pairs):
        mesh = {**dict.fromkeys(MESH_AXES, 1), "context": pair[0], "tensor": pair[1]}
        known[pair] = _cached_traffic(activation_traffic, job.model, tuple(mesh.items()), **settings)
    flows = {axes: ops.keys() for traffic in known.values() for axes, ops in traffic.items()}

    def of_all(axes: str, op: str) -> Numbers:
        return np.reshape([known[pair].get(axes, {}).get(op, 0) for pair in pairs], sizes[0].shape)

    return {axes: {op: of_all(axes, op) for op in ops} for axes, ops in flows.items()}


@functools.lru_cache(maxsize=65536)
def _cached_traffic(
    traffic: Callable[[ModelConfig, TrafficSettings], Traffic],
    config: ModelConfig,
    mesh: tuple[tuple[str, int], ...],
    batch_size: int = 1,
    seq_len: int = 1,
    **settings,
) -> Traffic:
    return traffic(config, TrafficSettings(dict(mesh), batch_size, seq_len, **settings))
