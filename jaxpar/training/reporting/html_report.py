"""report.html: a run on one page that holds its own pictures, made of metrics.jsonl and config.toml alone."""

import base64
import html
import io
import math
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpar import toml
from jaxpar.training.reporting.memory import bytes_text
from meshes import num_devices_of
from models.config import ModelConfig
from models.count import num_parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]

MAX_POINTS = 1500
"""Of one curve: more than a screen shows."""
MIN_POINTS = 64
"""Shorter curves are not smoothed."""
_COLORS = ("#1f6fb4", "#d9662b", "#4a9a5c")


@dataclass(frozen=True)
class Curve:
    key: str
    label: str
    factor: float = 1.0
    marked: bool = False
    """A value now and then, each with its mark."""
    noisy: bool = True
    """Smoothed, the values themselves behind."""


@dataclass(frozen=True)
class Plot:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    prefixes: bool = False
    """Whether values are labelled as 8k and 4M."""


def plots(rows: Rows) -> tuple[Plot, ...]:
    memory_unit, memory_factor = (
        ("GiB", 2**-30) if max(finite(rows, "memory_bytes")[1], default=0) >= 2**30 else ("MiB", 2**-20)
    )
    return (
        Plot(
            "Loss",
            "nats per token",
            (Curve("loss", "training"), Curve("eval_loss", "evaluation", marked=True, noisy=False)),
        ),
        Plot("Throughput", "tokens per second", (Curve("tokens_per_second", ""),), prefixes=True),
        Plot(
            "Step time",
            "milliseconds",
            (Curve("step_seconds", "step", 1e3), Curve("data_seconds", "waiting for data", 1e3)),
        ),
        Plot("FLOPs utilisation", "% of the devices' peak", (Curve("mfu", "MFU", 100), Curve("hfu", "HFU", 100))),
        Plot("Memory of the fullest device", memory_unit, (Curve("memory_bytes", "", memory_factor, noisy=False),)),
        Plot("Learning rate", "", (Curve("learning_rate", "", noisy=False),)),
        Plot("Gradient norm", "before clipping", (Curve("grad_norm", ""),)),
    )


def write_report(rows: Rows, config_text: str, path: Path) -> None:
    """Write the page. Rows may lack keys or hold null, NaN and infinity; what has no finite value is left out.

    Args:
      rows: of metrics.jsonl, in order.
      config_text: config.toml, with the mesh's sizes as they turned out.
    """
    config = tomllib.loads(config_text)
    name = config.get("model", {}).get("name", "run")
    pictures = [(plot, figure) for plot in plots(rows) if (figure := draw(plot, rows)) is not None]
    page = _PAGE.format(
        style=STYLE,
        title=html.escape(f"{name}: {path.absolute().parent.name}"),
        name=html.escape(name),
        run=html.escape(path.absolute().parent.name),
        tiles="\n".join(
            f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>"
            for label, value in summary(rows, config).items()
        ),
        pictures="\n".join(
            f'<img alt="{html.escape(plot.title)} over steps" src="data:image/svg+xml;base64,{svg(figure)}">'
            for plot, figure in pictures
        ),
        config="\n".join(
            f"<section><h3>{html.escape(group)}</h3><table>{_settings(settings)}</table></section>"
            for group, settings in config.items()
        ),
    )
    path.write_text(page, encoding="utf-8")


def summary(rows: Rows, config: dict[str, Any]) -> dict[str, str]:
    """The run in a few numbers, by label; what is not known is left out."""
    mesh = config.get("parallel", {}).get("mesh", "")
    losses, evaluations = (finite(rows, key)[1] for key in ("loss", "eval_loss"))
    out = {"parameters": f"{num_parameters(toml.build(ModelConfig(), config.get('model', {}), 'config.toml')):,}"}
    if num_devices := num_devices_of(mesh):
        out |= {"mesh": mesh, "devices": f"{num_devices:,}"}
    if rows:
        out |= {"steps": f"{rows[-1]['step']:,}", "tokens": f"{rows[-1]['tokens']:,}"}
    if losses.size:
        out |= {"best loss": f"{losses.min():.4f}", "last loss": f"{losses[-1]:.4f}"}
    if evaluations.size:
        out |= {"best eval loss": f"{evaluations.min():.4f}"}
    for label, key, form in (
        ("tokens/s, median", "tokens_per_second", "{:,.0f}".format),
        ("step time, median", "step_seconds", lambda seconds: f"{seconds * 1e3:,.1f} ms"),
        ("MFU, median", "mfu", "{:.1%}".format),
    ):
        if (values := finite(rows, key)[1]).size:
            out[label] = form(statistics.median(values.tolist()))
    if (memory := finite(rows, "memory_bytes")[1]).size:
        out["memory, fullest device"] = bytes_text(memory.max())
    return out


