"""Evaluation: the cross-entropy of the true tokens, whatever the mesh, the microbatches and the padding."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from jaxpar.config import Config, DataConfig, ParallelConfig, RunConfig
from jaxpar.parallel.batch import Batch
from jaxpar.training import setup
from jaxpar.training.evaluate import Evaluation, Evaluator
from jaxpar.verify import random_batch
from models.config import ModelConfig

MODEL = ModelConfig(vocab_size=250, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48)
CONFIG = Config(model=MODEL, data=DataConfig(batch_size=8, seq_len=16), run=RunConfig(precision="float64"))
MESH = "data=2,fsdp=2,tensor=2"


@functools.cache
def weighted_batch() -> Batch:
    """8 rows [8, S] on the host: two without a token that counts, the others with about half of theirs."""
    weights = np.random.default_rng(1).integers(0, 2, (8, 16)).astype(np.float32)
    weights[[0, 2]] = 0
    return dataclasses.replace(jax.tree.map(lambda x: x[0], random_batch(CONFIG)), loss_weights=weights)


@functools.cache
def evaluator(mesh: str, num_microbatches: int, precision: str):
    """(batch -> (sum of negative log-likelihoods, tokens)) on a mesh, or with "" on one device without one."""
    config = dataclasses.replace(
        CONFIG,
        parallel=ParallelConfig(mesh=mesh, grad_accumulation=num_microbatches),
        run=RunConfig(precision=precision),
    )
    devices = setup.make_mesh(config, jax.devices()[:8]) if mesh else None
    model = setup.make_model(config, devices)
    sharding = model.layout.sharding(model.layout.stacked_batch_spec())

    def stacked(batch: Batch) -> Batch:
        return jax.tree.map(lambda x: jax.device_put(x.reshape(num_microbatches, -1, 16), sharding), batch)

    with jax.set_mesh(devices) if devices is not None else jax.default_device(jax.devices()[0]):
        params = model.init(0)
        compiled = Evaluator.compile(model, params, lambda _: stacked(weighted_batch()), 1, 1.0)

    def run(batch: Batch) -> tuple[float, float]:
        nll, num_tokens = compiled.step(params, stacked(batch))
        return float(nll), float(num_tokens)

    return run


def evaluate(batch: Batch, mesh: str, num_microbatches: int = 1, precision: str = "float64") -> tuple[float, float]:
    return evaluator(mesh, num_microbatches, precision)(batch)


@functools.cache
def reference() -> np.ndarray:
    """Each token's negative log-likelihood, from whole logits."""
    model = setup.make_model(CONFIG, None)
    batch = jax.tree.map(jnp.asarray, weighted_batch())
    logits_at = jax.jit(model.logits_at)
    params = model.init(0)
    logits = np.stack([logits_at(params, batch, jnp.asarray(i)) for i in range(16)], axis=1)[..., :250]
    at_target = np.take_along_axis(logits, np.asarray(batch.targets)[..., None], axis=-1)[..., 0]
    return logsumexp(logits, axis=-1) - at_target


@pytest.mark.parametrize(("mesh", "num_microbatches"), [("", 1), ("", 4), (MESH, 1), (MESH, 2), ("fsdp=4,tensor=2", 2)])
def test_any_mesh_sums_the_likelihoods_of_the_tokens_that_count(mesh, num_microbatches):
    batch = weighted_batch()
    nll, num_tokens = evaluate(batch, mesh, num_microbatches)
    assert num_tokens == batch.loss_weights.sum() > 20
    np.testing.assert_allclose(nll, np.sum(reference() * batch.loss_weights), rtol=1e-9)


def test_padding_rows_do_not_matter():
    batch = weighted_batch()
    padding = batch.loss_weights == 0
    other = dataclasses.replace(batch, targets=np.where(padding, 3, batch.targets))
    rows = np.all(padding, axis=1, keepdims=True)
    other = dataclasses.replace(other, tokens=np.where(rows, 5, batch.tokens))
    assert np.any(other.tokens != batch.tokens)
    assert evaluate(other, MESH) == evaluate(batch, MESH)


def test_in_bfloat16_sums_are_float32():
    nll, num_tokens = evaluate(weighted_batch(), MESH, 2, "bfloat16")
    assert num_tokens == weighted_batch().loss_weights.sum()
    np.testing.assert_allclose(nll, np.sum(reference() * weighted_batch().loss_weights), rtol=2e-3)


def test_an_evaluation_is_one_sum_by_one_count():
    """Batches of unequal counts: their mean losses' mean would be 1.25."""
    sums = [(30.0, 10.0), (1.0, 2.0)]
    summed = Evaluator(lambda params, batch: sums[batch], lambda index: index, 2, bytes_per_token=4.0)
    done = summed(None)
    assert done == Evaluation(31 / 12, 31 / 12 / math.log(2) / 4, 12)
    assert done.row() == {
        "eval_loss": 31 / 12,
        "eval_perplexity": math.exp(31 / 12),
        "eval_bits_per_byte": 31 / 12 / math.log(2) / 4,
    }
    assert Evaluation(1e4, 1.0, 1).perplexity == math.inf
