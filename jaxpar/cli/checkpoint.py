"""`jaxpar checkpoint ls|show|convert`."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table


def add(commands) -> None:
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
    checkpoint.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
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
