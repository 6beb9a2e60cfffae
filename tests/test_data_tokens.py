"""A token file is whole, of these very files, and made once, however its making is disturbed."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from data_helpers import write, write_jsonl

from jaxpar.data import build
from jaxpar.data.sources import find_files
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.data.tokens import TokenFile, open_token_file, writing

BYTES = ByteTokenizer()
LONG = "".join(f"line {i} of a long text, zwölf\n" for i in range(20_000))


def built(files: list[Path], directory: Path, **options) -> TokenFile:
    return build.build_token_file(files, BYTES, cache_dir=directory / "cache", **options)


def text_of(file: TokenFile) -> bytes:
    assert file.path.read_bytes() == file.tokens.tobytes()
    return bytes(file.tokens)


def test_a_document_is_its_bytes_and_a_separator(tmp_path):
    files = [write(tmp_path / "1.txt", "one"), write_jsonl(tmp_path / "2.jsonl", ["", "zwölf", "one"])]
    file = built(files, tmp_path)
    assert text_of(file) == b"one\0zw\xc3\xb6lf\0one\0"
    assert (file.num_tokens, file.num_documents, file.num_empty, file.separator) == (15, 3, 1, 0)
    assert file.documents[["start", "num_tokens", "num_bytes"]].tolist() == [(0, 4, 3), (4, 7, 6), (11, 4, 3)]
    first, second, third = file.documents["hash"].tolist()
    assert first == third != second


def test_the_dtype_is_the_least_that_holds_the_vocabulary(tmp_path):
    for vocab_size, dtype in ((256, "|u1"), (257, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4")):
        with writing(tmp_path / "a.bin", "key", vocab_size, separator=0) as writer:
            writer.add(np.array([vocab_size - 1], np.uint32), 0, 0, begins=True, ends=True)
        file = open_token_file(tmp_path / "a.bin", "key")
        assert file is not None
        assert (file.tokens.dtype.str, file.tokens.tolist()) == (dtype, [vocab_size - 1, 0])


def test_parts_and_workers_change_nothing(tmp_path):
    """Also that a document keeps its hash: cut into units, on lines, or compressed."""
    files = [write(tmp_path / "1.txt", LONG), write_jsonl(tmp_path / "2.jsonl", [f"{i} text" for i in range(3000)])]
    files += [write_jsonl(tmp_path / "3.jsonl.gz", [LONG, "last"]), write(tmp_path / "4.txt", "x")]
    whole = built(files, tmp_path)
    assert whole.num_documents == 3004
    for number, options in enumerate(({"part_bytes": 200_000}, {"part_bytes": 150_000, "num_workers": 2})):
        parts = built(files, tmp_path / str(number), **options)
        assert text_of(parts) == text_of(whole)
        assert parts.documents.tolist() == whole.documents.tolist()
    assert whole.documents["hash"][0] == whole.documents["hash"][3001]


def test_the_cache_is_used_while_the_files_are_the_same(tmp_path, monkeypatch):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "two")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    first = build.build_token_file(files, BYTES)
    assert first.path.parent == tmp_path / "xdg/jaxpar/tokens"
    written = first.path.stat()
    monkeypatch.chdir(tmp_path)
    again = build.build_token_file([Path("1.txt"), Path("2.txt")], BYTES)
    assert again == first
    assert (again.path.stat().st_ino, again.path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda files: os.utime(write(files[0], "longer"), ns=(0, 0)), b"longer\0two\0"),
        (lambda files: os.utime(write(files[0], "ONE"), ns=(0, 1)), b"ONE\0two\0"),
        (lambda files: files.reverse(), b"two\0one\0"),
        (lambda files: files.pop(), b"one\0"),
        (lambda files: files.append(write(files[0].with_name("3.txt"), "three")), b"one\0two\0three\0"),
    ],
    ids=["size", "time", "order", "fewer", "more"],
)
def test_a_changed_corpus_is_tokenized_again(tmp_path, change, expected):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "two")]
    for file in files:
        os.utime(file, ns=(0, 0))
    before = built(files, tmp_path)
    change(files)
    after = built(files, tmp_path)
    assert text_of(after) == expected
    assert after.path != before.path
    assert text_of(before) == b"one\0two\0"


@pytest.mark.parametrize(
    "damage",
    [
        lambda tokens, documents, sidecar: os.truncate(tokens, 5),
        lambda tokens, documents, sidecar: tokens.write_bytes(tokens.read_bytes() + b"more"),
        lambda tokens, documents, sidecar: tokens.write_bytes(b"one\0tvo\0"),
        lambda tokens, documents, sidecar: tokens.unlink(),
        lambda tokens, documents, sidecar: documents.unlink(),
        lambda tokens, documents, sidecar: documents.write_bytes(documents.read_bytes()[:-1] + b"\1"),
        lambda tokens, documents, sidecar: sidecar.unlink(),
        lambda tokens, documents, sidecar: os.truncate(sidecar, 20),
        lambda tokens, documents, sidecar: sidecar.write_text("[]"),
        lambda tokens, documents, sidecar: sidecar.write_text('{"dtype": "|u1"}'),
        lambda tokens, documents, sidecar: sidecar.write_text(re.sub('"key": "..', '"key": "xx', sidecar.read_text())),
    ],
    ids=["cut", "longer", "a-bit", "no-tokens", "no-table", "table", "no-json", "cut-json", "list", "fields", "key"],
)
def test_a_damaged_token_file_is_noticed_and_built_again(tmp_path, damage):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "two")]
    path = built(files, tmp_path).path
    damage(path, path.with_suffix(".documents"), path.with_suffix(".json"))
    again = built(files, tmp_path)
    assert again.path == path
    assert text_of(again) == b"one\0two\0"


def test_many_builders_at_once_all_get_the_whole_file(tmp_path):
    text = "some text\n" * 100_000
    files = [write(tmp_path / f"{i}.txt", text) for i in range(4)]
    done: list[TokenFile] = []
    start = threading.Barrier(8)

    def build_one() -> None:
        start.wait()
        done.append(built(files, tmp_path))

    threads = [threading.Thread(target=build_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 8
    assert {file.path for file in done} == {done[0].path}
    for file in done:
        assert text_of(file) == (text.encode() + b"\0") * 4
    kinds = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert kinds == [".bin", ".documents", ".json", ".lock"]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("offset", [2, (1 << 17) + 2])
def test_a_binary_file_is_refused_and_leaves_no_token_file(tmp_path, offset, num_workers):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "x" * offset + "\0")]
    message = rf"2\.txt: byte {offset}: NUL is not text; leave the file out of --data$"
    with pytest.raises(ValueError, match=message):
        built(files, tmp_path, num_workers=num_workers, part_bytes=2)
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".lock", ".parts"]
    assert not [path for path in (tmp_path / "cache").rglob("*") if len(path.suffix) > 30]


BUILD = """
import sys
from pathlib import Path
from jaxpar.data import build
from jaxpar.data.tokenizer import load
build.build_token_file([Path(sys.argv[1])], load(Path(sys.argv[2])), cache_dir=Path(sys.argv[3]), part_bytes=100_000)
"""


def test_a_build_that_was_killed_goes_on_where_it_was(tmp_path, caplog):
    tokenizer = build.build_bpe([write(tmp_path / "a.txt", LONG)], 300, cache_dir=tmp_path / "other")
    write(tmp_path / "tokenizer.json", tokenizer.json)
    path = write_jsonl(tmp_path / "b.jsonl", [f"document {i} with some text to take its time" for i in range(60_000)])
    arguments = [str(path), str(tmp_path / "tokenizer.json"), str(tmp_path / "cache")]
    process = subprocess.Popen([sys.executable, "-c", BUILD, *arguments], stderr=subprocess.DEVNULL)
    while len(list((tmp_path / "cache").glob("*.parts/*.json"))) < 3:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = len(list((tmp_path / "cache").glob("*.parts/*.json")))
    assert not list((tmp_path / "cache").glob("*.bin"))

    caplog.set_level(logging.INFO, "jaxpar")
    file = build.build_token_file([path], tokenizer, cache_dir=tmp_path / "cache", part_bytes=100_000)
    assert [record.getMessage().split(" of ")[0] for record in caplog.records] == [f"going on with {finished}"]
    assert file.num_documents == 60_000
    whole = build.build_token_file([path], tokenizer, cache_dir=tmp_path / "other")
    assert text_hash(file) == text_hash(whole)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".bin", ".documents", ".json", ".lock"}


def text_hash(file: TokenFile) -> str:
    return json.loads(file.path.with_suffix(".json").read_bytes())["hash"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    write(tmp_path / "cache", "a file")
    message = (
        r"^cannot write the token cache \S+/cache: .*; make room there, or set XDG_CACHE_HOME to another directory$"
    )
    with pytest.raises(ValueError, match=message):
        built([write(tmp_path / "1.txt", "one")], tmp_path)


def test_building_costs_little_more_than_the_tokenizers_library_alone(tmp_path):
    """In processor seconds, which other load on the machine does not change: at least 0.8 of the library's speed."""
    import tokenizers

    texts = [
        text[at : at + 4096]
        for file in find_files("stdlib")[:200]
        if (text := file.read_text("utf-8"))
        for at in range(0, len(text), 4096)
    ]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    tokenizer = build.build_bpe([path], 2000, cache_dir=tmp_path / "cache")
    library = tokenizers.Tokenizer.from_str(tokenizer.json)

    start = time.process_time()
    for at in range(0, len(texts), 1000):
        library.encode_batch_fast(texts[at : at + 1000], add_special_tokens=False)
    alone = time.process_time() - start
    start = time.process_time()
    built_file = build.build_token_file([path], tokenizer, cache_dir=tmp_path / "cache", num_workers=1)
    assert alone / (time.process_time() - start) > 0.8
    assert built_file.num_documents == len([text for text in texts if text])
