"""What the planner says of a step, in the form in which a compiled program can be held against it."""

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction

from jaxpar.audit.topology import Topology
from jaxpar.config import Config
from jaxpar.kernels.attention import RESULT, Kernel
from jaxpar.kernels.mask import AttentionMask
from jaxpar.parallel import expert
from jaxpar.parallel.axes import padded_vocab
from jaxpar.parallel.context.halves import computed_share
from jaxpar.parallel.context.order import needed_shifts
from jaxpar.parallel.pipeline import looped
from jaxpar.parallel.pipeline.program import Program
from jaxpar.planning.attention import AttentionSize, attention_plan
from jaxpar.planning.flops import (
    attention_flops_per_token,
    head_matmul_flops_per_token,
    layers_matmul_flops_per_token,
    recomputed_flops_per_token,
)
from jaxpar.planning.job import Job
from jaxpar.planning.shapes import num_moe_layers
from jaxpar.training import pipelines
from jaxpar.training.precision import Precision
from jaxpar.verify import has_formulas
from meshes.clusters import Cluster, load_cluster


def cluster_of(topology: Topology) -> Cluster:
    """The topology's machine, a TPU slice with its own torus. For CPU devices, which no table has, an H100's."""
    if topology.platform == "cpu":
        return load_cluster("h100")
    cluster = load_cluster({"tpu7x": "v7x"}.get(topology.kind, topology.kind))
    if topology.platform == "gpu":
        server = dataclasses.replace(cluster.levels[0], size=topology.shape[1])
        return dataclasses.replace(cluster, levels=(server, *cluster.levels[1:]))
    torus = (*topology.shape[:-1], topology.shape[-1] * cluster.chip.devices_per_chip)
    pod, network = cluster.levels
    size = math.prod(torus)
    levels = (dataclasses.replace(pod, size=size), dataclasses.replace(network, size=size * topology.num_slices))
    return dataclasses.replace(cluster, torus=torus, levels=levels)


_LIKE = {"terapipe": "gpipe", "auto": "1f1b", "pipedream": "1f1b", "pipedream-2bw": "1f1b"}
"""Kinds that the planner does not know, and whose memory is planned in their place."""


def note_of(config: Config, mesh: Mapping[str, int]) -> str:
    """What the plan leaves out of a pipeline's schedule; "" for nothing."""
    schedule = pipelines.make_schedule(config, mesh["pipe"])
    if schedule is None:
        return ""
    like = f"memory is planned as {_LIKE[schedule.kind]}'s" if schedule.kind in _LIKE else ""
    hops = "" if has_formulas(schedule) else "of what is sent the stages' hops alone are planned"
    return ": ".join([schedule.kind, " and ".join(filter(None, [like, hops]))]) if like or hops else ""


def job_of(config: Config, cluster: Cluster, mesh: Mapping[str, int]) -> Job:
    """The config as the planner sees it."""
    parallel, dtypes = config.parallel, Precision.of(config.run)
    schedule = pipelines.make_schedule(config, mesh["pipe"])
    return Job(
        model=config.model,
        cluster=cluster,
        mesh=mesh,
        seq_len=config.data.seq_len,
        batch_size=config.data.batch_size,
        num_microbatches=parallel.grad_accumulation,
        # No accelerator's peak is stated in float64: what is estimated of such a run is one in float32.
        precision="float8" if config.run.matmul == "fp8" else config.run.precision.replace("float64", "float32"),
        pipeline=_LIKE.get(schedule.kind, schedule.kind) if schedule is not None else "1f1b",
        chunks=schedule.num_chunks if schedule is not None else 1,
        remat=parallel.remat,
        zero=parallel.zero,
        reshard_after_forward=pipelines.reshards(parallel.reshard_after_forward, mesh["pipe"]),
        sequence_parallel=parallel.sequence_parallel,
        context=pipelines.context_strategy(config, mesh, schedule),
        optimizer=config.optimizer.name,
        compute_bytes=dtypes.compute.itemsize,
        reduce_bytes=dtypes.reduce.itemsize,
        capacity_factor=parallel.capacity_factor if parallel.moe_dispatch == "capacity" else None,
        pipeline_residuals=parallel.pipeline_residuals,
    ).check()


def branches_taken(config: Config, mesh: Mapping[str, int]) -> dict[str, Fraction]:
    """The share of a pipeline's ticks in which a stage takes a branch, by the branch's name."""
    schedule = pipelines.make_schedule(config, mesh["pipe"])
    return dict(Program.of(schedule).taken) if schedule is not None and schedule.kind not in looped.KINDS else {}


