"""Bytes per parameter and of activations as the literature counts them; what this package itself holds is in `memory`.

All in bytes, per device. Model states are parameters, gradients and optimizer state.
"""

import math
from dataclasses import dataclass

LECTURE_BYTES = 8
"""bfloat16 weight, gradient and Adam's two moments."""
ZERO_BYTES = 16
"""ZeRO (arXiv 1910.02054), section 3.1: float16 weight 2 and gradient 2; float32 weight, momentum and variance 12."""
MEGATRON_BYTES = 18
"""Megatron-LM, theoretical_memory_usage.py: as ZeRO, with gradients in float32."""
ADAM_BYTES = 12
"""Of which the optimizer's: K of the ZeRO paper."""
SCALING_BOOK_BYTES = 10
"""How to Scale Your Model, "Training": bfloat16 weight, float32 momentum and variance."""


def zero_bytes(num_parameters: float, data: float, stage: int, optimizer_bytes: float = ADAM_BYTES) -> float:
    """Model states under ZeRO's stages 0 to 3 over `data` devices. Source: ZeRO (arXiv 1910.02054), figure 1."""
    sharded = {0: 0.0, 1: optimizer_bytes, 2: optimizer_bytes + 2, 3: optimizer_bytes + 4}[stage]
    return num_parameters * (optimizer_bytes + 4 - sharded + sharded / data)


def zero_max_parameters(device_bytes: float, data: float, stage: int, model_parallel: float = 1) -> float:
    """The largest model whose states fit. Source: ZeRO (arXiv 1910.02054), table 2."""
    return model_parallel * device_bytes / zero_bytes(1, data, stage)


def megatron_bytes_per_parameter(data: float = 1, distributed_optimizer: bool = False) -> float:
    """18, or 6 + 12/d where the optimizer is distributed over d data-parallel ranks. Source: Megatron-LM,
    theoretical_memory_usage.py."""
    return 6 + ADAM_BYTES / data if distributed_optimizer else MEGATRON_BYTES


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that one layer of a GPT keeps for its backward pass. Source: Korthikanti et al. (2205.05198), table 2.

    16-bit activations and 1-byte dropout masks; s b h is the size of the residual stream.
    """

    seq_len: int
    microbatch: int
    embed_dim: int
    num_heads: int
    tensor: int = 1

    @property
    def _stream(self) -> float:
        return float(self.seq_len * self.microbatch * self.embed_dim)

    @property
    def _attention(self) -> float:
        return 5.0 * self.num_heads * self.seq_len / self.embed_dim

    @property
    def no_parallel(self) -> float:
        return self._stream * (34 + self._attention)

    @property
    def tensor_parallel(self) -> float:
        return self._stream * (10 + (24 + self._attention) / self.tensor)

    @property
    def tensor_sequence_parallel(self) -> float:
        return self.no_parallel / self.tensor

    @property
    def tensor_parallel_selective(self) -> float:
        """Attention's scores are computed again."""
        return self._stream * (10 + 24 / self.tensor)

    @property
    def tensor_sequence_parallel_selective(self) -> float:
        return self._stream * 34 / self.tensor

    @property
    def full(self) -> float:
        """All is computed again from the layer's input, which every rank holds."""
        return 2 * self._stream


def interleaved_first_stage_factor(stages: int, chunks: int) -> float:
    """Activations of the first stage of interleaved 1F1B, over those of 1F1B: 1 + (p - 1)/(p m). Source: Korthikanti et
    al. (arXiv 2205.05198), section 4.2.3."""
    return 1 + (stages - 1) / (stages * chunks)


def optimal_checkpoints(num_layers: float, intermediate_bytes: float, input_bytes: float) -> float:
    """Checkpoints in a stage of l layers that need least memory: sqrt(l A_intermediate / A_input). Source: Narayanan et
    al. (arXiv 2104.04473), section 3.5."""
    return math.sqrt(num_layers * intermediate_bytes / input_bytes)


@dataclass(frozen=True)
class DeepSpeedEstimate:
    """Bytes per GPU as DeepSpeed's estimators print them (docs/code-docs/source/memory.rst)."""

    num_parameters: float
    largest_layer: float
    num_devices: int

    @property
    def zero2(self) -> float:
        return 4 * self.num_parameters + 16 * self.num_parameters / self.num_devices

    @property
    def zero2_offload(self) -> float:
        return 2 * self.num_parameters

    @property
    def gathered_layer(self) -> float:
        return 4 * self.largest_layer

    @property
    def zero3(self) -> float:
        return self.gathered_layer + 18 * self.num_parameters / self.num_devices

    @property
    def zero3_offload_parameters(self) -> float:
        return self.gathered_layer

    @property
    def zero3_offload_optimizer(self) -> float:
        return self.gathered_layer + 2 * self.num_parameters / self.num_devices


@dataclass(frozen=True)
class CookbookEstimate:
    """Bytes per GPU as EleutherAI's calc_transformer_mem.py prints them, slips included: ZeRO divides by all GPUs, not
    the data-parallel ones, and gradients are not divided by tensor parallelism."""

    num_layers: int
    embed_dim: int
    num_heads: int
    seq_len: int
    microbatch: int
    num_devices: int
    tensor: int = 1
    pipeline: int = 1
    zero: int = 1
    checkpointing: bool = False
    partition_activations: bool = False
    vocab_size: int = 51200
    mlp_ratio: float = 4.0
    num_mlp_kernels: int = 2
    kv_ratio: float = 1.0

    @property
    def num_parameters(self) -> float:
        h, layers = self.embed_dim, self.num_layers
        attention = int(2 * (1 + self.kv_ratio) * layers * h * h)
        mlp = self.num_mlp_kernels * layers * h * self.mlp_ratio * h
        return 2 * self.vocab_size * h + h * self.seq_len + 8 * h * layers + 2 * h + attention + mlp

    @property
    def model(self) -> float:
        sharded = self.num_parameters * 2 / (self.tensor * self.pipeline)
        return sharded / self.num_devices if self.zero == 3 else sharded

    @property
    def gradients(self) -> float:
        return self.num_parameters * 4 / (self.num_devices if self.zero >= 2 else 1)

    @property
    def optimizer(self) -> float:
        return self.num_parameters * 12 / (self.num_devices if self.zero >= 1 else 1)

    @property
    def communication(self) -> float:
        if self.num_devices == 1 or self.zero == 0:
            return 0.0
        return 2 * 5e8 + (2 * 1e9 if self.zero == 3 else 0)

    @property
    def activations(self) -> float:
        stream = float(self.seq_len * self.microbatch * self.embed_dim * self.num_layers)
        scores = 0 if self.checkpointing else 5 * self.num_heads * self.seq_len / self.embed_dim
        return stream * (34 + scores) / (self.tensor if self.partition_activations else 1)

    @property
    def total(self) -> float:
        return self.model + self.gradients + self.optimizer + self.communication + self.activations
