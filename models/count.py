"""How many parameters a model has, by arithmetic from its description: no arrays, no devices."""

from models.config import ModelConfig


def attention_weights(config: ModelConfig) -> int:
    """Weights of one layer's q, k, v and output kernels, biases not counted."""
    return 2 * config.embed_dim * config.head_dim * (config.num_heads + config.num_kv_heads)


def mlp_weights(config: ModelConfig) -> int:
    """Weights of one dense layer's MLP kernels (up, down and, for swiglu, gate), biases not counted."""
    return _kernels(config) * config.embed_dim * config.mlp_dim


def expert_weights(config: ModelConfig) -> int:
    """Weights of one expert's kernels."""
    return _kernels(config) * config.embed_dim * config.expert_mlp_dim


def all_mlp_weights(config: ModelConfig, experts_per_layer: int) -> int:
    """Weights of all layers' MLP kernels, routers and shared experts, with so many routed experts a mixture."""
    mixtures = num_moe_layers(config)
    mixture = config.num_experts * config.embed_dim
    mixture += (experts_per_layer + config.num_shared_experts) * expert_weights(config)
    return (config.num_layers - mixtures) * mlp_weights(config) + mixtures * mixture


def num_moe_layers(config: ModelConfig) -> int:
    """Layers that are mixtures of experts."""
    return config.num_units if config.num_experts else 0


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part, over all layers: embedding, positions, attention, mlp, norms, head.

    Biases count with their part, q's and k's norms with the norms, routers and experts with the MLPs. True sizes,
    without any padding; a tied head is the embedding again, so it counts 0.
    """
    attention = attention_weights(config)
    if config.qkv_bias:
        attention += config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    if config.attention_output_bias:
        attention += config.embed_dim
    mlp = all_mlp_weights(config, config.num_experts)
    if config.mlp_bias:
        mlp += config.num_layers * ((_kernels(config) - 1) * config.mlp_dim + config.embed_dim)
    if config.balancing == "bias":
        mlp += num_moe_layers(config) * config.num_experts
    norm = config.embed_dim * (2 if config.norm == "layernorm" else 1)
    layer_norms = 2 * norm
    if config.qk_norm:
        heads = config.num_heads + config.num_kv_heads if config.qk_norm_over == "heads" else 2
        layer_norms += heads * config.head_dim
    embedding = config.vocab_size * config.embed_dim
    return {
        "embedding": embedding,
        "positions": config.max_seq_len * config.embed_dim if config.positions == "learned" else 0,
        "attention": config.num_layers * attention,
        "mlp": mlp,
        "norms": config.num_layers * layer_norms + norm,
        "head": 0 if config.tie_embeddings else embedding,
    }


def num_parameters(config: ModelConfig) -> int:
    """All parameters of the model, tied ones once."""
    return sum(parameter_counts(config).values())


def num_active_parameters(config: ModelConfig) -> int:
    """Those that one token meets: all but the experts that it is not sent to."""
    idle = config.num_experts - config.num_experts_per_token if config.num_experts else 0
    return num_parameters(config) - num_moe_layers(config) * idle * expert_weights(config)


def _kernels(config: ModelConfig) -> int:
    """Of an MLP: up, down and for swiglu gate."""
    return 3 if config.mlp == "swiglu" else 2
