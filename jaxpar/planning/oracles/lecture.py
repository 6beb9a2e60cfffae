"""The arithmetic of lectures on large training runs, their constants, and layouts of published runs."""

import math
from typing import Any

from jaxpar.planning import memory_conventions, serving
from jaxpar.planning.flops import mfu
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule
from jaxpar.planning.recipe import (
    MAX_DATA_DEVICES,
    MAX_DATA_PARAMETERS,
    MAX_FSDP_DEVICES,
    MAX_HSDP_DEVICES,
    MAX_HSDP_PARAMETERS,
    MAX_SEQ_LEN,
    recipe,
)
from meshes import chip as find
from meshes import load_cluster

_STRATEGIES = {"DP": "DP", "FSDP": "FSDP+act_ckpt", "HSDP": "HSDP", "ND": "ND(CP/PP/TP)"}


def _h100() -> dict[str, Any]:
    """NVIDIA H100 architecture whitepaper, SXM5."""
    known = find("H100-SXM")
    return {
        "designed": 144,
        "enabled": 132,
        "fp32_cores_per_sm": 128,
        "tensor_cores_per_sm": 4,
        "l2_MB": 50,
        "hbm_GB": known.memory_bytes // 10**9,
        "hbm_GBps": round(known.memory_bandwidth / 1e9),
    }


def _ladder() -> dict[str, Any]:
    """NVLink is printed both ways."""
    cluster = load_cluster("llama3-h100")
    server, pod = cluster.levels[0], cluster.levels[2]
    return {
        "server_GBps": round(2 * server.bandwidth / 1e9),
        "pod_GBps": round(pod.bandwidth / 1e9),
        "dp_GBps": round(pod.bandwidth / 1e9),
        "tp_max": server.size,
    }


@rule("seed")
def constants() -> Quantities:
    """Each under the only name that lectures give it."""
    passes = serving.SOFTMAX_ACCESSES
    return {
        **_h100(),
        **_ladder(),
        "dp_max_gpus": MAX_DATA_DEVICES,
        "dp_max_params": MAX_DATA_PARAMETERS,
        "fsdp_params": MAX_DATA_PARAMETERS,
        "hsdp_gpus": MAX_FSDP_DEVICES,
        "nd_gpus": MAX_HSDP_DEVICES,
        "nd_params": MAX_HSDP_PARAMETERS,
        "nd_seq": MAX_SEQ_LEN,
        # Backward passes take two products for each of the forward pass; what counts as a good MFU.
        "backward_over_forward": 2,
        "good": 0.3,
        "excellent": 0.4,
        "low": 0.38,
        "high": 0.43,
        # Passes of the weights: all-reduced once, or gathered twice and reduce-scattered.
        "dp": 1,
        "fsdp": 3,
        "K": memory_conventions.ADAM_BYTES,
        "safe_passes": passes["safe"][0],
        "online_passes": passes["online"][0],
        "apparent_speedup": passes["safe"][1] / passes["online"][1],
        "measured": 1.3,
        # Llama 4 Behemoth, as announced.
        "tokens": 30e12,
        "params": 2e12,
        "active": 288e9,
    }


@rule("seed")
def chips(form: Any) -> Quantities:
    return {name: _sheet(name) for name, figures in form.items() if isinstance(figures, dict)}


def _sheet(name: str) -> Quantities:
    known = find(name.replace(" ", "-"))
    return {
        "bf16_TF": round(known.devices_per_chip * known.peak_flops["bfloat16"] / 1e12),
        "hbm_GB": known.devices_per_chip * known.memory_bytes / 1e9,
        "pod": math.prod(known.torus),
        "ultraserver": math.prod(known.torus),
    }


@rule("seed", values="values_per_param", value_bytes="bytes_per_value")
def states(params: float, values: float, value_bytes: float, devices: int) -> Quantities:
    total = params * values * value_bytes / 1e9
    return {"total_GB": total, "per_gpu_GB": total / devices}


@rule("seed")
def bytes_per_parameter(weight: float, grad: float, adam_m: float, adam_v: float) -> Quantities:
    return {VALUE: weight + grad + adam_m + adam_v}


