"""Exact attention in tiles, in plain JAX: never an S x S array (FlashAttention-2, arXiv 2307.08691).

Queries and keys are cut into blocks. A tile, one block of queries against one of keys, is computed only where some
query of it may see some key: the list of such tiles is made from each block's first and last token by segment and
position, and one loop goes through it. The forward pass keeps a running maximum and denominator for each query; the
backward pass makes the scores again from their log-sum-exp. A tile costs two products forward and five backward.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpar.kernels.mask import AttentionMask, Tokens, visible
from jaxpar.numerics import widened

BLOCK = 512
"""Most queries, and most keys, of a tile."""


def block_size(length: int, most: int = BLOCK) -> int:
    """Of a sequence cut into equal blocks, the last one perhaps padded."""
    return -(-length // -(-length // most))


def active_tiles(q_tokens: Tokens, k_tokens: Tokens, mask: AttentionMask, block: int = BLOCK) -> Bool[Array, "QB KB"]:
    """Which tiles hold a visible pair, or may: in some row of the batch the blocks' first and last tokens admit one."""
    return jnp.any(admitted(_ends(q_tokens, block), _ends(k_tokens, block), mask), axis=0)


def admitted(q: tuple[Tokens, Tokens], k: tuple[Tokens, Tokens], mask: AttentionMask) -> Bool[Array, "B QB KB"]:
    """Which blocks may see which, by the `ends` of each; of JAX's arrays or numpy's."""
    (q_first, q_last), (k_first, k_last) = (
        jax.tree.map(lambda x, new=new: x[new], ends) for ends, new in ((q, np.s_[:, :, None]), (k, np.s_[:, None, :]))
    )
    reach = None if mask.window is None else mask.window - 1

    def within(a: Tokens, b: Tokens, reach: int | None) -> Array:
        """Whether a comes before b, or after by `reach` positions of the same segment, at most (None: any)."""
        if reach is None:
            return a.segment_ids <= b.segment_ids
        is_near = a.positions - b.positions <= reach
        return (a.segment_ids < b.segment_ids) | (a.segment_ids == b.segment_ids) & is_near

    return within(q_first, k_last, reach) & within(k_first, q_last, 0 if mask.causal else reach)


def ends(blocks: Tokens) -> tuple[Tokens, Tokens]:
    """The first and the last token of each block [..., b], by segment and then position; of JAX's arrays or numpy's."""
    where = blocks.positions.__array_namespace__().where

    def end(reduce: str, beyond: int) -> Tokens:
        segment = getattr(blocks.segment_ids, reduce)(axis=-1)
        positions = where(blocks.segment_ids == segment[..., None], blocks.positions, beyond)
        return Tokens(getattr(positions, reduce)(axis=-1), segment)

    limits = np.iinfo(np.int32)
    return end("min", limits.max), end("max", limits.min)


def _ends(tokens: Tokens, block: int) -> tuple[Tokens, Tokens]:
    length = tokens.positions.shape[1]
    size = block_size(length, block)

    def cut(array: Int[Array, "B S"]) -> Int[Array, "B N b"]:
        padded = jnp.pad(array, ((0, 0), (0, -length % size)), mode="edge")
        return padded.reshape(array.shape[0], -1, size)

    return ends(jax.tree.map(cut, tokens))


