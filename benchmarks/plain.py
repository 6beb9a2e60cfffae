"""What jaxpar's step is held against: the same model as one writes it by hand, over a dict of arrays.

A mesh whose axes are Auto, a NamedSharding on each parameter, constraints on activations: the compiler does the rest.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from models.config import ModelConfig

ROWS = ("data", "fsdp", "expert")


@dataclass(frozen=True)
class Plain:
    """A Llama-like decoder: RMSNorm, RoPE, SwiGLU, no biases, an untied head, every layer recomputed in the
    backward pass. Parameters are nested dicts with jaxpar's names, shapes and shardings; `stream` is how the
    residual stream [B, S, D] is cut between blocks. Raises ValueError for other models."""

    config: ModelConfig
    mesh: Mesh
    stream: P
    dtype: jnp.dtype
    optimizer: optax.GradientTransformation

    def __post_init__(self) -> None:
        c = self.config
        kinds = c.norm, c.mlp, c.positions, c.rope_scaling_factor, c.sliding_window, c.vocab_size % 256
        extras = c.qkv_bias, c.attention_output_bias, c.mlp_bias, c.qk_norm, c.tie_embeddings
        if kinds != ("rmsnorm", "swiglu", "rope", 1.0, None, 0) or any(extras):
            raise ValueError(f"--model {c.name} has parts that the plain model lacks; take one like Llama, as tiny")

    def step(self, params: PyTree, opt_state: PyTree, tokens: Int[Array, "B S"], targets: Int[Array, "B S"]):
        """(params, opt_state, loss) after a step."""
        loss, grads = jax.value_and_grad(self.loss)(params, tokens, targets)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def loss(self, params: PyTree, tokens: Int[Array, "B S"], targets: Int[Array, "B S"]) -> Float[Array, ""]:
        sin, cos = self.rope(tokens.shape[1])
        causal = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))

        def rotate(x):
            first, second = jnp.split(x.astype(sin.dtype), 2, axis=-1)
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

        def attention(x, layer):
            q, k, v = (jnp.einsum("bsd,dhk->bshk", x, layer[name]) for name in ("query", "key", "value"))
            q, k = rotate(q), rotate(k)
            k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
            q, k, v = (self.place(x, P(ROWS, None, "tensor")) for x in (q, k, v))
            scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=sin.dtype) * q.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(v.dtype)
            return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhts,bshk->bthk", weights, v), layer["out"])

        def mlp(x, layer):
            hidden = jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])
            return self.place(hidden, P(ROWS, None, "tensor")) @ layer["down"]

        def block(x, layer):
            layer = jax.tree.map(lambda w: w.astype(self.dtype), layer)
            for part, norm in ((attention, "attention_norm"), (mlp, "mlp_norm")):
                normed = self.place(self.norm(x, layer[norm]), P(ROWS))
                x = self.place(x + part(normed, layer[part.__name__]), self.stream)
            return x, None

        x = self.place(params["embedding"].astype(self.dtype)[tokens], self.stream)
        x, _ = lax.scan(jax.checkpoint(block, prevent_cse=False), x, params["blocks"])
        x = self.place(self.norm(x, params["final_norm"]), P(ROWS))
        logits = self.place(x @ params["head"].astype(self.dtype), P(ROWS, None, "tensor"))
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(sin.dtype), targets).mean()

    def norm(self, x: Float[Array, "B S D"], params: PyTree) -> Float[Array, "B S D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.norm_eps)
        return normed.astype(x.dtype) * params["scale"].astype(x.dtype)

    def rope(self, seq_len: int) -> tuple[Float[Array, "S 1 K/2"], Float[Array, "S 1 K/2"]]:
        wide = jnp.promote_types(self.dtype, jnp.float32)
        exponent = jnp.arange(0, self.config.head_dim, 2, dtype=wide) / self.config.head_dim
        angles = jnp.arange(seq_len, dtype=wide)[:, None, None] * self.config.rope_theta**-exponent
        return jnp.sin(angles), jnp.cos(angles)

    def place(self, x: Array, spec: P) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
