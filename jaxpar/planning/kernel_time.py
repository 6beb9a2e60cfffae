"""Seconds of one microbatch's kernels on one device: a roofline over the shapes of a layer's products and passes.

    product [m, k] x [k, n]   2 m n k / (peak x matmul)  +  bytes of its operands and result / (bandwidth x memory)
    attention                 FLOPs that a causal mask leaves / (peak x attention x its kernel's speed), backward 2.5
                              times forward; or, unfused, both products whole and passes over the scores
    the rest                  bytes read and written / (bandwidth x memory)

The sum of the two terms, where a roofline has their maximum, is what makes a product's efficiency grow with each of its
dims: at intensity I, in FLOPs a byte, it is matmul / (1 + I_ridge / I). Products of 8 or 4 bits read and write their
operands once more, to scale and cast them, which is why they gain less than their peak promises. Attention stays in
16 bits. FlashAttention-2 (arXiv 2307.08691), section 3.1.2: the backward pass has 5 products to the forward's 2.
"""

from dataclasses import dataclass

import numpy as np

from jaxpar.planning.calibration import Calibration
from jaxpar.planning.flops import attention_flops_per_token
from jaxpar.planning.job import Job, Numbers
from meshes.spec import Chip

# Reads and writes of an activation, 2 bytes each, in units of the stream's width and of the MLP's, forward and
# backward. Separate kernels: two norms (2 each) and two additions (3 each), 3 each backward; GELU 2 and 3; SwiGLU's two
# functions 2 and 3. Compiled, a norm runs with the addition before it, and an MLP's functions are one.
_STREAM_PASSES = {False: (10.0, 12.0), True: (6.0, 8.0)}
_GELU_PASSES = {False: (2.0, 3.0), True: (2.0, 2.0)}
_SWIGLU_PASSES = {False: (5.0, 8.0), True: (3.0, 5.0)}
# Bytes of a logit beyond its product's: read, cast to 4 bytes, soft-maxed and back; or one kernel each way.
_LOGIT_BYTES = {False: 24.0, True: 8.0}
# Of the routed tokens: put in order of ranks (written), of experts (read and written), and back likewise.
_ROUTING_PASSES = (6.0, 6.0)
_BACKWARD_ATTENTION = 2.5
_TILE = 128
"""Tokens of a tile on the diagonal, half of which the mask hides."""
ATTENTION_KERNELS = {"flash-1": 0.5, "flash-2": 1.0}
"""Speed beside FlashAttention-2, whose paper (arXiv 2307.08691) has it twice its first version's. A third, "newest", is
the chip's own: its calibration says."""
UNFUSED = "unfused"
"""Two products and a fused scale, mask and softmax between them, as before flash attention."""
_SCORE_PASSES = (6.0, 8.0)
"""Of the scores, 2 bytes each: out of a product and into one, softmax, dropout; backward their gradients too."""
_BYTES = {"float32": 4.0, "float8": 1.0, "int8": 1.0, "float4": 0.5}
"""Of a product's operand; 2 for any other."""


@dataclass(frozen=True)
class Seconds:
    """Of the forward and of the backward pass."""

    forward: Numbers
    backward: Numbers

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: Numbers) -> "Seconds":
        return Seconds(self.forward * times, self.backward * times)

    @property
    def total(self) -> Numbers:
        return self.forward + self.backward


@dataclass(frozen=True)
class LayerSeconds:
    """Of one layer, for one microbatch on one device."""

    matmul: Seconds
    attention: Seconds
    elementwise: Seconds

    @property
    def total(self) -> Numbers:
        return self.matmul.total + self.attention.total + self.elementwise.total

    def mixed(self, other: "LayerSeconds", share: float) -> "LayerSeconds":
        """The mean of layers of which this share is of the other kind."""
        if not share:
            return self

        def mean(a: Seconds, b: Seconds) -> Seconds:
            return a * (1 - share) + b * share

        return LayerSeconds(
            mean(self.matmul, other.matmul),
            mean(self.attention, other.attention),
            mean(self.elementwise, other.elementwise),
        )


@dataclass(frozen=True)
class _Rates:
    """FLOP/s and bytes/s that the kernels of one job reach."""

    matmul: float
    """In the job's precision."""
    matmul_16: float
    attention: float
    memory: float
    operand_bytes: float
    cast_bytes: float
    """Bytes moved to cast one element of an operand, in both of the layouts that its products need."""


def peak_flops(chip: Chip, precision: str) -> float:
    """FLOP/s; either 16-bit format stands for the other. ValueError where the chip has, as published, none."""
    halves = {"bfloat16": "float16", "float16": "bfloat16"}
    for name in (precision, halves.get(precision, precision)):
        if name in chip.peak_flops:
            return chip.peak_flops[name]
    raise ValueError(
        f"{chip.name} has no published peak for {precision} products: choose one of {', '.join(chip.peak_flops)}"
    )


