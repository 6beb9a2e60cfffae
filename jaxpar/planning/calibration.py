"""What arithmetic cannot know of a machine: which share of its peaks a kernel reaches, and what a framework adds.

One table, data/calibration.toml, whose entries were fitted to published runs by planning/fit.py and say to which. Few
numbers on purpose: what is physics stays in kernel_time and step_time, what a framework does or does not do is a fact
of the framework (`fused`, `overlaps`), and only what is left is fitted. A chip without an entry gets its generation's;
our own programs, as "jaxpar", what a framework has before any run of it is seen.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jaxpar import toml
from meshes.spec import Chip


@dataclass(frozen=True)
class ChipCalibration:
    """Shares of a chip's published peaks that kernels reach."""

    matmul: Mapping[str, float] = field(hash=False)
    """By dtype: of the peak, in a matrix product so large that memory does not count."""
    attention: float
    """Of the bfloat16 peak, in FlashAttention-2 (or what the chip has instead) over long sequences."""
    newest_attention: float
    """Speed of the chip's newest kernel beside that: published, not fitted."""
    memory: float
    """Of the memory's bandwidth, in passes over activations and in a product's operands."""
    network: float
    """Of the links' bandwidth, in collectives."""
    overlap: float
    """Of the traffic that has compute beside it, the part that costs no time."""
    jitter: float
    """Of a step, what each doubling of the servers (or TPU slices) that wait for each other adds."""
    fitted_on: str


@dataclass(frozen=True)
class FrameworkCalibration:
    """What a framework's step costs beside its kernels, and what it does at the same time."""

    overhead: float
    """Time of all compute, in units of what the chip's calibration gives: the one fitted constant."""
    fused: bool
    """Element-wise operations are compiled into few passes over memory, not one kernel each."""
    attention: str
    """Its kernel: "newest", one of kernel_time.ATTENTION_KERNELS, or kernel_time.UNFUSED."""
    overlaps: tuple[str, ...]
    """Mesh axes whose traffic runs beside compute."""
    fitted_on: str
    reruns_stages: bool = False
    """A pipeline's backward pass runs its chunk's forward pass again, whatever remat says."""


@dataclass(frozen=True)
class Calibration:
    """Of one chip under one framework."""

    chip: ChipCalibration
    framework: FrameworkCalibration


@dataclass(frozen=True)
class CalibrationTable:
    chips: Mapping[str, ChipCalibration]
    frameworks: Mapping[str, FrameworkCalibration]
    generations: Mapping[str, str]
    """The entry of `chips` that stands in for those with a name that starts so; the longest start counts."""

    def of(self, chip: Chip, framework: str = "jaxpar") -> Calibration:
        """The entries for a chip and a framework, or what stands in for them.

        Raises:
          ValueError: no framework of this name is known; names those that are.
        """
        if framework not in self.frameworks:
            raise ValueError(
                f"no framework is called {framework!r}{toml.nearest(framework, self.frameworks)}; its runs can be "
                "predicted as 'jaxpar'"
            )
        return Calibration(self.chips[self.entry_of(chip)], self.frameworks[framework])

    def entry_of(self, chip: Chip) -> str:
        """The name of a chip's entry in `chips`, or of what stands in for it."""
        if chip.name in self.chips:
            return chip.name
        starts = [start for start in self.generations if chip.name.startswith(start)]
        return self.generations[max(starts, key=len)]


def parse(document: Mapping[str, Any]) -> CalibrationTable:
    """The table of a TOML document with tables chips, frameworks and generations."""
    return CalibrationTable(
        chips={name: ChipCalibration(**entry) for name, entry in document["chips"].items()},
        frameworks={
            name: FrameworkCalibration(**{**entry, "overlaps": tuple(entry["overlaps"])})
            for name, entry in document["frameworks"].items()
        },
        generations=document["generations"],
    )


@functools.cache
def calibration_table() -> CalibrationTable:
    """The table that comes with jaxpar."""
    path = resources.files("jaxpar.planning") / "data" / "calibration.toml"
    with resources.as_file(path) as file:
        return parse(toml.read(file))
