"""What the planner plans: a training run as a model, a machine, and how the one is cut over the other."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from jaxpar.parallel.axes import BATCH_AXES
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.remat import Remat
from meshes.clusters import Cluster
from meshes.mesh import MESH_AXES
from models.config import ModelConfig

Numbers = Float[np.ndarray, "..."] | float
"""One, or one for each case of several at once."""
SELECTIVE = "selective"
"""Of `remat`: attention's own products alone, Korthikanti et al. (arXiv 2205.05198), section 5. Where attention never
keeps its scores, as flash attention does not, there is nothing to compute again."""


@dataclass(frozen=True)
class Job:
    """A training run as the planner sees it: what is computed, where, and how it is cut.

    Or many that differ in their mesh (but for `pipe`), microbatches and chunks alone, which then are arrays that
    broadcast. Footprint and steps take them, and give as many numbers; see space.together.
    """

    model: ModelConfig
    cluster: Cluster
    mesh: Mapping[str, int]
    """Every axis of MESH_AXES and its size."""
    seq_len: int
    batch_size: int
    """Sequences per step, over all devices."""
    num_microbatches: int = 1
    """Parts of a step's batch, one after another; the pipeline's under `pipe`."""
    precision: str = "bfloat16"
    """Of the layers' matmuls: a dtype of meshes.chips.DTYPES, or "float4"."""
    pipeline: str = "1f1b"
    """One of parallel.pipeline.kinds."""
    chunks: int = 1
    """Parts of the model that a stage holds."""
    remat: str = "full"
    """As parallel.remat.Remat.parse, or SELECTIVE."""
    zero: int = 3
    reshard_after_forward: bool = True
    sequence_parallel: bool = True
    context: ContextStrategy = field(default_factory=ContextStrategy)
    optimizer: str = "adamw"
    compute_bytes: int = 2
    """Of an activation, and of a weight as it is gathered."""
    reduce_bytes: int = 4
    """Of a gradient while it is summed over ranks."""

    capacity_factor: float | None = None
    """Of experts' buffers, which drop what is beyond it; None: they have room for all that may arrive."""
    pipeline_residuals: bool = False
    """A stage's forward pass keeps what its backward pass needs; else that runs it again, where the framework does so
    (calibration's reruns_stages)."""

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def batch_ranks(self) -> int:
        """Ranks that the batch is cut over."""
        return math.prod(self.mesh[axis] for axis in BATCH_AXES)

    @property
    def microbatch_size(self) -> int:
        """Sequences of one microbatch on one rank of the batch."""
        return self.batch_size // (self.batch_ranks * self.num_microbatches)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of one microbatch in one rank's part of batch and sequence; `tensor` ranks share them."""
        return self.batch_size * self.seq_len // (self.num_microbatches * self.batch_ranks * self.mesh["context"])

    @property
    def remat_policy(self) -> Remat:
        """What a layer keeps. SELECTIVE keeps all: attention's scores are never kept, and count as done once."""
        return Remat.parse("none" if self.remat == SELECTIVE else self.remat, self.model.num_layers)

    def check(self) -> "Job":
        """Itself. ValueError, in one line, for sizes that do not divide."""
        missing = [axis for axis in MESH_AXES if axis not in self.mesh]
        if missing:
            raise ValueError(
                f"the mesh {dict(self.mesh)} has no axis {missing[0]}: give every axis a size, 1 if unused"
            )
        parts = self.batch_ranks * self.num_microbatches
        if self.batch_size % parts:
            nearest = max(1, round(self.batch_size / parts)) * parts
            raise ValueError(
                f"a batch of {self.batch_size} sequences does not divide into {parts} parts ({self.batch_ranks} ranks "
                f"x {self.num_microbatches} microbatches); the nearest that does: {nearest}"
            )
        if self.seq_len % self.mesh["context"]:
            raise ValueError(
                f"sequences of {self.seq_len} tokens do not divide over context={self.mesh['context']}: "
                "choose a size of context that divides them"
            )
        _ = self.remat_policy
        return self

    def replace(self, **changes) -> "Job":
        return dataclasses.replace(self, **changes)
