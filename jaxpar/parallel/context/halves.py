"""A ring's rounds by the splash kernel: which of a rank's queries see which of another's keys, by whole halves.

In every order a rank's keys are all before, or all after, another's, or alternate with them, so that no positions are
needed. With the keys of a rank that is `earlier` in the ring, and of one that is later:

    zigzag      all queries see the first half of the keys; the second half of the queries sees all keys
    contiguous  all queries see all keys; none sees any
    striped     a query sees keys up to its own place; those before it

A rank's queries see of its own keys those up to their own place.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpar.kernels.attention import module
from jaxpar.kernels.mask import Tokens
from jaxpar.numerics import widened
from jaxpar.parallel.context.order import Order


@dataclass(frozen=True)
class Halves:
    """What the kernel takes beside arrays."""

    order: Order
    scale: float
    soft_cap: float | None
    interpret: bool = False
    """Without a TPU, slowly."""

    def forward(
        self,
        is_own: bool,
        is_earlier: Bool[Array, ""],
        q: Float[Array, "B C H K"],
        k: Float[Array, "B C G K"],
        v: Float[Array, "B C G K"],
        q_tokens: Tokens,
        k_tokens: Tokens,
    ) -> tuple[Float[Array, "B C H K"], Float[Array, "B C H"], Int[Array, ""]]:
        """As tiled.forward, of the keys of a rank, the own one or another; no tiles are counted."""
        wide, half = widened(q.dtype), q.shape[1] // 2

        def attend(seen: str, queries: slice = _ALL, keys: slice = _ALL) -> tuple[Array, Array]:
            out, lse = module("splash").part_forward(
                q[:, queries], k[:, keys], v[:, keys],
                q_tokens.segment_ids[:, queries], k_tokens.segment_ids[:, keys],
                seen, self.soft_cap, self.scale, self.interpret,
            )  # fmt: skip
            before = ((0, 0), (q.shape[1] - out.shape[1], 0), (0, 0))
            return jnp.pad(out.astype(wide), (*before, (0, 0))), jnp.pad(lse, before, constant_values=-jnp.inf)

        def nothing() -> tuple[Array, Array]:
            return jnp.zeros(q.shape, wide), jnp.full(q.shape[:3], -jnp.inf, wide)

        out, lse = self._by_relation(is_own, is_earlier, attend, nothing, half)
        return out, lse, jnp.zeros((), jnp.int32)

    def backward(
        self,
        is_own: bool,
        is_earlier: Bool[Array, ""],
        q: Float[Array, "B C H K"],
        k: Float[Array, "B C G K"],
        v: Float[Array, "B C G K"],
        out: Float[Array, "B C H K"],
        lse: Float[Array, "B C H"],
        cotangent: Float[Array, "B C H K"],
        q_tokens: Tokens,
        k_tokens: Tokens,
    ) -> tuple[Float[Array, "B C H K"], Float[Array, "B C G K"], Float[Array, "B C G K"]]:
        """As tiled.backward."""
        wide, half = widened(q.dtype), q.shape[1] // 2

        def attend(seen: str, queries: slice = _ALL, keys: slice = _ALL) -> tuple[Array, Array, Array]:
            dq, dk, dv = module("splash").part_backward(
                q[:, queries], k[:, keys], v[:, keys],
                q_tokens.segment_ids[:, queries], k_tokens.segment_ids[:, keys],
                out[:, queries], lse[:, queries], cotangent[:, queries],
                seen, self.soft_cap, self.scale, self.interpret,
            )  # fmt: skip

            def whole(x: Array, length: int, is_second: bool) -> Array:
                missing = length - x.shape[1]
                pad = (missing, 0) if is_second else (0, missing)
                return jnp.pad(x.astype(wide), ((0, 0), pad, (0, 0), (0, 0)))

            return whole(dq, q.shape[1], True), whole(dk, k.shape[1], False), whole(dv, k.shape[1], False)

        def nothing() -> tuple[Array, Array, Array]:
            dq, dk, dv = (jnp.zeros(x.shape, wide) for x in (q, k, v))
            return dq, dk, dv

        return self._by_relation(is_own, is_earlier, attend, nothing, half)

    def _by_relation(
        self, is_own: bool, is_earlier: Bool[Array, ""], attend: Callable, nothing: Callable, half: int
    ) -> tuple:
        if is_own:
            return attend("up to its own place")
        first, second = slice(None, half), slice(half, None)
        earlier, later = {
            "zigzag": (lambda: attend("all", keys=first), lambda: attend("all", queries=second)),
            "contiguous": (lambda: attend("all"), nothing),
            "striped": (lambda: attend("up to its own place"), lambda: attend("before its own place")),
        }[self.order]
        return lax.cond(is_earlier, earlier, later)


_ALL = slice(None)


def computed_share(order: Order, ranks: int) -> float:
    """Of a rank's queries times all keys, the part that is put to the kernel, by the costlier call of each round."""
    return (1 + (ranks - 1) / 2) / ranks if order == "zigzag" else 1.0


def fits(length: int) -> bool:
    """Whether a rank's tokens divide into what the kernel takes."""
    return length % (2 * module("splash").LANES) == 0
