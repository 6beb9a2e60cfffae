"""`jaxpar schedule` and `jaxpar partition`."""

import argparse
import itertools
import json
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpar.cli.arguments import positive
from models.presets import preset


def add(commands) -> None:
    schedule = commands.add_parser("schedule", help="a pipeline schedule: its table, time, bubble and memory")
    schedule.add_argument("--kind", default="1f1b", help="auto searches for the smallest bubble under --memory-limit")
    schedule.add_argument("--stages", type=int, required=True)
    schedule.add_argument("--microbatches", type=int, required=True)
    schedule.add_argument("--chunks", type=int, help="of the model, per stage")
    schedule.add_argument("--slices", type=int, help="of a microbatch's tokens")
    schedule.add_argument(
        "--times",
        default="1,1,1",
        metavar="F,B,W",
        help="of a whole stage: forward, input gradient, weight gradient; a kind that does not split takes B + W for "
        "its backward pass",
    )
    schedule.add_argument("--hop", type=float, default=0.0, help="time from stage to stage; overlaps with compute")
    schedule.add_argument(
        "--memory-limit", type=float, metavar="X", help="per stage, in activations of one microbatch in one stage"
    )
    schedule.add_argument(
        "--deferred-size", type=float, default=0.5, metavar="X", help="of a weight gradient that waits, in the same"
    )
    schedule.add_argument("--draw", type=Path, metavar="FILE.svg|png")
    schedule.add_argument("--json", action="store_true")
    schedule.set_defaults(run=_schedule)
    partition = commands.add_parser(
        "partition",
        help="layers to pipeline stages, so that the slowest is fastest; with --slices, a sequence's tokens to slices",
    )
    partition.add_argument("--model", required=True)
    partition.add_argument("--stages", type=int, required=True)
    partition.add_argument("--chunks", type=int, help="of the model, per stage; 1 by default")
    partition.add_argument("--placement", choices=("loop", "v"), help="of the chunks: zb-v and dualpipe-v have a v")
    partition.add_argument("--seq-len", type=positive, help="tokens, for attention's share; the model's own by default")
    partition.add_argument(
        "--layer-times",
        metavar="E,L1,...,Ln,H",
        help="measured times of the embedding, each layer and the head; FLOPs by default",
    )
    partition.add_argument("--slices", action="store_true", help="cut the tokens, for terapipe: the shortest latency")
    partition.add_argument("--microbatches", type=positive, metavar="N", help="that follow one another; 1 by default")
    partition.add_argument(
        "--granularity",
        type=positive,
        metavar="N",
        help="slices are multiples of so many tokens; about a 64th by default",
    )
    partition.add_argument(
        "--slice-overhead",
        type=int,
        metavar="N",
        help="tokens whose work a slice costs beside its own; 128 by default, the rows of a matmul's tile",
    )
    partition.add_argument("--json", action="store_true")
    partition.set_defaults(run=_partition)


def _schedule(given: argparse.Namespace) -> None:
    # Here, since matplotlib takes a second to import.
    from jaxpar.parallel.pipeline import draw
    from jaxpar.parallel.pipeline.auto import auto
    from jaxpar.parallel.pipeline.kinds import make
    from jaxpar.parallel.pipeline.simulate import Times, simulate
    from jaxpar.parallel.pipeline.validate import validate

    if given.draw is not None:
        draw.check_path(given.draw)
    _check_size(given)
    forward, backward, weight = _numbers("--times", given.times, 3, "F,B,W")
    times = Times(forward, backward, weight, given.hop)
    if given.kind == "auto":
        if not {given.chunks, given.slices} <= {None, 1}:
            raise ValueError("--kind auto searches tables of one chunk and one slice; leave --chunks and --slices out")
        limit = math.inf if given.memory_limit is None else given.memory_limit
        table = auto(given.stages, given.microbatches, times, limit, given.deferred_size)
    else:
        table = make(given.kind, given.stages, given.microbatches, given.chunks, given.slices)
    validate(table)
    report = simulate(table, times, given.deferred_size)
    peak = max(report.peak_memory)
    if given.memory_limit is not None and not peak <= given.memory_limit + 1e-9:
        raise ValueError(
            f"{given.kind} holds {peak:g} activations, above --memory-limit {given.memory_limit:g}; raise it, or take "
            "--kind auto"
        )
    if given.draw is not None:
        draw.save(table, report, given.draw, given.deferred_size)
    summary = {
        "kind": given.kind,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "ticks": table.num_ticks,
        "makespan": report.makespan,
        "lockstep_makespan": report.lockstep_makespan,
        "bubble_of_total": report.bubble_of_total,
        "bubble_of_ideal": report.bubble_of_ideal,
        "bubble_longest_stage": report.bubble_longest_stage,
        "utilisation": report.utilisation,
        "peak_activations": report.peak_activations,
        "peak_deferred": report.peak_deferred,
    }
    if given.json:
        rows = [[action and action.label(table.num_chunks, table.num_slices) for action in row] for row in table.table]
        print(json.dumps(summary | {"table": rows}))
        return
    console = Console()
    console.print(draw.text(table, console.width), end="")
    shown = Table("", "", show_header=False)
    for name, value in summary.items():
        numbers = value if isinstance(value, tuple) else (value,)
        shown.add_row(name, " ".join(f"{n:.5g}" if isinstance(n, float) else str(n) for n in numbers))
    console.print(shown)


