"""Groups of devices, in each notation of HLO, matched with the axes of a mesh."""

import math
import re
from collections.abc import Mapping

import numpy as np

UNKNOWN = ("?",)
"""The axes of groups that no set of mesh axes makes."""

_GROUPING = re.compile(
    r"(?:source_target_pairs|replica_groups)="
    r"(?:\{(?:\{[\d,]*\},?)*\}"  # {{0,1},{2,3}}; {} for all devices
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"  # [4,2]<=[2,4]T(1,0)
    r"|mesh\[.*?\](?:, device_ids=\(.*?\))? \{.*?\})"  # mesh['a'=4,'b'=2], device_ids=(0,2,...) {'a':(1)2}
)
_MESH_GROUPS = re.compile(r"=mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_MESH_AXIS = re.compile(r"'(.+?)'=(\d+)")
_MESH_AXIS_REF = re.compile(r"'(.+?)'(?::\((\d+)\)(\d+))?(?:,|$)")


def grouping_of(name: str, attributes: str) -> str:
    match = _GROUPING.search(attributes)
    if not match:
        raise ValueError(
            f"%{name} groups devices in an unknown notation, {attributes[:200]!r}; "
            "report it with the version of jax that compiled it"
        )
    return match[0]


def span(grouping: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The axes that the groups span and the devices per group; a permute's groups are its pairs."""
    if grouping.startswith("source_target_pairs"):
        axes = _varying_axes(np.array(_listed(grouping), dtype=int).reshape(-1, 2), mesh)
        return axes, 2 if axes else 1
    groups = _groups(grouping, math.prod(mesh.values()))
    if len({len(group) for group in groups}) > 1:
        return UNKNOWN, max(map(len, groups))
    devices = np.array(groups)
    axes = _varying_axes(devices, mesh)
    is_partition = np.array_equal(np.sort(devices, axis=None), np.arange(math.prod(mesh.values())))
    is_whole = devices.shape[1] == math.prod(mesh[axis] for axis in axes)
    # Groups of a part of one axis are a strategy's own (Ulysses in a ring); of parts of several, nobody's.
    return axes if is_partition and (is_whole or len(axes) == 1) else UNKNOWN, devices.shape[1]


def _varying_axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of any group [group, member] differ."""
    coordinates = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(axis for axis, place in zip(mesh, coordinates) if (place != place[:, :1]).any())


def _groups(grouping: str, num_devices: int) -> list[list[int]] | np.ndarray:
    if match := _MESH_GROUPS.search(grouping):
        return _mesh_groups(*match.groups())
    if "<=" in grouping:
        shape, iota = grouping.split("<=")
        return _iota(iota).reshape(_iota_args(shape)[0])
    return _listed(grouping) or [list(range(num_devices))]


def _mesh_groups(axes: str, device_ids: str | None, refs: str) -> np.ndarray:
    """Groups along axes of a mesh of XLA's own; 'a':(p)s is the middle of `a` split into p x s x the rest."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    shape = tuple(sizes.values())
    devices = np.arange(math.prod(shape))
    place = dict(zip(sizes, np.unravel_index(devices, shape)))
    if device_ids:
        devices = _iota(device_ids) if "[" in device_ids else np.array(_iota_args(device_ids)[0])
    group_size = 1
    for name, pre_size, sub_size in _MESH_AXIS_REF.findall(refs):
        size = int(sub_size or sizes[name])
        stride = sizes[name] // (int(pre_size or 1) * size)
        place[name] = place[name] - place[name] // stride % size * stride
        group_size *= size
    first_in_group = np.ravel_multi_index(tuple(place.values()), shape)
    return devices[np.argsort(first_in_group, kind="stable")].reshape(-1, group_size)


def _iota(text: str) -> np.ndarray:
    """[4,2]T(1,0): 0, 1, 2, ... in that shape, transposed, flat."""
    shape, *permutation = _iota_args(text)
    return np.arange(math.prod(shape)).reshape(shape).transpose(*permutation).ravel()


def _iota_args(text: str) -> list[list[int]]:
    return [[int(number) for number in part.split(",")] for part in re.findall(r"\d+(?:,\d+)*", text)]


def _listed(grouping: str) -> list[list[int]]:
    return [[int(device) for device in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", grouping)]
