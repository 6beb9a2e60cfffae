"""Tensor and sequence parallelism (Megatron-LM: arXiv 1909.08053 §3; sequence parallel: arXiv 2205.05198 §4.2).

Splits: heads and mlp over `tensor`, t ranks: the first matmul of a half block by columns, the second by rows, so that
only the second one's result is a sum over `tensor`. The residual stream between them is cut along the sequence
(sequence parallelism) or whole on every rank.
Collectives per layer and microbatch, in bytes of one activation A = B x S x D of a rank, in compute dtype:
    forward         2 all-reduces of A;    under sequence parallelism 2 all-gathers and 2 reduce-scatters
    backward        the same
    full remat      1 more all-reduce;     2 all-gathers and 1 reduce-scatter (the last sum is not needed again)
Under sequence parallelism the backward pass gathers the row-parallel outputs' cotangents and reduce-scatters the
column-parallel inputs'; gathered inputs are residuals unless remat recomputes them.
Limits: heads and mlp must be multiples of t. Kv heads need not: their kernels are then whole on every rank.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.parallel.axes import mesh_axes

AXES = frozenset({"tensor"})


def project(equation: str, x: Float[Array, "B S _"], weight: Float[Array, "..."], out: P) -> Float[Array, "..."]:
    """Column-parallel: x, whole over `tensor` and owing its gradient's sum over it, times a weight cut by columns."""
    if not AXES & mesh_axes(jax.typeof(weight).sharding.spec):
        # Every rank computes the whole product, so its share of x's gradient is whole, not an addend.
        out = P(*(None if part == "tensor" else part for part in out.partitions))
        x = jax.reshard(x, P(*jax.typeof(x).sharding.spec.partitions))
    return jnp.einsum(equation, x, weight, out_sharding=out)


def project_back(
    equation: str, x: Float[Array, "B S ..."], weight: Float[Array, "..."], addends: P, out: P
) -> Float[Array, "B S D"]:
    """Row-parallel: each rank's addend, then the sum over `tensor`, scattered along the sequence where `out` says."""
    return jax.reshard(jnp.einsum(equation, x, weight, out_sharding=addends), out)