def rates(job: Job, calibration: Calibration) -> _Rates:
    """ValueError where the chip does not multiply in the job's precision."""
    chip, known = job.cluster.chip, calibration.chip
    half, share = peak_flops(chip, "bfloat16"), known.matmul["bfloat16"]
    operand = _BYTES.get(job.precision, 2.0)
    return _Rates(
        matmul=peak_flops(chip, job.precision) * known.matmul.get(job.precision, share),
        matmul_16=half * share,
        attention=half * known.attention,
        memory=chip.memory_bandwidth * known.memory,
        operand_bytes=operand,
        cast_bytes=2 + 2 * operand if operand < 2 else 0.0,
    )


def layer_seconds(job: Job, calibration: Calibration, speeds: _Rates) -> tuple[LayerSeconds, LayerSeconds]:
    """(a layer with a dense MLP, a layer with experts; the same where the model has none)."""
    model, tensor, tokens = job.model, job.mesh["tensor"], job.microbatch_tokens
    embed, fused = model.embed_dim, calibration.framework.fused
    heads, kv_heads = model.num_heads / tensor, np.maximum(model.num_kv_heads / tensor, 1)
    attention_matmuls = product(speeds, tokens, embed, (heads + 2 * kv_heads) * model.head_dim)
    attention_matmuls += product(speeds, tokens, heads * model.head_dim, embed)

    attention = _attention_seconds(job, calibration, speeds)
    stream = tokens * embed / (tensor if job.sequence_parallel else 1)
    passes = Seconds(*_STREAM_PASSES[fused]) * stream

    def layer(matmuls: Seconds, mlp_passes: Seconds) -> LayerSeconds:
        elementwise = (passes + mlp_passes) * (2 / speeds.memory)
        return LayerSeconds(attention_matmuls + matmuls, attention, elementwise)

    inputs = 2 if model.mlp == "swiglu" else 1
    per_width = Seconds(*(_SWIGLU_PASSES if inputs == 2 else _GELU_PASSES)[fused])

    def mlp(rows: Numbers, width: Numbers) -> Seconds:
        return product(speeds, rows, embed, inputs * width) + product(speeds, rows, width, embed)

    width = model.mlp_dim / tensor
    dense = layer(mlp(tokens, width), per_width * (tokens * width))
    if not model.num_experts:
        return dense, dense
    local, routed = model.num_experts / job.mesh["expert"], tokens * model.num_experts_per_token
    width = model.expert_mlp_dim / tensor
    matmuls = mlp(routed / local, width) * local + product(speeds, tokens, embed, model.num_experts)
    activations = per_width * (routed * width) + Seconds(*_ROUTING_PASSES) * (stream * model.num_experts_per_token)
    if model.num_shared_experts:
        matmuls += mlp(tokens, model.num_shared_experts * width)
        activations += per_width * (tokens * model.num_shared_experts * width)
    return dense, layer(matmuls, activations)


def _attention_seconds(job: Job, calibration: Calibration, speeds: _Rates) -> Seconds:
    """Of one layer."""
    model, tokens = job.model, job.microbatch_tokens / job.mesh["tensor"]
    kernel = calibration.framework.attention
    if kernel == UNFUSED:
        forward = tokens * attention_flops_per_token(model, job.seq_len, causal=False) / model.num_layers
        scores = 2 * tokens * job.seq_len * model.num_heads / speeds.memory
        return Seconds(forward, 2 * forward) * (1 / speeds.matmul_16) + Seconds(*_SCORE_PASSES) * scores
    flops = tokens * attention_flops_per_token(model, job.seq_len, causal=True) / model.num_layers
    speed = calibration.chip.newest_attention if kernel == "newest" else ATTENTION_KERNELS[kernel]
    forward = flops * (1 + _TILE / job.seq_len) / (speeds.attention * speed)
    return Seconds(forward, _BACKWARD_ATTENTION * forward)


def head_seconds(job: Job, calibration: Calibration, speeds: _Rates) -> Seconds:
    """The head's product, in 16 bits, and the loss over its logits."""
    tokens, vocab = job.microbatch_tokens, job.model.vocab_size / job.mesh["tensor"]
    logits = tokens * vocab * _LOGIT_BYTES[calibration.framework.fused] / speeds.memory
    wide = _Rates(speeds.matmul_16, speeds.matmul_16, speeds.attention, speeds.memory, 2.0, 0.0)
    return product(wide, tokens, job.model.embed_dim, vocab) + Seconds(logits / 2, logits / 2)


def product(speeds: _Rates, m: Numbers, k: Numbers, n: Numbers) -> Seconds:
    """[m, k] x [k, n]: forward; and backward, the gradients of both factors, the weight's summed in 4 bytes."""
    compute = 2 * m * n * k / speeds.matmul
    operands = speeds.operand_bytes
    forward = operands * (m * k + k * n) + 2 * m * n + speeds.cast_bytes * (m * k + k * n)
    backward = 2 * operands * m * n + operands * (k * n + m * k) + 2 * m * k + 8 * k * n + speeds.cast_bytes * m * n
    return Seconds(compute + forward / speeds.memory, 2 * compute + backward / speeds.memory)
