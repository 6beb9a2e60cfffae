"""Chips: what one JAX device can do at most, as published.

Figures are dense (no structured sparsity) and per JAX device, which is a whole chip except where two devices share one:
a GCD of an MI250X, a TensorCore of a TPU7x (`devices_per_chip`). `float32` is the rate of jax's default matmul
precision: TF32 on NVIDIA since Ampere and bfloat16 on TPU (jax.lax.Precision), true float32 on AMD (XLA asks hipBLASLt
for F32); what data sheets call FP32 is `vector_flops`. Memory is the vendor's gigabytes read as 1e9 bytes, a little
less than what the device then reports. Bandwidths of links are one way: half of what NVIDIA prints.
"""

import difflib
import functools

from meshes.spec import Chip, Link


def _rates(**tera: float) -> dict[str, float]:
    """FLOP/s by dtype, from TFLOP/s."""
    return {dtype: rate * 1e12 for dtype, rate in tera.items()}


def _links(name: str, count: int, gigabytes: float, total: float | None = None) -> Link:
    """From GB/s of one link, one way; the total is theirs if none is published."""
    return Link(name, gigabytes * 1e9, count, (count * gigabytes if total is None else total) * 1e9)


G = 10**9
KEPLER = _rates(float32=4.29)
PASCAL = _rates(float16=21.2, float32=10.6)
VOLTA = _rates(float16=125, float32=15.7)
AMPERE = _rates(bfloat16=312, float16=312, float32=156, int8=624)
HOPPER_SXM = _rates(bfloat16=989.4, float16=989.4, float32=494.7, float8=1978.9, int8=1978.9)
HOPPER_PCIE = _rates(bfloat16=756, float16=756, float32=378, float8=1513, int8=1513)
HOPPER_NVL = _rates(bfloat16=835.5, float16=835.5, float32=417.5, float8=1670.5, int8=1670.5)
HOPPER_H20 = _rates(bfloat16=148, float16=148, float32=74, float8=296, int8=296)
B200 = _rates(bfloat16=2250, float16=2250, float32=1125, float8=4500, int8=4500, float4=9000)
GB200 = _rates(bfloat16=2500, float16=2500, float32=1250, float8=5000, int8=5000, float4=10000)
B300 = _rates(bfloat16=2250, float16=2250, float32=1125, float8=4500, float4=13500)
GB300 = _rates(bfloat16=2500, float16=2500, float32=1250, float8=5000, float4=15000)
CDNA2_GCD = _rates(bfloat16=191.5, float16=191.5, float32=47.85, int8=191.5)
CDNA3 = _rates(bfloat16=1307.4, float16=1307.4, float32=163.4, float8=2614.9, int8=2614.9)
CDNA4 = _rates(bfloat16=2516.6, float16=2516.6, float32=157.3, float8=5033.2, int8=5033.2, float4=10066.3)
CDNA4_AIR = _rates(bfloat16=2309.6, float16=2309.6, float32=144.2, float8=4614, int8=4614, float4=9227)

PCIE3 = _links("PCIe 3.0 x16", 1, 15.75)
PCIE5 = _links("PCIe 5.0 x16", 1, 63)
NVLINK1 = _links("NVLink 1", 4, 20)
NVLINK2 = _links("NVLink 2", 6, 25)
NVLINK3 = _links("NVLink 3", 12, 25)
NVLINK3_A800 = _links("NVLink 3", 8, 25)
NVLINK4 = _links("NVLink 4", 18, 25)
NVLINK4_H800 = _links("NVLink 4", 8, 25)
NVLINK4_BRIDGE = _links("NVLink 4 bridge of two", 12, 25)
NVLINK5 = _links("NVLink 5", 18, 50)
XGMI_GCD = _links("Infinity Fabric", 7, 25)
XGMI3 = _links("Infinity Fabric", 7, 64)
XGMI4 = _links("Infinity Fabric", 7, 76.8)

EDR = 6.25e9  # 4 x 100 Gb/s for 8 GPUs
HDR = 25e9
NDR = 50e9
XDR = 100e9

_ampere = functools.partial(Chip, link=NVLINK3, network=HDR, vector_flops=19.5e12)
_hopper = functools.partial(Chip, link=NVLINK4, network=NDR, vector_flops=66.9e12)
_blackwell = functools.partial(Chip, link=NVLINK5, network=NDR, vector_flops=80e12)
_ultra = functools.partial(Chip, link=NVLINK5, network=XDR, vector_flops=80e12)
_CLOUD = "Google Cloud documentation"
_BOOK = "How to Scale Your Model"

