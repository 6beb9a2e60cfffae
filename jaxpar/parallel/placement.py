"""How things lie on a mesh: specs of activations and parameters by the rules table, what a gradient still owes, and
which dims of a weight are gathered, when.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jaxpar.parallel import fsdp, tensor
from jaxpar.parallel.axes import (
    ACTIVATION_RULES,
    PARAMETER_RULES,
    STATE_RULES,
    TOKEN_AXES,
    axes_of,
    gathered_axes,
    mesh_axes,
    padded_vocab,
    partition_spec,
    without,
)
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import permutation
from jaxpar.parallel.parameter import Parameter
from jaxpar.parallel.pipeline import executor, stack
from jaxpar.parallel.pipeline.schedule import Schedule
from meshes import MESH_AXES, num_torus_dims, torus_factors


@dataclass(frozen=True)
class Placement:
    """Where a model's arrays lie on a mesh; whole, without one."""

    mesh: Mesh | None
    sequence_parallel: bool = True
    """Cut the sequence over `tensor` between blocks; no effect at tensor=1."""
    reshard_after_forward: bool = True
    """Drop a gathered weight after the forward pass and gather it again for the backward pass."""
    zero: int = 3
    """3: FSDP, all of a weight is cut. 1, 2: weights are whole on every rank, optimizer state (2: gradients too) is cut
    over `data` as well."""
    context: ContextStrategy = dataclasses.field(default_factory=ContextStrategy)
    schedule: Schedule | None = None
    """Of a step's microbatches through the stages that `pipe` cuts the layers into; None where it does not."""
    layers_per_part: tuple[int, ...] | None = None
    """Of the schedule's parts, in the model's order; None: as many in each."""
    spreads_head: bool = False
    """Whether embedding and head are the work of all stages together, each with its part of the vocabulary."""
    gathered_over: frozenset[str] = frozenset()
    """Axes over which weights were made whole before the step's first microbatch (by `before_stages`)."""

    def axis_size(self, *axes: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    def present(self, axes: Sequence[str] | frozenset[str]) -> tuple[str, ...]:
        """Those of the axes that there are several ranks on, in their own order, or the mesh's for a set."""
        ordered = [axis for axis in MESH_AXES if axis in axes] if isinstance(axes, frozenset) else axes
        return tuple(axis for axis in ordered if self.axis_size(axis) > 1)

    @property
    def cuts_stream(self) -> bool:
        """Whether the residual stream is cut over `tensor` along the sequence."""
        return self.sequence_parallel and self.axis_size(tensor.AXIS) > 1

    def spec(self, *names: str | None) -> P:
        """The spec of an activation whose dims have these logical names; whole where there is no mesh."""
        if self.mesh is None:
            return P()
        if not self.sequence_parallel:
            names = tuple("seq" if name == "residual_seq" else name for name in names)
        return partition_spec(names, ACTIVATION_RULES, self.mesh.shape)

    def stacked_batch_spec(self) -> P:
        """Of a step's batch [M, B, S]: each microbatch cut alike."""
        return self.spec(None, "batch", "seq")

    def parameter_spec(self, names: Sequence[str | None], shape: Sequence[int]) -> P:
        """Where a parameter is kept, and what the optimizer keeps of it: names of its last dims, any dim before them is
        `layers`."""
        if self.mesh is None:
            return P()
        names = ("layers",) * (len(shape) - len(names)) + tuple(names)
        return partition_spec(names, PARAMETER_RULES if self.zero == 3 else STATE_RULES, self.mesh.shape, shape)

    def whole_spec(self, spec: P, names: Sequence[str | None]) -> P:
        """Under ZeRO-1 and 2, of the copy that a step computes with."""
        return without(spec, gathered_axes(names))

    def _met_spec(self, weight: Parameter) -> P:
        """As a step meets a parameter."""
        return without(self.parameter_spec(weight.axes, weight.dims), self._whole_axes(weight.axes))

    def _whole_axes(self, names: Sequence[str | None]) -> frozenset[str]:
        """That cut no weight with these logical axes as a step meets it."""
        needed = gathered_axes(names)
        before = self.gathered_over - (TOKEN_AXES - needed)
        return before | needed if self.zero < 3 else before

    @property
    def _vocab_axes(self) -> tuple[str, ...]:
        """That cut the logits."""
        return self.present([axis for axis in PARAMETER_RULES["vocab"] if axis not in self.gathered_over])

    def owed_axes(self, spec: P, summed_over: Sequence[str], sizes: Sequence[int | None]) -> tuple[str, ...]:
        """The mesh axes over which a gradient stays unsummed until the step's last microbatch.

        Those that cut the activation dims which the gradient sums over (where they divide their sizes), less those that
        cut the parameter itself, where the sum is a reduce-scatter in the backward pass. Under `pipe` a stage's
        gradients by what is no layer's are addends too.
        """
        cut = (
            axis
            for name, size in zip(summed_over, sizes)
            for axis in mesh_axes(self.spec(name))
            if size is None or size % self.axis_size(axis) == 0
        )
        return self.present(frozenset({*cut, executor.AXIS}) - mesh_axes(spec))

    def sharding(self, spec: P) -> NamedSharding | None:
        return NamedSharding(self.mesh, spec) if self.mesh is not None else None

    def whole(self) -> NamedSharding | None:
        """The sharding of a scalar, or of anything whole on every device."""
        return self.sharding(P())

    def token_cuts(self, spec: P, names: Sequence[str | None]) -> fsdp.Cuts:
        """The dims of a parameter with these logical axes that are cut over axes which tokens are cut over, too, and
        gathered for them."""
        return self._cuts(spec, gathered_axes(names))

    def _cuts(self, spec: P, over: frozenset[str]) -> fsdp.Cuts:
        """Outermost axes first: the slower a link, the smaller what is gathered over it."""
        cuts = (
            (dim, self.present([axis for axis in axes_of(part) if axis in over]))
            for dim, part in enumerate(spec.partitions)
        )
        return tuple(sorted(((dim, axes) for dim, axes in cuts if axes), key=lambda cut: MESH_AXES.index(cut[1][0])))

    @property
    def _is_on_tpus(self) -> bool:
        return self.mesh is not None and self.mesh.devices.flat[0].platform == "tpu"

    @property
    def folds(self) -> fsdp.Folds:
        """On TPUs, of all axes that weights are cut over."""
        if self.mesh is None or not self._is_on_tpus:
            return fsdp.IN_ONE
        axes = self.present(TOKEN_AXES)
        factors = tuple((axis, torus_factors(self.mesh, axis)) for axis in axes)
        sets = itertools.chain.from_iterable(itertools.combinations(axes, n + 1) for n in range(len(axes)))
        return fsdp.Folds(factors, frozenset(frozenset(s) for s in sets if num_torus_dims(self.mesh, s) > 2))

    def in_stages(self) -> Self:
        """Of what stages compute, with weights that `before_stages` made whole: over the axes that tokens are cut over,
        but where they are to be gathered each time, and over the stages, but where those share a model's ends."""
        axes = frozenset() if self.reshard_after_forward else TOKEN_AXES
        return dataclasses.replace(self, gathered_over=axes | (frozenset() if self.spreads_head else {executor.AXIS}))

    def cuts_before_stages(self, spec: P, names: Sequence[str | None]) -> fsdp.Cuts:
        """The dims of a parameter that are gathered once for all of a pipeline's microbatches."""
        over = self.gathered_over - (TOKEN_AXES - gathered_axes(names))
        return self._cuts(spec, over - ({executor.AXIS} if names[0] == "layers" else frozenset()))

    def cuts_in_stages(self, spec: P, names: Sequence[str | None]) -> fsdp.Cuts:
        """Those that are gathered in each action of a stage."""
        return self._cuts(spec, gathered_axes(names) - self.gathered_over)

    def padded_vocab(self, vocab_size: int) -> int:
        return padded_vocab(vocab_size, self.mesh.shape if self.mesh is not None else dict.fromkeys(MESH_AXES, 1))

    def num_parts(self, name: str) -> int:
        """Into how many an activation's logical axis is cut."""
        return self.axis_size(*mesh_axes(self.spec(name)))

    def part_index(self, name: str) -> Int[Array, ""]:
        """Which of them this rank has, in the region."""
        axes = self.present([axis for part in self.spec(name).partitions for axis in axes_of(part)])
        return lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)

    def places(self, num_tokens: int) -> Int[Array, " S"]:
        """Where in the sequence this rank's tokens of it are, in the region."""
        order = jnp.asarray(self.sequence_order(num_tokens * self.num_parts("seq")), jnp.int32)
        return lax.dynamic_slice_in_dim(order, self.part_index("seq") * num_tokens, num_tokens)

    def sequence_order(self, seq_len: int) -> Int[np.ndarray, " S"]:
        """Which token of a sequence lies at each place of a batch's arrays."""
        return permutation(self.context.order, seq_len, self.axis_size("context"))

    def layer_order(self, num_layers: int) -> Int[np.ndarray, " L"]:
        """Which of the model's layers lies in each slot of its stacked parameters, or stack.EMPTY."""
        if self.schedule is None:
            return np.arange(num_layers)
        num_parts = self.schedule.num_parts
        return stack.layer_order(self.schedule, self.layers_per_part or (num_layers // num_parts,) * num_parts)

    def check_divisible(self, size: int, name: str, what: str, num_microbatches: int = 1, unit: int = 1) -> None:
        """Raise ValueError where an activation's logical axis `name`, of `size` in all microbatches together, cannot
        be cut into equal parts; `what` is the setting to name, `unit` what it must be a multiple of besides."""
        axes = self.present(mesh_axes(self.spec(name)))
        parts = self.axis_size(*axes) * num_microbatches
        if size % parts:
            factors = [f"{axis}={self.axis_size(axis)}" for axis in axes]
            factors += [f"{num_microbatches} microbatches"] if num_microbatches > 1 else []
            parts = math.lcm(parts, unit)
            nearest = [str(n) for n in (size // parts * parts, -(-size // parts) * parts) if n]
            raise ValueError(
                f"{what} {size} is not divisible by {' x '.join(factors)}; the nearest that is: {' or '.join(nearest)}"
            )
