"""The decoder: embedding, a stack of equal blocks, head. Single-device Flax but for its `Layout`."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.kernels.attention import Cache
from jaxpar.numerics import widened
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.parameter import Parameter, Part
from jaxpar.parallel.vocab import Objective
from models.block import Block, Unit
from models.config import ModelConfig
from models.layers import RESIDUAL, KeysValues, Norm, Rope
from models.parameters import Initializer, declare, normal

Told = dict[str, Array]
"""What layers tell of themselves beside their output, by name, with a leading layers dim: sums over the tokens.
`auxiliary_loss` is minimised too."""


Run = Callable[[PyTree, Array, Cache | None], tuple[Array, Told, KeysValues]]
"""(parameters of a block, x, what came before) -> what the block gives."""


class Reported(NamedTuple):
    """Beside what is minimised."""

    loss: Float[Array, ""]
    """The cross-entropy alone, sum(loss_weights * cross-entropy)."""
    told: Told


def auxiliary_loss(told: Told, dtype: jnp.dtype) -> Float[Array, ""]:
    """What layers add to what is minimised."""
    return jnp.sum(told["auxiliary_loss"]).astype(dtype) if "auxiliary_loss" in told else jnp.zeros((), dtype)


def _without_cache(run: Run) -> Callable[[PyTree, Array], tuple[Array, Told]]:
    return lambda params, x: run(params, x, None)[:2]


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


def _zeroed(is_empty: Bool[np.ndarray, " L"], stacked: Float[Array, "L ..."]) -> Float[Array, "L ..."]:
    return jnp.where(is_empty.reshape(-1, *[1] * (stacked.ndim - 1)), jnp.zeros((), stacked.dtype), stacked)


class Transformer(nnx.Module):
    """A decoder-only language model; `padded_vocab` is the layout's, the config's vocab_size the true one;
    `layer_order` says which layer stands where in the stack, below 0 that none does: those places are zero."""

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
        layers = jnp.asarray(layer_order.clip(0))
        layer_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rngs.params(), layers)
        self.blocks = nnx.vmap(lambda key: _repeated(config, nnx.Rngs(params=key), dtype))(layer_keys)
        if np.any(layer_order < 0):
            nnx.update(self.blocks, jax.tree.map(partial(_zeroed, layer_order < 0), nnx.state(self.blocks)))

    def embed(self, batch: Batch, layout: Layout) -> Float[Array, "B S D"]:
        """The input of the stacked blocks, in the residual stream."""
        x = layout.lookup(self.embedding, batch.tokens)
        if self._has_learned_positions:
            x = x + layout.lookup(self.position_embedding, batch.positions)
        for block in self.first_blocks:
            x, _ = layout.layer(_without_cache(self._run(block, batch, layout)), nnx.state(block), x)
        return x

    def stack(
        self, blocks: PyTree, x: Float[Array, "B S D"], batch: Batch, layout: Layout, part: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "B S D"], Told]:
        """Through some of the blocks, which are given as their parameters, stacked; under `pipe`, of a part."""
        return layout.layers(_without_cache(self._run(self.blocks, batch, layout)), blocks, x, part)

    def stack_after(
        self,
        blocks: PyTree,
        x: Float[Array, "B S D"],
        before: KeysValues | None,
        batch: Batch,
        earlier: Batch,
        layout: Layout,
        part: Int[Array, ""],
    ) -> tuple[Float[Array, "B S D"], Told, KeysValues]:
        """As `stack`, of tokens of `batch` that come after those of `earlier` in the same sequences, whose keys and
        values are `before`, if there are any; and those of `batch`, both with a leading layers dim."""
        block, tokens = self._run(self.blocks, batch, layout), layout.sequence(earlier)

        def after(each: tuple[PyTree, KeysValues | None], x: Array) -> tuple[Array, tuple[Told, KeysValues]]:
            params, before = each
            x, told, made = block(params, x, Cache(*before, tokens) if before is not None else None)
            return x, (told, made)

        x, (told, made) = layout.layers(after, (blocks, before), x, part)
        return x, told, made

    def _run(self, block: nnx.Module, batch: Batch, layout: Layout) -> Run:
        rope = None if self._has_learned_positions else Rope.at(self.config, batch.positions, layout.compute_dtype)
        tokens, graph = layout.sequence(batch), nnx.graphdef(block)
        return lambda params, x, cache: nnx.merge(graph, params)(x, rope, tokens, batch.routing, layout, cache)

    def head_loss(
        self, x: Float[Array, "B S D"], batch: Batch, layout: Layout, objective: Objective
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """(sum(loss_weights * objective), sum(loss_weights * cross-entropy)) of the last block's output: the caller has
        divided the weights by the step's count of tokens."""
        whole = Part(self._head[...], self._head.axes, self._head.dims)
        # The head's gradient is reduced before the layers' are made.
        normed, head = layout.made((self.final_norm(x, layout), whole))
        return layout.cross_entropy(
            normed,
            self._gathered(head, layout),
            batch.targets,
            batch.loss_weights,
            self.config.vocab_size,
            objective,
        )

    def hidden(self, batch: Batch, layout: Layout) -> tuple[Float[Array, "B S D"], Told]:
        """The output of the last block, and what all of them told."""
        return layout.through_stages(
            lambda blocks, x, part: self.stack(blocks, x, batch, layout, part),
            nnx.state(self.blocks),
            self.embed(batch, layout),
        )

    def loss(self, batch: Batch, layout: Layout, objective: Objective) -> tuple[Float[Array, ""], Reported]:
        """(what is minimised, what is reported); see `head_loss`."""
        x, told = self.hidden(batch, layout)
        minimised, cross_entropy = self.head_loss(x, batch, layout, objective)
        return minimised + auxiliary_loss(told, minimised.dtype), Reported(cross_entropy, told)

    def logits_at(self, batch: Batch, place: Int[Array, ""], layout: Layout) -> Float[Array, "B V"]:
        """Scores of the token after that at a place of the arrays, in at least float32; padding scores -inf."""
        x, _ = self.hidden(batch, layout)
        logits = layout.logits_at(self.final_norm(x, layout), self._gathered(self._head, layout), place)
        in_vocab = jnp.arange(logits.shape[1]) < self.config.vocab_size
        return jnp.where(in_vocab[None], logits.astype(widened(logits.dtype)), -jnp.inf)

    @property
    def _has_learned_positions(self) -> bool:
        return self.config.positions == "learned"

    @property
    def _head(self) -> nnx.Param:
        return self.embedding if self.config.tie_embeddings else self.head

    def _gathered(self, head: Parameter, layout: Layout) -> Float[Array, "D V"]:
        gathered = layout.gather(head)
        return gathered.T if self.config.tie_embeddings else gathered
