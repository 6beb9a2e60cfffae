"""Parameters as stacks of matrices: what Muon and Adafactor see in them."""

from collections.abc import Sequence
from dataclasses import dataclass

_STACKED = ("layers", "experts")


@dataclass(frozen=True)
class Matrix:
    """Which dims of a parameter are its matrices' rows and columns; those before them number the matrices."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


def num_stacked(names: Sequence[str | None]) -> int:
    """How many leading dims number the layers (or experts) of a parameter with these logical axes."""
    return next((dim for dim, name in enumerate(names) if name not in _STACKED), len(names))


def as_matrix(names: Sequence[str | None]) -> Matrix | None:
    """The one view in which a parameter's matrix multiplies: embed x the rest, or the rest x embed. None: a vector, or
    heads of vectors, as biases are."""
    first, last = num_stacked(names), len(names)
    if "embed" not in names or last - first < 2:
        return None
    middle = first + 1 if names[first] == "embed" else last - 1
    return Matrix(tuple(range(first, middle)), tuple(range(middle, last)))
