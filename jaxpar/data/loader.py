"""Samples -> batches, each a pure function of its step."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import jax
import numpy as np
from jaxtyping import Int

from jaxpar.data.order import Order
from jaxpar.data.samples import Samples
from jaxpar.parallel.batch import Batch


@dataclass(frozen=True)
class Loader:
    """Batches of `batch_size` samples of S tokens, stacked as [M, B / M, S] microbatches.

    Row r of step k is the order's sample k * batch_size + r, whatever the number of microbatches and the mesh; where
    the order has ended it is padding, with loss weights of 0.
    """

    samples: Sequence[Samples]
    """Of each source."""
    order: Order
    _: KW_ONLY
    batch_size: int
    num_microbatches: int

    def __post_init__(self) -> None:
        assert self.batch_size % self.num_microbatches == 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """[M, B / M, S]"""
        return self.num_microbatches, self.batch_size // self.num_microbatches, self.samples[0].seq_len

    def host_batch(self, step: int, rows: Int[np.ndarray, " R"] | slice = slice(None)) -> Batch:
        """Step `step`'s batch in numpy arrays [M, R, S]: of every microbatch these rows, of B / M."""
        assert step >= 0
        rows_of_step = np.arange(self.batch_size).reshape(self.shape[:2])[:, rows]
        source, sample = self.order.at(step * self.batch_size + rows_of_step.ravel())
        batch = _padding(len(sample), self.samples[0].seq_len)
        for number in np.unique(source[source >= 0]):
            chosen = source == number
            taken = self.samples[number].rows(sample[chosen])
            if chosen.all():
                batch = taken
            else:
                jax.tree.map(lambda out, values, chosen=chosen: out.__setitem__(chosen, values), batch, taken)
        return jax.tree.map(lambda x: x.reshape(*rows_of_step.shape, -1), batch)

    def batch(
        self, step: int, sharding: jax.sharding.NamedSharding, order: Int[np.ndarray, " S"] | slice = slice(None)
    ) -> Batch:
        """Step `step`'s batch in global arrays [M, B / M, S], each process reading its own devices' rows, the tokens of
        a sequence in this order.

        The sharding leaves M whole, and may lay the rows and S over any axes of its mesh.
        """
        local = self.host_batch(step, local_rows(sharding, self.shape)).in_order(order)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x, self.shape), local)


def local_rows(sharding: jax.sharding.NamedSharding, shape: tuple[int, int, int]) -> Int[np.ndarray, " R"]:
    """The rows (dim 1 of [M, B / M, S]) that this process's devices hold: ascending, perhaps with gaps."""
    num_microbatches, num_rows, _ = shape
    assert sharding.shard_shape(shape)[0] == num_microbatches, f"{sharding.spec} splits the microbatches"
    indices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique([np.arange(num_rows)[index[1]] for index in indices if index is not None])


def _padding(num_rows: int, seq_len: int) -> Batch:
    tokens, targets, segment_ids = np.zeros((3, num_rows, seq_len), np.int32)
    positions = np.tile(np.arange(seq_len, dtype=np.int32), (num_rows, 1))
    weights = np.zeros((num_rows, seq_len), np.float32)
    return Batch(tokens, targets, positions, segment_ids, weights)  # type: ignore[arg-type]  # numpy's, not jax's
