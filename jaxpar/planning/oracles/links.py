"""Collectives, ring attention's block sizes and the rooflines of MaxText's sharding guide."""

import math
from typing import Any

from jaxpar.planning import collectives, rooflines, serving
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule
from meshes import chip as find


@rule("collectives")
def bus_bandwidth(ranks: int, algbw: float = 1.0) -> Quantities:
    """nccl-tests' bus bandwidth of a measured algorithm bandwidth."""
    return {op: algbw * collectives.bus_factor(op, ranks) for op in collectives.COLLECTIVES}


@rule("collectives", num_bytes="S", ranks="n", bandwidth="B")
def ring_times(num_bytes: float, ranks: int, bandwidth: float) -> Quantities:
    return {op: collectives.ring_seconds(op, num_bytes, ranks, bandwidth) for op in collectives.COLLECTIVES}


@rule("collectives", gigabytes="busbw_GBps", num_bytes="bytes")
def all_reduce_ms(gigabytes: float, ranks: int, num_bytes: float) -> Quantities:
    found = 1e3 * collectives.ring_seconds("all_reduce", num_bytes, ranks, gigabytes * 1e9)
    return {VALUE: found, "ms": found}


@rule("collectives", element_bytes="bytes", gigabits="Gbps")
def transfer(params: float, element_bytes: float, gigabits: float) -> Quantities:
    return {VALUE: params * element_bytes / (gigabits / 8 * 1e9)}


@rule("collectives", element_bytes="bytes")
def gigabytes(params: float, element_bytes: float) -> Quantities:
    return {VALUE: params * element_bytes / 1e9}


@rule("collectives", element_bytes="bytes", ranks="n", bandwidth="busbw")
def gradients(params: float, element_bytes: float, ranks: int, bandwidth: float) -> Quantities:
    """Seconds of data parallelism's all-reduce."""
    found = collectives.ring_seconds("all_reduce", params * element_bytes, ranks, bandwidth)
    return {VALUE: found, "seconds": found}


@rule("context_parallel", tera="flops_TF", gigabytes="GBps")
def ring_attention(tera: float, gigabytes: float) -> Quantities:
    """In thousands of tokens."""
    block = rooflines.ring_attention_block(tera * 1e12, gigabytes * 1e9) / 1e3
    return {"block_k": block, "seq_k": rooflines.RING_ATTENTION_BLOCKS * block}


@rule("context_parallel")
def tokens_per_rank(seq: int, cp: int) -> Quantities:
    return {VALUE: seq // cp}


def _ici(name: str) -> float:
    """FLOPs per byte of one torus axis, both ways."""
    known = find(name)
    return known.peak_flops["bfloat16"] / (2 * known.link.bandwidth)


def _dcn(name: str) -> float:
    known = find(name)
    return known.peak_flops["bfloat16"] / known.network


@rule("jax_rooflines", sparsity="sparsity")
def fsdp_bound(sparsity: float, form: Any) -> Quantities:
    """Tokens per device. Trillium's guide lays FSDP over both axes, the others over one."""
    return {name: sparsity * _ici(name) / (2 if name in ("trillium", "v6e") else 1) for name in form}


@rule("jax_rooflines")
def tensor_bound(form: Any) -> Quantities:
    """{chip_tpN}: the least MLP width."""
    parts = {name: name.partition("_tp") for name in form}
    return {name: int(degree) * _ici(kind) for name, (kind, _, degree) in parts.items()}


@rule("jax_rooflines", expert="EP")
def expert_bound(expert: int, form: Any) -> Quantities:
    return {name: _ici(name) * expert / 4 for name in form}


@rule("jax_rooflines", experts_per_token="topk", layers="layers_per_stage")
def pipeline_bound(layers: float, form: Any, experts_per_token: float = 1) -> Quantities:
    """{chip_ici|dcn}: the least MLP width."""
    found = {}
    for name in form:
        kind, network = name.rsplit("_", 1)
        least = (_ici if network == "ici" else _dcn)(kind)
        found[name] = least / rooflines.pipeline_intensity(layers, 1, experts_per_token)
    return found


@rule("jax_rooflines", context="cp")
def context_ratio(seq: int, heads: int, kv_heads: int, context: int) -> Quantities:
    return {VALUE: rooflines.context_gather_intensity(seq, heads, kv_heads, context)}


@rule("jax_rooflines", "context_parallel", batch="B", seq="S", heads="H", head_dim="D")
def attention(batch: int, seq: int, heads: int, head_dim: int) -> Quantities:
    full, causal = (serving.attention_flops(batch, seq, heads, head_dim, each) for each in (False, True))
    return {"fwd_full": full, "fwd_causal": causal, VALUE: full}


@rule("jax_rooflines", chip="chip")
def intensities(chip: str) -> Quantities:
    known = find(chip)
    hbm = known.peak_flops["bfloat16"] / known.memory_bandwidth
    return {"hbm": hbm, "ici": _ici(chip), "dcn": _dcn(chip), "pod": math.prod(known.torus)}


@rule("context_parallel", batch="b", seq="s", hidden="h", block="c")
def ring_memory(batch: int, seq: int, hidden: int, block: int) -> Quantities:
    """Bytes of a layer's activations a device. Source: Ring Attention (arXiv 2310.01889), table 1."""
    return {
        "vanilla": 2 * batch * hidden * seq**2,
        "memory_efficient": 2 * batch * seq * hidden + 4 * batch * block * hidden,
        "blockwise": 2 * batch * seq * hidden,
        "ring": 6 * batch * block * hidden,
    }


@rule("context_parallel", seq="N", hidden="h", ranks="P")
def ulysses_volume(seq: int, hidden: int, ranks: int) -> Quantities:
    """Values per link of a layer. Source: DeepSpeed Ulysses (arXiv 2309.14509), section 3.2."""
    return {VALUE: 4 * seq * hidden / ranks, "ulysses": 4 * seq * hidden / ranks, "megatron_sp": 4 * seq * hidden}
