"""`jaxpar recipe` and `jaxpar mfu`."""

import argparse
import dataclasses
import json

from rich.console import Console
from rich.table import Table

from jaxpar.cli.arguments import at_least_one, positive
from jaxpar.planning.flop_conventions import CONVENTIONS, convention, utilization
from jaxpar.planning.recipe import recipe
from meshes import chip, peak_of
from models.presets import load_model
from models.published import shape
from models.shapes import Shape


def add(commands) -> None:
    first = commands.add_parser("recipe", help="which parallelism to begin with, and why")
    first.add_argument("--params", type=at_least_one, required=True, metavar="N", help="parameters, as 7e9")
    first.add_argument("--devices", type=positive, required=True, metavar="N")
    first.add_argument("--seq-len", type=positive, default=8192, metavar="N", help="tokens; 8192 by default")
    first.add_argument("--json", action="store_true")
    first.set_defaults(run=_recipe)
    measured = commands.add_parser("mfu", help="model FLOPs utilization of a measured run")
    measured.add_argument("--model", required=True, help="a published model's name, or a .toml file")
    measured.add_argument("--chip", required=True, help="such as H100-SXM or TPU-v5p")
    measured.add_argument("--devices", type=positive, required=True, metavar="N")
    measured.add_argument("--seq-len", type=positive, required=True, metavar="N")
    measured.add_argument(
        "--tokens-per-second", type=at_least_one, required=True, metavar="T", help="of all devices together"
    )
    measured.add_argument(
        "--convention", default="palm", help=f"what counts: {', '.join(CONVENTIONS)}; palm by default"
    )
    measured.add_argument("--precision", default="bfloat16", help="whose peak; bfloat16 by default")
    measured.add_argument("--json", action="store_true")
    measured.set_defaults(run=_mfu)


def _recipe(given: argparse.Namespace) -> None:
    found = recipe(given.params, given.devices, given.seq_len)
    if given.json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    table = Table("turn on", "because")
    for step in found.steps:
        table.add_row(step.name, step.reason)
    print(found.strategy)
    Console().print(table)


def _mfu(given: argparse.Namespace) -> None:
    model = Shape.of(load_model(given.model)) if given.model.lower().endswith(".toml") else shape(given.model)
    known, counted = chip(given.chip), convention(given.convention)
    peak = peak_of(known, given.precision)
    per_token = counted.flops_per_token(model, given.seq_len)
    tokens = given.tokens_per_second / given.devices
    summary = {
        "mfu": utilization(per_token, given.tokens_per_second, given.devices, peak),
        "flops_per_token": per_token,
        "flops_per_second_per_device": per_token * tokens,
        "tokens_per_second_per_device": tokens,
        "peak_flops": peak,
        "convention": counted.name,
    }
    if given.json:
        print(json.dumps({"model": model.name, "chip": known.name, "devices": given.devices} | summary))
        return
    print(
        f"MFU {summary['mfu']:.1%}: {model.name}, {per_token / 1e9:,.1f} GFLOPs a token as {counted.name} counts "
        f"({counted.source}), {tokens:,.0f} tokens/s a device, {per_token * tokens / 1e12:,.1f} of "
        f"{known.name}'s {peak / 1e12:,.1f} TFLOP/s {given.precision}"
    )
