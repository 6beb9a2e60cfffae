"""Packing loses nothing, predicts each token once and none from another document, and fills its sequences."""

import time
from collections import Counter

import jax
import numpy as np
import pytest
from data_helpers import counting_documents, same

from jaxpar.data.packing import best_fit
from jaxpar.data.samples import PackedSamples
from jaxpar.data.split import Documents


def one_by_one(lengths: np.ndarray, capacity: int) -> list[int]:
    """The definition: the longest first, each into the fullest bin that it fits in, the rooms that come of it."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_decreasing_is_what_its_definition_says(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 60))
    lengths = rng.integers(1, capacity + 1, int(rng.integers(0, 200)))
    if seed % 2:
        lengths = np.minimum(rng.geometric(0.2, 300), capacity)
    bins = best_fit(lengths, capacity)
    used = np.bincount(bins, lengths).astype(int) if len(bins) else np.zeros(0, int)
    assert sorted((capacity - used).tolist()) == one_by_one(lengths, capacity)
    assert np.array_equal(bins, best_fit(lengths, capacity))


def test_a_million_documents_are_packed_in_seconds():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6, 1.2, 1_000_000).astype(np.int64) + 1, 4096)
    start = time.process_time()
    bins = best_fit(lengths, 4096)
    assert time.process_time() - start < 5
    used = np.bincount(bins, lengths)
    assert used.max() <= 4096
    assert lengths.sum() / (len(used) * 4096) > 0.999


LENGTHS = [3, 1, 30, 7, 8, 9, 2, 5, 16, 4]
"""Of documents, in tokens; sequences have 8."""


def test_every_token_is_predicted_once_from_its_own_document():
    documents = counting_documents(LENGTHS)
    packed = PackedSamples(documents, seq_len=8)
    batch = packed.rows(np.arange(packed.num_samples))
    assert packed.efficiency == sum(LENGTHS) / (8 * packed.num_samples)

    counted = batch.loss_weights == 1
    assert set(np.unique(batch.loss_weights)) == {0, 1}
    assert Counter(batch.targets[counted].tolist()) == Counter(range(sum(LENGTHS)))
    document_of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    first_of = documents.starts[document_of]
    for row in range(packed.num_samples):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            inside = batch.segment_ids[row] == segment
            targets = batch.targets[row][inside]
            assert counted[row][inside].all()
            assert np.array_equal(targets, targets[0] + np.arange(len(targets)))
            assert len(set(document_of[targets].tolist())) == 1
            assert np.array_equal(batch.positions[row][inside], np.arange(len(targets)))
            # The input is the token before; before a document it is the separator of the one before it.
            expected = np.where(targets > 0, targets - 1, documents.file.separator)
            assert np.array_equal(batch.tokens[row][inside], expected)
            assert np.all((targets - first_of[targets])[0] % 8 == 0)


def test_padding_is_a_segment_of_its_own_without_weight():
    batch = PackedSamples(counting_documents([5]), seq_len=8).rows(np.array([0]))
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch.loss_weights.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.tokens.tolist() == [[10**6, 0, 1, 2, 3, 10**6, 10**6, 10**6]]
    assert batch.targets.tolist() == [[0, 1, 2, 3, 4, 10**6, 10**6, 10**6]]
    for field in (batch.tokens, batch.targets, batch.positions, batch.segment_ids):
        assert field.dtype == np.int32
    assert batch.loss_weights.dtype == np.float32


def test_documents_that_are_held_out_are_in_no_sequence():
    whole = counting_documents(LENGTHS)
    some = Documents(whole.file, whole.starts[1::2], whole.lengths[1::2], None)
    packed = PackedSamples(some, seq_len=8)
    batch = packed.rows(np.arange(packed.num_samples))
    expected = np.concatenate([np.arange(s, s + n) for s, n in zip(some.starts, some.lengths)])
    assert sorted(batch.targets[batch.loss_weights == 1].tolist()) == expected.tolist()


def test_rows_can_be_taken_in_any_order():
    packed = PackedSamples(counting_documents(LENGTHS), seq_len=8)
    whole = packed.rows(np.arange(packed.num_samples))
    order = np.array([3, 0, 3, packed.num_samples - 1])
    picked = packed.rows(order)
    assert same(picked, jax.tree.map(lambda leaf: leaf[order], whole))
    assert same(packed.rows(order[:0]), jax.tree.map(lambda leaf: leaf[:0], whole))