@rule("seed", gigabytes="hbm_GB")
def largest_model(gigabytes: float, bytes_per_param: float) -> Quantities:
    return {VALUE: gigabytes * 1e9 / bytes_per_param}


@rule("seed", value_bytes="bytes")
def gigabytes(params: float, value_bytes: float) -> Quantities:
    return {VALUE: params * value_bytes / 1e9}


@rule("seed", value_bytes="bytes", ratio="ffn_mult", hidden="d_model")
def mlp_activations(layers: int, hidden: int, ratio: float, seq: int, value_bytes: float) -> Quantities:
    return mlp_activations_of(layers, int(ratio * hidden), seq, value_bytes)


@rule("seed", value_bytes="bytes", ffn="ffn")
def true_mlp_activations(layers: int, ffn: int, seq: int, value_bytes: float) -> Quantities:
    return mlp_activations_of(layers, ffn, seq, value_bytes)


def mlp_activations_of(layers: int, ffn: int, seq: int, value_bytes: float) -> Quantities:
    """Of one sequence, the MLPs' hidden layers."""
    found = layers * ffn * seq * value_bytes
    return {"bytes": found, "GB": found / 1e9, "GiB": found / 2**30, VALUE: found}


@rule("seed", stages="pp")
def devices_of_mesh(tp: int, cp: int, stages: int, dp: int) -> Quantities:
    return {VALUE: tp * cp * stages * dp}


