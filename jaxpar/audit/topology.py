"""Devices that are not here, to compile for: NVIDIA clusters, TPU slices, emulated CPU devices."""

import difflib
import importlib.metadata
import importlib.resources
import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jaxlib
from jax.experimental import topologies

_TARGET_SUFFIX = "_min.txtpb"

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")

TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
"""What libtpu wants to be told on a machine without TPUs before it is loaded. Its accelerator type is any that exists:
what is compiled for is the topology."""


@dataclass(frozen=True)
class Topology:
    """The devices that a text names: `h100:2048x8` (hosts x GPUs), `v5p:4x4x4`, `2*v5p:4x4x4` (slices) or `cpu:8`."""

    text: str
    platform: Literal["gpu", "tpu", "cpu"]
    kind: str
    shape: tuple[int, ...]
    """Hosts x GPUs; of a TPU slice its torus, in chips."""
    num_slices: int = 1

    @staticmethod
    def parse(text: str) -> "Topology":
        """Raises ValueError for what is malformed, or no chip's."""
        match = re.fullmatch(r"(?:([1-9]\d*)\*)?(\w+):([1-9]\d*(?:x[1-9]\d*)*)", text)
        kind = match[2] if match else text.partition(":")[0]
        known = (*gpu_kinds(), *TPUS, "cpu")
        if match and kind not in known:
            nearest = difflib.get_close_matches(kind, known, n=1, cutoff=0)[0]
            raise ValueError(
                f"chip {kind!r} of topology {text!r} is none of {', '.join(known)}; did you mean {nearest!r}?"
            )
        platform: Literal["gpu", "tpu", "cpu"] = "gpu" if kind in gpu_kinds() else "tpu" if kind in TPUS else "cpu"
        shape = tuple(int(size) for size in match[3].split("x")) if match else ()
        num_slices = int(match[1] or 1) if match else 1
        forms = {
            "gpu": (len(shape) == 2 and num_slices == 1, "CHIP:HOSTSxGPUS; write it like h100:2x8, 2 hosts of 8 GPUs"),
            "tpu": (len(shape) in (2, 3), "CHIP:XxY or CHIP:XxYxZ; write it like v5e:16x16, v5p:4x4x4 or 2*v5p:4x4x4"),
            "cpu": (len(shape) == 1 and num_slices == 1, "CHIP:SHAPE; write it like h100:2x8, v5e:16x16 or cpu:8"),
        }
        is_right, form = forms[platform]
        if not match or not is_right:
            raise ValueError(f"topology {text!r} is not {form}")
        return Topology(text, platform, kind, shape, num_slices)

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape) * self.num_slices


def gpu_kinds() -> list[str]:
    targets = importlib.resources.files("meshes") / "gpu_targets"
    names = [file.name for file in targets.iterdir()]
    return sorted(name.removesuffix(_TARGET_SUFFIX) for name in names if name.endswith(_TARGET_SUFFIX))


def devices_of(text: str) -> list[jax.Device]:
    """The devices of a `Topology`, in its order.

    They exist for the compiler alone: make a mesh of them, lower with `jax.ShapeDtypeStruct`s, compile. It takes no
    accelerator, driver or CUDA library, and leaves the process's own backend as it is. Arrays cannot be made on them,
    and while such a mesh is current no operation on concrete arrays works. For TPUs the process must have been started
    with TPU_ENVIRONMENT. CPU devices are the process's own, of which it must have as many.

    Raises ValueError as `Topology.parse`; or if jax's CUDA plugin or libtpu is missing, the plugin is of another
    version than jaxlib, or no TPU slice has this shape.
    """
    topology = Topology.parse(text)
    if topology.platform == "gpu":
        return _gpu_devices(topology)
    if topology.platform == "tpu":
        return _tpu_devices(topology)
    return jax.devices("cpu")[: topology.num_chips]


def gpu_devices(text: str) -> list[jax.Device]:
    """`devices_of`, of a text that must name GPUs."""
    topology = Topology.parse(text)
    if topology.platform != "gpu":
        raise ValueError(f"topology {text!r} has no GPUs; take one of {', '.join(gpu_kinds())}, as in h100:2x8")
    return _gpu_devices(topology)


def _gpu_devices(topology: Topology) -> list[jax.Device]:
    _check_plugin()
    target = (importlib.resources.files("meshes") / "gpu_targets" / (topology.kind + _TARGET_SUFFIX)).read_text()
    num_hosts, num_gpus = topology.shape
    shape = f"1x{num_hosts}x{num_gpus}"  # partitions (of a network, all one here) x hosts x GPUs
    return topologies.get_topology_desc(platform="cuda", topology=shape, target_config=target).devices


def _tpu_devices(topology: Topology) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError('compiling for TPUs needs libtpu, which is not installed; run pip install "jaxpar[compile]"')
    name = f"{topology.kind}:{'x'.join(map(str, topology.shape))}"
    options: dict[str, Any] = {"num_slices": topology.num_slices} if topology.num_slices > 1 else {}
    if topology.kind == "v4":
        options["chip_config_name"] = "megacore"  # a chip's two cores are one device, as on v4 as it is rented
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise ValueError(f"topology {topology.text!r} is none that libtpu knows: {reason}") from None


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
