"""Checkpoints seen from outside of a run: listed, described, converted to safetensors."""

import contextlib
import json
import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar import toml
from jaxpar.training.checkpoints import checkpoint, integrity

# The format's own names: https://github.com/huggingface/safetensors
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint32": "U32",
}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Listed:
    """A checkpoint of a run."""

    step: int
    size: int
    """Bytes."""
    time: float
    """When it was finished, in seconds since the epoch."""
    damage: str | None
    """None: it is whole."""


def list_checkpoints(run: Path) -> list[Listed]:
    """Every checkpoint of a run directory, each read to its last byte. Raises ValueError where it is none."""
    directory = _checkpoints_of(run)
    listed = []
    for step in checkpoint.steps(directory):
        path = directory / str(step)
        size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
        listed.append(Listed(step, size, path.stat().st_mtime, integrity.damage(path)))
    return listed


def find(path: Path) -> Path:
    """The checkpoint that RUN_DIR/checkpoints/STEP names, or the newest whole one of RUN_DIR; read to its last byte.
    Raises ValueError where it is not there, or damaged."""
    if path.name.isdigit() and path.parent.name == "checkpoints":
        directory = _checkpoints_of(path.parent.parent)
        if not path.is_dir():
            there = ", ".join(map(str, checkpoint.steps(directory))) or "none"
            raise ValueError(f"{path.parent.parent} has no checkpoint of step {path.name}; there: {there}")
        if problem := integrity.damage(path):
            raise ValueError(f"checkpoint {path} is damaged: {problem}; give another, or the run directory")
        return path
    step = checkpoint.latest(directory := _checkpoints_of(path))
    if step is None:
        raise ValueError(f"{path} has no checkpoint yet; a run writes one at its end, and every --checkpoint-every")
    return directory / str(step)


def summary(path: Path) -> dict[str, Any]:
    """The config, data position and parameters of a whole checkpoint, to be written as JSON."""
    stored = checkpoint.describe(path)
    parameters = _parameters(stored)
    return {
        "path": str(path),
        "position": stored.position,
        "config": tomllib.loads(stored.config),
        "parameters": {
            name: {"shape": leaf.shape, "dtype": leaf.dtype.name, "count": math.prod(leaf.shape)}
            for name, (_, leaf) in parameters.items()
        },
        "count": sum(math.prod(leaf.shape) for _, leaf in parameters.values()),
        "bytes": sum(_size(leaf) for _, leaf in parameters.values()),
        "state_bytes": sum(_size(leaf) for leaf in stored.arrays.values()),
    }


def convert(path: Path, to: Path, dtype: str | None = None, *, ema: bool = False, force: bool = False) -> int:
    """Write a whole checkpoint's parameters, or their moving average, as one safetensors file; returns its size. Of
    Schedule-Free's it is the average that is written, which training itself does not hold (arXiv 2405.15682).

    One parameter is in memory at a time. The file appears whole or not at all. Raises ValueError.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype} is not known{toml.nearest(dtype, _DTYPES)}")
    if to.suffix != ".safetensors":
        raise ValueError(f"--to {to} is no name of a safetensors file; end it with .safetensors")
    if to.exists() and not force:
        raise ValueError(f"{to} exists; give --force to overwrite it, or another --to")
    stored = checkpoint.describe(path)
    parameters = _averages(path, stored) if ema else _parameters(stored)
    as_written = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype or leaf.dtype)) for name, (_, leaf) in parameters.items()
    }
    averaged = _schedule_free(path, stored)
    unfinished = to.with_name(f".{to.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(_header(as_written, {"format": "jaxpar", "config": stored.config, **_strings(stored.position)}))
            for name, (key, leaf) in parameters.items():
                value = checkpoint.read(path, key, leaf)
                if averaged is not None:
                    value = averaged(name, value)
                file.write(_cast(name, value, as_written[name].dtype).data)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        unfinished.rename(to)
    except OSError as error:
        raise ValueError(f"cannot write {to}: {error.strerror}; give another --to") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return size


def _checkpoints_of(run: Path) -> Path:
    directory = run / "checkpoints"
    if not directory.is_dir():
        raise ValueError(
            f"{run} is not a run directory, having no checkpoints/; give runs/NAME or runs/NAME/checkpoints/STEP"
        )
    return directory


def _parameters(stored: checkpoint.Stored) -> dict[str, tuple[str, jax.ShapeDtypeStruct]]:
    """(path in the state, array) of each parameter, by its dotted name."""
    prefix = "params."
    return {key.removeprefix(prefix): (key, leaf) for key, leaf in stored.arrays.items() if key.startswith(prefix)}


def _averages(path: Path, stored: checkpoint.Stored) -> dict[str, tuple[str, jax.ShapeDtypeStruct]]:
    """The same of the parameters' moving averages, which the optimizer's state holds as `params`."""
    found = {}
    for name in _parameters(stored):
        keys = [key for key in stored.arrays if key.startswith("opt_state.") and key.endswith(f".params.{name}")]
        if len(keys) != 1:
            raise ValueError(f"{path} has no moving average of {name}; leave --ema out, or train with --ema DECAY")
        found[name] = keys[0], stored.arrays[keys[0]]
    return found


def _schedule_free(path: Path, stored: checkpoint.Stored) -> Callable[[str, np.ndarray], np.ndarray] | None:
    """x of y, by a parameter's name, where the optimizer is Schedule-Free: y = (1 - b1) z + b1 x is what it trains."""
    suffix = ".b1"
    prefix = next(
        (k.removesuffix(suffix) for k in stored.arrays if k.startswith("opt_state.") and k.endswith(suffix)), None
    )
    if prefix is None:
        return None
    b1 = float(checkpoint.read(path, prefix + suffix, stored.arrays[prefix + suffix]))

    def averaged(name: str, y: np.ndarray) -> np.ndarray:
        key = f"{prefix}.z.{name}"
        z = checkpoint.read(path, key, stored.arrays[key])
        return ((y - (1 - b1) * z.astype(y.dtype)) / b1).astype(y.dtype)

    return averaged


def _header(leaves: dict[str, jax.ShapeDtypeStruct], metadata: dict[str, str]) -> bytes:
    """Length and JSON, padded to eight bytes; offsets count from its end."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, leaf in leaves.items():
        begin, end = end, end + _size(leaf)
        entries[name] = {
            "dtype": _SAFETENSORS[leaf.dtype.name],
            "shape": list(leaf.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As contiguous bytes. Raises ValueError for a value that the dtype does not hold."""
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(array.astype(dtype))
    if np.any(np.isfinite(array) & ~np.isfinite(cast)):
        raise ValueError(f"{name} has values outside of {dtype.name}'s range; take --dtype bfloat16 or float32")
    return cast.reshape(-1).view(np.uint8)


def _size(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _strings(position: dict[str, int]) -> dict[str, str]:
    return {name: str(value) for name, value in position.items()}
