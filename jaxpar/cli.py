"""`jaxpar`: the commands beside training."""

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from jaxpar import config as configs
from meshes import num_devices_of, parse_mesh
from models.count import num_parameters
from models.presets import preset, preset_names

_VERIFY = """Hold a mesh against one device: initial parameters, loss, every gradient; and the traffic of the step, as
compiled for H100s, against the strategies' formulas. The model is shrunk, its structure kept. Exit status 1 where
something is off."""
_ATTENTION = """Hold a context strategy against dense attention: values and gradients, in float64 on emulated devices at
a short length; at the asked one each rank's FLOPs, bytes sent and, as compiled for H100s, memory. Exit status 1 where
an error is off."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def main(args: Sequence[str] | None = None) -> None:
    parser = _Parser(prog="jaxpar", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", add_help=False, help=_VERIFY)
    verify.add_argument("--json", action="store_true")
    models = commands.add_parser("models", help="the models known by name, with their exact parameter counts")
    models.add_argument("--json", action="store_true")
    _add_attention(commands)
    _add_checkpoint(commands)
    _add_pipeline(commands)
    try:
        given, rest = parser.parse_known_args(args)
        if given.command == "verify":
            _verify(rest, given.json)
        elif rest:
            known = sorted(f"--{name.replace('_', '-')}" for name in vars(given).keys() - {"command", "action", "path"})
            raise ValueError(f"unknown flag {rest[0]}; known: {', '.join(known)}")
        elif given.command == "checkpoint":
            _checkpoint(given)
        elif given.command == "attention":
            _attention(given)
        elif given.command == "schedule":
            _schedule(given)
        elif given.command == "partition":
            _partition(given)
        else:
            _models(given.json)
    except ValueError as error:
        configs.exit_with(error)


def _models(as_json: bool) -> None:
    counts = {name: num_parameters(preset(name)) for name in preset_names()}
    if as_json:
        print(json.dumps(counts))
        return
    table = Table("model", "parameters")
    table.columns[1].justify = "right"
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    Console().print(table)


def _verify(args: Sequence[str], as_json: bool) -> None:
    # Here, since they take a second to import, and devices must be counted before JAX is.
    from jaxpar import verify
    from jaxpar.training import runtime

    config = configs.parse(args, prog="jaxpar verify", description=_VERIFY)
    mesh = parse_mesh(config.parallel.mesh, config.run.emulate or num_devices_of(config.parallel.mesh) or 8)
    num_devices = math.prod(mesh.values())
    if num_devices > verify.MAX_DEVICES:
        raise ValueError(
            f"--mesh {config.parallel.mesh} has {num_devices} devices; verify runs it on emulated ones, "
            f"{verify.MAX_DEVICES} at most: take smaller axes of the same kinds"
        )
    config = configs.with_mesh(config, mesh)
    runtime.emulate(num_devices)
    runtime.prepare(dataclasses.replace(config, run=dataclasses.replace(config.run, precision="float64", emulate=0)))
    verdict = verify.verify(config, mesh)
    if as_json:
        print(json.dumps(dataclasses.asdict(verdict)))
    else:
        _print(verdict)
    sys.exit(0 if verdict.ok else 1)


def _print(verdict) -> None:
    console = Console()
    console.print(
        f"initial parameters bitwise equal: {verdict.init_bitwise_equal}\n"
        f"loss error:         {verdict.loss_error:.1e}\n"
        f"max gradient error: {verdict.max_gradient_error:.1e} ({verdict.worst_parameter})",
        highlight=False,
    )
    table = Table(
        "axis", "collective", "count", "bytes", "expected", title="traffic per device and step, as compiled for H100s"
    )
    pairs = {
        (axes, op)
        for side in (verdict.collectives, verdict.collectives_expected)
        for axes, ops in side.items()
        for op in ops
    }
    for axes, op in sorted(pairs):
        found = verdict.collectives.get(axes, {}).get(op, {"count": 0, "bytes": 0})
        expected = verdict.collectives_expected.get(axes, {}).get(op, {"bytes": 0})
        table.add_row(axes, op, str(found["count"]), f"{found['bytes']:,}", f"{expected['bytes']:,}")
    console.print(table)
    console.print("[green]ok[/]" if verdict.ok else "[red]not ok[/]")


def _add_attention(commands) -> None:
    attention = commands.add_parser("attention", help=_ATTENTION, description=_ATTENTION)
    attention.add_argument(
        "--strategy", "--context-strategy", default="ring", metavar="ring|ulysses|allgather|hybrid=RxU"
    )
    attention.add_argument("--order", "--context-order", default="zigzag", choices=("zigzag", "contiguous", "striped"))
    sizes = {"ranks": 8, "seq-len": 65536, "heads": 8, "kv-heads": 2, "head-dim": 64}
    for name, default in sizes.items():
        attention.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=f"by default {default}")
    attention.add_argument("--window", "--sliding-window", type=int, metavar="N", help="keys that a query sees")
    attention.add_argument(
        "--documents", type=_positive, default=1, metavar="N", help="that share the sequence, alike long"
    )
    attention.add_argument("--json", action="store_true")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def _attention(given: argparse.Namespace) -> None:
    # Here, since they take a second to import, and devices must be counted before JAX is.
    import jax

    from jaxpar.attention_report import Case, report
    from jaxpar.parallel.context import ContextStrategy
    from jaxpar.planning.attention import AttentionSize
    from jaxpar.training import runtime

    case = Case(
        strategy=ContextStrategy.parse(given.strategy, given.order, given.ranks),
        ranks=given.ranks,
        size=AttentionSize(given.seq_len, given.heads, given.kv_heads, given.head_dim),
        window=given.window,
        num_documents=given.documents,
    )
    case.check()
    runtime.emulate(given.ranks)
    jax.config.update("jax_enable_x64", True)
    found = report(case)
    if given.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        _print_attention(found)
    sys.exit(0 if found.ok else 1)


def _print_attention(found) -> None:
    flops, mib = found.flops_per_rank, 2**20
    table = Table("per rank, one layer, one sequence", "", title="attention")
    table.columns[1].justify = "right"
    for name, value in {
        "forward GFLOPs, mean": f"{sum(flops) / len(flops) / 1e9:,.1f}",
        "busiest / mean": f"{max(flops) * len(flops) / sum(flops):.3f}",
        "all ranks / dense causal": f"{sum(flops) / found.flops_dense_causal:.3f}",
        "MiB sent, forward": f"{found.bytes_sent_per_rank_forward / mib:,.1f}",
        "MiB sent, backward": f"{found.bytes_sent_per_rank_backward / mib:,.1f}",
        "MiB of temporaries, compiled for H100s": f"{found.peak_temp_bytes_per_rank / mib:,.1f}",
        "max error": f"{found.max_error:.1e}",
        "max gradient error": f"{found.max_gradient_error:.1e}",
    }.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print("[green]ok[/]" if found.ok else "[red]not ok[/]")


def _add_checkpoint(commands) -> None:
    checkpoint = commands.add_parser("checkpoint", help="list, describe and convert a run's checkpoints")
    actions = checkpoint.add_subparsers(dest="action", required=True)
    ls = actions.add_parser("ls", help="every checkpoint of a run, whole or damaged; reads them all")
    ls.add_argument("path", metavar="RUN_DIR")
    show = actions.add_parser("show", help="settings and parameters of one")
    convert = actions.add_parser("convert", help="its parameters as one safetensors file, by dotted name")
    for action in (show, convert):
        action.add_argument("path", metavar="RUN_DIR[/checkpoints/STEP]", help="by default the newest whole one")
    for action in (ls, show):
        action.add_argument("--json", action="store_true")
    convert.add_argument("--to", metavar="FILE.safetensors", required=True)
    convert.add_argument("--dtype", help="float32, bfloat16 or float16; else as stored")
    convert.add_argument("--ema", action="store_true", help="the moving average of the parameters in their place")
    convert.add_argument("--force", action="store_true", help="overwrite the file")


def _checkpoint(given: argparse.Namespace) -> None:
    # Here, since they take a second to import.
    import jax

    from jaxpar.training.checkpoints import export

    jax.config.update("jax_platforms", "cpu")
    path = Path(given.path)
    if given.action == "ls":
        _ls(export.list_checkpoints(path), given.json)
    elif given.action == "show":
        _show(export.summary(export.find(path)), given.json)
    else:
        size = export.convert(export.find(path), Path(given.to), given.dtype, ema=given.ema, force=given.force)
        print(f"{given.to}: {size:,} bytes")


def _ls(checkpoints, as_json: bool) -> None:
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in checkpoints]))
        return
    table = Table("step", "bytes", "age", "state")
    for column in table.columns[:3]:
        column.justify = "right"
    for each in checkpoints:
        minutes = int(time.time() - each.time) // 60
        age = f"{minutes // 1440}d {minutes // 60 % 24:02}:{minutes % 60:02}"
        table.add_row(str(each.step), f"{each.size:,}", age, f"damaged: {each.damage}" if each.damage else "whole")
    Console().print(table)


def _show(summary: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    table = Table("parameter", "shape", "dtype", "count")
    table.columns[3].justify = "right"
    for name, leaf in summary["parameters"].items():
        table.add_row(name, " x ".join(map(str, leaf["shape"])), leaf["dtype"], f"{leaf['count']:,}")
    config, position = summary["config"], summary["position"]
    print(
        f"{summary['path']}: {config['model']['name']}, step {position['step']} of {config['run']['steps']}, "
        f"{position['tokens']:,} tokens of {config['data']['source']}\n"
        f"written on {config['parallel']['mesh']}, {config['optimizer']['name']}, {config['run']['precision']}"
    )
    Console().print(table)
    print(
        f"{summary['count']:,} parameters, {summary['bytes']:,} bytes; with the optimizer's state "
        f"{summary['state_bytes']:,} bytes"
    )


def _add_pipeline(commands) -> None:
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
    partition = commands.add_parser(
        "partition",
        help="layers to pipeline stages, so that the slowest is fastest; with --slices, a sequence's tokens to slices",
    )
    partition.add_argument("--model", required=True)
    partition.add_argument("--stages", type=int, required=True)
    partition.add_argument("--chunks", type=int, help="of the model, per stage; 1 by default")
    partition.add_argument("--placement", choices=("loop", "v"), help="of the chunks: zb-v and dualpipe-v have a v")
    partition.add_argument("--seq-len", type=int, help="tokens, for attention's share; the model's own by default")
    partition.add_argument(
        "--layer-times",
        metavar="E,L1,...,Ln,H",
        help="measured times of the embedding, each layer and the head; FLOPs by default",
    )
    partition.add_argument("--slices", action="store_true", help="cut the tokens, for terapipe: the shortest latency")
    partition.add_argument("--microbatches", type=_positive, metavar="N", help="that follow one another; 1 by default")
    partition.add_argument(
        "--granularity",
        type=_positive,
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


def _schedule(given: argparse.Namespace) -> None:
    # Here, since matplotlib takes a second to import.
    from jaxpar.parallel.pipeline import draw
    from jaxpar.parallel.pipeline.auto import auto
    from jaxpar.parallel.pipeline.kinds import make
    from jaxpar.parallel.pipeline.simulate import Times, simulate
    from jaxpar.parallel.pipeline.validate import validate

    if given.draw is not None:
        draw.check_path(given.draw)
    forward, backward, weight = _numbers("--times", given.times, 3, "F,B,W")
    times = Times(forward, backward, weight, given.hop)
    if given.kind == "auto":
        if (given.chunks or 1, given.slices or 1) != (1, 1):
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
    slices = token_slices(time, seq_len, stages, microbatches, given.granularity or coarse)
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
