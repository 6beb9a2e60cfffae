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
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.kernels import attention as on_one_device
from jaxpar.kernels import grouped
from jaxpar.kernels.attention import Cache, Kernel
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.numerics import widened
from jaxpar.parallel import context, data, expert, fsdp, layers, tensor, vocab, zero
from jaxpar.parallel.axes import (
    TOKEN_AXES,
    axes_of,
    gathered_axes,
    mesh_axes,
)
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.expert import ExpertStrategy
from jaxpar.parallel.parameter import Parameter, num_parts
from jaxpar.parallel.pipeline import executor
from jaxpar.parallel.placement import Placement
from jaxpar.parallel.product import Apart, Observed, made, product
from jaxpar.parallel.remat import FULL, NAMES, NONE, Remat
from jaxpar.parallel.vocab import Objective
from jaxpar.parallel.zero import Weight
from meshes import MESH_AXES

F = TypeVar("F", bound=Callable)
T = TypeVar("T")


@dataclass(frozen=True)
class Layout(Placement):
    """How a model lies on a mesh. Without a mesh it is the single-device reference of every other layout."""

    compute_dtype: jnp.dtype = dataclasses.field(default_factory=lambda: jnp.dtype("float32"))
    reduce_dtype: jnp.dtype = dataclasses.field(default_factory=lambda: jnp.dtype("float32"))
    """In which weights' gradients are summed over ranks."""
    remat: Remat = FULL
    attention_kernel: Kernel = "tiled"
    """What attends where a device has all keys; splash in a ring's rounds, too."""
    dispatch: ExpertStrategy = dataclasses.field(default_factory=ExpertStrategy)
    grouped_kernel: grouped.Kernel = "dense"
    """What multiplies tokens by their experts' kernels, under dropless dispatch."""
    packs_documents: bool = False
    """Whether sequences hold documents that attend to themselves alone: rounds of a ring may then be left out."""
    is_fp8: bool = False
    """Whether the layers' matmuls round their operands to 8-bit floats."""
    keeps_residuals: bool = False
    """Whether a stage's forward pass keeps what its backward pass needs, which else computes it again."""
    slices: tuple[int, ...] = ()
    """The lengths of the schedule's token slices, where it has some."""

    @classmethod
    def single(cls, dtype: jnp.dtype, remat: Remat = NONE) -> "Layout":
        return cls(mesh=None, compute_dtype=jnp.dtype(dtype), reduce_dtype=jnp.dtype(dtype), remat=remat)

    def region(self, function: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        """function, of each rank's parts; as it is where there is no mesh."""
        if self.mesh is None:
            return function
        # What each collective's result is whole or cut over is said by its own custom_vjp: nothing for vma to track.
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    # What a model calls, in the region ------------------------------------------------------------------------------

    def gather(self, weight: Parameter) -> Any:
        """A weight in compute dtype with its FSDP axes gathered: the one named point of FSDP's traffic."""
        value = weight[...]
        if isinstance(value, Weight):
            cuts = self.token_cuts(self.parameter_spec(weight.axes, weight.dims), weight.axes)
            return zero.gather(value, cuts, self.reduce_dtype, self.folds)
        cuts = self.token_cuts(self._met_spec(weight), weight.axes)
        if isinstance(value, Observed | Apart):
            return dataclasses.replace(value, weight=fsdp.gathered(value.weight, cuts, self.compute_dtype, self.folds))
        if self.mesh is None or self._whole_axes(weight.axes) >= gathered_axes(weight.axes):
            return value.astype(self.compute_dtype)
        return fsdp.gather(value, cuts, self.compute_dtype, self.reduce_dtype, self.folds)

    def _is_cut_over_tensor(self, weight: Parameter) -> bool:
        return tensor.AXIS in self.present(mesh_axes(self.parameter_spec(weight.axes, weight.dims)))

    def named(self, name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """x, by a name that `remat` can ask for."""
        assert name in NAMES
        return checkpoint_name(x, name)

    def made(self, arrays: T) -> T:
        """The arrays. On TPUs their gradients are all made before any is used: their compiler else computes what uses
        one within the matmul that makes it, which takes longer than a pass over memory, and puts off reducing weights'
        gradients, which then wait in float32 and whole."""
        return made(arrays) if self._is_on_tpus else arrays

    def hidden_parts(self, width: int) -> int:
        """Into how many parts, one after the other, a hidden layer is cut to be computed: on TPUs some, of whole lanes.
        What the backward pass of a recomputed block holds most of is hidden layers, and only a part's are then held at
        once. One for weights that are no plain arrays, and where all of a matmul has one scale."""
        if not self._is_on_tpus or self.schedule is not None or self.zero < 3 or self.is_fp8:
            return 1
        return num_parts(width // self.axis_size(tensor.AXIS))

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
        return self.leave_tensor(self.multiply(equation, x, weight))

    def multiply(self, equation: str, x: Float[Array, "B S ..."], weight: Parameter) -> Float[Array, "B S D"]:
        """x times a weight, row-parallel: this rank's addend."""
        return product(equation, x, self.gather(weight), self._fp8_axes, fuses=not self._is_on_tpus)

    @property
    def _fp8_axes(self) -> tuple[str, ...] | None:
        # Stages are at different layers.
        return self.present([axis for axis in MESH_AXES if axis != executor.AXIS]) if self.is_fp8 else None

    def sum_over_heads(self, x: Float[Array, "B S 1 1"], num_heads: int) -> Float[Array, "B S 1 1"]:
        """A sum over this rank's heads as one over all `num_heads`, which `tensor` cuts where it divides them."""
        ranks = self.axis_size(tensor.AXIS)
        return tensor.total(x) if ranks > 1 and num_heads % ranks == 0 else x

    def scale(self, x: Float[Array, "B S ..."], vector: Parameter) -> Float[Array, "B S ..."]:
        """x * vector over x's last dims, the vector's gradient left unsummed over the axes that it is owed over."""
        return self.made(data.scale(x, vector[...]))

    def shift(self, x: Float[Array, "B S ..."], vector: Parameter) -> Float[Array, "B S ..."]:
        """x + vector over x's last dims, likewise."""
        return data.shift(x, vector[...])

    def route(self, x: Float[Array, "B S D"], weight: Parameter) -> Float[Array, "B S E"]:
        """x times a router's weight, both in at least float32; x is whole over `tensor`."""
        wide = widened(x.dtype)
        return product("bsd,de->bse", x.astype(wide), weight[...].astype(wide))

    def once(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """x, for what every rank of `tensor` computes alike from it: its gradient counts on one of them."""
        return tensor.once(x, tensor.AXIS) if self.axis_size(tensor.AXIS) > 1 else x

    def loads(self, counts: Float[Array, "B E"], over: str) -> Float[Array, "B E"]:
        """Tokens of each expert, summed over all ranks that have tokens of the same sequence, or of the same batch."""
        if over == "batch":
            counts = jnp.broadcast_to(jnp.sum(counts, axis=0, keepdims=True), counts.shape)
        axes = self.present(TOKEN_AXES if over == "batch" else ("context",))
        return lax.psum(counts, axes) if axes else counts

    def experts(
        self,
        x: Float[Array, "B S D"],
        weights: Float[Array, "B S k"],
        ids: Int[Array, "B S k"],
        num_experts: int,
        ffn: Callable[[Float[Array, "... D"], Callable], Float[Array, "... D"]],
    ) -> tuple[Float[Array, "B S D"], Int[Array, ""]]:
        """(each token's sum of weight x ffn over its experts, an addend of the sum over `tensor`; how many pairs of
        token and expert were dropped). `ffn(rows, multiply)` multiplies by experts' kernels with multiply(rows,
        weight)."""
        ranks = self.axis_size("context")
        order = self.sequence_order(x.shape[1] * ranks) if ranks > 1 else None
        place = expert.Place(self.axis_size(expert.AXIS), ranks, order)

        def gathered(rows: Array, multiply: expert.Multiply) -> Array:
            return ffn(rows, lambda rows, weight: multiply(rows, self.gather(weight)))

        return expert.experts(self.dispatch, self.grouped_kernel, place, num_experts, x, weights, ids, gathered)

    def leave_tensor(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The sum of the ranks' addends over `tensor`, in the residual stream."""
        return tensor.leave(x, self.cuts_stream) if self.axis_size(tensor.AXIS) > 1 else x

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

    def layer(
        self, block: Callable[[PyTree, Array], tuple[Array, PyTree]], params: PyTree, x: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S D"], PyTree]:
        """block(params, x) of one layer that is not stacked."""
        remat = FULL if self.remat.every > 1 else self.remat
        return layers.alone(block, params, x, remat=remat, regather=self.reshard_after_forward)

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
        return fsdp.gathered(weight, cuts, self.compute_dtype, self.folds) if "embed" in names else weight

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
