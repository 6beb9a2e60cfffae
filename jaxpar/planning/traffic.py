"""Bytes that each device moves per training step, by mesh axis and collective.

One formula for each strategy, as its file in jaxpar/parallel states it; here they are added up for a model and a
layout. A collective's bytes are those of the buffer whole over its axis: what an all-gather results in, what a
reduce-scatter, an all-reduce or an all-to-all starts from. (A ring sends (n - 1) / n of that, an all-reduce twice.)
Of one that goes in steps (see parallel.fsdp) each counts, by its own buffer.
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
from jaxpar.parallel.fsdp import IN_ONE, Folds
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
    """The most; with `moe_every`, units of so many."""
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
    dispatch: ExpertStrategy = field(default_factory=ExpertStrategy)
    """Of the platform that the step is compiled for."""
    folds: Folds = IN_ONE
    """Of the devices that the step is compiled for, see parallel.fsdp."""
    masks_by_place: bool = False
    """Whether attention's masks go by places in the sequence, as those of TPUs' kernel do, and not by positions."""
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
    """The traffic of one step over data, pipe, fsdp, expert, context and tensor."""
    experts = _experts(config, settings) if config.num_experts else ()
    activations = *_activations(config, settings), *_lookups(config, settings), *_context(config, settings)
    return _total((*_weights(config, settings), *activations, *experts), settings)


def weight_traffic(config: ModelConfig, settings: TrafficSettings) -> Traffic:
    """The part of step_traffic that moves weights and their gradients."""
    return _total(_weights(config, settings), settings)


def activation_traffic(config: ModelConfig, settings: TrafficSettings) -> Traffic:
    """The part of step_traffic that moves activations and their gradients, but between experts and in the lookup of
    embeddings: in proportion to a rank's tokens, whichever axes cut the batch."""
    return _total((*_activations(config, settings), *_context(config, settings)), settings)


def lookup_traffic(config: ModelConfig, settings: TrafficSettings) -> Traffic:
    """The part of step_traffic that looks up embeddings."""
    return _total(_lookups(config, settings), settings)


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
            for step in settings.folds.gathers(_in_order(axes, settings)):
                whole *= step.num_ranks(settings.mesh)
                yield step.axes, "all-gather", gathers * whole * settings.compute_bytes
        for axes, _, scatters in reversed(transfers):
            for step in settings.folds.scatters(_in_order(axes, settings)):
                yield step.axes, "reduce-scatter", scatters * whole * settings.reduce_bytes
                whole //= step.num_ranks(settings.mesh)
        owed = _activation_axes(parameter.summed_over, settings) | ({"pipe"} if parameter.is_at_end else set())
        yield owed - mesh_axes(spec), "all-reduce", parameter.count * part * settings.reduce_bytes


def _in_order(axes: frozenset[str], settings: TrafficSettings) -> tuple[str, ...]:
    """Those of several ranks, as they cut a dim."""
    ordered = *(axis for axis in STATE_RULES["embed"] if axis in axes), *(axes & {"pipe"})
    return tuple(axis for axis in ordered if settings.mesh[axis] > 1)


def _transfers(
    parameter: _Parameter, cut: frozenset[str], settings: TrafficSettings
) -> list[tuple[frozenset[str], int, int]]:
    """(axes, gathers, reduce-scatters) of one such parameter in a step, in the order of the gathers; the gradient is
    cut the other way round."""
    tokens, before = cut & gathered_axes(parameter.names), cut & _whole_in_stages(settings)
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
    embed, hidden, depth, units = config.embed_dim, config.mlp_dim, *_sizes(config, settings)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    tokens, residual = ("batch", "seq"), ("batch", "residual_seq")

    passes, dense, mixtures = _passes(config, settings), *_mlps_of_unit(config)
    first = _num_first_layers(config)

    def kernels(first: int, per_unit: int, *shapes: tuple[tuple[str, int], ...]) -> Iterator[_Parameter]:
        for shape in shapes:
            names, dims = zip(*shape)
            yield _Parameter(dims, names, tokens, per_unit * units, per_unit * passes["gather"])
            again = settings.reshard_after_forward
            yield _Parameter(dims, names, tokens, first, first * (1 + again), is_at_end=True)

    d, h, k, f = ("embed", embed), ("heads", heads), ("kv_heads", kv_heads), ("mlp", hidden)
    p = ("head_dim", head_dim)
    gate = 1 if config.mlp == "swiglu" else 0
    yield from kernels(first, dense + mixtures, (d, h, p), (d, k, p), (d, k, p), (h, p, d))
    yield from kernels(first, dense, (f, d), *[(d, f)] * (1 + gate))
    if config.num_experts:
        e, f = ("experts", config.num_experts), ("mlp", config.expert_mlp_dim)
        yield from kernels(0, mixtures, (e, f, d), *[(e, d, f)] * (1 + gate))
        over = *tokens, "mlp"
        yield _Parameter((embed, config.num_experts), ("vector", "vector"), over, units, 0)
        if config.balancing == "bias":
            yield _Parameter((config.num_experts,), ("vector",), over, units, 0)
        if config.num_shared_experts:
            f = "mlp", config.num_shared_experts * config.expert_mlp_dim
            yield from kernels(0, mixtures, (f, d), *[(d, f)] * (1 + gate))

    def vector(dim: int, name: str, summed_over: tuple[str, ...], count: int = depth) -> _Parameter:
        return _Parameter((dim,), (name,), summed_over, count, 0)

    per_norm = 2 if config.norm == "layernorm" else 1
    yield vector(embed, "vector", residual, 2 * depth * per_norm)
    yield _Parameter((embed,), ("vector",), residual, per_norm, 0, is_at_end=True)
    if config.qk_norm and config.qk_norm_over == "heads":
        yield _Parameter((heads, head_dim), ("heads", "head_dim"), tokens, depth, 0)
        yield _Parameter((kv_heads, head_dim), ("kv_heads", "head_dim"), tokens, depth, 0)
    elif config.qk_norm:
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
    """Stages' hops, tensor parallelism's reductions, the loss's sums over the vocabulary."""
    times, stages = settings.num_microbatches, settings.stages
    tokens = settings.batch_size * settings.seq_len // times // _size(settings, TOKEN_AXES)
    one = tokens * config.embed_dim * settings.compute_bytes
    stream, (depth, _), tensor = times * one, _sizes(config, settings), ("tensor",)
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
    if config.qk_norm and config.qk_norm_over == "heads":
        norms = sum(heads % settings.mesh["tensor"] == 0 for heads in (config.num_heads, config.num_kv_heads))
        squares = times * tokens * max(settings.compute_bytes, 4)
        yield tensor, "all-reduce", (passes["exchange"] + depth) * norms * squares

    over_vocab = ("tensor", "pipe") if spreads_head else tensor
    yield over_vocab, "all-reduce", times * 3 * tokens * max(settings.compute_bytes, 4)


