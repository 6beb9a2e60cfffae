"""Norms by group of parameters: which part of a model grows, or has a gradient that does."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxpar.numerics import widened


def group_norms(tree: PyTree) -> dict[str, Float[Array, ""]]:
    """The norm of each group of leaves, all layers together.

    A group is a module, as `blocks.attention`, or a parameter of the model itself, as `embedding`.
    """
    squares: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        group = jax.tree_util.keystr(path[:-1] or path, simple=True, separator=".")
        square = jnp.sum(jnp.square(leaf.astype(widened(leaf.dtype))))
        squares[group] = squares[group] + square if group in squares else square
    return {group: jnp.sqrt(square) for group, square in squares.items()}
