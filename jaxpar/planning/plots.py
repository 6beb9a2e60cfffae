"""Pictures of predictions: where a step's time goes, MFU against the number of devices, predicted against published."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from jaxpar.planning.step_time import StepTime

_DPI = 150
_COLORS = {
    "matmul": "#2f5d9b",
    "attention": "#5b8fd0",
    "elementwise": "#a3c4ea",
    "recompute": "#7b6bb5",
    "head": "#3d9970",
    "overhead": "#9aa3ad",
    "bubble": "#e8d5a8",
    "optimizer": "#8c6d46",
    "jitter": "#c9c9c9",
}
"""Of a step's parts; what is exposed has its own, by axis."""


def parts(time: StepTime) -> dict[str, float]:
    """Seconds by part, which add up to the step."""
    exposed = {f"exposed {axes}": seconds for axes, seconds in time.exposed.items()}
    named = {name: getattr(time, name) for name in _COLORS}
    waiting = {name: named.pop(name) for name in ("bubble", "optimizer", "jitter")}
    rest = time.step - sum(named.values()) - sum(waiting.values()) - sum(exposed.values())
    return named | exposed | waiting | ({"uneven stages": rest} if rest > 1e-6 * time.step else {})


def step_time(times: Mapping[str, StepTime], path: Path) -> None:
    """A bar per layout, by part. Writes the format of the path's suffix."""
    by_layout = {name: parts(time) for name, time in times.items()}
    kinds = list(dict.fromkeys(part for found in by_layout.values() for part in found))
    shown = [kind for kind in kinds if any(f.get(kind, 0.0) > 0.005 * sum(f.values()) for f in by_layout.values())]
    exposed = [kind for kind in shown if kind.startswith("exposed")]
    reds = dict(zip(exposed, colormaps["autumn"]([i / max(1, len(exposed)) for i in range(len(exposed))])))
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(by_layout)), layout="constrained")
    axes = figure.subplots()
    starts = dict.fromkeys(by_layout, 0.0)
    for kind in shown:
        widths = [found.get(kind, 0.0) for found in by_layout.values()]
        color = reds.get(kind, _COLORS.get(kind, "#666666"))
        axes.barh(list(by_layout), widths, left=list(starts.values()), label=kind, color=color, height=0.7)
        starts = {name: start + width for (name, start), width in zip(starts.items(), widths)}
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, fontsize=7, frameon=False)
    figure.savefig(path, dpi=_DPI)


def mfu(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """MFU against the number of devices, a line for each name of `curves`, of (devices, MFU)."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(*zip(*sorted(curve)), marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda devices, _: f"{devices:,.0f}")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel("MFU")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=_DPI)


def scatter(points: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Predicted over published MFU by source, with the diagonal and a quarter either side of it."""
    figure = Figure(figsize=(6, 5.6), layout="constrained")
    axes = figure.subplots()
    most = 1.05 * max(value for found in points.values() for pair in found for value in pair)
    axes.fill_between([0, most], [0, 0.75 * most], [0, 1.25 * most], color="#eeeeee", label="within 25%")
    axes.plot([0, most], [0, most], color="#888888", linewidth=1)
    for index, (name, found) in enumerate(points.items()):
        published, predicted = zip(*found)
        label, color = f"{name} ({len(found)})", colormaps["tab10"](index)
        axes.scatter(published, predicted, s=16, alpha=0.8, color=color, label=label)
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="published MFU", ylabel="predicted MFU", aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=_DPI)
