"""Learning rates by step."""

import jax
import jax.numpy as jnp
import optax

from jaxpar.config import OptimizerConfig


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate by step: linear from 0 to the peak over the warm-up, then as `config.schedule` says.

    cosine and linear end at the final rate at num_steps; wsd (arXiv 2404.06395, section 4) is constant until the last
    `decay_fraction` of the run, then linear to the final rate; rsqrt falls as 1/sqrt(step) (arXiv 1706.03762, section
    5.3). The warm-up is at most the run, the final rate at most the peak.
    """
    peak, final = config.learning_rate, min(config.final_learning_rate, config.learning_rate)
    warmup = min(config.warmup_steps, num_steps)
    rest = num_steps - warmup
    pieces: list[tuple[int, optax.Schedule]] = [(0, optax.linear_schedule(0.0, peak, warmup))] if warmup else []
    kind = config.schedule
    if kind == "auto":
        kind = "constant" if config.name == "schedule-free" else "cosine"
    match kind:
        case "cosine":
            alpha = final / peak if peak else 0.0
            pieces += [(warmup, optax.cosine_decay_schedule(peak, max(rest, 1), alpha))]
        case "linear":
            pieces += [(warmup, optax.linear_schedule(peak, final, rest))]
        case "wsd":
            decay = min(round(config.decay_fraction * num_steps), rest)
            pieces += [(warmup, optax.constant_schedule(peak))]
            pieces += [(num_steps - decay, optax.linear_schedule(peak, final, decay))]
        case "constant":
            pieces += [(warmup, optax.constant_schedule(peak))]
        case "rsqrt":
            pieces += [(warmup, _rsqrt(peak, max(warmup, 1)))]
    starts, schedules = zip(*pieces)
    return optax.join_schedules(schedules, starts[1:])


def _rsqrt(peak: float, start: int) -> optax.Schedule:
    """peak x sqrt(start / step), where the step is counted from `start`."""

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        return peak * jnp.sqrt(start / (jnp.asarray(count) + start))

    return rate
