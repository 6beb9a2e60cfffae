"""Bytes that each device moves per training step, by mesh axis and collective.

One formula for each strategy, as its file in jaxpar/parallel states it; here they are added up for a model and a
layout. A collective's bytes are those of the buffer whole over its axis: what an all-gather results in, what a
reduce-scatter, an all-reduce or an all-to-all starts from. (A ring sends (n - 1) / n of that, an all-reduce twice.)
Scalars (losses, norms) are left out.

Under `pipe` a device is taken to be of the first stage, of the last and of that with the most layers at once. So is the
compiled program, one for all stages, where each branch of a tick counts as often as the stage that does it takes it. A
chunk of one layer is no loop: what its backward pass would do twice, for its stage and for the layer, XLA does once.
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
class Stages:
    """What the traffic of a pipeline depends on beside its mesh."""

    permutes: int
    """Of one microbatch's activation, in a step."""
    num_chunks: int
    layers_per_chunk: int
    """The most."""
    keeps_residuals: bool = False
    """Whether a forward pass keeps what its backward pass needs, which else does it again."""
    spreads_head: bool = False
    """Whether embedding and head are the work of all stages together."""


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
    stages: Stages | None = None
    """None without `pipe`."""


@dataclass(frozen=True)
class _Parameter:
    """Parameters alike: their dims, the dims' logical names, what a gradient sums over."""

    dims: tuple[int, ...]
    names: tuple[str, ...]
    summed_over: tuple[str, ...]
    count: int
    gathers: int
    """All-gathers per microbatch under FSDP, of one of them, summed over all."""
    is_at_end: bool = False
    """Whether it is no layer's."""


def step_traffic(config: ModelConfig, settings: TrafficSettings) -> Traffic:
    """The traffic of one step of dense training over data, pipe, fsdp, expert (as a batch axis), context and tensor."""
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


_Axes = Sequence[str] | frozenset[str]
_Flow = tuple[_Axes, str, int]


