"""A stack of equal layers: one compiled block, scanned, recomputed in the backward pass as asked."""

from collections.abc import Callable
from typing import Literal

import jax
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxpar.parallel import fsdp


def scan(
    block: Callable,
    stacked: PyTree,
    x: Float[Array, "B S D"],
    *,
    remat: Literal["none", "full"],
    regather: bool,
) -> Float[Array, "B S D"]:
    """block(params, x) over the leading dim of `stacked`.

    remat "full" keeps only each block's input, "none" every intermediate; `regather` decides about gathered weights
    alone: True gathers them again in the backward pass, False keeps them.
    """
    policies = jax.checkpoint_policies
    if remat == "full":
        policy = policies.nothing_saveable if regather else policies.save_only_these_names(fsdp.GATHERED)
    elif regather:
        policy = fsdp.save_all_but_gathered
    else:
        policy = policies.everything_saveable

    def body(x, params):
        return block(params, x), None

    # A scan's body is compiled apart from its backward pass: nothing there that CSE could merge.
    return lax.scan(jax.checkpoint(body, policy=policy, prevent_cse=False), x, stacked)[0]
