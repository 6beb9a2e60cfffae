"""From a config to a pipeline: its schedule, which layers and tokens each part has; what does not go with it."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

from jaxpar.config import Config
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.pipeline import kinds, looped
from jaxpar.parallel.pipeline.auto import auto
from jaxpar.parallel.pipeline.kinds import KINDS
from jaxpar.parallel.pipeline.partition import partition_among_stages, token_slices
from jaxpar.parallel.pipeline.schedule import Placement, Schedule
from jaxpar.parallel.pipeline.validate import validate
from jaxpar.parallel.remat import Remat
from jaxpar.planning.pipeline import part_work, slice_flops, stage_times
from models.config import ModelConfig

_MOST_MICROBATCHES = 16384
"""The bubble is nothing long before, and a table's making goes by microbatches times stages."""
_MOST_PLACES = 512
"""For token slices to begin at."""


def make_schedule(config: Config, num_stages: int) -> Schedule | None:
    """Of the config's pipeline; None for one stage, which has one only where it is updated between microbatches. Raises
    ValueError for what cannot run, or not on so many."""
    parallel = config.parallel
    kind = KINDS.get(parallel.pipeline)
    if kind is None and parallel.pipeline != "auto":
        kinds.check_known(parallel.pipeline)
    if num_stages == 1 and (kind is None or kind.synchronous):
        return None
    if parallel.grad_accumulation > _MOST_MICROBATCHES:
        raise ValueError(
            f"--microbatches {parallel.grad_accumulation} with pipe={num_stages} is more than the {_MOST_MICROBATCHES} "
            "that a schedule's table is made for; take fewer, of more sequences each"
        )
    if parallel.pipeline == "auto":
        schedule = _searched(config, num_stages)
    elif parallel.pipeline_memory_limit is not None:
        raise ValueError(
            f"--pipeline-memory-limit {parallel.pipeline_memory_limit:g} has no use with --pipeline "
            f"{parallel.pipeline}, whose table is fixed; take --pipeline auto"
        )
    else:
        if kind is not None:
            # Before a table is made, which for many chunks takes long.
            chunks = max(parallel.chunks, kind.chunks[0])
            _layers_per_part(config, num_stages, chunks, "v" if chunks == kind.chunks[1] == 2 else "loop")
        schedule = kinds.make(
            parallel.pipeline,
            num_stages,
            parallel.grad_accumulation,
            parallel.chunks if parallel.chunks > 1 else None,
            parallel.slices if parallel.slices > 1 or (kind and kind.needs_slices) else None,
        )
    if parallel.zero == 2:
        raise ValueError(f"--zero 2 does not go with pipe={num_stages}, which keeps a step's gradients; take 1 or 3")
    _check(config, schedule)
    validate(schedule)
    return schedule


def _check(config: Config, schedule: Schedule) -> None:
    """Raise ValueError for settings that the kind of schedule has no place for."""
    if schedule.num_slices > 1 and config.model.num_experts:
        raise ValueError(
            f"--pipeline {schedule.kind} cuts sequences into slices, and a mixture of experts balances and fills its "
            "experts by whole sequences; take another schedule"
        )
    by_autodiff = schedule.kind in looped.KINDS
    for flag, is_set in (
        ("--spread-head", config.parallel.spread_head),
        ("--pipeline-residuals", config.parallel.pipeline_residuals),
    ):
        if is_set and (by_autodiff or schedule.num_slices > 1):
            raise ValueError(f"{flag} does not go with --pipeline {schedule.kind}; leave it out, or take 1f1b or zb-h1")


def _searched(config: Config, num_stages: int) -> Schedule:
    """The table that `auto` finds for the stages' modelled times."""
    parallel = config.parallel
    for flag, value in ("--chunks", parallel.chunks), ("--slices", parallel.slices):
        if value > 1:
            raise ValueError(
                f"--pipeline auto searches tables of one chunk and slice, not {flag} {value}; leave it out"
            )
    limit = math.inf if parallel.pipeline_memory_limit is None else parallel.pipeline_memory_limit
    if not limit >= 1:
        raise ValueError(f"--pipeline-memory-limit {limit:g} is below one microbatch's activations; take at least 1")
    counts = _layers_per_part(config, num_stages, 1, "loop")
    remat = Remat.parse(parallel.remat, max(counts))
    times = stage_times(config.model, config.data.seq_len, counts, remat)
    return auto(num_stages, parallel.grad_accumulation, times, limit)


