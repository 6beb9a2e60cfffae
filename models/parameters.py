"""How a parameter is declared: shape, logical axes, initializer and what its gradient sums over, in one place."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


_NUM_TERMS, _TERM = 8, 2**16
_TERMS_STD = (_NUM_TERMS * (_TERM**2 - 1) / 12) ** 0.5


def normal(std: float) -> Initializer:
    """Gaussian to the eye, as the sum of eight 16-bit uniforms (Irwin-Hall): within 4.9 std, excess kurtosis -0.15.

    Summed in integers and scaled once, it is bitwise the same however an array is cut and on every backend; the
    logarithm in an exact Gaussian is not, since a compiler may evaluate it differently in a vector and in a remainder.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        def add_pair(i: jax.Array, total: jax.Array) -> jax.Array:
            bits = jax.random.bits(jax.random.fold_in(key, i), shape, jnp.uint32)
            return total + (bits >> 16).astype(jnp.int32) + (bits & (_TERM - 1)).astype(jnp.int32)

        # One pair after the other: all at once would take several times the parameter's memory.
        start = jnp.full(shape, -_NUM_TERMS * (_TERM - 1) // 2, jnp.int32)
        centred = jax.lax.fori_loop(0, _NUM_TERMS // 2, add_pair, start)
        # In float32 whatever the dtype, so that float64 runs start from the same numbers.
        return (centred.astype(jnp.float32) * jnp.float32(std / _TERMS_STD)).astype(dtype)

    return init


def constant(value: float) -> Initializer:
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def declare(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: Sequence[str | None],
    init: Initializer,
    dtype: jnp.dtype,
    summed_over: Sequence[str | tuple[str, int]] = ("batch", "seq"),
) -> nnx.Param:
    """A parameter whose dims have the logical names `axes`.

    `summed_over` names the dims of the activation that it acts on and that its gradient sums over (with its size one
    that need not be cut): which mesh axes cut those is how a layout knows what the gradient is a partial sum of.
    """
    assert len(shape) == len(axes)
    names, sizes = zip(*((over, None) if isinstance(over, str) else over for over in summed_over))
    value = init(rngs.params(), shape, dtype)
    return nnx.Param(value, axes=tuple(axes), dims=shape, summed_over=names, summed_sizes=sizes)
