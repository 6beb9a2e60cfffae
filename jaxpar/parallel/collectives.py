"""Collectives in the forms of which compilers make what they say."""

import math

from jax import lax
from jaxtyping import Array, Shaped

Axes = str | tuple[str, ...]
Groups = list[list[int]] | None
"""Of ranks along the axes, which meet in a collective; None: all of them."""

TILE = 1024
"""Floats of a tile of a TPU's memory."""


def reduce_scatter(x: Shaped[Array, "..."], axes: Axes, dim: int, groups: Groups = None) -> Shaped[Array, "..."]:
    """This rank's part along `dim` of the sum over the ranks.

    Of rows, be they behind dims of size 1, the ranks' parts are put side by side: along a first dim TPUs' compiler
    makes an all-reduce and a slice, or pads the parts and sends what then lies on others' ranks. (Of what has more dims
    it may make another one the first, and rows that fill no tiles it pads so.)
    """
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if math.prod(before) > 1 or len(after) != 1 or after[0] % TILE:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    num_ranks = len(groups[0]) if groups else lax.axis_size(axes)
    part = lax.psum_scatter(x.reshape(num_ranks, -1, *after), axes, axis_index_groups=groups)
    return part.reshape(*before, *part.shape)
