"""Files -> a token file, once: in parts, on every core, each part whole on disk before it counts as done."""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from jaxtyping import UInt
from rich.console import Console
from rich.progress import Progress

from jaxpar.data import cache
from jaxpar.data.documents import Piece, Unit, dtype_file, locate, read, units
from jaxpar.data.sources import RECORD_SUFFIX, TABLE_SUFFIX, content_suffix
from jaxpar.data.tokenizer import JsonTokenizer, Tokenizer, train_bpe
from jaxpar.data.tokens import FORMAT_VERSION, TokenFile, digest, open_token_file, replacing, writing

PART_BYTES = 1 << 24
BPE_TRAINING_BYTES = 1 << 28
"""More text makes training of a BPE longer and its tokens no better."""

_BATCH_BYTES = 1 << 22
_SHOW_PROGRESS_SECONDS = 1.0
_START_WORKERS_SECONDS = 30.0
"""Of one core's work: a new process first imports what the program imports, and the tokenizers library has threads."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """What one worker does at a time."""

    path: Path
    key: str
    units: Sequence[Unit]

    @property
    def num_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self.units)


def build_token_file(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    cache_dir: Path | None = None,
    part_bytes: int = PART_BYTES,
    num_workers: int | None = None,
) -> TokenFile:
    """The token file of `files`, from the cache where these very files are in it, with its content checked.

    A line of .jsonl, a row of .parquet, what lies between two separators of a .bin and any other file is a document.
    The cache knows files by path, size and modification time. One process builds and the others wait; a build that
    was killed goes on with the parts that it had finished.

    Args:
      files: as `find_files` gives them, in the order in which the tokens will lie.
      part_bytes: of input, about; the unit of parallelism and of resumption.
      num_workers: processes; by default the cores for long work, and this process alone for short.

    Raises:
      ValueError: a file is not what its suffix says, none has text, or the cache cannot be written.
    """
    cache_dir = cache_dir or cache.default_directory()
    beside = [sidecar for file in files if (sidecar := dtype_file(file))]
    key = digest(FORMAT_VERSION, cache.versions([*files, *beside]), tokenizer.fingerprint, text_field, part_bytes)
    target = cache_dir / f"{key[:32]}.bin"
    if (cached := open_token_file(target, key)) is not None:
        return cached
    plan = _plan(files, text_field, part_bytes, target.with_suffix(".parts"), key)
    with cache.alone(target):
        if (cached := open_token_file(target, key)) is not None:
            return cached
        _write_parts(plan, tokenizer, text_field, num_workers)
        with writing(target, key, tokenizer.vocab_size, tokenizer.separator) as merged:
            for part in plan:
                done = open_token_file(part.path, key)
                assert done is not None, f"{part.path} changed while it was being read"
                merged.append(done, continues=part.units[0].continues)
        shutil.rmtree(target.with_suffix(".parts"))
        built = open_token_file(target, key)
    assert built is not None, f"{target} changed while it was being written"
    if built.num_empty:
        _log.info("%d empty documents left out", built.num_empty)
    return built


def build_bpe(
    files: Sequence[Path], size: int, *, text_field: str = "text", cache_dir: Path | None = None
) -> JsonTokenizer:
    """A byte-level BPE of at most `size` tokens, from the cache where it was trained on these very files.

    It is trained on all text, or, of a corpus above BPE_TRAINING_BYTES, on so much of it, drawn from all over.

    Raises:
      ValueError: as `build_token_file`, or there is no text to train on.
    """
    cache_dir = cache_dir or cache.default_directory()
    key = digest(FORMAT_VERSION, "bpe", size, cache.versions(files), text_field)
    target = cache_dir / f"{key[:32]}.tokenizer.json"
    if not target.exists():
        plan = [unit for file in files for unit in units(file, text_field, PART_BYTES)]
        drawn = [plan[i] for i in np.random.default_rng(0).permutation(len(plan))]
        with cache.alone(target):
            if not target.exists():
                _train_bpe(target, _texts(drawn, text_field, BPE_TRAINING_BYTES), size)
    return JsonTokenizer(target.read_text(encoding="utf-8"), separator=0)


def _plan(files: Sequence[Path], text_field: str, part_bytes: int, directory: Path, key: str) -> list[_Part]:
    groups: list[list[Unit]] = []
    room = 0
    for file in files:
        for unit in units(file, text_field, part_bytes):
            if room <= 0:
                groups.append([])
                room = part_bytes
            groups[-1].append(unit)
            room -= unit.num_bytes
    return [_Part(directory / f"{number:06d}.bin", key, group) for number, group in enumerate(groups)]


def _write_parts(plan: Sequence[_Part], tokenizer: Tokenizer, text_field: str, num_workers: int | None) -> None:
    plan[0].path.parent.mkdir(exist_ok=True)
    todo = [part for part in plan if open_token_file(part.path, part.key) is None]
    if len(todo) < len(plan):
        _log.info("going on with %d of %d parts, which an earlier run has tokenized", len(plan) - len(todo), len(plan))
    seconds = sum(part.num_bytes for part in todo) / tokenizer.bytes_per_second
    if num_workers is None:
        num_workers = min(_num_cores(), len(todo)) if seconds > _START_WORKERS_SECONDS else 1
    with _progress(seconds > _SHOW_PROGRESS_SECONDS) as progress:
        task = progress.add_task("tokenizing", total=sum(part.num_bytes for part in plan))
        progress.advance(task, sum(part.num_bytes for part in plan) - sum(part.num_bytes for part in todo))
        if num_workers < 2:
            for part in todo:
                _write_part(part, tokenizer, text_field)
                progress.advance(task, part.num_bytes)
            return
        # Not forked: JAX has threads by now.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, spawn, initializer=_start_worker) as pool:
            done = {pool.submit(_write_part, part, tokenizer, text_field): part for part in todo}
            try:
                for future in as_completed(done):
                    future.result()
                    progress.advance(task, done[future].num_bytes)
            except BrokenProcessPool:
                raise ValueError(
                    f"one of {num_workers} tokenizing processes was killed, for memory perhaps; run again to go on"
                ) from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """One core for the tokenizers library; and an end with the parent, however that ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with(process: BaseProcess) -> None:
        process.join()
        os._exit(1)

    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def _write_part(part: _Part, tokenizer: Tokenizer, text_field: str) -> None:
    found = (
        piece for unit in part.units for piece in read(unit, text_field, tokenizer.separator, tokenizer.vocab_size)
    )
    with writing(part.path, part.key, tokenizer.vocab_size, tokenizer.separator) as writer:
        for piece, tokens in _encoded(found, tokenizer):
            if piece.begins and piece.ends and not len(tokens):
                writer.num_empty += 1
                continue
            content = piece.content
            num_bytes = len(content) if isinstance(content, bytes) else 0
            writer.add(tokens, num_bytes, _content_hash(content) if piece.begins else 0, piece.begins, piece.ends)


