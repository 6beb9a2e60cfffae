"""`jaxpar plan`."""

import argparse
import itertools
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpar.cli.arguments import positive
from meshes import parse_mesh
from meshes.clusters import load_cluster
from models.presets import load_model

_HELP = """Find how to lay a model on a cluster: which mesh, schedule, microbatches, remat and ZeRO stage are fastest
and fit, and why the others fell out. With --mesh: what that mesh needs and takes, at its best."""
_NUM_EXAMPLES = 3
_NUM_FRONT = 6


def add(commands) -> None:
    plan = commands.add_parser("plan", help="find the fastest layout that fits", description=_HELP)
    plan.add_argument("--model", required=True, metavar="NAME|FILE.toml")
    plan.add_argument(
        "--cluster", required=True, metavar="NAME", help="such as llama3-h100, dgx-h100, or a chip's name"
    )
    plan.add_argument("--devices", type=positive, required=True, metavar="N")
    plan.add_argument("--seq-len", type=positive, required=True, metavar="N", help="tokens per sequence")
    plan.add_argument("--batch-size", type=positive, required=True, metavar="N", help="sequences per step")
    plan.add_argument("--mesh", metavar="AXIS=N,...", help="a breakdown of this one alone")
    plan.add_argument("--pipeline", metavar="KIND", help="one schedule alone; by default all that run are tried")
    plan.add_argument("--microbatches", type=positive, metavar="N")
    plan.add_argument("--chunks", type=positive, metavar="N", help="of the model, per stage")
    plan.add_argument("--remat", metavar="KIND")
    plan.add_argument("--zero", type=int, choices=(1, 2, 3))
    plan.add_argument("--context-strategy", metavar="KIND")
    plan.add_argument("--precision", default="bfloat16", help="of the layers' matmuls; by default bfloat16")
    plan.add_argument("--framework", default="jaxpar", help="whose memory and overheads; by default our own")
    plan.add_argument("--top", type=positive, default=10, metavar="N", help="layouts to show; by default 10")
    plan.add_argument("--explain", action="store_true", help="examples of what fell out, and on which links axes lie")
    plan.add_argument(
        "--plot", type=Path, metavar="FILE.svg|png", help="memory by part of each layout shown; FILE-time: its seconds"
    )
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=_plan)


def _plan(given: argparse.Namespace) -> None:
    # Here, since they take a second to import.
    from jaxpar.planning import memory_plot, plots
    from jaxpar.planning.planner import plan
    from jaxpar.planning.space import Request

    if given.plot is not None:
        memory_plot.check_path(given.plot)
    request = Request(
        model=load_model(given.model),
        cluster=load_cluster(given.cluster),
        num_devices=given.devices,
        seq_len=given.seq_len,
        batch_size=given.batch_size,
        mesh=None if given.mesh is None else parse_mesh(given.mesh, given.devices),
        pipeline=given.pipeline,
        chunks=given.chunks,
        num_microbatches=given.microbatches,
        remat=given.remat,
        zero=given.zero,
        context=given.context_strategy,
        precision=given.precision,
    ).check()
    with Console(stderr=True).status("searching"):
        found = plan(request, given.top, given.framework)
    if not found.ranked:
        raise ValueError(_nothing(found))
    if given.plot is not None:
        memory_plot.save(found.ranked, given.plot)
        times = {memory_plot.label(choice): choice.time for choice in found.ranked}
        plots.step_time(times, given.plot.with_stem(f"{given.plot.stem}-time"))
    if given.json:
        print(json.dumps([_row(choice) for choice in found.ranked]))
        return
    console = Console()
    if given.mesh is None:
        _print_ranked(console, found)
    else:
        _print_one(console, found.ranked[0])
    _print_rest(console, found, given.explain)


def _nothing(found) -> str:
    if found.num_meshes == 1:
        only = found.rejections[0]
        return f"{_mesh(only.mesh)} cannot be: {only.reason}"
    closest = min((each for each in found.rejections if each.excess), key=lambda each: each.excess, default=None)
    nearest = f"; nearest is {_mesh(closest.mesh)}, which {closest.reason}" if closest else ""
    return f"none of {found.num_meshes} meshes works: {_counts(found)}{nearest}"


def _row(choice) -> dict:
    from jaxpar.planning.job_traffic import job_traffic

    job, time = choice.job, choice.time
    slowed = time.step / (time.step - time.jitter)  # each part with its share of the jitter: they add up to the step
    return {
        "mesh": dict(job.mesh),
        "pipeline": job.pipeline if job.mesh["pipe"] > 1 else None,
        "microbatches": job.num_microbatches,
        "remat": job.remat,
        "memory_bytes": choice.memory.summary(),
        "traffic_bytes": {axes: round(size) for axes, size in job_traffic(job).items()},
        "seconds": {
            "compute": slowed * time.compute,
            "exposed": {axes: slowed * value for axes, value in time.exposed.items()},
            "bubble": slowed * time.bubble,
            "optimizer": slowed * time.optimizer,
            "step": time.step,
        },
        "tokens_per_second_per_device": time.tokens_per_second_per_device,
        "mfu": time.mfu,
        "hfu": time.hfu,
        "fits": choice.memory.fits,
    }


