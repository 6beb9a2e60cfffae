"""What a model is: one frozen description, from which shapes, parameter counts and FLOPs all follow."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from jaxpar import toml


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder-only Transformer. Sizes are the true ones; padding for a mesh is the layout's business."""

    name: str = "tiny"
    vocab_size: int = 256
    embed_dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    """Heads of K and V; num_heads for multi-head, 1 for multi-query attention."""
    head_dim: int = 16
    """Its own field, never derived: Qwen3's is not embed_dim / num_heads."""
    mlp_dim: int = 256
    max_seq_len: int = 2048
    """The context that the model was made for; with learned positions the table's length."""

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """swiglu: down(silu(gate(x)) * up(x)); gelu: down(gelu(up(x))), GPT-2's tanh form."""
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling_factor: float = 1.0
    """Llama 3.1's frequency scaling; 1 leaves the frequencies alone."""
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_seq_len: int = 8192

    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of q and k, before RoPE: of each head over head_dim (Qwen3), or as `qk_norm_over` says."""
    qk_norm_over: Literal["head", "heads"] = "head"
    """heads: over all of a token's heads together (OLMoE)."""
    tie_embeddings: bool = False
    sliding_window: int | None = None
    """Each token attends to this many tokens, itself included; None for all before it."""
    init_std: float = 0.02

    num_experts: int = 0
    """Of each mixture-of-experts layer; 0: every layer's MLP is dense."""
    num_experts_per_token: int = 2
    """Routed ones, shared experts not counted."""
    expert_mlp_dim: int = 128
    """Width of one expert."""
    num_shared_experts: int = 0
    """Experts that every token goes through (DeepSeekMoE, arXiv 2401.06066): one MLP of so many times the width."""
    num_dense_layers: int = 0
    """The first so many layers have a dense MLP of `mlp_dim`."""
    moe_every: int = 1
    """Of the layers after those, every so many-th is a mixture, the last of each group; the others are dense."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Of a token's logits over all experts; the weights of the chosen ones are their scores."""
    normalize_expert_weights: bool = True
    """Scale the chosen ones' weights to a sum of 1."""
    routed_scaling_factor: float = 1.0
    """Times what the routed experts give."""
    num_expert_groups: int = 1
    """Experts in so many equal groups, of which a token's are taken from `num_groups_per_token`: those whose two best
    scores have the largest sum (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    num_groups_per_token: int = 1
    balancing: Literal["loss", "bias", "none"] = "loss"
    """loss: an auxiliary loss (Switch, arXiv 2101.03961, section 2.2); bias: added to the scores for the choice alone,
    and after each step moved by `bias_update_rate` towards equal loads (arXiv 2408.15664)."""
    balancing_loss_weight: float = 0.01
    balancing_over: Literal["sequence", "batch"] = "sequence"
    """What loads are taken over; those of a microbatch change with its size."""
    bias_update_rate: float = 0.001
    router_z_loss_weight: float = 0.0
    """Times the square of the router logits' log-sum-exp (ST-MoE, arXiv 2202.08906, section 3.2)."""
    router_jitter: float = 0.0
    """In training a router's input is multiplied by noise from 1 - this to 1 + this (Switch, section 2.4)."""

    def check(self) -> "ModelConfig":
        """Itself. Raises ValueError, in one line, for sizes that make no model."""
        sizes = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
        for field in (*sizes, "max_seq_len", "rope_original_seq_len", "rope_scaling_factor"):
            toml.check_range(f"model.{field}", getattr(self, field), 1)
        for field in ("norm_eps", "init_std", "rope_theta", "rope_low_freq_factor", "rope_high_freq_factor"):
            toml.check_range(f"model.{field}", getattr(self, field), 0)
        if not self.rope_low_freq_factor < self.rope_high_freq_factor:
            raise ValueError(
                f"model.rope_low_freq_factor {self.rope_low_freq_factor} is not below model.rope_high_freq_factor "
                f"{self.rope_high_freq_factor}; lower it"
            )
        if self.num_heads % self.num_kv_heads:
            fits = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"model.num_heads {self.num_heads} is not a multiple of model.num_kv_heads "
                f"{self.num_kv_heads}; kv heads that divide it: {', '.join(map(str, fits))}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"model.head_dim {self.head_dim} is odd; RoPE rotates pairs, so make it even")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"model.sliding_window is {self.sliding_window}; it must be at least 1 (or leave it out)")
        toml.check_range("model.num_experts", self.num_experts, 0)
        if self.num_experts:
            self._check_experts()
        return self

    def _check_experts(self) -> None:
        for field, least, most in (
            ("num_experts_per_token", 1, self.num_experts),
            ("expert_mlp_dim", 1, None),
            ("num_shared_experts", 0, None),
            ("num_dense_layers", 0, self.num_layers - 1),
            ("moe_every", 1, None),
            ("num_expert_groups", 1, self.num_experts),
            ("num_groups_per_token", 1, self.num_expert_groups),
            ("routed_scaling_factor", 0, None),
            ("balancing_loss_weight", 0, None),
            ("bias_update_rate", 0, None),
            ("router_z_loss_weight", 0, None),
            ("router_jitter", 0, 1),
        ):
            toml.check_range(f"model.{field}", getattr(self, field), least, most)
        after = self.num_layers - self.num_dense_layers
        if after % self.moe_every:
            raise ValueError(
                f"model.num_layers {self.num_layers} less {self.num_dense_layers} dense ones is not a multiple of "
                f"model.moe_every {self.moe_every}; the nearest that is: {self.num_layers - after % self.moe_every}"
            )
        if self.num_experts % self.num_expert_groups:
            raise ValueError(
                f"model.num_experts {self.num_experts} is not a multiple of model.num_expert_groups "
                f"{self.num_expert_groups}; groups are equal"
            )
        in_groups = self.num_experts // self.num_expert_groups * self.num_groups_per_token
        if self.num_experts_per_token > in_groups:
            raise ValueError(
                f"model.num_experts_per_token {self.num_experts_per_token} exceeds the {in_groups} experts of "
                f"model.num_groups_per_token {self.num_groups_per_token}; raise the latter"
            )
        if self.mlp_bias:
            raise ValueError("model.mlp_bias is true; experts have no biases, so leave it out with model.num_experts")

    @property
    def num_units(self) -> int:
        """Equal parts that the layers after the dense ones are stacked of: layers, or groups of `moe_every`."""
        return (self.num_layers - self.num_dense_layers) // self.moe_every if self.num_experts else self.num_layers

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)
