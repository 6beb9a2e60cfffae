"""meshes/mesh.py: what a mesh's text means, what its errors say, and which device lies where."""

import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshes import MESH_AXES, build_mesh, parse_mesh

GPU_TARGETS = Path(__file__).parent.parent / "meshes" / "gpu_targets"


@dataclass(eq=False)
class Device:
    """As much of a jax.Device as placement looks at."""

    id: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


@dataclass(eq=False)
class SliceDevice(Device):
    slice_index: int = 0


@dataclass(eq=False)
class TpuDevice(SliceDevice):
    platform: str = "tpu"
    device_kind: str = "TPU v4"
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def tpu_slices(num_slices: int, side: int, devices_per_process: int) -> list[TpuDevice]:
    """Cubes of chips, in the order of jax.devices(): x fastest."""
    coords = [(x, y, z) for z in range(side) for y in range(side) for x in range(side)]
    places = enumerate(itertools.product(range(num_slices), coords))
    return [TpuDevice(i, i // devices_per_process, slice_index=s, coords=xyz) for i, (s, xyz) in places]


@pytest.fixture(scope="module")
def h100s() -> list[jax.Device]:
    """Four hosts of eight, compile-only; slice_index is 0 everywhere."""
    target = (GPU_TARGETS / "h100_min.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", topology="1x4x8", target_config=target)
    devices: list[jax.Device] = list(topology.devices)
    assert [device.process_index for device in devices] == [i // 8 for i in range(32)]
    return devices


def attribute(mesh: jax.sharding.Mesh, name: str) -> np.ndarray:
    """Of every device, in the mesh's shape without the axes of size 1."""
    return np.vectorize(lambda device: getattr(device, name))(mesh.devices).squeeze()


@pytest.mark.parametrize(
    ("text", "num_devices", "sizes"),
    [
        ("", 8, {"fsdp": 8}),
        ("", 1, {}),
        ("tensor=8", 8, {"tensor": 8}),
        ("data=2,fsdp=-1,tensor=2", 16, {"data": 2, "fsdp": 4, "tensor": 2}),
        ("tensor=2, data=-1", 2, {"tensor": 2, "data": 1}),
        (
            "data=1,pipe=16,fsdp=8,expert=1,context=16,tensor=8",
            16_384,
            {"pipe": 16, "fsdp": 8, "context": 16, "tensor": 8},
        ),
    ],
)
def test_parse(text, num_devices, sizes):
    parsed = parse_mesh(text, num_devices)
    assert parsed == dict.fromkeys(MESH_AXES, 1) | sizes
    assert tuple(parsed) == MESH_AXES


@pytest.mark.parametrize(
    ("text", "num_devices", "message"),
    [
        (
            "data=2,fsdp=3",
            8,
            "multiplies to 6, but there are 8 devices; nearest that work: data=2,fsdp=4; data=4,fsdp=2; data=1,fsdp=8",
        ),
        ("tensor=16", 8, "multiplies to 16, but there are 8 devices; nearest that work: tensor=8"),
        (
            "data=3,fsdp=-1",
            8,
            "leaves fsdp no whole size: 3 does not divide 8 devices; "
            "nearest that work: data=4,fsdp=2; data=2,fsdp=4; data=8,fsdp=1",
        ),
        (
            "data=-1,fsdp=-1",
            4,
            "gives -1 to data and fsdp, but only one axis can take the rest of 4 devices; "
            "nearest that work: data=1,fsdp=4; data=2,fsdp=2; data=4,fsdp=1",
        ),
        (
            "data=0,fsdp=4",
            8,
            "has data=0, but a size is a positive integer, or -1 for what is left of 8 devices; "
            "nearest that work: data=2,fsdp=4; data=1,fsdp=8; data=4,fsdp=2",
        ),
        (
            "data=-2",
            8,
            "has data=-2, but a size is a positive integer, or -1 for what is left of 8 devices; "
            "nearest that work: data=8",
        ),
        ("dta=2", 8, "has no axis 'dta': did you mean 'data'? The axes are data, pipe, fsdp, expert, context, tensor"),
        ("tp=2", 8, "has no axis 'tp': did you mean 'pipe'? The axes are data, pipe, fsdp, expert, context, tensor"),
        ("data=2,data=4", 8, "gives data twice: give each axis one size"),
        ("data=2,", 8, "has an item '': write axis=size, as in 'data=2,fsdp=4'"),
        ("data", 8, "has an item 'data': write axis=size, as in 'data=2,fsdp=4'"),
        ("data=", 8, "has an item 'data=': write axis=size, as in 'data=2,fsdp=4'"),
        ("data=1.5", 8, "has data=1.5, but a size is a whole number"),
        ("data=2=4", 8, "has data=2=4, but a size is a whole number"),
    ],
)
def test_parse_errors(text, num_devices, message):
    with pytest.raises(ValueError, match=f"mesh '{text}'") as error:
        parse_mesh(text, num_devices)
    assert str(error.value) == f"mesh '{text}' {message}"


def test_no_devices():
    with pytest.raises(ValueError, match="a mesh needs at least one device, not 0"):
        build_mesh("fsdp=1", devices=[])


@pytest.mark.parametrize(
    ("asked", "num_devices"),
    [
        ({"data": 5, "tensor": 3}, 12),
        ({"data": 2, "fsdp": 7, "tensor": 4}, 96),
        ({"pipe": 3, "context": 3, "data": 3}, 64),
        ({"data": 10**400, "fsdp": 1}, 6),
    ],
)
def test_nearest_is_nearest(asked, num_devices):
    """The suggestions are meshes, and are what a search over all meshes of these axes finds."""

    def change(sizes):
        ratios = [abs(math.log2(size) - math.log2(old)) for size, old in zip(sizes, asked.values())]
        return sum(ratio > 0 for ratio in ratios), sum(ratios), sizes

    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    everything = [s for s in itertools.product(divisors, repeat=len(asked)) if math.prod(s) == num_devices]
    nearest = [
        ",".join(f"{axis}={size}" for axis, size in zip(asked, sizes)) for sizes in sorted(everything, key=change)[:3]
    ]
    with pytest.raises(ValueError, match=r"nearest that work") as error:
        parse_mesh(",".join(f"{axis}={size}" for axis, size in asked.items()), num_devices)
    assert str(error.value).partition("nearest that work: ")[2].split("; ") == nearest
    for text in nearest:
        assert math.prod(parse_mesh(text, num_devices).values()) == num_devices


@pytest.mark.parametrize("num_devices", [15_120, 16_384, 18_480, 20_000])
def test_nearest_is_cheap(num_devices):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"there are {num_devices} devices; nearest that work: data="):
        parse_mesh(",".join(f"{axis}=3" for axis in MESH_AXES), num_devices)
    assert time.perf_counter() - start < 1.0


def test_one_granule_is_in_the_order_of_ids():
    mesh = build_mesh("data=2,fsdp=-1,tensor=2", devices=jax.devices()[::-1])
    assert mesh.axis_names == MESH_AXES
    assert mesh.axis_types == (AxisType.Explicit,) * 6
    assert mesh.devices.shape == (2, 1, 4, 1, 1, 2)
    assert mesh.devices.ravel().tolist() == jax.devices()[:16]


def test_default_devices_and_types():
    """All devices by default; an array on the mesh has it in its type."""
    mesh = build_mesh("")
    x = jax.device_put(np.zeros((len(jax.devices()), 4)), NamedSharding(mesh, PartitionSpec("fsdp")))
    assert mesh.shape["fsdp"] == len(jax.devices())
    assert jax.typeof(x).sharding.spec == PartitionSpec("fsdp", None)


@pytest.mark.parametrize(
    ("mesh", "dcn_mesh", "host"),
    [
        ("data=4,tensor=8", "data=4", lambda data, tensor: data),
        ("data=4,tensor=8", "data=-1", lambda data, tensor: data),
        ("data=4,tensor=8", "", lambda data, tensor: data),
        ("data=8,tensor=4", "data=4", lambda data, tensor: data // 2),
        ("data=8,tensor=4", "", lambda data, tensor: data // 2),
        ("data=2,tensor=16", "", lambda data, tensor: 2 * data + tensor // 8),
        ("data=4,fsdp=8", "fsdp=4", lambda data, fsdp: fsdp // 2),
        ("data=4,fsdp=8", "data=2,fsdp=2", lambda data, fsdp: 2 * (data // 2) + fsdp // 4),
    ],
)
def test_hosts_of_gpus(h100s, mesh, dcn_mesh, host):
    """Which host each device of the mesh is on; the outer factor of an axis is the one that crosses hosts."""
    hosts = attribute(build_mesh(mesh, dcn_mesh, h100s), "process_index")
    assert hosts.tolist() == host(*np.indices(hosts.shape)).tolist()


def test_gpus_of_a_host_keep_their_order(h100s):
    mesh = build_mesh("data=4,fsdp=8", "fsdp=4", h100s)
    ids = attribute(mesh, "id")
    assert sorted(ids.ravel().tolist()) == list(range(32))
    assert ids[:, :2].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_slices_of_gpus_span_processes():
    """An NVLink domain of several processes is one granule."""
    devices = [SliceDevice(i, i // 2, "gpu", "NVIDIA GB200", slice_index=i // 8) for i in range(16)]
    mesh = build_mesh("data=2,fsdp=8", "", devices)
    assert attribute(mesh, "slice_index").tolist() == [[0] * 8, [1] * 8]
    mesh = build_mesh("data=4,fsdp=4", "fsdp=2", devices)
    assert attribute(mesh, "slice_index").tolist() == [[0, 0, 1, 1]] * 4
    with pytest.raises(ValueError, match=r"there are 2 granules \(one per slice_index\)"):
        build_mesh("data=4,fsdp=4", "fsdp=4", devices)


def test_processes_of_cpus():
    """Emulated processes: sparse ids, in any order."""
    devices = [Device(2048 * process + i, process) for i in range(4) for process in (1, 0)]
    mesh = build_mesh("data=2,tensor=4", "data=2", devices)
    assert attribute(mesh, "id").tolist() == [[0, 1, 2, 3], [2048, 2049, 2050, 2051]]
    mesh = build_mesh("data=2,tensor=4", "tensor=2", devices)
    assert attribute(mesh, "id").tolist() == [[0, 1, 2048, 2049], [2, 3, 2050, 2051]]


@pytest.mark.parametrize(
    ("mesh", "dcn_mesh"),
    [
        ("data=2,fsdp=16,tensor=4", ""),
        ("fsdp=32,tensor=4", "fsdp=2"),
        ("data=32,tensor=4", "data=2"),
    ],
)
def test_slices_of_tpus(mesh, dcn_mesh):
    """Slices lie along the outer factor; a tensor group is a line of neighbours in one slice."""
    devices = tpu_slices(num_slices=2, side=4, devices_per_process=4)
    groups = build_mesh(mesh, dcn_mesh, devices).devices.reshape(2, 16, 4)
    for index, one_slice in enumerate(groups):
        assert {device.slice_index for device in one_slice.ravel()} == {index}
        assert len({device.coords for device in one_slice.ravel()}) == 64
        for group in one_slice:
            steps = np.diff([device.coords for device in group], axis=0)
            assert np.abs(steps).sum(axis=1).tolist() == [1, 1, 1]


def test_split_physical_axes():
    """An axis smaller than a side of the torus is laid within it."""
    devices = tpu_slices(num_slices=1, side=4, devices_per_process=4)
    groups = build_mesh("fsdp=32,tensor=2", "", devices).devices.reshape(32, 2)
    assert all(np.abs(np.subtract(a.coords, b.coords)).sum() == 1 for a, b in groups)


def test_processes_of_one_tpu_slice_are_no_granules():
    devices = tpu_slices(num_slices=1, side=2, devices_per_process=4)
    with pytest.raises(ValueError, match=r"the 8 devices are one \(they share their slice_index\)"):
        build_mesh("data=2,tensor=4", "data=2", devices)


@pytest.mark.parametrize(
    ("mesh", "dcn_mesh", "message"),
    [
        (
            "data=4,tensor=8",
            "data=2",
            "multiplies to 2, but there are 4 granules (one per process_index); nearest that work: data=4",
        ),
        (
            "data=2,fsdp=16",
            "data=2,fsdp=4",
            "multiplies to 8, but there are 4 granules (one per process_index); "
            "nearest that work: data=1,fsdp=4; data=2,fsdp=2",
        ),
        (
            "data=2,tensor=16",
            "data=4",
            "has data=4, which does not divide the mesh's data=2; nearest that work: data=2,tensor=2; data=1,tensor=4",
        ),
        (
            "data=4,tensor=8",
            "dat=4",
            "has no axis 'dat': did you mean 'data'? The axes are data, pipe, fsdp, expert, context, tensor",
        ),
    ],
)
def test_dcn_errors(h100s, mesh, dcn_mesh, message):
    with pytest.raises(ValueError, match=f"dcn_mesh '{dcn_mesh}'") as error:
        build_mesh(mesh, dcn_mesh, h100s)
    assert str(error.value) == f"dcn_mesh '{dcn_mesh}' {message}"


def test_dcn_mesh_on_one_granule():
    devices = jax.devices()[:8]
    with pytest.raises(ValueError, match="spreads axes over several granules") as error:
        build_mesh("data=2,fsdp=4", "data=2", devices)
    assert str(error.value) == (
        "dcn_mesh 'data=2' spreads axes over several granules, but the 8 devices are one (they share their "
        "process_index): leave it out"
    )
    assert build_mesh("data=2,fsdp=4", "data=1", devices) == build_mesh("data=2,fsdp=4", "", devices)


def test_granules_of_different_sizes(h100s):
    """Part of a cluster: hosts one after the other, and no dcn_mesh."""
    some = h100s[:12]
    assert attribute(build_mesh("data=3,tensor=4", "", some), "id").ravel().tolist() == list(range(12))
    with pytest.raises(ValueError, match="of one size, but they have 4 to 8 devices: leave it out or"):
        build_mesh("data=3,tensor=4", "data=2", some)