def _encoded(found: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Piece, UInt[np.ndarray, " T"]]]:
    for batch in _batches(found):
        texts = [piece.content for piece in batch if isinstance(piece.content, bytes)]
        encoded = iter(_encode(batch, texts, tokenizer))
        for piece in batch:
            yield piece, next(encoded) if isinstance(piece.content, bytes) else piece.content


def _encode(batch: Sequence[Piece], texts: Sequence[bytes], tokenizer: Tokenizer) -> list[UInt[np.ndarray, " T"]]:
    if tokenizer.reserved and any(tokenizer.reserved in text for text in texts):
        for piece in batch:
            if isinstance(piece.content, bytes) and (at := piece.content.find(tokenizer.reserved)) >= 0:
                in_text = content_suffix(piece.unit.path) not in (RECORD_SUFFIX, TABLE_SUFFIX)
                where = locate(piece.unit, piece.at + at if in_text else piece.at)
                raise ValueError(f"{where}: NUL is not text; leave the file out of --data")
    return tokenizer.encode(texts)


def _batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    room = _BATCH_BYTES
    for piece in found:
        batch.append(piece)
        room -= len(piece.content)
        if room <= 0:
            yield batch
            batch, room = [], _BATCH_BYTES
    yield batch


def _content_hash(content: bytes | UInt[np.ndarray, " T"]) -> int:
    """Of a document's first piece: equal for equal documents, which is all that is asked of it."""
    data = content if isinstance(content, bytes) else content.astype("<u4").tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _texts(parts: Sequence[Unit], text_field: str, most_bytes: int) -> Iterator[str]:
    num_bytes = 0
    for unit in parts:
        for piece in read(unit, text_field, separator=0, vocab_size=0):
            assert isinstance(piece.content, bytes)
            yield piece.content.decode()
            num_bytes += len(piece.content)
            if num_bytes >= most_bytes:
                return


def _train_bpe(target: Path, texts: Iterator[str], size: int) -> None:
    with _progress(True) as progress:
        progress.add_task(f"training a BPE of {size} tokens", total=None)
        tokenizer = train_bpe(texts, size)
    with replacing(target) as out:
        out.write(tokenizer.json.encode())


def _progress(shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not (shown and console.is_terminal))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
