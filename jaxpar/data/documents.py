"""Files -> documents, in pieces that fit in memory. What cannot be read is told by file and byte, line or row."""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import zstandard
from jaxtyping import UInt

from jaxpar.data.sources import RECORD_SUFFIX, TABLE_SUFFIX, TOKEN_SUFFIX, content_suffix, is_compressed

PIECE_BYTES = 1 << 17
"""A longer document is read, and tokenized, in pieces that end where a line ends."""
_PIECE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Unit:
    """A file, or a part of one, that can be read without the rest."""

    path: Path
    start: int
    """The first byte of a text, the first row group of a table."""
    end: int
    num_bytes: int
    """What it takes to read it: the measure of progress."""
    is_last: bool
    """Of its file."""

    @property
    def continues(self) -> bool:
        """Its first document began in the unit before."""
        return self.start > 0 and content_suffix(self.path) not in (RECORD_SUFFIX, TABLE_SUFFIX)


class Piece(NamedTuple):
    """A document, or a part of one that follows the piece before it."""

    content: bytes | UInt[np.ndarray, " T"]
    """Valid UTF-8, or the tokens of a .bin file."""
    unit: Unit
    at: int
    """Byte, line or row, as `locate` wants it."""
    begins: bool = True
    ends: bool = True


def units(path: Path, text_field: str, unit_bytes: int) -> list[Unit]:
    """A file in units of about `unit_bytes`: a compressed file and a .bin cannot be divided, others can.

    Raises:
      ValueError: it cannot be opened, is no parquet file, or has no column of text called `text_field`.
    """
    try:
        size = path.stat().st_size
        if content_suffix(path) == TABLE_SUFFIX:
            return _table_units(path, text_field, unit_bytes)
        if size <= unit_bytes or is_compressed(path) or content_suffix(path) == TOKEN_SUFFIX:
            return [Unit(path, 0, size, size, True)]
        find = _line_start if content_suffix(path) == RECORD_SUFFIX else _text_cut
        with path.open("rb") as file:
            bounds = [0, *(find(file, at) for at in range(unit_bytes, size - PIECE_BYTES, unit_bytes)), size]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    bounds = sorted(set(bounds))
    return [Unit(path, start, end, end - start, end == size) for start, end in pairwise(bounds)]


def read(unit: Unit, text_field: str, separator: int, vocab_size: int) -> Iterator[Piece]:
    """The documents of a unit; those of a .bin file lie between `separator` tokens.

    Raises:
      ValueError: what is there is not what its suffix says.
    """
    suffix = content_suffix(unit.path)
    if suffix == TOKEN_SUFFIX:
        yield from _read_tokens(unit, separator, vocab_size)
    elif suffix == TABLE_SUFFIX:
        yield from _read_table(unit, text_field)
    else:
        try:
            with _open(unit) as stream:
                if suffix == RECORD_SUFFIX:
                    yield from _read_records(unit, stream, text_field)
                else:
                    yield from _read_text(unit, stream)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"cannot read {unit.path}: {error}") from None


def locate(unit: Unit, at: int) -> str:
    """FILE: byte N, FILE:LINE or FILE: row N, of a Piece's `at`."""
    suffix = content_suffix(unit.path)
    if suffix == RECORD_SUFFIX:
        lines_before = 0
        if unit.start:
            with unit.path.open("rb") as file:
                blocks = (file.read(min(PIECE_BYTES, unit.start - at)) for at in range(0, unit.start, PIECE_BYTES))
                lines_before = sum(block.count(b"\n") for block in blocks)
        return f"{unit.path}:{lines_before + at + 1}"
    return f"{unit.path}: {'row' if suffix == TABLE_SUFFIX else 'byte'} {at}"


