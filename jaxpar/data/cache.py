"""Where what is derived from data is kept, and who makes it when several processes want it."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def default_directory() -> Path:
    """$XDG_CACHE_HOME/jaxpar/tokens, ~/.cache/jaxpar/tokens without that variable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpar" / "tokens"


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """The only process that makes `target` while the block runs; others wait for it, and for none that was killed.

    Raises:
      ValueError: the cache cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:  # sources' own are ValueErrors by now
        raise ValueError(
            f"cannot write the token cache {target.parent}: {error.strerror or error}; "
            "make room there, or set XDG_CACHE_HOME to another directory"
        ) from None


def versions(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """By what a file is known: path, size and modification time."""
    paths = [os.path.abspath(file) for file in files]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, map(os.stat, paths))]
