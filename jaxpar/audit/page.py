"""The audit on one page, with its pictures inside."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.audit.report import Audit
from jaxpar.config import Config
from jaxpar.training.reporting.html_report import STYLE, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN, _GREY = "#1f6fb4", "#d9662b", "#4a9a5c", "#b9c2cc"


def write(audit: Audit, config: Config, path: Path) -> None:
    """Raises ValueError where the file cannot be written."""
    figures = {
        "memory per device": _memory(audit),
        "traffic per device and step": _traffic(audit),
        "seconds of a step": _seconds(audit),
    }
    pictures = "\n".join(
        f'<img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{svg(figure)}">'
        for name, figure in figures.items()
    )
    tiles = "\n".join(
        f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>"
        for label, value in _summary(audit).items()
    )
    surprises = [[s.kind, s.what, f"{s.bytes:,}"] for s in audit.surprises]
    page = _PAGE.format(
        style=STYLE,
        name=html.escape(config.model.name),
        where=html.escape(f"{config.parallel.mesh} on {audit.topology}, by {audit.program.versions}"),
        tiles=tiles,
        pictures=pictures,
        traffic=_table(["axis", "collective", "count", "bytes", "planned", "beside a matmul"], _traffic_rows(audit)),
        surprises=_table(["kind", "what", "bytes"], surprises) if surprises else "<p>None.</p>",
        exposed=_table(
            ["collective", "axis", "count", "bytes", "from"],
            [[c.op, "+".join(c.axes), str(c.count), f"{c.bytes:,}", c.op_name] for c in audit.exposed[:40]],
        ),
        options=_table(["option", "value"], [[k, str(v)] for k, v in audit.program.options.items()]),
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def _summary(audit: Audit) -> dict[str, str]:
    return {
        "fits": "yes" if audit.fits else "no",
        "memory": f"{audit.program.total / 1e9:.2f} of {audit.limit / 1e9:.1f} GB",
        "memory, planned": f"{audit.plan.fullest.total / 1e9:.2f} GB",
        "FLOPs": f"{audit.flops:.4g}",
        "FLOPs, planned": f"{audit.planned_flops:.4g}",
        "step, estimated": f"{audit.seconds.step:.3g} s",
        "MFU, estimated": f"{audit.mfu:.1%}",
        "compiled in": f"{audit.program.compile_seconds:.1f} s",
        "attention": audit.program.attention,
        "surprises": str(len(audit.surprises)),
    }


def _traffic_rows(audit: Audit) -> list[list[str]]:
    keys = {(axes, op) for side in (audit.collectives, audit.planned) for axes, ops in side.items() for op in ops}
    rows = []
    for axes, op in sorted(keys):
        have = audit.collectives.get(axes, {}).get(op, {"count": 0, "bytes": 0, "overlapped_bytes": 0})
        share = f"{have['overlapped_bytes'] / have['bytes']:.0%}" if have["bytes"] else ""
        planned = audit.planned.get(axes, {}).get(op, 0)
        rows.append([axes, op, f"{have['count']:,}", f"{have['bytes']:,}", f"{planned:,}", share])
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _figure(title: str, unit: str) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _stacked(axes: Any, rows: dict[str, list[tuple[str, float, str]]]) -> None:
    """Bars of parts (label, size, color), each label once in the legend."""
    labelled: set[str] = set()
    for row, parts in rows.items():
        left = 0.0
        for label, size, color in parts:
            axes.barh(row, size, left=left, color=color, label=None if label in labelled else label, height=0.6)
            labelled.add(label)
            left += size
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8, loc="best")


def _memory(audit: Audit) -> "Figure":
    figure, axes = _figure("Memory", "GB per device")
    program, plan = audit.program, audit.plan.fullest
    outputs = program.outputs - program.aliased
    compiled = [("arguments", program.arguments, _BLUE), ("temporaries", program.temporaries, _ORANGE)]
    state = plan.parameters + plan.optimizer
    rows: dict[str, list[tuple[str, Any, str]]] = {
        "compiled": [*compiled, ("outputs", outputs, _GREY)],
        "planned": [
            ("parameters, optimizer", state, "#6da5d3"),
            ("gradients", plan.gradients, _GREEN),
            ("activations, other", plan.total - state - plan.gradients, "#eba77f"),
        ],
    }
    _stacked(axes, {row: [(label, size / 1e9, color) for label, size, color in parts] for row, parts in rows.items()})
    axes.axvline(audit.limit / 1e9, color="#444", linewidth=1, linestyle="--")
    return figure


def _traffic(audit: Audit) -> "Figure":
    figure, axes = _figure("Traffic", "GB per device and step")
    rows = {}
    for name, ops in audit.collectives.items():
        for op, total in ops.items():
            hidden = total["overlapped_bytes"]
            if total["bytes"] > 1e-3 * max(t["bytes"] for o in audit.collectives.values() for t in o.values()):
                exposed = total["bytes"] - hidden
                rows[f"{name} {op}"] = [
                    ("beside a matmul", hidden / 1e9, _BLUE),
                    ("exposed", exposed / 1e9, _ORANGE),
                ]
    if rows:
        _stacked(axes, rows)
    return figure


def _seconds(audit: Audit) -> "Figure":
    figure, axes = _figure("Step, estimated", "seconds")
    parts = [("compute", audit.seconds.compute, _BLUE)]
    colors = (_ORANGE, _GREEN, _GREY, "#8659b5")
    parts += [
        (f"exposed {name}", value, colors[i % len(colors)])
        for i, (name, value) in enumerate(audit.seconds.exposed.items())
        if value > 1e-3 * audit.seconds.step
    ]
    _stacked(axes, {"step": parts})
    return figure


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: audit</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{name}</h1><p>{where}</p></header>
<dl>
{tiles}
</dl>
<h2>Pictures</h2>
<div class="plots">
{pictures}
</div>
<h2>Surprises</h2>
{surprises}
<h2>Traffic</h2>
{traffic}
<h2>What no matmul hides</h2>
{exposed}
<h2>Compiler options</h2>
{options}
</body>
</html>
"""
