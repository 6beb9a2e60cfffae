"""A stack of equal layers: one compiled block, scanned, recomputed in the backward pass as asked."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.parallel.remat import FULL, NONE, Remat


def alone(
    block: Callable[[PyTree, Array], tuple[Array, PyTree]],
    params: PyTree,
    x: Float[Array, "B S D"],
    *,
    remat: Remat,
    regather: bool,
) -> tuple[Float[Array, "B S D"], PyTree]:
    """block(params, x) of a layer that is in no loop: what it recomputes is kept from merging with the forward pass."""
    return jax.checkpoint(lambda x, params: block(params, x), policy=remat.policy(regather))(x, params)


def scan(
    block: Callable[[PyTree, Array], tuple[Array, PyTree]],
    stacked: PyTree,
    x: Float[Array, "B S D"],
    *,
    remat: Remat,
    regather: bool,
    count: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B S D"], PyTree]:
    """block(params, x) -> (x, what the layer tells) over the leading dim of `stacked`: (x, what all layers told, with a
    leading layers dim).

    With `count` the stack has empty slots after so many layers: they are skipped, and tell zeros. Of ranks that meet in
    a collective of the block's, all must have the same.
    `regather` decides about gathered weights alone: True gathers them again in the backward pass, False keeps them.
    Layers that `remat.every` does not divide make a shorter last group (whose parameters are then copied once).
    """

    if count is not None:
        slots = jnp.arange(jax.tree.leaves(stacked)[0].shape[0], dtype=count.dtype)
        block, stacked = _skipping(block, count), (stacked, slots)

    def layer(x, params):
        return block(params, x)

    def run(x, params, remat):
        # A scan's body is compiled apart from its backward pass: nothing there that CSE could merge.
        return lax.scan(jax.checkpoint(layer, policy=remat.policy(regather), prevent_cse=False), x, params)

    if remat.every == 1:
        return run(x, stacked, remat)

    def group(x, params):
        return run(x, params, NONE)

    again = jax.checkpoint(group, policy=remat.policy(regather), prevent_cse=False)
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    num_groups, rest = divmod(num_layers, remat.every)
    grouped = jax.tree.map(lambda leaf: _grouped(leaf[: num_layers - rest], num_groups), stacked)
    x, told = lax.scan(again, x, grouped)
    told = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), told)
    if not rest:
        return x, told
    last = jax.tree.map(lambda leaf: leaf[num_layers - rest :], stacked)
    if rest > 1:
        x, told_last = again(x, last)
    else:
        # A loop of one layer is none.
        x, told_last = alone(block, jax.tree.map(lambda leaf: leaf[0], last), x, remat=FULL, regather=regather)
        told_last = jax.tree.map(lambda leaf: leaf[None], told_last)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), told, told_last)


def _skipping(
    block: Callable[[PyTree, Array], tuple[Array, PyTree]], count: Int[Array, ""]
) -> Callable[[tuple[PyTree, Array], Array], tuple[Array, PyTree]]:
    """A block of (params, slot), for the first `count` slots alone."""

    def skipping(params_and_slot: tuple[PyTree, Array], x: Array) -> tuple[Array, PyTree]:
        params, slot = params_and_slot
        told = jax.eval_shape(block, params, x)[1]

        def skip(params: PyTree, x: Array) -> tuple[Array, PyTree]:
            return x, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), told)

        return lax.cond(slot < count, block, skip, params, x)

    return skipping


def _grouped(leaf: Float[Array, "L ..."], num_groups: int) -> Float[Array, "N L/N ..."]:
    return leaf.reshape(num_groups, leaf.shape[0] // num_groups, *leaf.shape[1:])
