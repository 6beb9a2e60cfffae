"""Cuts: layers into parts of the model and so among stages, a sequence into token slices. All of them optimal."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from jaxpar.parallel.pipeline.schedule import Placement, part_of

_ROUNDING = 1 + 1e-12
_BLOCK = 256
"""Candidates tried at once; bounds memory."""


_SOLVER_SECONDS = 120


def partition_among_stages(
    layer_times: Sequence[float],
    num_stages: int,
    num_chunks: int = 1,
    placement: Placement = "loop",
    embedding_time: float = 0.0,
    head_time: float = 0.0,
) -> tuple[int, ...]:
    """How many layers each of num_stages x num_chunks parts gets, in the model's order, at least one each.

    The slowest stage, all its chunks together, is as fast as contiguous cuts allow; with one chunk see `partition`.
    With several, layers of equal times are dealt out one by one; for others an integer program is solved (HiGHS).

    ValueError as `partition`'s, and for a program that takes longer than two minutes.
    """
    num_parts = num_stages * num_chunks
    if num_chunks == 1:
        return partition(layer_times, num_stages, embedding_time, head_time)
    _check(layer_times, num_parts, embedding_time, head_time)
    parts_of = [[part_of(placement, num_stages, s, c) for c in range(num_chunks)] for s in range(num_stages)]
    extra = np.zeros(num_parts)
    extra[0] += embedding_time
    extra[-1] += head_time
    if len({*layer_times}) == 1:
        return _dealt_out(len(layer_times), layer_times[0], parts_of, extra)
    return _solved(np.asarray(layer_times, float), parts_of, extra)


def _dealt_out(
    num_layers: int, time: float, parts_of: Sequence[Sequence[int]], extra: Float[np.ndarray, " K"]
) -> tuple[int, ...]:
    """Each layer in turn to the stage that has least to do, there to the part that has least. Both the slowest stage
    and the stages' sum of squares are least then: what a layer adds to either grows with what its stage has."""
    times, counts = extra + time, np.ones(len(extra), int)
    for _ in range(num_layers - len(extra)):
        parts = min(parts_of, key=lambda parts: sum(times[part] for part in parts))
        part = min(parts, key=lambda part: times[part])
        times[part] += time
        counts[part] += 1
    return tuple(int(n) for n in counts)


def _solved(
    layer_times: Float[np.ndarray, " N"], parts_of: Sequence[Sequence[int]], extra: Float[np.ndarray, " K"]
) -> tuple[int, ...]:
    """By an integer program over x[k, l]: layer l lies before the end of part k; its last variable is the slowest
    stage's time."""
    from scipy import optimize  # takes half a second

    num_parts, num_layers = len(extra), len(layer_times)
    scale = float(layer_times.mean())
    ends = np.arange(num_parts * num_layers).reshape(num_parts, num_layers)
    slowest = ends.size
    rows = []

    def row(terms: Sequence[tuple[int, float]]) -> None:
        """sum(coefficient * variable) <= 0."""
        rows.append(np.zeros(ends.size + 1))
        for variable, coefficient in terms:
            rows[-1][variable] += coefficient

    for part in range(num_parts):
        for layer in range(num_layers - 1):
            row([(ends[part, layer + 1], 1), (ends[part, layer], -1)])
            if part:  # a part has at least one layer
                row([(ends[part - 1, layer], 1), (ends[part, layer + 1], -1)])
    num_orders, limits = len(rows), []
    for parts in parts_of:
        terms = [(slowest, -1.0)]
        for part in parts:
            terms += [(ends[part, layer], time / scale) for layer, time in enumerate(layer_times)]
            if part:
                terms += [(ends[part - 1, layer], -time / scale) for layer, time in enumerate(layer_times)]
        row(terms)
        limits.append(-sum(extra[part] for part in parts) / scale)
    first, last = np.zeros(ends.size + 1), np.ones(ends.size + 1)
    for part in range(num_parts):
        first[ends[part, : part + 1]] = 1
        last[ends[part, num_layers - (num_parts - 1 - part) :]] = 0
    first[ends[-1]] = 1
    last[slowest] = np.inf
    found = optimize.milp(
        np.eye(ends.size + 1)[slowest],
        integrality=[*np.ones(ends.size), 0],
        bounds=optimize.Bounds(first, last),
        constraints=optimize.LinearConstraint(np.stack(rows), ub=[*np.zeros(num_orders), *limits]),
        options={"mip_rel_gap": 0.0, "time_limit": _SOLVER_SECONDS},
    )
    if not found.success:
        raise ValueError(
            f"no best cut of {num_layers} layers into {num_parts} parts was found in {_SOLVER_SECONDS} s; take fewer "
            "chunks, or equal layers' times"
        )
    cuts = [0, *found.x[ends].round().astype(int).sum(1)]
    return tuple(int(n) for n in np.diff(cuts))


def partition(
    layer_times: Sequence[float], num_parts: int, embedding_time: float = 0.0, head_time: float = 0.0
) -> tuple[int, ...]:
    """How many layers each part gets, the first also the embedding, the last the head; at least one each.

    The slowest part is as fast as contiguous cuts allow, since it sets the pace (PipeDream, arXiv 1806.03377, section
    3.1, without replication); of those cuts the one with the least sum of squared times, so the most even.

    ValueError for more parts than layers, and for times that are not positive.
    """
    _check(layer_times, num_parts, embedding_time, head_time)
    num_layers = len(layer_times)
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


def _check(layer_times: Sequence[float], num_parts: int, embedding_time: float, head_time: float) -> None:
    num_layers = len(layer_times)
    if not 1 <= num_parts <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {num_parts} parts (stages x chunks); take 1 to {num_layers}"
        )
    for name, time in (("embedding", embedding_time), ("head", head_time)):
        if not 0 <= time < math.inf:
            raise ValueError(f"the {name}'s time is {time:g}; take 0 or more")
    if wrong := [time for time in layer_times if not 0 < time < math.inf]:
        raise ValueError(f"a layer's time is {wrong[0]:g}; take a positive number")


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
