"""In what order a sequence lies over the ranks of `context`, so that each has equal causal work.

    contiguous  rank i has the i-th of n equal parts; the last one has most of a causal mask's work
    zigzag      2 n parts, rank i has the i-th from the front and the i-th from the back
                (arXiv 2407.21783, section 3.3.2)
    striped     rank i has tokens i, i + n, i + 2 n, ...                (arXiv 2311.09431)

The order is that of the arrays alone: targets were shifted before, masks go by positions and segments.
"""

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

Order = Literal["contiguous", "zigzag", "striped"]


def multiple(order: Order, ranks: int) -> int:
    """What a sequence's length must be a multiple of."""
    return 2 * ranks if order == "zigzag" and ranks > 1 else ranks


def permutation(order: Order, seq_len: int, ranks: int) -> Int[np.ndarray, " S"]:
    """Which token of the sequence lies at each place of the array, whose n equal parts are the ranks'."""
    tokens = np.arange(seq_len)
    if order == "striped":
        return tokens.reshape(-1, ranks).T.reshape(-1)
    if order == "zigzag" and ranks > 1:
        parts = tokens.reshape(2 * ranks, -1)
        return np.concatenate([parts[part] for rank in range(ranks) for part in (rank, 2 * ranks - 1 - rank)])
    return tokens


def in_sequence(order: Order, x: Shaped[Array, "..."], ranks: int, dim: int = 1) -> Shaped[Array, "..."]:
    """What lies along `dim` in the ranks' order, in the sequence's own: `permutation` undone, by whole parts."""
    if order == "contiguous" or ranks == 1:
        return x
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if order == "striped":
        parts = jnp.swapaxes(x.reshape(*before, ranks, -1, *after), dim, dim + 1)
    else:
        first, second = jnp.split(x.reshape(*before, ranks, 2, -1, *after), 2, axis=dim + 1)
        parts = jnp.concatenate([first, jnp.flip(second, axis=dim)], axis=dim)
    return parts.reshape(x.shape)


def needed_shifts(
    order: Order, seq_len: int, ranks: int, stride: int, causal: bool, window: int | None
) -> tuple[int, ...]:
    """With the ranks in groups of `stride`: the r, ascending from 0, for which some group g needs keys of g - r."""
    groups = ranks // stride
    if window is None:
        return tuple(range(groups))
    if order == "striped":
        behind = range(min(window, ranks))
        pairs = [(q, (q - r) % ranks) for q in range(ranks) for r in behind]
        pairs += [] if causal else [(k, q) for q, k in pairs]
    else:
        parts = multiple(order, ranks)
        reach = min(parts - 1, math.ceil((window - 1) / (seq_len // parts)))
        owner = [min(part, parts - 1 - part) if parts > ranks else part for part in range(parts)]
        pairs = [
            (owner[q], owner[k])
            for q in range(parts)
            for k in range(max(0, q - reach), min(parts - 1, q if causal else q + reach) + 1)
        ]
    return tuple(sorted({(q // stride - k // stride) % groups for q, k in pairs}))
