"""How to Scale Your Model: its worked problems, for any numbers.

TPU figures where a problem gives none are v5p's as the book rounds them, GPU figures H100's.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.planning import budget, collectives, rooflines, serving
from jaxpar.planning.memory_conventions import SCALING_BOOK_BYTES
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule
from models.published import shape

ICI_INTENSITY = 2550
"""v5p: 4.59e14 / 1.8e11, FLOPs per byte of one axis."""
GPU_INTENSITY = 2475
"""H100 between servers: 990e12 / 400e9."""
NVLINK = 450e9


@rule("scaling_book", bandwidth="hbm", weight_bytes="bytes")
def critical_batch(flops: float, bandwidth: float, weight_bytes: float = 2) -> Quantities:
    return {VALUE: rooflines.critical_batch(flops, bandwidth, weight_bytes)}


@rule("scaling_book")
def pod(dims: Sequence[int]) -> Quantities:
    """Of v5p: 4 chips a host, 2 cores a chip; of v5e and v6e, in two dims, 8 and 1."""
    chips = math.prod(dims)
    per_host, cores, flops, memory = (4, 2, 4.59e14, 96e9) if len(dims) == 3 else (8, 1, 1.97e14, 16e9)
    return {
        "chips": chips,
        "hosts": chips // per_host,
        "cores": chips * cores,
        "flops": chips * flops,
        "hbm_TB": chips * memory / 1e12,
    }


@rule("scaling_book", element_bytes="bytes")
def transfer(
    shape: Sequence[int], element_bytes: float, ports: int, link: float, hops: int, hop_us: float = 1
) -> Quantities:
    moving = 1e6 * math.prod(shape) * element_bytes / (ports * link)
    return {"first_us": hops * hop_us, "bw_us": moving, "total_us": moving + hops * hop_us}


@rule("scaling_book", element_bytes="bytes")
def sharded_bytes(
    mesh: Mapping[str, int], spec: str, shape: Sequence[int] = (), element_bytes: float = 1
) -> Quantities:
    """spec: a dim's axes after an underscore, as in I_XY."""
    axes = [axis for part in re.findall(r"_\{?([A-Z]+)", spec) for axis in part]
    devices, shards = math.prod(mesh.values()), math.prod(mesh[axis] for axis in axes)
    found: dict[str, float] = {VALUE: devices // shards, "replicas": devices // shards}
    if shape:
        per_device = int(math.prod(shape) * element_bytes) // shards
        found |= {"per_device": per_device, "total": per_device * devices}
    return found


@rule("scaling_book", num_bytes="bytes")
def gather_on_a_line(axis: int, num_bytes: float, one_way: float) -> Quantities:
    return {VALUE: collectives.torus_gather_seconds(num_bytes, one_way, (axis,), bidirectional=False)}


@rule("scaling_book", element_bytes="bytes")
def small_gather(
    shape: Sequence[int], element_bytes: float, axis: int, hop_us: float, link: float = 45e9
) -> Quantities:
    found = collectives.torus_gather_seconds(
        math.prod(shape) * element_bytes, link, (axis,), bidirectional=False, hop_latency=hop_us * 1e-6
    )
    return {VALUE: found}


@rule("scaling_book", batch="B", hidden="D", both_ways="W")
def gather_bf16(batch: int, hidden: int, both_ways: float, X: int = 1, Y: int = 1, axes: int = 1) -> Quantities:
    """Of [B, D], sharded over what is given beside the gathered axes; W is an axis's bandwidth both ways."""
    num_bytes = 2 * batch * hidden / (X * Y)
    found = collectives.torus_gather_seconds(num_bytes, both_ways / 2, (1,) * axes)
    return {VALUE: found, "all_gather": found, "all_reduce": 2 * found, "all_to_all": found / 4}


@rule("scaling_book", batch="B", seq="T", hidden="D", ffn="F", heads="N", head_dim="H")
def layer_flops(batch: int, seq: int, hidden: int, ffn: int, heads: int, head_dim: int) -> Quantities:
    tokens = batch * seq
    return {
        "mlp": 18 * tokens * hidden * ffn,
        "attn_proj": 24 * tokens * hidden * heads * head_dim,
        "attn": 12 * tokens * seq * heads * head_dim,
    }


@rule("scaling_book", hidden="D")
def attention_length(hidden: int) -> Quantities:
    found = rooflines.attention_equals_mlp_length(hidden)
    return {VALUE: found, "dominates": rooflines.attention_dominates_length(hidden)}


@rule("scaling_book", each="per_chip")
def tokens_of_chips(devices: float, each: float) -> Quantities:
    return {VALUE: devices * each}


@rule("scaling_book", each="per_gpu")
def tokens_of_gpus(devices: float, each: float) -> Quantities:
    return {VALUE: devices * each}


@rule("scaling_book", each="per_chip", tokens="tokens")
def chips_of_tokens(tokens: float, each: float) -> Quantities:
    return {VALUE: tokens / each}


@rule("scaling_book", memory="hbm")
def largest_model(memory: float, bytes_per_param: float) -> Quantities:
    return {VALUE: memory / bytes_per_param}


@rule("scaling_book", ffn="F")
def tensor_limit(ffn: int, axes: int = 1, alpha: float = ICI_INTENSITY) -> Quantities:
    return {VALUE: rooflines.tensor_parallel_limit(ffn, alpha, axes)}


@rule("scaling_book")
def intensity(inputs: Any) -> Quantities:
    """Of FLOPs per second, given first, over any bandwidth."""
    flops, bandwidth = inputs.values()
    if not 1e9 < bandwidth < flops:
        raise ValueError("not a rate of FLOPs and one of bytes")
    return {VALUE: rooflines.intensity(flops, bandwidth)}


@rule("scaling_book")
def least_batch(alpha: float, axes: int = 1) -> Quantities:
    return {VALUE: rooflines.data_parallel_batch(alpha, axes)}


@rule("scaling_book", hidden="D", ffn="F", bandwidth="hbm", element_bytes="bytes")
def matmul_batch(hidden: int, ffn: int, flops: float, bandwidth: float, element_bytes: float = 1) -> Quantities:
    return {VALUE: rooflines.matmul_critical_batch(flops, bandwidth, hidden, ffn, element_bytes)}


@rule("scaling_book", num_bytes="bytes", both_ways="W")
def gather_bytes(num_bytes: float, both_ways: float, axes: int = 1) -> Quantities:
    found = collectives.torus_gather_seconds(num_bytes, both_ways / 2, (1,) * axes)
    return {VALUE: found, "all_gather": found, "all_reduce": 2 * found, "all_to_all": found / 4}


@rule("scaling_book")
def flops_per_token(params: float) -> Quantities:
    return {VALUE: budget.training_flops(params, 1)}


@rule("scaling_book", layers="L", hidden="D", ffn="F", vocab="V")
def parameters(layers: int, hidden: int, ffn: int, vocab: int, tied: bool = False) -> Quantities:
    """Heads as wide as the model together."""
    attention, mlp = 4 * layers * hidden**2, 3 * layers * hidden * ffn
    total = attention + mlp + (1 if tied else 2) * vocab * hidden
    return {VALUE: total, "total": total, "attn": attention, "ffw": mlp, "attn_share": attention / total}


@rule("scaling_book", batch="bs")
def decode_step(
    batch: float,
    kv_bytes: float,
    param_bytes: float,
    bandwidth: float,
    devices: int = 1,
    params: float = 0,
    peak: float = 1,
) -> Quantities:
    found = serving.decode_step_seconds(batch, param_bytes, kv_bytes, params, peak * devices, bandwidth * devices)
    return {VALUE: found, "seconds": found, "ms": 1e3 * found, "tokens_s": batch / found}


@rule("scaling_book")
def data_parallel_chips(tokens: float, alpha: float, axes: int = 1) -> Quantities:
    return {VALUE: tokens / rooflines.data_parallel_batch(alpha, axes)}


@rule("scaling_book", tokens="tokens", layers="L", hidden="D")
def training_memory(params: float, tokens: float, layers: int, hidden: int, F_over_D: float) -> Quantities:
    """States at 10 bytes; of each layer its input and the two MLP products, 2 bytes a value."""
    return {
        "param_opt_GB": SCALING_BOOK_BYTES * params / 1e9,
        "act_TB": _checkpoints(tokens, layers, hidden, F_over_D) / 1e12,
    }


def _checkpoints(tokens: float, layers: int, hidden: int, ratio: float) -> float:
    return 2 * tokens * layers * hidden * (1 + 2 * ratio)


@rule("scaling_book", layers="L", hidden="D", ffn="F", tokens="tokens")
def llama_on_v5p(devices: int, tokens: float, layers: int = 40, hidden: int = 5120, ffn: int = 13824) -> Quantities:
    """Llama 2 13B where the model is not given."""
    return {
        "hbm_TB": devices * 96e9 / 1e12,
        "act_TB": _checkpoints(tokens, layers, hidden, ffn / hidden) / 1e12,
        "min_tokens": devices * rooflines.data_parallel_batch(ICI_INTENSITY, 3),
        "mixed": rooflines.mixed_batch(ICI_INTENSITY, ffn),
        "per_chip": tokens / devices,
    }


@rule("scaling_book", batch="B", devices="N", ffn="F")
def best_fsdp(batch: float, devices: float, ffn: float) -> Quantities:
    return {VALUE: rooflines.optimal_fsdp(batch, devices, ffn)}


@rule("scaling_book", ffn="F")
def least_mixed_batch(ffn: float, alpha: float, fsdp_axes: int = 2, tensor_axes: int = 1) -> Quantities:
    return {VALUE: rooflines.mixed_batch(alpha, ffn, fsdp_axes, tensor_axes)}


@rule("scaling_book", seq="T")
def cache_gigabytes(seq: int, bs: int = 1) -> Quantities:
    """Llama 3 70B in int8."""
    model = shape("llama3-70b")
    per_token = serving.kv_bytes_per_token(model.num_layers, model.kv_heads, model.head_dim, 1)
    return {VALUE: bs * seq * per_token / 1e9}


@rule("scaling_book", element_bytes="bytes", seq="T", layers="L", kv_heads="K", head_dim="H")
def cache_bytes(
    seq: int, layers: int, kv_heads: int, head_dim: int, element_bytes: float = 2, bs: int = 1
) -> Quantities:
    return {VALUE: bs * seq * serving.kv_bytes_per_token(layers, kv_heads, head_dim, element_bytes)}


@rule("scaling_book")
def tokens_per_chip(bs: float, step: float, devices: float) -> Quantities:
    return {VALUE: bs / (step * devices)}


@rule("scaling_book", memory="hbm", bandwidth="bw")
def read_all_memory(memory: float, bandwidth: float) -> Quantities:
    return {VALUE: 1e3 * memory / bandwidth, "ms": 1e3 * memory / bandwidth}


@rule("scaling_book", element_bytes="bytes", bandwidth="bw")
def load_weights(params: float, element_bytes: float, devices: int, bandwidth: float) -> Quantities:
    found = params * element_bytes / (devices * bandwidth)
    return {VALUE: found, "seconds": found, "ms": 1e3 * found}


@rule("scaling_book", batch="B", ffn="F")
def gather_in_a_node(batch: int, ffn: int, bandwidth: float = NVLINK, ranks: int = 8) -> Quantities:
    num_bytes = 2.0 * batch * ffn
    return {
        "approx_us": 1e6 * num_bytes / bandwidth,
        "exact_us": 1e6 * collectives.ring_seconds("all_gather", num_bytes, ranks, bandwidth),
    }


@rule("scaling_book")
def tree(node: Sequence[float], leaf: Sequence[float], spine: Sequence[float]) -> Quantities:
    """Each a pair (units, bandwidth of a unit)."""
    found = {
        name: collectives.level_bandwidth(int(units), bandwidth)
        for name, (units, bandwidth) in (("node", node), ("leaf", leaf), ("spine", spine))
    }
    return {**found, "overall": min(found.values())}


@rule("scaling_book", experts="E", experts_per_token="k")
def moe_batch(experts: float, experts_per_token: float, alpha: float) -> Quantities:
    return {VALUE: rooflines.data_parallel_batch(alpha, 1, experts, experts_per_token)}


@rule("scaling_book", element_bytes="bytes", memory="hbm")
def least_devices(params: float, element_bytes: float, memory: float) -> Quantities:
    return {VALUE: math.ceil(params * element_bytes / memory)}


@rule("scaling_book", tokens="tokens")
def training_time(devices: int, mfu: float, peak: float, tokens: float, params: float = 70e9) -> Quantities:
    """Llama 70B where the model is not given."""
    seconds = budget.training_seconds(budget.training_flops(params, tokens), devices, peak, mfu)
    return {"seconds": seconds, "days": seconds / budget.DAY, VALUE: seconds / budget.DAY}


@rule("scaling_book")
def llama70b_on_h100s(
    params: float = 70e9, batch: float = 4e6, devices: int = 4096, tp: int = 8, pp: int = 8
) -> Quantities:
    return {
        "GB_per_gpu": params * SCALING_BOOK_BYTES / tp / 1e9,
        "tok_per_gpu": batch / devices,
        f"pp{pp}_bound": GPU_INTENSITY / pp,
    }


@rule("scaling_book", batch="B", hidden="D", bandwidth="W", microbatches="mb")
def pipeline_sends(batch: float, hidden: int, bandwidth: float, microbatches: int, stages: int) -> Quantities:
    found = rooflines.pipeline_seconds(batch, hidden, bandwidth, microbatches, stages)
    return {VALUE: found, "seconds": found}


@rule("scaling_book")
def superpod() -> Quantities:
    """DGX H100: 8 GPUs, 4 switches of 64 ports of 25 GB/s, 32 nodes of 400 GB/s a unit; GB200: 72 cards of 50 GB/s."""
    return {
        "per_gpu": NVLINK,
        "switch": 4 * 64 * 25e9,
        "node": 8 * NVLINK,
        "gb200_egress": 72 * 50e9,
        "su": 32 * 400e9,
    }


@rule("scaling_book")
def cuda_cores() -> Quantities:
    """Multiprocessors, each of 128."""
    return {"v100": 80 * 64, "a100": 108 * 64, "h100": 132 * 128, "h200": 132 * 128, "b200": 148 * 128}
