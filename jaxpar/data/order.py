"""Which sample comes when: pure functions of the global index, which every host computes for its own rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:
    import grain

MAX_PERIOD = 100_000


class Order(Protocol):
    def at(self, indices: Int[np.ndarray, " N"]) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
        """(source, its sample) of these places in the order; source -1 where it has ended."""


@dataclass(frozen=True)
class TrainingOrder:
    """Sources interleaved by weight, each shuffled anew every time it has been gone through.

    Of the first n samples, n * weight / (sum of weights) come from a source, to within 1, for every n.
    """

    num_samples: tuple[int, ...]
    """Of each source."""
    pattern: Int[np.ndarray, " P"]
    """Sources, as `interleave` gives them; it repeats."""
    seed: int

    def at(self, indices: Int[np.ndarray, " N"]) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
        period, place = np.divmod(indices, len(self.pattern))
        source = self.pattern[place]
        sample = period * self._per_period[source] + self._rank[place]
        shuffled = [self._shuffled[s][i] for s, i in zip(source.tolist(), sample.tolist())]
        return source, np.array(shuffled, np.int64)

    @cached_property
    def _per_period(self) -> Int[np.ndarray, " K"]:
        return np.bincount(self.pattern, minlength=len(self.num_samples))

    @cached_property
    def _rank(self) -> Int[np.ndarray, " P"]:
        """How many of the same source the pattern has before."""
        rank = np.empty(len(self.pattern), np.int64)
        for source, count in enumerate(self._per_period):
            rank[self.pattern == source] = np.arange(count)
        return rank

    @cached_property
    def _shuffled(self) -> "list[grain.MapDataset[int]]":
        import grain  # 0.3 to 0.6 s, which a program that only asks for --help should not wait

        return [
            grain.MapDataset.range(size).seed((self.seed + source) % 2**32).shuffle().repeat()
            for source, size in enumerate(self.num_samples)
        ]


@dataclass(frozen=True)
class EvaluationOrder:
    """Every sample of every source once, shuffled together and always alike, so that any first few stand for all."""

    num_samples: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.num_samples)

    def at(self, indices: Int[np.ndarray, " N"]) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
        is_sample = indices < self.total
        place = np.array([self._shuffled[i] if i < self.total else 0 for i in indices.tolist()], np.int64)
        ends = np.cumsum(self.num_samples)
        source = np.searchsorted(ends, place, side="right")
        return np.where(is_sample, source, -1), place - (ends - self.num_samples)[source]

    @cached_property
    def _shuffled(self) -> "grain.MapDataset[int]":
        import grain

        return grain.MapDataset.range(self.total).seed(0).shuffle()


def interleave(weights: Sequence[Fraction]) -> Int[np.ndarray, " P"]:
    """Sources in a sequence that, repeated, has of each its share of every prefix, to within 1.

    The chairman assignment of Tijdeman (Discrete Mathematics 32, 1980): of those that have fallen behind far enough,
    the one comes that would be a whole place behind first. Exact, in integers; discrepancy below 1 - 1 / (2K - 2).

    Raises:
      ValueError: the weights have so many digits that the sequence is longer than MAX_PERIOD.
    """
    scale = lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * scale) for weight in weights]
    divisor = gcd(*shares)
    shares = [share // divisor for share in shares]
    period = sum(shares)
    if period > MAX_PERIOD:
        told = ", ".join(str(float(weight)) for weight in weights)
        raise ValueError(
            f"the weights {told} repeat only every {period} samples; round them to fewer digits ({MAX_PERIOD} at most)"
        )
    if len(shares) == 1:
        return np.zeros(1, np.int64)
    slack = 2 * len(shares) - 2
    behind = [0] * len(shares)  # in units of 1 / period places
    pattern = np.empty(period, np.int64)
    for place in range(period):
        behind = [late + share for late, share in zip(behind, shares)]
        ready = (source for source, late in enumerate(behind) if slack * late >= period)
        chosen = min(ready, key=lambda source: Fraction(period * (slack - 1) - slack * behind[source], shares[source]))
        behind[chosen] -= period
        pattern[place] = chosen
    return pattern