def _mesh(mesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "data=1"


def _how(job) -> str:
    """What else to ask of train.py, in its words."""
    words = [f"zero {job.zero}", f"remat {job.remat}", f"{job.num_microbatches} microbatches"]
    if job.mesh["pipe"] > 1:
        words.insert(0, job.pipeline + (f" x {job.chunks}" if job.chunks > 1 else ""))
        words += ["pipeline residuals"] if job.pipeline_residuals else []
    elif job.zero == 3 and not job.reshard_after_forward and job.mesh["fsdp"] * job.mesh["context"] > 1:
        words.append("no reshard")
    if (ranks := job.mesh["context"]) > 1:
        group = job.context.group
        exchange = {1: "ring", ranks: "ulysses"}.get(group, f"hybrid={ranks // group}x{group}")
        words.append("allgather" if job.context.kind == "allgather" else exchange)
    return ", ".join(words)


def _print_ranked(console: Console, found) -> None:
    table = Table("mesh", "how", "GiB", "seconds", "tokens/s", "MFU")
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for choice in found.ranked:
        mesh, time = _mesh(choice.job.mesh).replace(",", " "), choice.time
        rate = f"{time.tokens_per_second_per_device:,.0f}"
        table.add_row(
            mesh, _how(choice.job), f"{choice.bytes / 2**30:.1f}", f"{time.step:.3g}", rate, f"{time.mfu:.1%}"
        )
    console.print(table)
    limit = found.ranked[0].memory.limit / 2**30
    console.print(
        f"GiB of {limit:.1f}, seconds a step, tokens/s per device. Of all that fit, with less memory: {_front(found)}",
        highlight=False,
    )


def _front(found) -> str:
    """Of the front, each with a fifth less memory than the one before."""
    shown, least = [], float("inf")
    for choice in found.front:
        if choice.bytes <= 0.8 * least:
            least = choice.bytes
            shown.append(f"{least / 2**30:.1f} GiB in {choice.time.step:.3g} s")
    return ", ".join(shown[:_NUM_FRONT])


def _print_one(console: Console, choice) -> None:
    job, time, memory = choice.job, choice.time, choice.memory
    console.print(f"{_mesh(job.mesh)}: {_how(job)}", highlight=False)
    parts = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "activations": 0.0}
    rows = [(name, getattr(memory.fullest, name)) for name in parts]
    rows += [(name, size) for name, size in memory.fullest.others.items() if size]
    rows += [("total", memory.fullest.total), ("limit", memory.limit)]
    times = [("compute", time.compute)]
    times += [(f"exposed {axes}", seconds) for axes, seconds in time.exposed.items() if seconds > 1e-4]
    times += [("bubble", time.bubble), ("optimizer", time.optimizer), ("jitter", time.jitter), ("step", time.step)]
    table = Table("memory", "GiB", "time", "seconds")
    table.columns[1].justify = table.columns[3].justify = "right"
    for left, right in itertools.zip_longest(rows, times):
        cells = (left[0], f"{left[1] / 2**30:.2f}") if left else ("", "")
        table.add_row(*cells, *((right[0], f"{right[1]:.4g}") if right else ("", "")))
    console.print(table)
    console.print(
        f"{'fits' if memory.fits else 'does not fit'}; {time.tokens_per_second_per_device:,.0f} tokens/s per device, "
        f"MFU {time.mfu:.1%}, HFU {time.hfu:.1%}",
        highlight=False,
    )


def _counts(found) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in found.counts().most_common())


def _print_rest(console: Console, found, explain: bool) -> None:
    if found.num_meshes > 1:
        console.print(f"of {found.num_meshes} meshes fell out: {_counts(found)}", highlight=False)
    if not explain:
        return
    for kind in found.counts():
        examples = [each for each in found.rejections if each.kind == kind]
        for each in examples[:: max(1, len(examples) // _NUM_EXAMPLES)][:_NUM_EXAMPLES]:
            console.print(f"{_mesh(each.mesh)}: {each.reason}", highlight=False)
    job, stride = found.ranked[0].job, 1
    for axis, size in reversed(job.mesh.items()):
        if size > 1:
            level, bandwidth = job.cluster.level_of(stride, size), job.cluster.bandwidth(stride, size)
            console.print(f"{axis}={size}: within a {level.name}, {bandwidth / 1e9:.0f} GB/s", highlight=False)
        stride *= size
