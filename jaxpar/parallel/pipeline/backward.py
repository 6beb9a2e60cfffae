"""A chunk's backward pass in the pieces that a schedule asks for: all at once, or the input's gradient (B) and that of
the weights (W) apart; from the chunk's input alone, or from what its forward pass kept.

Each is a pair of functions and what lies between them, arrays that a pipeline keeps from one to the other:

    forward (F)     keeps what its vjp needs, but for the weights, which are at hand           `Kept`
    input (B)       keeps the operands of the weights' products: their inputs and gradients    `WeightsApart`
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, PyTree

from jaxpar.parallel.product import Apart, Observation, Observed, Use, weight_gradient


@dataclass(frozen=True)
class Kept:
    """What a function gives as leaves of arrays and of its own arguments, as the arrays alone."""

    structure: Any
    """A PyTreeDef."""
    arguments: Mapping[int, int]
    """Leaves that are an argument's leaf as it is: of which number."""
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    """The others."""

    @classmethod
    def of(cls, function: Callable[..., PyTree], *arguments: PyTree) -> "Kept":
        jaxpr, given = jax.make_jaxpr(function, return_shape=True)(*arguments)
        inputs = {var: number for number, var in enumerate(jaxpr.jaxpr.invars)}
        known = {number: inputs[var] for number, var in enumerate(jaxpr.jaxpr.outvars) if var in inputs}
        leaves, structure = jax.tree.flatten(given)
        return cls(structure, known, tuple(leaf for number, leaf in enumerate(leaves) if number not in known))

    def arrays_of(self, given: PyTree) -> tuple[Array, ...]:
        return tuple(leaf for number, leaf in enumerate(jax.tree.leaves(given)) if number not in self.arguments)

    def restore(self, arrays: tuple[Array, ...], *arguments: PyTree) -> Any:
        """What the function gave, of the same arguments."""
        leaves, rest = jax.tree.leaves(arguments), iter(arrays)
        numbers = range(self.structure.num_leaves)
        given = [leaves[self.arguments[number]] if number in self.arguments else next(rest) for number in numbers]
        return jax.tree.unflatten(self.structure, given)


@dataclass(frozen=True)
class WeightsApart:
    """Which leaves of a chunk's parameters, [layers, ...] each, are weights of products, and of which."""

    uses: Mapping[int, Use]

    @classmethod
    def of(cls, stage: Callable[..., PyTree], own: PyTree, *others: PyTree, are_weights: PyTree) -> "WeightsApart":
        """By tracing stage(own, *others); `are_weights` says of each leaf of its own whether a product takes it."""
        observation = Observation()
        flags = jax.tree.leaves(jax.tree.map(lambda _, is_weight: is_weight, own, are_weights))

        def observed(own: PyTree, *others: PyTree) -> PyTree:
            leaves, structure = jax.tree.flatten(own)
            seen = [
                Observed(leaf, number, observation) if is_weight else leaf
                for number, (leaf, is_weight) in enumerate(zip(leaves, flags))
            ]
            return stage(jax.tree.unflatten(structure, seen), *others)

        jax.eval_shape(observed, own, *others)
        return cls(observation.uses)

    def operands(self, num_layers: int) -> dict[int, tuple[jax.ShapeDtypeStruct | None, jax.ShapeDtypeStruct]]:
        """Shapes of each weight's (input, output's gradient), of all layers; an input that several share once."""

        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype)

        return {
            number: (stacked(use.x) if use.x is not None else None, stacked(use.dy))
            for number, use in self.uses.items()
        }

    def parts(self, own: PyTree) -> tuple[dict[int, Array], dict[int, Array]]:
        """(the weights, the other leaves), by number."""
        leaves = dict(enumerate(jax.tree.leaves(own)))
        weights = {number: leaf for number, leaf in leaves.items() if number in self.uses}
        return weights, {number: leaf for number, leaf in leaves.items() if number not in self.uses}

    def joined(self, like: PyTree, weights: dict[int, Array], others: dict[int, Array], operands: PyTree) -> PyTree:
        """The parameters for a forward pass whose gradient by `operands` is what they are to hold."""
        apart = {number: Apart(weight, *operands[number]) for number, weight in weights.items()}
        merged = {**apart, **others}
        return jax.tree.unflatten(jax.tree.structure(like), [merged[number] for number in range(len(merged))])

    def gradients(self, operands: PyTree) -> dict[int, Array]:
        """By the weights."""

        def gradient(number: int, use: Use) -> Array:
            x, dy = operands[use.x_of][0], operands[number][1]
            return jax.vmap(lambda x, dy: weight_gradient(use.equation, use.fp8_axes, x, dy))(x, dy)

        return {number: gradient(number, use) for number, use in self.uses.items()}
