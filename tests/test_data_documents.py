"""Every kind of file gives its documents whole; what is wrong in one is told by file and place."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_helpers import write, write_jsonl

from jaxpar.data.documents import PIECE_BYTES, Piece, pieces, read, units

LONG = "".join(f"line {i} of a long text, zwölf\n" for i in range(20_000))
TEXTS = ["one", "", "zwölf\nlines", LONG, "last"]


def documents(path: Path, unit_bytes: int = 1 << 30, field: str = "text", separator: int = 0) -> list[bytes]:
    """What the pieces of all units make, their marks followed."""
    joined: list[list[Piece]] = []
    for unit in units(path, field, unit_bytes):
        for number, piece in enumerate(read(unit, field, separator, vocab_size=1000)):
            assert piece.begins or not unit.continues or number == 0 or not joined[-1][-1].ends
            assert piece.begins == (not joined or joined[-1][-1].ends)
            assert len(piece.content) <= PIECE_BYTES
            joined += [[]] if piece.begins else []
            joined[-1].append(piece)
    assert not joined or joined[-1][-1].ends
    return [b"".join(bytes(piece.content) for piece in of) for of in joined]


def write_table(path: Path, texts: list[str | None], kind: str | pa.DataType = "string", **options) -> Path:
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string()).cast(kind)})
    pq.write_table(table, path, **options)
    return path


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_a_text_is_one_document_however_compressed(tmp_path, suffix):
    path = write(tmp_path / f"a.txt{suffix}", COMPRESS.get(suffix, bytes)(LONG.encode()))
    assert documents(path) == [LONG.encode()]


@pytest.mark.parametrize("unit_bytes", [1 << 30, 200_000, 60_000])
@pytest.mark.parametrize("text", [LONG, "ö" * 300_000, "\n \n" * 200_000, "x" * (2 * PIECE_BYTES)])
def test_a_long_text_is_read_in_units_that_make_it_up(tmp_path, text, unit_bytes):
    path = write(tmp_path / "a.txt", text)
    assert documents(path, unit_bytes) == [text.encode()]
    if unit_bytes == 200_000:
        assert len(units(path, "text", unit_bytes)) == max((len(text.encode()) - PIECE_BYTES - 1) // unit_bytes + 1, 1)


def test_records_may_begin_with_a_byte_order_mark(tmp_path):
    content = write_jsonl(tmp_path / "a.jsonl", ["one", "zwölf"]).read_bytes()
    assert documents(write(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + content)) == [b"one", "zwölf".encode()]


def test_pieces_end_with_a_line_where_there_is_one(tmp_path):
    path = write(tmp_path / "a.txt", LONG)
    with path.open("rb") as stream:
        first, *_, last = pieces(stream)
    assert first[0].endswith("zwölf\n".encode())
    assert PIECE_BYTES - 40 < len(first[0]) < PIECE_BYTES
    assert last[1]


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
@pytest.mark.parametrize("unit_bytes", [1 << 30, 3000])
def test_a_line_of_jsonl_is_a_document(tmp_path, suffix, unit_bytes):
    texts = TEXTS + [f"document {i}" for i in range(500)]
    content = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes() + b"\n"  # a blank line is none
    path = write(tmp_path / f"a.jsonl{suffix}", COMPRESS.get(suffix, bytes)(content))
    assert documents(path, unit_bytes) == [text.encode() for text in texts]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_a_row_of_parquet_is_a_document(tmp_path, kind):
    texts = [*TEXTS, None] * 10
    path = write_table(tmp_path / "a.parquet", texts, kind, row_group_size=7)
    expected = [(text or "").encode() for text in texts]
    assert documents(path) == expected
    assert documents(path, unit_bytes=1) == expected
    assert [(unit.start, unit.end) for unit in units(path, "text", 1)] == [(i, i + 1) for i in range(9)]
    assert documents(write_table(tmp_path / "empty.parquet", [], kind)) == []


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint8"])
def test_a_bin_file_has_documents_between_separators(tmp_path, dtype):
    tokens = np.array([7, 8, 9, 7, 5, 7, 7, 6, 6], f"<{np.dtype(dtype).str[1:]}")
    path = write(tmp_path / "a.bin", tokens.tobytes())
    if dtype != "uint16":
        write(tmp_path / "a.json", json.dumps({"dtype": dtype}))
    expected = [bytes(tokens[a:b]) for a, b in ((0, 0), (1, 3), (4, 5), (6, 6), (7, 9))]
    assert documents(path, separator=7) == expected
    assert documents(path, separator=1) == [bytes(tokens)]


def test_a_zstd_file_of_many_frames_is_read_to_its_end(tmp_path):
    frames = [zstandard.compress(part.encode()) for part in (LONG, "two ", "three")]
    assert documents(write(tmp_path / "a.txt.zst", b"".join(frames))) == [f"{LONG}two three".encode()]


def bad_tokens(path: Path) -> None:
    write(path, np.array([1, 1000, 2], "<u2").tobytes())


BAD = [
    ("a.txt", lambda path: write(path, b"abc\xff"), r": byte 3 is no UTF-8; convert the file"),
    ("a.txt", lambda path: write(path, LONG.encode() + b"\xc3"), rf": byte {len(LONG.encode())} is no UTF-8"),
    ("a.txt.gz", lambda path: write(path, gzip.compress(b"abc" * 99)[:-9]), ": Compressed file ended before"),
    ("a.txt.gz", lambda path: write(path, b"no gzip"), r": Not a gzipped file"),
    ("a.txt.bz2", lambda path: write(path, b"no bz2"), r": Invalid data stream"),
    ("a.txt.xz", lambda path: write(path, b"no xz"), r": Input format not supported"),
    ("a.txt.zst", lambda path: write(path, b"no zst"), r": zstd decompress"),
    ("a.txt.zst", lambda path: write(path, zstandard.compress(b"abc" * 99)[:-3]), ": Compressed file ended before"),
    ("a.jsonl", lambda path: write(path, b'{"text": "a"}\n{"text": a}\n'), r":2: invalid JSON: .*, column 10"),
    ("a.jsonl", lambda path: write(path, b'{"text": "\xff"}'), r":1: byte 10 of the line is no UTF-8"),
    ("a.jsonl", lambda path: write(path, b'{"text": "\\ud800"}'), r":1: half of a surrogate pair"),
    ("a.jsonl", lambda path: write(path, b'{"body": "", "id": 1}'), r":1: no field 'text', but body, id; name one"),
    ("a.jsonl", lambda path: write(path, b'{"text": 1}'), r":1: field 'text' is int, not text; name another"),
    ("a.jsonl", lambda path: write(path, b"[1]"), r":1: no JSON object but list"),
    ("a.jsonl", lambda path: write(path, b"[" * 100_000), r":1: JSON nested too deeply"),
    ("a.parquet", lambda path: write(path, b"PAR1 but not for long"), r" is no whole parquet file: "),
    ("a.parquet", lambda path: pq.write_table(pa.table({"body": ["a"], "n": [1]}), path), r" has no column 'text'; na"),
    ("a.parquet", lambda path: pq.write_table(pa.table({"text": [1]}), path), r": column 'text' is int64, not text"),
    ("a.bin", bad_tokens, r": token 1 is 1000, the tokenizer's end at 999; name the one"),
    ("a.bin", lambda path: write(path, b"odd"), r": 3 bytes are no whole number of uint16 tokens"),
    ("a.bin", lambda path: (bad_tokens(path), write(path.with_suffix(".json"), "{}")), r".json does not say"),
]


@pytest.mark.parametrize(("name", "make", "message"), BAD, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(BAD)])
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, name, make, message):
    make(tmp_path / name)
    stem = name.split(".")[0] if message.startswith(".json") else name
    with pytest.raises(ValueError, match=f"{stem}{message}") as error:
        documents(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_bad_line_is_counted_from_the_files_start(tmp_path):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(1000)]
    lines[900] = "{"
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    with pytest.raises(ValueError, match=r"a\.jsonl:901: invalid JSON"):
        documents(path, unit_bytes=1000)


def test_a_damaged_parquet_page_is_told(tmp_path):
    path = write_table(tmp_path / "a.parquet", [f"some text {i}" for i in range(5000)], use_dictionary=False)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 1000] = b"\xff" * 1000
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is damaged after row 0: "):
        documents(path)
