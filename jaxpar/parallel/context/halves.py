"""A ring's rounds by the splash kernel: which of a rank's queries see which of another's keys, by whole halves.

In every order a rank's keys are all before, or all after, another's, or alternate with them, so that no positions are
needed. With the keys of a rank that is `earlier` in the ring, and of one that is later:

    zigzag      all queries see the first half of the keys; the second half of the queries sees all keys. So the second
                half of the queries sees the first half of the keys, and in each half those of one half see all: every
                round is two products of halves, whoever's the keys are
    contiguous  all queries see all keys; none sees any
    striped     a query sees keys up to its own place; those before it

A rank's queries see of its own keys those up to their own place. All arrays lie as the kernel has them, once for all
rounds; what it gives, in compute dtype, is widened where it is added up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpar.kernels.attention import heads_first, module
from jaxpar.kernels.mask import Tokens
from jaxpar.numerics import widened
from jaxpar.parallel.context.order import Order

Keys = tuple[Float[Array, "B G C K"], Float[Array, "B G C K"]]
"""And values."""
Outcome = tuple[Float[Array, "B G R C K"], Float[Array, "B G R C"], Int[Array, ""]]
"""Outputs, log-sum-exps, and how many tiles were computed: none are counted."""


_Part = Callable[[Array, int], Array]
"""Of an array along a dim."""


def _whole(x: Array, dim: int) -> Array:
    return x


def _first(x: Array, dim: int) -> Array:
    return lax.slice_in_dim(x, 0, x.shape[dim] // 2, axis=dim)


def _second(x: Array, dim: int) -> Array:
    return lax.slice_in_dim(x, x.shape[dim] // 2, None, axis=dim)


def _one_of(is_first: Bool[Array, ""]) -> _Part:
    def part(x: Array, dim: int) -> Array:
        half = x.shape[dim] // 2
        return lax.dynamic_slice_in_dim(x, jnp.where(is_first, 0, half), half, axis=dim)

    return part


@dataclass(frozen=True)
class Halves:
    """What the kernel takes beside arrays."""

    order: Order
    scale: float
    soft_cap: float | None
    interpret: bool = False
    """Without a TPU, slowly."""

    def laid_out(
        self, q: Float[Array, "B C H K"], k: Float[Array, "B C G K"], v: Float[Array, "B C G K"]
    ) -> tuple[Float[Array, "B G R C K"], Keys]:
        """Queries, scaled, and keys."""
        splash = module("splash")
        scaled = splash.by_kv_heads(q * jnp.asarray(self.scale, q.dtype), k.shape[2])
        return scaled, (heads_first(k), heads_first(v))

    def forward(
        self,
        is_own: bool,
        is_earlier: Bool[Array, ""],
        q: Float[Array, "B G R C K"],
        held: Keys,
        q_tokens: Tokens,
        k_tokens: Tokens,
    ) -> Outcome:
        """Of the keys of a rank, the own one or another."""

        def attend(seen: str, queries: _Part = _whole, keys: _Part = _whole) -> tuple[Array, Array]:
            return module("splash").part_forward(
                queries(q, 3), *(keys(x, 2) for x in held),
                queries(q_tokens.segment_ids, 1), keys(k_tokens.segment_ids, 1),
                seen, self.soft_cap, self.interpret,
            )  # fmt: skip

        def nothing() -> tuple[Array, Array]:
            return jnp.zeros(q.shape, q.dtype), jnp.full(q.shape[:-1], -jnp.inf, widened(q.dtype))

        if is_own or self.order != "zigzag":
            out, lse = self._by_relation(is_own, is_earlier, attend, nothing)
            return out.astype(lse.dtype), lse, jnp.zeros((), jnp.int32)
        cross, (out, lse) = attend("all", _second, _first), attend("all", *[_one_of(is_earlier)] * 2)
        nowhere = jnp.full(lse.shape, -jnp.inf, lse.dtype)
        second = merged(cross, (out, jnp.where(is_earlier, nowhere, lse)))
        first = out.astype(second[0].dtype), jnp.where(is_earlier, lse, nowhere)
        whole = [jnp.concatenate(pair, axis=3) for pair in zip(first, second)]
        return whole[0], whole[1], jnp.zeros((), jnp.int32)

    def backward(
        self,
        is_own: bool,
        is_earlier: Bool[Array, ""],
        q: Float[Array, "B G R C K"],
        held: Keys,
        out: Float[Array, "B G R C K"],
        lse: Float[Array, "B G R C"],
        cotangent: Float[Array, "B G R C K"],
        q_tokens: Tokens,
        k_tokens: Tokens,
    ) -> tuple[Float[Array, "B G R C K"], Float[Array, "B G C K"], Float[Array, "B G C K"]]:
        """Gradients by queries, as they are scaled, by keys and by values, in at least float32."""
        wide = widened(q.dtype)

        def attend(seen: str, queries: _Part = _whole, keys: _Part = _whole) -> tuple[Array, Array, Array]:
            return module("splash").part_backward(
                queries(q, 3), *(keys(x, 2) for x in held),
                queries(q_tokens.segment_ids, 1), keys(k_tokens.segment_ids, 1),
                *(queries(x, 3) for x in (out, lse, cotangent)),
                seen, self.soft_cap, self.interpret,
            )  # fmt: skip

        def nothing() -> tuple[Array, Array, Array]:
            dq, dk, dv = (jnp.zeros(x.shape, x.dtype) for x in (q, *held))
            return dq, dk, dv

        if is_own or self.order != "zigzag":
            dq, dk, dv = (x.astype(wide) for x in self._by_relation(is_own, is_earlier, attend, nothing))
            return dq, dk, dv
        of_cross, of_one = (
            [x.astype(wide) for x in gradients]
            for gradients in (attend("all", _second, _first), attend("all", *[_one_of(is_earlier)] * 2))
        )

        def whole(x: Array, cross: Array, is_crossed_first: bool, axis: int) -> Array:
            zero = jnp.zeros(x.shape, x.dtype)
            pair = [jnp.where(is_earlier, x, zero), jnp.where(is_earlier, zero, x)]
            pair[0 if is_crossed_first else 1] += cross
            return jnp.concatenate(pair, axis=axis)

        return (
            whole(of_one[0], of_cross[0], False, 3),
            whole(of_one[1], of_cross[1], True, 2),
            whole(of_one[2], of_cross[2], True, 2),
        )

    def _by_relation(self, is_own: bool, is_earlier: Bool[Array, ""], attend: Callable, nothing: Callable) -> tuple:
        if is_own:
            return attend("up to its own place")
        earlier, later = {
            "contiguous": (lambda: attend("all"), nothing),
            "striped": (lambda: attend("up to its own place"), lambda: attend("before its own place")),
        }[self.order]
        return lax.cond(is_earlier, earlier, later)


def merged(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two softmaxes over different keys as one: outputs [..., K], log-sum-exps [...], in at least float32."""
    lse = jnp.logaddexp(a[1], b[1])
    shift = jnp.where(lse == -jnp.inf, 0.0, lse)
    parts = (out.astype(lse.dtype) * jnp.exp(own - shift)[..., None] for out, own in (a, b))
    return sum(parts, jnp.zeros((), lse.dtype)), lse


def computed_share(order: Order, ranks: int) -> float:
    """Of a rank's queries times all keys, the part that is put to the kernel, by the costlier call of each round."""
    return (1 + (ranks - 1) / 2) / ranks if order == "zigzag" else 1.0


def fits(length: int) -> bool:
    """Whether a rank's tokens divide into what the kernel takes."""
    return length % (2 * module("splash").LANES) == 0
