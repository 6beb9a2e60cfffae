"""The ring by the splash kernel, interpreted on this machine in float32, against attention in tiles on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.kernels.attention import attention
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel.context import ring
from jaxpar.parallel.context.halves import Halves
from jaxpar.parallel.context.order import permutation
from meshes import build_mesh

PART = 256


@pytest.mark.parametrize(
    ("order", "num_documents", "ranks"),
    [
        ("zigzag", 1, 2),
        ("contiguous", 5, 2),
        ("striped", 5, 2),
        pytest.param("zigzag", 1, 4, marks=pytest.mark.slow),
        pytest.param("zigzag", 5, 4, marks=pytest.mark.slow),
    ],
)
def test_against_tiles(order, num_documents, ranks):
    length = ranks * PART
    rng = np.random.default_rng(0)
    q, k, v, dy = (jnp.asarray(rng.normal(size=(1, length, heads, 128)), jnp.float32) for heads in (2, 1, 1, 2))
    segments = jnp.asarray(np.sort(rng.integers(0, num_documents, (1, length)), axis=1), jnp.int32)
    tokens = Tokens(jnp.arange(length, dtype=jnp.int32)[None], segments)
    mesh = build_mesh(f"context={ranks}", devices=jax.devices()[:ranks])
    mask = AttentionMask()
    on_ring = ring.Ring(
        axis="context",
        ranks=ranks,
        stride=1,
        shifts=tuple(range(ranks)),
        skips_documents=num_documents > 1,
        mask=mask,
        scale=0.1,
        all_axes=("context",),
        halves=Halves(order, 0.1, None, interpret=True),
    )
    places = permutation(order, length, ranks)
    part = P(None, "context", None, None)

    def by_splash(q, k, v):
        def local(q, k, v, tokens):
            return ring.attention(on_ring, q, k, v, tokens)[0]

        region = jax.shard_map(local, in_specs=(part, part, part, P()), out_specs=part, check_vma=False)
        ordered = jax.tree.map(lambda x: x[:, places], tokens)
        q, k, v = (jax.reshard(x[:, places], part) for x in (q, k, v))
        out = jax.reshard(region(q, k, v, ordered), P(None, None, None, None))
        return out[:, np.argsort(places)]

    def of(function):
        def gradients(q, k, v, dy):
            y, vjp = jax.vjp(function, q, k, v)
            return y, *vjp(dy)

        return jax.jit(gradients)(q, k, v, dy)

    want = of(lambda q, k, v: attention(q, k, v, tokens, tokens, mask, 0.1))
    with (
        jax.set_mesh(mesh),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        got = of(by_splash)
    for a, b in zip(got, want):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
