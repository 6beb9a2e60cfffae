"""Frozen dataclasses to and from TOML, strictly: a key that is not a field is an error, with the nearest that is."""

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """'; did you mean X?' for the closest of the known names, else the list of them."""
    known = sorted(known)
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known)}"


def check_range(name: str, value: float, least: float, most: float | None = None) -> None:
    """Raise ValueError, in one line, for a number outside of [least, most]; NaN and infinity are outside of any."""
    if not (least <= value < math.inf) or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value}; it must be {limit}" + ("" if math.isfinite(value) else ", and finite"))


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ValueError, naming file and line, where it does not parse."""
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def build(base: T, table: dict[str, Any], where: str) -> T:
    """`base`, a dataclass instance, with the fields that the table gives; nested tables for nested dataclasses."""
    assert dataclasses.is_dataclass(base)
    assert not isinstance(base, type)
    hints = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            raise ValueError(f"{where}: unknown key {key!r}{nearest(key, hints)}")
        current = getattr(base, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ValueError(f"{where}: {key} is {value!r}; it must be a table")
            changes[key] = build(current, value, f"{where}: {key}")
        else:
            changes[key] = _checked(value, hints[key], f"{where}: {key}")
    return dataclasses.replace(base, **changes)


def _checked(value: Any, hint: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{where} is {value!r}; it must be one of {', '.join(map(str, typing.get_args(hint)))}")
        return value
    kinds = typing.get_args(hint) if origin in (typing.Union, types.UnionType) else (hint,)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not any(type(value) is kind for kind in kinds):
        names = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
        raise ValueError(f"{where} is {value!r}; it must be of type {names}")
    return value


def dumps(config: Any) -> str:
    """A dataclass of scalars and of dataclasses as TOML; fields that are None are left out."""
    lines: list[str] = []

    def write(node: Any, prefix: str) -> None:
        fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        nested = {name: value for name, value in fields.items() if dataclasses.is_dataclass(value)}
        for name, value in fields.items():
            if name not in nested and value is not None:
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
        for name, value in nested.items():
            lines.extend(["", f"[{prefix}{name}]"] if lines else [f"[{prefix}{name}]"])
            write(value, f"{prefix}{name}.")

    write(config, "")
    return "\n".join(lines) + "\n"
