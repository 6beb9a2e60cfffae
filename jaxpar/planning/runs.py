"""Published runs as jobs, and what the planner predicts for them: `python -m jaxpar.planning.runs RUNS.json`.

A run is what its authors published: a model (or its size alone), a chip, how many, a layout, a batch. What they left
out is filled in as their framework would, by run_defaults. `measured` is dropped as it is read.
"""

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.parallel.context import ContextStrategy
from jaxpar.planning.calibration import Calibration, CalibrationTable, calibration_table
from jaxpar.planning.conventions import convention as memory_convention
from jaxpar.planning.flop_conventions import convention
from jaxpar.planning.job import Job
from jaxpar.planning.kernel_time import peak_flops
from jaxpar.planning.memory import Memory, memory
from jaxpar.planning.run_defaults import (
    FRAMEWORKS,
    Framework,
    default_chunks,
    default_microbatch,
    default_microbatches,
    gpt_of_size,
    maxtext_model,
    remat_of,
)
from jaxpar.planning.step_time import StepTime, predict
from meshes.chips import chip, find_chip
from meshes.clusters import Cluster, cluster_of, load_cluster
from meshes.mesh import MESH_AXES
from meshes.spec import Chip
from models.config import ModelConfig
from models.presets import preset
from models.shapes import Shape

_PRECISIONS = {"fp8": "float8", "fp4": "float4", "int8": "int8", "fp16": "float16"}
"""By what the name contains, as in mxfp8, nvfp4, amp_fp8; any other is bfloat16."""

_NOT_OF_A_CHIP = ("NVIDIA", "DGX", "HGX")
"""Words that stand before a chip's name."""


@dataclass(frozen=True)
class Prediction:
    job: Job
    framework: Framework
    time: StepTime
    mfu: float
    """In the source's own convention."""


def framework_of(row: Mapping[str, Any]) -> Framework:
    source = row["source"].lower()
    return next(known for known in FRAMEWORKS if known.mark.lower() in source)


def predict_run(row: Mapping[str, Any], table: CalibrationTable) -> Prediction:
    """What the table predicts for a published run.

    Raises:
      ValueError: the row lacks what nothing can fill in, or names what is not known.
    """
    framework = framework_of(row)
    job = job_of(row, framework)
    time = predict(job, calibration_of(row, job, framework, table))
    return Prediction(job, framework, time, rate_and_mfu(job, framework, time)[1])


def calibration_of(row: Mapping[str, Any], job: Job, framework: Framework, table: CalibrationTable) -> Calibration:
    """The table's, for a run that may say that it was not compiled."""
    known = table.of(job.cluster.chip, framework.name)
    if row.get("compiled", True):
        return known
    return dataclasses.replace(known, framework=dataclasses.replace(known.framework, fused=False))


def rate_and_mfu(job: Job, framework: Framework, time: StepTime) -> tuple[float, float]:
    """Tokens per second and device, and the MFU as the source counts it."""
    per_token = convention(framework.convention).flops_per_token(shape_of(job.model), job.seq_len)
    rate = time.tokens_per_second_per_device
    return rate, rate * per_token / peak_flops(job.cluster.chip, job.precision)


def shape_of(model: ModelConfig) -> Shape:
    """With its experts, for counting."""
    return dataclasses.replace(
        Shape.of(model),
        num_experts=model.num_experts,
        num_experts_per_token=model.num_experts_per_token,
        expert_dim=model.expert_mlp_dim,
        num_shared_experts=model.num_shared_experts,
        num_dense_layers=model.num_dense_layers,
        moe_every=model.moe_every,
    )