@rule("seed")
def tokens_per_rank(seq: int, cp: int) -> Quantities:
    return {VALUE: seq // cp}


@rule("seed")
def context_degree(seq: int) -> Quantities:
    """Llama 3's: 8,192 tokens a rank."""
    return {"cp": max(1, seq // 8192)}


@rule("seed")
def cluster(gpus_per_server: int, servers_per_rack: int, racks_per_pod: int, pods: int) -> Quantities:
    rack = gpus_per_server * servers_per_rack
    return {"rack": rack, "pod": rack * racks_per_pod, "cluster": rack * racks_per_pod * pods}


@rule("seed", each="GB")
def petabytes(devices: int, each: float) -> Quantities:
    """GB over 1024 squared, as lectures have it."""
    return {VALUE: devices * each / 1024**2}


@rule("seed")
def fp32_cores(devices: int, sms: int, cores: int) -> Quantities:
    return {VALUE: devices * sms * cores}


@rule("seed")
def tensor_cores(devices: int, sms: int, tc: int) -> Quantities:
    return {VALUE: devices * sms * tc}


@rule("seed")
def total_flops(devices: int, tflops: float) -> Quantities:
    return {VALUE: devices * tflops * 1e12}


@rule("seed", rows="m", inner="k", columns="n")
def tile_flops(rows: int, inner: int, columns: int) -> Quantities:
    return {VALUE: 2 * rows * inner * columns}


@rule("seed")
def multiprocessor_flops(tc: int, flop: int) -> Quantities:
    return {VALUE: tc * flop}


@rule("seed")
def multiply_adds(cores: int) -> Quantities:
    return {VALUE: 2 * cores}


@rule("seed")
def tensor_core_ratio(tc: float, fp32: float) -> Quantities:
    return {VALUE: tc / fp32}


@rule("seed")
def peak(sms: int, flop_per_sm_clk: float, clock_hz: float) -> Quantities:
    return {VALUE: sms * flop_per_sm_clk * clock_hz}


@rule("seed")
def vector_peak(sms: int, cores: int, clock_hz: float) -> Quantities:
    """A multiply-add of each core a clock."""
    return {VALUE: 2 * sms * cores * clock_hz}


@rule("seed")
def utilization_of_step(flops: float, seconds: float, peak: float, devices: int = 1) -> Quantities:
    return {VALUE: mfu(flops, seconds, devices, peak), "mfu": mfu(flops, seconds, devices, peak)}


@rule("seed")
def bandwidth_ratios(hbm: float, server: float, pod: float) -> Quantities:
    return {"server": hbm / server, "pod": hbm / pod}


@rule("seed")
def speed_ratio(inputs: Any) -> Quantities:
    """Of two chips, the older one's figure first."""
    older, newer = inputs.values()
    if not all(any(part in name for part in ("k40", "p100", "v100", "a100", "h100", "b200")) for name in inputs):
        raise ValueError("not two chips")
    return {VALUE: newer / older}


@rule("seed")
def recipe_of(devices: int, params: float, seq: int) -> Quantities:
    return {VALUE: _STRATEGIES[recipe(params, devices, seq).strategy]}


@rule("seed", devices="N", inside="K")
def hybrid_split(devices: int, inside: int) -> Quantities:
    return {"M": devices // inside}


@rule("seed", layers="N")
def recompute_all(layers: int) -> Quantities:
    """Forward passes of a layer where each backward pass starts from the input."""
    return {"layer_forwards": layers + layers * (layers - 1) // 2}


@rule("seed")
def interruptions(interruptions: float, days: float) -> Quantities:
    return {"per_day": interruptions / days, VALUE: interruptions / days}


@rule("seed")
def video_tokens(minutes: float, fps: float, tokens_per_frame: int) -> Quantities:
    return {VALUE: minutes * 60 * fps * tokens_per_frame}


@rule("seed")
def least_devices(bytes_GB: float, hbm_GB: float) -> Quantities:
    return {VALUE: math.ceil(bytes_GB / hbm_GB)}


@rule("seed")
def two_layers_of_tensor_parallelism(layers: int, tp: int) -> Quantities:
    """A column-split layer, then a row-split one."""
    return {"allreduces_forward": layers // 2 if tp > 1 else 0}


# Layouts as published: PaLM (arXiv 2204.02311), section 4; Megatron-LM (arXiv 2104.04473), table 1; MT-NLG (arXiv
# 2201.11990), section 2.3; BLOOM (arXiv 2211.05100), section 3.2; OPT (arXiv 2205.01068), section 2.5; Llama 3 (arXiv
# 2407.21783), table 4; DeepSeek-V3 (arXiv 2412.19437), section 3.2.
_LAYOUTS = {
    ("palm-540b", 6144): {"tp": 12, "fsdp": 256, "pods": 2, "pp": 1},
    ("1.7b", 32): {"tp": 1, "pp": 1, "dp": 32},
    ("3.6b", 64): {"tp": 2, "pp": 1, "dp": 32},
    ("7.5b", 128): {"tp": 4, "pp": 1, "dp": 32},
    ("18.4b", 256): {"tp": 8, "pp": 1, "dp": 32},
    ("39.1b", 512): {"tp": 8, "pp": 2, "dp": 32},
    ("76.1b", 1024): {"tp": 8, "pp": 4, "dp": 32},
    ("145.6b", 1536): {"tp": 8, "pp": 8, "dp": 24},
    ("310.1b", 1920): {"tp": 8, "pp": 16, "dp": 15},
    ("529.6b", 2520): {"tp": 8, "pp": 35, "dp": 9},
    ("1t", 3072): {"tp": 8, "pp": 64, "dp": 6},
    ("mt-nlg-530b", 2240): {"tp": 8, "pp": 35, "dp": 8},
    ("mt-nlg-530b", 2800): {"tp": 8, "pp": 35, "dp": 10},
    ("mt-nlg-530b", 3360): {"tp": 8, "pp": 35, "dp": 12},
    ("bloom-176b", 384): {"tp": 4, "pp": 12, "dp": 8},
    ("opt-175b", 992): {"tp": 8, "pp": 1, "fsdp": 124, "dp": 124},
    ("llama-3-405b", 8192): {"tp": 8, "cp": 1, "pp": 16, "dp": 64},
    ("llama-3-405b", 16384): {"tp": 8, "cp": 1, "pp": 16, "dp": 128},
    ("deepseek-v3", 2048): {"tp": 1, "pp": 16, "ep": 64, "dp": 128},
}
_LAYOUT_NAMES = {"1008b": "1t", "bloom": "bloom-176b", "mt-nlg": "mt-nlg-530b", "llama-3.1-405b": "llama-3-405b"}


@rule("recommendation")
def published_layout(model: str, devices: int, chip: str = "", seq: int = 8192) -> Quantities:
    name = model.lower().removeprefix("megatron-")
    name = _LAYOUT_NAMES.get(name, name)
    if (name, devices, seq) == ("llama-3-405b", 16384, 131072):
        return {"tp": 8, "cp": 16, "pp": 16, "dp": 8}
    return _LAYOUTS[name, devices]
