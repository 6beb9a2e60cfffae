"""Chips, their pods, and the share of a peak that matmuls reach."""

import math
from typing import Any

from jaxpar.planning.oracles.engine import VALUE, Quantities, rule
from meshes import chip as find

# As the book rounds them: How to Scale Your Model, "How to Think About TPUs".
_BOOK = {
    "v3": {"hbm": 32e9, "bw": 9e11, "bf16": 1.4e14},
    "v4p": {"hbm": 32e9, "bw": 1.2e12, "bf16": 2.75e14},
    "v5p": {"hbm": 96e9, "bw": 2.8e12, "bf16": 4.59e14, "int8": 9.18e14},
    "v5e": {"hbm": 16e9, "bw": 8.1e11, "bf16": 1.97e14, "int8": 3.94e14},
    "v6e": {"hbm": 32e9, "bw": 1.6e12, "bf16": 9.2e14, "int8": 1.84e15},
}


@rule("accelerators", "seed", "jax_rooflines")
def whole_chip(chip: str) -> Quantities:
    """A data sheet's line: tera and giga, of the whole chip."""
    known = find(chip.removeprefix("DGX-"))
    count, link = known.devices_per_chip, known.link
    tera = {dtype: count * rate / 1e12 for dtype, rate in known.peak_flops.items()}
    vector = known.vector_flops or known.peak_flops.get("float32", 0.0)
    half = tera.get("bfloat16") or tera.get("float16")
    return {
        VALUE: half,
        "bf16": half,
        "fp16": tera.get("float16"),
        "tf32": tera.get("float32") if known.vector_flops else None,
        "fp32": count * vector / 1e12,
        "fp8": tera.get("float8"),
        "fp4": tera.get("float4"),
        "int8": tera.get("int8"),
        "hbm_GB": count * known.memory_bytes / 1e9,
        "hbm_GiB": count * known.memory_bytes / 2**30,
        "hbm_TBps": count * known.memory_bandwidth / 1e12,
        "hbm_GBps": count * known.memory_bandwidth / 1e9,
        "link_GBps": count * link.total / 1e9,
        "links": link.count,
        "nic_GBps": count * known.network / 1e9,
        "dcn_GBps": count * known.network / 1e9,
        "ici_one_way_GBps": count * link.bandwidth / 1e9,
        "ici_bidi_GBps": 2 * count * link.bandwidth / 1e9,
        "ici_total_bidi_GBps": 2 * count * link.total / 1e9,
        "neuronlink_TBps": 2 * count * link.total / 1e12,
        "neuronlink_GBps": 2 * count * link.total / 1e9,
        "axes": len(known.torus),
        "pod": math.prod(known.torus),
        "ultraserver": math.prod(known.torus),
        "cores": count,
    }


@rule("accelerators")
def achievable(mamf: float, theory: float) -> Quantities:
    return {VALUE: 100 * mamf / theory}


@rule("accelerators")
def by_name(form: Any) -> Quantities:
    """{chip: {figure}} as the book has it, or {chip: its pod}."""
    if all(isinstance(of, dict) for of in form.values()):
        return {name: _BOOK.get(name, _per_chip(name)) for name in form}
    return {name: math.prod(find(name).torus) for name in form}


def _per_chip(name: str) -> Quantities:
    known = find(name)
    count = known.devices_per_chip
    return {
        "hbm": float(count * known.memory_bytes),
        "bw": count * known.memory_bandwidth,
        "bf16": count * known.peak_flops.get("bfloat16", 0.0),
        "int8": count * known.peak_flops.get("int8", 0.0),
    }
