"""Products with weights: the gradient of the input and that of the weight, together or apart.

Apart (B and W of Zero Bubble, arXiv 2401.10241, section 2), the backward pass makes the input's gradient alone, and
gives what the weight's is made of: the input and the output's gradient. For that a weight comes as `Apart`, beside two
arrays of their sizes whose values count for nothing: what the backward pass gives as those arrays' gradients are the
operands. What sizes, and of what product, is found by tracing a forward pass with the weights as `Observed`.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.kernels import fp8
from jaxpar.numerics import widened


@dataclass(frozen=True)
class Use:
    """The product that a weight is in, as its gradient needs it."""

    equation: str
    fp8_axes: tuple[str, ...] | None
    x: jax.ShapeDtypeStruct | None
    """None where another weight's product has the same input, and keeps it."""
    x_of: int
    """Whose."""
    dy: jax.ShapeDtypeStruct


@dataclass
class Observation:
    """The uses seen while a function is traced, by the weights' numbers."""

    uses: dict[int, Use] = field(default_factory=dict)
    _weights: dict[int, Array] = field(default_factory=dict)
    _inputs: dict[int, tuple[Array, int]] = field(default_factory=dict)

    def see(
        self, number: int, equation: str, fp8_axes: tuple[str, ...] | None, weight: Array, x: Array, y: Array
    ) -> None:
        # A function may be traced again, with other tracers: by identity it is told whether it is.
        assert self._weights.get(number) is not weight, "a weight in two products, whose gradient is a sum of two"
        self._weights[number] = weight
        # While it is held here, no other array can have its id.
        _, first = self._inputs.setdefault(id(x), (x, number))
        kept = jax.ShapeDtypeStruct(x.shape, x.dtype) if first == number else None
        self.uses[number] = Use(equation, fp8_axes, kept, first, jax.ShapeDtypeStruct(y.shape, y.dtype))

    # One object through the whole trace, which compares what it is given by equality.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Observed:
    weight: Float[Array, "..."]
    number: int = field(metadata={"static": True})
    observation: Observation = field(metadata={"static": True})

    def __getitem__(self, index: object) -> "Observed":
        """As a parameter's value is read: all of it."""
        assert index is ...
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Apart:
    weight: Float[Array, "..."]
    x: Float[Array, "..."] | None
    dy: Float[Array, "..."]

    def __getitem__(self, index: object) -> "Apart":
        """As a parameter's value is read: all of it."""
        assert index is ...
        return self


def product(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."] | Observed | Apart,
    fp8_axes: tuple[str, ...] | None = None,
    fuses: bool = True,
) -> Float[Array, "..."]:
    """einsum(equation, x, weight), summed in at least float32 and rounded to x's dtype once.

    With `fuses` False what the backward pass multiplies is made before, once: a compiler may else put its making into
    both products, which TPUs' then do again for every block of the result.

    With `fp8_axes` the operands of all three products are rounded to 8-bit floats first, scaled by their largest value
    over these mesh axes, see kernels.fp8.
    """
    if isinstance(weight, Apart):
        return _product_apart(equation, fp8_axes, weight.x is not None, x, weight.weight, weight.x, weight.dy)
    if isinstance(weight, Observed):
        y = _product(equation, fp8_axes, fuses, x, weight.weight)
        weight.observation.see(weight.number, equation, fp8_axes, weight.weight, x, y)
        return y
    return _product(equation, fp8_axes, fuses, x, weight)


def weight_gradient(
    equation: str, fp8_axes: tuple[str, ...] | None, x: Float[Array, "..."], dy: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Of a product."""
    operands, y_dims = equation.split("->")
    x_dims, w_dims = operands.split(",")
    return _einsum(f"{x_dims},{y_dims}->{w_dims}", fp8_axes, x, dy, (fp8.FORWARD, fp8.BACKWARD))


def _input_gradient(equation, fp8_axes, weight, dy):
    operands, y_dims = equation.split("->")
    x_dims, w_dims = operands.split(",")
    return _einsum(f"{y_dims},{w_dims}->{x_dims}", fp8_axes, dy, weight, (fp8.BACKWARD, fp8.FORWARD))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(equation, fp8_axes, fuses, x, weight):
    return _einsum(equation, fp8_axes, x, weight)


def _product_forward(equation, fp8_axes, fuses, x, weight):
    return _einsum(equation, fp8_axes, x, weight), (x, weight)


def _product_backward(equation, fp8_axes, fuses, residuals, dy):
    # Written out, since autodiff's weight gradient is a transpose of (cotangent x input), for which the CPU backend
    # has no fast kernel.
    x, weight = residuals
    if not fuses:
        x, dy = lax.optimization_barrier(x), lax.optimization_barrier(dy)
    return _input_gradient(equation, fp8_axes, weight, dy), weight_gradient(equation, fp8_axes, x, dy)


_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product_apart(equation, fp8_axes, keeps_input, x, weight, x_place, dy_place):
    return _einsum(equation, fp8_axes, x, weight)


def _product_apart_forward(equation, fp8_axes, keeps_input, x, weight, x_place, dy_place):
    return _einsum(equation, fp8_axes, x, weight), (x, weight)


def _product_apart_backward(equation, fp8_axes, keeps_input, residuals, dy):
    x, weight = residuals
    return _input_gradient(equation, fp8_axes, weight, dy), None, x if keeps_input else None, dy


_product_apart.defvjp(_product_apart_forward, _product_apart_backward)


def _einsum(equation, fp8_axes, x, y, kinds=(fp8.FORWARD, fp8.FORWARD)):
    wide = widened(x.dtype)
    if fp8_axes is None:
        return jnp.einsum(equation, x, y, preferred_element_type=wide).astype(x.dtype)
    (x8, x_scale), (y8, y_scale) = (fp8.quantize(operand, kind, fp8_axes) for operand, kind in zip((x, y), kinds))
    result = jnp.einsum(equation, x8, y8, preferred_element_type=wide)
    return (result * (x_scale * y_scale).astype(wide)).astype(x.dtype)


@jax.custom_vjp
def made(arrays: PyTree) -> PyTree:
    """The arrays, whose gradients are all made before any of them is used."""
    return arrays


made.defvjp(lambda arrays: (arrays, None), lambda _, gradients: (lax.optimization_barrier(gradients),))
