"""Bin packing: best-fit decreasing, many items at a time."""

from collections import defaultdict

import numpy as np
from jaxtyping import Int


def best_fit(lengths: Int[np.ndarray, " N"], capacity: int) -> Int[np.ndarray, " N"]:
    """Each item's bin, by best-fit decreasing: the longest item first, into the fullest bin that it fits in.

    Items of one length, and bins of one room, are placed together: O(N log N) for sorting, then a loop over the pairs
    of length and room that meet. At most 11/9 of the fewest possible bins, plus one (Johnson 1973).
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= capacity
    bins = np.empty(len(lengths), np.int64)
    items_by_length = np.argsort(-lengths, kind="stable")
    changes = np.flatnonzero(np.diff(lengths[items_by_length])) + 1
    bins_of_room: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    rooms = 0  # bit r is set where there is a bin with room r: its lowest bit from `length` on is the best fit
    num_bins = 0
    for items in np.split(items_by_length, changes) if len(lengths) else []:
        length = int(lengths[items[0]])
        while len(items):
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                open_bins = bins_of_room[room].pop()
            else:
                room = capacity
                num_new = -(-len(items) // (capacity // length))
                open_bins = np.arange(num_bins, num_bins + num_new)
                num_bins += num_new
            # A bin that one item went into is the best fit of the next, until it has no room for another.
            each = room // length
            num_used = min(-(-len(items) // each), len(open_bins))
            placed, items = items[: num_used * each], items[num_used * each :]
            bins[placed] = np.repeat(open_bins[:num_used], each)[: len(placed)]
            num_full, in_last = divmod(len(placed), each)
            for some, left in (
                (open_bins[:num_full], room - each * length),
                (open_bins[num_full:num_used], room - in_last * length),
                (open_bins[num_used:], room),
            ):
                if len(some) and left:
                    bins_of_room[left].append(some)
            for changed in (room, room - each * length, room - in_last * length):
                rooms = rooms | 1 << changed if bins_of_room[changed] else rooms & ~(1 << changed)
    return bins
