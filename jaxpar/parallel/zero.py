"""ZeRO-1 and ZeRO-2 (arXiv 1910.02054, section 5): weights whole on every rank, what an optimizer keeps cut.

Splits: master parameters and moments over (data, expert, context, fsdp), n ranks; under ZeRO-2 gradients too. Every
rank keeps a copy of each kernel that is whole over those axes, in compute dtype.
Collectives per step, in bytes of the whole weight W of a tensor rank:
    all-gather      W x compute dtype, once, of the updated parameters
    reduce-scatter  W x reduction dtype; ZeRO-1: once; ZeRO-2: per microbatch, layer by layer as the backward pass goes
Memory per device for P parameters in bfloat16, AdamW (the paper's figure 1, K = 12): 2 P + 2 P + 12 P / n, and under
ZeRO-2 2 P + (2 + 12) P / n with gradients reduced in bfloat16.
Limits: as FSDP's, a dim that an axis does not divide is not cut over it.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.parallel import fsdp
from jaxpar.parallel.axes import without


def whole(master: Float[Array, "..."], dtype: jnp.dtype, axes: frozenset[str]) -> Float[Array, "..."]:
    """The copy that a step computes with, gathered over `axes` from every rank's part of the master parameter."""
    return jax.reshard(master.astype(dtype), without(jax.typeof(master).sharding.spec, axes))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A whole weight, and an array like this rank's part of its gradient, whose value counts for nothing."""

    whole: Float[Array, "..."]
    part: Float[Array, "..."]

    def __getitem__(self, index: object) -> "Weight":
        """As a parameter's value is read: all of it."""
        assert index is ...
        return self


def gather(
    weight: Weight, cuts: fsdp.Cuts, reduce_dtype: jnp.dtype, folds: fsdp.Folds = fsdp.IN_ONE
) -> Float[Array, "..."]:
    """The whole weight. Backward: reduce-scatter in `reduce_dtype`, to this rank's part."""
    return _gather(weight.whole, weight.part, cuts, weight.part.dtype, reduce_dtype, folds)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _gather(whole, part, cuts, dtype, reduce_dtype, folds):
    return whole


def _forward(whole, part, cuts, dtype, reduce_dtype, folds):
    return whole, None


def _backward(cuts, dtype, reduce_dtype, folds, _, cotangent):
    return None, fsdp.reduce_scatter(cotangent.astype(reduce_dtype), cuts, folds).astype(dtype)


_gather.defvjp(_forward, _backward)
