"""Published runs as jobs, and what the planner predicts for them: `python -m jaxpar.planning.runs RUNS.json`.

A run is what its authors published: a model (or its size alone), a chip, how many, a layout, a batch. What they left out is
filled in as their framework would, by the table FRAMEWORKS and the rules beside it. `measured` is dropped as it is read.
"""

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.parallel.context import ContextStrategy
from jaxpar.planning.calibration import Calibration, CalibrationTable, calibration_table
from jaxpar.planning.flop_conventions import convention
from jaxpar.planning.job import Job
from jaxpar.planning.step_time import StepTime, predict
from meshes.chips import chip
from meshes.clusters import Cluster, cluster_of, load_cluster
from meshes.mesh import MESH_AXES
from meshes.spec import Chip
from models.config import ModelConfig
from models.presets import preset
from models.shapes import Shape

_PRECISIONS = {"fp16": "float16", "fp8": "float8", "mxfp8": "float8", "nvfp4": "float4", "int8": "int8"}


@dataclass(frozen=True)
class Framework:
    """What a source's runs did where they do not say."""

    name: str
    """Of the calibration's entry."""
    mark: str
    """Part of `source` that tells these runs."""
    remat: str
    convention: str
    """Of flop_conventions: how it counts the FLOPs in its MFU."""
    reduce_bytes: int = 4
    pipeline: str = "interleaved-1f1b"
    microbatch: int = 1
    optimizer_sharded: bool = False
    """Over `data`, where parameters are whole there."""
    reasons: str = ""


FRAMEWORKS = (
    Framework(
        "llm-foundry",
        "llm-foundry",
        remat="full",
        convention="llm-foundry",
        reduce_bytes=2,
        reasons="its tables give microbatch and remat; mixed_precision PURE reduces gradients in bfloat16",
    ),
    Framework(
        "megatron-bridge",
        "Megatron-Bridge",
        remat="selective",
        convention="nvidia-bridge",
        reduce_bytes=2,
        reasons="its recipes recompute nothing but attention; grad_reduce_in_fp32 is off; FLOPs halve a causal mask's",
    ),
    Framework(
        "megatron-2021",
        "Narayanan et al. 2021",
        remat="full",
        convention="palm",
        microbatch=4,
        reasons="the paper's section 3.5: full recomputation; section 5.1: two or more chunks where it interleaves; its "
        "equation 3 counts attention in full",
    ),
    Framework(
        "megatron-core",
        "Megatron-LM",
        remat="selective",
        convention="palm",
        reduce_bytes=2,
        optimizer_sharded=True,
        reasons="flash attention, which makes selective recomputation free, and overlapped reductions of a sharded "
        "optimizer, taken as in bfloat16; counts as in 2021",
    ),
    Framework(
        "torchtitan",
        "torchtitan",
        remat="selective",
        convention="torchtitan",
        reasons="its tables give microbatch and remat",
    ),
    Framework(
        "llama3",
        "2407.21783",
        remat="none",
        convention="nvidia-bridge",
        reasons="section 3.3.2: no recomputation; a chunk of one layer with the embedding and the head as two more; "
        "stages without resharding between forward and backward",
    ),
    Framework(
        "maxtext",
        "maxtext",
        remat="full",
        convention="palm",
        reasons="scripts MaxText/configs/v5e and v5p: remat, batch and model by size, see below; counts attention in full",
    ),
    Framework(
        "jaxpar", "", remat="full", convention="palm", pipeline="1f1b", reasons="any other source: our own defaults"
    ),
)

_MAXTEXT_BATCH = {"TPU-v5e": {16: 6, 32: 4, 64: 2, 128: 1}, "": {32: 7, 64: 3, 128: 1, 256: 1, 512: 2, 1024: 2}}
"""Sequences per device, by chip and billions of parameters: MaxText/configs/{v5e,v5p}/*.sh."""
_MAXTEXT_REMAT = {"TPU-v5e": {16: "full", 32: "full", 64: "full", 128: "dots"}, "": {256: "dots", 1024: "full"}}
"""From the same scripts; `minimal` keeps the products' results, on the device or (v5e, 128B) in the host's memory."""
_MEGATRON_SHAPES = ((3.6e9, 102), (18.4e9, 154), (145.6e9, 154), (529.6e9, 195), (1008e9, 200))
"""Width over depth by parameters: Megatron-LM (arXiv 2104.04473), Table 1."""


@dataclass(frozen=True)
class Prediction:
    job: Job
    framework: Framework
    time: StepTime
    mfu: float
    """In the source's own convention."""