def _lookups(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """The exchanges of embeddings, and of learned positions."""
    times = settings.num_microbatches
    tokens = times * (settings.batch_size * settings.seq_len // times // _size(settings, TOKEN_AXES))
    vocab = padded_vocab(config.vocab_size, settings.mesh)
    yield from _lookup(settings, (vocab, config.embed_dim), ("vocab", "embed"), tokens)
    if config.positions == "learned":
        yield from _lookup(settings, (config.max_seq_len, config.embed_dim), ("position", "embed"), tokens)


def _lookup(settings: TrafficSettings, dims: tuple[int, int], names: tuple[str, str], tokens: int) -> Iterator[_Flow]:
    stream = tokens * dims[1] * settings.compute_bytes
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
    times, (depth, _), passes = settings.num_microbatches, _sizes(config, settings), _passes(config, settings)
    tokens = settings.batch_size * settings.seq_len // times // _size(settings, TOKEN_AXES)
    arrays = 1 if settings.masks_by_place else 2
    yield ("context",), "all-gather", passes["stack"] * times * arrays * 4 * tokens * ranks

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


def _experts(config: ModelConfig, settings: TrafficSettings) -> Iterator[_Flow]:
    """What mixtures send over `expert`; of their choice over `context`, and of their loads."""
    strategy, ranks = settings.dispatch, settings.mesh["expert"]
    per_token, num_experts, short = config.num_experts_per_token, config.num_experts, settings.compute_bytes
    wide, times = max(short, 4), settings.num_microbatches
    rows = settings.batch_size // times // _size(settings, frozenset(BATCH_AXES))
    seq_len = settings.seq_len // settings.mesh["context"]
    tokens = rows * seq_len
    passes, (_, mixtures) = _passes(config, settings), _sizes(config, settings)
    there, back = times * passes["dispatch"], times * passes["results"]
    gradients = times * mixtures
    over = ("expert",)

    if strategy.dispatch == "capacity":
        whole = expert.capacity(settings.seq_len, num_experts, per_token, strategy.capacity_factor)
        buffer = num_experts * rows * expert.capacity_slots(whole, seq_len) * config.embed_dim * short
        yield over, "all-to-all", (there + back + 2 * gradients) * buffer
        order = 4 + (wide if strategy.capacity_order == "score" else 0)
        yield ("context",), "all-gather", there * settings.seq_len * rows * per_token * order
    elif strategy.exchange == "ragged":
        sent = tokens * per_token * config.embed_dim * short
        arrived = expert.arrivals(tokens, ranks, num_experts, per_token) * config.embed_dim * short
        yield over, "ragged-all-to-all", (there + gradients) * sent + (back + gradients) * arrived
        yield over, "all-gather", there * ranks * num_experts * 4
    else:
        stream, pairs = ranks * tokens * config.embed_dim * short, ranks * tokens * per_token
        yield over, "all-gather", (there + gradients) * stream + there * pairs * (4 + wide)
        yield over, "reduce-scatter", gradients * (2 * stream + pairs * wide)
    if config.balancing == "loss":
        axes = TOKEN_AXES if config.balancing_over == "batch" else ("context",)
        yield axes, "all-reduce", there * rows * num_experts * wide


def ideal_expert_bytes(config: ModelConfig, settings: TrafficSettings) -> float:
    """What a rank would send over `expert` in a step if its experts had equal loads and nothing else were sent: tokens
    to their experts and back, forward and backward."""
    tokens = settings.batch_size * settings.seq_len // _size(settings, TOKEN_AXES)
    pairs = expert.ideal_bytes(
        tokens, config.num_experts_per_token, config.embed_dim, settings.mesh["expert"], settings.compute_bytes
    )
    return _sizes(config, settings)[1] * pairs if config.num_experts else 0.0


def _sizes(config: ModelConfig, settings: TrafficSettings) -> tuple[int, int]:
    """(layers, units of the stack) of a device, which has the first layers, in no unit, beside its own."""
    units = settings.stages.num_chunks * settings.stages.layers_per_chunk if settings.stages else config.num_units
    return units * sum(_mlps_of_unit(config)) + _num_first_layers(config), units


def _mlps_of_unit(config: ModelConfig) -> tuple[int, int]:
    """(dense MLPs, mixtures of experts) in a unit of the stack."""
    return (config.moe_every - 1, 1) if config.num_experts else (1, 0)


def _num_first_layers(config: ModelConfig) -> int:
    return config.num_layers - config.num_units * sum(_mlps_of_unit(config))


def _passes(config: ModelConfig, settings: TrafficSettings) -> Counter[str]:
    """What a device's layers do per microbatch, forward and again, before their gradients: how often they enter tensor-
    parallel weights and leave them, bring together what attends to each other, go around a ring, send tokens to experts
    and their results back, gather weights (of a whole unit each), and how often a stack is begun."""
    stages = settings.stages
    dense, mixtures = _mlps_of_unit(config)
    per_unit = dense + mixtures
    units = stages.layers_per_chunk if stages else config.num_units
    remat = Remat.parse(settings.remat, units)
    groups, rest = divmod(units, remat.every)

    def forward(layers: int, mixtures: int, gathers: int) -> Counter[str]:
        sent = Counter(dispatch=mixtures, results=mixtures, gather=gathers)
        return sent + Counter(entry=2 * layers, exit=2 * layers, exchange=layers, rounds=layers)

    def of_units(count: int) -> Counter[str]:
        return forward(count * per_unit, count * mixtures, count)

    def again(count: int, layers: int, mixtures: int) -> Counter[str]:
        """Of `count` groups of so many layers each, that are done again one by one: but for a group's last sum, which
        nobody needs, and what is kept. Where attention's result is, no ring is gone around again, but what attends to
        each other is brought together again."""
        if remat.keeps_all:
            return Counter()
        exits = (0 if "attention_out" in remat.saves else layers) + (0 if "mlp_out" in remat.saves else layers - 1)
        done = Counter(entry=2 * layers, exit=exits, exchange=layers, dispatch=mixtures)
        done["rounds"] = 0 if RESULT in remat.saves else layers
        done["results"] = 0 if expert.RESULT in remat.saves else mixtures
        return Counter({name: count * number for name, number in done.items()})

    # A unit in a group of several is gathered to make the group's inputs again, too.
    alone = units if remat.every == 1 else int(rest == 1)
    repeated = again(alone, per_unit, mixtures) + forward((units - alone) * per_unit, (units - alone) * mixtures, 0)
    repeated["gather"] = settings.reshard_after_forward * (units + (units - alone))

    if stages and not stages.keeps_residuals:
        repeated["stack"] = 1
        if units == 1:
            # Merged with what the stage does again, of which the last sum is needed by none.
            repeated |= again(1, per_unit, mixtures) if not remat.keeps_all else _but_last_sum(of_units(1))
            repeated["gather"] = max(repeated["gather"], 1)
        else:
            # In a loop to the end; what is in none, at the end, only the layer's own recomputation needs.
            repeated += of_units(units - (rest or (units if groups == 1 else 0)))
    passes = of_units(units) + Counter(stack=1) + repeated
    passes = Counter({name: count * (stages.num_chunks if stages else 1) for name, count in passes.items()})
    first = _num_first_layers(config)
    of_first = forward(first, 0, 0) + again(first, 1, 0)
    # Where the embedding has a branch of its own for its gradient, they are run again there.
    return passes + of_first + (forward(first, 0, 0) if stages else Counter())


def _but_last_sum(passes: Counter[str]) -> Counter[str]:
    return passes - Counter(exit=1)


def _kv_heads_cut(config: ModelConfig, settings: TrafficSettings) -> bool:
    return config.num_kv_heads % settings.mesh["tensor"] == 0


def _activation_axes(names: Sequence[str], settings: TrafficSettings) -> frozenset[str]:
    if not settings.sequence_parallel:
        names = ["seq" if name == "residual_seq" else name for name in names]
    return mesh_axes(partition_spec(names, ACTIVATION_RULES, settings.mesh))


def _size(settings: TrafficSettings, axes: Sequence[str] | frozenset[str]) -> int:
    return math.prod(settings.mesh[axis] for axis in axes)
