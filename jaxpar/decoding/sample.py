"""A continuation of a prompt, each token by a forward pass over the whole window: short, and right on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from jaxpar.parallel.axes import BATCH_AXES
from jaxpar.parallel.batch import Batch
from jaxpar.training.model import Model


def sample(
    model: Model,
    params: PyTree,
    prompt: Int[np.ndarray, " P"],
    num_tokens: int,
    window: int,
    seed: int,
    temperature: float = 0.8,
) -> Int[np.ndarray, " N"]:
    """num_tokens tokens that follow the prompt, of which the last `window` tokens are seen at a time.

    The mesh must be current. Every batch shard computes the same row: this is for a look at a model, not for serving.
    """
    layout = model.layout
    rng = np.random.default_rng(seed)
    logits_at = jax.jit(model.logits_at, out_shardings=layout.whole())
    tokens = [int(token) for token in prompt]
    order = layout.sequence_order(window)
    for _ in range(num_tokens):
        seen = tokens[-window:]
        batch = _window(model, np.array(seen + [0] * (window - len(seen)), np.int32))
        place = jnp.int32(np.flatnonzero(order == len(seen) - 1)[0])
        logits = np.asarray(logits_at(params, batch, place)[0], np.float64) / temperature
        scaled = np.exp(logits - logits.max())
        tokens.append(int(rng.choice(len(scaled), p=scaled / scaled.sum())))
    return np.array(tokens[len(prompt) :], np.int32)


def _window(model: Model, tokens: Int[np.ndarray, " S"]) -> Batch:
    rows = model.layout.axis_size(*BATCH_AXES)
    sharding = model.layout.sharding(model.layout.spec("batch", "seq"))

    order = model.layout.sequence_order(len(tokens))

    def put(row: np.ndarray) -> jax.Array:
        return jax.device_put(np.tile(row[order], (rows, 1)), sharding)

    ids, zeros = put(tokens), put(np.zeros_like(tokens))
    return Batch(ids, ids, put(np.arange(len(tokens), dtype=np.int32)), zeros, put(np.zeros(len(tokens), np.float32)))
