"""Optimizers by name, through optax, over plain trees of parameters of any sharding: state lies as its parameter."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jaxpar.config import OptimizerConfig
from jaxpar.numerics import widened
from jaxpar.training.optimizers.adafactor import scale_by_adafactor
from jaxpar.training.optimizers.averages import average_params, evaluation_params
from jaxpar.training.optimizers.groups import decay_mask, is_kernel, learning_rate_factors
from jaxpar.training.optimizers.matrices import Matrix, as_matrix
from jaxpar.training.optimizers.muon import scale_by_muon
from jaxpar.training.optimizers.schedules import schedule

__all__ = ["abstract_state", "clip", "evaluation_params", "kept_in", "make", "schedule", "true_shapes"]


def make(
    config: OptimizerConfig, num_steps: int, names: PyTree, vocab_size: int | None = None
) -> optax.GradientTransformation:
    """The optimizer that `config.name` says, its moments in `config.state_dtype`. `names` has each parameter's logical
    axes; Adafactor needs the vocabulary's size without padding. Updates are in at least float32.

    adamw (arXiv 1711.05101), lion (2302.06675) and sgd with momentum beta1 are optax's. adafactor (1804.04235) has no
    momentum and no beta; its learning rate is relative to a parameter's scale. muon (2502.16982) takes the kernels of
    blocks, with momentum beta1, and AdamW the rest, with the same settings. schedule-free (2405.15682) is over AdamW
    without momentum: beta1 is its interpolation, the learning rate is warmed up and then constant.

    Weight decay is decoupled from gradients and multiplied by the learning rate in all of them. With `config.ema`, the
    state holds an average of the parameters too: see evaluation_params. Raises ValueError, in one line, for settings
    that do not go together and patterns that match no parameter.
    """
    _check(config)
    rate = schedule(config, num_steps)
    parts = [
        _moments(config, names, vocab_size),
        optax.add_decayed_weights(config.weight_decay, decay_mask(config.decay_groups, names)),
    ]
    if config.learning_rate_groups:
        factors = learning_rate_factors(config.learning_rate_groups, names)
        parts.append(optax.stateless(lambda updates, _: jax.tree.map(lambda u, factor: factor * u, updates, factors)))
    parts.append(optax.scale_by_learning_rate(rate))
    if config.name == "schedule-free":
        parts = [_schedule_free(optax.chain(*parts), rate, config.beta1)]
    if config.ema:
        parts.append(average_params(config.ema))
    return optax.chain(*parts)


def _check(config: OptimizerConfig) -> None:
    for flag, value in (
        ("--optimizer.beta1", config.beta1),
        ("--optimizer.beta2", config.beta2),
        ("--ema", config.ema),
    ):
        if value >= 1:
            raise ValueError(f"{flag} is {value}; it must be below 1, or nothing new is ever averaged in")
    if config.name == "adafactor" and config.state_dtype != "auto":
        raise ValueError(
            f"--optimizer-dtype {config.state_dtype} has no use with adafactor, whose statistics are few and of at "
            "least float32; leave it at auto"
        )
    if config.name == "schedule-free":
        if config.schedule not in ("auto", "constant"):
            raise ValueError(f"schedule-free takes the place of --schedule {config.schedule}; leave that at auto")
        if config.beta1 == 0:
            raise ValueError("--optimizer.beta1 is 0.0; schedule-free needs more than that, such as 0.9")
        if config.ema:
            raise ValueError(f"--ema {config.ema} has no use with schedule-free, which averages already; set --ema 0")


def _moments(config: OptimizerConfig, names: PyTree, vocab_size: int | None) -> optax.GradientTransformation:
    beta1, beta2, eps = config.beta1, config.beta2, config.eps

    def stored(own: jnp.dtype) -> jnp.dtype:
        return own if config.state_dtype == "auto" else jnp.dtype(config.state_dtype)

    match config.name:
        case "adamw":
            return kept_in(stored, optax.scale_by_adam(beta1, beta2, eps), max(beta1, beta2))
        case "lion":
            return kept_in(stored, optax.scale_by_lion(beta1, beta2), max(beta1, beta2))
        case "sgd":
            return kept_in(stored, optax.trace(beta1), beta1)
        case "adafactor":
            assert vocab_size is not None
            return kept_in(widened, scale_by_adafactor(names, vocab_size), 1.0)
        case "schedule-free":
            rms = optax.scale_by_rms(beta2, eps, eps_in_sqrt=False, bias_correction=True)
            return kept_in(stored, rms, beta2)
        case "muon":
            matrices = jax.tree.map(_muon_matrix, names, is_leaf=_is_names)
            labels = jax.tree.map(lambda axes: "muon" if _is_muons(axes) else "adamw", names, is_leaf=_is_names)
            kinds = {"muon": scale_by_muon(beta1, eps, matrices), "adamw": optax.scale_by_adam(beta1, beta2, eps)}
            return kept_in(stored, optax.partition(kinds, labels), max(beta1, beta2))


def _is_names(node: object) -> bool:
    return isinstance(node, tuple)


def _is_muons(axes: tuple[str | None, ...]) -> bool:
    return is_kernel(axes) and "vocab" not in axes


def _muon_matrix(axes: tuple[str | None, ...]) -> Matrix | optax.MaskedNode:
    matrix = as_matrix(axes) if _is_muons(axes) else None
    return matrix or optax.MaskedNode()


def kept_in(
    stored: Callable[[jnp.dtype], jnp.dtype], tx: optax.GradientTransformation, slowest: float
) -> optax.GradientTransformation:
    """`tx` computed in at least float32, its arrays between steps in stored(the parameters' dtype); scalars stay wide.

    A moment moves by (1 - beta) of its distance to the new value, and rounding to nearest takes back what is below
    half a step of the dtype, which is 2^-8 of the value in bfloat16. At beta 0.95 a second moment comes to rest up to
    8% off, an update 4%. At a beta above 1 - 2^-8 = 0.996 it could rise but never fall, and learning would slow down
    for good: ValueError at init, where `slowest`, the largest beta, is that.
    """

    def wide(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(widened(x.dtype)), tree)

    def init(params: PyTree) -> PyTree:
        dtype = stored(jnp.dtype(optax.tree.dtype(params, "lowest")))
        if dtype == jnp.bfloat16 and slowest > _LARGEST_BFLOAT16_BETA:
            raise ValueError(
                f"a beta of {slowest} is above {_LARGEST_BFLOAT16_BETA:.3f}, the most that moments in bfloat16 can "
                "follow; lower it or set --optimizer-dtype float32"
            )
        return jax.tree.map(lambda x: x.astype(dtype) if x.ndim and _is_float(x) else x, tx.init(wide(params)))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        like = jax.eval_shape(tx.init, wide(params))
        updates, new = tx.update(wide(grads), jax.tree.map(_cast, state, like), wide(params))
        return updates, jax.tree.map(_cast, new, state)

    return optax.GradientTransformation(init, update)


_LARGEST_BFLOAT16_BETA = 1 - 2**-8


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _cast(x: jax.Array, like: Any) -> jax.Array:
    return x.astype(like.dtype)


def _schedule_free(
    base: optax.GradientTransformation, rate: optax.Schedule, beta1: float
) -> optax.GradientTransformation:
    """optax's, which keeps z in the state; the average x is read out of the parameters, so that these must be exact."""
    inner = optax.contrib.schedule_free(base, rate, beta1)

    def init(params: PyTree) -> PyTree:
        dtype = jnp.dtype(optax.tree.dtype(params, "lowest"))
        if dtype.itemsize < 4:
            raise ValueError(
                f"schedule-free reads its average out of the parameters, whose rounding in {dtype} would add up in "
                "it; set --params-dtype auto"
            )
        return inner.init(params)

    return optax.GradientTransformation(init, inner.update)


def abstract_state(tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | None) -> PyTree:
    """Shapes, dtypes and shardings of tx's state for abstract parameters, as their types say: moments lie as the
    parameter does, what is summed over a dim is cut as the other dims are, scalars are whole."""
    if mesh is None:
        return jax.eval_shape(tx.init, params)

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding is not None else P(*[None] * len(leaf.shape))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.tree.map(placed, jax.eval_shape(tx.init, params))


def true_shapes(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """The state's shapes without padding, in the tree of abstract_state, of abstract parameters without padding."""
    return jax.eval_shape(tx.init, params)


def clip(grads: PyTree, norm: jax.Array, limit: float) -> PyTree:
    """Gradients scaled so that their global norm, which is `norm`, is at most `limit`; 0 is no limit."""
    if limit == 0:
        return grads
    factor = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
