"""Text -> tokens -> batches. What step k is fed is a pure function of (seed, k)."""

from jaxpar.data.loader import Loader
from jaxpar.data.sources import find_files
from jaxpar.data.tokens import TokenFile, build_token_file

__all__ = ["Loader", "TokenFile", "build_token_file", "find_files"]
