"""The one seam between a model and a mesh.

A model gets a `Layout` and otherwise reads like single-device code. Shardings are part of every array's type (all
mesh axes are Explicit), and three kinds of type carry the whole of data, FSDP, tensor and sequence parallelism:

    P(..., "fsdp")            cut over an axis
    P(..., reduced={"a"})     whole on every rank of `a`, and its cotangent is a sum over `a` that is still owed
    P(..., unreduced={"a"})   such a sum, owed: each rank of `a` holds its own addend

A collective stands only where a type changes (`jax.reshard`), and its transpose is the matching one of the backward
pass: gather <-> reduce-scatter, nothing <-> all-reduce.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.kernels.attention import Kernel
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel import attention, data, fsdp, layers, tensor, vocab, zero
from jaxpar.parallel.axes import (
    ACTIVATION_RULES,
    PARAMETER_RULES,
    STATE_RULES,
    TOKEN_AXES,
    mesh_axes,
    padded_vocab,
    partition_spec,
    without,
)
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import permutation
from jaxpar.parallel.remat import FULL, NAMES, NONE, Remat
from jaxpar.parallel.vocab import Objective
from jaxpar.parallel.zero import Weight
from meshes import MESH_AXES


@dataclass(frozen=True)
class Layout:
    """How a model lies on a mesh. Without a mesh it is the single-device reference of every other layout."""

    mesh: Mesh | None
    compute_dtype: jnp.dtype = dataclasses.field(default_factory=lambda: jnp.dtype("float32"))
    reduce_dtype: jnp.dtype = dataclasses.field(default_factory=lambda: jnp.dtype("float32"))
    """In which weights' gradients are summed over ranks."""
    sequence_parallel: bool = True
    """Cut the sequence over `tensor` between blocks; no effect at tensor=1."""
    reshard_after_forward: bool = True
    """Drop a gathered weight after the forward pass and gather it again for the backward pass."""
    remat: Remat = FULL
    zero: int = 3
    """3: FSDP, all of a weight is cut. 1, 2: weights are whole on every rank, optimizer state (2: gradients too) is cut
    over `data` as well."""
    context: ContextStrategy = dataclasses.field(default_factory=ContextStrategy)
    attention_kernel: Kernel = "tiled"
    """What attends where a device has the whole sequence."""
    packs_documents: bool = False
    """Whether sequences hold documents that attend to themselves alone: rounds of a ring may then be left out."""
    is_fp8: bool = False
    """Whether the layers' matmuls round their operands to 8-bit floats."""

    @classmethod
    def single(cls, dtype: jnp.dtype, remat: Remat = NONE) -> "Layout":
        return cls(mesh=None, compute_dtype=jnp.dtype(dtype), reduce_dtype=jnp.dtype(dtype), remat=remat)

    # Types ---------------------------------------------------------------------------------------------------------

    def axis_size(self, *axes: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    def spec(
        self, *names: str | None, reduced: frozenset[str] = frozenset(), unreduced: frozenset[str] = frozenset()
    ) -> P | None:
        """The spec of an activation whose dims have these logical names; None where there is no mesh."""
        if self.mesh is None:
            return None
        if not self.sequence_parallel:
            names = tuple("seq" if name == "residual_seq" else name for name in names)
        spec = partition_spec(names, ACTIVATION_RULES, self.mesh.shape)
        return P(*spec.partitions, reduced=reduced, unreduced=unreduced)

    def stacked_batch_spec(self) -> P | None:
        """Of a step's batch [M, B, S]: each microbatch cut alike."""
        return self.spec(None, "batch", "seq")

    def parameter_spec(self, names: Sequence[str | None], shape: Sequence[int]) -> P:
        """Where a parameter is kept, and what the optimizer keeps of it: names of its last dims, any dim before them is
        `layers`."""
        assert self.mesh is not None
        names = ("layers",) * (len(shape) - len(names)) + tuple(names)
        return partition_spec(names, PARAMETER_RULES if self.zero == 3 else STATE_RULES, self.mesh.shape, shape)

    def whole_spec(self, spec: P) -> P:
        """Under ZeRO-1 and 2, of the copy that a step computes with."""
        return without(spec, TOKEN_AXES)

    def owed_axes(self, spec: P, summed_over: Sequence[str | None]) -> frozenset[str]:
        """The mesh axes over which a gradient stays unsummed until the step's last microbatch.

        Those that cut the activation dims which the gradient sums over, less those that cut the parameter itself,
        where the sum is a reduce-scatter in the backward pass.
        """
        activation = self.spec(*summed_over)
        return mesh_axes(activation) - mesh_axes(spec) if activation is not None else frozenset()

    def sharding(self, spec: P | None) -> NamedSharding | None:
        return NamedSharding(self.mesh, spec) if self.mesh is not None and spec is not None else None

    def whole(self) -> NamedSharding | None:
        """The sharding of a scalar, or of anything whole on every device."""
        return self.sharding(P())

    def padded_vocab(self, vocab_size: int) -> int:
        return padded_vocab(vocab_size, self.mesh.shape if self.mesh is not None else dict.fromkeys(MESH_AXES, 1))

    def sequence_order(self, seq_len: int) -> Int[np.ndarray, " S"]:
        """Which token of a sequence lies at each place of a batch's arrays."""
        return permutation(self.context.order, seq_len, self.axis_size("context"))

    def check_divisible(self, size: int, name: str, what: str, num_microbatches: int = 1) -> None:
        """Raise ValueError where an activation's logical axis `name`, of `size` in all microbatches together, cannot
        be cut into equal parts; `what` is the setting to name."""
        spec = self.spec(name)
        cut = mesh_axes(spec) if spec is not None else frozenset()
        axes = [axis for axis in MESH_AXES if axis in cut and self.axis_size(axis) > 1]
        parts = self.axis_size(*axes) * num_microbatches
        if size % parts:
            factors = [f"{axis}={self.axis_size(axis)}" for axis in axes]
            factors += [f"{num_microbatches} microbatches"] if num_microbatches > 1 else []
            nearest = [str(n) for n in (size // parts * parts, -(-size // parts) * parts) if n]
            raise ValueError(
                f"{what} {size} is not divisible by {' x '.join(factors)}; the nearest that is: {' or '.join(nearest)}"
            )

    # What a model calls --------------------------------------------------------------------------------------------

    def gather(self, weight: Float[Array, "..."] | Weight) -> Float[Array, "..."]:
        """A weight in compute dtype with its FSDP axes gathered: the one named point of FSDP's traffic."""
        if isinstance(weight, Weight):
            return zero.gather(weight, self.reduce_dtype)
        if self.mesh is None:
            return weight.astype(self.compute_dtype)
        return fsdp.gather(weight, self.compute_dtype, self.reduce_dtype)

    def named(self, name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """x, by a name that `remat` can ask for."""
        assert name in NAMES
        return checkpoint_name(x, name)

    def enter_tensor(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """From the residual stream to the input of column-parallel weights."""
        if self.mesh is None:
            return x
        return jax.reshard(x, self.spec("batch", "seq", "embed", reduced=tensor.AXES))

    def project(
        self, equation: str, x: Float[Array, "B S _"], weight: Float[Array, "..."], *names: str | None
    ) -> Float[Array, "..."]:
        """x times a gathered weight, column-parallel: dims named `names` come out, cut as the weight is."""
        out = self.spec(*names)
        if out is None:
            return tensor.product(equation, None, x, weight, self.is_fp8)
        return tensor.project(equation, x, weight, out, self.is_fp8)

    def exit_tensor(
        self, equation: str, x: Float[Array, "B S ..."], weight: Float[Array, "..."]
    ) -> Float[Array, "B S D"]:
        """x times a gathered weight, row-parallel, summed over `tensor` into the residual stream's type."""
        addends = self.spec("batch", "seq", "embed", unreduced=tensor.AXES)
        out = self.spec("batch", "residual_seq", "embed")
        if addends is None or out is None:
            return tensor.product(equation, None, x, weight, self.is_fp8)
        return tensor.project_back(equation, x, weight, addends, out, self.is_fp8)

    def scale(self, x: Float[Array, "B S ..."], vector: Float[Array, "..."]) -> Float[Array, "B S ..."]:
        """x * vector over x's last dims, the vector's gradient left unsummed over the axes that its type owes."""
        return data.scale(x, vector)

    def shift(self, x: Float[Array, "B S ..."], vector: Float[Array, "..."]) -> Float[Array, "B S ..."]:
        """x + vector over x's last dims, likewise."""
        return data.shift(x, vector)

    def attention(
        self,
        q: Float[Array, "B S H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G K"],
        tokens: Tokens,
        mask: AttentionMask,
        scale: float,
    ) -> Float[Array, "B S H K"]:
        """Attention over the whole sequence, of which `sequence` gives the tokens; kv heads that `tensor` does not
        divide are repeated to lcm(G, tensor)."""
        return attention.attention(self, q, k, v, tokens, mask, scale)

    def sequence(self, batch: Batch) -> Tokens:
        """What attention's masks go by, of the whole sequence on every context rank: gathered once for all layers."""
        tokens = Tokens(batch.positions, batch.segment_ids)
        if self.mesh is None:
            return tokens
        return jax.tree.map(lambda x: jax.reshard(x, self.spec("batch", None)), tokens)

    def layers(self, block: Callable, stacked: PyTree, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """block(params of one layer, x) for every layer: `stacked` has a leading layers dim on each leaf."""
        return layers.scan(block, stacked, x, remat=self.remat, regather=self.reshard_after_forward)

    def lookup(self, table: Float[Array, "V D"], ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Rows of an embedding table, in compute dtype and the residual stream's type; the table is not gathered."""
        return vocab.lookup(self, table, ids)

    def cross_entropy(
        self,
        x: Float[Array, "B S D"],
        head: Float[Array, "D V"],
        targets: Int[Array, "B S"],
        weights: Float[Array, "B S"],
        vocab_size: int,
        objective: Objective,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """(sum(weights * objective), sum(weights * -log p(target))) without whole logits on any device; `head` is
        gathered, x normalised; the first is what has a gradient."""
        return vocab.cross_entropy(self, self.enter_tensor(x), head, targets, weights, vocab_size, objective)

    # What a step calls ---------------------------------------------------------------------------------------------

    def owe(self, params: PyTree, owed: PyTree) -> PyTree:
        """Parameters typed so that their gradients come unsummed over the axes in `owed` (a tree of sets)."""
        if self.mesh is None:
            return params
        return jax.tree.map(data.owe, params, owed)

    def zeros_owed(self, params: PyTree, dtype: jnp.dtype) -> PyTree:
        """Accumulators typed as the gradients of parameters that `owe` typed."""
        return jax.tree.map(partial(data.zeros_owed, dtype=dtype), params)

    def settle(self, grads: PyTree) -> PyTree:
        """The sums that are still owed, once a step: the all-reduce of data parallelism."""
        if self.mesh is None:
            return grads
        return jax.tree.map(data.settle, grads)
