"""The one seam between a model and a mesh.

A model gets a `Layout` and otherwise reads like single-device code. A step's loss and gradients are computed in one
region (`Layout.region`) that is manual over every mesh axis: each rank sees its own part of everything, and a
collective stands only where a strategy's file writes one, with its transpose for the backward pass beside it. AD never
goes through a collective: every one is in a `custom_vjp` that says what is a sum over ranks, and when it is paid.

A rank differentiates the loss of its own tokens. So what comes out by a weight that is whole on several ranks are
addends: FSDP's are summed as they come, the others, that are owed, once at the end of the step (`settle`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.kernels import attention as on_one_device
from jaxpar.kernels.attention import Cache, Kernel
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel import context, data, fsdp, layers, tensor, vocab, zero
from jaxpar.parallel.axes import (
    ACTIVATION_RULES,
    PARAMETER_RULES,
    STATE_RULES,
    TOKEN_AXES,
    axes_of,
    mesh_axes,
    padded_vocab,
    partition_spec,
    without,
)
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import permutation
from jaxpar.parallel.parameter import Parameter
from jaxpar.parallel.pipeline import executor, stack
from jaxpar.parallel.pipeline.schedule import Schedule
from jaxpar.parallel.product import Apart, Observed, product
from jaxpar.parallel.remat import FULL, NAMES, NONE, Remat
from jaxpar.parallel.vocab import Objective
from jaxpar.parallel.zero import Weight
from meshes import MESH_AXES, torus_factors

F = TypeVar("F", bound=Callable)


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
    """What attends where a device has all keys; splash in a ring's rounds, too."""
    packs_documents: bool = False
    """Whether sequences hold documents that attend to themselves alone: rounds of a ring may then be left out."""
    is_fp8: bool = False
    """Whether the layers' matmuls round their operands to 8-bit floats."""
    schedule: Schedule | None = None
    """Of a step's microbatches through the stages that `pipe` cuts the layers into; None where it does not."""
    layers_per_part: tuple[int, ...] | None = None
    """Of the schedule's parts, in the model's order; None: as many in each."""
    keeps_residuals: bool = False
    """Whether a stage's forward pass keeps what its backward pass needs, which else computes it again."""
    spreads_head: bool = False
    """Whether embedding and head are the work of all stages together, each with its part of the vocabulary."""
    gathered_over: frozenset[str] = frozenset()
    """Axes over which weights were made whole before the step's first microbatch (by `before_stages`)."""
    slices: tuple[int, ...] = ()
    """The lengths of the schedule's token slices, where it has some."""

    @classmethod
    def single(cls, dtype: jnp.dtype, remat: Remat = NONE) -> "Layout":
        return cls(mesh=None, compute_dtype=jnp.dtype(dtype), reduce_dtype=jnp.dtype(dtype), remat=remat)

    # How things lie --------------------------------------------------------------------------------------------------

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

    def whole_spec(self, spec: P) -> P:
        """Under ZeRO-1 and 2, of the copy that a step computes with."""
        return without(spec, TOKEN_AXES)

    def _met_spec(self, weight: Parameter) -> P:
        """As a step meets a parameter."""
        return without(self.parameter_spec(weight.axes, weight.dims), self._whole_axes)

    @property
    def _whole_axes(self) -> frozenset[str]:
        """That cut no weight as a step meets it."""
        return self.gathered_over | (TOKEN_AXES if self.zero < 3 else frozenset())

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

    def token_cuts(self, spec: P) -> fsdp.Cuts:
        """The dims of a parameter that are cut over axes which tokens are cut over, too."""
        return self._cuts(spec, TOKEN_AXES)

    def _cuts(self, spec: P, over: frozenset[str]) -> fsdp.Cuts:
        cuts = (
            (dim, self.present([axis for axis in axes_of(part) if axis in over]))
            for dim, part in enumerate(spec.partitions)
        )
        return tuple((dim, axes) for dim, axes in cuts if axes)

    @property
    def _is_on_tpus(self) -> bool:
        return self.mesh is not None and self.mesh.devices.flat[0].platform == "tpu"

    @property
    def folds(self) -> fsdp.Folds:
        """On TPUs, of all axes that weights are cut over."""
        if not self._is_on_tpus:
            return ()
        return tuple((axis, torus_factors(self.mesh, axis)) for axis in self.present(TOKEN_AXES))

    def in_stages(self) -> "Layout":
        """Of what stages compute, with weights that `before_stages` made whole: over the axes that tokens are cut over,
        but where they are to be gathered each time, and over the stages, but where those share a model's ends."""
        axes = frozenset() if self.reshard_after_forward else TOKEN_AXES
        return dataclasses.replace(self, gathered_over=axes | (frozenset() if self.spreads_head else {executor.AXIS}))

    def cuts_before_stages(self, spec: P, names: Sequence[str | None]) -> fsdp.Cuts:
        """The dims of a parameter that are gathered once for all of a pipeline's microbatches."""
        return self._cuts(spec, self.gathered_over - ({executor.AXIS} if names[0] == "layers" else frozenset()))

    def cuts_in_stages(self, spec: P) -> fsdp.Cuts:
        """Those that are gathered in each action of a stage."""
        return self._cuts(spec, TOKEN_AXES - self.gathered_over)

    def padded_vocab(self, vocab_size: int) -> int:
        return padded_vocab(vocab_size, self.mesh.shape if self.mesh is not None else dict.fromkeys(MESH_AXES, 1))

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

    def region(self, function: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        """function, of each rank's parts; as it is where there is no mesh."""
        if self.mesh is None:
            return function
        # What each collective's result is whole or cut over is said by its own custom_vjp: nothing for vma to track.
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    # What a model calls, in the region ------------------------------------------------------------------------------

    def gather(self, weight: Parameter) -> Any:
        """A weight in compute dtype with its FSDP axes gathered: the one named point of FSDP's traffic."""
        return self._gathered(weight, weight[...])

    def gather_last(self, weight: Parameter, x: Float[Array, "B S D"]) -> tuple[Any, Float[Array, "B S D"]]:
        """`gather` of the last weight that a forward pass meets, and x, which goes on with it. On TPUs the backward
        pass, which begins there, reduces its gradient before it goes on: else a whole one is kept through all layers,
        where nothing hides its reduction."""
        value = weight[...]
        if self._is_on_tpus:
            value, x = lax.optimization_barrier((value, x))
        return self._gathered(weight, value), x

    def _gathered(self, weight: Parameter, value: Any) -> Any:
        if isinstance(value, Weight):
            cuts = self.token_cuts(self.parameter_spec(weight.axes, weight.dims))
            return zero.gather(value, cuts, self.reduce_dtype, self.folds)
        cuts = self.token_cuts(self._met_spec(weight))
        if isinstance(value, Observed | Apart):
            return dataclasses.replace(value, weight=fsdp.gathered(value.weight, cuts, self.compute_dtype))
        if self.mesh is None or self._whole_axes >= TOKEN_AXES:
            return value.astype(self.compute_dtype)
        return fsdp.gather(value, cuts, self.compute_dtype, self.reduce_dtype, self.folds)

    def _is_cut_over_tensor(self, weight: Parameter) -> bool:
        return tensor.AXIS in self.present(mesh_axes(self.parameter_spec(weight.axes, weight.dims)))

    def named(self, name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """x, by a name that `remat` can ask for."""
        assert name in NAMES
        return checkpoint_name(x, name)

    def enter_tensor(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """From the residual stream to the input of column-parallel weights."""
        return tensor.enter(x, self.cuts_stream) if self.axis_size(tensor.AXIS) > 1 else x

    def project(self, equation: str, x: Float[Array, "B S _"], weight: Parameter) -> Float[Array, "..."]:
        """x times a weight, column-parallel."""
        if self.axis_size(tensor.AXIS) > 1 and not self._is_cut_over_tensor(weight):
            x = tensor.once(x, tensor.AXIS)
        return product(equation, x, self.gather(weight), self._fp8_axes, fuses=not self._is_on_tpus)

    def exit_tensor(self, equation: str, x: Float[Array, "B S ..."], weight: Parameter) -> Float[Array, "B S D"]:
        """x times a weight, row-parallel, summed over `tensor` into the residual stream."""
        out = product(equation, x, self.gather(weight), self._fp8_axes, fuses=not self._is_on_tpus)
        return tensor.leave(out, self.cuts_stream) if self.axis_size(tensor.AXIS) > 1 else out

    @property
    def _fp8_axes(self) -> tuple[str, ...] | None:
        # Stages are at different layers.
        return self.present([axis for axis in MESH_AXES if axis != executor.AXIS]) if self.is_fp8 else None

    def scale(self, x: Float[Array, "B S ..."], vector: Parameter) -> Float[Array, "B S ..."]:
        """x * vector over x's last dims, the vector's gradient left unsummed over the axes that it is owed over."""
        return data.scale(x, vector[...])

    def shift(self, x: Float[Array, "B S ..."], vector: Parameter) -> Float[Array, "B S ..."]:
        """x + vector over x's last dims, likewise."""
        return data.shift(x, vector[...])

    def attention(
        self,
        q: Float[Array, "B S H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G K"],
        tokens: Tokens,
        mask: AttentionMask,
        scale: float,
        num_kv_heads: int,
        cache: Cache | None = None,
    ) -> Float[Array, "B S H K"]:
        """Attention over the whole sequence, of which `sequence` gives the tokens; with a cache, whose tokens are not
        cut over `context`, over what is in it too.

        Kv heads that `tensor` does not divide are whole on every rank, which takes its own of them, repeated to
        lcm(G, tensor): free forward, one all-reduce over `tensor` of dK and dV (B x S x G x K each) backward.
        """
        k, v, k_tokens = cache.before(k, v, tokens) if cache is not None else (k, v, tokens)
        if self.mesh is None:
            return on_one_device.attention(q, k, v, tokens, k_tokens, mask, scale)
        ranks = self.axis_size(tensor.AXIS)
        if num_kv_heads % ranks:
            per_rank = math.lcm(num_kv_heads, ranks) // ranks
            k, v = (tensor.own_heads(x, num_kv_heads, per_rank) for x in (k, v))
        if cache is not None:
            return on_one_device.attention(q, k, v, tokens, k_tokens, mask, scale)
        sizes = dict(self.mesh.shape)
        out, _ = context.attention(
            self.context, sizes, self.attention_kernel, self.packs_documents, mask, scale, q, k, v, tokens
        )
        return out

    def sequence(self, batch: Batch) -> Tokens:
        """What attention's masks go by, of the whole sequence on every context rank: gathered once for all layers."""
        tokens = Tokens(batch.positions, batch.segment_ids)
        if self.axis_size(context.AXIS) == 1:
            return tokens
        return jax.tree.map(lambda x: lax.all_gather(x, context.AXIS, axis=1, tiled=True), tokens)

    def layers(
        self,
        block: Callable[[PyTree, Array], tuple[Array, PyTree]],
        stacked: PyTree,
        x: Float[Array, "B S D"],
        part: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B S D"], PyTree]:
        """block(params of one layer, x) -> (x, what the layer tells) for every layer: a leading layers dim on each
        leaf of `stacked`, and of what they told. Under `pipe`, for those of a part of the model: where parts are
        unequal, a smaller one's empty slots are skipped."""
        is_uneven = self.layers_per_part is not None and part is not None
        count = jnp.asarray(self.layers_per_part, jnp.int32)[part] if is_uneven else None
        return layers.scan(block, stacked, x, remat=self.remat, regather=self.reshard_after_forward, count=count)

    def through_stages(
        self,
        run: Callable[[PyTree, Array, Array | None], tuple[Array, PyTree]],
        stacked: PyTree,
        x: Float[Array, "B S D"],
    ) -> tuple[Float[Array, "B S D"], PyTree]:
        """run(layers, x, which part of the model they are) -> (x, what they told); under `pipe` from the first stage to
        the last, without a backward pass and without what they told."""
        return run(stacked, x, None) if self.schedule is None else (executor.relay(self.schedule, run, stacked, x), {})

    def lookup(self, table: Parameter, ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Rows of an embedding table, in compute dtype, in the residual stream; the table is not gathered."""
        if self.mesh is None:
            return vocab.lookup(vocab.Table(self.compute_dtype), table[...], ids)
        vocab_axes, embed_axes = (self.present(axes_of(part)) for part in self._met_spec(table).partitions)
        if self.cuts_stream and tensor.AXIS not in vocab_axes:
            part = ids.shape[1] // self.axis_size(tensor.AXIS)
            ids = lax.dynamic_slice_in_dim(ids, lax.axis_index(tensor.AXIS) * part, part, axis=1)
        at = vocab.Table(self.compute_dtype, vocab_axes, embed_axes, self.cuts_stream)
        x = vocab.lookup(at, table[...], ids)
        if executor.AXIS in self._vocab_axes and executor.AXIS not in vocab_axes:
            return tensor.once(x, executor.AXIS)
        return x

    def cross_entropy(
        self,
        x: Float[Array, "B S D"],
        head: Float[Array, "D V"],
        targets: Int[Array, "B S"],
        weights: Float[Array, "B S"],
        vocab_size: int,
        objective: Objective,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """(sum(weights * objective), sum(weights * -log p(target))) of this rank's tokens, without whole logits on any
        device; `head` is gathered, x normalised; the first is what has a gradient."""
        x = self.enter_tensor(x)
        return vocab.cross_entropy(self._vocab_axes, x, head, targets, weights, vocab_size, objective)

    def logits_at(
        self, x: Float[Array, "B S D"], head: Float[Array, "D V"], place: Int[Array, ""]
    ) -> Float[Array, "B V"]:
        """Scores after the token at a place of the whole sequence's arrays, over the whole vocabulary."""
        x = self.enter_tensor(x)
        ranks = self.axis_size(context.AXIS)
        first = lax.axis_index(context.AXIS) * x.shape[1] if ranks > 1 else 0
        here = (jnp.arange(x.shape[1]) + first == place).astype(x.dtype)
        x = jnp.einsum("bsd,s->bd", x, here)
        x = lax.psum(x, context.AXIS) if ranks > 1 else x
        logits = product("bd,dv->bv", x, head)
        return lax.all_gather(logits, self._vocab_axes, axis=1, tiled=True) if self._vocab_axes else logits

    # What a step calls, in the region -------------------------------------------------------------------------------

    def before_stages(self, weight: Float[Array, "..."], cuts: fsdp.Cuts, names: Sequence[str | None]) -> Array:
        """A parameter as `in_stages` has it: kernels and embeddings in compute dtype, gathered; vectors as they are."""
        return fsdp.gathered(weight, cuts, self.compute_dtype) if "embed" in names else weight

    def summed(self, gradient: Float[Array, "..."], cuts: fsdp.Cuts) -> Array:
        """The ranks' addends to a gradient by what was gathered, reduced to this rank's part."""
        return fsdp.reduce_scatter(gradient.astype(self.reduce_dtype), cuts, self.folds) if cuts else gradient

    def sum_over_tokens(self, x: Float[Array, ""]) -> Float[Array, ""]:
        """Of every rank's tokens."""
        axes = self.present(TOKEN_AXES)
        return lax.psum(x, axes) if axes else x

    def settle(self, grads: PyTree, owed: PyTree) -> PyTree:
        """The sums that are still owed, once a step: the all-reduce of data parallelism. `owed` is a tree of tuples of
        axes."""
        return jax.tree.map(lambda g, axes: data.settle(g, axes, self.reduce_dtype), grads, owed)
