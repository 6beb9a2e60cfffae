"""What each rank keeps under ZeRO-1, 2 and 3, measured on the arrays: arXiv 1910.02054, figure 1 and table 1."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import Config, DataConfig, ParallelConfig, RunConfig
from jaxpar.training import optimizers, setup
from jaxpar.training.gradients import differentiated
from jaxpar.training.step import init_state
from models.config import ModelConfig

MODEL = ModelConfig(vocab_size=512, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128)


def bytes_per_parameter(zero: int, mesh: str) -> dict[str, float]:
    """Of kernels and embeddings, on device 0; vectors (norms) are whole everywhere."""
    config = Config(
        model=MODEL,
        data=DataConfig(batch_size=16, seq_len=8),
        parallel=ParallelConfig(mesh=mesh, zero=zero),
        run=RunConfig(precision="bfloat16", reduce_dtype="bfloat16" if zero == 2 else "auto"),
    )
    model = setup.make_model(config, setup.make_mesh(config, jax.devices()[:8]))
    names = jax.tree.leaves(model.names, is_leaf=lambda node: isinstance(node, tuple))
    is_kernel = ["embed" in name for name in names]
    num_parameters = sum(leaf.size for leaf, keep in zip(jax.tree.leaves(model.abstract), is_kernel) if keep)

    def kept(tree) -> float:
        leaves = [leaf for leaf, keep in zip(jax.tree.leaves(tree), is_kernel, strict=True) if keep]
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / num_parameters

    def one_ranks(weights) -> jax.Array:
        """Bytes of what the gradients come as, in the region."""
        leaves = jax.tree.leaves(differentiated(model, weights)[0])
        return jnp.float32(sum(leaf.size * leaf.dtype.itemsize for leaf, keep in zip(leaves, is_kernel) if keep))

    with jax.set_mesh(model.layout.mesh):
        state = init_state(model, optimizers.make(config.optimizer, 10, model.names), seed=0)
        moments = state.opt_state[0]
        weights = state.params if state.whole is None else state.whole
        gradients = model.layout.region(one_ranks, (model.computed_specs,), P())(weights)
    return {
        "parameters": kept(state.whole) if state.whole is not None else 0.0,
        "gradients": float(gradients) / num_parameters,
        "optimizer": kept(state.params) + kept(moments.mu) + kept(moments.nu),
    }


@pytest.mark.parametrize(
    "mesh", ["data=2,fsdp=4", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("data=8", "fsdp=8"))]
)
def test_figure_1(mesh):
    n = 8
    assert bytes_per_parameter(1, mesh) == {"parameters": 2, "gradients": 2, "optimizer": 12 / n}
    assert bytes_per_parameter(2, mesh) == {"parameters": 2, "gradients": 2 / n, "optimizer": 12 / n}


def test_figure_1_of_fsdp():
    # Master parameters are cut like all else and no copy is kept: gradients in float32 take its place.
    assert sum(bytes_per_parameter(3, "fsdp=8").values()) == 16 / 8


def test_table_1():
    """7.5 billion parameters on 64 devices, in GB, as published: what test_figure_1 measures on 8."""
    assert pytest.approx(31.4, abs=0.05) == 7.5 * (2 + 2 + 12 / 64)
    assert pytest.approx(16.6, abs=0.05) == 7.5 * (2 + 2 / 64 + 12 / 64)
    assert pytest.approx(1.9, abs=0.05) == 7.5 * 16 / 64