def _check_size(given: argparse.Namespace) -> None:
    """A table takes some 50 microseconds an action, a search far longer, a bar of a drawing a millisecond."""
    parts = max(given.chunks or 1, 1) * max(given.slices or 1, 1)
    actions = 2 * given.stages * given.microbatches * parts
    most = 20_000 if given.kind == "auto" else 10_000 if given.draw is not None else 200_000
    if actions > most:
        what = "a search" if given.kind == "auto" else "a drawing" if given.draw is not None else "a table"
        raise ValueError(
            f"{given.stages} stages x {given.microbatches} microbatches are {actions:,} actions, {what} has at most "
            f"{most:,}; lower one of them"
        )


_OF_LAYERS = ("chunks", "placement", "layer_times")
_OF_SLICES = ("microbatches", "granularity", "slice_overhead")


def _partition(given: argparse.Namespace) -> None:
    for name in _OF_LAYERS if given.slices else _OF_SLICES:
        if getattr(given, name) is not None:
            flag = name.replace("_", "-")
            of = "layers; leave it or --slices out" if given.slices else "token slices; give --slices too"
            raise ValueError(f"--{flag} is of {of}")
    (_partition_tokens if given.slices else _partition_layers)(given)


def _partition_layers(given: argparse.Namespace) -> None:
    from jaxpar.parallel.pipeline.partition import partition_among_stages
    from jaxpar.parallel.pipeline.schedule import Placement, part_of
    from jaxpar.planning.pipeline import part_work

    model, stages = preset(given.model), given.stages
    placement: Placement = given.placement or "loop"
    chunks = 1 if given.chunks is None else given.chunks
    if stages < 1 or chunks < 1:
        raise ValueError(f"--stages {stages} --chunks {chunks}: no parts; take at least 1 of each")
    if placement == "v" and chunks != 2:
        raise ValueError(f"--placement v has two chunks per stage, not {chunks}; give --chunks 2")
    if given.layer_times is None:
        work = part_work(model, given.seq_len or model.max_seq_len)
        embedding, head, layers = work.embedding, work.head, [work.layer] * model.num_layers
    else:
        form = f"the embedding's, {model.num_layers} layers' and the head's"
        embedding, *layers, head = _numbers("--layer-times", given.layer_times, model.num_layers + 2, form)
    counts = partition_among_stages(layers, stages, chunks, placement, embedding, head)
    cuts = [sum(counts[:part]) for part in range(len(counts) + 1)]
    of_parts = [sum(layers[start:end]) for start, end in itertools.pairwise(cuts)]
    of_parts[0] += embedding
    of_parts[-1] += head
    parts_of = [[part_of(placement, stages, stage, chunk) for chunk in range(chunks)] for stage in range(stages)]
    times = [sum(of_parts[part] for part in parts) for parts in parts_of]
    balance = sum(times) / len(times) / max(times)
    if given.json:
        summary = {"model": model.name, "stages": stages, "chunks": chunks, "layers": counts}
        print(json.dumps(summary | {"times": [time / max(times) for time in times], "balance": balance}))
        return
    table = Table("stage", "layers", "time, of the slowest")
    for column in table.columns:
        column.justify = "right"
    for stage, (parts, time_taken) in enumerate(zip(parts_of, times)):
        table.add_row(str(stage), " + ".join(str(counts[part]) for part in parts), f"{time_taken / max(times):.3f}")
    Console().print(table)
    print(f"balance {balance:.1%}: what uneven stages leave of their time")


def _partition_tokens(given: argparse.Namespace) -> None:
    from jaxpar.parallel.pipeline.partition import latency, token_slices
    from jaxpar.planning.pipeline import slice_flops

    model, stages, microbatches = preset(given.model), given.stages, given.microbatches or 1
    seq_len = given.seq_len or model.max_seq_len
    overhead = 128 if given.slice_overhead is None else given.slice_overhead
    if stages < 1 or seq_len < 1 or overhead < 0:
        raise ValueError(
            f"--stages {stages} --seq-len {seq_len} --slice-overhead {overhead}: take at least 1 stage and token, and "
            "no negative overhead"
        )
    fixed = slice_flops(model, overhead, 0)

    def time(length: int, before: int) -> float:
        return (fixed + slice_flops(model, length, before)) / stages

    coarse = next(length for length in range(-(-seq_len // 64), seq_len + 1) if seq_len % length == 0)
    granularity = given.granularity or coarse
    if not 2 <= seq_len // granularity <= 512 and seq_len > 1:
        raise ValueError(
            f"--seq-len {seq_len} in pieces of {granularity} tokens has {seq_len // granularity} places to cut at, not "
            "2 to 512; give another --granularity, or a length that has more divisors"
        )
    slices = token_slices(time, seq_len, stages, microbatches, granularity)
    times = [time(length, sum(slices[:place])) for place, length in enumerate(slices)]
    faster = latency([time(seq_len, 0)], stages, microbatches) / latency(times, stages, microbatches)
    if given.json:
        summary = {"model": model.name, "stages": stages, "microbatches": microbatches, "seq_len": seq_len}
        print(json.dumps(summary | {"slices": slices, "times": [t / max(times) for t in times], "speedup": faster}))
        return
    table = Table("slice", "tokens", "time, of the slowest")
    for column in table.columns:
        column.justify = "right"
    for place, (length, time_taken) in enumerate(zip(slices, times)):
        table.add_row(str(place), str(length), f"{time_taken / max(times):.3f}")
    Console().print(table)
    print(f"forward pass {faster:.2f}x as fast as with whole sequences")


def _numbers(flag: str, text: str, count: int, form: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text!r} is no list of numbers; give {count}: {form}") from None
    if len(numbers) != count:
        raise ValueError(f"{flag} has {len(numbers)} numbers; give {count}: {form}")
    return numbers
