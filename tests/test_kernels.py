"""The platforms' own attention kernels: which one is taken, that they compile where they run, and splash's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxpar.audit.topology import gpu_devices
from jaxpar.kernels import cudnn, splash
from jaxpar.kernels.attention import attention, choose, heads_first
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel.context.order import in_sequence, permutation
from jaxpar.parallel.remat import Remat

SHAPES = ((2, 256, 4, 128), (2, 256, 2, 128), (2, 256, 2, 128))
WHOLE = splash.Queries(np.arange(256))


def by_splash(q, k, v, segments, mask, **settings):
    return splash.attention(q, heads_first(k), heads_first(v), segments, segments, mask, 0.1, WHOLE, **settings)


@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=50), AttentionMask(soft_cap=3.0)])
def test_splash_gives_the_numbers_of_tiles(mask):
    """Interpreted on this machine, in float32, with documents."""
    rng = np.random.default_rng(0)
    q, k, v, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (*SHAPES, SHAPES[0]))
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 256)), axis=1), jnp.int32)
    tokens = Tokens(jnp.tile(jnp.arange(256, dtype=jnp.int32), (2, 1)), segments)

    def of(function):
        y, vjp = jax.vjp(function, q, k, v)
        return y, *vjp(dy)

    want = of(lambda q, k, v: attention(q, k, v, tokens, tokens, mask, 0.1))
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        got = of(lambda q, k, v: by_splash(q, k, v, segments, mask, interpret=True))
    for a, b in zip(got, want):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=3e-6 * np.abs(b).max())


@pytest.mark.parametrize("order", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=300)])
def test_splash_of_a_ranks_queries_to_all_keys(order, mask):
    """Two ranks' parts, each with the keys of both as they lie in `order`, against the whole sequence in its own."""
    rng = np.random.default_rng(0)
    places = permutation(order, 512, 2)
    q, k, v, dy = (jnp.asarray(rng.normal(size=(1, 512, heads, 128)), jnp.float32) for heads in (4, 2, 2, 4))
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (1, 512)), axis=1), jnp.int32)
    tokens = Tokens(jnp.arange(512, dtype=jnp.int32)[None], segments)

    def by_rank(q, k, v):
        q, k, v, q_segments = (x[:, places] for x in (q, k, v, segments))
        keys = [heads_first(in_sequence(order, x, 2)) for x in (k, v)]

        def rank(index):
            mine = lax.dynamic_slice_in_dim(q, index * 256, 256, 1), *keys
            own_segments = lax.dynamic_slice_in_dim(q_segments, index * 256, 256, 1)
            part = splash.Queries(places, 2, index)
            return splash.attention(*mine, own_segments, segments, mask, 0.1, part, interpret=True)

        out = jnp.concatenate([jax.jit(rank)(jnp.int32(index)) for index in range(2)], axis=1)
        return jnp.zeros_like(out).at[:, places].set(out)

    def of(function):
        y, vjp = jax.vjp(function, q, k, v)
        return y, *vjp(dy)

    want = of(lambda q, k, v: attention(q, k, v, tokens, tokens, mask, 0.1))
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        got = of(by_rank)
    for a, b in zip(got, want):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=3e-6 * np.abs(b).max())


def gradients(function, device: jax.Device) -> str:
    def loss(q, k, v):
        return jnp.sum(function(q, k, v).astype(jnp.float32))

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device)) for shape in SHAPES]
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile().as_text()
    assert text is not None
    return text


def test_splash_compiles_for_tpus(monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]

    def function(q, k, v):
        segments = jnp.zeros((2, 256), jnp.int32)
        return by_splash(q, k, v, segments, AttentionMask(window=100))

    assert gradients(function, device).count("tpu_custom_call") >= 3  # forward, dq, dkv


@pytest.fixture
def no_cudnn_here(monkeypatch):
    """What JAX asks of the library that is not here: its version, and the devices that would run it."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda _: False)


def test_cudnn_compiles_for_gpus(no_cudnn_here):
    text = gradients(
        lambda q, k, v: cudnn.attention(q, k, v, AttentionMask(window=100), 0.1), gpu_devices("h100:1x1")[0]
    )
    assert "__cudnn$fmhaSoftmaxBackward" in text


@pytest.mark.parametrize(("remat", "forwards"), [("full", 2), ("save=query", 2), ("save=attention", 1)])
def test_what_cudnn_gave_is_kept_by_name(no_cudnn_here, remat, forwards):
    def function(q, k, v):
        return jnp.sum(cudnn.attention(q, k, v, AttentionMask(), 0.1).astype(jnp.float32))

    again = jax.checkpoint(function, policy=Remat.parse(remat, 1).policy(regather=True))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]
    text = str(jax.make_jaxpr(jax.grad(again, argnums=(0, 1, 2)))(*arguments))
    assert text.count("= dot_product_attention_fwd_wrapper[") == forwards


DEFAULTS = {
    "head_dim": 128,
    "dtype": jnp.dtype("bfloat16"),
    "mask": AttentionMask(),
    "has_documents": False,
    "seq_len": 4096,
    "is_in_order": True,
}


@pytest.mark.parametrize(
    ("platform", "changes", "kernel"),
    [
        ("cpu", {}, "tiled"),
        ("gpu", {}, "cudnn"),
        ("gpu", {"has_documents": True}, "tiled"),
        ("gpu", {"dtype": jnp.dtype("float32")}, "tiled"),
        ("gpu", {"head_dim": 192}, "tiled"),
        ("gpu", {"is_in_order": False}, "tiled"),
        ("tpu", {"has_documents": True}, "splash"),
        ("tpu", {"head_dim": 64}, "tiled"),
        ("tpu", {"seq_len": 1000}, "tiled"),
        ("tpu", {"is_in_order": False}, "splash"),
    ],
)
def test_the_platforms_kernel_within_its_limits(platform, changes, kernel):
    assert choose("auto", platform, **(DEFAULTS | changes)) == kernel


def test_a_kernel_that_is_asked_for_in_vain():
    with pytest.raises(ValueError, match="--attention cudnn: it does not run on cpu; take --attention auto or tiled"):
        choose("cudnn", "cpu", **DEFAULTS)
    with pytest.raises(ValueError, match="--attention splash: it takes head_dim a multiple of 128, not 64"):
        choose("splash", "tpu", **(DEFAULTS | {"head_dim": 64}))