def layers_per_part(config: Config, schedule: Schedule | None) -> tuple[int, ...]:
    """How many layers (with `moe_every`, units of so many) each part of the model has, in the model's order. Raises
    ValueError for what cannot be cut so."""
    if schedule is None:
        return (config.model.num_units,)
    return _layers_per_part(config, schedule.num_stages, schedule.num_chunks, schedule.placement)


def _layers_per_part(config: Config, num_stages: int, num_chunks: int, placement: Placement) -> tuple[int, ...]:
    model, given, num_parts = config.model, config.parallel.layers_per_stage, num_stages * num_chunks
    named = f"pipe={num_stages}" + (f" x {num_chunks} chunks" if num_chunks > 1 else "")
    num_units = model.num_units
    if num_units < num_parts:
        units = "" if num_units == model.num_layers else f", {num_units} units of the stack,"
        raise ValueError(
            f"--model.num-layers {model.num_layers}{units} is too few for {named}; each part needs a layer: take "
            f"{_num_layers(model, num_parts)} or more"
        )
    if given:
        return _parse_layers(given, model, num_parts, named)
    if num_units % num_parts == 0:
        return (num_units // num_parts,) * num_parts
    work, (of_first, of_unit) = part_work(model, config.data.seq_len), (_num_layers(model, n) for n in (0, 1))
    unit, embedding = work.layer * (of_unit - of_first), work.embedding + work.layer * of_first
    return partition_among_stages([unit] * num_units, num_stages, num_chunks, placement, embedding, work.head)


def _num_layers(model: ModelConfig, num_units: int) -> int:
    """Of a model like this one with a stack of so many units."""
    return model.num_dense_layers + num_units * model.moe_every if model.num_experts else num_units


def _parse_layers(text: str, model: ModelConfig, num_parts: int, named: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"--layers-per-stage {text} is no list of numbers; give {num_parts}, as in 7,8,8,7")
    counts = tuple(map(int, words))
    if len(counts) != num_parts:
        raise ValueError(f"--layers-per-stage {text} has {len(counts)} numbers; {named} takes {num_parts}")
    if 0 in counts:
        raise ValueError(f"--layers-per-stage {text} has a part without a layer; give each at least 1")
    if sum(counts) != model.num_units:
        unit = "layers" if model.num_units == model.num_layers else "units of the stack"
        raise ValueError(
            f"--layers-per-stage {text} adds up to {sum(counts)} {unit}, not to the model's {model.num_units}; change "
            f"one of them, or --model.num-layers to {_num_layers(model, sum(counts))}"
        )
    return counts


def slice_lengths(config: Config, mesh: Mapping[str, int], schedule: Schedule) -> tuple[int, ...]:
    """Of the token slices of a schedule that has some, on a mesh of these sizes: the dynamic program's, by
    modelled FLOPs. Raises ValueError."""
    if schedule.num_slices == 1:
        return ()
    if mesh["context"] > 1:
        raise ValueError(
            f"--pipeline {schedule.kind} cuts sequences into slices, context={mesh['context']} into parts of its own; "
            "take context=1 or another schedule"
        )
    seq_len = config.data.seq_len
    unit = mesh["tensor"] if config.parallel.sequence_parallel else 1
    # Cuts to the nearest of 64 places are even enough; a search among many more takes minutes.
    places = [n for n in range(schedule.num_slices, _MOST_PLACES + 1) if seq_len % (n * unit) == 0]
    if not places:
        cut = f", cut over tensor={unit}," if unit > 1 else ""
        raise ValueError(
            f"--seq-len {seq_len}{cut} has no {schedule.num_slices} to {_MOST_PLACES} equal places for --slices "
            f"{schedule.num_slices} to begin at; take a multiple of {64 * unit}, or fewer slices"
        )
    granularity = seq_len // max((n for n in places if n <= 64), default=places[0])
    time = partial(slice_flops, config.model)
    return token_slices(time, seq_len, schedule.num_stages, schedule.num_microbatches, granularity, schedule.num_slices)


def reshards(asked: Literal["auto", "always", "never"], num_stages: int) -> bool:
    """Whether a gathered weight is dropped after each use: by default, but in a pipeline, whose stages use theirs for
    one microbatch after another."""
    return num_stages == 1 if asked == "auto" else asked == "always"


def context_strategy(config: Config, mesh: Mapping[str, int], schedule: Schedule | None) -> ContextStrategy:
    """The config's, on a mesh of these sizes. Raises ValueError for what the schedule rules out."""
    parts_differ = schedule is not None and len({*layers_per_part(config, schedule)}) > 1
    branches = schedule is not None and (schedule.kind not in looped.KINDS or parts_differ)
    return ContextStrategy.parse(
        config.parallel.context_strategy, config.parallel.context_order, mesh["context"], branches
    )