def framework_of(row: Mapping[str, Any]) -> Framework:
    return next(known for known in FRAMEWORKS if known.mark in row["source"])


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
    peak = job.cluster.chip.peak_flops.get(job.precision, job.cluster.chip.peak_flops["bfloat16"])
    rate = time.tokens_per_second_per_device
    return rate, rate * per_token / peak


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
    per_device = _maxtext(_MAXTEXT_BATCH, known, model) if framework.name == "maxtext" else framework.microbatch
    ranks = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    microbatch = int(row.get("microbatch") or per_device)
    batch_size = row.get("global_batch") or ranks * microbatch
    num_microbatches = max(1, batch_size // (ranks * microbatch))
    pipelined = mesh["pipe"] > 1
    chunks = (row.get("pipeline_chunks") or _chunks(model, mesh["pipe"], framework)) if pipelined else 1
    pipeline = row.get("pipeline") or framework.pipeline
    return Job(
        model=model,
        cluster=cluster_of_run(row, known, framework),
        mesh=mesh,
        seq_len=row["seq_len"],
        batch_size=num_microbatches * ranks * max(1, batch_size // (ranks * num_microbatches)),
        num_microbatches=num_microbatches,
        precision=_PRECISIONS.get(row["precision"], "bfloat16"),
        pipeline="1f1b" if chunks == 1 and pipeline == "interleaved-1f1b" else pipeline,
        chunks=chunks,
        remat=_remat(row, known, model, framework),
        zero=1 if row.get("optimizer_sharded", framework.optimizer_sharded) and mesh["fsdp"] == 1 else 3,
        reshard_after_forward=not pipelined and row.get("sharding") != "SHARD_GRAD_OP",
        sequence_parallel=framework.name != "megatron-2021",
        context=ContextStrategy.parse("allgather" if pipelined else "auto", "zigzag", mesh["context"], mesh["pipe"]),
        reduce_bytes=framework.reduce_bytes,
    )


def chip_of(name: str) -> Chip:
    """The chip of a name as people write it: "H100-SXM-80GB", "TPU v5e", "H100-SXM-96GB-2.4TBps-500W".

    ValueError, with the nearest names, for one that is not known.
    """
    parts = re.split(r"[-_\s]+", name)
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
    return chip(stem)


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
    mesh = {axis: row["mesh"].get(axis) or 1 for axis in MESH_AXES}
    others = math.prod(size for axis, size in mesh.items() if axis != "expert")
    if mesh["expert"] > 1 and others == row["devices"]:
        mesh["expert"] = math.gcd(mesh["expert"], mesh["data"])
        mesh["data"] //= mesh["expert"]
    mesh["data"] *= row["devices"] // math.prod(mesh.values())
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
    return _maxtext_model(given["parameters"]) if framework.name == "maxtext" else _gpt(given["parameters"], stages)


def _maxtext_model(parameters: float) -> ModelConfig:
    """MaxText's global_parameter_scale: a model of 1 billion, whose heads and MLP, then width, then depth double."""
    power = round(math.log2(parameters / 1e9))
    depth, rest = divmod(power, 3)
    heads = 16 * 2 ** (depth + (rest > 0))
    return ModelConfig(
        name=f"maxtext-{2**power}b",
        vocab_size=32000,
        embed_dim=2048 * 2 ** (depth + (rest > 1)),
        num_layers=16 * 2**depth,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        mlp_dim=7168 * heads // 16,
    )


def _gpt(parameters: float, stages: int) -> ModelConfig:
    """A GPT of so many parameters with Megatron's ratio of width to depth, as many layers in each of two chunks of a stage
    and heads for 8 ranks of a server."""
    sizes, ratios = zip(*_MEGATRON_SHAPES)
    logs = [math.log(size) for size in sizes]
    ratio = _interpolate(math.log(parameters), logs, ratios)
    unit = 2 * stages
    layers = max(1, round((parameters / 12 / ratio**2) ** (1 / 3) / unit)) * unit
    width = max(1, round(math.sqrt(parameters / 12 / layers) / 1024)) * 1024
    return ModelConfig(
        name=f"gpt-{parameters / 1e9:.0f}b",
        vocab_size=51200,
        embed_dim=width,
        num_layers=layers,
        num_heads=width // 128,
        num_kv_heads=width // 128,
        head_dim=128,
        mlp_dim=4 * width,
        mlp="gelu",
        norm="layernorm",
        tie_embeddings=True,
    )


def _interpolate(x: float, xs: list[float], ys: tuple[float, ...]) -> float:
    for low, high, a, b in zip(xs, xs[1:], ys, ys[1:]):
        if x <= high:
            return a + (b - a) * max(0.0, (x - low) / (high - low))
    return ys[-1]


def _chunks(model: ModelConfig, stages: int, framework: Framework) -> int:
    """Chunks of a stage where a run that may interleave does not say: Llama 3's one layer each; in Megatron a divisor of
    the stage's layers, as near as may be to four (in 2021, the fewest that interleave)."""
    if framework.pipeline != "interleaved-1f1b":
        return 1
    if framework.name == "llama3":
        return (model.num_layers + 2) // stages
    depth = model.num_layers // stages
    divisors = [count for count in range(1, depth + 1) if depth % count == 0]
    if framework.name == "megatron-2021":
        return divisors[min(1, len(divisors) - 1)]
    return min(divisors, key=lambda count: abs(math.log(count / 4)))


def _maxtext(by_chip: Mapping[str, Mapping[int, Any]], known: Chip, model: ModelConfig) -> Any:
    """The entry of the size, or of the next larger one."""
    sizes = by_chip.get(known.name, by_chip[""])
    size = int(model.name.removeprefix("maxtext-").removesuffix("b"))
    return sizes[min((entry for entry in sizes if entry >= size), default=max(sizes))]


def _remat(row: Mapping[str, Any], known: Chip, model: ModelConfig, framework: Framework) -> str:
    remat = row.get("remat")
    if remat is None:
        return _maxtext(_MAXTEXT_REMAT, known, model) if framework.name == "maxtext" else framework.remat
    if remat == "selective" and framework.name == "torchtitan":
        return "save=query,value,mlp_gate,mlp_out,attention"  # per operation: attention and every other product
    return remat


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The rows, without what was measured. ValueError where it is no list of rows."""
    rows = json.loads(path.read_text())
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds no list of runs")
    return [{key: value for key, value in row.items() if key != "measured"} for row in rows]


def main(argv: list[str]) -> None:
    predictions = {}
    for row in read_runs(Path(argv[0])):
        found = predict_run(row, calibration_table())
        predictions[row["id"]] = {
            "tokens_per_second_per_device": found.time.tokens_per_second_per_device,
            "mfu": found.mfu,
            "memory_bytes": None,
        }
    print(json.dumps(predictions, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
