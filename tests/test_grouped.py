"""Grouped matmul: each backend's kernel against plain products, and what they compile to without the backend."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.audit.topology import gpu_devices
from jaxpar.kernels import grouped

ROWS, DEPTH, COLUMNS = 300, 64, 32


def product_and_gradients(kernel: str, rows, matrices, sizes):
    # As `product`, but that kernels of other backends are interpreted.
    out, pull = jax.vjp(lambda x, w: grouped._product(kernel, True, x, w, sizes), rows, matrices)
    return out, *pull(jnp.cos(out))


@pytest.mark.parametrize("kernel", ["dense", "triton", "tpu"])
@pytest.mark.parametrize("sizes", [[100, 0, 57, 100], [0, 0, 300, 0], [1, 2, 3, 4], [0, 0, 0, 0]], ids=str)
def test_every_kernel_multiplies_each_group_by_its_own_matrix(kernel, sizes):
    rng = np.random.default_rng(0)
    with jax.enable_x64(kernel != "tpu"):  # whose kernels have no 64-bit numbers
        dtype = jnp.float32 if kernel == "tpu" else jnp.float64
        rows, matrices = rng.normal(size=(ROWS, DEPTH)), rng.normal(size=(len(sizes), DEPTH, COLUMNS))
        rows[sum(sizes) :] = np.nan  # what a buffer holds beyond its last group
        arrays = jnp.asarray(rows, dtype), jnp.asarray(matrices, dtype), jnp.asarray(sizes, jnp.int32)
        got = [np.asarray(x, np.float64) for x in product_and_gradients(kernel, *arrays)]
    out, drows, dmatrices = np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, DEPTH)), np.zeros_like(matrices)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends)):
        part = slice(start, end)
        out[part] = rows[part] @ matrices[group]
        drows[part] = np.cos(out[part]) @ matrices[group].T
        dmatrices[group] = rows[part].T @ np.cos(out[part])
    for a, b in zip(got, (out, drows, dmatrices)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 if dtype == jnp.float64 else 1e-4)


@pytest.mark.parametrize("sizes", [[128, 128, 128], [1, 0, 1, 382], [0, 0, 0], [384], [127, 129, 5]], ids=str)
def test_tiles_cover_every_row_once(sizes):
    tile, num_rows = 32, 384
    group, at = (np.asarray(x) for x in grouped.visits(jnp.asarray(sizes, jnp.int32), num_rows, tile))
    ends = np.cumsum(sizes)
    covered = np.zeros(num_rows, int)
    for g, t in zip(group, at):
        if g < len(sizes):
            rows = np.arange(t * tile, (t + 1) * tile)
            covered[rows[(rows >= ends[g] - sizes[g]) & (rows < ends[g])]] += 1
    np.testing.assert_array_equal(covered, np.arange(num_rows) < sum(sizes))
    assert (group < len(sizes)).sum() <= -(-sum(sizes) // tile) + len(sizes) - 1 if sum(sizes) else True


def compiled(device: jax.Device, kernel: str, num_rows: int, num_groups: int, depth: int, columns: int):
    # Triton's lowering asks the current mesh what it compiles for.
    mesh = jax.sharding.Mesh([device], "x", axis_types=(AxisType.Explicit,))

    def like(*shape: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def function(rows, matrices, sizes, cotangent):
        out, pull = jax.vjp(lambda x, w: grouped.product(kernel, x, w, sizes), rows, matrices)
        return out, pull(cotangent)

    arguments = like(num_rows, depth), like(num_groups, depth, columns), like(num_groups, dtype=jnp.int32)
    local = jax.shard_map(function, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.enable_x64(False), jax.set_mesh(mesh):
        return jax.jit(local).lower(*arguments, like(num_rows, columns)).compile()


def test_on_h100s_three_kernels_do_the_work_of_the_rows_and_no_more():
    num_rows, num_groups, depth, columns = 32768, 8, 1024, 2048
    text = compiled(gpu_devices("h100:1x1")[0], "triton", num_rows, num_groups, depth, columns).as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    assert not re.search(r" (dot|convolution)\(", text)
    # A kernel's tiles are as many as the list of visits that it is given: the first operand.
    visits = {int(n) for n in re.findall(r"operand_layout_constraints=\{s32\[(\d+)\]\{0\}, s32\[\1\]\{0\}, s32", text)}
    tiles = visits - {num_groups}
    assert tiles == {num_rows // grouped.ROWS + num_groups - 1}
    assert num_rows <= tiles.pop() * grouped.ROWS <= 1.05 * num_rows


def test_each_platform_has_its_kernel_within_its_limits():
    bf16, f64 = jnp.dtype("bfloat16"), jnp.dtype("float64")
    assert grouped.choose("gpu", bf16, (4096, 1792)) == "triton"
    assert grouped.choose("tpu", bf16, (4096, 1792)) == "tpu"
    assert grouped.choose("tpu", bf16, (4096, 96)) == "dense"
    assert grouped.choose("gpu", bf16, (4096, 24)) == "dense"
    assert grouped.choose("gpu", f64, (4096, 1792)) == "dense"
    assert grouped.choose("cpu", bf16, (4096, 1792)) == "dense"
