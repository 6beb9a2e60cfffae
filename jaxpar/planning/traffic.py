"""Bytes that each device moves per training step, by mesh axis and collective.

One formula for each strategy, as its file in jaxpar/parallel states it; here they are added up for a model and a
layout. A collective's bytes are those of the buffer whole over its axis: what an all-gather results in, what a
reduce-scatter, an all-reduce or an all-to-all starts from. (A ring sends (n - 1) / n of that, an all-reduce twice.)
Scalars (losses, norms) are left out.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpar.kernels.attention import RESULT
from jaxpar.parallel.axes import (
    ACTIVATION_RULES,
    PARAMETER_RULES,
    STATE_RULES,
    TOKEN_AXES,
    axes_of,
    mesh_axes,
    padded_vocab,
    partition_spec,
    without,
)
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import needed_shifts
from jaxpar.parallel.remat import Remat
from models.config import ModelConfig

Traffic = dict[str, dict[str, int]]
"""{"fsdp": {"all-gather": bytes}}; several axes in one collective are joined with "+", in the mesh's order."""


@dataclass(frozen=True)
class TrafficSettings:
    """What the traffic of a step depends on beside the model."""

    mesh: Mapping[str, int]
    """Every axis and its size, outermost first."""
    batch_size: int
    seq_len: int
    num_microbatches: int = 1
    compute_bytes: int = 2
    reduce_bytes: int = 4
    sequence_parallel: bool = True
    reshard_after_forward: bool = True
    remat: str = "full"
    zero: int = 3
    context: ContextStrategy = field(default_factory=ContextStrategy)


@dataclass(frozen=True)
class _Parameter:
    """A parameter of every layer (or of none): its dims, their logical names, what its gradient sums over."""

    dims: tuple[int, ...]
    names: tuple[str, ...]
    summed_over: tuple[str, ...]
    layers: int
    gathers: int
    """All-gathers per microbatch under FSDP, in units of the whole weight."""


def step_traffic(config: ModelConfig, settings: TrafficSettings) -> Traffic:
    """The traffic of one step of dense training over data, fsdp, expert (as a batch axis) and tensor."""
    flows = *_weights(config, settings), *_activations(config, settings), *_context(config, settings)
    return _total(flows, settings)


def weight_traffic(config: ModelConfig, settings: TrafficSettings) -> Traffic:
    """The part of step_traffic that moves weights and their gradients."""
    return _total(_weights(config, settings), settings)


def activation_traffic(config: ModelConfig, settings: TrafficSettings) -> Traffic:
    """The part of step_traffic that moves activations and their gradients."""
    return _total((*_activations(config, settings), *_context(config, settings)), settings)


def _total(flows: Iterable["_Flow"], settings: TrafficSettings) -> Traffic:
    total: Counter[tuple[tuple[str, ...], str]] = Counter()
    for axes, op, num_bytes in flows:
        axes = tuple(axis for axis in settings.mesh if axis in axes and settings.mesh[axis] > 1)
        if axes and num_bytes:
            total[axes, op] += num_bytes
    traffic: Traffic = {}
    for (axes, op), num_bytes in total.items():
        traffic.setdefault("+".join(axes), {})[op] = num_bytes
    return traffic


_Flow = tuple[Sequence[str] | frozenset[str], str, int]