def job_of(row: Mapping[str, Any], framework: Framework) -> Job:
    """A published run as a job, with what it leaves out filled in."""
    known = chip_of(row["chip"])
    mesh = mesh_of(row)
    model = model_of(row, mesh["pipe"], framework)
    ranks = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    microbatch = microbatch_of(row) or default_microbatch(known, model, framework)
    batch_size = row.get("global_batch") or ranks * microbatch * default_microbatches(mesh["pipe"])
    num_microbatches = max(1, batch_size // (ranks * microbatch))
    pipelined = mesh["pipe"] > 1
    chunks = (row.get("pipeline_chunks") or default_chunks(model, mesh["pipe"], framework)) if pipelined else 1
    pipeline = row.get("pipeline") or framework.pipeline
    return Job(
        model=model,
        cluster=cluster_of_run(row, known, framework),
        mesh=mesh,
        seq_len=row["seq_len"],
        batch_size=num_microbatches * ranks * max(1, batch_size // (ranks * num_microbatches)),
        num_microbatches=num_microbatches,
        precision=precision_of(row.get("precision")),
        pipeline="1f1b" if chunks == 1 and pipeline == "interleaved-1f1b" else pipeline,
        chunks=chunks,
        remat=remat_of(row.get("remat"), known, model, framework),
        zero=1 if row.get("optimizer_sharded", framework.optimizer_sharded) and mesh["fsdp"] == 1 else 3,
        reshard_after_forward=not pipelined and row.get("sharding") != "SHARD_GRAD_OP",
        sequence_parallel=framework.name != "megatron-2021",
        context=ContextStrategy.parse("allgather" if pipelined else "auto", "zigzag", mesh["context"], pipelined),
        reduce_bytes=framework.reduce_bytes,
    )


def microbatch_of(row: Mapping[str, Any]) -> int | None:
    """Sequences; None where the row leaves them to the framework, as "auto" does."""
    text = str(row.get("microbatch"))
    return int(text) if text.isdecimal() else None


def precision_of(text: str | None) -> str:
    """The planner's name of a precision as people write it: "bf16", "FP8-CS", "NVFP4"."""
    return next((ours for mark, ours in _PRECISIONS.items() if mark in (text or "").lower()), "bfloat16")


def chip_of(name: str) -> Chip:
    """The chip of a name as people write it: "H100-SXM-80GB", "TPU v5e", "H100-SXM-96GB-2.4TBps-500W".

    ValueError, with the nearest names, for one that is not known.
    """
    parts = [part for part in re.split(r"[-_\s]+", name) if part.upper() not in _NOT_OF_A_CHIP]
    sizes = [part for part in parts if re.fullmatch(r"[\d.]+(GB|TBps|W)", part)]
    stem = "-".join(part for part in parts if part not in sizes)
    memory = [part for part in sizes if part.endswith("GB")]
    for candidate in (*(f"{stem}-{size}" for size in memory), stem, f"{stem}-SXM", f"TPU-{stem}"):
        try:
            known = chip(candidate)
        except ValueError:
            continue
        bandwidth = [float(part[:-4]) * 1e12 for part in sizes if part.endswith("TBps")]
        return dataclasses.replace(
            known,
            memory_bytes=int(memory[0][:-2]) * 10**9 if memory else known.memory_bytes,
            memory_bandwidth=bandwidth[0] if bandwidth else known.memory_bandwidth,
        )
    return find_chip(name) or chip(stem)


@functools.cache
def _pods(kind: str) -> Cluster:
    return cluster_of(chip(kind))


def cluster_of_run(row: Mapping[str, Any], known: Chip, framework: Framework) -> Cluster:
    """Its vendor's servers, of as many devices as the row says; slices of its pods; or the source's own cluster."""
    if framework.name == "llama3":
        return load_cluster("llama3-h100")
    if not known.torus:
        return dataclasses.replace(cluster_of(known, row.get("devices_per_node")), chip=known)
    slices = row.get("slices") or 1
    pods = _pods(known.name)
    one = pods.part(row["devices"] // slices)
    if slices == 1:
        return one
    return dataclasses.replace(one, levels=(one.levels[0], dataclasses.replace(pods.levels[-1], size=row["devices"])))


def mesh_of(row: Mapping[str, Any]) -> dict[str, int]:
    """All six axes. Megatron's experts lie over ranks of the batch that other weights are replicated on, so that its
    axes without `expert` multiply to all devices; ours are axes of their own. What is left out is `data`."""
    given = row.get("mesh") or {}
    mesh = {axis: given.get(axis) or 1 for axis in MESH_AXES}
    others = math.prod(size for axis, size in mesh.items() if axis != "expert")
    if mesh["expert"] > 1 and others == row["devices"]:
        mesh["expert"] = math.gcd(mesh["expert"], mesh["data"])
        mesh["data"] //= mesh["expert"]
    mesh["data"] *= max(1, row["devices"] // math.prod(mesh.values()))
    if (row.get("fsdp") or 1) > 1 and mesh["fsdp"] == 1:
        mesh["fsdp"] = math.gcd(row["fsdp"], mesh["data"])
        mesh["data"] //= mesh["fsdp"]
    return mesh


def model_of(row: Mapping[str, Any], stages: int, framework: Framework) -> ModelConfig:
    """The row's sizes, or a preset's by its name, or of a model of so many parameters as the framework makes it."""
    given = row["model"]
    if "num_layers" in given:
        fields = {field.name for field in dataclasses.fields(ModelConfig)}
        model = ModelConfig(**{key: value for key, value in given.items() if key in fields and value is not None})
        experts = (
            {"expert_mlp_dim": given.get("expert_mlp_dim") or given["mlp_dim"]} if given.get("num_experts") else {}
        )
        positions = given.get("learned_positions")
        return model.replace(
            mlp="swiglu" if given.get("gated_mlp", True) else "gelu",
            norm="rmsnorm" if given.get("gated_mlp", True) else "layernorm",
            tie_embeddings=bool(given.get("tied_embeddings")),
            **experts,
            **({"positions": "learned", "max_seq_len": positions} if positions else {}),
        )
    if "parameters" not in given:
        return preset(row["model_name"])
    return (
        maxtext_model(given["parameters"]) if framework.name == "maxtext" else gpt_of_size(given["parameters"], stages)
    )


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The rows, without what was measured. ValueError where it is no list of rows."""
    rows = json.loads(path.read_text())
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds no list of runs")
    return [{key: value for key, value in row.items() if key != "measured"} for row in rows]


def memory_of_run(row: Mapping[str, Any], job: Job, framework: Framework) -> Memory:
    """Of a run that ran, and so fitted: where it does not say what it recomputed, or the size of its microbatches, it
    did so or took smaller ones if nothing else fits."""
    convention = memory_convention(framework.name)
    found = memory(job, convention)
    if row.get("remat") is None and not found.fits:
        job = job.replace(remat="full")
        found = min(found, memory(job, convention), key=lambda each: each.fullest.total)
    while microbatch_of(row) is None and not found.fits and job.microbatch_size % 2 == 0:
        job = job.replace(num_microbatches=2 * job.num_microbatches)
        found = memory(job, convention)
    return found


def main(argv: Sequence[str]) -> None:
    """Prints {id: prediction}; a run that cannot be predicted is left out, and why is said on stderr."""
    predictions = {}
    for row in read_runs(Path(argv[0])):
        try:
            found = predict_run(row, calibration_table())
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            print(f"{row.get('id')}: {error}", file=sys.stderr)
            continue
        predictions[row["id"]] = {
            "tokens_per_second_per_device": found.time.tokens_per_second_per_device,
            "mfu": found.mfu,
            "memory_bytes": memory_of_run(row, found.job, found.framework).summary()["total"],
        }
    print(json.dumps(predictions, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
