"""Which files a corpus is made of."""

import difflib
import glob
import os
import sysconfig
from collections.abc import Collection
from pathlib import Path

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")

_NO_LIBRARY = frozenset({"dist-packages", "idlelib", "site-packages", "test", "tests", "turtledemo"})
"""Folders in the standard library's tree that are no library: installed packages, tests, an editor, demos."""


def find_files(spec: str) -> list[Path]:
    """The text files that `spec` names, sorted, empty ones left out.

    - `stdlib`: the sources of the running Python's standard library, about 11 MB of text that every machine
      has; they differ from one Python version to the next. (A file or directory of that name: `./stdlib`.)
    - A file, whatever its suffix.
    - A directory: the files in it and below with one of TEXT_SUFFIXES; hidden ones are left out.
    - A glob, `**` for any depth: the files that it matches, whatever their suffixes.

    Raises:
      ValueError: `spec` names nothing, or no file with text in it.
    """
    path = Path(spec).expanduser()
    if spec == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = _walk(root, suffixes=(".py",), without=_NO_LIBRARY)
        if not files:
            raise ValueError(f"--data 'stdlib': no Python sources in {root}; name files of your own")
    elif path.is_file():
        files = [path]
    elif spec and path.is_dir():
        files = _walk(path, suffixes=TEXT_SUFFIXES)
        if not files:
            suffixes = " ".join(TEXT_SUFFIXES)
            raise ValueError(f"--data {spec!r}: no {suffixes} file in this directory; name others by a glob")
    elif glob.has_magic(spec):
        files = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
        if not files:
            raise ValueError(f"--data {spec!r}: no file matches {path.absolute()}; correct the glob")
    else:
        near = _nearest(path)
        remedy = f"did you mean {str(near)!r}?" if near else "name a file, a directory, a glob or 'stdlib'"
        raise ValueError(f"--data {spec!r}: {path.absolute()} does not exist; {remedy}")

    with_text = sorted(file for file in set(files) if file.stat().st_size > 0)
    if not with_text:
        raise ValueError(f"--data {spec!r}: every file ({len(files)}) is empty; name files with text in them")
    return with_text


def _walk(root: Path, suffixes: Collection[str], without: Collection[str] = ()) -> list[Path]:
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name[0] != "." and name not in without]
        files += [Path(directory, name) for name in names if name[0] != "." and Path(name).suffix in suffixes]
    return [file for file in files if file.is_file()]


def _nearest(path: Path) -> Path | None:
    """The existing path most like `path`, whose first missing part is taken as misspelt."""
    for missing, parent in zip((path, *path.parents), path.parents):
        if parent.is_dir():
            names = difflib.get_close_matches(missing.name, sorted(os.listdir(parent)), n=1)
            return parent / names[0] if names else None
    return None
