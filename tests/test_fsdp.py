"""A reduce-scatter in steps along a torus is the one in one step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.fsdp import Folds, gathered, reduce_scatter
from meshes import build_mesh, num_torus_dims, torus_factors


@pytest.mark.parametrize(
    ("shape", "dim"), [((16, 3), 0), ((1, 16, 3), 1), ((2, 16, 3, 5), 1), ((2, 3, 16), 2), ((3, 16), 1)]
)
@pytest.mark.parametrize("factors", [(("fsdp", (2, 2)),), (("fsdp", (4,)), ("context", (2,)))])
def test_steps_end_where_one_step_does(factors, shape, dim):
    mesh = build_mesh("fsdp=4,context=2", devices=jax.devices()[:8])
    axes = "context", "fsdp"
    addends = jnp.asarray(np.random.default_rng(0).normal(size=(8, *shape)))

    def scattered(folds):
        def local(x):
            return reduce_scatter(x[0], ((dim, axes),), folds)

        end = P(*(axes if i == dim else None for i in range(len(shape))))
        region = jax.shard_map(local, in_specs=P(axes), out_specs=end, check_vma=False)
        return np.asarray(region(jax.reshard(addends, P(axes))))

    with jax.set_mesh(mesh):
        found, in_one = scattered(Folds(factors)), scattered(Folds())
    np.testing.assert_allclose(found, np.sum(addends, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found, in_one, rtol=1e-12)


@pytest.mark.parametrize("wide", [[{"fsdp"}], [{"context", "fsdp"}], [{"context", "fsdp"}, {"fsdp"}]])
def test_a_gather_in_steps_is_the_one_in_one(wide):
    mesh = build_mesh("fsdp=4,context=2", devices=jax.devices()[:8])
    folds = Folds((("fsdp", (2, 2)), ("context", (2,))), frozenset(map(frozenset, wide)))
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)))
    for axes in ("fsdp",), ("context", "fsdp"):

        def local(x, axes=axes):
            return gathered(x, ((1, axes),), jnp.dtype("float64"), folds)

        region = jax.shard_map(local, in_specs=P(None, axes), out_specs=P(None, None), check_vma=False)
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(region(jax.reshard(weight, P(None, axes))), weight)


@pytest.mark.parametrize(
    ("topology", "mesh", "factors", "num_dims"),
    [
        ("v5e:16x16", "fsdp=256", {"fsdp": (16, 16)}, 2),
        ("v5e:16x16", "fsdp=64,context=4", {"fsdp": (4, 16), "context": (4,)}, 2),
        ("v5p:4x4x4", "fsdp=64", {"fsdp": (4, 4, 4)}, 3),
        ("v5p:2x4x4", "fsdp=32", {"fsdp": (2, 4, 4)}, 2),
    ],
)
def test_factors_of_a_torus(monkeypatch, topology, mesh, factors, num_dims):
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }.items():
        monkeypatch.setenv(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    placed = build_mesh(mesh, "", devices)
    assert {axis: torus_factors(placed, axis) for axis in factors} == factors
    assert num_torus_dims(placed, tuple(factors)) == num_dims


def test_other_devices_are_no_torus():
    assert torus_factors(build_mesh("fsdp=8", devices=jax.devices()[:8]), "fsdp") == (8,)
