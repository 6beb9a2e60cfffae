"""Chips: what one JAX device can do at most, published where it is known and measured where it is not.

Figures are dense (no structured sparsity) and per JAX device, which is a whole chip except where two
devices share one: a GCD of an MI250X, a TensorCore of a TPU7x. `float32` is the rate of jax's default
matmul precision: TF32 on NVIDIA since Ampere and bfloat16 on TPU (jax.lax.Precision), true float32 on AMD
(XLA asks hipBLASLt for F32). Memory is the vendor's gigabytes read as 1e9 bytes, a little less than what
the device then reports.
"""

import difflib
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "int8")
"""What a matmul's inputs may be; float8 is either format, since both run at one rate."""


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


def _rates(**tera: float) -> dict[str, float]:
    """FLOP/s by dtype, from TFLOP/s."""
    return {dtype: rate * 1e12 for dtype, rate in tera.items()}


G = 10**9
VOLTA = _rates(float16=125, float32=15.7)
AMPERE = _rates(bfloat16=312, float16=312, float32=156, int8=624)
HOPPER_SXM = _rates(bfloat16=989.4, float16=989.4, float32=494.7, float8=1978.9, int8=1978.9)
HOPPER_PCIE = _rates(bfloat16=756, float16=756, float32=378, float8=1513, int8=1513)
HOPPER_NVL = _rates(bfloat16=835.5, float16=835.5, float32=417.5, float8=1670.5, int8=1670.5)
B200 = _rates(bfloat16=2250, float16=2250, float32=1125, float8=4500, int8=4500)
GB200 = _rates(bfloat16=2500, float16=2500, float32=1250, float8=5000, int8=5000)
CDNA2_GCD = _rates(bfloat16=191.5, float16=191.5, float32=47.85, int8=191.5)
CDNA3 = _rates(bfloat16=1307.4, float16=1307.4, float32=163.4, float8=2614.9, int8=2614.9)
CDNA4 = _rates(bfloat16=2516.6, float16=2516.6, float32=157.3, float8=5033.2, int8=5033.2)

