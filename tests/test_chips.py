"""meshes/chips.py: published figures against other sources of them, and measured ones."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from meshes import CHIPS, build_mesh, chip, find_chip, peak_flops
from meshes.spec import DTYPES

GPU_TARGETS = Path(__file__).parent.parent / "meshes" / "gpu_targets"


@pytest.mark.parametrize(
    ("name", "rates", "gigabytes", "terabytes_per_s"),
    [
        ("A100-80GB", {"bfloat16": 312}, 80, 2.039),
        ("H100-SXM", {"bfloat16": 989.4, "float8": 1979}, 80, 3.35),
        ("H200", {"bfloat16": 989.4, "float8": 1979}, 141, 4.8),
        ("B200", {"bfloat16": 2250, "float8": 4500}, 180, 8.0),
        ("GB200", {"float8": 5000}, 186, 8.0),
        ("MI250X", {"bfloat16": 383 / 2}, 128 / 2, 3.28 / 2),
        ("MI325X", {"bfloat16": 1300}, 256, 6.0),
        ("TPU-v4", {"bfloat16": 275}, 32, 1.2),
        ("TPU-v5e", {"bfloat16": 197, "int8": 394}, 16, 0.82),
        ("TPU-v5p", {"bfloat16": 459, "int8": 918}, 95, 2.765),
        ("TPU-v6e", {"bfloat16": 918, "int8": 1836}, 32, 1.64),
        ("TPU7x", {"bfloat16": 2307 / 2, "float8": 4614 / 2}, 192 / 2, 7.38 / 2),
    ],
)
def test_figures(name, rates, gigabytes, terabytes_per_s):
    """Against stas00/ml-engineering's tables, How to Scale Your Model, and Google Cloud's TPU7x page."""
    known = chip(name)
    for dtype, tera in rates.items():
        assert known.peak_flops[dtype] == pytest.approx(tera * 1e12, rel=0.01)
    assert known.memory_bytes == gigabytes * 1e9
    assert known.memory_bandwidth == pytest.approx(terabytes_per_s * 1e12, rel=0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "units", "flops_per_clock", "gigahertz"),
    [
        ("V100", "float16", 80, 1024, 1.53),
        ("A100-40GB", "bfloat16", 108, 2048, 1.41),
        ("A100-40GB", "float32", 108, 1024, 1.41),
        ("H100-SXM", "bfloat16", 132, 4096, 1.83),
        ("H100-SXM", "float32", 132, 2048, 1.83),
        ("H100-PCIe", "bfloat16", 114, 4096, 1.62),
        ("MI250X", "bfloat16", 110, 1024, 1.7),
        ("MI250X", "float32", 110, 256, 1.7),
        ("MI300X", "bfloat16", 304, 2048, 2.1),
        ("MI300X", "float32", 304, 256, 2.1),
        ("MI325X", "float8", 304, 4096, 2.1),
        ("MI355X", "bfloat16", 256, 4096, 2.4),
        ("MI355X", "float32", 256, 256, 2.4),
        ("TPU-v4", "bfloat16", 8, 2 * 128 * 128, 1.05),
        ("TPU-v5e", "bfloat16", 4, 2 * 128 * 128, 1.5),
        ("TPU-v5p", "bfloat16", 8, 2 * 128 * 128, 1.75),
    ],
)
def test_rates_are_units_times_clock(name, dtype, units, flops_per_clock, gigahertz):
    """Streaming multiprocessors, compute units or MXUs, each with its FLOPs per clock, at the boost clock."""
    assert chip(name).peak_flops[dtype] == pytest.approx(units * flops_per_clock * gigahertz * 1e9, rel=0.003)


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("TPU v4", "TPU-v4"),
        ("TPU v4 lite", "TPU-v4i"),
        ("TPU v5 lite", "TPU-v5e"),
        ("TPU v5e", "TPU-v5e"),
        ("TPU v5", "TPU-v5p"),
        ("TPU v5p", "TPU-v5p"),
        ("TPU v6 lite", "TPU-v6e"),
        ("TPU7x", "TPU7x"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10", None),
        ("TPU v3", "TPU-v3"),
        ("NVIDIA B300", "B300"),
        ("Tesla P100-SXM2-16GB", "P100"),
        ("cpu", None),
    ],
)
def test_find_chip(device_kind, name):
    found = find_chip(device_kind)
    assert (found and found.name) == name


@pytest.mark.parametrize("known", CHIPS, ids=lambda known: known.name)
def test_table_is_sound(known):
    for part in known.device_kinds:
        assert part == part.lower()
        assert find_chip(part) is known
    assert chip(known.name.upper()) is known
    assert known.source
    assert set(known.peak_flops) <= set(DTYPES)
    half = known.peak_flops.get("bfloat16") or known.peak_flops.get("float16") or known.peak_flops["float32"]
    assert known.peak_flops.get("float32", half) <= half <= known.peak_flops.get("float8", half)
    # Outside of these bounds, FLOPs for each byte read and seconds to read all memory, is a slip of units.
    assert 10 < half / known.memory_bandwidth < 2000
    assert 0.005 < known.memory_bytes / known.memory_bandwidth < 0.1


@pytest.mark.parametrize("target", ["a100", "h100", "h200", "b200"])
def test_compile_only_devices(target):
    """The devices that we compile for are in the table, with what their targets say of memory."""
    text = (GPU_TARGETS / f"{target}_min.txtpb").read_text()
    devices: list[jax.Device] = list(
        topologies.get_topology_desc(platform="cuda", topology="1x1x2", target_config=text).devices
    )
    known = find_chip(devices[0].device_kind)
    assert known is not None
    said = {name: int(value) for name, value in re.findall(r"(\w+): (\d+)", text)}
    assert known.memory_bandwidth == pytest.approx(said["memory_bandwidth"], rel=0.05)
    assert 0.93 < known.memory_bytes / said["device_memory_size"] < 1
    assert peak_flops(devices, "bfloat16").per_device == known.peak_flops["bfloat16"]


def test_published_peak():
    text = (GPU_TARGETS / "h100_min.txtpb").read_text()
    devices = topologies.get_topology_desc(platform="cuda", topology="1x1x2", target_config=text).devices
    peak = peak_flops(devices, "bfloat16")
    assert peak.per_device == pytest.approx(989.4e12)
    assert peak.label == "H100-SXM bfloat16 peak 989.4 TFLOP/s"
    with pytest.raises(ValueError, match=r"no float64 peak for 'NVIDIA H100 80GB HBM3', and no such device"):
        peak_flops(devices, "float64")


@pytest.mark.parametrize(("name", "nearest"), [("H100-S", "H100-SXM"), ("TPU-v5", "TPU-v5e"), ("MI300", "MI300X")])
def test_unknown_chip(name, nearest):
    message = rf"no chip is called '{name}': did you mean '{nearest}'\? The chips are K40, P100, V100, "
    with pytest.raises(ValueError, match=message):
        chip(name)


def test_unknown_dtype():
    with pytest.raises(ValueError, match=r"no peak is known for dtype 'bf16': did you mean 'bfloat16'\?"):
        peak_flops(jax.devices(), "bf16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_measured_peak_under_a_mesh(dtype):
    """Whatever mesh is current; and the devices of the mesh, not all of the process, share the cores."""
    devices = jax.devices()[:8]
    mesh = build_mesh("data=2,fsdp=4", devices=devices)
    with jax.set_mesh(mesh):
        peak = peak_flops(devices, dtype)
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    label = re.fullmatch(rf"CPU, measured: ([\d.]+) ([GT])FLOP/s {dtype} over 8 emulated devices", peak.label)
    assert label is not None
    total = float(label[1]) * {"G": 1e9, "T": 1e12}[label[2]]
    assert total == pytest.approx(8 * peak.per_device, rel=0.1)
    assert 1e8 < total < 1e15
    alone = peak_flops(devices[:1], dtype)
    assert alone.per_device == 8 * peak.per_device, "one measurement per process"
    assert "emulated" not in alone.label


def test_float64_is_measured_in_float64(caplog):
    """Where x64 is off, too, which stays off."""
    with jax.enable_x64(False), jax.log_compiles():
        assert peak_flops(jax.devices()[1:2], "float64").per_device > 0
        assert jax.device_put(np.zeros(1)).dtype == np.float32
    compiled = [message for message in caplog.messages if "Compiling" in message and "matmul" in message]
    assert compiled
    assert all("float64[" in message and "float32[" not in message for message in compiled)
