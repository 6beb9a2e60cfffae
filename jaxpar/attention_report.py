"""What `jaxpar attention` runs: a context strategy against dense attention, and what it costs at full length.

The numbers come from emulated CPU devices in float64 at a short length; FLOPs and bytes from `planning.attention`,
memory from the program compiled for H100s, without any.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.audit.topology import gpu_devices
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel.context import ContextStrategy, attention
from jaxpar.parallel.layout import Layout
from jaxpar.planning.attention import AttentionSize, attention_plan, causal_flops, documents
from meshes import build_mesh

TOLERANCE = 1e-10
"""Of the output and of each gradient relative to its largest element, in float64."""
MAX_RANKS = 32
SHORT_BLOCK, SHORT_BLOCKS_PER_RANK = 8, 6


@dataclass(frozen=True)
class Case:
    strategy: ContextStrategy
    ranks: int
    size: AttentionSize
    window: int | None = None
    num_documents: int = 1

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(window=self.window)

    def check(self) -> None:
        """Raise ValueError, in one line, for what cannot be cut or means nothing."""
        size = self.size
        if self.ranks > MAX_RANKS:
            raise ValueError(f"--ranks {self.ranks}: they are emulated here, {MAX_RANKS} at most")
        if size.num_heads % size.num_kv_heads:
            fits = [n for n in range(1, size.num_heads + 1) if size.num_heads % n == 0]
            nearest = min(fits, key=lambda n: abs(n - size.num_kv_heads))
            raise ValueError(
                f"--kv-heads {size.num_kv_heads} does not divide --heads {size.num_heads}; the nearest that does: "
                f"{nearest}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"--window {self.window}: a query sees at least itself; the least that works: 1")
        if self.num_documents > size.seq_len:
            raise ValueError(
                f"--documents {self.num_documents} have less than a token each of --seq-len {size.seq_len}, the most "
                "that works"
            )
        self.strategy.check(size.seq_len, size.num_heads, self.ranks, tensor=1)

    def short(self) -> "Case":
        """Of the same structure, with several tiles on every rank: window and documents keep their share, as far as
        tokens allow."""
        length = SHORT_BLOCK * SHORT_BLOCKS_PER_RANK * self.ranks
        share = length / self.size.seq_len
        return dataclasses.replace(
            self,
            strategy=dataclasses.replace(self.strategy, block=SHORT_BLOCK),
            size=dataclasses.replace(self.size, seq_len=length, head_dim=min(self.size.head_dim, 16)),
            window=self.window and max(1, round(self.window * share)),
            num_documents=min(self.num_documents, length),
        )


@dataclass(frozen=True)
class Report:
    """What `jaxpar attention` prints; all but the errors for the asked length, one sequence and one layer, bfloat16
    with K and V's travelling gradients in float32."""

    flops_per_rank: list[int]
    """Forward, of the tiles that the kernel computes."""
    flops_dense_causal: float
    """Forward, all ranks together."""
    bytes_sent_per_rank: int
    bytes_sent_per_rank_forward: int
    bytes_sent_per_rank_backward: int
    peak_temp_bytes_per_rank: int
    """Forward and backward, as compiled for H100s."""
    max_error: float
    max_gradient_error: float
    ok: bool


def report(case: Case) -> Report:
    """The process must have `case.ranks` CPU devices and x64 on. Raises ValueError for a case that `check` refuses."""
    case.check()
    plan = attention_plan(case.strategy, case.ranks, case.size, case.mask, case.num_documents)
    error, gradient_error = errors(case.short())
    memory = compiled(case).memory_analysis()
    assert memory is not None
    return Report(
        flops_per_rank=plan.flops_per_rank,
        flops_dense_causal=causal_flops(case.size),
        bytes_sent_per_rank=plan.bytes_sent_forward + plan.bytes_sent_backward,
        bytes_sent_per_rank_forward=plan.bytes_sent_forward,
        bytes_sent_per_rank_backward=plan.bytes_sent_backward,
        peak_temp_bytes_per_rank=memory.temp_size_in_bytes,
        max_error=error,
        max_gradient_error=gradient_error,
        ok=max(error, gradient_error) <= TOLERANCE,
    )


def errors(case: Case) -> tuple[float, float]:
    """Of the output, and of dQ, dK and dV the largest, on emulated devices in float64 against dense attention.

    Raises AssertionError where the kernel computes other tiles than the plan says.
    """
    size = case.size
    tokens = documents(size.seq_len, case.num_documents)
    arrays = random_arrays(1, size)
    layout = make_layout(case, build_mesh(f"context={case.ranks}", devices=jax.devices()[: case.ranks]), jnp.float64)
    got, tiles = on_mesh(layout, case.mask, tokens, arrays)
    plan = attention_plan(case.strategy, case.ranks, size, case.mask, case.num_documents)
    assert tiles == plan.tiles_per_rank, f"tiles computed: {tiles}; planned: {plan.tiles_per_rank}"
    want = densely(case.mask, tokens, arrays)
    # Where a query sees one key alone, its dQ is zero by mathematics: held against the other gradients' scale.
    largest = max(float(np.abs(gradient).max()) for gradient in want[1:])
    of_gradients = [float(np.abs(a - b).max()) / largest for a, b in zip(got[1:], want[1:])]
    return relative_error(got[0], want[0]), float(np.max(of_gradients))


