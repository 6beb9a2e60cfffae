"""From settings to batches; and what does not fit is refused in one line, before long work."""

import dataclasses
import math

import numpy as np
import pytest
from data_helpers import same, write, write_jsonl

from jaxpar.config import DataConfig
from jaxpar.data import Corpus, prepare

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "here"]


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [f"{i}: " + " ".join(rng.choice(WORDS, rng.integers(3, 30))) for i in range(count)]


def prepared(directory, source: str, eval_data: str = "", vocab_size: int = 512, microbatches: int = 2, **settings):
    defaults = {"batch_size": 4, "seq_len": 32, "eval_fraction": 0.1}
    config = DataConfig(source, **(defaults | settings))
    arguments = {"vocab_size": vocab_size, "seed": 0, "num_microbatches": microbatches}
    return prepare(config, eval_data=eval_data, cache_dir=directory / "cache", **arguments)


def evaluated(corpus: Corpus) -> np.ndarray:
    assert corpus.evaluation is not None
    batches = [corpus.evaluation.loader.host_batch(i) for i in range(corpus.evaluation.num_batches)]
    return np.concatenate([batch.targets[batch.loss_weights > 0] for batch in batches])


def trained(corpus: Corpus) -> np.ndarray:
    """The targets of one epoch, in the order of its samples."""
    rows = [samples.rows(np.arange(samples.num_samples)) for samples in corpus.train.samples]
    return np.concatenate([batch.targets[batch.loss_weights > 0] for batch in rows])


def test_training_and_evaluation_share_no_document_and_lose_none(tmp_path):
    """Whatever the order, the file and the duplicates, and whether packed or not."""
    documents = texts(400)
    write_jsonl(tmp_path / "a.jsonl", documents)
    write_jsonl(tmp_path / "b.jsonl.gz", documents[::-2])
    alone = sides(prepared(tmp_path, str(tmp_path / "a.jsonl")))
    assert set(alone) == set(documents)
    assert 20 < list(alone.values()).count("held out") < 60
    twice = prepared(tmp_path, str(tmp_path / "*.jsonl*"), pack_documents=True, seq_len=256)
    assert sides(twice) == alone
    for targets, side in ((trained(twice), "trained on"), (evaluated(twice), "held out")):
        told = twice.tokenizer.decode(targets).split("\0")[:-1]
        assert sorted(told) == sorted(text for text in documents + documents[::-2] if alone[text] == side)
    assert twice.num_tokens == len(trained(twice))


def sides(corpus: Corpus) -> dict[str, str]:
    assert corpus.evaluation is not None
    result = {}
    for side, loader in (("trained on", corpus.train), ("held out", corpus.evaluation.loader)):
        for samples in loader.samples:
            documents = samples.documents
            for start, length in zip(documents.starts, documents.lengths):
                text = corpus.tokenizer.decode(documents.file.tokens[start : start + length - 1])
                assert result.setdefault(text, side) == side
    return result


def test_an_evaluation_is_the_held_out_text(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(400))
    corpus = prepared(tmp_path, str(tmp_path / "a.jsonl"))
    evaluation = corpus.evaluation
    assert evaluation is not None
    assert len(evaluated(corpus)) == evaluation.num_tokens - 1
    assert evaluation.num_batches == math.ceil((evaluation.num_tokens - 1) / (4 * 32))
    separators = (evaluated(corpus) == 0).sum()
    assert evaluation.bytes_per_token == pytest.approx(1 - separators / evaluation.num_tokens, abs=1e-12)


def test_a_bpe_run_from_text_to_text(tmp_path):
    documents = texts(300)
    write_jsonl(tmp_path / "a.jsonl", documents)
    settings = {"tokenizer": "bpe:300", "pack_documents": True, "eval_fraction": 0.0, "seq_len": 128}
    corpus = prepared(tmp_path, str(tmp_path / "a.jsonl"), **settings)
    assert corpus.evaluation is None
    assert (corpus.tokenizer.vocab_size, corpus.tokenizer.separator) == (300, 0)
    assert documents[0].startswith(corpus.tokenizer.decode(corpus.prompt(4)))
    assert len(corpus.prompt(4)) == 4
    batch = corpus.train.host_batch(7)
    for segment in range(1, batch.segment_ids[0, 0].max() + 1):
        text = corpus.tokenizer.decode(batch.targets[0, 0][batch.segment_ids[0, 0] == segment])
        assert text.removesuffix("<|endoftext|>") in documents
    assert same(batch, prepared(tmp_path, str(tmp_path / "a.jsonl"), **settings).train.host_batch(7))


def test_a_mixture_has_its_weights(tmp_path):
    write(tmp_path / "a.txt", "a" * 3000)
    write(tmp_path / "b.txt", "b" * 300)
    corpus = prepared(tmp_path, f"{tmp_path}/a.txt=1,{tmp_path}/b.txt=3", eval_fraction=0.0)
    tokens = np.concatenate([corpus.train.host_batch(step).tokens for step in range(25)]).reshape(100, 32)
    assert [(tokens == ord(letter)).all(axis=1).sum() for letter in "ab"] == [25, 75]


