"""The train step compiled for a machine that is not here, in a process of its own, and kept.

A compiler that aborts, or takes for ever, ends its own process and not the caller's; and libtpu wants its environment
before it is loaded. What the compiler made is kept in the user's cache, by a hash of the lowered program, the versions
of the compilers and the options.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar import config as configs
from jaxpar import toml
from jaxpar.audit.topology import TPU_ENVIRONMENT, Topology, devices_of
from jaxpar.config import Config
from jaxpar.kernels.attention import Kernel
from jaxpar.parallel.axes import PARAMETER_RULES, mesh_axes, partition_spec
from jaxpar.parallel.fsdp import Folds
from jaxpar.training import compiler_options, optimizers, runtime, setup
from jaxpar.training.model import Model
from jaxpar.training.step import abstract_batch, abstract_state, make_step
from meshes import slice_factors

_PROGRAM, _FACTS = "program.hlo.gz", "facts.json"
_FORMAT = "3"
"""Of what is kept: another one for other facts, or for facts of another meaning."""
_CUDNN = 91200
"""Of the version that attention kernels are asked for, where there is no cuDNN to tell its own."""

# jax 0.12's XLA has kernels of its own for small collectives within a node, takes them for 64 GPUs on 8 nodes too where
# none is here, and cannot compile them.
_WITHOUT_KERNELS: dict[str, str | bool] = (
    {"xla_gpu_experimental_use_collective_kernels": ""} if jax.__version_info__ >= (0, 12) else {}
)


@dataclass(frozen=True)
class Parameter:
    """As it lies on the mesh."""

    name: str
    shape: tuple[int, ...]
    logical: tuple[str | None, ...]
    axes: tuple[str, ...]
    """Mesh axes that it is cut over."""
    missing: tuple[str, ...]
    """Mesh axes larger than 1 that the rules cut it over, and it is not."""
    num_bytes: int
    """Of all of it."""


@dataclass(frozen=True)
class Program:
    """A compiled train step."""

    hlo: str
    """Optimised and scheduled."""
    arguments: int
    """Bytes per device, as are the next three."""
    outputs: int
    aliased: int
    """Of the outputs, what lies in arguments' place."""
    temporaries: int
    """What is set aside for them; see `_temporaries`."""
    compile_seconds: float
    """When it was compiled."""
    options: dict[str, str | bool]
    attention: Kernel
    """The kernel for a whole sequence."""
    mesh: dict[str, int]
    slices: dict[str, int]
    """In how many slices each axis has ranks."""
    folds: Folds
    device_kind: str
    parameters: tuple[Parameter, ...]
    versions: str
    was_cached: bool = False

    @property
    def total(self) -> int:
        """Bytes per device while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def compile_step(config: Config, topology: Topology, timeout: float, use_cache: bool = True) -> Program:
    """The step that `train.py` runs with this config, compiled for a topology.

    Raises ValueError, in one line, for what train.py or `devices_of` refuses, for what the compiler refuses (a TPU's
    does so where memory is short), and after `timeout` seconds.
    """
    if topology.platform == "tpu" and config.run.precision == "float64":
        raise ValueError(f"--precision float64: {topology.text} has no such floats; take float32, or cpu:N devices")
    with tempfile.TemporaryDirectory(prefix="jaxpar-audit-") as directory:
        work = Path(directory)
        (work / "config.toml").write_text(toml.dumps(config))
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        if topology.platform == "tpu":
            environment |= TPU_ENVIRONMENT
        cache = str(runtime.cache_directory("audit")) if use_cache else ""
        command = [sys.executable, "-m", "jaxpar.audit.compile", str(work), topology.text, cache]
        try:
            child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"compiling for {topology.text} took more than {timeout:g} s and was ended; give a longer --timeout"
            ) from None
        if child.returncode:
            raise ValueError(f"compiling for {topology.text}: {_complaint(child.stderr)}")
        answer = json.loads((work / "answer.json").read_text())
        return _load(Path(answer["directory"]), answer["was_cached"])


def _complaint(stderr: str) -> str:
    """The last error of a process, in one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith("Error")]
    return errors[-1].partition(": ")[2] if errors else (lines or ["the compiler ended without a word"])[-1]


def _load(directory: Path, was_cached: bool) -> Program:
    def parameter(fields: dict[str, Any]) -> Parameter:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return Parameter(**values)

    facts = json.loads((directory / _FACTS).read_text())
    parameters = tuple(map(parameter, facts.pop("parameters")))
    factors, wide = facts.pop("folds")
    folds = Folds(tuple((axis, tuple(own)) for axis, own in factors), frozenset(map(frozenset, wide)))
    hlo = gzip.decompress((directory / _PROGRAM).read_bytes()).decode()
    return Program(hlo, folds=folds, parameters=parameters, was_cached=was_cached, **facts)


