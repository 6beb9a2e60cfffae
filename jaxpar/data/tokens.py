"""Documents -> tokens -> a token file, written once and mapped into memory by every later run."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt, UInt8
from rich.console import Console
from rich.progress import Progress

BYTE_VOCAB_SIZE = 256
SEPARATOR = 0
"""The token after each document: NUL, a byte that no text has."""

_FORMAT_VERSION = 1
_PIECE_BYTES = 1 << 24
_SHOW_PROGRESS_BYTES = 50_000_000


@dataclass(frozen=True)
class TokenFile:
    """A corpus as one sequence of tokens, each document followed by SEPARATOR."""

    path: Path
    tokens: UInt[np.memmap, " T"] = field(repr=False, compare=False)
    """Read-only: uint8, or little-endian uint16 where the vocabulary needs it."""
    num_tokens: int
    vocab_size: int
    num_documents: int


def build_token_file(files: Sequence[Path], cache_dir: Path | None = None) -> TokenFile:
    """The token file of `files`, one document each, from the cache where these very files are in it.

    The cache knows files by path, size and modification time. A token file comes into its place whole or not
    at all, so that processes may build the same one at once; one that was cut short since is built again.

    Args:
      files: as `find_files` gives them, in the order in which the tokens will lie.
      cache_dir: $XDG_CACHE_HOME/jaxpar/tokens by default, ~/.cache/jaxpar/tokens without that variable.

    Raises:
      ValueError: a file is no text.
    """
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpar" / "tokens"
    paths = [os.path.abspath(file) for file in files]
    stats = [os.stat(path) for path in paths]
    versions = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats)]
    key = _digest(_FORMAT_VERSION, versions)
    target = cache_dir / f"{key[:32]}.bin"
    if (cached := _open(target, key)) is not None:
        return cached

    cache_dir.mkdir(parents=True, exist_ok=True)
    num_tokens = _write_byte_tokens(target, files, num_bytes=sum(stat.st_size for stat in stats))
    sidecar = {
        "dtype": np.dtype(np.uint8).str,
        "num_tokens": num_tokens,
        "num_documents": len(files),
        "vocab_size": BYTE_VOCAB_SIZE,
        "key": key,
        "sources": _digest(paths),
    }
    # After the tokens, so that there is never a sidecar without them.
    with _replacing(target.with_suffix(".json")) as out:
        out.write(json.dumps(sidecar, indent=2).encode())
    built = _open(target, key)
    assert built is not None, f"{target} changed while it was being written"
    return built


def byte_tokens(file: Path) -> Iterator[UInt8[np.ndarray, " N"]]:
    """A document's tokens, its bytes and SEPARATOR, in pieces that fit in memory."""
    offset = 0
    with file.open("rb") as text:
        while piece := text.read(_PIECE_BYTES):
            if (nul := piece.find(0)) >= 0:
                raise ValueError(f"{file}: byte {offset + nul} is NUL, not text; leave the file out of --data")
            offset += len(piece)
            yield np.frombuffer(piece, np.uint8)
    yield np.array([SEPARATOR], np.uint8)


def _write_byte_tokens(target: Path, files: Sequence[Path], num_bytes: int) -> int:
    is_short = num_bytes < _SHOW_PROGRESS_BYTES
    progress = Progress(console=Console(stderr=True), transient=True, disable=is_short)
    with _replacing(target) as out, progress:
        task = progress.add_task(f"tokenizing {len(files)} files", total=num_bytes)
        for file in files:
            for piece in byte_tokens(file):
                out.write(piece.data)
                progress.advance(task, len(piece))
        return out.tell()


def _open(target: Path, key: str) -> TokenFile | None:
    """The token file, or None where there is no whole one."""
    try:
        sidecar = json.loads(target.with_suffix(".json").read_bytes())
        dtype = np.dtype(sidecar["dtype"])
        whole = sidecar["key"] == key and target.stat().st_size == sidecar["num_tokens"] * dtype.itemsize
        sizes = {name: sidecar[name] for name in ("num_tokens", "vocab_size", "num_documents")}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return TokenFile(path=target, tokens=np.memmap(target, dtype, mode="r"), **sizes) if whole else None


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `target` if the block ends well, and goes away if it does not."""
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as out:
            yield out
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(*value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
