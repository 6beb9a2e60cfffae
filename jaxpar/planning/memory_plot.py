"""Memory of layouts side by side, by part, against what a device has."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from jaxpar.planning.memory import PARTS
from jaxpar.planning.planner import Choice

_COLORS = ("#3f76bf", "#3d9970", "#dd9a34", "#c2513a", "#8a8a8a")
_DPI = 150
_SUFFIXES = (".png", ".svg")
GIB = 2**30


def check_path(path: Path) -> None:
    """ValueError unless a picture can be written there."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"cannot draw {path}; give it a name that ends in {' or '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot draw {path}: {path.parent} is no directory; make it first")


def save(choices: Sequence[Choice], path: Path) -> None:
    """A bar for each layout: of several that of its fullest device, of one that of each stage."""
    if len(choices) == 1:
        stages = choices[0].memory.stages
        bars = {f"stage {number}": stage for number, stage in enumerate(stages)} if len(stages) > 1 else {"": stages[0]}
    else:
        bars = {label(choice): choice.memory.fullest for choice in choices}
    figure = Figure(figsize=(8, 1.4 + 0.45 * len(bars)), layout="constrained")
    axes = figure.subplots()
    start = [0.0] * len(bars)
    for part, color in zip(PARTS, _COLORS, strict=True):
        sizes = [getattr(memory, part) / GIB for memory in bars.values()]
        axes.barh(list(bars), sizes, left=start, label=part, color=color)
        start = [a + b for a, b in zip(start, sizes)]
    axes.axvline(choices[0].memory.limit / GIB, color="black", linestyle="--", linewidth=1, label="limit")
    axes.invert_yaxis()
    axes.set_xlabel("GiB per device")
    axes.set_title(f"{choices[0].job.model.name} on {choices[0].job.num_devices:,} of {choices[0].job.cluster.name}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(PARTS) + 1, fontsize=7, frameon=False)
    figure.savefig(path, dpi=_DPI)


def label(choice: Choice) -> str:
    """What tells a layout in a picture."""
    job = choice.job
    mesh = " ".join(f"{axis} {size}" for axis, size in job.mesh.items() if size > 1) or "1 device"
    return f"{mesh}\n{job.pipeline if job.mesh['pipe'] > 1 else f'remat {job.remat}'}"
