"""Which documents are trained on and which are held out: by content, so that neither names nor order matter."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from jaxpar.data.tokens import TokenFile


@dataclass(frozen=True)
class Documents:
    """Some of a token file's documents, in its order."""

    file: TokenFile
    starts: Int[np.ndarray, " D"]
    lengths: Int[np.ndarray, " D"]
    """In tokens, the separator included."""
    num_bytes: float | None
    """Of their text; None where .bin files do not tell."""

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


def select(file: TokenFile, kept: Bool[np.ndarray, " D"] | None = None) -> Documents:
    """The documents that are kept; all by default."""
    rows = file.documents if kept is None else file.documents[kept]
    known = bool((rows["num_bytes"] > 0).all())
    starts, lengths = (np.asarray(rows[name], np.int64) for name in ("start", "num_tokens"))
    return Documents(file, starts, lengths, float(rows["num_bytes"].sum()) if known else None)


_MOST = 0.5
"""Of the tokens, unless `fraction` asks for it: few documents, one of them large, or many of them equal."""


def hold_out(files: Sequence[TokenFile], fraction: float) -> tuple[list[Documents], list[Documents]]:
    """(to train on, held out), each with one entry per file; equal documents are on one side, in whatever file.

    A document is held out if its hash, as a number in [0, 1), is below `fraction`, but for the last one of a file that
    would lose all; if that is none, the one with the smallest hash is. Where every file is a single document, or few
    and unequal documents would make that far more than `fraction` of the tokens, each document is cut from its end.
    """
    everything = [select(file) for file in files]
    if fraction == 0:
        return everything, [select(file, np.zeros(file.num_documents, bool)) for file in files]
    if all(file.num_documents == 1 for file in files):
        return _cut(everything, fraction)
    hashes = [np.asarray(file.documents["hash"]) for file in files]
    below = int(fraction * 2.0**64)
    smallest = min((int(h.min()) for h in hashes if h.min() < h.max()), default=0)
    for limit in (below, smallest + 1):
        held = [h <= np.uint64(min(limit, 2**64) - 1) if limit else np.zeros(len(h), bool) for h in hashes]
        spared = np.array([h.max() for h, out in zip(hashes, held) if out.all()], np.uint64)
        held = [out & ~np.isin(h, spared) for h, out in zip(hashes, held)]
        away = [select(file, out) for file, out in zip(files, held)]
        share = sum(documents.num_tokens for documents in away) / sum(documents.num_tokens for documents in everything)
        if 0 < share <= max(4 * fraction, _MOST):
            return [select(file, ~out) for file, out in zip(files, held)], away
    return _cut(everything, fraction)


def _cut(documents: Sequence[Documents], fraction: float) -> tuple[list[Documents], list[Documents]]:
    kept: list[Documents] = []
    held: list[Documents] = []
    for whole in documents:
        rounded = np.ceil if len(whole.lengths) == 1 else np.floor
        num_held = rounded(whole.lengths * fraction).astype(np.int64)
        if not num_held.any():
            num_held[np.argmax(whole.lengths)] = 1
        num_kept = whole.lengths - num_held
        share = None if whole.num_bytes is None else whole.num_bytes / max(whole.num_tokens, 1)
        for side, starts, lengths in (
            (kept, whole.starts, num_kept),
            (held, whole.starts + num_kept, num_held),
        ):
            is_left = lengths > 0
            num_bytes = None if share is None else share * lengths.sum()
            side.append(Documents(whole.file, starts[is_left], lengths[is_left], num_bytes))
    return kept, held
