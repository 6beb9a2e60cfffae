"""Meshes: six named axes over devices that are placed by their links.

`data=2,fsdp=-1,tensor=4` is the whole language. A mesh always has all six axes, of size 1 where none was
asked for, so that no code asks whether an axis exists. Outer axes cross slow links and inner axes stay on
fast ones: devices are grouped into granules (TPU slices, NVLink domains, else processes), each granule is
laid out by its own topology, and the granules lie along the outer factors of the axes.
"""

import difflib
import functools
import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "pipe", "fsdp", "expert", "context", "tensor")
"""Outermost first: in the order of the links they may cross, slowest to fastest."""


def parse_mesh(text: str, num_devices: int) -> dict[str, int]:
    """Reads a mesh such as "data=2,fsdp=-1,tensor=2".

    Args:
      text: axes with their sizes; -1, once, takes the devices that are left. Empty: all devices on fsdp.
      num_devices: what the sizes must multiply to.

    Returns:
      The size of every axis of MESH_AXES, in that order.

    Raises:
      ValueError: the text is no mesh, or its sizes do not multiply to num_devices; names the nearest that do.
    """
    if num_devices < 1:
        raise ValueError(f"a mesh needs at least one device, not {num_devices}")
    return _parse(text or "fsdp=-1", "mesh", num_devices, "devices", dict.fromkeys(MESH_AXES, num_devices))


def num_devices_of(text: str) -> int | None:
    """How many devices a mesh's text asks for; None where it leaves that open (empty, or with a -1)."""
    sizes = _sizes(text, "mesh") if text else {}
    return _product(sizes) if sizes and -1 not in sizes.values() else None


