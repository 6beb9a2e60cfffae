"""Small corpora and how batches are compared, for the tests of jaxpar.data."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxpar.data.split import Documents, select
from jaxpar.data.tokens import DOCUMENT, TokenFile
from jaxpar.parallel.batch import Batch


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    return write(path, gzip.compress(content) if path.suffix == ".gz" else content)


def counting_documents(lengths: Sequence[int]) -> Documents:
    """Token t is t, so that a token says where it came from; the last of each document stands for the separator."""
    ends = np.cumsum(lengths)
    documents = np.zeros(len(lengths), DOCUMENT)
    documents["start"], documents["num_tokens"], documents["num_bytes"] = ends - lengths, lengths, lengths
    tokens = np.arange(ends[-1], dtype="<u4")
    return select(TokenFile(Path("counting.bin"), tokens, documents, separator=10**6))


def same(a: Batch, b: Batch) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in leaves)
