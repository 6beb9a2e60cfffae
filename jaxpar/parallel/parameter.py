"""What a strategy needs to know of a parameter that it is given."""

from typing import Any, Protocol


class Parameter(Protocol):
    """A Flax parameter as `models.parameters.declare` makes it."""

    axes: tuple[str | None, ...]
    """Its dims' logical names, without `layers`."""
    dims: tuple[int, ...]
    """Their sizes over the whole mesh."""

    def __getitem__(self, index: Any) -> Any:
        """param[...] is this rank's part."""
