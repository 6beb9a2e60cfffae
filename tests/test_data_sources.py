"""A spec names sources, weights and files, or is refused in one line."""

import os
import sysconfig
from fractions import Fraction
from pathlib import Path

import pytest
from data_helpers import write

from jaxpar.data.sources import find_files, find_sources


def test_the_standard_library_is_a_corpus_on_every_machine():
    files = find_files("stdlib")
    names = {str(file.relative_to(sysconfig.get_path("stdlib"))) for file in files}
    assert {"argparse.py", os.path.join("json", "decoder.py")} <= names
    folders = {folder for name in names for folder in Path(name).parts[:-1]}
    assert "json" in folders
    assert not folders & {"site-packages", "test", "tests", "idlelib"}
    assert files == sorted(files)
    assert 5e6 < sum(file.stat().st_size for file in files) < 30e6
    for file in files:
        assert "\0" not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a.txt", ["a.txt"]),
        ("data.bin", ["data.bin"]),
        ("deep", ["deep/b.md", "deep/er/c.py", "deep/er/d.jsonl.zst", "deep/er/e.parquet"]),
        (".", ["a.txt", "data.bin", "deep/b.md", "deep/er/c.py", "deep/er/d.jsonl.zst", "deep/er/e.parquet"]),
        ("deep/**/*.py", ["deep/er/c.py"]),
        ("**/[ab].*", ["a.txt", "deep/b.md"]),
        ("./stdlib", ["stdlib"]),
        ("~/a.txt", ["a.txt"]),
    ],
)
def test_files_are_found_by_path_directory_and_glob(tmp_path, monkeypatch, spec, expected):
    names = ("a.txt", "data.bin", "deep/b.md", "deep/er/c.py", "deep/er/d.jsonl.zst", "deep/er/e.parquet", "stdlib")
    for name in (*names, "deep/image.png", "deep/table.parquet.gz"):
        write(tmp_path / name, name)
    write(tmp_path / "deep/empty.txt", "")
    write(tmp_path / ".git/hidden.txt", "hidden")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [file.absolute() for file in find_files(spec)] == [tmp_path / name for name in expected]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a.txt,b", [(["a.txt", "b/1.txt", "b/2.txt"], 1)]),
        ("b,b/1.txt", [(["b/1.txt", "b/2.txt"], 1)]),
        ("b/*.txt=3,a.txt=0.5", [(["b/1.txt", "b/2.txt"], 3), (["a.txt"], Fraction(1, 2))]),
        ("a.txt,b=1e-2", [(["a.txt"], 1), (["b/1.txt", "b/2.txt"], Fraction(1, 100))]),
        ("c,d=2.txt", [(["c,d=2.txt"], 1)]),
        ("year=2024/x.txt=2,a.txt", [(["year=2024/x.txt"], 2), (["a.txt"], 1)]),
        ("year=*/x.txt", [(["year=2024/x.txt"], 1)]),
    ],
)
def test_sources_and_their_weights(tmp_path, monkeypatch, spec, expected):
    for name in ("a.txt", "b/1.txt", "b/2.txt", "c,d=2.txt", "year=2024/x.txt"):
        write(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    assert [([str(file) for file in s.files], s.weight) for s in find_sources(spec)] == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("corpus/bok.txt", r"'corpus/bok\.txt': \S+/bok\.txt does not exist; did you mean 'corpus/book\.txt'\?"),
        ("copus/book.txt", r"'copus/book\.txt': .* did you mean 'corpus'\?"),
        ("zzz", r"'zzz': \S+/zzz does not exist; name a file, a directory, a glob or 'stdlib'"),
        ("", r"'': .* does not exist; name a file"),
        ("images", r"'images': no \.md .*\.bin .*\.zst\) file in this directory"),
        ("images/*", r"'images/\*': images/1\.png has an unknown suffix; known: \.md"),
        ("table.parquet.gz", r".* has an unknown suffix"),
        ("corpus/*.rst", r"'corpus/\*\.rst': no file matches \S+/corpus/\*\.rst; correct the glob"),
        ("empty", r"'empty': every file \(2\) is empty; name files with text in them"),
        ("corpus=0", r"'corpus=0': the weight '0' must be a number above 0, as in corpus=0\.5"),
        ("corpus=-1,empty", r"'corpus=-1': the weight '-1' must be"),
        ("corpus=many", r"'corpus=many': the weight 'many' must be"),
        ("corpus=1/0", r"'corpus=1/0': .* does not exist"),
        ("corpus=nan", r"'corpus=nan': the weight"),
        ("corpus=", r"'corpus=': the weight '' must be"),
    ],
)
def test_what_names_no_text_is_refused_in_one_line(tmp_path, monkeypatch, spec, message):
    for name in ("corpus/book.txt", "images/1.png", "table.parquet.gz"):
        write(tmp_path / name, "text")
    for name in ("empty/1.txt", "empty/2.txt"):
        write(tmp_path / name, "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^--eval-data {message}") as error:
        find_sources(spec, "--eval-data")
    assert "\n" not in str(error.value)
