"""The most FLOP/s of the devices at hand: published where `chips` knows them, measured where it does not."""

import difflib
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from meshes.chips import find_chip
from meshes.spec import DTYPES


@dataclass(frozen=True)
class PeakFlops:
    """What an MFU is a fraction of."""

    per_device: float
    """FLOP/s."""
    label: str
    """What it is and where it comes from, for people."""


def peak_flops(devices: Sequence[jax.Device], dtype: str) -> PeakFlops:
    """The most FLOP/s that each of these devices can reach in matmuls.

    The table's figure for a chip that has one. Else the first device of this process is timed, for a second,
    once per process. Emulated CPU devices share the cores, so that of `devices` each gets an equal part.

    Args:
      devices: all of one kind, such as a mesh's. Compile-only ones will do if the table has them.
      dtype: of the matmuls' inputs, one of DTYPES.

    Raises:
      ValueError: an unknown dtype, or a chip that is neither in the table nor here to be measured.
    """
    if dtype not in DTYPES:
        close = difflib.get_close_matches(dtype, DTYPES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"no peak is known for dtype '{dtype}': did you mean '{close}'? The dtypes are {', '.join(DTYPES)}"
        )
    first = devices[0]
    known = find_chip(first.device_kind)
    if known is not None and dtype in known.peak_flops:
        published = known.peak_flops[dtype]
        return PeakFlops(published, f"{known.name} {dtype} peak {_text(published)}")
    attached = first.client.local_devices()
    local = [device for device in devices if device in attached]
    if not local:
        raise ValueError(
            f"meshes.CHIPS has no {dtype} peak for '{first.device_kind}', and no such device "
            "is attached to measure one: add the figure there or choose another dtype"
        )
    measured = _measured_flops(local[0], dtype)
    if first.platform != "cpu":
        return PeakFlops(measured, f"{first.device_kind}, measured: {_text(measured)} {dtype}")
    sharing = f" over {len(local)} emulated devices" if len(local) > 1 else ""
    return PeakFlops(measured / len(local), f"CPU, measured: {_text(measured)} {dtype}{sharing}")


def _text(flops: float) -> str:
    return f"{flops / 1e12:.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.1f} GFLOP/s"


@functools.cache
def _measured_flops(device: jax.Device, dtype: str) -> float:
    """FLOP/s of the fastest matmul in about a second's worth of them, on one device while the others rest."""
    input_dtype = jnp.dtype({"float8": "float8_e4m3fn", "float4": "float4_e2m1fn"}.get(dtype, dtype))
    output_dtype = jnp.int32 if dtype == "int8" else None
    matmul = jax.jit(functools.partial(jnp.matmul, preferred_element_type=output_dtype))
    end = time.perf_counter() + 1.0
    best, took, size = 0.0, 0.0, 128
    # Whatever mesh is current, arguments must lie on all of it: this device becomes a mesh of its own.
    # Without x64 a float64 argument would turn into float32 in silence.
    with jax.set_mesh(Mesh(np.array([device]), ("device",))), jax.enable_x64(True):
        while time.perf_counter() + took < end:
            # Twice the size takes eight times as long: once to compile, and three times to measure.
            if size < 16_384 and time.perf_counter() + 4 * 8 * took < end:
                size *= 2
                x = jax.device_put(np.ones((size, size), input_dtype), device)
                matmul(x, x).block_until_ready()
            start = time.perf_counter()
            matmul(x, x).block_until_ready()
            took = time.perf_counter() - start
            best = max(best, 2 * size**3 / took)
    return best