def pipeline_traffic(config: ModelConfig, settings: TrafficSettings, hops: int) -> Traffic:
    """What stages send each other, in so many permutes of one microbatch's activation. What else a step moves depends
    on which of a tick's branches a stage takes, and is in no formula yet."""
    part = settings.mesh["tensor"] if settings.sequence_parallel else 1
    tokens = settings.batch_size * settings.seq_len // settings.num_microbatches // _size(settings, TOKEN_AXES)
    return {"pipe": {"collective-permute": hops * tokens // part * config.embed_dim * settings.compute_bytes}}


def _weights(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """FSDP's gathers and reduce-scatters, and the sums that are left to the end of the step."""
    for parameter in _parameters(config, settings):
        rules = PARAMETER_RULES if settings.zero == 3 else STATE_RULES
        spec = partition_spec(parameter.names, rules, settings.mesh, parameter.dims)
        fsdp = mesh_axes(spec) & TOKEN_AXES
        whole = parameter.layers * math.prod(parameter.dims) // _size(settings, mesh_axes(spec) - TOKEN_AXES)
        if settings.zero == 3:
            gathers = settings.num_microbatches * parameter.gathers
            scatters = settings.num_microbatches * min(parameter.gathers, 1)
        else:
            gathers = 1
            scatters = 1 if settings.zero == 1 else settings.num_microbatches
        yield fsdp, "all-gather", gathers * whole * settings.compute_bytes
        yield fsdp, "reduce-scatter", scatters * whole * settings.reduce_bytes
        owed = _activation_axes(parameter.summed_over, settings) - mesh_axes(spec)
        yield owed, "all-reduce", whole // _size(settings, fsdp) * settings.reduce_bytes


def _parameters(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Parameter]:
    embed, hidden, depth = config.embed_dim, config.mlp_dim, config.num_layers
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    tokens, residual = ("batch", "seq"), ("batch", "residual_seq")

    # A layer in a group of several is gathered to make the group's inputs again, too.
    alone, grouped = _group_sizes(config, settings)

    def kernels(*shapes: tuple[tuple[str, int], ...]) -> Iterator[_Parameter]:
        for shape in shapes:
            names, dims = zip(*shape)
            for layers, again in (alone, 1), (grouped, 2):
                yield _Parameter(dims, names, tokens, layers, 1 + again * settings.reshard_after_forward)

    d, h, k, f = ("embed", embed), ("heads", heads), ("kv_heads", kv_heads), ("mlp", hidden)
    p = ("head_dim", head_dim)
    yield from kernels((d, h, p), (d, k, p), (d, k, p), (h, p, d), (d, f), (f, d))
    if config.mlp == "swiglu":
        yield from kernels((d, f))

    def vector(dim: int, name: str, summed_over: tuple[str, ...], count: int = depth) -> _Parameter:
        return _Parameter((dim,), (name,), summed_over, count, 0)

    norms = (2 * depth + 1) * (2 if config.norm == "layernorm" else 1)
    yield vector(embed, "vector", residual, norms)
    if config.qk_norm:
        yield vector(head_dim, "vector", (*tokens, "heads"), 2 * depth)
    if config.qkv_bias:
        yield _Parameter((heads, head_dim), ("heads", "head_dim"), tokens, depth, 0)
        yield _Parameter((kv_heads, head_dim), ("kv_heads", "head_dim"), tokens, 2 * depth, 0)
    if config.mlp_bias:
        yield vector(hidden, "mlp", tokens, (2 if config.mlp == "swiglu" else 1) * depth)
        yield vector(embed, "vector", residual)
    if config.attention_output_bias:
        yield vector(embed, "vector", residual)

    vocab = padded_vocab(config.vocab_size, settings.mesh)
    yield _Parameter((vocab, embed), ("vocab", "embed"), tokens, 1, 1 if config.tie_embeddings else 0)
    if not config.tie_embeddings:
        yield _Parameter((embed, vocab), ("embed", "vocab"), tokens, 1, 1)
    if config.positions == "learned":
        yield _Parameter((config.max_seq_len, embed), ("position", "embed"), residual, 1, 0)


def _activations(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """Tensor parallelism's reductions, the lookup's exchanges, the loss's sums over the vocabulary."""
    times = settings.num_microbatches
    tokens = settings.batch_size * settings.seq_len // times // _size(settings, TOKEN_AXES)
    stream = times * tokens * config.embed_dim * settings.compute_bytes
    tensor = ("tensor",)

    # Into and out of each half block and into the loss. What is done again leaves out a layer's last sum, unless other
    # layers of its group follow from it, and attention's where its result is kept.
    remat = Remat.parse(settings.remat, config.num_layers)
    alone, grouped = _group_sizes(config, settings)
    entries, exits = 2 * config.num_layers, 2 * config.num_layers
    entries_again = 0 if remat.keeps_all else entries
    exits_again = 0 if remat.keeps_all or "attention_out" in remat.saves else alone + 2 * grouped
    sums = exits + exits_again + entries + 1
    if settings.sequence_parallel:
        yield tensor, "all-gather", (entries + entries_again + 1 + exits) * stream
        yield tensor, "reduce-scatter", sums * stream
    else:
        yield tensor, "all-reduce", sums * stream
    if not _kv_heads_cut(config, settings):
        kv = times * tokens * config.num_kv_heads * config.head_dim * settings.compute_bytes
        yield tensor, "all-reduce", 2 * config.num_layers * kv

    vocab = padded_vocab(config.vocab_size, settings.mesh)
    yield tensor, "all-reduce", times * 3 * tokens * max(settings.compute_bytes, 4)

    yield from _lookup(settings, (vocab, config.embed_dim), ("vocab", "embed"), stream, times * tokens)
    if config.positions == "learned":
        yield from _lookup(
            settings, (config.max_seq_len, config.embed_dim), ("position", "embed"), stream, times * tokens
        )


def _lookup(
    settings: TrafficSettings, dims: tuple[int, int], names: tuple[str, str], stream: int, tokens: int
) -> Iterator[_Flow]:
    spec = partition_spec(names, PARAMETER_RULES, settings.mesh, dims)
    if settings.zero < 3:
        spec = without(spec, TOKEN_AXES)
    rows, columns = map(axes_of, spec.partitions)
    part = settings.mesh["tensor"] if settings.sequence_parallel else 1
    ids = 4 * tokens * _size(settings, columns)
    yield columns, "all-gather", ids if rows else ids // part  # once: the backward pass uses the same
    # Positions are added to the embeddings: one exchange of the gradient serves both.
    yield columns, "all-to-all", (2 if rows else 1) * stream // part
    if settings.sequence_parallel:
        yield rows, "reduce-scatter", stream
        yield rows, "all-gather", stream
    else:
        yield rows, "all-reduce", stream


def _context(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """What attention sends over `context`, forward (and again, where it is recomputed) and backward; and once the
    positions and segments that its masks go by."""
    ranks, tensor = settings.mesh["context"], settings.mesh["tensor"]
    times = settings.num_microbatches
    tokens = settings.batch_size * settings.seq_len // times // _size(settings, TOKEN_AXES)
    yield ("context",), "all-gather", times * 2 * 4 * tokens * ranks

    remat = Remat.parse(settings.remat, config.num_layers)
    forwards = 1 if remat.keeps_all or RESULT in remat.saves else 2
    layers = times * config.num_layers * tokens * config.head_dim
    q_heads = config.num_heads // tensor
    kv_heads = math.lcm(config.num_kv_heads, tensor) // tensor
    strategy, short = settings.context, settings.compute_bytes
    if strategy.kind == "allgather":
        whole = layers * ranks * 2 * kv_heads * short
        yield ("context",), "all-gather", forwards * whole
        yield ("context",), "reduce-scatter", whole
        return
    group = strategy.group
    if group > 1:
        kv_heads = math.lcm(kv_heads, group)
        yield ("context",), "all-to-all", (forwards + 1) * layers * 2 * (q_heads + kv_heads) * short
    shifts = needed_shifts(strategy.order, settings.seq_len, ranks, group, True, config.sliding_window)
    # A group's ranks hold its whole part of the sequence, of fewer heads.
    kv, dkv = layers * 2 * kv_heads * short, layers * 2 * kv_heads * max(short, 4)
    hops = len(shifts) - 1
    # Permutes outside of a loop (of which one of a single trip is none) are the same ones where the forward pass is
    # recomputed beside the backward pass.
    loops = shifts == tuple(range(hops + 1)) and hops > 2
    shared = (forwards - 1) * (1 if loops else hops)
    home = kv if hops else 0
    yield ("context",), "collective-permute", ((forwards + 1) * hops - shared) * kv + hops * dkv + home


def _group_sizes(config: ModelConfig, settings: TrafficSettings) -> tuple[int, int]:
    """(layers that are recomputed one by one, layers in larger groups)."""
    every = Remat.parse(settings.remat, config.num_layers).every
    alone = config.num_layers if every == 1 else int(config.num_layers % every == 1)
    return alone, config.num_layers - alone


def _kv_heads_cut(config: ModelConfig, settings: TrafficSettings) -> bool:
    return config.num_kv_heads % settings.mesh["tensor"] == 0


def _activation_axes(names: Sequence[str], settings: TrafficSettings) -> frozenset[str]:
    if not settings.sequence_parallel:
        names = ["seq" if name == "residual_seq" else name for name in names]
    return mesh_axes(partition_spec(names, ACTIVATION_RULES, settings.mesh))


def _size(settings: TrafficSettings, axes: Sequence[str] | frozenset[str]) -> int:
    return math.prod(settings.mesh[axis] for axis in axes)