def build_mesh(mesh: str, dcn_mesh: str = "", devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a Mesh of all six axes, each AxisType.Explicit, the nearest devices along the innermost axes.

    Granules, between which the network is slow, are slices where devices have several `slice_index` (and
    always on TPU, whose slices span processes); otherwise processes, that is, hosts.

    Args:
      mesh: the whole mesh, as in `parse_mesh`; its product is the number of devices.
      dcn_mesh: how much of each axis lies across granules, as the outer factor of that axis: "data=2" of a
        mesh "data=4,fsdp=8" on two slices. Its product is the number of granules. Empty: the outermost axes,
        as much of them as it takes.
      devices: those of all processes, running or compile-only; by default `jax.devices()`.

    Raises:
      ValueError: as `parse_mesh`, for either text; or a dcn_mesh for one granule, for granules of different
        sizes, or with a factor that does not divide its axis.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = parse_mesh(mesh, len(devices))
    granules, key = _granules(devices)
    counts = [len(granule) for granule in granules]
    if len(set(counts)) == 1:
        placed = _place(granules, sizes, _dcn_factors(dcn_mesh, sizes, granules, key))
    elif not dcn_mesh:
        placed = np.array([device for granule in granules for device in granule])
    else:
        raise ValueError(
            f"dcn_mesh '{dcn_mesh}' needs granules (one per {key}) of one size, but they have "
            f"{min(counts)} to {max(counts)} devices: leave it out or use whole granules"
        )
    axis_types = (AxisType.Explicit,) * len(MESH_AXES)
    return Mesh(placed.reshape(tuple(sizes.values())), MESH_AXES, axis_types=axis_types)


@functools.cache
def torus_factors(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Factors of an axis's size, slowest first, such that what one of them counts are devices along one dimension of a
    TPU slice's torus: of fsdp=256 on 16x16 chips, 16 and 16. One factor for other devices, and where they lie
    otherwise."""
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)[:, 0]
    if line[0].platform != "tpu" or len({getattr(device, "slice_index", 0) for device in line}) > 1:
        return (line.size,)
    coords = np.array([device.coords for device in line])
    factors: list[int] = []
    while len(coords) > 1:
        across = coords[1] == coords[0]
        has_left = (coords != coords[0])[:, across].any(axis=1)
        length = int(np.argmax(has_left)) if has_left.any() else len(coords)
        if across.sum() != coords.shape[1] - 1 or len(coords) % length:
            return (line.size,)
        lines = coords.reshape(-1, length, coords.shape[1])
        if (lines != lines[:, :1])[:, :, across].any():
            return (line.size,)
        factors.insert(0, length)
        coords = lines[:, 0]
    return tuple(factors) or (1,)


def num_torus_dims(mesh: Mesh, axes: Sequence[str]) -> int:
    """Of a TPU slice's torus, those along which the ranks of these axes together have more than two places; 0 for other
    devices."""
    rest = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    devices = mesh.devices[rest].ravel()
    if devices[0].platform != "tpu":
        return 0
    coords = np.array([device.coords for device in devices])
    return sum(len(np.unique(places)) > 2 for places in coords.T)


def slice_factors(mesh: Mesh) -> dict[str, int]:
    """In how many of several TPU slices each axis has ranks; 1 for other devices."""

    def num_slices(axis: str) -> int:
        line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)[:, 0]
        return len({getattr(device, "slice_index", 0) for device in line}) if line[0].platform == "tpu" else 1

    return {axis: num_slices(axis) for axis in mesh.axis_names}


def _granules(devices: Sequence[jax.Device]) -> tuple[list[list[jax.Device]], str]:
    """Groups of devices with only fast links inside, and the attribute that tells them apart."""
    is_tpu = devices[0].platform == "tpu"
    # CPU devices and compile-only TPUs have no slice_index; compile-only GPUs have 0 everywhere.
    slices = [getattr(device, "slice_index", 0) for device in devices]
    by_slice = is_tpu or len(set(slices)) > 1
    groups = defaultdict(list)
    for device, slice_index in zip(devices, slices):
        groups[slice_index if by_slice else device.process_index].append(device)
    granules = [groups[index] for index in sorted(groups)]
    if not is_tpu:  # mesh_utils places TPUs by coordinates, and wants them in the order of jax.devices()
        granules = [sorted(granule, key=lambda device: device.id) for granule in granules]
    return granules, "slice_index" if by_slice else "process_index"


def _dcn_factors(
    dcn_mesh: str, sizes: Mapping[str, int], granules: Sequence[Sequence[jax.Device]], key: str
) -> dict[str, int]:
    """The outer factor of every axis; their product is the number of granules."""
    num_granules = len(granules)
    if dcn_mesh:
        if num_granules == 1 and _product(_sizes(dcn_mesh, "dcn_mesh")) > 1:
            raise ValueError(
                f"dcn_mesh '{dcn_mesh}' spreads axes over several granules, but the "
                f"{len(granules[0])} devices are one (they share their {key}): leave it out"
            )
        return _parse(dcn_mesh, "dcn_mesh", num_granules, f"granules (one per {key})", sizes)
    factors = {}
    for axis, size in sizes.items():
        factors[axis] = math.gcd(size, num_granules)
        num_granules //= factors[axis]
    assert num_granules == 1, "the number of granules divides the number of devices"
    return factors


def _place(
    granules: Sequence[Sequence[jax.Device]], sizes: Mapping[str, int], factors: Mapping[str, int]
) -> np.ndarray:
    """Lays each granule out by its topology, and the granules along the outer factors of the axes."""
    outer = [factors[axis] for axis in sizes]
    inner = [size // factors[axis] for axis, size in sizes.items()]
    # Not create_hybrid_device_mesh, which needs a slice_index that compile-only TPUs do not have.
    blocks = np.stack(
        [mesh_utils.create_device_mesh(inner, granule, allow_split_physical_axes=True) for granule in granules]
    )
    side_by_side = [dim for axis in range(len(sizes)) for dim in (axis, len(sizes) + axis)]
    return blocks.reshape(outer + inner).transpose(side_by_side)


def _parse(text: str, name: str, total: int, unit: str, multiples: Mapping[str, int]) -> dict[str, int]:
    """Sizes of all axes that multiply to `total`, each a divisor of the axis's number in `multiples`."""
    asked = _sizes(text, name)
    known = _product(asked)
    free = [axis for axis, size in asked.items() if size == -1]
    bad = [f"{axis}={size}" for axis, size in asked.items() if size < 1 and size != -1]
    if bad:
        problem = f"has {bad[0]}, but a size is a positive integer, or -1 for what is left of {total} {unit}"
    elif len(free) > 1:
        problem = f"gives -1 to {' and '.join(free)}, but only one axis can take the rest of {total} {unit}"
    elif free and total % known:
        problem = f"leaves {free[0]} no whole size: {known} does not divide {total} {unit}"
    elif not free and known != total:
        problem = f"multiplies to {known}, but there are {total} {unit}"
    else:
        sizes = dict.fromkeys(MESH_AXES, 1) | asked | dict.fromkeys(free, total // known)
        misfits = [axis for axis, size in sizes.items() if multiples[axis] % size]
        if not misfits:
            return sizes
        axis = misfits[0]
        problem = f"has {axis}={sizes[axis]}, which does not divide the mesh's {axis}={multiples[axis]}"
    nearest = _nearest(asked, total, multiples)
    if not nearest:  # a dcn_mesh over axes that are too small; over all that the mesh has, one always works
        nearest = _nearest({axis: 1 for axis in MESH_AXES if multiples[axis] > 1} | asked, total, multiples)
    raise ValueError(f"{name} '{text}' {problem}; nearest that work: {'; '.join(nearest)}")


def _sizes(text: str, name: str) -> dict[str, int]:
    """The named axes and their sizes as written."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = (part.strip() for part in item.partition("="))
        if not axis or not size:
            raise ValueError(f"{name} '{text}' has an item '{item}': write axis=size, as in 'data=2,fsdp=4'")
        if axis not in MESH_AXES:
            close = difflib.get_close_matches(axis, MESH_AXES, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{name} '{text}' has no axis '{axis}': did you mean '{close}'? The axes are {', '.join(MESH_AXES)}"
            )
        if axis in sizes:
            raise ValueError(f"{name} '{text}' gives {axis} twice: give each axis one size")
        try:
            sizes[axis] = int(size)
        except ValueError:
            raise ValueError(f"{name} '{text}' has {axis}={size}, but a size is a whole number") from None
    return sizes


def _product(sizes: Mapping[str, int]) -> int:
    """Of the sizes that are known, so not of a -1."""
    return math.prod(size for size in sizes.values() if size != -1)


def _nearest(asked: Mapping[str, int], total: int, multiples: Mapping[str, int]) -> list[str]:
    """Up to three meshes over the same axes that work: the fewest sizes changed, then by the least ratios."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    # For each product of the axes so far its best ways: (sizes changed, sum of |log2 ratio|, sizes).
    best: dict[int, list[tuple[int, float, tuple[int, ...]]]] = {1: [(0, 0.0, ())]}
    for axis, size in asked.items():
        ways: dict[int, list[tuple[int, float, tuple[int, ...]]]] = defaultdict(list)
        for product, heads in best.items():
            for d in divisors:
                if total // product % d or multiples[axis] % d:
                    continue
                changed, ratio = int(d != size), abs(math.log2(d) - math.log2(max(size, 1)))
                if size == -1:
                    changed, ratio = 0, 0.0
                ways[product * d] += [(c + changed, r + ratio, (*head, d)) for c, r, head in heads]
        best = {product: heapq.nsmallest(3, tails) for product, tails in ways.items()}
    return [",".join(f"{axis}={d}" for axis, d in zip(asked, sizes)) for _, _, sizes in best.get(total, [])]
