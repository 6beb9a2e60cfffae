"""Sizes of any published Transformer, for counting alone: what can be planned reaches further than what can be trained.

A `Shape` has every size that parameters and FLOPs depend on, also of models whose layers this package does not build
(latent attention, ALiBi, parallel blocks): kernels by their dims, everything small in two numbers of extras.
"""

from dataclasses import dataclass

from models.config import ModelConfig
from models.count import all_mlp_weights, attention_weights, parameter_counts


@dataclass(frozen=True)
class Shape:
    """A decoder by its sizes. MLPs are two kernels, or three where gated."""

    name: str
    num_layers: int
    embed_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    num_kv_heads: int | None = None
    """As many as heads if None."""
    gated: bool = True
    tied: bool = False
    norm: int = 1
    """Values of a norm per dim: 1 for RMSNorm, 2 with LayerNorm's bias, 0 for a norm without parameters."""
    norms_per_layer: int = 2
    biases: bool = False
    """On every kernel of the layers."""
    qkv_bias: bool = False
    layer_extras: int = 0
    """Other parameters of one layer, such as norms of q and k."""
    extras: int = 0
    """Other parameters outside of the layers, such as learned positions."""
    attention_kernels: int | None = None
    """Weights of one layer's attention where they are not those of q, k, v and output heads."""
    attention_dims: int | None = None
    """Of one head: of the products q k and scores v together; 2 head_dim if None."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_dim: int = 0
    num_shared_experts: float = 0
    """In widths of expert_dim."""
    num_dense_layers: int = 0
    moe_every: int = 1
    """Of the layers after the dense ones each moe_every-th has experts."""
    expert_biases: bool = False
    non_embedding: bool = False
    """Published by its parameters without the embedding and the head."""

    @classmethod
    def of(cls, config: ModelConfig) -> "Shape":
        """That of a model that can be trained."""
        counts, layers = parameter_counts(config), config.num_layers
        kernels = all_mlp_weights(config, config.num_experts)
        # What its parts have beside kernels: biases, norms of q and k, routers' biases.
        norm = config.embed_dim * (2 if config.norm == "layernorm" else 1)
        small = counts["attention"] - layers * attention_weights(config) + counts["mlp"] - kernels
        small += counts["norms"] - (2 * layers + 1) * norm
        return cls(
            config.name,
            layers,
            config.embed_dim,
            config.num_heads,
            config.head_dim,
            config.mlp_dim,
            config.vocab_size,
            config.num_kv_heads,
            gated=config.mlp == "swiglu",
            tied=config.tie_embeddings,
            norm=2 if config.norm == "layernorm" else 1,
            layer_extras=small // layers,
            extras=counts["positions"] + small % layers,
            num_experts=config.num_experts,
            num_experts_per_token=config.num_experts_per_token if config.num_experts else 0,
            expert_dim=config.expert_mlp_dim if config.num_experts else 0,
            num_shared_experts=config.num_shared_experts,
            num_dense_layers=config.num_dense_layers,
            moe_every=config.moe_every,
        )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def num_moe_layers(self) -> int:
        return (self.num_layers - self.num_dense_layers) // self.moe_every if self.num_experts else 0

    @property
    def attention_weights(self) -> int:
        """Of one layer."""
        if self.attention_kernels is not None:
            return self.attention_kernels
        return 2 * self.embed_dim * self.head_dim * (self.num_heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return (3 if self.gated else 2) * self.embed_dim * self.expert_dim

    @property
    def mlp_weights(self) -> int:
        """Of one dense layer."""
        return (3 if self.gated else 2) * self.embed_dim * self.mlp_dim

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.embed_dim

    def layers_weights(self, experts: int) -> int:
        """Kernels of all layers, with so many routed experts in each that has any, and its router."""
        moe = experts * self.expert_weights + int(self.num_shared_experts * self.expert_weights)
        moe += self.num_experts * self.embed_dim
        dense = self.num_layers - self.num_moe_layers
        return self.num_layers * self.attention_weights + dense * self.mlp_weights + self.num_moe_layers * moe

    @property
    def small_parameters(self) -> int:
        """Norms, biases and extras."""
        per_layer = self.norms_per_layer * self.norm * self.embed_dim + self.layer_extras
        qkv = self.head_dim * (self.num_heads + 2 * self.kv_heads)
        if self.biases:
            mlp = (2 if self.gated else 1) * self.mlp_dim + self.embed_dim
            per_layer += qkv + self.embed_dim + mlp
        elif self.qkv_bias:
            per_layer += qkv
        experts = self.num_experts * (2 * self.expert_dim + self.embed_dim + 1) if self.expert_biases else 0
        return self.num_layers * per_layer + self.num_moe_layers * experts + self.norm * self.embed_dim + self.extras

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.non_embedding_parameters + self.embedding * (1 if self.tied else 2)

    @property
    def non_embedding_parameters(self) -> int:
        """Without the embedding and the head."""
        return self.layers_weights(self.num_experts) + self.small_parameters

    @property
    def active_parameters(self) -> int:
        """All but the routed experts that a token does not visit."""
        unused = (self.num_experts - self.num_experts_per_token) * self.expert_weights * self.num_moe_layers
        return self.parameters - unused

    @property
    def matmul_parameters(self) -> int:
        """Those that multiply a token: kernels of the layers, of the experts it visits, and the head."""
        return self.layers_weights(self.num_experts_per_token) + self.embedding

    def attention_flops_per_token(self, seq_len: int, causal: bool) -> float:
        """Forward, as in planning.flops."""
        dims = 2 * self.head_dim if self.attention_dims is None else self.attention_dims
        return 2.0 * self.num_layers * self.num_heads * dims * seq_len / (2 if causal else 1)
