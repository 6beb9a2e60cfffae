"""Where a program runs: chips, and meshes of them. Knows no model and no strategy."""

from meshes.chips import CHIPS, Chip, PeakFlops, chip, find_chip, peak_flops
from meshes.mesh import MESH_AXES, build_mesh, num_devices_of, parse_mesh, torus_factors

__all__ = [
    "CHIPS",
    "MESH_AXES",
    "Chip",
    "PeakFlops",
    "build_mesh",
    "chip",
    "find_chip",
    "num_devices_of",
    "parse_mesh",
    "peak_flops",
    "torus_factors",
]
