"""Where else a run's metrics go: TensorBoard, Weights & Biases, MLflow. Their packages are imported when asked for."""

import dataclasses
import importlib
import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxpar import toml
from jaxpar.config import Config

_log = logging.getLogger(__name__)
PROJECT = "jaxpar"


class Tracker(Protocol):
    """Made as Tracker(package, run directory, config, step that the run goes on after)."""

    def __init__(self, package: Any, run: Path, config: Config, first: int): ...

    def log(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, package: Any, run: Path, config: Config, first: int):
        # On resuming, TensorBoard hides what was logged of steps that are done again.
        self._writer = package.SummaryWriter(str(run / "tensorboard"), purge_step=first + 1 if first else None)
        text = "".join(f"    {line}\n" for line in toml.dumps(config).splitlines())  # Markdown's code
        self._writer.add_text("config", text, first)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Account, host and mode are wandb's own settings (`wandb login`, WANDB_MODE=offline)."""

    def __init__(self, package: Any, run: Path, config: Config, first: int):
        self._run = package.init(
            project=PROJECT,
            name=run.name,
            dir=str(run),
            config=dataclasses.asdict(config),
            id=_recall(run, "wandb") if first else None,
            resume="allow",
        )
        _keep(run, "wandb", self._run.id)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """The server is MLflow's own setting (MLFLOW_TRACKING_URI)."""

    def __init__(self, package: Any, run: Path, config: Config, first: int):
        self._mlflow = package
        package.set_experiment(PROJECT)
        known = _recall(run, "mlflow") if first else None
        started = package.start_run(run_id=known) if known else package.start_run(run_name=run.name)
        _keep(run, "mlflow", started.info.run_id)
        if not known:  # parameters cannot change, and one call takes a hundred
            for group, settings in dataclasses.asdict(config).items():
                package.log_params({f"{group}.{name}": value for name, value in settings.items()})

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._mlflow.log_metrics(scalars, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_TRACKERS: dict[str, tuple[str, type[Tracker]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}


def parse_trackers(text: str) -> tuple[str, ...]:
    """The names of `--trackers`. Raises ValueError for one that is unknown or whose package is not installed."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in _TRACKERS:
            raise ValueError(f"--trackers: unknown tracker {name!r}{toml.nearest(name, _TRACKERS)}")
        package, _ = _TRACKERS[name]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--trackers {name}: {package} is not installed; pip install {package}")
    return names


@dataclass
class Trackers:
    """All trackers of a run. One that fails is left out from then on, with a warning: it does not end the training."""

    trackers: dict[str, Tracker]

    @classmethod
    def start(cls, names: Sequence[str], run: Path, config: Config, first: int) -> "Trackers":
        """Of a run in directory `run` that goes on after step `first`. Raises ValueError where one does not start."""
        trackers: dict[str, Tracker] = {}
        for name in names:
            package, tracker = _TRACKERS[name]
            try:
                trackers[name] = tracker(importlib.import_module(package), run, config, first)
            except Exception as error:  # each package has its own
                raise ValueError(f"--trackers {name} does not start: {_first_line(error)}; or leave it out") from error
        return cls(trackers)

    def log(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl."""
        scalars = _scalars(row)
        for name, tracker in list(self.trackers.items()):
            try:
                tracker.log(row["step"], scalars)
            except Exception as error:
                del self.trackers[name]
                _log.warning("tracker %s failed at step %d and is left out: %s", name, row["step"], _first_line(error))

    def close(self) -> None:
        for name, tracker in self.trackers.items():
            try:
                tracker.close()
            except Exception as error:
                _log.warning("tracker %s did not close: %s", name, _first_line(error))


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers by name; norms as norms/params/GROUP and norms/grads/GROUP."""
    scalars = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    for group, (param, grad) in row.get("norms", {}).items():
        scalars |= {f"norms/params/{group}": param, f"norms/grads/{group}": grad}
    return scalars


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _recall(run: Path, tracker: str) -> str | None:
    """The tracker's own name of this run."""
    path = run / "trackers.json"
    return json.loads(path.read_text()).get(tracker) if path.exists() else None


def _keep(run: Path, tracker: str, name: str) -> None:
    path = run / "trackers.json"
    names = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(names | {tracker: name}))
