"""Devices of NVIDIA clusters that are not here, to compile for."""

import difflib
import importlib.metadata
import importlib.resources
import re

import jax
import jaxlib
from jax.experimental import topologies

_TARGET_SUFFIX = "_min.txtpb"


def gpu_devices(topology: str) -> list[jax.Device]:
    """The GPUs of `"h100:2x8"`: a chip, hosts x GPUs per host, in order of host and place in it.

    They exist for the compiler alone: make a mesh of them, lower with `jax.ShapeDtypeStruct`s, compile. It
    takes no GPU, driver or CUDA library, and leaves the process's own backend as it is. Arrays cannot be made
    on them, and while such a mesh is current no operation on concrete arrays works.

    Raises ValueError if the text is malformed, the chip unknown, or jax's CUDA plugin missing or of another
    version than jaxlib.
    """
    targets = importlib.resources.files("meshes") / "gpu_targets"
    files = [file.name for file in targets.iterdir()]
    chips = sorted(name.removesuffix(_TARGET_SUFFIX) for name in files if name.endswith(_TARGET_SUFFIX))
    match = re.fullmatch(r"(\w+):([1-9]\d*)x([1-9]\d*)", topology)
    if not match:
        raise ValueError(
            f"topology {topology!r} is not CHIP:HOSTSxGPUS; write it like h100:2x8, 2 hosts of 8 GPUs each"
        )
    chip, num_hosts, num_gpus = match.groups()
    if chip not in chips:
        nearest = difflib.get_close_matches(chip, chips, n=1, cutoff=0)[0]
        raise ValueError(
            f"chip {chip!r} of topology {topology!r} is none of {', '.join(chips)}; did you mean {nearest!r}?"
        )
    _check_plugin()
    target = (targets / (chip + _TARGET_SUFFIX)).read_text()
    shape = f"1x{num_hosts}x{num_gpus}"  # partitions (of a network, all one here) x hosts x GPUs
    return topologies.get_topology_desc(platform="cuda", topology=shape, target_config=target).devices


def _check_plugin() -> None:
    # A plugin of another version may load all the same, and then compiles what this jax does not mean.
    found = {}
    for name in ("jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if jaxlib.__version__ not in found.values():
        have = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
        raise ValueError(
            f"compiling for GPUs needs jax's CUDA plugin in version {jaxlib.__version__}, like jaxlib, but "
            f'{have} is installed; run pip install "jaxpar[compile]"'
        )
