"""How much of its memory the fullest of this process's devices needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device.

    Where the backend counts (GPUs, TPUs), the most that was ever in use, by whatever. Where it does not (CPU), what the
    compiled step needs at once of one device: arguments, results and temporaries, by the compiler's account. That is
    the larger and the more telling part, and unlike a walk over live arrays (milliseconds, and blind to temporaries)
    it costs nothing.
    """

    devices: Sequence[jax.Device]
    """This process's."""
    step: jax.stages.Compiled

    def peak_bytes(self) -> int | None:
        """Some microseconds a device. None where neither backend nor compiler tells."""
        stats = [device.memory_stats() or {} for device in self.devices]
        peaks = [s.get("peak_bytes_in_use", s.get("bytes_in_use")) for s in stats]
        return max((peak for peak in peaks if peak is not None), default=self._compiled_bytes)

    @cached_property
    def _compiled_bytes(self) -> int | None:
        needed = self.step.memory_analysis()
        if needed is None:
            return None
        return (
            needed.argument_size_in_bytes
            + needed.output_size_in_bytes
            - needed.alias_size_in_bytes
            + needed.temp_size_in_bytes
            + needed.generated_code_size_in_bytes
        )

    def __str__(self) -> str:
        """A line for the end of a run."""
        peak = self.peak_bytes()
        if peak is None:
            return "memory: not known on this backend"
        stats = [device.memory_stats() or {} for device in self.devices]
        limit = min((s["bytes_limit"] for s in stats if "bytes_limit" in s), default=None)
        if not any(stats):
            return f"memory: {bytes_text(peak)} a device, by the compiler's account of the step"
        return f"memory: {bytes_text(peak)} at most on a device" + (f", of {bytes_text(limit)}" if limit else "")


def bytes_text(size: float) -> str:
    """In binary units of a readable size."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
