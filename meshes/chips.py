"""Chips: what one JAX device can do at most, as published.

Figures are dense (no structured sparsity) and per JAX device, which is a whole chip except where two devices share one:
a GCD of an MI250X, a TensorCore of a TPU7x (`devices_per_chip`). `float32` is the rate of jax's default matmul
precision: TF32 on NVIDIA since Ampere and bfloat16 on TPU (jax.lax.Precision), true float32 on AMD (XLA asks hipBLASLt
for F32); what data sheets call FP32 is `vector_flops`. Memory is the vendor's gigabytes read as 1e9 bytes, a little
less than what the device then reports. Bandwidths of links are one way: half of what NVIDIA prints.
"""

import difflib

from meshes.gpus import GPUS
from meshes.spec import Chip
from meshes.tpus import TPUS

CHIPS = (*GPUS, *TPUS)

_OTHER_NAMES = {
    "A100": "A100-80GB",
    "A100-80": "A100-80GB",
    "A100-40": "A100-40GB",
    "H100": "H100-SXM",
    "H100-SXM5": "H100-SXM",
    "P100-SXM2": "P100",
    "V100-SXM2": "V100-32GB",
    "Trainium": "Trainium1",
    "Trn1": "Trainium1",
    "Trn2": "Trainium2",
    "Trn3": "Trainium3",
    "v2": "TPU-v2",
    "v3": "TPU-v3",
    "v4": "TPU-v4",
    "v4p": "TPU-v4",
    "v5e": "TPU-v5e",
    "v5p": "TPU-v5p",
    "v6e": "TPU-v6e",
    "v7x": "TPU7x",
    "TPU-v7": "TPU7x",
    "TPU-v7x": "TPU7x",
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


def peak_of(known: Chip, dtype: str) -> float:
    """Dense FLOP/s of a chip's matmuls at a dtype. ValueError, with what it has, for one that is not known of it."""
    if dtype not in known.peak_flops:
        raise ValueError(f"{known.name} has no {dtype} peak; known: {', '.join(known.peak_flops)}")
    return known.peak_flops[dtype]


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