@dataclass(frozen=True)
class _Blocks:
    """An array's blocks, stacked in front, with what is needed to lay them out and put them together again."""

    size: int
    length: int

    @classmethod
    def of(cls, length: int, block: int) -> "_Blocks":
        return cls(block_size(length, block), length)

    @property
    def padding(self) -> int:
        return -self.length % self.size

    def heads(self, x: Float[Array, "B S _ K"], num_kv_heads: int) -> Float[Array, "N B G R*b K"]:
        """Query heads that share a kv head are further rows of its block."""
        batch, _, heads, dim = x.shape
        x = jnp.pad(x, ((0, 0), (0, self.padding), (0, 0), (0, 0)))
        x = x.reshape(batch, -1, self.size, num_kv_heads, heads // num_kv_heads, dim)
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(x.shape[1], batch, num_kv_heads, -1, dim)

    def joined(self, blocks: Float[Array, "N B G R*b K"], num_heads: int) -> Float[Array, "B S H K"]:
        count, batch, num_kv_heads, _, dim = blocks.shape
        blocks = blocks.reshape(count, batch, num_kv_heads, num_heads // num_kv_heads, self.size, dim)
        return blocks.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, num_heads, dim)[:, : self.length]

    def tokens(self, tokens: Tokens, padding: int) -> Tokens:
        """[N, B, b]; what is added has a segment of its own."""

        def split(x: Int[Array, "B S"], fill: int) -> Int[Array, "N B b"]:
            x = jnp.pad(x, ((0, 0), (0, self.padding)), constant_values=fill)
            return x.reshape(x.shape[0], -1, self.size).transpose(1, 0, 2)

        return Tokens(split(tokens.positions, 0), split(tokens.segment_ids, padding))


_NO_QUERY, _NO_KEY = -1, -2


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    mask: AttentionMask,
    scale: float,
    block: int = BLOCK,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"], Int[Array, ""]]:
    """(softmax(scale q k^T) v, the scores' log-sum-exp, tiles computed), in at least float32.

    A query that sees no key gives 0 and -inf.
    """
    wide, num_heads, num_kv_heads = widened(q.dtype), q.shape[2], k.shape[2]
    rows, columns = _Blocks.of(q.shape[1], block), _Blocks.of(k.shape[1], block)
    tiles, count = _tiles(q_tokens, k_tokens, mask, block)
    qs, ks, vs = rows.heads(q, num_kv_heads), columns.heads(k, num_kv_heads), columns.heads(v, num_kv_heads)
    q_at, k_at = rows.tokens(q_tokens, _NO_QUERY), columns.tokens(k_tokens, _NO_KEY)

    def tile(n, carry):
        out, largest, total = carry
        i, j = tiles[0][n], tiles[1][n]
        scores = _scores(qs[i], ks[j], _at(q_at, i), _at(k_at, j), mask, scale)
        before = largest[i]
        now = jnp.maximum(before, jnp.max(scores, axis=-1))
        shift = jnp.where(now == -jnp.inf, 0.0, now)
        weights = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(before - shift)
        added = jnp.einsum("bgtk,bgkd->bgtd", weights.astype(v.dtype), vs[j], preferred_element_type=wide)
        return (
            out.at[i].set(out[i] * decay[..., None] + added),
            largest.at[i].set(now),
            total.at[i].set(total[i] * decay + jnp.sum(weights, axis=-1)),
        )

    start = jnp.zeros(qs.shape, wide), jnp.full(qs.shape[:-1], -jnp.inf, wide), jnp.zeros(qs.shape[:-1], wide)
    out, largest, total = lax.fori_loop(0, count, tile, start)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    lse = largest + jnp.log(total)
    return rows.joined(out, num_heads), rows.joined(lse[..., None], num_heads)[..., 0], count


def backward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    lse: Float[Array, "B T H"],
    delta: Float[Array, "B T H"],
    cotangent: Float[Array, "B T H K"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    mask: AttentionMask,
    scale: float,
    block: int = BLOCK,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """What these keys add to the gradients of q, k and v, in at least float32.

    `lse` is the log-sum-exp over ALL keys that a query sees, `delta` the product of the output with its cotangent.
    """
    wide, num_heads, num_kv_heads = widened(q.dtype), q.shape[2], k.shape[2]
    rows, columns = _Blocks.of(q.shape[1], block), _Blocks.of(k.shape[1], block)
    tiles, count = _tiles(q_tokens, k_tokens, mask, block)
    qs, ks, vs = rows.heads(q, num_kv_heads), columns.heads(k, num_kv_heads), columns.heads(v, num_kv_heads)
    dys = rows.heads(cotangent.astype(q.dtype), num_kv_heads)
    lses, deltas = (rows.heads(x[..., None], num_kv_heads)[..., 0] for x in (lse, delta))
    q_at, k_at = rows.tokens(q_tokens, _NO_QUERY), columns.tokens(k_tokens, _NO_KEY)

    def product(equation, a, b):
        return jnp.einsum(equation, a, b, preferred_element_type=wide)

    def tile(n, carry):
        dq, dk, dv = carry
        i, j = tiles[0][n], tiles[1][n]
        scores = _scores(qs[i], ks[j], _at(q_at, i), _at(k_at, j), mask, scale)
        shift = jnp.where(lses[i] == -jnp.inf, 0.0, lses[i])
        weights = jnp.exp(scores - shift[..., None])
        dweights = product("bgtd,bgkd->bgtk", dys[i], vs[j])
        dscores = weights * (dweights - deltas[i][..., None])
        if mask.soft_cap is not None:
            bent = jnp.where(scores == -jnp.inf, 0.0, scores) / mask.soft_cap
            dscores = dscores * (1 - bent * bent)
        dscores = (dscores * scale).astype(q.dtype)
        return (
            dq.at[i].add(product("bgtk,bgkd->bgtd", dscores, ks[j])),
            dk.at[j].add(product("bgtk,bgtd->bgkd", dscores, qs[i])),
            dv.at[j].add(product("bgtk,bgtd->bgkd", weights.astype(q.dtype), dys[i])),
        )

    start = tuple(jnp.zeros(x.shape, wide) for x in (qs, ks, vs))
    dq, dk, dv = lax.fori_loop(0, count, tile, start)
    return rows.joined(dq, num_heads), columns.joined(dk, num_kv_heads), columns.joined(dv, num_kv_heads)


def _tiles(q_tokens, k_tokens, mask, block):
    """Row and column of each tile to compute, queries' blocks in order, and how many there are."""
    active = active_tiles(q_tokens, k_tokens, mask, block)
    return jnp.nonzero(active, size=active.size), jnp.sum(active, dtype=jnp.int32)


def _at(tokens: Tokens, index: Int[Array, ""]) -> Tokens:
    return jax.tree.map(lambda x: x[index], tokens)


def _scores(q, k, q_tokens, k_tokens, mask, scale):
    """[B, G, R * b, b], -inf where a query does not see a key."""
    wide = widened(q.dtype)
    scores = jnp.einsum("bgtd,bgkd->bgtk", q, k, preferred_element_type=wide) * jnp.asarray(scale, wide)
    if mask.soft_cap is not None:
        scores = mask.soft_cap * jnp.tanh(scores / mask.soft_cap)
    seen = visible(q_tokens, k_tokens, mask)
    repeats = q.shape[2] // seen.shape[1]
    return jnp.where(jnp.tile(seen, (1, repeats, 1))[:, None], scores, -jnp.inf)
