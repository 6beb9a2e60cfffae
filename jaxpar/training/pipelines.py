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


def make_schedule(config: Config, num_stages: int) -> Schedule | None:
    """Of the config's pipeline; None for one stage, which has one only where it is updated between microbatches. Raises
    ValueError for what cannot run, or not on so many."""
    parallel = config.parallel
    kind = KINDS.get(parallel.pipeline)
    if num_stages == 1 and (kind is None or kind.synchronous):
        return None
    if parallel.pipeline == "auto":
        schedule = _searched(config, num_stages)
    elif parallel.pipeline_memory_limit is not None:
        raise ValueError(
            f"--pipeline-memory-limit {parallel.pipeline_memory_limit:g} has no use with --pipeline "
            f"{parallel.pipeline}, whose table is fixed; take --pipeline auto"
        )
    else:
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
    if parallel.chunks > 1:
        raise ValueError(f"--pipeline auto searches tables of one chunk, not --chunks {parallel.chunks}; leave it out")
    limit = math.inf if parallel.pipeline_memory_limit is None else parallel.pipeline_memory_limit
    if not limit >= 1:
        raise ValueError(f"--pipeline-memory-limit {limit:g} is below one microbatch's activations; take at least 1")
    counts = _layers_per_part(config, num_stages, 1, "loop")
    remat = Remat.parse(parallel.remat, max(counts))
    times = stage_times(config.model, config.data.seq_len, counts, remat)
    return auto(num_stages, parallel.grad_accumulation, times, limit)


def layers_per_part(config: Config, schedule: Schedule | None) -> tuple[int, ...]:
    """How many layers each part of the model has, in the model's order. Raises ValueError for what cannot be cut so."""
    if schedule is None:
        return (config.model.num_layers,)
    return _layers_per_part(config, schedule.num_stages, schedule.num_chunks, schedule.placement)


def _layers_per_part(config: Config, num_stages: int, num_chunks: int, placement: Placement) -> tuple[int, ...]:
    model, given, num_parts = config.model, config.parallel.layers_per_stage, num_stages * num_chunks
    named = f"pipe={num_stages}" + (f" x {num_chunks} chunks" if num_chunks > 1 else "")
    if model.num_layers < num_parts:
        raise ValueError(
            f"--model.num-layers {model.num_layers} is too few for {named}; each part needs a layer: take {num_parts} "
            "or more"
        )
    if given:
        return _parse_layers(given, model.num_layers, num_parts, named)
    if model.num_layers % num_parts == 0:
        return (model.num_layers // num_parts,) * num_parts
    work = part_work(model, config.data.seq_len)
    times = [work.layer] * model.num_layers
    return partition_among_stages(times, num_stages, num_chunks, placement, work.embedding, work.head)


def _parse_layers(text: str, num_layers: int, num_parts: int, named: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"--layers-per-stage {text} is no list of numbers; give {num_parts}, as in 7,8,8,7")
    counts = tuple(map(int, words))
    if len(counts) != num_parts:
        raise ValueError(f"--layers-per-stage {text} has {len(counts)} numbers; {named} takes {num_parts}")
    if 0 in counts:
        raise ValueError(f"--layers-per-stage {text} has a part without a layer; give each at least 1")
    if sum(counts) != num_layers:
        raise ValueError(
            f"--layers-per-stage {text} adds up to {sum(counts)} layers, not to the model's {num_layers}; change one "
            f"of them, or --model.num-layers to {sum(counts)}"
        )
    return counts


def slice_lengths(config: Config, mesh: Mapping[str, int], schedule: Schedule) -> tuple[int, ...]:
    """Of the token slices of a schedule that has some, on a mesh of these sizes: the dynamic program's, by
    modelled FLOPs. Raises ValueError."""
    if not KINDS[schedule.kind].needs_slices:
        return ()
    if mesh["context"] > 1:
        raise ValueError(
            f"--pipeline {schedule.kind} cuts sequences into slices, context={mesh['context']} into parts of its own; "
            "take context=1 or another schedule"
        )
    seq_len = config.data.seq_len
    unit = mesh["tensor"] if config.parallel.sequence_parallel else 1
    fine = [n for n in range(unit, seq_len + 1, unit) if seq_len % n == 0 and seq_len // n >= schedule.num_slices]
    # Cuts to the nearest of 64 places are even enough.
    granularity = next((n for n in fine if seq_len // n <= 64), fine[-1] if fine else unit)
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
