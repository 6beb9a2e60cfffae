"""What a person sees of a run: a progress bar, or lines where there is no terminal, and the curve of its loss."""

import math
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressReport:
    """A context: `update(row)` after each step."""

    def __init__(self, console: Console, first: int, last: int):
        self.console = console
        self.every = min(100, max(1, (last - first) // 20))
        self.last = last
        self.evaluation = ""
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=last, completed=first)

    def __enter__(self) -> "ProgressReport":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def update(self, row: dict[str, Any]) -> None:
        text = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s  MFU {row['mfu']:.1%}"
        evaluated = row["eval_loss"] is not None
        if evaluated:
            self.evaluation = f"  eval loss {row['eval_loss']:.4f}"
        self.bar.update(self.task, completed=row["step"], description=text + self.evaluation)
        due = row["step"] % self.every == 0 or row["step"] == self.last or evaluated
        if not self.console.is_terminal and due:
            text += self.evaluation if evaluated else ""
            self.console.print(f"step {row['step']}/{self.last}  {text}", highlight=False)


def plot_loss(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss, and evaluation loss where there is any, over tokens, as a PNG."""
    from matplotlib.figure import Figure  # a second to import, which no run should wait for at its start

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([row["tokens"] for row in rows], [row["loss"] for row in rows], color="#1f6fb4", linewidth=1.5)
    evaluated = [row for row in rows if math.isfinite(row.get("eval_loss") or math.nan)]
    if evaluated:
        axes.plot([row["tokens"] for row in evaluated], [row["eval_loss"] for row in evaluated], "o-", color="#d9662b")
        axes.legend(["training", "evaluation"], frameon=False)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
