"""What a step is fed: tokens, and all that a mask or a loss needs to know of them."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """What routers need of a training step."""

    shares: Float[Array, "*M B S"]
    """Of each token in the step's tokens, times the loss scale: what auxiliary losses weigh it by."""
    seeds: UInt32[Array, "*M B S"] | None = None
    """What a token's noise is made of, where routers have any."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One microbatch, or a stack of them with a leading dim.

    Targets are shifted before any permutation of the sequence, so a strategy may reorder S freely; every mask comes
    from `positions` and `segment_ids`, never from the order in the array.
    """

    tokens: Int[Array, "*M B S"]
    targets: Int[Array, "*M B S"]
    positions: Int[Array, "*M B S"]
    """Within the document, from 0."""
    segment_ids: Int[Array, "*M B S"]
    """Tokens attend only to their own segment."""
    loss_weights: Float[Array, "*M B S"]
    """1 for a token that counts, 0 for padding."""
    routing: Routing | None = None
    """In a step's region, of mixtures of experts."""

    def in_order(self, order: Int[np.ndarray, " S"] | slice) -> "Batch":
        """With token `order[i]` of each sequence at place i."""
        return jax.tree.map(lambda x: x[..., order], self)
