"""Runs of several processes: how they find each other, stop together and end."""

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
from jax._src import clusters  # what jax.distributed.initialize() looks for itself; no public function tells
from jax._src.distributed import global_state  # its key-value store, which needs no devices
from jax.experimental import multihost_utils

import meshes
from jaxpar.config import Config, RunConfig
from jaxpar.training.distributed.interrupt import StopOnSignal
from jaxpar.training.distributed.processes import SKEW_SECONDS, from_each, from_first, is_first, name
from jaxpar.training.distributed.rendezvous import Rendezvous
from jaxpar.training.runtime import runs_on_cpu
from meshes import PeakFlops

START_SECONDS = 300
"""How long the processes of a run wait for each other at its start."""
_LAST_WORDS_SECONDS = 3
_CPU_THREADS = 16
# Not Kubernetes, where JAX asks the cluster's API: a run of one process in a pod must not.
_LAUNCHERS = (clusters.OmpiCluster, clusters.SlurmCluster, clusters.GkeTpuCluster, clusters.GceTpuCluster)


def start(run: RunConfig, *, timeout_seconds: int = START_SECONDS) -> None:
    """Connect this process with the run's others, if there are any; after runtime.prepare, before any device.

    With --coordinator by the flags; else as SLURM, Open MPI or a TPU pod started it, where one did; else not at all.
    Raises ValueError where the processes do not meet.
    """
    if run.coordinator:
        rendezvous = Rendezvous(run.coordinator, run.num_processes, run.process_id)
        peers = rendezvous.meet(timeout_seconds)
        _prepare_cpu(run)
        jax.distributed.initialize(
            run.coordinator,
            run.num_processes,
            run.process_id,
            cluster_detection_method="deactivate",
            coordinator_bind_address=rendezvous.bind_address(),
            initialization_timeout=timeout_seconds,
        )
        atexit.register(peers.farewell)
        peers.watch()
    elif run.num_processes > 1:
        raise ValueError(f"--num-processes {run.num_processes} needs --coordinator HOST:PORT, where process 0 runs")
    elif (launcher := _launcher()) is not None:
        _prepare_cpu(run)
        jax.distributed.initialize(cluster_detection_method=launcher, initialization_timeout=timeout_seconds)
    if not is_first():
        logging.basicConfig(format=f"{name()}: %(message)s", force=True)
        logging.getLogger("jaxpar").setLevel(logging.WARNING)


def _launcher() -> str | None:
    """JAX's name for what started this process as one of several; None where nothing did."""
    for launcher in _LAUNCHERS:
        if launcher.is_env_present() and launcher.get_process_count() > 1:
            return launcher.name
    return None


def _prepare_cpu(run: RunConfig) -> None:
    """Collectives between CPU devices of several processes, where such devices are all that this run has."""
    if not runs_on_cpu(run):
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A device that waits for another process holds a thread: with as many threads as cores, all may end up waiting.
    os.environ.setdefault("NPROC", str(max(_CPU_THREADS, 2 * run.emulate)))
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_collective_timeout_seconds" not in flags:  # 30 s else, and a peer may be compiling
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_timeout_seconds={SKEW_SECONDS}"
    # Gloo reports every connection on standard output, from C++: only Python's own output goes on there.
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=encoding, errors=errors)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def check_same(config: Config) -> None:
    """Raise ValueError, the same one in every process, for a setting that they do not all have alike."""

    def settings(node: Any, prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for field in dataclasses.fields(node):
            value, path = getattr(node, field.name), prefix + field.name
            found |= settings(value, f"{path}.") if dataclasses.is_dataclass(value) else {path: value}
        return found

    own = settings(config)
    told = from_each("settings", json.dumps([global_state.process_id, own]))
    (_, first), *others = sorted(map(json.loads, told), key=lambda item: item[0])
    for process_id, theirs in others:
        for path, value in theirs.items():
            if path != "run.process_id" and value != first[path]:
                raise ValueError(
                    f"process {process_id} was started with {path} = {value!r}, process 0 with {first[path]!r}; give "
                    "all the same"
                )


def peak_flops(devices: Sequence[jax.Device], dtype: str) -> PeakFlops:
    """meshes.peak_flops for all processes, measured by process 0 alone; a CPU is shared by those on one machine."""
    sharing = _processes_here() if devices[0].platform == "cpu" else 1

    def measure() -> str:
        peak = meshes.peak_flops(devices, dtype)
        shared = f" of each of {sharing} processes" if sharing > 1 else ""
        return json.dumps([peak.per_device / sharing, peak.label + shared])

    per_device, label = json.loads(from_first("peak_flops", measure))
    return PeakFlops(per_device, label)


def _processes_here() -> int:
    """How many of the run's processes are on this machine."""
    return from_each("hosts", socket.gethostname()).count(socket.gethostname())


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """A context, on the main thread, of should_stop(step): whether SIGTERM, or Ctrl-C, came, to be asked after every
    step, by every process of the run.

    It may come to any of the processes; all say yes after the same step, the next that none has done. In a run of one
    process a second signal ends it at once.
    """
    if global_state.client is not None:
        # JAX's service takes SIGTERM; Ctrl-C goes to it as that, once.
        def terminate(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            os.kill(os.getpid(), signal.SIGTERM)

        before = signal.signal(signal.SIGINT, terminate)
        yield multihost_utils.reached_preemption_sync_point
    else:
        with StopOnSignal() as stop:
            yield lambda step: stop.requested()


def leave(error: Exception | KeyboardInterrupt) -> NoReturn:
    """End the process for an error: of the user's kind in one line, else with a traceback.

    At once: by the usual way out it would wait for other processes, and they for it, and for threads that a failed
    checkpoint has left behind.
    """
    together = global_state.client is not None
    status, line = _explain(error)
    if together and "Gloo" in str(error):
        time.sleep(_LAST_WORDS_SECONDS)  # the thread that watches the others ends this process now, and says who went
    if line is None:
        traceback.print_exception(error)
        line = type(error).__name__
    print(f"error: {f'{name()}: ' if together else ''}{line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if together and status == 2:
        time.sleep(_LAST_WORDS_SECONDS)  # all may be saying the same, and the first to go ends the others
    os._exit(status)


def _explain(error: Exception | KeyboardInterrupt) -> tuple[int, str | None]:
    """The exit status, and one line if that says all."""
    if isinstance(error, ValueError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in first_line:
        return 2, f"the devices' memory does not hold this: {first_line}"
    if isinstance(error, jax.errors.JaxRuntimeError) and "Gloo" in first_line:
        return 1, f"another process has gone, or the network between them: {first_line}"
    return 1, None
