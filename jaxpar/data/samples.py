"""Documents -> samples of seq_len tokens: cut plainly, or packed."""

from functools import cached_property
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

from jaxpar.data.packing import best_fit
from jaxpar.data.split import Documents
from jaxpar.parallel.batch import Batch


class Samples(Protocol):
    """Samples that can be taken in any order."""

    seq_len: int
    documents: Documents
    """What the samples are made of."""

    @property
    def num_samples(self) -> int: ...

    def rows(self, indices: Int[np.ndarray, " N"]) -> Batch:
        """These samples, in numpy arrays [N, S]."""


class PlainSamples:
    """The documents on end are one text; sample i is text[i * S : i * S + S + 1], the last of which is only a target.

    Every token but the first is once a target, but for fewer than S at the end; those make a last sample, padded with
    loss weights of 0, if `with_rest`.
    """

    def __init__(self, documents: Documents, seq_len: int, with_rest: bool = False):
        self.documents, self.seq_len = documents, seq_len
        self._tokens, self._separator = documents.file.tokens, documents.file.separator
        # Documents that adjoin in the file are one run: the text is few runs where few documents were held out.
        ends = documents.starts + documents.lengths
        first = np.flatnonzero(np.append(True, documents.starts[1:] != ends[:-1])) if len(ends) else ends
        in_text = np.append(0, np.cumsum(documents.lengths))
        self._run_ends = in_text[np.append(first[1:], len(ends))]
        self._shifts = documents.starts[first] - in_text[first]
        self._num_tokens = documents.num_tokens
        num_targets = max(self._num_tokens - 1, 0)
        self.num_samples = -(-num_targets // seq_len) if with_rest else num_targets // seq_len

    def rows(self, indices: Int[np.ndarray, " N"]) -> Batch:
        at = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        is_text = at < self._num_tokens
        at = np.minimum(at, self._num_tokens - 1)
        text = self._tokens[at + self._shifts[np.searchsorted(self._run_ends, at, side="right")]]
        text = np.where(is_text, text, self._separator).astype(np.int32)
        fields: dict[str, Any] = {  # Any: a Batch is declared for jax arrays, and these are numpy's
            "tokens": text[:, :-1],
            "targets": text[:, 1:],
            "positions": np.zeros_like(text[:, 1:]) + np.arange(self.seq_len, dtype=np.int32),
            "segment_ids": np.zeros_like(text[:, 1:]),
            "loss_weights": is_text[:, 1:].astype(np.float32),
        }
        return Batch(**fields)


class PackedSamples:
    """Whole documents, each a segment of its own with positions from 0, in as few sequences as best-fit decreasing
    makes (arXiv 2404.10830, section 3).

    A document's first input is the separator and its last target too, so that every token is once a target and none is
    predicted from another document. One longer than S is first cut into pieces of S, segments of their own. Padding is
    segment 0, with loss weights of 0.
    """

    def __init__(self, documents: Documents, seq_len: int):
        self.documents, self.seq_len = documents, seq_len
        self._tokens, self._separator = documents.file.tokens, documents.file.separator
        num_pieces = -(-documents.lengths // seq_len)
        document = np.repeat(np.arange(len(num_pieces)), num_pieces)
        offset = (np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * seq_len
        lengths = np.minimum(documents.lengths[document] - offset, seq_len)
        bins = best_fit(lengths, seq_len)
        order = np.argsort(bins, kind="stable")
        self._lengths = lengths[order]
        self._starts = (documents.starts[document] + offset)[order]
        self._bounds = np.append(0, np.cumsum(np.bincount(bins))) if len(bins) else np.zeros(1, np.int64)

    @property
    def num_samples(self) -> int:
        return len(self._bounds) - 1

    @cached_property
    def efficiency(self) -> float:
        """Share of the samples that is not padding."""
        return float(self._lengths.sum()) / max(self.num_samples * self.seq_len, 1)

    def rows(self, indices: Int[np.ndarray, " N"]) -> Batch:
        shape = (len(indices), self.seq_len)
        first = self._bounds[indices]
        num_pieces = self._bounds[indices + 1] - first
        row = np.repeat(np.arange(len(indices)), num_pieces)
        number = _counting(num_pieces)
        piece = np.repeat(first, num_pieces) + number
        length = self._lengths[piece]
        end = np.cumsum(length)
        used = np.bincount(row, length, len(indices)).astype(np.int64)
        column = end - length - (np.cumsum(used) - used)[row]

        within = _counting(length)
        at = np.repeat(row * self.seq_len + column, length) + within  # in the flat batch
        target = np.repeat(self._starts[piece], length) + within  # in the token file
        before = self._tokens[np.maximum(target - 1, 0)]

        def laid_out(values: np.ndarray, padding: np.ndarray | int) -> Int[np.ndarray, "N S"]:
            out = np.broadcast_to(np.asarray(padding, np.int32), shape).copy()
            out.reshape(-1)[at] = values
            return out

        fields: dict[str, Any] = {
            # Before a document lies the one before it, with its separator; before the first lies nothing.
            "tokens": laid_out(np.where(target > 0, before, self._separator), self._separator),
            "targets": laid_out(self._tokens[target], self._separator),
            "positions": laid_out(within, np.arange(self.seq_len) - used[:, None]),
            "segment_ids": laid_out(np.repeat(number + 1, length), 0),
            "loss_weights": laid_out(np.ones_like(at), 0).astype(np.float32),
        }
        return Batch(**fields)


def _counting(lengths: Int[np.ndarray, " N"]) -> Int[np.ndarray, " T"]:
    """0, 1, ... within each of the lengths, on end."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
