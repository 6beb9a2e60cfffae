"""A run's data from its settings: what it trains on, what it evaluates on, and the tokenizer of both."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxpar.config import DataConfig
from jaxpar.data import build
from jaxpar.data.loader import Loader
from jaxpar.data.order import EvaluationOrder, TrainingOrder, interleave
from jaxpar.data.samples import PackedSamples, PlainSamples, Samples
from jaxpar.data.sources import TOKEN_SUFFIX, Source, content_suffix, find_sources
from jaxpar.data.split import Documents, hold_out, select
from jaxpar.data.tokenizer import ByteTokenizer, Tokenizer, bpe_size, load
from jaxpar.data.tokens import TokenFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """What a model is evaluated on: batch i of `num_batches` is `loader.batch(i, sharding)`, the same each time."""

    loader: Loader
    num_batches: int
    """With every token once; the last batch may have padding."""
    num_tokens: int
    bytes_per_token: float | None
    """Of the text: bits per byte are loss / ln 2 / bytes_per_token. None where .bin files do not tell."""


@dataclass(frozen=True)
class Corpus:
    """All that a run reads."""

    train: Loader
    evaluation: Evaluation | None
    tokenizer: Tokenizer
    num_tokens: int
    """To train on."""
    fingerprint: str
    """Of the documents' content and their tokens: a run that goes on must find the same."""

    def prompt(self, num_tokens: int) -> Int[np.ndarray, " P"]:
        """What to sample a continuation of: at most so many tokens, from the beginning of the first source."""
        documents = self.train.samples[0].documents
        start, length = documents.starts[0], documents.lengths[0]
        return np.asarray(documents.file.tokens[start : start + min(length, num_tokens)], np.int32)


def prepare(
    config: DataConfig,
    *,
    eval_data: str = "",
    vocab_size: int,
    seed: int,
    num_microbatches: int,
    cache_dir: Path | None = None,
) -> Corpus:
    """Finds, tokenizes (or takes from the cache) and splits the data.

    Every process of a run calls this with the same arguments; on one filesystem one builds and the others wait.

    Args:
      eval_data: what to evaluate on, written as config.source without weights; empty: what `eval_fraction` holds out.
      vocab_size: the model's; a tokenizer with more tokens is refused.

    Raises:
      ValueError: in one line, the cheapest to find first: sizes, sources, weights, the tokenizer, what files hold.
    """
    if config.batch_size % num_microbatches:
        raise ValueError(
            f"--batch-size {config.batch_size} is no multiple of --grad-accumulation {num_microbatches}; change either"
        )
    size = bpe_size(config.tokenizer)
    if size is not None:
        _check_vocabulary(size, vocab_size)
    sources = find_sources(config.source)
    pattern = interleave([source.weight for source in sources])
    eval_sources = find_sources(eval_data, "--eval-data") if eval_data else []
    if any(source.weight != 1 for source in eval_sources):
        raise ValueError(f"--eval-data {eval_data!r}: every token counts alike there; leave the weights out")
    tokenizer = _tokenizer(config, sources, cache_dir)
    _check_vocabulary(tokenizer.vocab_size, vocab_size)

    def token_files(of: Sequence[Source], flag: str) -> list[TokenFile]:
        return [_token_file(source, tokenizer, config.text_field, flag, cache_dir) for source in of]

    files = token_files(sources, "--data")
    if eval_sources:
        training = [select(file) for file in files]
        held_out = [select(file) for file in token_files(eval_sources, "--eval-data")]
    else:
        training, held_out = hold_out(files, config.eval_fraction)
    samples = [_samples(documents, config) for documents in training]
    _check_sizes(sources, training, samples, config)
    order = TrainingOrder(tuple(s.num_samples for s in samples), pattern, seed)
    sizes = {"batch_size": config.batch_size, "num_microbatches": num_microbatches}
    num_tokens = sum(documents.num_tokens for documents in training)
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for file in files:
        digest.update(np.ascontiguousarray(file.documents[["num_tokens", "hash"]]).tobytes())
    return Corpus(
        train=Loader(samples, order, **sizes),
        evaluation=_evaluation(held_out, config, sizes),
        tokenizer=tokenizer,
        num_tokens=num_tokens,
        fingerprint=digest.hexdigest()[:16],
    )


def _tokenizer(config: DataConfig, sources: Sequence[Source], cache_dir: Path | None) -> Tokenizer:
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if (size := bpe_size(config.tokenizer)) is None:
        return load(Path(config.tokenizer).expanduser())
    files = sorted({file for source in sources for file in source.files})
    texts = [file for file in files if content_suffix(file) != TOKEN_SUFFIX]
    if len(texts) < len(files):
        raise ValueError(
            f"--tokenizer {config.tokenizer}: .bin files have their tokens already; name the tokenizer that made them"
        )
    return build.build_bpe(texts, size, text_field=config.text_field, cache_dir=cache_dir)


def _check_vocabulary(needed: int, vocab_size: int) -> None:
    if needed > vocab_size:
        raise ValueError(
            f"the data has token ids up to {needed - 1}, the model's vocabulary ends at {vocab_size - 1}; "
            f"set --model.vocab-size {needed} or more"
        )


def _token_file(source: Source, tokenizer: Tokenizer, text_field: str, flag: str, cache_dir: Path | None) -> TokenFile:
    file = build.build_token_file(source.files, tokenizer, text_field=text_field, cache_dir=cache_dir)
    if not file.num_documents:
        raise ValueError(f"{flag} {source.spec!r}: every document ({file.num_empty}) is empty; name files with text")
    return file


def _samples(documents: Documents, config: DataConfig) -> Samples:
    if config.pack_documents:
        packed = PackedSamples(documents, config.seq_len)
        _log.info("packed into %d sequences, %.1f%% of them padding", packed.num_samples, 100 - 100 * packed.efficiency)
        return packed
    return PlainSamples(documents, config.seq_len)


def _check_sizes(
    sources: Sequence[Source], training: Sequence[Documents], samples: Sequence[Samples], config: DataConfig
) -> None:
    for source, documents, s in zip(sources, training, samples):
        # A mixture's sources repeat, each by itself; one that is all there is should hold a batch.
        least = config.batch_size if len(sources) == 1 else 1
        if s.num_samples >= least:
            continue
        if config.pack_documents:
            has, needs = f"{s.num_samples} sequences", f"{least}"
        else:
            has, needs = f"{documents.num_tokens} tokens", f"{least * config.seq_len + 1}"
        takes = f"--batch-size {config.batch_size} x " if len(sources) == 1 else ""
        raise ValueError(
            f"--data {source.spec!r} has {has} to train on, {'one batch' if takes else 'one sample'} takes {needs} "
            f"({takes}--seq-len {config.seq_len}); lower either or give more data"
        )


def _evaluation(held_out: Sequence[Documents], config: DataConfig, sizes: dict[str, int]) -> Evaluation | None:
    samples: list[Samples] = [
        PackedSamples(documents, config.seq_len)
        if config.pack_documents
        else PlainSamples(documents, config.seq_len, with_rest=True)
        for documents in held_out
    ]
    order = EvaluationOrder(tuple(s.num_samples for s in samples))
    if not order.total:
        return None
    num_tokens = sum(documents.num_tokens for documents in held_out)
    known = [documents.num_bytes for documents in held_out if documents.num_bytes is not None]
    return Evaluation(
        Loader(samples, order, **sizes),
        num_batches=-(-order.total // config.batch_size),
        num_tokens=num_tokens,
        bytes_per_token=sum(known) / num_tokens if len(known) == len(held_out) else None,
    )
