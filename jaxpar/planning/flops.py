"""The floating-point operations of a training step, and the share of the peak that a measured step reached.

Only matrix multiplications count, a multiply-add as two operations, at the model's true sizes. The backward
pass costs twice the forward: a gradient for each of a product's two factors. A step has three counts, because
published numbers differ in which they use:

- model: every query against every key, masked or not. PaLM, appendix B (arXiv 2204.02311), whose formula per
  token is 6 N + 12 L H Q T; Korthikanti et al., equation 7 (arXiv 2205.05198).
- model_causal: only the query-key pairs that a causal mask leaves.
- hardware: model, and what rematerialization does again (Korthikanti et al., section 5): of the layers' forward pass
  every product whose result is not kept. (Scores that attention's own backward pass makes again do not count, as is
  usual; a program leaves out the last projection of a layer, which nobody needs.)
"""

from dataclasses import dataclass

from jaxpar.kernels.attention import RESULT
from jaxpar.parallel.remat import Remat
from models.config import ModelConfig
from models.count import all_mlp_weights, attention_weights, num_moe_layers


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step, forward and backward, over all devices; see the module for the three."""

    model: float
    model_causal: float
    hardware: float


def layers_matmul_flops_per_token(config: ModelConfig) -> float:
    """Forward FLOPs per token of all layers' weights, two for each, without attention's own products; of a mixture's
    experts those that a token is sent to."""
    mlp = all_mlp_weights(config, config.num_experts_per_token)
    return 2.0 * (config.num_layers * attention_weights(config) + mlp)


def head_matmul_flops_per_token(config: ModelConfig) -> float:
    """Forward FLOPs per token of the head, tied or not; the embedding is a lookup and costs none."""
    return 2.0 * config.vocab_size * config.embed_dim


def matmul_flops_per_token(config: ModelConfig) -> float:
    """Forward FLOPs per token of everything that has weights: the layers and the head."""
    return layers_matmul_flops_per_token(config) + head_matmul_flops_per_token(config)


def attention_flops_per_token(config: ModelConfig, seq_len: int, causal: bool) -> float:
    """Forward FLOPs per token of all layers' Q K^T and scores x V, averaged over a sequence.

    In full 4 x seq_len x num_heads x head_dim per layer; causal, half of that (the diagonal's half token is
    left out, as is usual). A sliding window bounds the keys of each query: a causal band of window W over S
    tokens has W x S pairs less the W^2 / 2 that the first tokens lack, and is S^2 / 2 where W reaches S.
    Source: PaLM, appendix B (arXiv 2204.02311).
    """
    window = min(config.sliding_window or seq_len, seq_len)
    keys_per_query = window - window**2 / (2 * seq_len) if causal else window
    return 4.0 * config.num_layers * config.num_heads * config.head_dim * keys_per_query


def step_flops(config: ModelConfig, num_tokens: int, seq_len: int, remat: str) -> StepFlops:
    """FLOPs of one training step over num_tokens tokens in all (devices, microbatches), seq_len a sequence.

    remat: as parallel.remat has it; the head's forward is never run again. ValueError for any other. Sources: PaLM,
    appendix B; Korthikanti et al., section 5.
    """
    matmul = matmul_flops_per_token(config)
    attention = attention_flops_per_token(config, seq_len, causal=False)
    model = 3 * (matmul + attention)
    recomputed = recomputed_flops_per_token(config, seq_len, Remat.parse(remat, config.num_layers))
    return StepFlops(
        model=num_tokens * model,
        model_causal=num_tokens * 3 * (matmul + attention_flops_per_token(config, seq_len, causal=True)),
        hardware=num_tokens * (model + recomputed),
    )


def recomputed_flops_per_token(config: ModelConfig, seq_len: int, remat: Remat) -> float:
    """FLOPs per token of what all layers' forward pass computes a second time, attention in full."""
    if remat.keeps_all:
        return 0.0
    layers, mixtures = config.num_layers, num_moe_layers(config)
    query = layers * config.embed_dim * config.num_heads * config.head_dim
    key = layers * config.embed_dim * config.num_kv_heads * config.head_dim
    met = (config.num_experts_per_token + config.num_shared_experts) * config.expert_mlp_dim
    mlp = config.embed_dim * ((layers - mixtures) * config.mlp_dim + mixtures * met)
    weights = {"query": query, "key": key, "value": key, "attention_out": query, "mlp_up": mlp, "mlp_out": mlp}
    if config.mlp == "swiglu":
        weights["mlp_gate"] = mlp
    # A router's logits have no name to be kept by.
    weights["router"] = mixtures * config.embed_dim * config.num_experts
    matmul = 2.0 * sum(size for name, size in weights.items() if name not in remat.saves)
    return matmul + (0 if RESULT in remat.saves else attention_flops_per_token(config, seq_len, causal=False))


def mfu(flops: float, seconds: float, num_devices: int, peak_flops_per_device: float) -> float:
    """The share of the peak that a step reached: its FLOPs / (measured seconds x devices x peak FLOP/s).

    With a step's `model` FLOPs it is PaLM's model FLOPs utilization (arXiv 2204.02311, appendix B), with
    `hardware` the hardware FLOPs utilization (arXiv 2205.05198).
    """
    return flops / (seconds * num_devices * peak_flops_per_device)
