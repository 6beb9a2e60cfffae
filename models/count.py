"""How many parameters a model has, by arithmetic from its description: no arrays, no devices."""

from models.config import ModelConfig


def attention_weights(config: ModelConfig) -> int:
    """Weights of one layer's q, k, v and output kernels, biases not counted."""
    return 2 * config.embed_dim * config.head_dim * (config.num_heads + config.num_kv_heads)


def mlp_weights(config: ModelConfig) -> int:
    """Weights of one layer's MLP kernels (up, down and, for swiglu, gate), biases not counted."""
    return (_num_inputs(config) + 1) * config.embed_dim * config.mlp_dim


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part, over all layers: embedding, positions, attention, mlp, norms, head.

    Biases count with their part, q's and k's norms with the norms. True sizes, without any padding; a tied
    head is the embedding again, so it counts 0.
    """
    attention = attention_weights(config)
    if config.qkv_bias:
        attention += config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    if config.attention_output_bias:
        attention += config.embed_dim
    mlp = mlp_weights(config)
    if config.mlp_bias:
        mlp += _num_inputs(config) * config.mlp_dim + config.embed_dim
    norm = config.embed_dim * (2 if config.norm == "layernorm" else 1)
    layer_norms = 2 * norm + (2 * config.head_dim if config.qk_norm else 0)
    embedding = config.vocab_size * config.embed_dim
    return {
        "embedding": embedding,
        "positions": config.max_seq_len * config.embed_dim if config.positions == "learned" else 0,
        "attention": config.num_layers * attention,
        "mlp": config.num_layers * mlp,
        "norms": config.num_layers * layer_norms + norm,
        "head": 0 if config.tie_embeddings else embedding,
    }


def num_parameters(config: ModelConfig) -> int:
    """All parameters of the model, tied ones once."""
    return sum(parameter_counts(config).values())


def _num_inputs(config: ModelConfig) -> int:
    """Kernels that go from the residual stream into the MLP: up, and for swiglu gate too."""
    return 2 if config.mlp == "swiglu" else 1
