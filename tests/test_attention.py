"""Attention on one device: in tiles, held against every score at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.attention_report import dense, densely, random_arrays, relative_error
from jaxpar.kernels import tiled
from jaxpar.kernels.attention import attention, counted
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.planning.attention import AttentionSize, documents

TOLERANCE = 1e-10
BLOCK = 16
LENGTH = 75  # five blocks of 15, of two documents' 38 and 37 tokens
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
MASKS = {
    "causal": AttentionMask(),
    "full": AttentionMask(causal=False),
    "window": AttentionMask(window=20),
    "two-sided window": AttentionMask(causal=False, window=20),
    "soft cap": AttentionMask(soft_cap=1.5),
    "all": AttentionMask(window=20, soft_cap=1.5),
}


def errors(mask: AttentionMask, tokens: Tokens, arrays, block: int = BLOCK) -> tuple[list[float], int]:
    """Of the output, dQ, dK and dV; and the tiles computed."""

    def run(q, k, v, cotangent):
        def attend(q, k, v):
            return counted(q, k, v, tokens, tokens, mask, q.shape[3] ** -0.5, block)

        out, pull_back, tiles = jax.vjp(attend, q, k, v, has_aux=True)
        return (out, *pull_back(cotangent)), tiles

    results, tiles = jax.jit(run)(*arrays)
    return list(map(relative_error, map(np.asarray, results), densely(mask, tokens, arrays))), int(tiles)


def brute_force_tiles(mask: AttentionMask, tokens: Tokens, size: int) -> int:
    """How many blocks x blocks hold a pair that is seen."""
    position, segment = np.asarray(tokens.positions[0]), np.asarray(tokens.segment_ids[0])
    ago = position[:, None] - position[None]
    seen = (segment[:, None] == segment[None]) & ((ago >= 0) | (not mask.causal))
    seen &= np.abs(ago) < (mask.window or len(position))
    pad = -len(position) % size
    seen = np.pad(seen, ((0, pad), (0, pad)))
    return seen.reshape(len(seen) // size, size, -1, size).any((1, 3)).sum()


def test_the_reference_is_what_jax_computes():
    arrays = random_arrays(2, AttentionSize(LENGTH, 4, 2, 8))
    q, k, v, _ = map(jnp.asarray, arrays)
    with jax.numpy_dtype_promotion("standard"):
        want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(19, 0))
    got = dense(q, k, v, documents(LENGTH, 1), MASKS["window"])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)  # theirs is a float32 softmax


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("heads", "num_documents"), [("mha", 1), ("gqa", 2), ("mqa", 5)])
def test_tiles_against_dense(heads, num_documents, mask):
    tokens = documents(LENGTH, num_documents)
    found, tiles = errors(MASKS[mask], tokens, random_arrays(1, AttentionSize(LENGTH, *HEADS[heads], 8)))
    assert max(found) <= TOLERANCE, found
    assert tiles == brute_force_tiles(MASKS[mask], tokens, 15) <= (15 if MASKS[mask].causal else 25)


@pytest.mark.parametrize("length", [2, 15, 16, 17, 33, 61])
def test_lengths_that_no_block_divides(length):
    found, _ = errors(AttentionMask(), documents(length, 1), random_arrays(2, AttentionSize(length, 4, 2, 8)))
    assert max(found) <= TOLERANCE, found


def test_rows_with_documents_of_their_own():
    """A tile is computed where any row needs it."""
    rows = [documents(LENGTH, count) for count in (1, 4, 3)]
    tokens = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    found, tiles = errors(AttentionMask(), tokens, random_arrays(3, AttentionSize(LENGTH, 4, 2, 8)))
    assert max(found) <= TOLERANCE, found
    assert tiles == 15


def test_a_query_that_sees_no_key():
    """Gives 0, and neither takes nor gives a gradient."""
    q, k, v, cotangent = map(jnp.asarray, random_arrays(1, AttentionSize(LENGTH, 4, 2, 8)))
    tokens = documents(LENGTH, 1)
    lonely = np.arange(LENGTH)[None] >= 50
    q_tokens = Tokens(tokens.positions, np.where(lonely, 7, tokens.segment_ids))

    def attend(q, k, v):
        return counted(q, k, v, q_tokens, tokens, AttentionMask(causal=False), 1.0, BLOCK)[0]

    out, pull_back = jax.vjp(jax.jit(attend), q, k, v)
    dq, dk, dv = pull_back(cotangent)
    assert not np.any(out[:, 50:])
    assert not np.any(dq[:, 50:])
    for x in (out[:, :50], dq[:, :50], dk, dv):
        assert 0.01 < np.abs(x).max() < np.inf
    _, *without = pull_back(cotangent.at[:, 50:].set(0.0))
    for x, y in zip((dk, dv), without):
        np.testing.assert_array_equal(x, y)


def test_no_array_of_all_pairs():
    """Temporaries of forward and backward at S=4096 are at most an eighth of XLA's attention's."""
    shape = jax.ShapeDtypeStruct((1, 4096, 4, 64), jnp.float32)
    tokens = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), documents(4096, 1))

    def temporaries(attend) -> int:
        def run(q, k, v, cotangent):
            out, pull_back = jax.vjp(attend, q, k, v)
            return out, pull_back(cotangent)

        memory = jax.jit(run).lower(shape, shape, shape, shape).compile().memory_analysis()
        return memory.temp_size_in_bytes

    ours = temporaries(lambda q, k, v: attention(q, k, v, tokens, tokens, AttentionMask(), 0.125))
    theirs = temporaries(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    assert theirs > 4096**2 * 4 * 4
    assert ours <= theirs / 8
    assert tiled.BLOCK < 4096
