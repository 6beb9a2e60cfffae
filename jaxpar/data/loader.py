"""Tokens -> batches, each a pure function of (seed, step)."""

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int, UInt
from numpy.lib.stride_tricks import sliding_window_view

from jaxpar.data.tokens import TokenFile
from jaxpar.parallel.batch import Batch

if TYPE_CHECKING:
    import grain


@dataclass(frozen=True)
class Loader:
    """Batches of `batch_size` samples of `seq_len` tokens, stacked as [M, B / M, S] microbatches.

    The tokens are cut plainly: sample i is tokens[i * S : i * S + S + 1], the last of which is only a target.
    An epoch is every sample once, in an order of its own; row r of step k is sample k * batch_size + r of all
    epochs on end, so only a step that lies across two epochs can hold a sample twice. A step's rows depend
    neither on `num_microbatches` nor on a mesh.

    Raises:
      ValueError: sizes that do not fit together, or fewer tokens than one batch takes.
    """

    token_file: TokenFile
    _: KW_ONLY
    batch_size: int
    seq_len: int
    num_microbatches: int
    seed: int

    def __post_init__(self) -> None:
        assert min(self.batch_size, self.seq_len, self.num_microbatches) >= 1
        if self.batch_size % self.num_microbatches:
            raise ValueError(
                f"--batch-size {self.batch_size} is no multiple of --grad-accumulation"
                f" {self.num_microbatches}; change either"
            )
        needed = self.batch_size * self.seq_len + 1
        if self.token_file.num_tokens < needed:
            raise ValueError(
                f"the data has {self.token_file.num_tokens} tokens, one batch takes {needed} (--batch-size"
                f" {self.batch_size} x --seq-len {self.seq_len} + 1); lower either or give more --data"
            )

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return (self.token_file.num_tokens - 1) // self.seq_len

    @cached_property
    def _samples(self) -> UInt[np.ndarray, "num_samples S+1"]:
        """The tokens' own memory, seen as samples."""
        return sliding_window_view(self.token_file.tokens, self.seq_len + 1)[:: self.seq_len]

    @cached_property
    def _order(self) -> "grain.MapDataset[int]":
        """The samples of all epochs on end, by index: with their tokens in it, Grain takes twice as long."""
        import grain  # 0.3 to 0.6 s, which a program that only asks for --help should not wait

        return grain.MapDataset.range(self.num_samples).seed(self.seed).shuffle().repeat()

    def host_batch(self, step: int, rows: Int[np.ndarray, " R"] | slice = slice(None)) -> Batch:
        """Step `step`'s batch in numpy arrays [M, R, S]: of every microbatch these rows, of B / M."""
        assert step >= 0
        rows_per_microbatch = self.batch_size // self.num_microbatches
        rows_of_step = np.arange(self.batch_size).reshape(-1, rows_per_microbatch)[:, rows]
        order = [self._order[int(i)] for i in (step * self.batch_size + rows_of_step).flat]
        samples = self._samples[np.reshape(order, rows_of_step.shape)]
        tokens, targets = samples[..., :-1].astype(np.int32), samples[..., 1:].astype(np.int32)
        fields: dict[str, Any] = {  # Any: a Batch is declared for jax arrays, and these are numpy's
            "tokens": tokens,
            "targets": targets,
            "positions": np.zeros_like(tokens) + np.arange(self.seq_len, dtype=np.int32),
            "segment_ids": np.zeros_like(tokens),
            "loss_weights": np.ones_like(tokens, np.float32),
        }
        return Batch(**fields)

    def batch(self, step: int, sharding: jax.sharding.NamedSharding) -> Batch:
        """Step `step`'s batch in global arrays [M, B / M, S], each process reading its own devices' rows.

        The sharding leaves M whole, and may lay the rows and S over any axes of its mesh.
        """
        shape = (self.num_microbatches, self.batch_size // self.num_microbatches, self.seq_len)
        local = self.host_batch(step, local_rows(sharding, shape))
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x, shape), local)


def local_rows(sharding: jax.sharding.NamedSharding, shape: tuple[int, int, int]) -> Int[np.ndarray, " R"]:
    """The rows (dim 1 of [M, B / M, S]) that this process's devices hold: ascending, perhaps with gaps."""
    num_microbatches, num_rows, _ = shape
    assert sharding.shard_shape(shape)[0] == num_microbatches, f"{sharding.spec} splits the microbatches"
    indices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique([np.arange(num_rows)[index[1]] for index in indices if index is not None])
