"""A stack of equal layers: one compiled block, scanned, recomputed in the backward pass as asked."""

from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.parallel.remat import FULL, NONE, Remat


def scan(
    block: Callable, stacked: PyTree, x: Float[Array, "B S D"], *, remat: Remat, regather: bool
) -> Float[Array, "B S D"]:
    """block(params, x) over the leading dim of `stacked`.

    `regather` decides about gathered weights alone: True gathers them again in the backward pass, False keeps them.
    Layers that `remat.every` does not divide make a shorter last group (whose parameters are then copied once).
    """

    def layer(x, params):
        return block(params, x), None

    def run(x, params, remat):
        # A scan's body is compiled apart from its backward pass: nothing there that CSE could merge.
        return lax.scan(jax.checkpoint(layer, policy=remat.policy(regather), prevent_cse=False), x, params)[0]

    if remat.every == 1:
        return run(x, stacked, remat)

    def group(x, params):
        return run(x, params, NONE), None

    again = jax.checkpoint(group, policy=remat.policy(regather), prevent_cse=False)
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    num_groups, rest = divmod(num_layers, remat.every)
    grouped = jax.tree.map(lambda leaf: _grouped(leaf[: num_layers - rest], num_groups), stacked)
    x = lax.scan(again, x, grouped)[0]
    if not rest:
        return x
    last = jax.tree.map(lambda leaf: leaf[num_layers - rest :], stacked)
    if rest > 1:
        return again(x, last)[0]
    # A loop of one layer is none: what it recomputes must be kept from merging with the forward pass.
    alone = jax.checkpoint(layer, policy=FULL.policy(regather))
    return alone(x, jax.tree.map(lambda leaf: leaf[0], last))[0]


def _grouped(leaf: Float[Array, "L ..."], num_groups: int) -> Float[Array, "N L/N ..."]:
    return leaf.reshape(num_groups, leaf.shape[0] // num_groups, *leaf.shape[1:])
