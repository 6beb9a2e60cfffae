"""A model's parameters by where they lie: how many of each, on one device, whole or in parts, by the rules table."""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.axes import (
    PARAMETER_RULES,
    STATE_RULES,
    TOKEN_AXES,
    axes_of,
    mesh_axes,
    padded_vocab,
    partition_spec,
)
from jaxpar.planning.job import Numbers
from meshes.mesh import MESH_AXES
from models.config import ModelConfig

Dims = tuple[tuple[str, int], ...]
"""A parameter's dims, each with its logical name."""


@dataclass(frozen=True)
class Share:
    """Parameters on one device."""

    whole: Numbers
    """Of a copy that is whole over the axes that tokens are cut over: what a step computes with once it is gathered."""
    kept: Numbers
    """As FSDP cuts them."""
    state: Numbers
    """As ZeRO-1 and 2 cut what an optimizer keeps, over `data` too."""
    transposed: Numbers
    """Of `kept`, kernels whose last dim is cut."""

    def __add__(self, other: "Share") -> "Share":
        return Share(*(a + b for a, b in zip(self.numbers, other.numbers)))

    def __mul__(self, times: Numbers) -> "Share":
        return Share(*(times * each for each in self.numbers))

    @property
    def numbers(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        return self.whole, self.kept, self.state, self.transposed


@dataclass(frozen=True)
class Shares:
    """Of one layer with a dense MLP, of one with experts, and of the model's ends."""

    dense: Share
    moe: Share
    embedding: Share
    """With learned positions."""
    head: Share
    """With the final norm; of tied embeddings that alone."""

    def flat(self, ranks: int, state_ranks: int) -> "Shares":
        """As flat buffers are cut, over so many ranks, of state over so many."""

        def cut(share: Share) -> Share:
            return Share(share.whole, share.whole / ranks, share.whole / state_ranks, 0.0)

        return Shares(*(cut(each) for each in (self.dense, self.moe, self.embedding, self.head)))

    def layers(self, num_dense: float, num_moe: float) -> Share:
        return self.dense * num_dense + self.moe * num_moe


def attention_kernels(config: ModelConfig) -> Iterator[Dims]:
    d, p = ("embed", config.embed_dim), ("head_dim", config.head_dim)
    h, k = ("heads", config.num_heads), ("kv_heads", config.num_kv_heads)
    yield from ((d, h, p), (d, k, p), (d, k, p), (h, p, d))


def mlp_kernels(config: ModelConfig, hidden: int) -> Iterator[Dims]:
    d, f = ("embed", config.embed_dim), ("mlp", hidden)
    yield from ((d, f),) * (2 if config.mlp == "swiglu" else 1)
    yield (f, d)


def expert_kernels(config: ModelConfig) -> Iterator[Dims]:
    """Of a layer's routed and shared experts, and its router."""
    for dims in mlp_kernels(config, config.expert_mlp_dim):
        yield (("experts", config.num_experts), *dims)
    if config.num_shared_experts:
        yield from mlp_kernels(config, config.num_shared_experts * config.expert_mlp_dim)
    yield (("embed", config.embed_dim), ("vector", config.num_experts))


def _vectors(config: ModelConfig) -> Iterator[Dims]:
    """Norms and biases of one layer."""
    embed, head_dim = config.embed_dim, config.head_dim
    per_norm = 2 if config.norm == "layernorm" else 1
    yield (("vector", 2 * per_norm * embed + (2 * head_dim if config.qk_norm else 0)),)
    if config.qkv_bias:
        for name, heads in (
            ("heads", config.num_heads),
            ("kv_heads", config.num_kv_heads),
            ("kv_heads", config.num_kv_heads),
        ):
            yield ((name, heads), ("head_dim", head_dim))
    if config.attention_output_bias:
        yield (("vector", embed),)
    if config.mlp_bias:
        yield (("mlp", (2 if config.mlp == "swiglu" else 1) * config.mlp_dim),)
        yield (("vector", embed),)


def shares(config: ModelConfig, mesh: Mapping[str, int]) -> Shares:
    """Of this model on a mesh with all axes; or on several, where sizes of axes are arrays."""
    sizes = np.broadcast_arrays(*(mesh[axis] for axis in MESH_AXES))
    each = [_shares(config, own) for own in zip(*(size.ravel().tolist() for size in sizes))]
    if len(each) == 1:
        return each[0]

    def together(part: str) -> Share:
        columns = zip(*(getattr(own, part).numbers for own in each))
        return Share(*(np.reshape(column, sizes[0].shape) for column in columns))

    return Shares(*(together(field.name) for field in fields(Shares)))


def _shares(config: ModelConfig, sizes: tuple[int, ...]) -> Shares:
    mesh = dict(zip(MESH_AXES, sizes, strict=True))
    # Layers lie whole in their stages.
    inside = tuple(1 if axis == "pipe" else size for axis, size in mesh.items())
    return Shares(*_layer_shares(config, inside), *_end_shares(config, sizes))


@functools.cache
def _layer_shares(config: ModelConfig, sizes: tuple[int, ...]) -> tuple[Share, Share]:
    """Of a layer with a dense MLP, and with experts."""
    attention = _total(sizes, *attention_kernels(config), *_vectors(config))
    dense = attention + _total(sizes, *mlp_kernels(config, config.mlp_dim))
    return dense, attention + _total(sizes, *expert_kernels(config)) if config.num_experts else dense


@functools.cache
def _end_shares(config: ModelConfig, sizes: tuple[int, ...]) -> tuple[Share, Share]:
    """Of the embedding, and of the head."""
    mesh = dict(zip(MESH_AXES, sizes, strict=True))
    vocab, d = ("vocab", padded_vocab(config.vocab_size, mesh)), ("embed", config.embed_dim)
    positions = ((("position", config.max_seq_len), d),) if config.positions == "learned" else ()
    norm: Dims = (("vector", config.embed_dim * (2 if config.norm == "layernorm" else 1)),)
    head = (norm,) if config.tie_embeddings else ((d, vocab), norm)
    return _total(sizes, (vocab, d), *positions), _total(sizes, *head)


def _total(sizes: tuple[int, ...], *shapes: Dims) -> Share:
    return sum((_share(dims, sizes) for dims in shapes), Share(0, 0, 0, 0))


@functools.lru_cache(maxsize=65536)
def _share(shape: Dims, sizes: tuple[int, ...]) -> Share:
    mesh = dict(zip(MESH_AXES, sizes, strict=True))
    names, dims = zip(*shape)

    def per_device(spec: P, whole: bool = False) -> float:
        axes = mesh_axes(spec)
        if whole:  # an expert's kernel stays with its rank of `expert`
            axes -= TOKEN_AXES - set(axes_of(spec[0]) if names[0] == "experts" else ())
        return math.prod(dims) / math.prod(mesh[axis] for axis in axes)

    spec = partition_spec(names, PARAMETER_RULES, mesh, dims)
    state = partition_spec(names, STATE_RULES, mesh, dims) if mesh["data"] > 1 else spec
    whole, kept = per_device(spec, whole=True), per_device(spec)
    last_is_cut = len(names) > 1 and names[-1] == "embed" and kept < whole
    return Share(whole, kept, per_device(state), kept if last_is_cut else 0.0)


def num_moe_layers(config: ModelConfig) -> int:
    """Layers with experts: every `moe_every`-th of those after the dense ones."""
    return (config.num_layers - config.num_dense_layers) // config.moe_every if config.num_experts else 0
