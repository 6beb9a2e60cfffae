"""`jaxpar models`."""

import argparse
import json

from rich.console import Console
from rich.table import Table

from models.count import num_parameters
from models.presets import preset, preset_names


def add(commands) -> None:
    models = commands.add_parser("models", help="the models known by name, with their exact parameter counts")
    models.add_argument("--json", action="store_true")
    models.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    counts = {name: num_parameters(preset(name)) for name in preset_names()}
    if given.json:
        print(json.dumps(counts))
        return
    table = Table("model", "parameters")
    table.columns[1].justify = "right"
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    Console().print(table)
