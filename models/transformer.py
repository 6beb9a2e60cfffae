"""The decoder: embedding, a stack of equal blocks, head. Single-device Flax but for its `Layout`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.numerics import widened
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.vocab import Objective
from models.block import Block, Unit
from models.config import ModelConfig
from models.layers import RESIDUAL, Norm, Rope
from models.parameters import Initializer, declare, normal

Told = dict[str, Array]
"""What layers tell of themselves beside their output, by name, with a leading layers dim: sums over the tokens.
`auxiliary_loss` is minimised too."""


class Reported(NamedTuple):
    """Beside what is minimised."""

    loss: Float[Array, ""]
    """The cross-entropy alone, sum(loss_weights * cross-entropy)."""
    told: Told


def auxiliary_loss(told: Told, dtype: jnp.dtype) -> Float[Array, ""]:
    """What layers add to what is minimised."""
    return jnp.sum(told["auxiliary_loss"]).astype(dtype) if "auxiliary_loss" in told else jnp.zeros((), dtype)


def _repeated(config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> Block | Unit:
    """What the stack repeats."""
    if config.num_experts and config.moe_every > 1:
        return Unit(config, rngs, dtype)
    return Block(config, rngs, dtype, is_mixture=config.num_experts > 0)


def balanced(config: ModelConfig, params: PyTree, told: Told) -> PyTree:
    """Parameters with the routers' biases moved towards equal loads, by what the layers told of a step (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2)."""
    if not (config.num_experts and config.balancing == "bias"):
        return params
    loads = told["tokens_per_expert"]
    missing = jnp.sign(jnp.mean(loads, axis=-1, keepdims=True) - loads)

    def moved(path: tuple, leaf: Array) -> Array:
        is_bias = jax.tree_util.keystr(path, simple=True, separator=".").endswith("mlp.bias")
        return leaf + (config.bias_update_rate * missing).astype(leaf.dtype) if is_bias else leaf

    return {**params, "blocks": jax.tree_util.tree_map_with_path(moved, params["blocks"])}


def _rows_then_zeros(init: Initializer, num_rows: int, dim: int) -> Initializer:
    """Draws the true size, whatever the padding, so that every mesh starts from the same numbers."""

    def padded(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        true = (*shape[:dim], num_rows, *shape[dim + 1 :])
        pad = [(0, shape[d] - true[d]) for d in range(len(shape))]
        return jnp.pad(init(key, true, dtype), pad)

    return padded


class Transformer(nnx.Module):
    """A decoder-only language model; `padded_vocab` is the layout's, the config's vocab_size the true one;
    `layer_order` says which layer stands where in the stack."""

    def __init__(
        self,
        config: ModelConfig,
        padded_vocab: int,
        layer_order: Int[np.ndarray, " L"],
        key: jax.Array,
        dtype: jnp.dtype,
    ):
        self.config = config.check()
        rngs = nnx.Rngs(params=key)
        init = normal(config.init_std)
        self.embedding = declare(
            rngs,
            (padded_vocab, config.embed_dim),
            ("vocab", "embed"),
            _rows_then_zeros(init, config.vocab_size, 0),
            dtype,
        )
        if config.positions == "learned":
            self.position_embedding = declare(
                rngs, (config.max_seq_len, config.embed_dim), ("position", "embed"), init, dtype, RESIDUAL
            )
        self.final_norm = Norm(config, config.embed_dim, RESIDUAL, rngs, dtype)
        if not config.tie_embeddings:
            self.head = declare(
                rngs,
                (config.embed_dim, padded_vocab),
                ("embed", "vocab"),
                _rows_then_zeros(init, config.vocab_size, 1),
                dtype,
            )
        self.first_blocks = nnx.List(
            [
                Block(config, nnx.Rngs(params=rngs.params()), dtype, is_mixture=False)
                for _ in range(config.num_dense_layers if config.num_experts else 0)
            ]
        )
        # A layer's key is folded from its global index: it does not depend on how many layers there are, or where.
        layer_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rngs.params(), jnp.asarray(layer_order))
        self.blocks = nnx.vmap(lambda key: _repeated(config, nnx.Rngs(params=key), dtype))(layer_keys)

    def embed(self, batch: Batch, layout: Layout) -> Float[Array, "B S D"]:
        """The input of the stacked blocks, in the residual stream."""
        x = layout.lookup(self.embedding, batch.tokens)
        if self._has_learned_positions:
            x = x + layout.lookup(self.position_embedding, batch.positions)
        for block in self.first_blocks:
            x = self._run(block, nnx.state(block), layout.layer, x, batch, layout)[0]
        return x

    def stack(
        self, blocks: PyTree, x: Float[Array, "B S D"], batch: Batch, layout: Layout
    ) -> tuple[Float[Array, "B S D"], Told]:
        """Through some of the blocks, which are given as their parameters, stacked."""
        return self._run(self.blocks, blocks, layout.layers, x, batch, layout)

    def _run(
        self, block: nnx.Module, params: PyTree, run: Callable, x: Float[Array, "B S D"], batch: Batch, layout: Layout
    ) -> tuple[Float[Array, "B S D"], Told]:
        rope = None if self._has_learned_positions else Rope.at(self.config, batch.positions, x.dtype)
        tokens = layout.sequence(batch)
        graph = nnx.graphdef(block)
        return run(lambda params, x: nnx.merge(graph, params)(x, rope, tokens, batch.routing, layout), params, x)

    def head_loss(
        self, x: Float[Array, "B S D"], batch: Batch, layout: Layout, objective: Objective
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """(sum(loss_weights * objective), sum(loss_weights * cross-entropy)) of the last block's output: the caller has
        divided the weights by the step's count of tokens."""
        return layout.cross_entropy(
            self.final_norm(x, layout),
            self._head(layout),
            batch.targets,
            batch.loss_weights,
            self.config.vocab_size,
            objective,
        )

    def hidden(self, batch: Batch, layout: Layout) -> tuple[Float[Array, "B S D"], Told]:
        """The output of the last block, and what all of them told."""
        return layout.through_stages(
            lambda blocks, x: self.stack(blocks, x, batch, layout), nnx.state(self.blocks), self.embed(batch, layout)
        )

    def loss(self, batch: Batch, layout: Layout, objective: Objective) -> tuple[Float[Array, ""], Reported]:
        """(what is minimised, what is reported); see `head_loss`."""
        x, told = self.hidden(batch, layout)
        minimised, cross_entropy = self.head_loss(x, batch, layout, objective)
        return minimised + auxiliary_loss(told, minimised.dtype), Reported(cross_entropy, told)

    def logits_at(self, batch: Batch, place: Int[Array, ""], layout: Layout) -> Float[Array, "B V"]:
        """Scores of the token after that at a place of the arrays, in at least float32; padding scores -inf."""
        x, _ = self.hidden(batch, layout)
        logits = layout.logits_at(self.final_norm(x, layout), self._head(layout), place)
        in_vocab = jnp.arange(logits.shape[1]) < self.config.vocab_size
        return jnp.where(in_vocab[None], logits.astype(widened(logits.dtype)), -jnp.inf)

    @property
    def _has_learned_positions(self) -> bool:
        return self.config.positions == "learned"

    def _head(self, layout: Layout) -> Float[Array, "D V"]:
        if self.config.tie_embeddings:
            return layout.gather(self.embedding).T
        return layout.gather(self.head)
