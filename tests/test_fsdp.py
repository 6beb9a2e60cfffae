"""Collectives in steps along a torus are those in one step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.fsdp import gathered, reduce_scatter
from meshes import build_mesh, torus_factors


@pytest.mark.parametrize("folds", [(("fsdp", (2, 2)),), (("fsdp", (4,)), ("context", (2,)))])
def test_steps_end_where_one_step_does(folds):
    mesh = build_mesh("fsdp=4,context=2", devices=jax.devices()[:8])
    axes = "context", "fsdp"
    addends = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16, 3)))

    def scattered(folds):
        def local(x):
            return reduce_scatter(x[0], ((0, axes),), folds)

        region = jax.shard_map(local, in_specs=P(axes, None, None), out_specs=P(axes, None), check_vma=False)
        return np.asarray(region(jax.reshard(addends, P(axes, None, None))))

    with jax.set_mesh(mesh):
        found, in_one = scattered(folds), scattered(())
    np.testing.assert_allclose(found, np.sum(addends, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found, in_one, rtol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "folds", "num_gathers"),
    [
        ("fsdp=8,context=2", (("fsdp", (2, 2, 2)),), 3),
        ("fsdp=8,context=2", (("fsdp", (2, 4)), ("context", (2,))), 1),
        ("fsdp=2,context=8", (("fsdp", (2,)), ("context", (2, 2, 2))), 3),
    ],
)
def test_a_weight_is_gathered_in_its_order(mesh, folds, num_gathers):
    axes = "context", "fsdp"
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(32, 3)))

    def local(part):
        return gathered(part, ((0, axes),), jnp.dtype("float64"), folds)

    with jax.set_mesh(build_mesh(mesh, devices=jax.devices()[:16])):
        whole = jax.jit(jax.shard_map(local, in_specs=P(axes, None), out_specs=P(None, None), check_vma=False))
        cut = jax.reshard(weight, P(axes, None))
        assert str(jax.make_jaxpr(whole)(cut)).count("all_gather[") == num_gathers
        np.testing.assert_array_equal(whole(cut), weight)


@pytest.mark.parametrize(
    ("topology", "mesh", "factors"),
    [
        ("v5e:16x16", "fsdp=256", {"fsdp": (16, 16)}),
        ("v5e:16x16", "fsdp=64,context=4", {"fsdp": (4, 16), "context": (4,)}),
        ("v5p:4x4x4", "fsdp=64", {"fsdp": (4, 4, 4)}),
    ],
)
def test_factors_of_a_torus(monkeypatch, topology, mesh, factors):
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


def test_other_devices_are_no_torus():
    assert torus_factors(build_mesh("fsdp=8", devices=jax.devices()[:8]), "fsdp") == (8,)