def _weights(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """The gathers of weights, the reduce-scatters of their gradients, and the sums that are left to the end of the
    step."""
    for parameter in _parameters(config, settings):
        rules = PARAMETER_RULES if settings.zero == 3 else STATE_RULES
        spec = partition_spec(parameter.names, rules, settings.mesh, parameter.dims)
        part = math.prod(parameter.dims) // _size(settings, mesh_axes(spec))
        transfers = _transfers(parameter, mesh_axes(spec), settings)
        whole = part
        for axes, gathers, _ in transfers:
            whole *= _size(settings, axes)
            yield axes, "all-gather", gathers * whole * settings.compute_bytes
        for axes, _, scatters in reversed(transfers):
            yield axes, "reduce-scatter", scatters * whole * settings.reduce_bytes
            whole //= _size(settings, axes)
        owed = _activation_axes(parameter.summed_over, settings) | ({"pipe"} if parameter.is_at_end else set())
        yield owed - mesh_axes(spec), "all-reduce", parameter.count * part * settings.reduce_bytes


def _transfers(
    parameter: _Parameter, cut: frozenset[str], settings: TrafficSettings
) -> list[tuple[frozenset[str], int, int]]:
    """(axes, gathers, reduce-scatters) of one such parameter in a step, in the order of the gathers; the gradient is
    cut the other way round."""
    tokens, before = cut & TOKEN_AXES, cut & _whole_in_stages(settings)
    once, times = parameter.count, settings.num_microbatches
    over_stages = [(before & {"pipe"}, once, once)]
    if settings.zero < 3:
        return [(tokens, once, once if settings.zero == 1 else times * once), *over_stages]
    if tokens <= before:
        return [*over_stages, (tokens, once, once)]
    return [*over_stages, (tokens, times * parameter.gathers, times * once if parameter.gathers else 0)]


def _whole_in_stages(settings: TrafficSettings) -> frozenset[str]:
    """The axes that cut no weight any more when a pipeline's first microbatch comes (Layout.in_stages)."""
    if settings.stages is None:
        return frozenset()
    axes: frozenset[str] = frozenset() if settings.reshard_after_forward else TOKEN_AXES
    return axes if settings.stages.spreads_head else axes | {"pipe"}


def _parameters(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Parameter]:
    embed, hidden, depth = config.embed_dim, config.mlp_dim, _num_layers(config, settings)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    tokens, residual = ("batch", "seq"), ("batch", "residual_seq")

    passes = _passes(config, settings)

    def kernels(*shapes: tuple[tuple[str, int], ...]) -> Iterator[_Parameter]:
        for shape in shapes:
            names, dims = zip(*shape)
            yield _Parameter(dims, names, tokens, depth, passes["gather"])

    d, h, k, f = ("embed", embed), ("heads", heads), ("kv_heads", kv_heads), ("mlp", hidden)
    p = ("head_dim", head_dim)
    yield from kernels((d, h, p), (d, k, p), (d, k, p), (h, p, d), (d, f), (f, d))
    if config.mlp == "swiglu":
        yield from kernels((d, f))

    def vector(dim: int, name: str, summed_over: tuple[str, ...], count: int = depth) -> _Parameter:
        return _Parameter((dim,), (name,), summed_over, count, 0)

    per_norm = 2 if config.norm == "layernorm" else 1
    yield vector(embed, "vector", residual, 2 * depth * per_norm)
    yield _Parameter((embed,), ("vector",), residual, per_norm, 0, is_at_end=True)
    if config.qk_norm:
        yield vector(head_dim, "vector", (*tokens, "heads"))
        yield vector(head_dim, "vector", (*tokens, "kv_heads") if _kv_heads_cut(config, settings) else tokens)
    if config.qkv_bias:
        yield _Parameter((heads, head_dim), ("heads", "head_dim"), tokens, depth, 0)
        yield _Parameter((kv_heads, head_dim), ("kv_heads", "head_dim"), tokens, 2 * depth, 0)
    if config.mlp_bias:
        yield vector(hidden, "mlp", tokens, (2 if config.mlp == "swiglu" else 1) * depth)
        yield vector(embed, "vector", residual)
    if config.attention_output_bias:
        yield vector(embed, "vector", residual)

    vocab = padded_vocab(config.vocab_size, settings.mesh)
    yield _Parameter((vocab, embed), ("vocab", "embed"), tokens, 1, 1 if config.tie_embeddings else 0, is_at_end=True)
    if not config.tie_embeddings:
        yield _Parameter((embed, vocab), ("embed", "vocab"), tokens, 1, 1, is_at_end=True)
    if config.positions == "learned":
        yield _Parameter((config.max_seq_len, embed), ("position", "embed"), residual, 1, 0, is_at_end=True)


def _activations(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """Stages' hops, tensor parallelism's reductions, the lookup's exchanges, the loss's sums over the vocabulary."""
    times, stages = settings.num_microbatches, settings.stages
    tokens = settings.batch_size * settings.seq_len // times // _size(settings, TOKEN_AXES)
    one = tokens * config.embed_dim * settings.compute_bytes
    stream, depth, tensor = times * one, _num_layers(config, settings), ("tensor",)
    part = settings.mesh["tensor"] if settings.sequence_parallel else 1
    spreads_head = stages is not None and stages.spreads_head
    if stages:
        yield ("pipe",), "collective-permute", stages.permutes * one // part
    if spreads_head:
        # The head's input and its gradient, the embedding's gradient; its sum is the lookup's.
        yield ("pipe",), "all-reduce", 3 * stream // part

    # Into and out of each half block and into the loss.
    passes = _passes(config, settings)
    sums = passes["exit"] + 2 * depth + 1
    if settings.sequence_parallel:
        yield tensor, "all-gather", (passes["entry"] + 1 + 2 * depth) * stream
        yield tensor, "reduce-scatter", sums * stream
    else:
        yield tensor, "all-reduce", sums * stream
    if not _kv_heads_cut(config, settings):
        kv = times * tokens * config.num_kv_heads * config.head_dim * settings.compute_bytes
        yield tensor, "all-reduce", 2 * depth * kv

    vocab = padded_vocab(config.vocab_size, settings.mesh)
    over_vocab = ("tensor", "pipe") if spreads_head else tensor
    yield over_vocab, "all-reduce", times * 3 * tokens * max(settings.compute_bytes, 4)

    yield from _lookup(settings, (vocab, config.embed_dim), ("vocab", "embed"), stream, times * tokens)
    if config.positions == "learned":
        yield from _lookup(
            settings, (config.max_seq_len, config.embed_dim), ("position", "embed"), stream, times * tokens
        )


def _lookup(
    settings: TrafficSettings, dims: tuple[int, int], names: tuple[str, str], stream: int, tokens: int
) -> Iterator[_Flow]:
    spec = partition_spec(names, PARAMETER_RULES, settings.mesh, dims)
    spec = without(spec, TOKEN_AXES if settings.zero < 3 else ())
    rows, columns = map(axes_of, without(spec, _whole_in_stages(settings)).partitions)
    part = settings.mesh["tensor"] if settings.sequence_parallel else 1
    ids = 4 * tokens * _size(settings, columns)
    # The backward pass uses the same, unless it is in another branch.
    yield columns, "all-gather", (2 if settings.stages else 1) * (ids if rows else ids // part)
    # Positions are added to the embeddings: one exchange of the gradient serves both, but where all stages look up
    # embeddings, and positions' gradient counts on one of them.
    shares = not rows and not (settings.stages and settings.stages.spreads_head)
    yield columns, "all-to-all", (1 if shares else 2) * stream // part
    if settings.sequence_parallel:
        scattered = [axis for axis in rows if axis == "tensor"]
        yield scattered, "reduce-scatter", stream
        yield scattered, "all-gather", stream
        rows = tuple(axis for axis in rows if axis != "tensor")
    yield rows, "all-reduce", stream // part


def _context(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """What attention sends over `context`, forward (and again, where it is recomputed) and backward; and once the
    positions and segments that its masks go by (under `pipe`: once in each pass through a chunk)."""
    ranks, tensor = settings.mesh["context"], settings.mesh["tensor"]
    times, depth, passes = settings.num_microbatches, _num_layers(config, settings), _passes(config, settings)
    tokens = settings.batch_size * settings.seq_len // times // _size(settings, TOKEN_AXES)
    yield ("context",), "all-gather", passes["stack"] * times * 2 * 4 * tokens * ranks

    layer = times * tokens * config.head_dim
    q_heads = config.num_heads // tensor
    kv_heads = math.lcm(config.num_kv_heads, tensor) // tensor
    strategy, short = settings.context, settings.compute_bytes
    if strategy.kind == "allgather":
        whole = layer * ranks * 2 * kv_heads * short
        yield ("context",), "all-gather", passes["exchange"] * whole
        yield ("context",), "reduce-scatter", depth * whole
        return
    group = strategy.group
    if group > 1:
        kv_heads = math.lcm(kv_heads, group)
        yield ("context",), "all-to-all", (passes["exchange"] + depth) * layer * 2 * (q_heads + kv_heads) * short
    shifts = needed_shifts(strategy.order, settings.seq_len, ranks, group, True, config.sliding_window)
    # A group's ranks hold its whole part of the sequence, of fewer heads.
    kv, dkv = layer * 2 * kv_heads * short, layer * 2 * kv_heads * max(short, 4)
    hops = len(shifts) - 1
    # Permutes outside of a loop (of which one of a single trip is none) are the same ones where the forward pass is
    # recomputed beside the backward pass.
    loops = shifts == tuple(range(hops + 1)) and hops > 2
    forwards = passes["rounds"]  # of all layers
    shared = (forwards - depth) * (1 if loops else hops)
    home = depth * kv if hops else 0
    yield ("context",), "collective-permute", ((forwards + depth) * hops - shared) * kv + depth * hops * dkv + home


def _num_layers(config: ModelConfig, settings: TrafficSettings) -> int:
    """Of a device."""
    return settings.stages.num_chunks * settings.stages.layers_per_chunk if settings.stages else config.num_layers


def _passes(config: ModelConfig, settings: TrafficSettings) -> Counter[str]:
    """What a device's layers do per microbatch, forward and again, before their gradients: how often they enter tensor-
    parallel weights and leave them, bring together what attends to each other, go around a ring, gather weights (of a
    whole layer each), and how often a stack is begun."""
    stages = settings.stages
    layers = stages.layers_per_chunk if stages else config.num_layers
    remat = Remat.parse(settings.remat, layers)
    groups, rest = divmod(layers, remat.every)

    def forward(layers: int) -> Counter[str]:
        return Counter(entry=2 * layers, exit=2 * layers, exchange=layers, rounds=layers, gather=layers)

    # What is done again leaves out a layer's last sum, unless other layers of its group follow from it, and attention's
    # where that is kept. Where attention's result is kept, no ring is gone around again, but what attends to each other
    # is brought together again. A layer in a group of several is gathered to make the group's inputs again, too.
    alone = layers if remat.every == 1 else int(rest == 1)
    again = Counter(entry=2 * layers, exit=alone + 2 * (layers - alone), exchange=layers, rounds=layers)
    if remat.keeps_all:
        again = Counter()
    if "attention_out" in remat.saves:
        again["exit"] = 0
    if RESULT in remat.saves:
        again["rounds"] = 0
    again["gather"] = settings.reshard_after_forward * (layers + (layers - alone))

    if stages and not stages.keeps_residuals:
        again["stack"] = 1
        if layers == 1:
            # Merged with what the stage does again, of which the last sum is needed by none.
            again |= Counter(entry=2, exit=1, exchange=1, gather=1)
        else:
            # In a loop to the end; what is in none, at the end, only the layer's own recomputation needs.
            again += forward(layers - (rest or (layers if groups == 1 else 0)))
    passes = forward(layers) + Counter(stack=1) + again
    return Counter({name: count * (stages.num_chunks if stages else 1) for name, count in passes.items()})


def _kv_heads_cut(config: ModelConfig, settings: TrafficSettings) -> bool:
    return config.num_kv_heads % settings.mesh["tensor"] == 0


def _activation_axes(names: Sequence[str], settings: TrafficSettings) -> frozenset[str]:
    if not settings.sequence_parallel:
        names = ["seq" if name == "residual_seq" else name for name in names]
    return mesh_axes(partition_spec(names, ACTIVATION_RULES, settings.mesh))


def _size(settings: TrafficSettings, axes: Sequence[str] | frozenset[str]) -> int:
    return math.prod(settings.mesh[axis] for axis in axes)
