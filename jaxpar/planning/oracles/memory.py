"""Bytes of model states and activations, by the conventions of their sources."""

from jaxpar.planning import memory_conventions as conventions
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule

_G, _GI, _MI = 1e9, 2**30, 2**20
_STAGES = {"baseline": 0, "Pos": 1, "Pos_g": 2, "Pos_g_p": 3}


@rule("zero", optimizer="K")
def states(params: float, dp: int, optimizer: float = conventions.ADAM_BYTES) -> Quantities:
    return {name: conventions.zero_bytes(params, dp, stage, optimizer) / _G for name, stage in _STAGES.items()}


@rule("zero", model_parallel="mp", device_gigabytes="gpu_GB", optimizer="K")
def largest_model(
    model_parallel: int, dp: int, device_gigabytes: float, devices: int = 0, optimizer: float = 12
) -> Quantities:
    """In billions of parameters."""
    return {
        f"{name}_B": conventions.zero_max_parameters(device_gigabytes, dp, stage, model_parallel)
        for name, stage in _STAGES.items()
    }


@rule("zero")
def published_checkpoints(model: str, batch: int, seq: int, mp: int) -> Quantities:
    """ZeRO (arXiv 1910.02054), section 6.1, says what a 100B model's activation checkpoints take, and that
    partitioning divides them by the model-parallel degree."""
    gigabytes = {("100B", 32, 1024): 33.0}[model, batch, seq]
    return {"ckpt_GB": gigabytes, "with_Pa_GB": gigabytes / mp}


@rule("zero")
def deepspeed(params: float, largest_layer: float, devices: int) -> Quantities:
    """Cases of DeepSpeed's table: no offload, all offloaded, the optimizer offloaded."""
    found = conventions.DeepSpeedEstimate(params, largest_layer, devices)
    return {
        "largest_MB": found.gathered_layer / _MI,
        "case1_MB": found.zero3 / _MI,
        "case2_MB": found.zero3_offload_parameters / _MI,
        "case3_MB": found.zero3_offload_optimizer / _MI,
        "zero2_MB": found.zero2 / _MI,
        "zero2_offload_MB": found.zero2_offload / _MI,
    }


@rule("zero")
def megatron(dp: int) -> Quantities:
    return {
        "no_dist_opt": conventions.megatron_bytes_per_parameter(),
        "dist_opt": conventions.megatron_bytes_per_parameter(dp, distributed_optimizer=True),
    }


@rule("zero")
def volumes(params: float) -> Quantities:
    """Values sent by each device in a step. Source: ZeRO (arXiv 1910.02054), section 7."""
    return {"dp": 2 * params, "baseline": 2 * params, "Pos": 2 * params, "Pos_g": 2 * params, "Pos_g_p": 3 * params}


@rule("zero", element_bytes="bytes")
def gigabytes(params: float, element_bytes: float) -> Quantities:
    return {VALUE: params * element_bytes / _G, "GB": params * element_bytes / _G}


@rule("zero")
def playbook(params: float) -> Quantities:
    """The Ultra-Scale Playbook's: 16 bytes a parameter, 4 more where gradients accumulate in float32."""
    return {
        "bf16_GB": conventions.ZERO_BYTES * params / _G,
        "fp32_GB": conventions.ZERO_BYTES * params / _G,
        "bf16_fp32_gradacc_GB": (conventions.ZERO_BYTES + 4) * params / _G,
    }


@rule("zero", "activation_memory", checkpointing="ckpt", partition="pa", stages="pp", microbatch="mbs")
def cookbook(
    layers: int,
    hidden: int,
    heads: int,
    seq: int,
    microbatch: int,
    devices: int,
    tp: int = 1,
    stages: int = 1,
    zero: int = 1,
    checkpointing: bool = False,
    partition: bool = False,
    vocab: int = 51200,
) -> Quantities:
    found = conventions.CookbookEstimate(
        layers, hidden, heads, seq, microbatch, devices, tp, stages, zero, checkpointing, partition, vocab
    )
    # The script prints parts to two digits; its cases are in those.
    return {
        "act": found.activations / _GI,
        "model": found.model / _GI,
        "grad": found.gradients / _GI,
        "opt": found.optimizer / _GI,
        "comm": found.communication / _GI,
        "total": found.total / _GI,
        "params": found.num_parameters,
    }


@rule("activation_memory", microbatch="b", seq="s", hidden="h", heads="a", tp="t")
def layer(seq: int, microbatch: int, hidden: int, heads: int, tp: int = 1) -> Quantities:
    found = conventions.LayerActivations(seq, microbatch, hidden, heads, tp)
    return {
        "no_parallel": found.no_parallel,
        "tp": found.tensor_parallel,
        "tp_sp": found.tensor_sequence_parallel,
        "tp_selective": found.tensor_parallel_selective,
        "tp_sp_selective": found.tensor_sequence_parallel_selective,
        "full": found.full,
    }


@rule("activation_memory", seq="s", hidden="h", heads="a")
def attention_share(seq: int, hidden: int, heads: int) -> Quantities:
    """What selective recomputation saves of a layer, and the FLOPs that it costs (Korthikanti et al., section 5)."""
    scores, extra = 5 * heads * seq / hidden, seq / (6 * hidden)
    return {
        VALUE: scores,
        "factor": scores,
        "saved": scores / (34 + scores),
        "saved_pct": 100 * scores / (34 + scores),
        "overhead": extra / (1 + extra),
        "overhead_pct": 100 * extra / (1 + extra),
    }


@rule("activation_memory", stages="p", chunks="m")
def interleaved(stages: int, chunks: int) -> Quantities:
    factor = conventions.interleaved_first_stage_factor(stages, chunks)
    return {"factor": factor, VALUE: factor}


@rule("activation_memory", microbatch="b", element_bytes="bytes", stages="p")
def stage_outputs(seq: int, microbatch: int, hidden: int, stages: int, element_bytes: int = 2) -> Quantities:
    """GiB of the outputs that the first stage has sent and need not keep."""
    return {VALUE: seq * microbatch * hidden * stages * element_bytes / _GI}


@rule("activation_memory", tokens="tokens", layers="L", hidden="D")
def scaling_book_remat(tokens: float, layers: int, hidden: int) -> Quantities:
    """How to Scale Your Model, "Transformer Math": 20 intermediates of a layer, or its input alone, 2 bytes each."""
    stream = 2.0 * tokens * layers * hidden / 1e12
    return {"all_saved_TB": 20 * stream, "block_inputs_TB": stream}


@rule("activation_memory", intermediate="A_intermediate", layer_input="A_input")
def checkpoints(layers: float, intermediate: float, layer_input: float) -> Quantities:
    found = conventions.optimal_checkpoints(layers, intermediate, layer_input)
    return {VALUE: found, "c": found}
