"""What a strategy needs to know of a parameter that it is given."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax import lax
from jaxtyping import Array, Float

MOST_PARTS = 4
"""Of a hidden layer that is computed in parts."""
LANES, LEAST_WIDTH = 128, 2048
"""Of what a part's width is a multiple, and how wide it is at least."""


def num_parts(width: int) -> int:
    """The most equal parts that a rank's hidden layer divides into; 1 where none are wide enough."""
    parts = (n for n in range(MOST_PARTS, 1, -1) if width % (n * LANES) == 0)
    return next((n for n in parts if width // n >= LEAST_WIDTH), 1)


class Parameter(Protocol):
    """A Flax parameter as `models.parameters.declare` makes it."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Its dims' logical names, without `layers`."""

    @property
    def dims(self) -> tuple[int, ...]:
        """Their sizes over the whole mesh."""

    def __getitem__(self, index: Any) -> Any:
        """param[...] is this rank's part."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Part:
    """A `Parameter`: of another one, what a step computes with at once."""

    value: Float[Array, "..."]
    axes: tuple[str | None, ...] = field(metadata={"static": True})
    dims: tuple[int, ...] = field(metadata={"static": True})
    """The other one's: a part lies on the mesh as it does."""

    @classmethod
    def of(cls, weight: Parameter, name: str, index: int, num_parts: int) -> "Part":
        """Part `index` of `num_parts` equal ones of what a rank has, along the dim of a logical axis."""
        value, dim = weight[...], weight.axes.index(name)
        size = value.shape[dim] // num_parts
        return cls(lax.slice_in_dim(value, index * size, (index + 1) * size, axis=dim), weight.axes, weight.dims)

    def __getitem__(self, index: object) -> Float[Array, "..."]:
        assert index is ...
        return self.value
