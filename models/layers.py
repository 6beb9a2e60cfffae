"""The parts of a Transformer block. Each is written once, as if for one device; `Layout` says where it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.kernels.attention import Cache
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.numerics import widened
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.parameter import Parameter, Part
from models.config import ModelConfig
from models.parameters import constant, declare, normal

RESIDUAL = ("batch", "residual_seq")
KeysValues = tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]


class Norm(nnx.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last dim, computed in at least float32."""

    def __init__(
        self,
        config: ModelConfig,
        dim: int,
        summed_over: tuple[str | tuple[str, int], ...],
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        kind: str | None = None,
    ):
        self.kind = kind or config.norm
        self.eps = config.norm_eps
        self.scale = declare(rngs, (dim,), ("vector",), constant(1.0), dtype, summed_over)
        if self.kind == "layernorm":
            self.bias = declare(rngs, (dim,), ("vector",), constant(0.0), dtype, summed_over)

    def __call__(self, x: Float[Array, "B S ... D"], layout: Layout) -> Float[Array, "B S ... D"]:
        wide = x.astype(widened(x.dtype))
        if self.kind == "layernorm":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        out = layout.scale(normed.astype(x.dtype), self.scale)
        return layout.shift(out, self.bias) if self.kind == "layernorm" else out


class HeadsNorm(nnx.Module):
    """RMSNorm over all heads of a token together (OLMoE, arXiv 2409.02060), in at least float32."""

    def __init__(self, config: ModelConfig, num_heads: int, heads: str, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.num_heads, self.eps = num_heads, config.norm_eps
        self.scale = declare(rngs, (num_heads, config.head_dim), (heads, "head_dim"), constant(1.0), dtype)

    def __call__(self, x: Float[Array, "B S H K"], layout: Layout) -> Float[Array, "B S H K"]:
        wide = x.astype(widened(x.dtype))
        total = layout.sum_over_heads(jnp.sum(wide * wide, axis=(-2, -1), keepdims=True), self.num_heads)
        normed = wide * jax.lax.rsqrt(total / (self.num_heads * x.shape[-1]) + self.eps)
        return layout.scale(normed.astype(x.dtype), self.scale)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864), pairs (i, i + K/2) as in Llama's published weights."""

    sin: Float[Array, "B S K/2"]
    cos: Float[Array, "B S K/2"]

    @classmethod
    def at(cls, config: ModelConfig, positions: Int[Array, "B S"], dtype: jnp.dtype) -> "Rope":
        """Angles computed in at least float32, kept in it."""
        wide = widened(dtype)
        angles = positions[:, :, None].astype(wide) * rope_frequencies(config, wide)[None, None, :]
        return cls(jnp.sin(angles), jnp.cos(angles))

    def __call__(self, x: Float[Array, "B S H K"]) -> Float[Array, "B S H K"]:
        sin, cos = self.sin[:, :, None, :], self.cos[:, :, None, :]
        first, second = jnp.split(x.astype(sin.dtype), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rope_frequencies(config: ModelConfig, dtype: jnp.dtype) -> Float[Array, " K/2"]:
    """theta^(-2i/K), and for Llama 3.1 slowed down by `rope_scaling_factor` where the wavelength exceeds the original
    context / low_freq_factor, left alone below context / high_freq_factor, interpolated between."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim
    frequencies = 1.0 / jnp.asarray(config.rope_theta, dtype) ** exponent
    if config.rope_scaling_factor == 1.0:
        return frequencies
    turns = config.rope_original_seq_len * frequencies / (2 * jnp.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / config.rope_scaling_factor)


class Attention(nnx.Module):
    """Grouped-query self-attention (arXiv 2305.13245), with q/k norm and biases where the config has them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        embed, head_dim = config.embed_dim, config.head_dim
        std = config.init_std

        def into(heads: int, name: str) -> nnx.Param:
            return declare(rngs, (embed, heads, head_dim), ("embed", name, "head_dim"), normal(std), dtype)

        self.query = into(config.num_heads, "heads")
        self.key = into(config.num_kv_heads, "kv_heads")
        self.value = into(config.num_kv_heads, "kv_heads")
        self.out = declare(
            rngs,
            (config.num_heads, head_dim, embed),
            ("heads", "head_dim", "embed"),
            normal(std / (2 * config.num_layers) ** 0.5),
            dtype,
        )
        if config.qkv_bias:
            self.query_bias = declare(rngs, (config.num_heads, head_dim), ("heads", "head_dim"), constant(0.0), dtype)
            self.key_bias, self.value_bias = (
                declare(rngs, (config.num_kv_heads, head_dim), ("kv_heads", "head_dim"), constant(0.0), dtype)
                for _ in range(2)
            )
        self.query_norm: HeadsNorm | Norm
        self.key_norm: HeadsNorm | Norm
        if config.qk_norm and config.qk_norm_over == "heads":
            self.query_norm = HeadsNorm(config, config.num_heads, "heads", rngs, dtype)
            self.key_norm = HeadsNorm(config, config.num_kv_heads, "kv_heads", rngs, dtype)
        elif config.qk_norm:
            self.query_norm = Norm(config, head_dim, ("batch", "seq", "heads"), rngs, dtype, "rmsnorm")
            over_keys = "batch", "seq", ("kv_heads", config.num_kv_heads)
            self.key_norm = Norm(config, head_dim, over_keys, rngs, dtype, "rmsnorm")
        if config.attention_output_bias:
            self.out_bias = declare(rngs, (embed,), ("vector",), constant(0.0), dtype, RESIDUAL)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        rope: Rope | None,
        tokens: Tokens,
        layout: Layout,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B S D"], KeysValues]:
        """(attention of x to itself and to what is in the cache, the keys and values of x)"""
        config = self.config
        x = layout.enter_tensor(x)

        def into(name: str) -> Float[Array, "B S _ K"]:
            return layout.named(name, layout.project("bsd,dhk->bshk", x, getattr(self, name)))

        q, k, v = into("query"), into("key"), into("value")
        if config.qkv_bias:
            q = layout.shift(q, self.query_bias)
            k, v = layout.shift(k, self.key_bias), layout.shift(v, self.value_bias)
        if config.qk_norm:
            q, k = self.query_norm(q, layout), self.key_norm(k, layout)
        if rope is not None:
            q, k = rope(q), rope(k)
        mask = AttentionMask(causal=True, window=config.sliding_window)
        attended = layout.attention(q, k, v, tokens, mask, config.head_dim**-0.5, config.num_kv_heads, cache)
        out = layout.exit_tensor("bshk,hkd->bsd", attended, self.out)
        out = layout.named("attention_out", out)
        return layout.shift(out, self.out_bias) if config.attention_output_bias else out, (k, v)


def activation(config: ModelConfig, into: Callable[[str], Float[Array, "... F"]]) -> Float[Array, "... F"]:
    """The hidden layer of an MLP, of what into("gate") and into("up") give."""
    if config.mlp == "swiglu":
        return jax.nn.silu(into("gate")) * into("up")
    return jax.nn.gelu(into("up"), approximate=True)


class Mlp(nnx.Module):
    """SwiGLU (arXiv 2002.05202) or GPT-2's GELU feed-forward; `width` is the config's mlp_dim where it is not given."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype, width: int | None = None):
        self.config = config
        embed, hidden, std = config.embed_dim, width or config.mlp_dim, config.init_std
        self.width = hidden
        if config.mlp == "swiglu":
            self.gate = declare(rngs, (embed, hidden), ("embed", "mlp"), normal(std), dtype)
        self.up = declare(rngs, (embed, hidden), ("embed", "mlp"), normal(std), dtype)
        self.down = declare(
            rngs, (hidden, embed), ("mlp", "embed"), normal(std / (2 * config.num_layers) ** 0.5), dtype
        )
        if config.mlp_bias:
            if config.mlp == "swiglu":
                self.gate_bias = declare(rngs, (hidden,), ("mlp",), constant(0.0), dtype)
            self.up_bias = declare(rngs, (hidden,), ("mlp",), constant(0.0), dtype)
            self.down_bias = declare(rngs, (embed,), ("vector",), constant(0.0), dtype, RESIDUAL)

    def __call__(self, x: Float[Array, "B S D"], layout: Layout) -> Float[Array, "B S D"]:
        out = layout.leave_tensor(self.addend(layout.enter_tensor(x), layout))
        out = layout.named("mlp_out", out)
        return layout.shift(out, self.down_bias) if self.config.mlp_bias else out

    def addend(self, x: Float[Array, "B S D"], layout: Layout) -> Float[Array, "B S D"]:
        """Of what has entered `tensor`, this rank's addend of the output, without the last bias."""
        num_parts = layout.hidden_parts(self.width)
        if num_parts == 1:
            return self._through({name: getattr(self, name) for name in self._names}, x, layout)
        out = jnp.zeros_like(x)
        for index in range(num_parts):
            weights: dict[str, Parameter] = {
                name: Part.of(getattr(self, name), "mlp", index, num_parts) for name in self._names
            }
            # In the backward pass the last part comes first, and is done with before the one before it begins.
            x, out, weights = layout.made((x, out, weights))
            out = out + self._through(weights, x, layout)
        return out

    @property
    def _names(self) -> list[str]:
        """Of the parameters that the hidden layer's width is a dim of."""
        into = ["gate", "up"] if self.config.mlp == "swiglu" else ["up"]
        return [*into, "down", *(name + "_bias" for name in into if self.config.mlp_bias)]

    def _through(self, weights: Mapping[str, Parameter], x: Float[Array, "B S D"], layout: Layout):
        def into(name: str) -> Float[Array, "B S F"]:
            hidden = layout.named("mlp_" + name, layout.project("bsd,df->bsf", x, weights[name]))
            return layout.shift(hidden, weights[name + "_bias"]) if self.config.mlp_bias else hidden

        return layout.multiply("bsf,fd->bsd", activation(self.config, into), weights["down"])
