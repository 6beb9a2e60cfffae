"""Cuts: layers into parts of the model, a sequence into token slices. Both by dynamic programming, both optimal."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

_ROUNDING = 1 + 1e-12
_BLOCK = 256
"""Candidates tried at once; bounds memory."""


def partition(
    layer_times: Sequence[float], num_parts: int, embedding_time: float = 0.0, head_time: float = 0.0
) -> tuple[int, ...]:
    """How many layers each part gets, the first also the embedding, the last the head; at least one each.

    The slowest part is as fast as contiguous cuts allow, since it sets the pace (PipeDream, arXiv 1806.03377, section
    3.1, without replication); of those cuts the one with the least sum of squared times, so the most even.

    ValueError for more parts than layers, and for times that are not positive.
    """
    num_layers = len(layer_times)
    if not 1 <= num_parts <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {num_parts} parts (stages x chunks); take 1 to {num_layers}"
        )
    if not all(0 < time < math.inf for time in layer_times) or min(embedding_time, head_time) < 0:
        raise ValueError("layers' times must be positive, the embedding's and head's not negative")
    upto = np.concatenate([[0.0], np.cumsum(layer_times)])
    span = upto[None, :] - upto[:, None]  # [first layer, one past the last]
    span[np.tril_indices(num_layers + 1)] = np.inf
    times = np.stack([span] * num_parts)
    times[0] += embedding_time
    times[-1] += head_time
    slowest, _ = _best_cuts(times, np.maximum)
    squares = np.where(times <= slowest * _ROUNDING, times**2, np.inf)
    _, bounds = _best_cuts(squares, np.add)
    return tuple(int(n) for n in np.diff(bounds))


def _best_cuts(costs: Float[np.ndarray, "P N N"], combine: np.ufunc) -> tuple[float, list[int]]:
    """The least combined cost of cutting N - 1 layers into P runs, and the bounds; costs by part, first layer and one
    past the last."""
    best = costs[0, 0]
    choices = []
    for cost in costs[1:]:
        total = combine(best[:, None], cost)
        choices.append(total.argmin(0))
        best = total.min(0)
    bounds = [len(best) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return float(best[-1]), [0, *bounds[::-1]]


def latency(slice_times: Sequence[float], num_stages: int, num_microbatches: int = 1) -> float:
    """Time of a forward pass in slices that follow one another through the stages: M sum t + (P - 1) max t.

    Source: TeraPipe (arXiv 2102.07988), section 3.3, there with one microbatch.
    """
    return num_microbatches * sum(slice_times) + (num_stages - 1) * max(slice_times)


def token_slices(
    time: Callable[[int, int], float],
    seq_len: int,
    num_stages: int,
    num_microbatches: int = 1,
    granularity: int = 1,
    num_slices: int | None = None,
) -> tuple[int, ...]:
    """The lengths, multiples of granularity, of the token slices with the least `latency`: `num_slices` of them, or as
    many as are best.

    time(length, before): of one stage for `length` tokens that attend to themselves and to `before` earlier ones. For
    each possible slowest slice the cuts with the least sum (TeraPipe, section 3.3, algorithm 1), without its tolerance:
    exact. Takes O(N^4) for N = seq_len / granularity, in vectors; 128 take seconds.

    ValueError when the granularity does not divide the sequence, or it has fewer than `num_slices` of them.
    """
    if granularity < 1 or seq_len % granularity:
        raise ValueError(f"granularity {granularity} does not divide the sequence's {seq_len} tokens; take a divisor")
    size = seq_len // granularity
    if num_slices is not None and not 1 <= num_slices <= size:
        raise ValueError(
            f"{seq_len} tokens cannot be cut into {num_slices} slices of a multiple of {granularity}; take 1 to {size}"
        )
    times = np.full((size + 1, size + 1), np.inf)
    for start in range(size):
        for end in range(start + 1, size + 1):
            times[start, end] = time((end - start) * granularity, start * granularity)
    candidates = np.unique(times[np.isfinite(times)])
    least_sum = _slice_sums(times, np.array([np.inf]))[0][0, -1]
    if num_slices is not None:
        return tuple(
            n * granularity for n in _so_many_slices(times, least_sum, num_stages, num_microbatches, num_slices)
        )
    best, slowest = math.inf, math.inf
    for block in np.array_split(candidates, max(1, len(candidates) // _BLOCK)):
        if num_microbatches * least_sum + (num_stages - 1) * block[0] >= best:
            break
        total = num_microbatches * _slice_sums(times, block)[0][:, -1] + (num_stages - 1) * block
        if total.min() < best:
            best, slowest = total.min(), block[total.argmin()]
    _, choices = _slice_sums(times, np.array([slowest]))
    bounds = [size]
    while bounds[-1]:
        bounds.append(int(choices[0, bounds[-1]]))
    return tuple(int(n) * granularity for n in np.diff(bounds[::-1]))


def _so_many_slices(
    times: Float[np.ndarray, "N N"], least_sum: float, num_stages: int, num_microbatches: int, num_slices: int
) -> list[int]:
    """As token_slices, of times by first token and one past the last; lengths in granules."""
    candidates = np.unique(times[np.isfinite(times)])
    best, bounds = math.inf, [0]
    for slowest in candidates[candidates * num_slices * _ROUNDING >= least_sum]:
        if num_microbatches * least_sum + (num_stages - 1) * slowest >= best:
            break
        total, cuts = _best_cuts(np.stack([np.where(times <= slowest, times, np.inf)] * num_slices), np.add)
        if (total := num_microbatches * total + (num_stages - 1) * slowest) < best:
            best, bounds = total, cuts
    return [int(n) for n in np.diff(bounds)]


def _slice_sums(
    times: Float[np.ndarray, "N N"], slowest: Float[np.ndarray, " C"]
) -> tuple[Float[np.ndarray, "C N"], np.ndarray]:
    """For each bound on the slowest slice: the least sum of slices up to each token, and where the last one starts."""
    sums = np.zeros((len(slowest), len(times)))
    starts = np.zeros(sums.shape, int)
    for end in range(1, len(times)):
        time = times[None, :end, end]
        total = sums[:, :end] + np.where(time <= slowest[:, None], time, np.inf)
        starts[:, end] = total.argmin(1)
        sums[:, end] = total.min(1)
    return sums, starts