def finite(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the rows where `key` is a finite number."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    steps, values = zip(*points) if points else ((), ())
    return np.array(steps), np.array(values, float)


def draw(plot: Plot, rows: Rows) -> "Figure | None":
    """The plot over steps, or None where there is nothing to draw."""
    from matplotlib.figure import Figure  # a second to import, which no run should wait for at its start
    from matplotlib.ticker import EngFormatter, MaxNLocator

    curves = [(curve, *finite(rows, curve.key)) for curve in plot.curves]
    curves = [(curve, steps, values) for curve, steps, values in curves if steps.size]
    if not curves:
        return None
    # The size of a phone's screen in points, so that type keeps its size there.
    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    axes = figure.add_subplot()
    shown = []
    for (curve, steps, values), color in zip(curves, _COLORS):
        values = values * curve.factor
        at, smooth = smoothed(steps, values) if curve.noisy else (steps, values)
        shown.append(smooth)
        if len(steps) >= MIN_POINTS and curve.noisy:
            axes.plot(*thinned(steps, values), color=color, linewidth=0.7, alpha=0.3)
        marks: dict[str, Any] = {"marker": "o", "markersize": 4} if curve.marked or len(steps) == 1 else {}
        axes.plot(*thinned(at, smooth), color=color, linewidth=1.7, label=curve.label, **marks)
    _set_limits(axes, shown, from_zero=plot.title != "Loss")
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=9)
    axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(plot.unit, fontsize=9)
    axes.tick_params(labelsize=9)
    if rows[0]["step"] == rows[-1]["step"]:
        axes.set_xlim(rows[0]["step"] - 1, rows[0]["step"] + 1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if plot.prefixes:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _set_limits(axes: Any, shown: list[np.ndarray], from_zero: bool) -> None:
    """The range of the smoothed curves: one slow step does not flatten the rest."""
    low, high = min(values.min() for values in shown), max(values.max() for values in shown)
    low = min(low, 0.0) if from_zero else low
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    axes.set_ylim(low if from_zero and low == 0 else low - margin, high + margin)


def smoothed(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The running median over 3% of the curve, less towards its ends, of at most MAX_POINTS points."""
    if len(values) < MIN_POINTS:
        return steps, values
    blocks = np.array_split(np.arange(len(values)), min(len(values), MAX_POINTS))
    values = np.array([np.median(values[block]) for block in blocks])
    last = len(values) - 1
    half = [max(2, min(last // 64, i, last - i)) for i in range(last + 1)]
    values = np.array([np.median(values[max(0, i - h) : i + h + 1]) for i, h in enumerate(half)])
    return steps[[block[-1] for block in blocks]], values


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MAX_POINTS of the points, the last among them."""
    keep = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(int))
    return steps[keep], values[keep]


def svg(figure: "Figure") -> str:
    """A picture for a page to hold, in base64."""
    out = io.BytesIO()
    figure.savefig(out, format="svg")
    return base64.b64encode(out.getvalue()).decode()


def _settings(settings: dict[str, Any]) -> str:
    rows = ((html.escape(str(part)) for part in item) for item in settings.items())
    return "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)


STYLE = """\
body { margin: 0 auto; max-width: 1240px; padding: 1.2rem; background: #fff; color: #1c2530;
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0 0 .3rem; }
header p { margin: .1rem 0 1.2rem; color: #5c6875; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: .6rem; margin: 0; }
dl div { background: #f4f6f9; border-radius: 6px; padding: .5rem .7rem; }
dt { color: #5c6875; font-size: .8rem; }
dd { margin: 0; font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 1rem; }
.plots img { width: 100%; height: auto; }
.config { columns: 340px; column-gap: 1.5rem; }
section { break-inside: avoid; margin-bottom: 1rem; }
table { width: 100%; border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; font-weight: normal; padding: .15rem .4rem .15rem 0; border-bottom: 1px solid #e6eaef;
  vertical-align: top; }
th { color: #5c6875; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
"""
"""Of a page with tiles, pictures and tables."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{name}</h1><p>{run}</p></header>
<dl>
{tiles}
</dl>
<h2>Curves</h2>
<div class="plots">
{pictures}
</div>
<h2>Settings</h2>
<div class="config">
{config}
</div>
</body>
</html>
"""
