"""What is known of a chip."""

from collections.abc import Mapping
from dataclasses import dataclass, field

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "int8", "float4")
"""What a matmul's inputs may be; float8 is either format, since both run at one rate."""


@dataclass(frozen=True)
class Link:
    """The fast links of one device, to its neighbours in the server, rack or torus."""

    name: str
    bandwidth: float
    """Bytes/s of one link, one way."""
    count: int
    total: float
    """Bytes/s of all of them, one way, as the vendor has it; on TPUs a little more than what the links deliver."""


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator; all figures per JAX device."""

    name: str
    device_kinds: tuple[str, ...]
    """Lower-case parts of `jax.Device.device_kind`."""
    peak_flops: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s of a matmul, by dtype of DTYPES; what is not published is not there."""
    memory_bytes: int
    memory_bandwidth: float
    """Bytes/s."""
    source: str
    link: Link
    network: float
    """Bytes/s, one way, to the network between servers, in the vendor's own server."""
    devices_per_server: int = 8
    vector_flops: float | None = None
    """FLOP/s of float32 outside of the matrix units."""
    devices_per_chip: int = 1
    torus: tuple[int, ...] = ()
    """Of the largest pod, in chips; empty where a switch joins the devices."""


def rates(**tera: float) -> dict[str, float]:
    """FLOP/s by dtype, from TFLOP/s."""
    return {dtype: rate * 1e12 for dtype, rate in tera.items()}


def links(name: str, count: int, gigabytes: float, total: float | None = None) -> Link:
    """From GB/s of one link, one way; the total is theirs if none is published."""
    return Link(name, gigabytes * 1e9, count, (count * gigabytes if total is None else total) * 1e9)
