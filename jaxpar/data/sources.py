"""What a corpus is made of: specs -> weighted sources -> files."""

import difflib
import glob
import math
import os
import sysconfig
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
"""Of files that are one document each."""
RECORD_SUFFIX = ".jsonl"
TABLE_SUFFIX = ".parquet"
TOKEN_SUFFIX = ".bin"
COMPRESSED_SUFFIXES = (".bz2", ".gz", ".xz", ".zst")
"""After a text file's or a .jsonl's own suffix."""

_NO_LIBRARY = frozenset({"dist-packages", "idlelib", "site-packages", "test", "tests", "turtledemo"})
"""Folders in the standard library's tree that are no library: installed packages, tests, an editor, demos."""


@dataclass(frozen=True)
class Source:
    """Files that are shuffled together and repeated together."""

    spec: str
    files: tuple[Path, ...]
    """In the order in which their documents will lie."""
    weight: Fraction
    """Of its samples in the mixture, relative to the other sources'."""


def find_sources(spec: str, flag: str = "--data") -> list[Source]:
    """The sources that `spec` names: what `find_files` takes, several separated by commas, `=WEIGHT` after each.

    Without any weight all files are one source: every token is as likely as any other. With one, the sources without
    have 1. A spec that exists as a path is taken whole, commas and all.

    Raises:
      ValueError: a weight is no positive number, or `find_files` finds nothing; `flag` is what it blames.
    """
    whole = os.path.exists(os.path.expanduser(spec))
    parts = [_split_weight(part, flag) for part in ([spec] if whole else spec.split(","))]
    found = [(name, find_files(name, flag), weight) for name, weight in parts]
    if all(weight is None for _, _, weight in found):
        files = sorted({file for _, files, _ in found for file in files})
        return [Source(spec, tuple(files), Fraction(1))]
    return [Source(name, tuple(files), Fraction(1) if weight is None else weight) for name, files, weight in found]


def _split_weight(part: str, flag: str) -> tuple[str, Fraction | None]:
    name, equals, text = part.rpartition("=")
    # `year=2024/a.txt` is a path, and so is a file that is called `a=1`.
    if not equals or "/" in text or glob.has_magic(text) or os.path.exists(os.path.expanduser(part)):
        return part, None
    try:
        is_usable = 0 < float(text) < math.inf
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError(f"{flag} {part!r}: the weight {text!r} must be a number above 0, as in {name or 'PATH'}=0.5")
    return name, Fraction(text)


def find_files(spec: str, flag: str = "--data") -> list[Path]:
    """The files that `spec` names, sorted, empty ones left out.

    - `stdlib`: the sources of the running Python's standard library, about 11 MB of text that every machine
      has; they differ from one Python version to the next. (A file or directory of that name: `./stdlib`.)
    - A file of a known suffix; one without any is taken for text.
    - A directory: the files in it and below with a known suffix; hidden ones are left out.
    - A glob, `**` for any depth: the files that it matches.

    Raises:
      ValueError: `spec` names nothing, a file of unknown suffix, or no file with text in it.
    """
    path = Path(spec).expanduser()
    if spec == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = _walk(root, lambda file: file.suffix == ".py", _NO_LIBRARY)
        if not files:
            raise ValueError(f"{flag} 'stdlib': no Python sources in {root}; name files of your own")
    elif os.path.isfile(path):
        files = [path]
    elif spec and os.path.isdir(path):
        files = _walk(path, lambda file: bool(file.suffix) and is_known(file))
        if not files:
            raise ValueError(f"{flag} {spec!r}: no {known_suffixes()} file in this directory")
    elif glob.has_magic(spec):
        files = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
        if not files:
            raise ValueError(f"{flag} {spec!r}: no file matches {path.absolute()}; correct the glob")
    else:
        near = _nearest(path)
        remedy = f"did you mean {str(near)!r}?" if near else "name a file, a directory, a glob or 'stdlib'"
        raise ValueError(f"{flag} {spec!r}: {path.absolute()} does not exist; {remedy}")

    for file in files:
        if not is_known(file):
            raise ValueError(f"{flag} {spec!r}: {file} has an unknown suffix; known: {known_suffixes()}")
    with_text = sorted(file for file in set(files) if file.stat().st_size > 0)
    if not with_text:
        raise ValueError(f"{flag} {spec!r}: every file ({len(files)}) is empty; name files with text in them")
    return with_text


def is_compressed(file: Path) -> bool:
    return file.suffix in COMPRESSED_SUFFIXES


def content_suffix(file: Path) -> str:
    """The suffix that says what is in a file, beneath its compression."""
    return Path(file.stem).suffix if is_compressed(file) else file.suffix


def is_known(file: Path) -> bool:
    suffix = content_suffix(file)
    return suffix in ("", *TEXT_SUFFIXES, RECORD_SUFFIX) or (
        suffix in (TABLE_SUFFIX, TOKEN_SUFFIX) and not is_compressed(file)
    )


def known_suffixes() -> str:
    kinds = " ".join((*TEXT_SUFFIXES, RECORD_SUFFIX, TABLE_SUFFIX, TOKEN_SUFFIX))
    return f"{kinds} (text also with {' '.join(COMPRESSED_SUFFIXES)})"


def _walk(root: Path, keep: Callable[[Path], bool], without: Collection[str] = ()) -> list[Path]:
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name[0] != "." and name not in without]
        files += [Path(directory, name) for name in names if name[0] != "." and keep(Path(name))]
    return [file for file in files if file.is_file()]


def _nearest(path: Path) -> Path | None:
    """The existing path most like `path`, whose first missing part is taken as misspelt."""
    for missing, parent in zip((path, *path.parents), path.parents):
        if os.path.isdir(parent):
            names = difflib.get_close_matches(missing.name, sorted(os.listdir(parent)), n=1)
            return parent / names[0] if names else None
    return None