CHIPS = (
    Chip("K40", ("tesla k40",), KEPLER, 12 * G, 288e9, "NVIDIA K40 board specification, base clock", PCIE3, EDR),
    Chip(
        "P100",
        ("p100-sxm2",),
        PASCAL,
        16 * G,
        732e9,
        "NVIDIA P100 datasheet, SXM2; network: DGX-1",
        NVLINK1,
        EDR,
        vector_flops=10.6e12,
    ),
    *(
        Chip(
            name,
            (f"v100-sxm2-{gigabytes}gb",),
            VOLTA,
            gigabytes * G,
            900e9,
            "NVIDIA V100 datasheet, SXM2; network: DGX-1",
            NVLINK2,
            EDR,
            vector_flops=15.7e12,
        )
        for name, gigabytes in (("V100", 16), ("V100-32GB", 32))
    ),
    _ampere(
        "A100-40GB",
        ("a100-sxm4-40gb", "a100-pcie-40gb"),
        AMPERE,
        40 * G,
        1555e9,
        "NVIDIA A100 datasheet; network: DGX A100",
    ),
    _ampere("A100-80GB", ("a100-sxm4-80gb",), AMPERE, 80 * G, 2039e9, "NVIDIA A100 datasheet, SXM"),
    _ampere("A100-80GB-PCIe", ("a100 80gb pcie",), AMPERE, 80 * G, 1935e9, "NVIDIA A100 datasheet, PCIe"),
    Chip("A800", ("a800-sxm4-80gb",), AMPERE, 80 * G, 2039e9, "NVIDIA A800 datasheet", NVLINK3_A800, HDR, 8, 19.5e12),
    _hopper(
        "H100-SXM",
        ("nvidia h100 80gb hbm3",),
        HOPPER_SXM,
        80 * G,
        3.352e12,
        "NVIDIA H100 architecture whitepaper, SXM5; bandwidth: 5 stacks of 1,024 bits at 5.24 Gb/s; network: DGX H100",
    ),
    Chip(
        "H100-PCIe",
        ("nvidia h100 pcie",),
        HOPPER_PCIE,
        80 * G,
        2.0e12,
        "NVIDIA H100 architecture whitepaper, PCIe",
        NVLINK4_BRIDGE,
        NDR,
        vector_flops=51.2e12,
    ),
    Chip(
        "H100-NVL",
        ("nvidia h100 nvl",),
        HOPPER_NVL,
        94 * G,
        3.9e12,
        "NVIDIA H100 datasheet, NVL, halved from sparse",
        NVLINK4_BRIDGE,
        NDR,
        vector_flops=60e12,
    ),
    Chip("H800", ("nvidia h800",), HOPPER_SXM, 80 * G, 3.352e12, "DeepSeek-V3, section 3.1", NVLINK4_H800, NDR),
    Chip("H20", ("nvidia h20",), HOPPER_H20, 96 * G, 4.0e12, "NVIDIA H20 datasheet", NVLINK4, NDR, 8, 44e12),
    _hopper("H200", ("nvidia h200",), HOPPER_SXM, 141 * G, 4.8e12, "NVIDIA H200 datasheet; rates: as H100 SXM5"),
    Chip(
        "H200-NVL",
        ("nvidia h200 nvl",),
        HOPPER_NVL,
        141 * G,
        4.8e12,
        "NVIDIA H200 datasheet, NVL, halved from sparse",
        NVLINK4,
        NDR,
        vector_flops=60e12,
    ),
    Chip("GH200", (), HOPPER_SXM, 96 * G, 4.0e12, "NVIDIA GH200 datasheet, HBM3", NVLINK4, NDR, 1, 66.9e12),
    _blackwell(
        "B200",
        ("nvidia b200",),
        B200,
        180 * G,
        8.0e12,
        "NVIDIA HGX B200 and DGX B200 datasheets, one of 8 GPUs, halved from sparse",
    ),
    _blackwell(
        "GB200",
        ("nvidia gb200",),
        GB200,
        186 * G,
        8.0e12,
        "NVIDIA GB200 NVL72 datasheet, one of 72 GPUs, halved from sparse",
        devices_per_server=72,
    ),
    _ultra(
        "B300",
        ("nvidia b300",),
        B300,
        288 * G,
        8.0e12,
        "NVIDIA HGX B300 and DGX B300 datasheets, one of 8 GPUs, halved from sparse; float4: dense as printed",
    ),
    _ultra(
        "GB300",
        ("nvidia gb300",),
        GB300,
        288 * G,
        8.0e12,
        "NVIDIA GB300 NVL72 datasheet, one of 72 GPUs, halved from sparse; float4: dense as printed",
        devices_per_server=72,
    ),
    Chip(
        "MI250X",
        ("mi250x",),
        CDNA2_GCD,
        64 * G,
        1.638e12,
        "AMD Instinct MI250X datasheet, matrix rates; half of it, for one GCD; network: Frontier",
        XGMI_GCD,
        12.5e9,
        vector_flops=23.95e12,
        devices_per_chip=2,
    ),
    Chip(
        "MI300X",
        ("mi300x",),
        CDNA3,
        192 * G,
        5.3e12,
        "AMD Instinct MI300X datasheet, matrix rates",
        XGMI3,
        NDR,
        vector_flops=163.4e12,
    ),
    Chip(
        "MI325X",
        ("mi325x",),
        CDNA3,
        256 * G,
        6.0e12,
        "AMD Instinct MI325X datasheet, matrix rates",
        XGMI3,
        NDR,
        vector_flops=163.4e12,
    ),
    Chip(
        "MI350X",
        ("mi350x",),
        CDNA4_AIR,
        288 * G,
        8.0e12,
        "AMD Instinct MI350X datasheet, matrix rates",
        XGMI4,
        NDR,
        vector_flops=144.2e12,
    ),
    Chip(
        "MI355X",
        ("mi355x",),
        CDNA4,
        288 * G,
        8.0e12,
        "AMD Instinct MI355X datasheet, matrix rates",
        XGMI4,
        NDR,
        vector_flops=157.3e12,
    ),
    Chip(
        "Gaudi2",
        (),
        _rates(bfloat16=432, float8=865),
        96 * G,
        2.46e12,
        "Intel Gaudi 2 whitepaper",
        _links("RoCE 100 GbE", 21, 12.5),
        37.5e9,
    ),
    Chip(
        "Gaudi3",
        (),
        _rates(bfloat16=1835, float8=1835),
        128 * G,
        3.7e12,
        "Intel Gaudi 3 whitepaper",
        _links("RoCE 200 GbE", 21, 25),
        75e9,
    ),
    Chip(
        "TPU-v2",
        ("tpu v2",),
        _rates(bfloat16=22.5, float32=22.5),
        8 * G,
        350e9,
        f"{_CLOUD}, TPU v2; links: Jouppi et al., 2020; half of it, for one core",
        _links("ICI", 4, 31, 124),
        1.6e9,
        devices_per_chip=2,
        torus=(16, 16),
    ),
    Chip(
        "TPU-v3",
        ("tpu v3",),
        _rates(bfloat16=61.5, float32=61.5),
        16 * G,
        450e9,
        f"{_CLOUD}, TPU v3; links: {_BOOK}; half of it, for one core",
        _links("ICI", 4, 50),
        1.6e9,
        devices_per_chip=2,
        torus=(32, 32),
    ),
    Chip(
        "TPU-v4",
        ("tpu v4",),
        _rates(bfloat16=275, float32=275, int8=275),
        32 * G,
        1.2e12,
        f"{_CLOUD}, TPU v4; links and network: {_BOOK}",
        _links("ICI", 6, 45, 300),
        6.25e9,
        devices_per_server=4,
        torus=(16, 16, 16),
    ),
    Chip(
        "TPU-v4i",
        ("tpu v4 lite",),
        _rates(bfloat16=138, float32=138, int8=138),
        8 * G,
        614e9,
        "Jouppi et al., Ten Lessons From Three Generations Shaped Google's TPUv4i, 2021",
        _links("ICI", 2, 50),
        3.125e9,
        devices_per_server=4,
        torus=(2, 2),
    ),
    Chip(
        "TPU-v5e",
        ("tpu v5 lite", "tpu v5e"),
        _rates(bfloat16=197, float32=197, int8=394),
        16 * G,
        819e9,
        f"{_CLOUD}, TPU v5e; int8, links and network: {_BOOK}",
        _links("ICI", 4, 45, 200),
        3.125e9,
        torus=(16, 16),
    ),
    Chip(
        "TPU-v5p",
        ("tpu v5", "tpu v5p"),
        _rates(bfloat16=459, float32=459, float8=459, int8=918),
        95 * G,
        2.765e12,
        f"{_CLOUD}, TPU v5p; int8, links and network: {_BOOK}",
        _links("ICI", 6, 90, 600),
        6.25e9,
        devices_per_server=4,
        torus=(16, 20, 28),
    ),
    Chip(
        "TPU-v6e",
        ("tpu v6 lite", "tpu v6e"),
        _rates(bfloat16=918, float32=918, float8=918, int8=1836),
        32 * G,
        1.64e12,
        f"{_CLOUD}, TPU v6e; links and network: {_BOOK}",
        _links("ICI", 4, 90, 400),
        12.5e9,
        torus=(16, 16),
    ),
    Chip(
        "TPU7x",
        ("tpu7x",),
        _rates(bfloat16=1153.5, float32=1153.5, float8=2307),
        96 * G,
        3.69e12,
        f"{_CLOUD}, TPU7x; half of it, for one TensorCore",
        _links("ICI", 6, 45, 300),
        6.25e9,
        devices_per_chip=2,
        torus=(16, 24, 24),
    ),
    Chip(
        "Trainium1",
        (),
        _rates(bfloat16=190, float16=190, float8=190, int8=380, float32=47.5),
        32 * 2**30,
        820e9,
        "AWS Neuron documentation, Trainium",
        Link("NeuronLink 2", 48e9, 4, 192e9),
        6.25e9,
        devices_per_server=16,
        vector_flops=47.5e12,
        torus=(4, 4),
    ),
    Chip(
        "Trainium2",
        (),
        _rates(bfloat16=667, float16=667, float8=1299, float32=181),
        96 * 2**30,
        2.9e12,
        "AWS Neuron documentation, Trainium2 and its UltraServer",
        Link("NeuronLink 3", 160e9, 4, 640e9),
        25e9,
        devices_per_server=16,
        vector_flops=181e12,
        torus=(4, 4, 4),
    ),
    Chip(
        "Trainium3",
        (),
        _rates(bfloat16=671, float16=671, float8=2517, float32=183),
        144 * 2**30,
        4.9e12,
        "AWS Neuron documentation, Trainium3",
        Link("NeuronLink 4", 320e9, 4, 1280e9),
        25e9,
        devices_per_server=16,
        vector_flops=183e12,
    ),
)