def test_evaluation_data_of_its_own(tmp_path):
    write(tmp_path / "a.txt", "a" * 3000)
    write(tmp_path / "b.txt", "b" * 100)
    corpus = prepared(tmp_path, f"{tmp_path}/a.txt", eval_data=f"{tmp_path}/b.txt")
    assert corpus.num_tokens == 3001
    assert sorted(evaluated(corpus)) == [0, *[ord("b")] * 99]


def test_bin_files_are_documents_of_the_tokenizer_that_is_named(tmp_path):
    tokens = np.concatenate([[*range(1, 50), 0]] * 20).astype("<u2")
    write(tmp_path / "a.bin", tokens.tobytes())
    corpus = prepared(tmp_path, f"{tmp_path}/a.bin", eval_fraction=0.0)
    assert corpus.num_tokens == 1000
    assert np.array_equal(corpus.train.samples[0].rows(np.arange(3)).tokens.ravel(), tokens[:96])
    write(tmp_path / "b.bin", np.concatenate([tokens[:200], tokens[:100] + 1]).astype("<u2").tobytes())
    other = prepared(tmp_path, f"{tmp_path}/b.bin", eval_fraction=0.3)
    assert other.evaluation is not None
    assert other.evaluation.bytes_per_token is None
    write(tmp_path / "a.json", '{"dtype": "uint8"}')
    assert prepared(tmp_path, f"{tmp_path}/a.bin", eval_fraction=0.0).num_tokens == 1960


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatches": 3}, r"--batch-size 4 is no multiple of --grad-accumulation 3; change either$"),
        ({"tokenizer": "bpe:12"}, r"--tokenizer bpe:12: the size must be at least 257"),
        ({"tokenizer": "bpe:600"}, r"the data has token ids up to 599, .* set --model\.vocab-size 600 or more$"),
        ({"vocab_size": 100}, r"the data has token ids up to 255, the model's vocabulary ends at 99; set --model"),
        ({"tokenizer": "gpt9"}, r"--tokenizer gpt9: No such file or directory; give bytes, bpe:SIZE or the path"),
        ({"source": "{0}/none"}, r"--data '\S+/none': \S+/none does not exist; "),
        ({"eval_data": "{0}/none"}, r"--eval-data '\S+/none': \S+/none does not exist; "),
        ({"eval_data": "{0}/a.txt=2"}, r"--eval-data '\S+=2': every token counts alike there; leave the weights out$"),
        ({"source": "{0}/a.txt=0.123457,{0}/b.jsonl"}, r"the weights 0\.123457, 1\.0 repeat only every \d+ samples"),
        ({"source": "{0}/b.jsonl"}, r"--data '\S+': every document \(3\) is empty; name files with text$"),
        ({"source": "{0}/a.txt=1,{0}/b.jsonl"}, r"--data '\S+/b\.jsonl': every document \(3\) is empty"),
        (
            {"text_field": "body", "source": "{0}/b.jsonl"},
            r"\S+b\.jsonl:1: no field 'body', but text; name one by --te",
        ),
        (
            {"batch_size": 8},
            r"--data '\S+/a\.txt' has 225 tokens to train on, one batch takes 257 \(--batch-size 8 x --seq-len 32\);",
        ),
        (
            {"batch_size": 16, "pack_documents": True},
            r"--data '\S+/a\.txt' has 8 sequences to train on, one batch takes 16 \(--b",
        ),
        (
            {"source": "{0}/a.txt,{0}/c.txt=2"},
            r"--data '\S+/c\.txt' has 5 tokens to train on, one sample takes 33 \(--seq-len 32\); lower either or",
        ),
        ({"source": "{0}/a.bin", "tokenizer": "bpe:300"}, r"--tokenizer bpe:300: \.bin files have their tokens alr"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", "x" * 250)
    write(tmp_path / "a.bin", b"\1\0" * 250)
    write_jsonl(tmp_path / "b.jsonl", ["", "", ""])
    write(tmp_path / "c.txt", "short")
    given = {"source": "{0}/a.txt", **arguments}
    given = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(ValueError, match=f"^{message}") as error:
        prepared(tmp_path, **given)
    assert "\n" not in str(error.value)


def test_a_hundredth_of_the_standard_library_is_held_out(tmp_path):
    """The default run's data, whose every batch is of plain text."""
    config = dataclasses.replace(DataConfig(), seq_len=64)
    corpus = prepare(config, vocab_size=256, seed=0, num_microbatches=1, cache_dir=tmp_path)
    assert corpus.evaluation is not None
    assert 0.001 < corpus.evaluation.num_tokens / corpus.num_tokens < 0.05
    assert corpus.evaluation.num_batches > 8
    assert corpus.train.host_batch(0).loss_weights.sum() == 16 * 64
