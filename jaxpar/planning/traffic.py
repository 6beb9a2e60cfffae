"""Bytes that each device moves per training step, by mesh axis and collective.

One formula for each strategy, as its file in jaxpar/parallel states it; here they are added up for a model and a
layout. A collective's bytes are those of the buffer whole over its axis: what an all-gather results in, what a
reduce-scatter, an all-reduce or an all-to-all starts from. (A ring sends (n - 1) / n of that, an all-reduce twice.)
Scalars (losses, norms) are left out.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpar.kernels.attention import RESULT
from jaxpar.parallel import expert
from jaxpar.parallel.axes import (
    ACTIVATION_RULES,
    BATCH_AXES,
    PARAMETER_RULES,
    STATE_RULES,
    TOKEN_AXES,
    axes_of,
    gathered_axes,
    mesh_axes,
    padded_vocab,
    partition_spec,
    without,
)
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import needed_shifts
from jaxpar.parallel.expert import ExpertStrategy
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
    dispatch: ExpertStrategy = field(default_factory=ExpertStrategy)
    """Of the platform that the step is compiled for."""


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
    """The traffic of one step over data, fsdp, expert, context and tensor."""
    total: Counter[tuple[tuple[str, ...], str]] = Counter()
    flows = (
        *_weights(config, settings),
        *_activations(config, settings),
        *_context(config, settings),
        *(_experts(config, settings) if config.num_experts else ()),
    )
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
        fsdp = mesh_axes(spec) & gathered_axes(parameter.names)
        whole = parameter.layers * math.prod(parameter.dims) // _size(settings, mesh_axes(spec) - fsdp)
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
    dense, mixtures = _mlps_of_unit(config)
    first = config.num_layers - config.num_units * (dense + mixtures)

    def kernels(first: int, per_unit: int, *shapes: tuple[tuple[str, int], ...]) -> Iterator[_Parameter]:
        for shape in shapes:
            names, dims = zip(*shape)
            for layers, again in (first + per_unit * alone, 1), (per_unit * grouped, 2):
                yield _Parameter(dims, names, tokens, layers, 1 + again * settings.reshard_after_forward)

    d, h, k, f = ("embed", embed), ("heads", heads), ("kv_heads", kv_heads), ("mlp", hidden)
    p = ("head_dim", head_dim)
    gate = 1 if config.mlp == "swiglu" else 0
    yield from kernels(first, dense + mixtures, (d, h, p), (d, k, p), (d, k, p), (h, p, d))
    yield from kernels(first, dense, (f, d), *[(d, f)] * (1 + gate))
    if config.num_experts:
        e, f = ("experts", config.num_experts), ("mlp", config.expert_mlp_dim)
        yield from kernels(0, mixtures, (e, f, d), *[(e, d, f)] * (1 + gate))
        over = *tokens, "mlp"
        yield _Parameter((embed, config.num_experts), ("vector", "vector"), over, config.num_units, 0)
        if config.balancing == "bias":
            yield _Parameter((config.num_experts,), ("vector",), over, config.num_units, 0)
        if config.num_shared_experts:
            f = "mlp", config.num_shared_experts * config.expert_mlp_dim
            yield from kernels(0, mixtures, (f, d), *[(d, f)] * (1 + gate))

    def vector(dim: int, name: str, summed_over: tuple[str, ...], count: int = depth) -> _Parameter:
        return _Parameter((dim,), (name,), summed_over, count, 0)

    norms = (2 * depth + 1) * (2 if config.norm == "layernorm" else 1)
    yield vector(embed, "vector", residual, norms)
    if config.qk_norm and config.qk_norm_over == "heads":
        yield _Parameter((heads, head_dim), ("heads", "head_dim"), tokens, depth, 0)
        yield _Parameter((kv_heads, head_dim), ("kv_heads", "head_dim"), tokens, depth, 0)
    elif config.qk_norm:
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

    # Into and out of each half block and into the loss. What is done again leaves out the last sum of what is done
    # again together, and attention's where its result is kept.
    remat = Remat.parse(settings.remat, config.num_units)
    alone, grouped = _group_sizes(config, settings)
    dense, mixtures = _mlps_of_unit(config)
    first = config.num_layers - config.num_units * (dense + mixtures)
    entries = exits = 2 * config.num_layers
    entries_again = 0 if remat.keeps_all else entries
    exits_again = 0
    if not remat.keeps_all:
        per_unit = 0 if "attention_out" in remat.saves else dense + mixtures
        per_unit += 0 if "mlp_out" in remat.saves else dense + mixtures - 1
        exits_again = alone * per_unit + grouped * 2 * (dense + mixtures)
        exits_again += 0 if "attention_out" in remat.saves else first
    sums = exits + exits_again + entries + 1
    if settings.sequence_parallel:
        yield tensor, "all-gather", (entries + entries_again + 1 + exits) * stream
        yield tensor, "reduce-scatter", sums * stream
    else:
        yield tensor, "all-reduce", sums * stream
    if not _kv_heads_cut(config, settings):
        kv = times * tokens * config.num_kv_heads * config.head_dim * settings.compute_bytes
        yield tensor, "all-reduce", 2 * config.num_layers * kv

    if config.qk_norm and config.qk_norm_over == "heads":
        norms = sum(heads % settings.mesh["tensor"] == 0 for heads in (config.num_heads, config.num_kv_heads))
        forwards = 1 if remat.keeps_all else 2
        yield (
            tensor,
            "all-reduce",
            (forwards + 1) * norms * config.num_layers * times * tokens * max(settings.compute_bytes, 4),
        )

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

    remat = Remat.parse(settings.remat, config.num_units)
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


def _experts(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """What mixtures send over `expert`; of their choice over `context`, and of their loads."""
    strategy, ranks = settings.dispatch, settings.mesh["expert"]
    per_token, num_experts, short = config.num_experts_per_token, config.num_experts, settings.compute_bytes
    wide = max(short, 4)
    times = settings.num_microbatches * config.num_units
    rows = settings.batch_size // settings.num_microbatches // _size(settings, frozenset(BATCH_AXES))
    seq_len = settings.seq_len // settings.mesh["context"]
    tokens = rows * seq_len
    remat = Remat.parse(settings.remat, config.num_units)
    again = 0 if remat.keeps_all else 1
    results_again = 0 if remat.keeps_all or expert.RESULT in remat.saves else 1
    over = ("expert",)

    if strategy.dispatch == "capacity":
        whole = expert.capacity(settings.seq_len, num_experts, per_token, strategy.capacity_factor)
        buffer = num_experts * rows * expert.capacity_slots(whole, seq_len) * config.embed_dim * short
        yield over, "all-to-all", times * (4 + again + results_again) * buffer
        order = 4 + (wide if strategy.capacity_order == "score" else 0)
        yield ("context",), "all-gather", times * (1 + again) * settings.seq_len * rows * per_token * order
    elif strategy.exchange == "ragged":
        there = tokens * per_token * config.embed_dim * short
        back = expert.arrivals(tokens, ranks, num_experts, per_token) * config.embed_dim * short
        yield over, "ragged-all-to-all", times * ((2 + again) * there + (2 + results_again) * back)
        yield over, "all-gather", times * (1 + again) * ranks * num_experts * 4
    else:
        stream, pairs = ranks * tokens * config.embed_dim * short, ranks * tokens * per_token
        yield over, "all-gather", times * ((2 + again) * stream + (1 + again) * pairs * (4 + wide))
        yield over, "reduce-scatter", times * (2 * stream + pairs * wide)
    if config.balancing == "loss":
        axes = TOKEN_AXES if config.balancing_over == "batch" else ("context",)
        yield axes, "all-reduce", times * (1 + again) * rows * num_experts * wide


def ideal_expert_bytes(config: ModelConfig, settings: TrafficSettings) -> float:
    """What a rank would send over `expert` in a step if its experts had equal loads and nothing else were sent: tokens
    to their experts and back, forward and backward."""
    tokens = settings.batch_size * settings.seq_len // _size(settings, TOKEN_AXES)
    pairs = expert.ideal_bytes(
        tokens, config.num_experts_per_token, config.embed_dim, settings.mesh["expert"], settings.compute_bytes
    )
    return config.num_units * pairs if config.num_experts else 0.0


def _group_sizes(config: ModelConfig, settings: TrafficSettings) -> tuple[int, int]:
    """(units of the stack that are recomputed one by one, units in larger groups)."""
    every = Remat.parse(settings.remat, config.num_units).every
    alone = config.num_units if every == 1 else int(config.num_units % every == 1)
    return alone, config.num_units - alone


def _mlps_of_unit(config: ModelConfig) -> tuple[int, int]:
    """(dense MLPs, mixtures of experts) in a unit of the stack."""
    return (config.moe_every - 1, 1) if config.num_experts else (1, 0)


def _kv_heads_cut(config: ModelConfig, settings: TrafficSettings) -> bool:
    return config.num_kv_heads % settings.mesh["tensor"] == 0


def _activation_axes(names: Sequence[str], settings: TrafficSettings) -> frozenset[str]:
    if not settings.sequence_parallel:
        names = ["seq" if name == "residual_seq" else name for name in names]
    return mesh_axes(partition_spec(names, ACTIVATION_RULES, settings.mesh))


def _size(settings: TrafficSettings, axes: Sequence[str] | frozenset[str]) -> int:
    return math.prod(settings.mesh[axis] for axis in axes)
