"""A schedule to look at: as text by ticks, and as a Gantt chart over time with the memory below."""

import os
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from rich.text import Text

from jaxpar.parallel.pipeline.schedule import Action, Op, Schedule
from jaxpar.parallel.pipeline.simulate import Report, memory_over

_NAMES = {Op.F: "forward", Op.BW: "backward", Op.B: "backward, inputs", Op.W: "backward, weights"}
_COLORS = {Op.F: "#3f76bf", Op.BW: "#c2513a", Op.B: "#dd9a34", Op.W: "#3d9970"}
_STYLES = {Op.F: "blue", Op.BW: "red", Op.B: "yellow", Op.W: "green"}
_SUFFIXES = (".png", ".svg")
_WIDTH = (7.0, 32.0)
_CELL = 0.3
"""Inches that a tick has, within _WIDTH."""
_FONT = (4.0, 8.0)
"""Points of the microbatches' numbers; where they would be smaller there are none."""
_DIGIT = 0.75
"""A digit's width over its height, with some air."""


def text(schedule: Schedule, width: int) -> Text:
    """The table, a row per stage and a cell per tick, dots for bubbles; cut into blocks that are `width` wide."""
    labels = [
        [action.label(schedule.num_chunks, schedule.num_slices) if action else "·" for action in row]
        for row in schedule.table
    ]
    cell = max(len(label) for row in labels for label in row) + 1
    head = len(f"stage {schedule.num_stages - 1}") + 2
    per_block = max(1, (width - head) // cell)
    drawing = Text()
    for start in range(0, schedule.num_ticks, per_block):
        ticks = range(start, min(start + per_block, schedule.num_ticks))
        drawing.append("tick".ljust(head) + "".join(str(t).ljust(cell) if t % 5 == 0 else " " * cell for t in ticks))
        drawing.append("\n")
        for stage in range(schedule.num_stages):
            drawing.append(f"stage {stage}".ljust(head))
            for tick in ticks:
                action = schedule.table[tick][stage]
                drawing.append(labels[tick][stage].ljust(cell), _STYLES[action.op] if action else "dim")
            drawing.append("\n")
    return drawing


def check_path(path: Path) -> None:
    """ValueError unless a drawing can be written there."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"cannot draw {path}; give it a name that ends in {' or '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot draw {path}: {path.parent} is no directory; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot draw {path}: nothing can be written there; give another name")


def save(schedule: Schedule, report: Report, path: Path, deferred_size: float = 0.5) -> None:
    """Writes the Gantt chart of a simulated schedule as PNG or SVG, by the name's ending.

    Stages down, time across, a bar per action with its microbatch's number; later chunks paler. Below, each stage's
    memory, in activations of one microbatch in one stage, a deferred weight gradient counted as deferred_size.
    """
    check_path(path)
    inches = min(max(_CELL * schedule.num_ticks + 1.2, _WIDTH[0]), _WIDTH[1])
    rows = min(0.42 * schedule.num_stages, 12.0)
    figure = Figure(figsize=(inches, rows + 3.2), layout="constrained")
    gantt, memory = figure.subplots(2, 1, sharex=True, height_ratios=[rows + 0.4, 1.7])
    _draw_gantt(gantt, schedule, report, (inches - 1.0) / report.makespan)
    _draw_memory(memory, schedule, report, deferred_size)
    figure.suptitle(
        f"{schedule.kind}: bubble {report.bubble_of_total:.1%}, peak memory {max(report.peak_memory):.3g} activations",
        fontsize=10,
    )
    # No date in the file: the same schedule gives the same one.
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_gantt(axes: Axes, schedule: Schedule, report: Report, inches_per_time: float) -> None:
    labels = {span: _number(span.action, schedule) for spans in report.timeline for span in spans}
    fits = (inches_per_time * 72 * (span.end - span.start) / len(label) for span, label in labels.items())
    font = min(_FONT[1], min(fits) / _DIGIT)
    for stage, spans in enumerate(report.timeline):
        axes.broken_barh([(0, report.makespan)], (stage - 0.44, 0.88), facecolor="#eeeeee", zorder=0)
        for op in _NAMES:
            for chunk in range(schedule.num_chunks):
                chosen = [span for span in spans if span.action.op is op and span.action.chunk == chunk]
                axes.broken_barh(
                    [(span.start, span.end - span.start) for span in chosen],
                    (stage - 0.44, 0.88),
                    facecolor=_shade(op, chunk, schedule.num_chunks),
                    edgecolor="white",
                    linewidth=0.6,
                )
        for span in spans if font >= _FONT[0] else ():
            pale = span.action.chunk > (schedule.num_chunks - 1) / 2
            axes.text(
                (span.start + span.end) / 2,
                stage,
                labels[span],
                ha="center",
                va="center",
                fontsize=font,
                color="black" if pale else "white",
            )
    axes.set_ylim(schedule.num_stages - 0.5, -0.5)
    every = -(-schedule.num_stages // 16)
    axes.set_yticks(range(0, schedule.num_stages, every), [f"stage {s}" for s in range(0, schedule.num_stages, every)])
    axes.set_xlim(0, report.makespan)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    present = {action.op for _, _, action in schedule.actions()}
    handles = [Patch(color=_COLORS[op], label=name) for op, name in _NAMES.items() if op in present]
    handles.append(Patch(color="#eeeeee", label="bubble"))
    axes.legend(handles=handles, ncols=5, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def _draw_memory(axes: Axes, schedule: Schedule, report: Report, deferred_size: float) -> None:
    labelled = {0, schedule.num_stages - 1} if schedule.num_stages > 8 else set(range(schedule.num_stages))
    for stage, spans in enumerate(report.timeline):
        times, sizes = [0.0], [0.0]
        for span, held in zip(spans, memory_over(schedule, stage, deferred_size)):
            if span.start == times[-1]:
                times.pop()
                sizes.pop()
            times += [span.start, span.end]
            sizes += [held.memory, held.memory_after]
        color = colormaps["viridis"](0.9 * stage / max(1, schedule.num_stages - 1))
        label = f"stage {stage}" if stage in labelled else None
        axes.step([*times, report.makespan], [*sizes, 0.0], where="post", color=color, linewidth=1.2, label=label)
    axes.set_ylim(0, max(report.peak_memory) * 1.1)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylabel("activations")
    axes.set_xlabel("time")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=1 + (len(labelled) > 4), loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False)


def _number(action: Action, schedule: Schedule) -> str:
    return f"{action.microbatch}" + (f":{action.slice}" if schedule.num_slices > 1 else "")


def _shade(op: Op, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    pale = 0.55 * chunk / max(1, num_chunks - 1)
    red, green, blue = (value + (1 - value) * pale for value in to_rgb(_COLORS[op]))
    return red, green, blue