def lower(config: Config, devices: Sequence[jax.Device], platform: str) -> tuple[jax.stages.Lowered, Model, Mesh]:
    """The train step, lowered from abstract state for devices that need not be here."""
    mesh = setup.make_mesh(config, devices)
    model = setup.make_model(config, mesh, platform)
    tx = optimizers.make(config.optimizer, config.run.steps, model.names, config.model.vocab_size)
    step = make_step(model, tx, config.optimizer.clip_norm, config.run.log_norms)
    # Before the mesh is current: nothing can be computed on devices that are not here.
    arguments = abstract_state(model, tx), abstract_batch(config, model)
    with jax.set_mesh(mesh):
        return jax.jit(step, donate_argnums=0).lower(*arguments), model, mesh


def _child(work: Path, text: str, cache: str) -> None:
    config = configs.load(work / "config.toml", Config())
    topology = Topology.parse(text)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", config.run.precision == "float64")
    if topology.platform == "cpu":
        runtime.emulate(topology.num_chips)
    if topology.platform == "gpu":
        _answer_for_cudnn()
    devices = devices_of(text)
    lowered, model, mesh = lower(config, devices, topology.platform)
    options = compiler_options.resolve(config.run.compiler_options, topology.platform, model.sends_ragged)

    versions = _versions(topology.platform)
    parts = (lowered.as_text(), text, versions, json.dumps(options), str(devices[0].device_kind), _FORMAT)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    place = Path(cache) / key if cache else work / key
    was_cached = (place / _FACTS).exists()
    if not was_cached:
        start = time.perf_counter()
        not_here = _WITHOUT_KERNELS if topology.platform == "gpu" else {}
        compiled = lowered.compile(compiler_options=not_here | options)
        seconds = time.perf_counter() - start
        memory: Any = compiled.memory_analysis()
        facts = {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": _temporaries(memory, topology),
            "compile_seconds": seconds,
            "options": options,
            "attention": model.layout.attention_kernel,
            "mesh": dict(mesh.shape),
            "slices": slice_factors(mesh),
            "folds": [model.layout.folds.factors, [sorted(axes) for axes in model.layout.folds.wide]],
            "device_kind": devices[0].device_kind,
            "parameters": [dataclasses.asdict(each) for each in _parameters(model, mesh)],
            "versions": versions,
        }
        hlo = compiled.as_text()
        assert hlo is not None
        # Whole or not at all: another process may look for it, or write it, at the same time.
        staged = place.with_name(f"{key}.{os.getpid()}")
        staged.mkdir(parents=True)
        (staged / _PROGRAM).write_bytes(gzip.compress(hlo.encode(), compresslevel=6))
        (staged / _FACTS).write_text(json.dumps(facts))
        with contextlib.suppress(OSError):  # it is there by now
            staged.rename(place)
    (work / "answer.json").write_text(json.dumps({"directory": str(place), "was_cached": was_cached}))


def _temporaries(memory: Any, topology: Topology) -> int:
    """On TPUs by the peak, arguments included, which is what their compiler's buffers take and holds against a chip's
    memory: its `temp_size_in_bytes` is a sum that may exceed that memory in a program that fits."""
    if topology.platform != "tpu":
        return memory.temp_size_in_bytes
    others = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.peak_memory_in_bytes - others


def _answer_for_cudnn() -> None:
    """JAX asks the cuDNN that it runs with for its version before it lowers attention to a call of it."""
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: _CUDNN


def _versions(platform: str) -> str:
    names = ["jax", "jaxlib", *({"tpu": ["libtpu"], "gpu": ["jax-cuda12-pjrt"]}.get(platform, []))]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _parameters(model: Model, mesh: Mesh) -> list[Parameter]:
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(model.abstract)
    all_names = jax.tree.leaves(model.names, is_leaf=lambda node: isinstance(node, tuple))
    for (path, leaf), names in zip(leaves, all_names, strict=True):
        asked = mesh_axes(partition_spec(names, PARAMETER_RULES, mesh.shape))
        has = mesh_axes(leaf.sharding.spec)
        large = [axis for axis, size in mesh.shape.items() if size > 1]
        found.append(
            Parameter(
                jax.tree_util.keystr(path, simple=True, separator="."),
                tuple(leaf.shape),
                tuple(names),
                tuple(axis for axis in large if axis in has),
                tuple(axis for axis in large if axis in asked - has),
                leaf.size * leaf.dtype.itemsize,
            )
        )
    return found


if __name__ == "__main__":
    try:
        _child(Path(sys.argv[1]), *sys.argv[2:])
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])}", file=sys.stderr)
        raise SystemExit(1) from None
