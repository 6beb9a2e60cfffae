"""Tokenizers give their text back, are the same every time, and are refused in one line."""

import numpy as np
import pytest
import tokenizers
from data_helpers import write

from jaxpar.data.build import build_bpe, build_token_file
from jaxpar.data.tokenizer import ByteTokenizer, bpe_size, load

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語 🎉\n" * 50


def test_bytes_and_back():
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode([TEXT.encode()])
    assert tokens.tolist() == list(TEXT.encode())
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.decode(tokens[:-60]) == TEXT.encode()[:-60].decode("utf-8", "replace")
    assert tokenizer.decode([65, 300, 66]) == "AB"


def test_a_bpe_is_trained_on_the_data_and_always_the_same(tmp_path):
    files = [write(tmp_path / "a.txt", TEXT), write(tmp_path / "b.txt", TEXT[::-1])]
    first = build_bpe(files, 340, cache_dir=tmp_path / "1")
    assert build_bpe(files, 340, cache_dir=tmp_path / "1") == first
    assert build_bpe(files, 340, cache_dir=tmp_path / "2").json == first.json
    assert (first.vocab_size, first.separator) == (340, 0)
    (tokens,) = first.encode([TEXT.encode()])
    assert len(tokens) < len(TEXT.encode()) / 2
    assert first.decode(tokens) == TEXT
    # Every byte has a token of its own, and no text makes a separator.
    (tokens,) = first.encode([b"<|endoftext|>" + bytes(range(1, 128))])
    assert 0 not in tokens
    assert first.decode(tokens).encode() == b"<|endoftext|>" + bytes(range(1, 128))
    assert len({build_bpe(files, size, cache_dir=tmp_path / "1").fingerprint for size in (300, 340)}) == 2


def test_a_long_text_has_the_tokens_of_the_whole(tmp_path):
    """Its pieces are cut where the pattern of byte-level BPE cuts."""
    text = "  def f(x):\n\n    return x  \n\n\ny = 1\nz = 2\n" * 20_000
    path = write(tmp_path / "a.txt", text)
    tokenizer = build_bpe([path], 300, cache_dir=tmp_path)
    (expected,) = tokenizer.encode([text.encode()])
    for part_bytes in (1 << 24, 200_000):
        file = build_token_file([path], tokenizer, cache_dir=tmp_path, part_bytes=part_bytes)
        assert np.array_equal(file.tokens, [*expected, 0])
        assert file.documents[["num_tokens", "num_bytes"]].tolist() == [(len(expected) + 1, len(text))]


@pytest.mark.parametrize(
    ("special", "config", "separator"),
    [
        (["<s>", "</s>"], None, 1),
        (["</s>", "<|endoftext|>"], None, 1),
        (["</s>", "<|im_end|>"], '{"eos_token": "<|im_end|>"}', 1),
        (["</s>", "<|im_end|>"], '{"eos_token": {"content": "<|im_end|>"}}', 1),
        (["</s>"], '{"eos_token": null}', 0),
    ],
)
def test_a_tokenizer_json_says_what_ends_a_document(tmp_path, special, config, separator):
    saved = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=special, show_progress=False)
    saved.train_from_iterator(["a b c </s>"], trainer)
    saved.enable_truncation(2)
    saved.save(str(tmp_path / "tokenizer.json"))
    if config:
        write(tmp_path / "tokenizer_config.json", config)
    tokenizer = load(tmp_path / "tokenizer.json")
    assert (tokenizer.separator, tokenizer.vocab_size) == (separator, saved.get_vocab_size())
    (tokens,) = tokenizer.encode([b"cabbac</s>"])
    assert len(tokens) > 2
    assert separator not in tokens


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (None, None, r"tokenizer\.json: No such file or directory; give bytes, bpe:SIZE or the path of"),
        ("{", None, r"tokenizer\.json is no tokenizer\.json: "),
        ('{"a": 1}', None, r"tokenizer\.json is no tokenizer\.json: "),
        (b"\xff", None, r"tokenizer\.json is no tokenizer\.json: "),
        (tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(), None, r"has no token that ends a document, of <\|end"),
        (tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(), '{"eos_token": "<x>"}', r"document, of <x>; name its"),
        (tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(), "[]", r"tokenizer_config\.json is no JSON object"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, content, config, message):
    if content:
        write(tmp_path / "tokenizer.json", content)
    if config:
        write(tmp_path / "tokenizer_config.json", config)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path / "tokenizer.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["bpe:12", "bpe:256", "bpe:", "bpe:many", "bpe:-1"])
def test_a_bpe_has_every_byte(name):
    assert bpe_size("bpe:257") == 257
    assert bpe_size("bytes") is None
    with pytest.raises(
        ValueError, match=rf"--tokenizer {name}: the size must be at least 257, every byte and <\|endof"
    ):
        bpe_size(name)
