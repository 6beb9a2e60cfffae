"""The blocks that a Transformer is stacked of."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.kernels.attention import Cache
from jaxpar.kernels.mask import Tokens
from jaxpar.parallel.batch import Routing
from jaxpar.parallel.layout import Layout
from models.config import ModelConfig
from models.layers import RESIDUAL, Attention, KeysValues, Mlp, Norm, Rope
from models.moe import Moe


class Block(nnx.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)), the MLP dense or a mixture of experts. Beside x it gives
    what a layer tells of itself, by name, and x's keys and values, which in a cache stand for x when later tokens
    come."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype, is_mixture: bool):
        self.is_mixture = is_mixture
        self.attention_norm = Norm(config, config.embed_dim, RESIDUAL, rngs, dtype)
        self.attention = Attention(config, rngs, dtype)
        self.mlp_norm = Norm(config, config.embed_dim, RESIDUAL, rngs, dtype)
        self.mlp = Moe(config, rngs, dtype) if is_mixture else Mlp(config, rngs, dtype)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        rope: Rope | None,
        tokens: Tokens,
        routing: Routing | None,
        layout: Layout,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B S D"], dict[str, Array], KeysValues]:
        x = layout.named("block_input", x)
        attended, made = self.attention(self.attention_norm(x, layout), rope, tokens, layout, cache)
        x = x + attended
        normed = self.mlp_norm(x, layout)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp(normed, layout), {}, made
        out, told = self.mlp(normed, routing, layout)
        return x + out, told, made


class Unit(nnx.Module):
    """What the scanned stack repeats, where that is not one block: dense blocks, then a mixture."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.dense = nnx.List([Block(config, rngs, dtype, is_mixture=False) for _ in range(config.moe_every - 1)])
        self.mixture = Block(config, rngs, dtype, is_mixture=True)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        rope: Rope | None,
        tokens: Tokens,
        routing: Routing | None,
        layout: Layout,
        cache: None = None,
    ) -> tuple[Float[Array, "B S D"], dict[str, Array], tuple[KeysValues, ...]]:
        assert cache is None, "a unit's blocks have a cache each"
        made = []
        for block in self.dense:
            x, _, keys_values = block(x, rope, tokens, routing, layout)
            made.append(keys_values)
        x, told, keys_values = self.mixture(x, rope, tokens, routing, layout)
        return x, told, (*made, keys_values)
