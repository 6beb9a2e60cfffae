"""Loss scaling, stochastic rounding, 8-bit products."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import Config, DataConfig, ParallelConfig, RunConfig
from jaxpar.kernels import fp8
from jaxpar.parallel.product import product
from jaxpar.training import optimizers, setup
from jaxpar.training.gradients import loss_and_grads
from jaxpar.training.precision import LossScale, round_stochastically
from jaxpar.training.step import init_state, make_step
from jaxpar.verify import random_batch
from models.config import ModelConfig

MODEL = ModelConfig(vocab_size=64, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)


def test_a_step_whose_gradients_overflow_changes_nothing_but_the_scale():
    config = Config(
        model=MODEL,
        data=DataConfig(batch_size=4, seq_len=8),
        parallel=ParallelConfig(mesh="data=2,fsdp=2", zero=1),
        run=RunConfig(precision="float16"),
    )
    mesh = setup.make_mesh(config, jax.devices()[:4])
    model = setup.make_model(config, mesh)
    tx = optimizers.make(config.optimizer, 10, model.names)
    with jax.set_mesh(mesh):
        state = init_state(model, tx, seed=0)
        batch = jax.device_put(random_batch(config), model.layout.sharding(model.layout.stacked_batch_spec()))
        step = jax.jit(make_step(model, tx, clip_norm=1.0))
        after, metrics = step(state, batch)
        assert np.isfinite(metrics.grad_norm)
        assert float(after.loss_scale.scale) == 2.0**15
        assert np.any(after.opt_state[0].mu["embedding"] != 0)  # the step counted

        huge = dataclasses.replace(state, loss_scale=LossScale(state.loss_scale.scale * 2.0**9, state.step))
        after, metrics = step(huge, batch)
    assert not np.isfinite(metrics.grad_norm)
    assert np.isfinite(metrics.loss)
    assert float(after.loss_scale.scale) == 2.0**23
    kept = jax.tree.map(np.array_equal, (after.params, after.opt_state), (huge.params, huge.opt_state))
    assert all(jax.tree.leaves(kept))


def test_the_scale_is_there_before_anything_underflows():
    """Beside one token that weighs 2^16, each other's share is below what float16 holds: the scale saves it."""
    config = Config(
        model=MODEL,
        data=DataConfig(batch_size=4, seq_len=8),
        parallel=ParallelConfig(mesh="data=1"),
        run=RunConfig(precision="float16"),
    )
    batch = random_batch(config)
    weights = np.ones_like(batch.loss_weights)
    weights[0, 0, 0] = 2.0**16
    batch = dataclasses.replace(batch, loss_weights=weights)
    elsewhere = sorted({*batch.tokens[0, 1:].ravel().tolist()} - {*batch.tokens[0, 0].tolist()})
    assert len(elsewhere) > 5

    @functools.cache
    def compiled(precision: str):
        model = setup.make_model(dataclasses.replace(config, run=RunConfig(precision=precision)), None)
        return model.init(0), jax.jit(
            lambda params, scale: loss_and_grads(model, params, batch, scale=scale)[1]["embedding"]
        )

    def gradient(precision: str, scale: float):
        params, gradients = compiled(precision)
        return np.asarray(gradients(params, jnp.float32(scale)))[elsewhere]

    want = gradient("float32", 1.0)
    assert np.linalg.norm(gradient("float16", 2.0**10) - want) < 0.01 * np.linalg.norm(want)
    assert np.linalg.norm(gradient("float16", 1.0) - want) > 0.05 * np.linalg.norm(want)


def test_the_scale_doubles_after_2000_good_steps():
    scale = LossScale(jnp.float32(8.0), jnp.int32(1999))
    assert float(scale.after(jnp.bool_(True)).scale) == 16.0
    assert int(scale.after(jnp.bool_(True)).good_steps) == 0
    assert float(scale.after(jnp.bool_(False)).scale) == 4.0


def test_rounding_keeps_the_expectation():
    x = {"w": jnp.full(100_000, 1 + 2.0**-10, jnp.float32) * jnp.array([1, -1], jnp.float32).repeat(50_000)}
    rounded = round_stochastically(x, jnp.bfloat16, jnp.int32(3))["w"].astype(jnp.float32)
    # bfloat16 has 1 and 1 + 2^-7 beside 1 + 2^-10: one in eight goes up.
    assert set(np.abs(np.asarray(rounded)).tolist()) == {1.0, 1 + 2.0**-7}
    for half, sign in ((rounded[:50_000], 1), (rounded[50_000:], -1)):
        assert abs(float(jnp.mean(sign * half > 1)) - 1 / 8) < 0.01
    again = round_stochastically(x, jnp.bfloat16, jnp.int32(4))["w"].astype(jnp.float32)
    assert not np.array_equal(rounded, again)


def test_rounding_leaves_what_is_no_number():
    x = {"w": jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0], jnp.float32)}
    rounded = np.asarray(round_stochastically(x, jnp.bfloat16, jnp.int32(0))["w"].astype(jnp.float32))
    np.testing.assert_array_equal(rounded, [np.inf, -np.inf, np.nan, 0.0])


def test_products_in_8_bits():
    """Of random factors: e4m3 has three binary digits, e5m2 two, and the errors of a long sum cancel out."""
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 32, 256), (256, 64), (4, 32, 64)))

    def of(is_fp8: bool):
        y, vjp = jax.vjp(lambda x, w: product("bsd,df->bsf", x, w, () if is_fp8 else None), x, w)
        return y, *vjp(dy)

    for got, want, tolerance in zip(of(True), of(False), (0.04, 0.08, 0.08)):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 1e-3 < error < tolerance


def test_a_scale_brings_the_largest_value_to_the_formats_largest():
    q, scale = fp8.quantize(jnp.array([0.5, -3.0], jnp.bfloat16), fp8.FORWARD)
    assert q.dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(q.astype(jnp.float32) * scale, [0.5, -3.0], rtol=2**-4)
    zeros, scale = fp8.quantize(jnp.zeros(3, jnp.bfloat16), fp8.BACKWARD)
    assert float(scale) == 1.0
    assert not np.any(np.asarray(zeros.astype(jnp.float32)))
