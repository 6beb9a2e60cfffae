"""`jaxpar audit`: its flags are those of training, beside its own."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpar import config as configs
from jaxpar.cli.arguments import positive

_HELP = """Compile the train step for a machine that is not here and hold the program against the plan: memory, traffic
by axis and what hides it, FLOPs, surprises, an estimate of the step's time. Takes train.py's flags."""
_FLAGS = """

And: --topology CHIP:SHAPE (h100:32x8, hosts x GPUs; v5e:16x16; 2*v5p:4x4x4, slices; cpu:8), --json, --html FILE,
--hlo FILE (the program's text), --strict (exit status 1 if there is a surprise), --timeout SECONDS, --no-cache."""
_NUM_EXPOSED, _NAME_LENGTH = 8, 60


def add(commands) -> None:
    audit = commands.add_parser("audit", add_help=False, help=_HELP)
    audit.add_argument(
        "--topology", metavar="CHIP:SHAPE", help="h100:32x8 (hosts x GPUs), v5e:16x16, 2*v5p:4x4x4, cpu:8"
    )
    audit.add_argument("--timeout", type=positive, default=600, metavar="SECONDS", help="for the compiler")
    audit.add_argument("--no-cache", action="store_true", help="compile, whatever is kept of an earlier time")
    audit.add_argument("--json", action="store_true")
    audit.add_argument("--html", type=Path, metavar="FILE", help="a page with pictures")
    audit.add_argument("--hlo", type=Path, metavar="FILE", help="the program's text")
    audit.add_argument("--strict", action="store_true", help="exit status 1 if there is a surprise")


def run(args: Sequence[str], given: argparse.Namespace) -> None:
    # Here, since they take a second to import.
    from jaxpar.audit import page
    from jaxpar.audit.report import audit
    from jaxpar.audit.topology import Topology

    config = configs.parse(args, prog="jaxpar audit", description=_HELP + _FLAGS)
    if given.topology is None:
        raise ValueError("--topology is missing; give a machine to compile for, as in --topology h100:32x8")
    topology = Topology.parse(given.topology)
    for path in filter(None, (given.hlo, given.html)):
        _check_writable(path)
    with Console(stderr=True).status(f"compiling for {topology.text}"):
        found = audit(config, topology, given.timeout, not given.no_cache)
    if given.hlo is not None:
        given.hlo.write_text(found.program.hlo)
    if given.html is not None:
        page.write(found, config, given.html)
    if given.json:
        print(json.dumps(found.as_json()))
    else:
        _print(found)
    sys.exit(1 if given.strict and found.surprises else 0)


def _check_writable(path: Path) -> None:
    """Before anything is compiled for it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a directory" if path.is_dir() else f"{path.parent} is no directory"
        raise ValueError(f"cannot write {path}: {what}; give a file in a directory that exists")


def _print(found) -> None:
    console, program, plan = Console(), found.program, found.plan.fullest
    cached = " before" if program.was_cached else ""
    console.print(
        f"compiled{cached} in {program.compile_seconds:.1f} s for {found.topology} by {program.versions}; "
        f"attention: {program.attention}",
        highlight=False,
    )
    table = Table("per device", "compiled", "planned", "difference", title="a step")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("arguments, GB", _gb(program.arguments), "", "")
    table.add_row("temporaries, GB", _gb(program.temporaries), "", "")
    table.add_row("memory, GB", _gb(program.total), _gb(plan.total), _difference(program.total, plan.total))
    table.add_row(
        "FLOPs", f"{found.flops:.4g}", f"{found.planned_flops:.4g}", _difference(found.flops, found.planned_flops)
    )
    if found.estimated_cycles is not None:
        table.add_row("cycles, without kernels", f"{found.estimated_cycles:.4g}", "", "")
    if found.duplicates.count:
        again = f"{found.duplicates.flops:.4g} ({found.duplicates.count} instructions)"
        table.add_row("FLOPs, again by the compiler", again, "", "")
    console.print(table)
    traffic = Table("axis", "collective", "count", "GB", "planned", "difference", "beside a matmul", title="traffic")
    for column in traffic.columns[2:]:
        column.justify = "right"
    keys = {(axes, op) for side in (found.collectives, found.planned) for axes, ops in side.items() for op in ops}
    for axes, op in sorted(keys):
        have = found.collectives.get(axes, {}).get(op, {"count": 0, "bytes": 0, "overlapped_bytes": 0})
        want = found.planned.get(axes, {}).get(op, 0)
        share = f"{have['overlapped_bytes'] / have['bytes']:.0%}" if have["bytes"] else ""
        traffic.add_row(
            axes, op, str(have["count"]), _gb(have["bytes"]), _gb(want), _difference(have["bytes"], want), share
        )
    console.print(traffic)
    exposed = [c for c in found.exposed if c.bytes * c.count][:_NUM_EXPOSED]
    for each in exposed:
        how = "synchronous" if each.window is None else "no matmul beside it"
        console.print(
            f"exposed: {each.op} over {'+'.join(each.axes)}, {each.count} x {_gb(each.bytes)} GB, {how}: "
            + each.op_name[-_NAME_LENGTH:],
            highlight=False,
            markup=False,
        )
    seconds = found.seconds
    sent = ", ".join(f"{axes} {value:.3g} s" for axes, value in seconds.exposed.items() if value > 1e-4)
    console.print(
        f"{'fits' if found.fits else 'does not fit'} in {_gb(found.limit)} GB; about {seconds.step:.3g} s a step "
        f"(compute {seconds.compute:.3g} s{'; exposed: ' + sent if sent else ''}), MFU {found.mfu:.1%}",
        highlight=False,
    )
    if found.note:
        console.print(found.note, highlight=False)
    for surprise in found.surprises:
        console.print(f"surprise: {surprise.kind}: {surprise.what}", highlight=False, markup=False)
    if not found.surprises:
        console.print("no surprises")


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f}"


def _difference(have: float, want: float) -> str:
    return f"{have / want - 1:+.1%}" if want else ""
