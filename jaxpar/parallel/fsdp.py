"""Fully sharded data parallelism (ZeRO-3: arXiv 1910.02054; PyTorch FSDP: arXiv 2304.11277).

Splits: every kernel's `embed` dim over (expert, context, fsdp), n ranks; the batch lies over the same axes.
Collectives per step, in bytes of the whole weight W of a tensor rank (a ring moves (n - 1) / n of it):
    all-gather      W x compute dtype, per microbatch: in the forward pass and again in the backward pass
                    (`reshard_after_forward`), or once
    reduce-scatter  W x reduction dtype, per microbatch; over several axes one after the other, on what is left
Limits: an embed dim that the axes do not divide is not cut over them; its gradient is then summed once a step.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.parallel.axes import TOKEN_AXES, axes_of, without

GATHERED = "gathered_weight"


def gather(weight: Float[Array, "..."], compute_dtype: jnp.dtype, reduce_dtype: jnp.dtype) -> Float[Array, "..."]:
    """The weight in compute dtype, whole over the axes that tokens are cut over.

    Backward: cast to `reduce_dtype`, reduce-scatter to the weight's own cut, and leave the sum over the axes that the
    weight's type owes to the end of the step.
    """
    return _gather(weight, compute_dtype, reduce_dtype, jax.typeof(weight))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(weight, compute_dtype, reduce_dtype, stored):
    return _gathered(weight, compute_dtype, stored)


def _gathered(weight, compute_dtype, stored):
    whole = P(*without(stored.sharding.spec, TOKEN_AXES).partitions, reduced=TOKEN_AXES)
    return checkpoint_name(jax.reshard(weight.astype(compute_dtype), whole), GATHERED)


def _forward(weight, compute_dtype, reduce_dtype, stored):
    # Not _gather itself: a remat policy must see the gather, and does not see into a custom_vjp's primal.
    return _gathered(weight, compute_dtype, stored), None


def _backward(compute_dtype, reduce_dtype, stored, _, cotangent):
    return (reduce_scatter(cotangent.astype(reduce_dtype), stored.sharding.spec).astype(stored.dtype),)


_gather.defvjp(_forward, _backward)


def reduce_scatter(addends: Float[Array, "..."], spec: P) -> Float[Array, "..."]:
    """Addends over the axes that tokens are cut over, summed over those of them that `spec` cuts a dim over; the sum
    over the others is still owed."""
    # One axis at a time: over several at once, in another order than the mesh's, the compiler makes an all-reduce.
    owed, partitions = jax.typeof(addends).sharding.spec.unreduced, list(without(spec, TOKEN_AXES).partitions)
    for dim, partition in enumerate(spec.partitions):
        for axis in axes_of(partition):
            if axis in TOKEN_AXES:
                owed, partitions[dim] = owed - {axis}, (*axes_of(partitions[dim]), axis)
                addends = jax.reshard(addends, P(*partitions, unreduced=owed))
    return addends


def save_all_but_gathered(primitive, *_, **params) -> bool:
    """A `jax.checkpoint` policy. Both ends of a gather are refused: the name, and the reshard that it names, which is
    known by its type (only a gathered weight owes its gradient over the token axes)."""
    if primitive.name == "name":
        return params["name"] != GATHERED
    return not (primitive.name == "reshard" and params["dst_sharding"].spec.reduced >= TOKEN_AXES)
