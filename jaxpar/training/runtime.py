"""What must be settled before JAX starts: devices, number formats, the cache of compiled programs."""

import os
from pathlib import Path

import jax

from jaxpar.config import Config, RunConfig


def prepare(config: Config) -> None:
    """Configure JAX for a run; call it before any device is touched."""
    if config.run.emulate:
        emulate(config.run.emulate)
    elif runs_on_cpu(config.run):
        # Else every plugin that is installed only to compile for absent devices complains at length.
        jax.config.update("jax_platforms", "cpu")
    if config.run.precision == "float64":
        jax.config.update("jax_enable_x64", True)
    if config.run.compilation_cache:
        cache_programs(config.run.compilation_cache)


def runs_on_cpu(run: RunConfig) -> bool:
    """Whether CPU devices are all that a run has, as far as can be told before JAX starts."""
    if run.emulate:
        return True
    platforms = os.environ.get("JAX_PLATFORMS")
    return not _has_accelerator() if platforms is None else platforms == "cpu"


def emulate(num_devices: int) -> None:
    """Make this process's CPU look like so many devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def _has_accelerator() -> bool:
    """Whether the system has a device file of an NVIDIA or AMD GPU, or of a TPU."""
    patterns = ("nvidia[0-9]*", "dxg", "kfd", "accel*", "vfio/[0-9]*")
    return any(True for pattern in patterns for _ in Path("/dev").glob(pattern))


def cache_programs(directory: str) -> None:
    """Keep compiled programs in a directory; "auto" is jaxpar/xla in the user's cache."""
    if directory == "auto":
        directory = str(cache_directory("xla"))
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_directory(name: str) -> Path:
    """jaxpar's own in the user's cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "jaxpar" / name