def tiles_per_call(job: Job) -> float:
    """Of attention in tiles, how many the forward pass computes each time that it is called: of the rank that has
    most, in the mean of a ring's rounds."""
    plan = _attention_plan(job)
    return max(plan.tiles_per_rank) / _rounds(job)


def filled_rows(job: Job) -> float:
    """The share of the rows of experts' buffers that balanced routing fills, where there is room for any."""
    model = job.model
    if not model.num_experts or job.capacity_factor is not None:
        return 1.0
    room = expert.arrivals(1, job.mesh["expert"], model.num_experts, model.num_experts_per_token)
    return model.num_experts_per_token / room


def with_slots(job: Job) -> Job:
    """The job with experts as wide as it takes to compute all slots of their capacity, filled or not."""
    model, tokens = job.model, job.seq_len // job.mesh["context"]
    if not model.num_experts or job.capacity_factor is None:
        return job
    chosen, shared = model.num_experts_per_token, model.num_shared_experts
    most = expert.capacity(job.seq_len, model.num_experts, chosen, job.capacity_factor)
    computed = model.num_experts * expert.capacity_slots(most, tokens) / tokens
    width = round(model.expert_mlp_dim * (computed + shared) / (chosen + shared))
    return job.replace(model=model.replace(expert_mlp_dim=width))


def step_flops(job: Job, attention: Kernel, spreads_head: bool) -> float:
    """FLOPs of one device, the one that has most, under balanced routing: of matmuls, those that the backward pass runs
    again included, and of attention as `audit.work` counts it: by a kernel in full, in tiles of those that the mask
    admits, of whose five products in the backward pass one is the scores again."""
    model, remat, stages = job.model, job.remat_policy, job.mesh["pipe"]
    tokens = job.tokens_per_step / job.num_devices
    square = attention_flops_per_token(model, job.seq_len, causal=False)
    layers = layers_matmul_flops_per_token(model)
    head = head_matmul_flops_per_token(model) * padded_vocab(model.vocab_size, job.mesh) / model.vocab_size
    attention_again = 0 if remat.keeps_all or RESULT in remat.saves else 1
    again = recomputed_flops_per_token(model, job.seq_len, remat) - attention_again * square
    if not remat.keeps_all and remat.every == 1 and "mlp_out" not in remat.saves:
        num_dense_layers = model.num_layers - num_moe_layers(model)
        again -= 2 * num_dense_layers * model.embed_dim * model.mlp_dim  # which nobody needs again
    forwards = 1.0
    if stages > 1 and not job.pipeline_residuals:
        forwards += 1.0  # a stage keeps its input alone
    if is_tiled(job, attention):
        of_attention = _attention_flops(job) * (forwards + attention_again + 2.5)
    else:
        of_attention = tokens * square * _kernels_share(job) * (forwards + attention_again + 2)
    # Of stages whose numbers of layers differ, the fullest.
    parts = stages * job.chunks
    fullest = -(-model.num_layers // parts) * parts / model.num_layers
    of_layers = tokens * ((forwards + 2) * layers + again) + of_attention
    return fullest * of_layers + tokens * 3 * head * (1 if spreads_head else stages)


def is_tiled(job: Job, attention: Kernel) -> bool:
    """Whether attention goes by tiles: in a ring whose rounds are no kernel's, whatever attends to a whole sequence."""
    ranks, strategy = job.mesh["context"], job.context
    if ranks == 1 or strategy.kind == "allgather" or strategy.group == ranks:
        return attention == "tiled"
    return not strategy.goes_by_halves(attention, job.model.sliding_window, job.seq_len // ranks)


def _kernels_share(job: Job) -> float:
    """Of all queries times all keys, what kernels are given."""
    is_ring = job.context.kind == "exchange" and job.context.group == 1
    return computed_share(job.context.order, job.mesh["context"]) if is_ring else 1.0


def _attention_flops(job: Job) -> float:
    """Forward, in tiles, of one device's layers and sequences."""
    sequences = job.batch_size / job.batch_ranks
    return max(_attention_plan(job).flops_per_rank) * sequences * job.model.num_layers / job.mesh["pipe"]


def _attention_plan(job: Job):
    tensor, model = job.mesh["tensor"], job.model
    size = AttentionSize(
        seq_len=job.seq_len,
        num_heads=model.num_heads // tensor,
        num_kv_heads=math.lcm(model.num_kv_heads, tensor) // tensor,
        head_dim=model.head_dim,
    )
    return attention_plan(job.context, job.mesh["context"], size, AttentionMask(True, model.sliding_window))


def _rounds(job: Job) -> int:
    if job.context.kind == "allgather":
        return 1
    ranks, group = job.mesh["context"], job.context.group
    return len(needed_shifts(job.context.order, job.seq_len, ranks, group, True, job.model.sliding_window))
