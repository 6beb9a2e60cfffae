"""A run's directory: config.toml, metrics.jsonl, checkpoints/, loss.png; and whether a run starts or goes on."""

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar import toml
from jaxpar.config import Config, load

_MUST_MATCH = ("model", "data", "optimizer")


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def choose(cls, config: Config) -> "RunDirectory":
        """The directory that the config names, or runs/<time>-<model>; a fresh sibling of it with `--no-resume`.

        Raises ValueError where it cannot be used: `--resume` without a checkpoint, or a run of other model, data or
        optimizer settings, naming the first difference.
        """
        run = cls(Path(config.run.directory or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.model.name}"))
        if config.run.resume == "never" and run.path.exists():
            run = cls(next(path for n in range(1, 10**6) if not (path := Path(f"{run.path}-{n}")).exists()))
        if config.run.resume == "require" and not run.has_checkpoint:
            raise ValueError(f"--resume: {run.path} has no checkpoint; give its --run-dir, or leave --resume out")
        if run.has_checkpoint:
            run._check_same(config)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--run-dir {run.path} cannot be made: {error.strerror}; take another") from None
        if not os.access(run.path, os.W_OK):
            raise ValueError(f"--run-dir {run.path} is not writable; take another, or change its mode")
        return run

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoints.is_dir() and any(child.name.isdigit() for child in self.checkpoints.iterdir())

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _check_same(self, config: Config) -> None:
        try:
            theirs = load(self.path / "config.toml", Config())
        except ValueError as error:
            raise ValueError(f"{error}; --run-dir {self.path} has checkpoints, but not of what: take another") from None
        for group in _MUST_MATCH:
            for field in dataclasses.fields(getattr(config, group)):
                there, here = (getattr(getattr(c, group), field.name) for c in (theirs, config))
                if there != here:
                    raise ValueError(
                        f"{self.path} is a run with {group}.{field.name} = {there!r}, not {here!r}; "
                        "set it so, take another --run-dir, or start over with --no-resume"
                    )
        if theirs.run.seed != config.run.seed:
            raise ValueError(
                f"{self.path} is a run with --seed {theirs.run.seed}, not {config.run.seed}; set it so, "
                "take another --run-dir, or start over with --no-resume"
            )

    def start(self, config: Config, first_step: int) -> None:
        """Write the config; drop metrics of steps that will be done again, all of them in a run that starts."""
        # What to run, not where: the file can be given to --config for another run.
        resolved = dataclasses.replace(config, run=dataclasses.replace(config.run, directory="", resume="auto"))
        (self.path / "config.toml").write_text(toml.dumps(resolved))
        kept = [row for row in self.read_metrics() if row["step"] <= first_step]
        self.metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def append_metrics(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every whole line; a last one that a crash cut short is passed over."""
        if not self.metrics.exists():
            return []
        rows = []
        for line in self.metrics.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if not isinstance(row, dict) or "step" not in row:
                break
            rows.append(row)
        return rows
