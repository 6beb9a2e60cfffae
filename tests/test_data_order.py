"""Weights are exact for every prefix, sources repeat by themselves, and held-out text stays out."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from data_helpers import counting_documents

from jaxpar.data.order import MAX_PERIOD, EvaluationOrder, TrainingOrder, interleave
from jaxpar.data.split import hold_out
from jaxpar.data.tokens import DOCUMENT, TokenFile


@pytest.mark.parametrize(
    "weights",
    ["1", "1 1", "3 1", "0.5 0.3 0.2", "97 1 1 1", "1 2 3 4 5 6 7", "0.333 0.667", "5.5 1e-1 2", "1 1 1 1 1 1 1 1 1"],
)
def test_every_prefix_has_each_sources_share_to_within_one(weights):
    fractions = [Fraction(weight) for weight in weights.split()]
    pattern = interleave(fractions)
    shares = [weight / sum(fractions) for weight in fractions]
    counts = np.cumsum(pattern[:, None] == np.arange(len(shares)), axis=0)
    place = np.arange(1, len(pattern) + 1)
    for source, share in enumerate(shares):
        # In integers: |count - n * share| < 1.
        off = counts[:, source] * share.denominator - place * share.numerator
        assert np.abs(off).max() < share.denominator
        assert off[-1] == 0


def test_weights_of_too_many_digits_are_refused():
    with pytest.raises(ValueError, match=r"^the weights 1\.0, 0\.333333 repeat only every 1333333 samples; round them"):
        interleave([Fraction(1), Fraction("0.333333")])
    assert MAX_PERIOD == 100_000


def test_each_source_is_shuffled_over_its_whole_and_repeated_by_itself():
    order = TrainingOrder((40, 30, 20), interleave([Fraction(5), Fraction(3), Fraction(2)]), seed=3)
    source, sample = order.at(np.arange(1000))
    assert Counter(source.tolist()) == {0: 500, 1: 300, 2: 200}
    for number, size in enumerate(order.num_samples):
        drawn = sample[source == number]
        epochs = drawn[: len(drawn) // size * size].reshape(-1, size)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(size), (len(epochs), 1)))
        assert len({epoch.tobytes() for epoch in epochs}) > 3
    picked = np.array([999, 0, 512, 512])
    again = TrainingOrder((40, 30, 20), order.pattern, seed=3).at(picked)
    assert np.array_equal(again, (source[picked], sample[picked]))
    assert not np.array_equal(TrainingOrder((40, 30, 20), order.pattern, seed=4).at(np.arange(1000))[1], sample)


def test_an_evaluation_is_every_sample_once_shuffled_alike():
    order = EvaluationOrder((5, 0, 8))
    source, sample = order.at(np.arange(20))
    assert sorted(zip(source[:13].tolist(), sample[:13].tolist())) == [
        *((0, i) for i in range(5)),
        *((2, i) for i in range(8)),
    ]
    assert (source[13:] == -1).all()
    assert source[:13].tolist() != sorted(source[:13].tolist())
    assert np.array_equal(EvaluationOrder((5, 0, 8)).at(np.arange(20)), (source, sample))


def documents_with(hashes: list[float]) -> TokenFile:
    documents = np.zeros(len(hashes), DOCUMENT)
    documents["hash"] = [int(h * 2**64) for h in hashes]
    documents["start"], documents["num_tokens"], documents["num_bytes"] = np.arange(len(hashes)) * 10, 10, 20
    return TokenFile(Path("a.bin"), np.zeros(10 * len(hashes), np.uint8), documents, separator=0)


@pytest.mark.parametrize(
    ("hashes", "fraction", "held"),
    [
        ([[0.5, 0.05, 0.9, 0.05, 0.1]], 0.1, [[1, 3]]),
        ([[0.5, 0.05, 0.7], [0.05, 0.9, 0.01]], 0.1, [[1], [0, 2]]),
        ([[0.5, 0.05], [0.05, 0.01]], 0.1, [[], [1]]),
        ([[0.5, 0.7, 0.5, 0.8]], 0.1, [[0, 2]]),
        ([[0.5, 0.7], [0.4]], 0.1, [[0], []]),
        ([[0.5, 0.7], [0.4]], 0.45, [[0], []]),
        ([[0.1, 0.2, 0.05]], 0.5, [[0, 2]]),
        ([[0.1, 0.2]], 1.0, [[0]]),
        ([[0.5, 0.05]], 0.0, [[]]),
    ],
)
def test_documents_are_held_out_by_hash(hashes, fraction, held):
    files = [documents_with(of) for of in hashes]
    training, evaluation = hold_out(files, fraction)
    for file, kept, out, expected in zip(files, training, evaluation, held, strict=True):
        assert (out.starts // 10).tolist() == expected
        assert (kept.starts // 10).tolist() == [i for i in range(file.num_documents) if i not in expected]
        assert out.num_bytes == 20 * len(expected)


def test_of_a_single_document_the_last_part_is_held_out():
    (training,), (evaluation,) = hold_out([counting_documents([1000]).file], 0.015)
    assert (training.starts.tolist(), training.lengths.tolist(), training.num_bytes) == ([0], [985], 985)
    assert (evaluation.starts.tolist(), evaluation.lengths.tolist(), evaluation.num_bytes) == ([985], [15], 15)


@pytest.mark.parametrize(("lengths", "hashes"), [([1000, 40], [0.2, 0.6]), ([50] * 20, [0.3] * 15 + [0.9] * 5)])
def test_documents_that_would_be_most_of_the_text_are_cut_instead(lengths, hashes):
    file = counting_documents(lengths).file
    file.documents["hash"] = [int(h * 2**64) for h in hashes]
    (training,), (evaluation,) = hold_out([file], 0.1)
    assert training.lengths.tolist() == [length - length // 10 for length in lengths]
    assert evaluation.starts.tolist() == (training.starts + training.lengths).tolist()


def test_sources_of_a_single_document_each_are_cut_too():
    files = [counting_documents([n]).file for n in (100, 50)]
    training, evaluation = hold_out(files, 0.1)
    assert [d.lengths.tolist() for d in (*training, *evaluation)] == [[90], [45], [10], [5]]


def test_a_hundredth_by_hash_is_about_a_hundredth():
    hashes = np.random.default_rng(0).random(100_000).tolist()
    _, (held,) = hold_out([documents_with(hashes)], 0.01)
    assert abs(len(held.starts) - 1000) < 100
