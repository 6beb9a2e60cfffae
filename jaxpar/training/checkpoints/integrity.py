"""Whether a directory still is, byte for byte, what was written.

`checksums.sha256` has a line `<digest>  <path>` for every other file, as `sha256sum --check` reads it, and at its end a
comment with the digest of these lines. A bit that flips anywhere, a file cut short, missing or added does not pass.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "checksums.sha256"


def write_share(directory: Path, index: int, count: int) -> None:
    """Digest every count-th file from the index-th on, see them onto the disk, and note the digests for `seal`."""
    share = [path for path in _files(directory) if not path.startswith(MANIFEST)][index::count]
    with ThreadPoolExecutor() as threads:
        digests = threads.map(lambda path: _digest(directory / path, sync=True), share)
        lines = [f"{digest}  {path}\n" for digest, path in zip(digests, share)]
    (directory / f"{MANIFEST}.{index}").write_text("".join(lines))


def seal(directory: Path, count: int) -> None:
    """Make the manifest of `count` shares. Raises OSError where one is missing."""
    parts = [directory / f"{MANIFEST}.{index}" for index in range(count)]
    lines = sorted((line for part in parts for line in part.read_text().splitlines()), key=_path)
    for part in parts:
        part.unlink()
    if [_path(line) for line in lines] != _files(directory):
        raise OSError("the processes do not see the same files; is the directory on a filesystem that they share?")
    body = "".join(f"{line}\n" for line in lines).encode()
    with (directory / MANIFEST).open("wb") as file:
        file.write(body + _ending(body))
        file.flush()
        os.fsync(file.fileno())


def damage(directory: Path, index: int = 0, count: int = 1) -> str | None:
    """What is wrong with a sealed directory, in words, or None; every count-th file from the index-th on is read."""
    if not (directory / MANIFEST).is_file():
        return f"it has no {MANIFEST}"
    try:
        text = (directory / MANIFEST).read_bytes()
        body = text[: text.rfind(b"\n# ") + 1]
        if text != body + _ending(body):
            return f"{MANIFEST} is damaged"
        digests = {_path(line): line.partition("  ")[0] for line in body.decode().splitlines()}
        files = set(_files(directory)) - {MANIFEST}
        if odd := sorted(files ^ digests.keys()):
            return f"{odd[0]} is {'missing' if odd[0] in digests else 'not of it'}"
        share = sorted(files)[index::count]
        with ThreadPoolExecutor() as threads:
            found = threads.map(lambda path: _digest(directory / path), share)
            changed = [path for path, digest in zip(share, found) if digest != digests[path]]
        return f"{changed[0]} is damaged" if changed else None
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _ending(body: bytes) -> bytes:
    return f"# {hashlib.sha256(body).hexdigest()}\n".encode()


def _path(line: str) -> str:
    return line.partition("  ")[2]


def _files(directory: Path) -> Sequence[str]:
    """Whatever is no directory, sorted."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())


def _digest(path: Path, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