def pieces(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """A stream of text in pieces of at most PIECE_BYTES, each with whether it is the last.

    The pieces are a function of the text alone, and their tokens are the whole's: they end after a line that neither
    ends nor is followed by white space, where byte-level BPE's pattern (GPT-2) cuts too, unless there is no such line.
    """
    rest = stream.read(PIECE_BYTES)
    while len(rest) == PIECE_BYTES:
        cut = _cut(rest)
        yield rest[:cut], False
        rest = rest[cut:] + stream.read(cut)
    yield rest, True


def _cut(text: bytes) -> int:
    """The last good place to cut in a text that goes on."""
    newline = len(text)
    while (newline := text.rfind(b"\n", 1, newline)) > 0:
        after = text[newline + 1 : newline + 2]
        if after and not after.isspace() and not text[newline - 1 : newline].isspace():
            return newline + 1
    at = len(text) - 1
    while at > len(text) - 4 and text[at] & 0xC0 == 0x80:  # inside of a UTF-8 character
        at -= 1
    return at


def _text_cut(file: BinaryIO, at: int) -> int:
    file.seek(at)
    return at + _cut(file.read(PIECE_BYTES))


def _line_start(file: BinaryIO, at: int) -> int:
    file.seek(at - 1)
    file.readline()
    return file.tell()


def _open(unit: Unit) -> Any:
    if unit.path.suffix == ".gz":
        return gzip.open(unit.path)
    if unit.path.suffix == ".bz2":
        return bz2.open(unit.path)
    if unit.path.suffix == ".xz":
        return lzma.open(unit.path)
    if unit.path.suffix == ".zst":
        return io.BufferedReader(_ZstdReader(unit.path))
    with unit.path.open("rb") as file:
        file.seek(unit.start)
        return io.BytesIO(file.read(unit.end - unit.start))


class _ZstdReader(io.RawIOBase):
    """Frames one after the other. zstandard's own stream takes a file that was cut short for a whole one."""

    def __init__(self, path: Path):
        self._file = path.open("rb")
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            left = self._frame.unused_data if self._frame and self._frame.eof else b""
            block = left or self._file.read(PIECE_BYTES)
            if not self._frame or self._frame.eof:
                if not block:
                    return 0
                self._frame = self._decompressor.decompressobj()
            if not block:
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            try:
                self._output = memoryview(self._frame.decompress(block))
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_text(unit: Unit, stream: BinaryIO) -> Iterator[Piece]:
    at, begins = unit.start, not unit.continues
    for text, last in pieces(stream):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{locate(unit, at + error.start)} is no UTF-8; convert the file") from None
        yield Piece(text, unit, at, begins, last and unit.is_last)
        at, begins = at + len(text), False


def _read_records(unit: Unit, stream: BinaryIO, text_field: str) -> Iterator[Piece]:
    for number, line in enumerate(stream):
        if not line.isspace():
            yield from _whole(_record_text(unit, number, line, text_field), unit, number)


def _record_text(unit: Unit, number: int, line: bytes, text_field: str) -> bytes:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a mark
        if not isinstance(record, dict):
            raise ValueError(f"no JSON object but {type(record).__name__}")
        if text_field not in record:
            raise ValueError(f"no field {text_field!r}, but {', '.join(record)}; name one by --text-field")
        text = record[text_field]
        if not isinstance(text, str | None):
            raise ValueError(f"field {text_field!r} is {type(text).__name__}, not text; name another by --text-field")
        return (text or "").encode()
    except json.JSONDecodeError as error:
        told = f"invalid JSON: {error.msg}, column {error.colno}"
    except UnicodeDecodeError as error:
        told = f"byte {error.start} of the line is no UTF-8"
    except UnicodeEncodeError:
        told = "half of a surrogate pair, which is no character"
    except RecursionError:
        told = "JSON nested too deeply"
    except ValueError as error:
        told = str(error)
    raise ValueError(f"{locate(unit, number)}: {told}")


def _whole(text: bytes, unit: Unit, at: int) -> Iterator[Piece]:
    if len(text) < PIECE_BYTES:
        yield Piece(text, unit, at)
        return
    begins = True
    for piece, last in pieces(io.BytesIO(text)):
        yield Piece(piece, unit, at, begins, last)
        begins = False


def _table(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no whole parquet file: {_first_line(error)}") from None


def _table_units(path: Path, text_field: str, unit_bytes: int) -> list[Unit]:
    import pyarrow as pa

    with _table(path) as table:
        schema = table.schema_arrow
        if text_field not in schema.names:
            raise ValueError(
                f"{path} has no column {text_field!r}; name one by --text-field: {', '.join(schema.names)}"
            )
        kind = schema.field(text_field).type
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(value) or pa.types.is_large_string(value)):
            raise ValueError(f"{path}: column {text_field!r} is {kind}, not text; name another by --text-field")
        sizes = [table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)]
    if not sizes:
        return [Unit(path, 0, 0, 0, True)]
    result, start = [], 0
    for group in range(len(sizes)):
        is_last = group == len(sizes) - 1
        if is_last or sum(sizes[start : group + 1]) >= unit_bytes:
            result.append(Unit(path, start, group + 1, sum(sizes[start : group + 1]), is_last))
            start = group + 1
    return result


