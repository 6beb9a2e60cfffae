"""Text <-> tokens: bytes, a byte-level BPE that is trained here, or a tokenizer.json."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from jaxtyping import UInt

END_OF_TEXT = "<|endoftext|>"
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
"""Of GPT-2, Llama 3, Llama 2, Gemma, DeepSeek, BERT: looked for in this order where no eos_token is named."""


class Tokenizer(Protocol):
    """What training needs to know of a tokenizer; it can be pickled."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def separator(self) -> int:
        """The token after each document, which is what a document begins after."""

    @property
    def fingerprint(self) -> str:
        """Two tokenizers of one fingerprint give the same tokens."""

    @property
    def reserved(self) -> bytes | None:
        """What no document's text may have."""

    @property
    def bytes_per_second(self) -> float:
        """Of one core, roughly."""

    def encode(self, texts: Sequence[bytes]) -> list[UInt[np.ndarray, " T"]]:
        """The tokens of UTF-8 texts, without separators; on many cores where there are many texts."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, with U+FFFD for what is none."""


@dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte; the separator is NUL, a byte that no text has."""

    vocab_size: int = 256
    separator: int = 0
    fingerprint: str = "bytes"
    reserved: bytes | None = b"\0"
    bytes_per_second: float = 1e8

    def encode(self, texts: Sequence[bytes]) -> list[UInt[np.ndarray, " T"]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in map(int, tokens) if token < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer of the `tokenizers` library. Special tokens are never read out of a text, nor added to it."""

    json: str = field(repr=False)
    """The content of its tokenizer.json."""
    separator: int
    reserved: bytes | None = None
    bytes_per_second: float = 3e6

    @cached_property
    def vocab_size(self) -> int:
        return max(_parsed(self.json).get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.separator} {self.json}".encode()).hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[UInt[np.ndarray, " T"]]:
        encodings = _parsed(self.json).encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        return _parsed(self.json).decode([int(token) for token in tokens], skip_special_tokens=False)


@lru_cache(4)  # a worker gets the tokenizer with every part
def _parsed(content: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def load(path: Path) -> JsonTokenizer:
    """The tokenizer.json at `path`. Documents end in the eos_token of the tokenizer_config.json beside it, or in the
    first of the well-known ones that it has.

    Raises:
      ValueError: it is none, or has no such token.
    """
    try:
        content = path.read_text(encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except OSError as error:
        raise ValueError(
            f"--tokenizer {path}: {error.strerror}; give bytes, bpe:SIZE or the path of a tokenizer.json"
        ) from None
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"--tokenizer {path} is no tokenizer.json: {str(error).splitlines()[0]}") from None
    named = _eos_token(path.with_name("tokenizer_config.json"))
    candidates = (named,) if named else _SEPARATORS
    separators = [token_id for token in candidates if (token_id := tokenizer.token_to_id(token)) is not None]
    if not separators:
        raise ValueError(
            f"--tokenizer {path} has no token that ends a document, of {' '.join(candidates)}; "
            'name its own as {"eos_token": ...} in tokenizer_config.json beside it'
        )
    return JsonTokenizer(content, separators[0])


def _eos_token(path: Path) -> str | None:
    try:
        token = json.loads(path.read_bytes()).get("eos_token")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no JSON object: {error}") from None
    return token.get("content") if isinstance(token, dict) else token


def bpe_size(name: str) -> int | None:
    """SIZE of `bpe:SIZE`, None for another name. Raises ValueError where it is no number or below 257."""
    if not name.startswith("bpe:"):
        return None
    text = name.removeprefix("bpe:")
    least = 256 + 1
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"--tokenizer {name}: the size must be at least {least}, every byte and {END_OF_TEXT}")
    return int(text)


def train_bpe(texts: Iterator[str], size: int) -> JsonTokenizer:
    """A byte-level BPE (GPT-2's pattern) of at most `size` tokens, a function of the texts' multiset alone."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return JsonTokenizer(tokenizer.to_str(), separator=0)
