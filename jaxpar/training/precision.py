"""Number formats: which dtype for what, float16's loss scale, and rounding for parameters kept in bfloat16 alone."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.config import RunConfig


@dataclass(frozen=True)
class Precision:
    """dtypes of the master parameters, of compute, and of the gradients' sums over the FSDP axes."""

    params: jnp.dtype
    compute: jnp.dtype
    reduce: jnp.dtype

    @classmethod
    def of(cls, config: RunConfig) -> "Precision":
        wide = "float64" if config.precision == "float64" else "float32"
        params, reduce = (
            jnp.dtype(wide if asked == "auto" else asked) for asked in (config.params_dtype, config.reduce_dtype)
        )
        return cls(params=params, compute=jnp.dtype(config.precision), reduce=reduce)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """Float16's: halved by a step whose gradients overflow, and which is then left out; doubled after 2,000 that did
    not (arXiv 1710.03740, section 3.2)."""

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]

    @classmethod
    def initial(cls) -> "LossScale":
        return cls(jnp.float32(2.0**15), jnp.int32(0))

    def after(self, is_finite: Bool[Array, ""]) -> "LossScale":
        good = jnp.where(is_finite, self.good_steps + 1, 0)
        doubled = good == _GOOD_STEPS
        scale = jnp.where(is_finite, jnp.where(doubled, 2 * self.scale, self.scale), self.scale / 2)
        return LossScale(jnp.clip(scale, 1.0, 2.0**24), jnp.where(doubled, 0, good))


_GOOD_STEPS = 2000


def round_stochastically(params: PyTree, dtype: jnp.dtype, step: Int[Array, ""]) -> PyTree:
    """float32 arrays as bfloat16 ones whose expectation they are: an update far below a parameter's last digit is not
    lost, but taken now and then (arXiv 2010.06192). What `step` draws is the same on every mesh."""
    assert dtype == jnp.bfloat16
    key = jax.random.fold_in(jax.random.key(0), step)
    leaves, tree = jax.tree.flatten(params)

    def rounded(index: int, x: Float[Array, "..."]) -> Float[Array, "..."]:
        sharding = jax.typeof(x).sharding
        out = None if sharding.mesh.empty else sharding
        noise = jax.random.bits(jax.random.fold_in(key, index), x.shape, jnp.uint32, out_sharding=out) >> 16
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + noise
        kept = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.where(jnp.isfinite(x), kept, x).astype(dtype)

    return jax.tree.unflatten(tree, [rounded(*item) for item in enumerate(leaves)])
