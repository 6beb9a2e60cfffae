"""Where a program runs: chips, and meshes of them. Knows no model and no strategy."""

from meshes.chips import CHIPS, chip, find_chip, peak_of
from meshes.clusters import Cluster, Level, cluster_of, load_cluster
from meshes.mesh import MESH_AXES, build_mesh, num_devices_of, num_torus_dims, parse_mesh, slice_factors, torus_factors
from meshes.peak import PeakFlops, peak_flops
from meshes.spec import Chip, Link

__all__ = [
    "CHIPS",
    "MESH_AXES",
    "Chip",
    "Cluster",
    "Level",
    "Link",
    "PeakFlops",
    "build_mesh",
    "chip",
    "cluster_of",
    "find_chip",
    "load_cluster",
    "num_devices_of",
    "num_torus_dims",
    "parse_mesh",
    "peak_flops",
    "peak_of",
    "slice_factors",
    "torus_factors",
]
