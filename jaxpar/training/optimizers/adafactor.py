"""Adafactor (arXiv 1804.04235, algorithm 4): a matrix's second moments as those of its rows and its columns.

Each layer's matrix is one, whatever dims it is declared with: [D, H, K] is D x HK. Nothing depends on how far the
vocabulary is padded: which dims are factored follows from their names, means over padding cancel in the product of
rows and columns, and root mean squares divide by true sizes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.training.optimizers.matrices import Matrix, as_matrix, num_stacked

_DECAY = 0.8  # section 7.2
_EPS = 1e-30, 1e-3  # of squared gradients and of a parameter's scale
_CLIP = 1.0


class Factored(NamedTuple):
    """A stack of matrices' second moments: the mean along each row, and along each column."""

    rows: Float[Array, "..."]
    columns: Float[Array, "..."]


class AdafactorState(NamedTuple):
    num_updates: Int[Array, ""]
    second: PyTree
    """Of each parameter: Factored, or an array like it."""


def scale_by_adafactor(names: PyTree, vocab_size: int) -> optax.GradientTransformation:
    """Gradients over their root mean square, clipped at an update's, times the parameter's; `names` has each
    parameter's logical axes. The second moment's decay is 1 - step^-0.8: no beta is asked for."""
    matrices = jax.tree.map(as_matrix, names, is_leaf=lambda node: isinstance(node, tuple))

    def init(params: PyTree) -> AdafactorState:
        def zeros(param: Array, matrix: Matrix | None) -> Factored | Array:
            return jax.tree.map(jnp.zeros_like, _means(param, matrix))

        return AdafactorState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params, matrices))

    def update(grads: PyTree, state: AdafactorState, params: PyTree) -> tuple[PyTree, AdafactorState]:
        step = (state.num_updates + 1).astype(jnp.float32)
        decay = 1.0 - step**-_DECAY

        def average(grad: Array, second: Factored | Array, matrix: Matrix | None) -> Factored | Array:
            new = _means(grad * grad + _EPS[0], matrix)
            return jax.tree.map(lambda old, new: (decay * old + (1.0 - decay) * new).astype(old.dtype), second, new)

        def scaled(grad: Array, second: Factored | Array, matrix: Matrix | None, param: Array, axes: tuple) -> Array:
            out = _preconditioned(grad, second, matrix)
            out = out / jnp.maximum(1.0, _rms(out, axes, vocab_size) / _CLIP)
            return out * jnp.maximum(_EPS[1], _rms(param, axes, vocab_size))

        second = jax.tree.map(average, grads, state.second, matrices)
        return jax.tree.map(scaled, grads, second, matrices, params, names), AdafactorState(
            state.num_updates + 1, second
        )

    return optax.GradientTransformation(init, update)


def _means(x: Float[Array, "..."], matrix: Matrix | None) -> Factored | Array:
    return x if matrix is None else Factored(jnp.mean(x, matrix.columns), jnp.mean(x, matrix.rows))


def _preconditioned(grad: Float[Array, "..."], second: Factored | Array, matrix: Matrix | None) -> Float[Array, "..."]:
    if matrix is None:
        assert not isinstance(second, Factored)
        return grad * jax.lax.rsqrt(second)
    assert isinstance(second, Factored)
    rows = jnp.expand_dims(second.rows, matrix.columns)
    rows = rows / jnp.mean(rows, matrix.rows, keepdims=True)
    return grad * jax.lax.rsqrt(rows) * jax.lax.rsqrt(jnp.expand_dims(second.columns, matrix.rows))


def _rms(x: Float[Array, "..."], names: Sequence[str | None], vocab_size: int) -> Float[Array, "..."]:
    """Of each matrix or vector of a stack, dims kept; padding, which is zero, does not count."""
    dims = tuple(range(num_stacked(names), x.ndim))
    count = math.prod(vocab_size if names[dim] == "vocab" else x.shape[dim] for dim in dims)
    return jnp.sqrt(jnp.sum(x * x, dims, keepdims=True) / count)