def _read_table(unit: Unit, text_field: str) -> Iterator[Piece]:
    import pyarrow as pa

    with _table(unit.path) as table:
        row = sum(table.metadata.row_group(group).num_rows for group in range(unit.start))
        groups = list(range(unit.start, unit.end))
        batches = table.iter_batches(1024, row_groups=groups, columns=[text_field], use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{unit.path} is damaged after row {row}: {_first_line(error)}") from None
            if batch is None:
                return
            for text in batch.column(0).cast(pa.large_string()).cast(pa.large_binary()).to_pylist():
                text = text or b""
                try:
                    text.decode()
                except UnicodeDecodeError:
                    raise ValueError(f"{locate(unit, row)} is no UTF-8; correct the file") from None
                yield from _whole(text, unit, row)
                row += 1


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_tokens(unit: Unit, separator: int, vocab_size: int) -> Iterator[Piece]:
    tokens = open_tokens(unit.path)
    begins = True
    for start in range(0, len(tokens), _PIECE_TOKENS):
        block = tokens[start : start + _PIECE_TOKENS]
        if block.max() >= vocab_size:
            at = start + int(np.argmax(block >= vocab_size))
            raise ValueError(
                f"{unit.path}: token {at} is {tokens[at]}, the tokenizer's end at {vocab_size - 1}; "
                "name the one that wrote them by --tokenizer"
            )
        ends = np.flatnonzero(block == separator)
        for first, end in zip((0, *(ends + 1)), (*ends, len(block))):
            is_end = end < len(block)
            if is_end or end > first:
                yield Piece(block[first:end], unit, start + int(first), begins, is_end)
                begins = is_end
    if not begins:
        yield Piece(tokens[:0], unit, len(tokens), False, True)


def dtype_file(path: Path) -> Path | None:
    """What is beside a .bin file to say its type, if there is one."""
    sidecar = path.with_suffix(".json")
    return sidecar if path.suffix == TOKEN_SUFFIX and sidecar.exists() else None


def open_tokens(path: Path) -> UInt[np.memmap, " T"]:
    """A .bin file: little-endian uint16, as nanoGPT writes it, or what the .json beside it says: {"dtype": "uint32"}.

    Raises:
      ValueError: another dtype, or a size that is no multiple of its.
    """
    dtype = np.dtype("<u2")
    if sidecar := dtype_file(path):
        try:
            dtype = np.dtype(json.loads(sidecar.read_bytes())["dtype"]).newbyteorder("<")
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f'{sidecar} does not say {{"dtype": "uint16"}}, the type of {path.name}') from None
    if dtype.kind != "u" or dtype.itemsize > 4:
        raise ValueError(f"{sidecar}: tokens are uint8, uint16 or uint32, not {dtype.name}")
    if path.stat().st_size % dtype.itemsize:
        raise ValueError(f"{path}: {path.stat().st_size} bytes are no whole number of {dtype.name} tokens")
    return np.memmap(path, dtype, mode="r")
