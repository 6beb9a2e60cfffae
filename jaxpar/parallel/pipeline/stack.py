"""Where the model's layers lie in a stack that `pipe` cuts, whatever number of them each part of the model has.

Splits: a stacked parameter's leading dim is [stages x chunks x slots], a stage's chunks side by side. Every part has as
many slots as the largest has layers, its own layers first; the rest are empty. An empty slot is zero, and skipped in
both passes by a conditional that all ranks of a stage take alike (`layers.scan`): its gradients are zeros, and so is
what every optimizer adds up of them. Where all parts are equal there are neither empty slots nor conditionals.
Collectives: none. Limits: a stage's weights take the memory of so many slots, used or not.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxpar.parallel.pipeline.schedule import Schedule

EMPTY = -1


def layer_order(schedule: Schedule, layers_per_part: Sequence[int]) -> Int[np.ndarray, " N"]:
    """Which layer lies in each slot, or EMPTY; layers_per_part is in the model's order."""
    assert len(layers_per_part) == schedule.num_parts
    order = np.full((schedule.num_stages, schedule.num_chunks, max(layers_per_part)), EMPTY)
    first = np.cumsum([0, *layers_per_part])
    for part, count in enumerate(layers_per_part):
        stage, chunk = schedule.locate(part)
        order[stage, chunk, :count] = np.arange(first[part], first[part] + count)
    return order.reshape(-1)


def slots_of(order: Int[np.ndarray, " N"]) -> Int[np.ndarray, " L"]:
    """The slot of each layer: what reads a stack in the model's order."""
    return np.argsort(order, kind="stable")[np.count_nonzero(order == EMPTY) :]