def random_arrays(batch: int, size: AttentionSize) -> list[np.ndarray]:
    """q, k, v and the output's cotangent."""
    rng = np.random.default_rng(0)
    heads = size.num_heads, size.num_kv_heads, size.num_kv_heads, size.num_heads
    return [rng.standard_normal((batch, size.seq_len, num, size.head_dim)) for num in heads]


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Of the largest element; NaN is infinite."""
    largest, difference = np.abs(want).max(), np.abs(got - want).max()
    assert largest > 0, "the reference is all zero: nothing is compared"
    return float(difference / largest) if difference == difference else float("inf")


def make_layout(case: Case, mesh: Mesh, dtype: jnp.dtype) -> Layout:
    return Layout(mesh, compute_dtype=dtype, context=case.strategy, packs_documents=case.num_documents > 1)


def on_mesh(
    layout: Layout, mask: AttentionMask, tokens: Tokens, arrays: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[int]]:
    """Output, dQ, dK and dV for q, k, v and a cotangent, all in the sequence's own order; each device's tiles."""
    assert layout.mesh is not None
    order = layout.sequence_order(arrays[0].shape[1])
    shapes = _abstract(layout, arrays[0].shape, arrays[1].shape[2], arrays[0].dtype)
    with jax.set_mesh(layout.mesh):
        placed = jax.tree.map(
            lambda x, like: jax.device_put(np.asarray(x)[:, order].astype(like.dtype), like.sharding),
            (*arrays, tokens),
            shapes,
        )
        results, tiles = program(layout, mask)(*placed)
    return [np.asarray(x)[:, np.argsort(order)] for x in results], tiles.tolist()


def densely(mask: AttentionMask, tokens: Tokens, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Likewise, on one device."""
    results, _ = jax.jit(_with_gradients(lambda q, k, v: (dense(q, k, v, tokens, mask), None)))(*arrays)
    return list(map(np.asarray, results))


def dense(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    tokens: Tokens,
    mask: AttentionMask,
) -> Float[Array, "B S H K"]:
    """The reference: every score at once, K and V repeated, the scale 1 / sqrt(K). A query that sees no key gives 0."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    if mask.soft_cap is not None:
        scores = mask.soft_cap * jnp.tanh(scores / mask.soft_cap)
    ago = tokens.positions[:, :, None] - tokens.positions[:, None, :]
    seen = tokens.segment_ids[:, :, None] == tokens.segment_ids[:, None, :]
    if mask.causal:
        seen = seen & (ago >= 0)
    if mask.window is not None:
        seen = seen & (ago < mask.window) & (-ago < mask.window)
    weights = jax.nn.softmax(scores, axis=-1, where=seen[:, None])
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def compiled(case: Case) -> jax.stages.Compiled:
    """Forward and backward in bfloat16 for H100s, which need not be here."""
    devices = gpu_devices(f"h100:{case.ranks // 8}x8" if case.ranks % 8 == 0 else f"h100:1x{case.ranks}")
    size = case.size
    layout = make_layout(case, build_mesh(f"context={case.ranks}", devices=devices), jnp.dtype("bfloat16"))
    shape = 1, size.seq_len, size.num_heads, size.head_dim
    arguments = _abstract(layout, shape, size.num_kv_heads, jnp.dtype("bfloat16"))
    with jax.enable_x64(False), jax.set_mesh(layout.mesh):
        return program(layout, case.mask).lower(*arguments).compile()


@functools.cache
def program(layout: Layout, mask: AttentionMask) -> jax.stages.Wrapped:
    """Jitted: (q, k, v, cotangent, tokens) -> ((output, dQ, dK, dV), each device's tiles)."""

    assert layout.mesh is not None
    sizes = dict(layout.mesh.shape)
    heads = layout.spec("batch", "seq", "heads", "head_dim")

    def run(q, k, v, cotangent, tokens):
        def local(q, k, v, tokens):
            scale = q.shape[3] ** -0.5
            out, tiles = attention(layout.context, sizes, "tiled", layout.packs_documents, mask, scale, q, k, v, tokens)
            return out, tiles[None]

        def attend(q, k, v):
            in_specs, out_specs = (heads, heads, heads, layout.spec("batch", None)), (heads, P(tuple(sizes)))
            return layout.region(local, in_specs, out_specs)(q, k, v, tokens)

        return _with_gradients(attend)(q, k, v, cotangent)

    return jax.jit(run)


def _with_gradients(attend: Callable) -> Callable:
    def run(q, k, v, cotangent):
        out, pull_back, tiles = jax.vjp(attend, q, k, v, has_aux=True)
        # Else the backward pass would use permutes of the forward pass again, which in a model is many layers away.
        pull_back = jax.lax.optimization_barrier(pull_back)
        return (out, *pull_back(cotangent)), tiles

    return run


def _abstract(layout: Layout, shape: Sequence[int], num_kv_heads: int, dtype: np.dtype) -> tuple:
    """q, k, v, cotangent and tokens, as they lie on the layout's mesh."""

    def like(shape: Sequence[int], dtype: np.dtype, *names: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=layout.sharding(layout.spec(*names)))

    batch, length, _, head_dim = shape
    q = like(shape, dtype, "batch", "seq", "heads", "head_dim")
    kv = like((batch, length, num_kv_heads, head_dim), dtype, "batch", "seq", "kv_heads", "head_dim")
    ids: Any = like((batch, length), np.dtype("int32"), "batch", None)
    return q, kv, kv, q, Tokens(ids, ids)
