"""How well the planner predicts published runs: `python -m jaxpar.planning.accuracy [RUNS.json] [--fit] [--docs docs]`.

Writes planner-accuracy.md and .png: errors by source; with whole sources, random halves and whole models held out of
the fit. --fit first fits the calibration table that comes with jaxpar again, and writes it.
"""

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from jaxpar.planning import plots
from jaxpar.planning.calibration import CalibrationTable, calibration_table
from jaxpar.planning.fit import NUMBERS, Run, fit, get
from jaxpar.planning.run_defaults import FRAMEWORKS
from jaxpar.planning.runs import predict_run

HALVES = 10
"""Random halves that are held out, of each kind."""


def errors(runs: Iterable[Run], table: CalibrationTable) -> list[float]:
    """Absolute relative ones of what was measured."""
    return [abs(math.expm1(run.log_error(table))) for run in runs]


def held_out(runs: Sequence[Run], key: Callable[[Run], Hashable], chosen: set) -> list[float]:
    """Errors of the runs whose key was chosen, under a table fitted to the others."""
    table = fit([run for run in runs if key(run) not in chosen], calibration_table())
    return errors((run for run in runs if key(run) in chosen), table)


def random_halves(runs: Sequence[Run], key: Callable[[Run], Hashable]) -> list[float]:
    """Errors of held-out halves of the keys, over HALVES draws."""
    chance, keys, found = random.Random(0), list(dict.fromkeys(map(key, runs))), []
    for _ in range(HALVES):
        found += held_out(runs, key, set(chance.sample(keys, len(keys) // 2)))
    return found


def _source(run: Run) -> str:
    return run.framework.name


def _run(run: Run) -> str:
    return run.row["id"]


def _model(run: Run) -> Hashable:
    model = run.job.model
    return _source(run), run.job.cluster.chip.name, model.embed_dim, model.num_layers, run.job.precision


def _row(name: str, found: Sequence[float]) -> str:
    median, most = np.quantile(found, [0.5, 0.9])
    within = np.mean(np.array(found) <= 0.25)
    return f"| {name} | {len(found)} | {median:.1%} | {most:.1%} | {within:.0%} |"


_HEAD = "| {} | runs | median error | 90th percentile | within 25% |\n|---|---|---|---|---|"


def report(runs: Sequence[Run], table: CalibrationTable) -> str:
    """The page."""
    sources = list(dict.fromkeys(map(_source, runs)))
    fitted = [_row(name, errors((run for run in runs if _source(run) == name), table)) for name in sources]
    blind = {name: held_out(runs, _source, {name}) for name in sources}
    all_blind = [error for found in blind.values() for error in found]
    lines = [
        "# How well the planner predicts\n",
        f"Made by `python -m jaxpar.planning.accuracy` from {len(runs)} published runs "
        "(jaxpar/planning/data/published_runs.json, each with its source). The error is the relative one of tokens per "
        "second and device, or of MFU in the source's own convention where only that was published. A prediction sees "
        "the model, the chip, the layout and the batch; what a source leaves out is filled in by "
        "jaxpar/planning/run_defaults.py.\n",
        "![predicted and published MFU](planner-accuracy.png)\n",
        "## With the table that comes with jaxpar\n",
        f"{len(NUMBERS)} numbers for {len(runs)} runs, each with a prior.\n",
        _HEAD.format("source"),
        *fitted,
        _row("all", errors(runs, table)),
        "\n## With the source held out\n",
        "Fitted to all others; what only its runs could tell stays at the prior. The form of the model and some priors "
        "were chosen with all of these runs in sight, so that these errors flatter a little.\n",
        _HEAD.format("source held out"),
        *(_row(name, found) for name, found in blind.items()),
        _row("all", all_blind),
        "\n## With half of the runs held out\n",
        f"{HALVES} draws each: of single runs, and of whole models (all runs of one model on one chip in one precision "
        "and source), whose relatives alone remain.\n",
        _HEAD.format("held out"),
        _row("runs", random_halves(runs, _run)),
        _row("models", random_halves(runs, _model)),
        "\n## The fitted numbers\n",
        "| number | prior | fitted | reason for the prior |\n|---|---|---|---|",
    ]
    for number in NUMBERS:
        first, *others = (".".join(place[1:]) for place in number.places)
        name = first + (f" (and {len(others)} other chips)" if others else "")
        lines.append(f"| {name} | {number.prior:g} | {get(table, number.places[0]):.3g} | {number.why} |")
    lines += ["\n## Runs more than 15% off\n", "| run | predicted / published |\n|---|---|"]
    ratios = {run.row["id"]: math.exp(run.log_error(table)) for run in runs}
    lines += [f"| {name} | {ratio:.2f} |" for name, ratio in ratios.items() if abs(ratio - 1) > 0.15]
    lines += ["\n## What is filled in\n", "| source | microbatch | remat | reductions | MFU as in | why |"]
    lines += ["|---|---|---|---|---|---|"]
    for known in FRAMEWORKS:
        cells = (
            known.name,
            known.microbatch,
            known.remat,
            f"{known.reduce_bytes} bytes",
            known.convention,
            known.reasons,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def points(runs: Sequence[Run], table: CalibrationTable) -> dict[str, list[tuple[float, float]]]:
    """(published, predicted) MFU by source."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        predicted = predict_run(run.row, table).mfu
        found.setdefault(_source(run), []).append((predicted / math.exp(run.log_error(table)), predicted))
    return found


def to_toml(table: CalibrationTable, runs: Sequence[Run]) -> str:
    """The table as its file, each entry with what it was fitted on."""
    on_chip: dict[str, Counter[str]] = {}
    in_framework: dict[str, Counter[str]] = {}
    for run in runs:
        chip, name = run.job.cluster.chip, _source(run)
        on_chip.setdefault(table.entry_of(chip), Counter())[f"{name} in {run.job.precision}"] += 1
        in_framework.setdefault(name, Counter())[chip.name] += 1
    lines = [
        "# Written by `python -m jaxpar.planning.accuracy --fit`; jaxpar/planning/fit.py has the priors.",
        "# memory, network and overlap are fitted to all runs at once, jitter to GPUs' and TPUs' apart.",
        "# newest_attention is no fit: FlashAttention-3, and cuDNN's kernels, are 1.5 to 2 times as fast as the second",
        "# version on Hopper (arXiv 2407.08608).",
        "\n[generations]",
        *(f'"{start}" = "{name}"' for start, name in table.generations.items()),
    ]
    for name, chip_entry in table.chips.items():
        by_dtype = ", ".join(f"{dtype} = {share:.4f}" for dtype, share in chip_entry.matmul.items())
        lines += [f"\n[chips.{name}]", f"matmul = {{ {by_dtype} }}"]
        for field in ("attention", "newest_attention", "memory", "network", "overlap", "jitter"):
            lines.append(f"{field} = {getattr(chip_entry, field):.4f}")
        lines.append(f'fitted_on = "{_counts(on_chip.get(name))}"')
    for name, entry in table.frameworks.items():
        lines += [
            f"\n[frameworks.{name}]",
            f"overhead = {entry.overhead:.4f}",
            f"fused = {str(entry.fused).lower()}",
            f"reruns_stages = {str(entry.reruns_stages).lower()}",
            f'attention = "{entry.attention}"',
            f"overlaps = {json.dumps(entry.overlaps)}",
            f'fitted_on = "{_counts(in_framework.get(name))}"',
        ]
    return "\n".join(lines) + "\n"


def _counts(found: Counter[str] | None) -> str:
    return ", ".join(f"{name}: {count}" for name, count in found.items()) if found else "no run: the prior"


def main(argv: Sequence[str]) -> None:
    data = resources.files("jaxpar.planning") / "data"
    parser = argparse.ArgumentParser(prog="python -m jaxpar.planning.accuracy", description=__doc__)
    parser.add_argument("runs", nargs="?", type=Path, default=Path(str(data / "published_runs.json")))
    parser.add_argument("--fit", action="store_true", help="fit the table again first, and write it")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the page and the picture go")
    flags = parser.parse_args(argv)
    runs = [Run.of(row) for row in json.loads(flags.runs.read_text())]
    if flags.fit:
        fitted = fit(runs, calibration_table())
        Path(str(data / "calibration.toml")).write_text(to_toml(fitted, runs))
        calibration_table.cache_clear()
    table = calibration_table()
    flags.docs.mkdir(exist_ok=True)
    (flags.docs / "planner-accuracy.md").write_text(report(runs, table))
    plots.scatter(points(runs, table), flags.docs / "planner-accuracy.png")


if __name__ == "__main__":
    main(sys.argv[1:])
