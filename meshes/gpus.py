"""GPUs, and accelerators that switches join; see `chips`."""

import functools

from meshes.spec import Chip, links, rates

G = 10**9
KEPLER = rates(float32=5.04)
PASCAL = rates(float16=21.2, float32=10.6)
VOLTA = rates(float16=125, float32=15.7)
AMPERE = rates(bfloat16=312, float16=312, float32=156, int8=624)
HOPPER_SXM = rates(bfloat16=989.4, float16=989.4, float32=494.7, float8=1978.9, int8=1978.9)
HOPPER_PCIE = rates(bfloat16=756, float16=756, float32=378, float8=1513, int8=1513)
HOPPER_NVL = rates(bfloat16=835.5, float16=835.5, float32=417.5, float8=1670.5, int8=1670.5)
HOPPER_H20 = rates(bfloat16=148, float16=148, float32=74, float8=296, int8=296)
B200 = rates(bfloat16=2250, float16=2250, float32=1125, float8=4500, int8=4500, float4=9000)
GB200 = rates(bfloat16=2500, float16=2500, float32=1250, float8=5000, int8=5000, float4=10000)
B300 = rates(bfloat16=2250, float16=2250, float32=1125, float8=4500, float4=13500)
GB300 = rates(bfloat16=2500, float16=2500, float32=1250, float8=5000, float4=15000)
CDNA2_GCD = rates(bfloat16=191.5, float16=191.5, float32=47.85, int8=191.5)
CDNA3 = rates(bfloat16=1307.4, float16=1307.4, float32=163.4, float8=2614.9, int8=2614.9)
CDNA4 = rates(bfloat16=2516.6, float16=2516.6, float32=157.3, float8=5033.2, int8=5033.2, float4=10066.3)
CDNA4_AIR = rates(bfloat16=2309.6, float16=2309.6, float32=144.2, float8=4614, int8=4614, float4=9227)

PCIE3 = links("PCIe 3.0 x16", 1, 15.75)
PCIE5 = links("PCIe 5.0 x16", 1, 63)
NVLINK1 = links("NVLink 1", 4, 20)
NVLINK2 = links("NVLink 2", 6, 25)
NVLINK3 = links("NVLink 3", 12, 25)
NVLINK3_A800 = links("NVLink 3", 8, 25)
NVLINK4 = links("NVLink 4", 18, 25)
NVLINK4_H800 = links("NVLink 4", 8, 25)
NVLINK4_BRIDGE = links("NVLink 4 bridge of two", 12, 25)
NVLINK5 = links("NVLink 5", 18, 50)
XGMI_GCD = links("Infinity Fabric", 7, 25)
XGMI3 = links("Infinity Fabric", 7, 64)
XGMI4 = links("Infinity Fabric", 7, 76.8)

EDR = 6.25e9  # 4 x 100 Gb/s for 8 GPUs
HDR = 25e9
NDR = 50e9
XDR = 100e9

_ampere = functools.partial(Chip, link=NVLINK3, network=HDR, vector_flops=19.5e12)
_hopper = functools.partial(Chip, link=NVLINK4, network=NDR, vector_flops=66.9e12)
_blackwell = functools.partial(Chip, link=NVLINK5, network=NDR, vector_flops=80e12)
_ultra = functools.partial(Chip, link=NVLINK5, network=XDR, vector_flops=80e12)

GPUS = (
    Chip(
        "K40",
        ("tesla k40",),
        KEPLER,
        12 * G,
        288e9,
        "NVIDIA K40 board specification; 2,880 cores at the boost clock, 875 MHz",
        PCIE3,
        EDR,
    ),
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
        rates(bfloat16=432, float8=865),
        96 * G,
        2.46e12,
        "Intel Gaudi 2 whitepaper",
        links("RoCE 100 GbE", 21, 12.5),
        37.5e9,
    ),
    Chip(
        "Gaudi3",
        (),
        rates(bfloat16=1835, float8=1835),
        128 * G,
        3.7e12,
        "Intel Gaudi 3 whitepaper",
        links("RoCE 200 GbE", 21, 25),
        75e9,
    ),
)