CHIPS = (
    Chip("V100", ("v100-sxm2-16gb",), VOLTA, 16 * G, 900e9, "NVIDIA V100 datasheet, SXM2"),
    Chip("V100-32GB", ("v100-sxm2-32gb",), VOLTA, 32 * G, 900e9, "NVIDIA V100 datasheet, SXM2"),
    Chip("A100-40GB", ("a100-sxm4-40gb", "a100-pcie-40gb"), AMPERE, 40 * G, 1555e9, "NVIDIA A100 datasheet"),
    Chip("A100-80GB", ("a100-sxm4-80gb",), AMPERE, 80 * G, 2039e9, "NVIDIA A100 datasheet, SXM"),
    Chip("A100-80GB-PCIe", ("a100 80gb pcie",), AMPERE, 80 * G, 1935e9, "NVIDIA A100 datasheet, PCIe"),
    Chip(
        "H100-SXM",
        ("nvidia h100 80gb hbm3",),
        HOPPER_SXM,
        80 * G,
        3.35e12,
        "NVIDIA H100 architecture whitepaper, SXM5; bandwidth: datasheet",
    ),
    Chip("H100-PCIe", ("nvidia h100 pcie",), HOPPER_PCIE, 80 * G, 2.0e12, "NVIDIA H100 architecture whitepaper, PCIe"),
    Chip(
        "H100-NVL", ("nvidia h100 nvl",), HOPPER_NVL, 94 * G, 3.9e12, "NVIDIA H100 datasheet, NVL, halved from sparse"
    ),
    Chip("H200", ("nvidia h200",), HOPPER_SXM, 141 * G, 4.8e12, "NVIDIA H200 datasheet; rates: as H100 SXM5"),
    Chip(
        "H200-NVL", ("nvidia h200 nvl",), HOPPER_NVL, 141 * G, 4.8e12, "NVIDIA H200 datasheet, NVL, halved from sparse"
    ),
    Chip(
        "B200",
        ("nvidia b200",),
        B200,
        180 * G,
        8.0e12,
        "NVIDIA HGX B200 and DGX B200 datasheets, one of 8 GPUs, halved from sparse",
    ),
    Chip(
        "GB200",
        ("nvidia gb200",),
        GB200,
        186 * G,
        8.0e12,
        "NVIDIA GB200 NVL72 datasheet, one of 72 GPUs, halved from sparse",
    ),
    Chip(
        "MI250X",
        ("mi250x",),
        CDNA2_GCD,
        64 * G,
        1.638e12,
        "AMD Instinct MI250X datasheet, matrix rates; half of it, for one GCD",
    ),
    Chip("MI300X", ("mi300x",), CDNA3, 192 * G, 5.3e12, "AMD Instinct MI300X datasheet, matrix rates"),
    Chip("MI325X", ("mi325x",), CDNA3, 256 * G, 6.0e12, "AMD Instinct MI325X datasheet, matrix rates"),
    Chip("MI355X", ("mi355x",), CDNA4, 288 * G, 8.0e12, "AMD Instinct MI355X datasheet, matrix rates"),
    Chip(
        "TPU-v4",
        ("tpu v4",),
        _rates(bfloat16=275, float32=275, int8=275),
        32 * G,
        1.2e12,
        "Google Cloud documentation, TPU v4",
    ),
    Chip(
        "TPU-v4i",
        ("tpu v4 lite",),
        _rates(bfloat16=138, float32=138, int8=138),
        8 * G,
        614e9,
        "Jouppi et al., Ten Lessons From Three Generations Shaped Google's TPUv4i, 2021",
    ),
    Chip(
        "TPU-v5e",
        ("tpu v5 lite", "tpu v5e"),
        _rates(bfloat16=197, float32=197, int8=394),
        16 * G,
        819e9,
        "Google Cloud documentation, TPU v5e; int8: How to Scale Your Model",
    ),
    Chip(
        "TPU-v5p",
        ("tpu v5", "tpu v5p"),
        _rates(bfloat16=459, float32=459, float8=459, int8=918),
        95 * G,
        2.765e12,
        "Google Cloud documentation, TPU v5p; int8: How to Scale Your Model",
    ),
    Chip(
        "TPU-v6e",
        ("tpu v6 lite", "tpu v6e"),
        _rates(bfloat16=918, float32=918, float8=918, int8=1836),
        32 * G,
        1.64e12,
        "Google Cloud documentation, TPU v6e",
    ),
    Chip(
        "TPU7x",
        ("tpu7x",),
        _rates(bfloat16=1153.5, float32=1153.5, float8=2307),
        96 * G,
        3.69e12,
        "Google Cloud documentation, TPU7x; half of it, for one TensorCore",
    ),
)


def find_chip(device_kind: str) -> Chip | None:
    """The chip of a `jax.Device.device_kind`: the one whose longest part it has; None if unknown."""
    kind = device_kind.lower()
    if " mig " in kind:  # a fraction of a GPU bears the name of the whole
        return None
    matches = [(len(part), known) for known in CHIPS for part in known.device_kinds if part in kind]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def chip(name: str) -> Chip:
    """The chip of a name such as "H100-SXM", in upper or lower case.

    Raises:
      ValueError: no such chip; names the nearest, and all that there are.
    """
    by_name = {known.name.lower(): known for known in CHIPS}
    if name.lower() not in by_name:
        longer = [full for full in by_name if full.startswith(name.lower())]
        close = (longer or difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.0))[0]
        raise ValueError(
            f"no chip is called '{name}': did you mean '{by_name[close].name}'? "
            f"The chips are {', '.join(known.name for known in CHIPS)}"
        )
    return by_name[name.lower()]


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
            f"meshes/chips.py has no {dtype} peak for '{first.device_kind}', and no such device "
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
    input_dtype = jnp.dtype("float8_e4m3fn" if dtype == "float8" else dtype)
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