_OTHER_NAMES = {
    "A100": "A100-80GB",
    "H100": "H100-SXM",
    "P100-SXM2": "P100",
    "V100-SXM2": "V100",
    "Trainium": "Trainium1",
    "v2": "TPU-v2",
    "v3": "TPU-v3",
    "v4": "TPU-v4",
    "v4p": "TPU-v4",
    "v5e": "TPU-v5e",
    "v5p": "TPU-v5p",
    "v6e": "TPU-v6e",
    "v7x": "TPU7x",
    "Trillium": "TPU-v6e",
    "Ironwood": "TPU7x",
}


def find_chip(device_kind: str) -> Chip | None:
    """The chip of a `jax.Device.device_kind`: the one whose longest part it has; None if unknown."""
    kind = device_kind.lower()
    if " mig " in kind:  # a fraction of a GPU bears the name of the whole
        return None
    matches = [(len(part), known) for known in CHIPS for part in known.device_kinds if part in kind]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def chip(name: str) -> Chip:
    """The chip of a name such as "H100-SXM" or, for the usual kind, "H100"; in upper or lower case.

    Raises:
      ValueError: no such chip; names the nearest, and all that there are.
    """
    by_name = {known.name.lower(): known for known in CHIPS}
    by_name |= {other.lower(): by_name[full.lower()] for other, full in _OTHER_NAMES.items()}
    key = name.lower()
    if key not in by_name:
        longer = [full for full in by_name if full.startswith(key)]
        close = (longer or difflib.get_close_matches(key, by_name, n=1, cutoff=0.0))[0]
        raise ValueError(
            f"no chip is called '{name}': did you mean '{by_name[close].name}'? "
            f"The chips are {', '.join(known.name for known in CHIPS)}"
        )
    return by_name[key]
