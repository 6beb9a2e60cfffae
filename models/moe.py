"""A mixture of experts in the place of an MLP: a router that sends each token to k of E, and shared experts.

The router is whole on every rank, and its product, scores and losses are in at least float32. Of Mixtral (arXiv
2401.04088), OLMoE (2409.02060), Qwen3 (2505.09388), Switch (2101.03961: k = 1) and DeepSeek-V3 (2412.19437: sigmoid
scores, groups, balancing by a bias, shared experts).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.noise import mixed
from jaxpar.parallel.batch import Routing
from jaxpar.parallel.layout import Layout
from models.config import ModelConfig
from models.layers import Mlp, activation
from models.parameters import constant, declare, normal


class Moe(nnx.Module):
    """Beside its output it tells, of its tokens: `auxiliary_loss` (in training), `tokens_per_expert` [E], `dropped`
    pairs of token and expert, `router_entropy` in nats: sums."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        num_experts, embed, hidden = config.num_experts, config.embed_dim, config.expert_mlp_dim
        # Its gradient is an addend over `tensor` as well, whose ranks each have a part of the experts' width.
        over = "batch", "seq", "mlp"
        self.router = declare(rngs, (embed, num_experts), ("vector", "vector"), normal(config.init_std), dtype, over)
        if config.balancing == "bias":
            self.bias = declare(rngs, (num_experts,), ("vector",), constant(0.0), dtype, over)
        into, names = (num_experts, embed, hidden), ("experts", "embed", "mlp")
        if config.mlp == "swiglu":
            self.gate = declare(rngs, into, names, normal(config.init_std), dtype)
        self.up = declare(rngs, into, names, normal(config.init_std), dtype)
        self.down = declare(
            rngs,
            (num_experts, hidden, embed),
            ("experts", "mlp", "embed"),
            normal(config.init_std / (2 * config.num_layers) ** 0.5),
            dtype,
        )
        if config.num_shared_experts:
            self.shared = Mlp(config, rngs, dtype, config.num_shared_experts * hidden)

    def __call__(
        self, x: Float[Array, "B S D"], routing: Routing | None, layout: Layout
    ) -> tuple[Float[Array, "B S D"], dict[str, Array]]:
        entered = layout.enter_tensor(x)
        logits = layout.route(self._jittered(entered, routing), self.router)
        weights, ids = self._choose(logits)

        def ffn(rows: Float[Array, "... D"], multiply) -> Float[Array, "... D"]:
            def into(name: str) -> Float[Array, "... F"]:
                return layout.named("mlp_" + name, multiply(rows, getattr(self, name)))

            return multiply(activation(self.config, into), self.down)

        out, dropped = layout.experts(entered, weights, ids, self.config.num_experts, ffn)
        if self.config.num_shared_experts:
            out = out + self.shared.addend(entered, layout)
        return layout.leave_tensor(out), self._told(layout.once(logits), ids, dropped, routing, layout)

    def _jittered(self, x: Float[Array, "B S D"], routing: Routing | None) -> Float[Array, "B S D"]:
        """The same noise in every layer: a token's own, by channel."""
        if routing is None or routing.seeds is None:
            return x
        channel = jnp.arange(x.shape[-1], dtype=jnp.uint32)[None, None]
        uniform = mixed(routing.seeds[..., None] + mixed(channel)).astype(jnp.float32) * 2.0**-32
        return x * (1 + self.config.router_jitter * (2 * uniform - 1)).astype(x.dtype)

    def _scores(self, logits: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        return jax.nn.softmax(logits) if self.config.router_score == "softmax" else jax.nn.sigmoid(logits)

    def _choose(self, logits: Float[Array, "B S E"]) -> tuple[Float[Array, "B S k"], Int[Array, "B S k"]]:
        """(weights, experts) of each token."""
        config = self.config
        scores = self._scores(logits)
        choice = lax.stop_gradient(scores)
        if config.balancing == "bias":
            choice = choice + lax.stop_gradient(self.bias[...]).astype(choice.dtype)[None, None]
        if config.num_expert_groups > 1:
            choice = _within_groups(choice, config.num_expert_groups, config.num_groups_per_token)
        ids = lax.top_k(choice, config.num_experts_per_token)[1]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if config.normalize_expert_weights:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * config.routed_scaling_factor, ids

    def _told(
        self,
        logits: Float[Array, "B S E"],
        ids: Int[Array, "B S k"],
        dropped: Int[Array, ""],
        routing: Routing | None,
        layout: Layout,
    ) -> dict[str, Array]:
        config, dtype = self.config, logits.dtype
        row = jnp.arange(ids.shape[0], dtype=ids.dtype)[:, None, None]
        counts = jnp.zeros((ids.shape[0], config.num_experts), dtype).at[row, ids].add(1)
        scores = self._scores(logits)
        probabilities = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
        told = {
            "tokens_per_expert": jnp.sum(counts, axis=0),
            "dropped": dropped.astype(dtype),
            "router_entropy": lax.stop_gradient(jnp.sum(jax.scipy.special.entr(probabilities))),
        }
        if routing is None:
            return told
        per_token = jnp.zeros(logits.shape[:2], dtype)
        if config.balancing == "loss":
            loads = layout.loads(counts, config.balancing_over)
            share = loads / jnp.sum(loads, axis=-1, keepdims=True)
            balance = config.num_experts * jnp.einsum("bse,be->bs", probabilities, share)
            per_token += config.balancing_loss_weight * balance
        if config.router_z_loss_weight:
            per_token += config.router_z_loss_weight * jax.nn.logsumexp(logits, axis=-1) ** 2
        return told | {"auxiliary_loss": jnp.sum(per_token * routing.shares.astype(dtype))}


def figures(config: ModelConfig, told: dict[str, Array]) -> dict[str, Float[Array, ""]]:
    """Of what the layers told of a step; nothing for dense models.

    aux_loss: what is minimised beside the cross-entropy, all layers' sum. moe_dropped_fraction: of pairs of token and
    expert. moe_max_load: tokens of the fullest expert by the mean, in the layer where that is most. router_entropy:
    nats per token, the layers' mean.
    """
    if not config.num_experts:
        return {}
    loads = told["tokens_per_expert"]
    pairs = jnp.sum(loads)
    return {
        "aux_loss": jnp.sum(told["auxiliary_loss"]),
        "moe_dropped_fraction": jnp.sum(told["dropped"]) / pairs,
        "moe_max_load": jnp.max(jnp.max(loads, axis=-1) / jnp.mean(loads, axis=-1)),
        "router_entropy": jnp.sum(told["router_entropy"]) * config.num_experts_per_token / pairs,
    }


def _within_groups(choice: Float[Array, "B S E"], num_groups: int, per_token: int) -> Float[Array, "B S E"]:
    """With -inf for the experts of all but each token's best groups."""
    grouped = choice.reshape(*choice.shape[:2], num_groups, -1)
    best = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
    chosen = lax.top_k(best, per_token)[1]
    is_chosen = jnp.any(jax.nn.one_hot(chosen, num_groups, dtype=bool), axis=-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(choice.shape)
