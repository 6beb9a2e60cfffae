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
    """RMSNorm over head_dim of q and k, before RoPE (Qwen3)."""
    tie_embeddings: bool = False
    num_experts: int = 0
    """Of a mixture-of-experts layer; 0 for a dense model."""
    num_experts_per_token: int = 0
    expert_mlp_dim: int = 0
    num_shared_experts: int = 0
    moe_every: int = 1
    """Of the layers after the dense ones each moe_every-th has experts."""
    num_dense_layers: int = 0
    sliding_window: int | None = None
    """Each token attends to this many tokens, itself included; None for all before it."""
    init_std: float = 0.02

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

        return self

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)
