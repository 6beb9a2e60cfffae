"""meshes/clusters.py: which level an axis crosses, and how fast a ring over it is."""

import itertools
import math

import pytest

from meshes import CHIPS, chip, cluster_of, load_cluster
from meshes.clusters import cluster_names

LLAMA3 = load_cluster("llama3-h100")


def test_llama3():
    """arXiv 2407.21783, section 3.3.1; NVLink's 900 GB/s are both ways."""
    assert [(level.name, level.size) for level in LLAMA3.levels] == [
        ("server", 8),
        ("rack", 16),
        ("pod", 3072),
        ("cluster", 24576),
    ]
    assert LLAMA3.levels[3].size == 8 * 2 * 192 * 8
    assert LLAMA3.chip.memory_bandwidth == 3352e9
    assert [level.bandwidth for level in LLAMA3.levels] == [450e9, 50e9, 50e9, 50e9 / 7]


@pytest.mark.parametrize(
    ("stride", "size", "level"),
    [(1, 8, "server"), (1, 16, "rack"), (8, 2, "rack"), (8, 4, "pod"), (128, 24, "pod"), (128, 128, "cluster")],
)
def test_level_of(stride, size, level):
    assert LLAMA3.level_of(stride, size).name == level


def test_more_devices_than_there_are():
    message = "an axis of 32 outside of 1024 devices spans 32768, but llama3-h100 has 24576: take smaller axes"
    with pytest.raises(ValueError, match=message):
        LLAMA3.level_of(1024, 32)
    with pytest.raises(ValueError, match="llama3-h100 has 24576 devices, not 30000: take fewer"):
        LLAMA3.part(30000)


@pytest.mark.parametrize(
    ("stride", "size", "gigabytes"),
    [
        (1, 8, 450),
        (2, 4, 450),
        # Whole servers: eight network cards carry the ring between them.
        (1, 16, 400),
        (1, 1024, 400),
        # Half a server has four of them, one device of each server one.
        (2, 8, 200),
        (4, 4, 100),
        (8, 16, 50),
        # Between pods each of 128 groups has 24 devices in a pod, and a seventh of their cards.
        (128, 128, 50),
        (1024, 24, 150 / 7),
    ],
)
def test_rings(stride, size, gigabytes):
    assert LLAMA3.bandwidth(stride, size) == pytest.approx(gigabytes * 1e9)


def test_part():
    part = LLAMA3.part(8192)
    assert [level.size for level in part.levels] == [8, 16, 3072, 8192]
    assert part.num_devices == 8192
    assert [level.size for level in LLAMA3.part(8).levels] == [8]
    assert LLAMA3.part(24576) == LLAMA3


@pytest.mark.parametrize(
    ("kind", "num_devices", "torus"),
    [
        ("v5p", 64, (4, 4, 4)),
        ("v5p", 256, (4, 8, 8)),
        ("v5p", 8960, (16, 20, 28)),
        ("v4", 4096, (16, 16, 16)),
        ("v5e", 32, (4, 8)),
        ("v6e", 256, (16, 16)),
    ],
)
def test_slices(kind, num_devices, torus):
    cluster = load_cluster(kind).part(num_devices)
    assert cluster.torus == torus
    assert len(cluster.levels) == 1


def test_torus():
    """v5p: 90 GB/s a link, one way; a full dim sends both ways round, a part of one only one way."""
    cluster = load_cluster("v5p").part(512)
    assert cluster.torus == (8, 8, 8)
    found = {span: cluster.bandwidth(*span) / 1e9 for span in [(1, 8), (8, 8), (1, 4), (1, 64), (1, 512), (4, 2)]}
    assert found == {(1, 8): 180, (8, 8): 180, (1, 4): 90, (1, 64): 360, (1, 512): 540, (4, 2): 90}
    pods = load_cluster("v5p")
    assert pods.level_of(8960, 2).name == "cluster"
    assert pods.bandwidth(8960, 2) == 6.25e9


def test_two_dims_wrap_at_a_whole_pod_only():
    pod, half = load_cluster("v5e").part(256), load_cluster("v5e").part(64)
    assert pod.bandwidth(1, 16) == 2 * 45e9
    assert half.torus == (8, 8)
    assert half.bandwidth(1, 8) == 45e9


def test_one_device_waits_for_no_link():
    assert LLAMA3.bandwidth(8, 1) == math.inf


@pytest.mark.parametrize("name", cluster_names())
def test_presets_are_sound(name):
    cluster = load_cluster(name.upper())
    sizes = [level.size for level in cluster.levels]
    assert sizes == sorted(set(sizes))
    assert all(outer % inner == 0 for inner, outer in itertools.pairwise(sizes))
    bandwidths = [level.bandwidth for level in cluster.levels]
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert all(1e-7 < level.latency < 1e-4 for level in cluster.levels)
    assert cluster.source
    assert not cluster.torus or math.prod(cluster.torus) == sizes[0]


@pytest.mark.parametrize("known", CHIPS, ids=lambda known: known.name)
def test_every_chip_has_a_cluster(known):
    cluster = load_cluster(known.name)
    assert cluster.chip is known
    assert cluster.num_devices >= 64
    assert cluster.levels[0].bandwidth >= cluster.levels[-1].bandwidth


def test_servers_of_ones_own_size():
    cluster = cluster_of(chip("A100-80GB"), devices_per_server=4)
    assert cluster.levels[0].size == 4
    assert cluster.bandwidth(1, 8) == 4 * 25e9
    with pytest.raises(ValueError, match="devices_per_server is 0: a server has at least 1"):
        cluster_of(chip("A100-80GB"), devices_per_server=0)


def test_nvl72():
    cluster = load_cluster("gb200-nvl72")
    assert cluster.level_of(1, 64).name == "rack"
    assert cluster.bandwidth(1, 64) == 900e9
    assert cluster.bandwidth(72, 4) == 50e9


def test_unknown_cluster():
    with pytest.raises(ValueError, match="no cluster is called 'lama3': did you mean 'llama3-h100'"):
        load_cluster("lama3")
