"""AdamW with warm-up and cosine, through optax, over plain trees of parameters."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxpar.config import OptimizerConfig


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate by step: linear from 0 to the peak over the warm-up, then a cosine, final at num_steps."""
    warmup = min(config.warmup_steps, num_steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate if warmup == 0 else 0.0,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(num_steps, warmup + 1),
        end_value=min(config.final_learning_rate, config.learning_rate),
    )


def adamw(config: OptimizerConfig, num_steps: int, names: PyTree) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101). `names` has each parameter's logical axes: only kernels decay, that is parameters that
    contract or make the residual stream; not embeddings, norms and biases."""
    decays = jax.tree.map(_is_kernel, names, is_leaf=lambda node: isinstance(node, tuple))
    return optax.adamw(
        schedule(config, num_steps),
        config.beta1,
        config.beta2,
        config.eps,
        weight_decay=config.weight_decay,
        mask=decays,
    )


def _is_kernel(names: tuple[str | None, ...]) -> bool:
    return "embed" in names and names[0] not in ("vocab", "position")


def clip(grads: PyTree, norm: jax.Array, limit: float) -> PyTree:
    """Gradients scaled so that their global norm, which is `norm`, is at most `limit`; 0 is no limit."""
    if limit == 0:
        return grads
    factor = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
