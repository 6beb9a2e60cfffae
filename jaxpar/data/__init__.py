"""Text -> tokens -> batches. What step k is fed is a pure function of (seed, k)."""

from jaxpar.data.corpus import Corpus, Evaluation, prepare
from jaxpar.data.loader import Loader
from jaxpar.data.prefetch import Prefetcher

__all__ = ["Corpus", "Evaluation", "Loader", "Prefetcher", "prepare"]
