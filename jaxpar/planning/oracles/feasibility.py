"""Whether published runs fit, and what they need: by the planner's memory, under their frameworks' conventions."""

from typing import Any

from jaxpar.planning.conventions import convention
from jaxpar.planning.memory import memory
from jaxpar.planning.memory_conventions import (
    LayerActivations,
    interleaved_first_stage_factor,
    megatron_bytes_per_parameter,
    zero_bytes,
)
from jaxpar.planning.oracles.engine import Quantities, rule
from jaxpar.planning.runs import framework_of, job_of
from models.published import shape as published

_DEVICE_SHARE = 1.06
"""Bytes that a device reports over the vendor's gigabytes."""


@rule("feasibility", batch="gbs", microbatch="mbs", stages="pp", expert="ep", gigabytes="hbm_GB")
def megatron(
    model: str,
    chip: str,
    gigabytes: float,
    devices: int,
    precision: str,
    batch: int,
    microbatch: int,
    seq: int,
    tp: int = 1,
    stages: int = 1,
    cp: int = 1,
    chunks: int = 1,
    fsdp: int = 0,
    expert: int = 1,
) -> Quantities:
    """A run of Megatron Bridge's; where it does not say what it computes again, the least that fits."""
    data = devices // (tp * stages * cp)
    microbatches = batch // (microbatch * data)
    row = {
        "source": "Megatron-Bridge",
        "chip": f"{chip}-{gigabytes:g}GB",
        "precision": precision,
        "global_batch": batch,
        "mesh": {"tensor": tp, "pipe": stages, "context": cp, "expert": expert, "fsdp": max(1, fsdp)},
        "pipeline_chunks": chunks or 1,
        "optimizer_sharded": True,
    }
    found = [_summary(row, model, devices, microbatch, seq, remat) for remat in ("selective", "full")]
    return {
        "dp": data,
        "microbatches": microbatches,
        "bubble_of_ideal": (stages - 1) / (microbatches * (chunks or 1)),
        "fits": any(each["total"] <= each["limit"] for each in found),
    }


@rule("feasibility", microbatch="mbs", checkpointing="act_ckpt", gigabytes="hbm_GB")
def llm_foundry(
    model: str,
    chip: str,
    gigabytes: float,
    devices: int,
    microbatch: int,
    seq: int,
    checkpointing: bool,
    precision: str = "bf16",
    sharding: str = "FULL_SHARD",
) -> Quantities:
    row = {
        "source": "llm-foundry",
        "chip": chip,
        "precision": precision,
        "mesh": {"fsdp": devices},
        "sharding": sharding,
    }
    found = _summary(row, model, devices, microbatch, seq, "full" if checkpointing else "none")
    fits = found["total"] <= min(found["limit"], _DEVICE_SHARE * gigabytes * 1e9)
    return {"fits": fits, "peak_GiB": found["total"] / 2**30}


@rule("feasibility", microbatch="mbs", remat="ac", stages="pp")
def torchtitan(
    model: str,
    devices: int,
    microbatch: int,
    seq: int,
    remat: str,
    fsdp: int = 1,
    tp: int = 1,
    cp: int = 1,
    stages: int = 1,
) -> Quantities:
    """On H100s of 96 GB."""
    row = {
        "source": "torchtitan",
        "chip": "H100-SXM-96GB",
        "precision": "bf16",
        "mesh": {"fsdp": fsdp, "tensor": tp, "context": cp, "pipe": stages},
    }
    found = _summary(row, model, devices, microbatch, seq, remat)
    return {"peak_GiB": found["total"] / 2**30, "fits": found["total"] <= found["limit"]}


@rule("feasibility", gigabytes="hbm_GB")
def zero_fits(params: float, dp: int, gigabytes: float) -> Quantities:
    """Model states alone."""
    stages = {"baseline": 0, "Pos": 1, "Pos_g": 2, "Pos_g_p": 3}
    return {name: zero_bytes(params, dp, stage) <= gigabytes * 1e9 for name, stage in stages.items()}


def _summary(row: dict[str, Any], model: str, devices: int, microbatch: int, seq: int, remat: str) -> dict[str, int]:
    known = published(model)
    sizes = {
        "num_layers": known.num_layers,
        "embed_dim": known.embed_dim,
        "num_heads": known.num_heads,
        "num_kv_heads": known.kv_heads,
        "head_dim": known.head_dim,
        "mlp_dim": known.mlp_dim,
        "vocab_size": known.vocab_size,
        "gated_mlp": known.gated,
        "tied_embeddings": known.tied,
        "num_experts": known.num_experts,
        "num_experts_per_token": known.num_experts_per_token,
        "expert_mlp_dim": known.expert_dim,
    }
    full = row | {"model": sizes, "devices": devices, "microbatch": microbatch, "seq_len": seq, "remat": remat}
    framework = framework_of(full)
    return memory(job_of(full, framework), convention(framework.name)).summary()


_ZERO_BUBBLE = {
    "1.5b": (22, 24, 2304, 1024, 8, 6),
    "6.2b": (30, 32, 4096, 1024, 8, 3),
    "14.6b": (46, 40, 5120, 1024, 16, 1),
    "28.3b": (62, 48, 6144, 1024, 32, 1),
}
"""Layers, heads, width, tokens, stages and microbatch. Source: Zero Bubble (arXiv 2401.10241), table 3."""


@rule("feasibility")
def zero_bubble(model: str, chip: str = "") -> Quantities:
    """GB of the fullest stage, by schedule: attention's scores kept, no optimizer sharded; two layers' room for the
    embedding and the head; interleaved with one layer a chunk."""
    layers, heads, width, tokens, stages, microbatch = _ZERO_BUBBLE[model.lower()]
    here = (layers + 2) // stages
    unit = here * LayerActivations(tokens, microbatch, width, heads).no_parallel
    states = megatron_bytes_per_parameter() * here * 12 * width**2
    in_flight = {
        "f1b": stages,
        "zb1p": stages,
        "zb2p": 2 * stages,
        "f1b_interleaved": stages * interleaved_first_stage_factor(stages, here),
    }
    return {name: (states + count * unit) / 1e9 for name, count in in_flight.items()}
