"""The token file: a corpus as one sequence of tokens, and where in it the documents lie. Whole, or not there."""

import hashlib
import json
import os
import shutil
import uuid
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Shaped, UInt

FORMAT_VERSION = 2

DOCUMENT = np.dtype([("start", "<u8"), ("num_tokens", "<u8"), ("num_bytes", "<u8"), ("hash", "<u8")])
"""Tokens with the separator; bytes of text, 0 where the text is not known; a hash of the content's beginning."""

_HASH_CHUNK_BYTES = 1 << 26
_ROWS_IN_MEMORY = 1 << 16


@dataclass(frozen=True)
class TokenFile:
    """Documents on end, each followed by the separator."""

    path: Path
    tokens: UInt[np.ndarray, " T"] = field(repr=False, compare=False)
    """Mapped, read-only: little-endian, of the least width that the vocabulary needs."""
    documents: Shaped[np.ndarray, " D"] = field(repr=False, compare=False)
    """Mapped, read-only: of dtype DOCUMENT."""
    separator: int
    num_empty: int = 0
    """Documents without text, which were left out."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.documents)


def open_token_file(path: Path, key: str) -> TokenFile | None:
    """The token file that was written under this key, or None where there is none with the content it was given.

    All of it is read, on every core, at more than a gigabyte per second.
    """
    try:
        sidecar = json.loads(path.with_suffix(".json").read_bytes())
        if sidecar["key"] != key or sidecar["hash"] != _content_hash(path):
            return None
        dtype, separator, num_empty = np.dtype(sidecar["dtype"]), sidecar["separator"], sidecar["num_empty"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return TokenFile(path, _mapped(path, dtype), _mapped(_documents_path(path), DOCUMENT), separator, num_empty)


class TokenWriter:
    """Appends documents to a token file."""

    def __init__(self, tokens: BinaryIO, documents: BinaryIO, dtype: np.dtype, separator: int):
        self._tokens, self._documents = tokens, documents
        self._dtype, self._separator = dtype, np.array([separator], dtype)
        # What was added last stays here until the next: it may go on.
        self._rows = array("Q")
        self._num_tokens = 0
        self.num_empty = 0

    def add(self, tokens: UInt[np.ndarray, " T"], num_bytes: int, content_hash: int, begins: bool, ends: bool) -> None:
        """A document, or a piece of one; what goes on from the last one before this file opens a row of its own."""
        self._tokens.write(tokens.astype(self._dtype, copy=False).data)
        size = len(tokens) + ends
        if ends:
            self._tokens.write(self._separator.data)
        if begins or not self._rows:
            self._flush(_ROWS_IN_MEMORY)
            self._rows.extend((self._num_tokens, size, num_bytes, content_hash))
        else:
            self._rows[-3] += size
            self._rows[-2] += num_bytes
        self._num_tokens += size

    def append(self, part: TokenFile, continues: bool) -> None:
        """Another file's documents, the first of which may continue the last one here."""
        with part.path.open("rb") as tokens:
            shutil.copyfileobj(tokens, self._tokens, 1 << 24)
        rows = part.documents
        if continues:
            self._rows[-3] += int(rows["num_tokens"][0])
            self._rows[-2] += int(rows["num_bytes"][0])
            rows = rows[1:]
        for start in range(0, len(rows), _ROWS_IN_MEMORY):
            self._flush(_ROWS_IN_MEMORY)
            block = rows[start : start + _ROWS_IN_MEMORY].copy()
            block["start"] += self._num_tokens
            self._rows.frombytes(block.tobytes())
        self._num_tokens += part.num_tokens
        self.num_empty += part.num_empty

    def close(self) -> None:
        self._documents.write(self._rows.tobytes())

    def _flush(self, most: int) -> None:
        """Write all rows but the last once there are `most`."""
        if len(self._rows) >= 4 * most:
            self._documents.write(self._rows[:-4].tobytes())
            self._rows = self._rows[-4:]


@contextmanager
def writing(path: Path, key: str, vocab_size: int, separator: int) -> Iterator[TokenWriter]:
    """A token file that comes into its place whole when the block ends well, and goes away if it does not."""
    dtype = np.min_scalar_type(vocab_size - 1).newbyteorder("<")
    with replacing(path) as tokens, replacing(_documents_path(path)) as documents:
        writer = TokenWriter(tokens, documents, dtype, separator)
        yield writer
        writer.close()
    sidecar = {
        "key": key,
        "dtype": dtype.str,
        "separator": separator,
        "num_empty": writer.num_empty,
        "hash": _content_hash(path),
    }
    # After the tokens, so that there is never a sidecar without them.
    with replacing(path.with_suffix(".json")) as out:
        out.write(json.dumps(sidecar, indent=2).encode())


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `target` if the block ends well, and goes away if it does not."""
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as out:
            yield out
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def digest(*value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _documents_path(path: Path) -> Path:
    return path.with_suffix(".documents")


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _content_hash(path: Path) -> str:
    """Of tokens and documents: a hash of their chunks' hashes, so that every core takes part."""
    chunks: Sequence[tuple[Path, int]] = [
        (file, start)
        for file in (path, _documents_path(path))
        for start in range(0, max(file.stat().st_size, 1), _HASH_CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
        return hashlib.blake2b(b"".join(pool.map(_chunk_hash, chunks)), digest_size=32).hexdigest()


def _chunk_hash(chunk: tuple[Path, int]) -> bytes:
    file, start = chunk
    hashed = hashlib.blake2b(digest_size=32)
    with file.open("rb") as content:
        content.seek(start)
        for _ in range(0, _HASH_CHUNK_BYTES, 1 << 20):
            hashed.update(content.read(1 << 20))
    return hashed.digest()
