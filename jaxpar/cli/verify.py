"""`jaxpar verify`: its flags are those of training."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jaxpar import config as configs
from meshes import num_devices_of, parse_mesh

_HELP = """Hold a mesh against one device: initial parameters, loss, every gradient; and the traffic of the step, as
compiled for H100s, against the strategies' formulas. The model is shrunk, its structure kept. Exit status 1 where
something is off."""


def add(commands) -> None:
    verify = commands.add_parser("verify", add_help=False, help=_HELP)
    verify.add_argument("--json", action="store_true")


def run(args: Sequence[str], as_json: bool) -> None:
    # Here, since they take a second to import, and devices must be counted before JAX is.
    from jaxpar import verify
    from jaxpar.training import runtime

    config = configs.parse(args, prog="jaxpar verify", description=_HELP)
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
    if verdict.note:
        console.print(verdict.note, highlight=False)
    console.print("[green]ok[/]" if verdict.ok else "[red]not ok[/]")
