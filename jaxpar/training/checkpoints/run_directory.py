"""A run's directory: config.toml, metrics.jsonl, checkpoints/, loss.png; and whether a run starts or goes on.

Of several processes the first alone writes.
"""

import dataclasses
import fcntl
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import jax

from jaxpar import toml
from jaxpar.config import Config, load
from jaxpar.training.distributed.processes import from_first

log = logging.getLogger(__name__)

_MUST_MATCH = ("model", "data", "optimizer")
_MUST_MATCH_OF_RUN = ("seed", "precision", "params_dtype", "reduce_dtype", "matmul")


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    _unwritten: list[str] = field(default_factory=list)
    """Lines of metrics.jsonl that a full disk did not take."""
    _held: list[IO[str]] = field(default_factory=list)
    """The lock, while this run writes."""

    @classmethod
    def choose(cls, config: Config) -> "RunDirectory":
        """The directory that the config names, or runs/<time>-<model>; a fresh sibling of it with `--no-resume`.

        Raises ValueError, in every process, where it cannot be used: it cannot be written, `--resume` without a
        checkpoint, or a run of other settings that change its numbers, naming the first difference.
        """
        return cls(Path(from_first("run directory", lambda: str(_choose(config)))))

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoints.is_dir() and any(child.name.isdigit() for child in self.checkpoints.iterdir())

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def check_same(self, config: Config) -> None:
        """Raise ValueError, in one line, for the first setting that this run has otherwise and that must not change."""
        try:
            theirs = load(self.path / "config.toml", Config())
            if not (self.path / "config.toml").read_text().strip():
                raise ValueError(f"{self.path / 'config.toml'} is empty")
        except ValueError as error:
            raise ValueError(f"{error}; --run-dir {self.path} has checkpoints, but not of what: take another") from None
        for group, name in _must_match():
            there, here = (getattr(getattr(c, group), name) for c in (theirs, config))
            if there != here:
                raise ValueError(
                    f"{self.path} is a run with {group}.{name} = {there!r}, not {here!r}; "
                    "set it so, take another --run-dir, or start over with --no-resume"
                )

    def start(self, config: Config, first_step: int) -> None:
        """Write the config; drop metrics of steps that will be done again, all of them in a run that starts."""

        def write() -> str:
            self._lock()
            # What to run, not where: the file can be given to --config for another run.
            resolved = dataclasses.replace(config, run=dataclasses.replace(config.run, directory="", resume="auto"))
            kept = [row for row in self.read_metrics() if row["step"] <= first_step]
            try:
                _replace(self.path / "config.toml", toml.dumps(resolved))
                _replace(self.metrics, "".join(_line(row) for row in kept))
            except OSError as error:
                raise ValueError(f"cannot write in {self.path}: {error.strerror}; take another --run-dir") from None
            return ""

        from_first("config written", write)

    def _lock(self) -> None:
        """Until this process ends. Raises ValueError where another run writes here."""
        if self._held:
            return
        try:
            lock = (self.path / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path} is in use by a run; wait for it, or take another --run-dir") from None
        except OSError:  # a filesystem without locks
            return
        self._held.append(lock)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append a line; one that cannot be written is kept for the next time, and a run goes on without."""
        if jax.process_index() > 0:
            return
        failed_before = bool(self._unwritten)
        self._unwritten.append(_line(row))
        try:
            with self.metrics.open("ab", buffering=0) as file:
                end = file.tell()
                text = "".join(self._unwritten).encode()
                if file.write(text) != len(text):
                    file.truncate(end)
                    raise OSError(0, "the disk is full")
            self._unwritten.clear()
        except OSError as error:
            if not failed_before:
                log.warning("cannot write %s: %s; its lines are kept and tried again", self.metrics, error.strerror)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every whole line; one that a crash cut short is passed over."""
        if not self.metrics.exists():
            return []
        rows = []
        for line in self.metrics.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and "step" in row:
                rows.append(row)
        return rows


def _choose(config: Config) -> Path:
    run = RunDirectory(Path(config.run.directory or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.model.name}"))
    if (config.run.resume == "never" or not config.run.directory) and run.path.exists():
        run = RunDirectory(next(path for n in range(1, 10**6) if not (path := Path(f"{run.path}-{n}")).exists()))
    if (config.run.resume == "require" or config.run.eval_only) and not run.has_checkpoint:
        flag = "--eval-only" if config.run.eval_only else "--resume"
        raise ValueError(f"{flag}: {run.path} has no checkpoint; give its --run-dir, or leave {flag} out")
    if run.has_checkpoint:
        run.check_same(config)
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        for directory in (run.path, run.checkpoints):
            tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ValueError(f"--run-dir {run.path} cannot be written: {error.strerror}; take another") from None
    return run.path


def _must_match() -> Iterator[tuple[str, str]]:
    """(group, field) of every setting that a run keeps as long as it goes on."""
    for group in _MUST_MATCH:
        for setting in dataclasses.fields(getattr(Config(), group)):
            yield group, setting.name
    for name in _MUST_MATCH_OF_RUN:
        yield "run", name


def _line(row: dict[str, Any]) -> str:
    """JSON has no NaN and no infinity: they are null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(row), allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    os.replace(fresh, path)
