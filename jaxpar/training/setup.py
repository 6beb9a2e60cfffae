"""From a config to a model on a mesh; what cannot work is said here, before anything is compiled."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.kernels.attention import Kernel, choose
from jaxpar.kernels.mask import AttentionMask
from jaxpar.parallel.axes import mesh_axes
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import multiple
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.pipeline import kinds
from jaxpar.parallel.pipeline.auto import auto
from jaxpar.parallel.pipeline.kinds import KINDS
from jaxpar.parallel.pipeline.partition import partition_among_stages
from jaxpar.parallel.pipeline.schedule import Placement, Schedule
from jaxpar.parallel.pipeline.validate import validate
from jaxpar.parallel.remat import Remat, check_offload
from jaxpar.parallel.vocab import Objective
from jaxpar.planning.pipeline import part_work, stage_times
from jaxpar.training import asynchronous
from jaxpar.training.model import Model
from jaxpar.training.precision import Precision
from meshes import build_mesh


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The config's mesh over these devices (all, by default)."""
    return build_mesh(config.parallel.mesh, config.parallel.dcn_mesh, devices)


def make_model(config: Config, mesh: Mesh | None) -> Model:
    """The config's model on a mesh, or with None on one device without one. Raises ValueError for sizes that the
    mesh cannot cut."""
    dtypes = Precision.of(config.run)
    parallel = config.parallel
    sizes = mesh.shape if mesh is not None else {"pipe": 1, "context": 1}
    schedule = make_schedule(config, sizes["pipe"]) if mesh is not None else None
    counts = layers_per_part(config, schedule)
    strategy = parallel.context_strategy if mesh is not None else "auto"
    layout = Layout(
        mesh=mesh,
        compute_dtype=dtypes.compute,
        reduce_dtype=dtypes.reduce,
        sequence_parallel=parallel.sequence_parallel,
        reshard_after_forward=reshards(parallel.reshard_after_forward, sizes["pipe"]),
        remat=Remat.parse(parallel.remat, max(counts)),
        zero=parallel.zero,
        context=ContextStrategy.parse(strategy, parallel.context_order, sizes["context"], sizes["pipe"]),
        packs_documents=config.data.pack_documents,
        attention_kernel=_attention_kernel(config, dtypes.compute, sizes["context"]) if mesh is not None else "tiled",
        is_fp8=config.run.matmul == "fp8",
        schedule=schedule,
        layers_per_part=counts if len({*counts}) > 1 else None,
        keeps_residuals=parallel.pipeline_residuals,
        spreads_head=parallel.spread_head and schedule is not None,
    )
    check(config, layout)
    return Model(
        config.model, layout, dtypes.params, Objective(config.optimizer.z_loss, config.optimizer.label_smoothing)
    )


def reshards(asked: Literal["auto", "always", "never"], num_stages: int) -> bool:
    """Whether a gathered weight is dropped after each use: by default, but in a pipeline, whose stages use theirs for
    one microbatch after another."""
    return num_stages == 1 if asked == "auto" else asked == "always"


def make_schedule(config: Config, num_stages: int) -> Schedule | None:
    """Of the config's pipeline; None for one stage, which has one only where it is updated between microbatches. Raises
    ValueError for what cannot run, or not on so many."""
    parallel = config.parallel
    kind = KINDS.get(parallel.pipeline)
    if num_stages == 1 and (kind is None or kind.synchronous):
        return None
    if kind and kind.needs_slices:
        works = ", ".join(name for name, kind in KINDS.items() if not kind.needs_slices)
        raise ValueError(
            f"--pipeline {parallel.pipeline} can be drawn and simulated, but not run yet; these can: {works}"
        )
    if parallel.pipeline == "auto":
        schedule = _searched(config, num_stages)
    elif parallel.pipeline_memory_limit is not None:
        raise ValueError(
            f"--pipeline-memory-limit {parallel.pipeline_memory_limit:g} has no use with --pipeline "
            f"{parallel.pipeline}, whose table is fixed; take --pipeline auto"
        )
    else:
        chunks = parallel.chunks if parallel.chunks > 1 else None
        schedule = kinds.make(parallel.pipeline, num_stages, parallel.grad_accumulation, chunks)
    if parallel.zero == 2:
        raise ValueError(f"--zero 2 does not go with pipe={num_stages}, which keeps a step's gradients; take 1 or 3")
    validate(schedule)
    return schedule


def _searched(config: Config, num_stages: int) -> Schedule:
    """The table that `auto` finds for the stages' modelled times."""
    parallel = config.parallel
    if parallel.chunks > 1:
        raise ValueError(f"--pipeline auto searches tables of one chunk, not --chunks {parallel.chunks}; leave it out")
    limit = math.inf if parallel.pipeline_memory_limit is None else parallel.pipeline_memory_limit
    if not limit >= 1:
        raise ValueError(f"--pipeline-memory-limit {limit:g} is below one microbatch's activations; take at least 1")
    counts = _layers_per_part(config, num_stages, 1, "loop")
    remat = Remat.parse(parallel.remat, max(counts))
    times = stage_times(config.model, config.data.seq_len, counts, remat)
    return auto(num_stages, parallel.grad_accumulation, times, limit)


def layers_per_part(config: Config, schedule: Schedule | None) -> tuple[int, ...]:
    """How many layers each part of the model has, in the model's order. Raises ValueError for what cannot be cut so."""
    if schedule is None:
        return (config.model.num_layers,)
    return _layers_per_part(config, schedule.num_stages, schedule.num_chunks, schedule.placement)


def _layers_per_part(config: Config, num_stages: int, num_chunks: int, placement: Placement) -> tuple[int, ...]:
    model, given, num_parts = config.model, config.parallel.layers_per_stage, num_stages * num_chunks
    named = f"pipe={num_stages}" + (f" x {num_chunks} chunks" if num_chunks > 1 else "")
    if model.num_layers < num_parts:
        raise ValueError(
            f"--model.num-layers {model.num_layers} is too few for {named}; each part needs a layer: take {num_parts} "
            "or more"
        )
    if given:
        return _parse_layers(given, model.num_layers, num_parts, named)
    if model.num_layers % num_parts == 0:
        return (model.num_layers // num_parts,) * num_parts
    work = part_work(model, config.data.seq_len)
    times = [work.layer] * model.num_layers
    return partition_among_stages(times, num_stages, num_chunks, placement, work.embedding, work.head)


def _parse_layers(text: str, num_layers: int, num_parts: int, named: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"--layers-per-stage {text} is no list of numbers; give {num_parts}, as in 7,8,8,7")
    counts = tuple(map(int, words))
    if len(counts) != num_parts:
        raise ValueError(f"--layers-per-stage {text} has {len(counts)} numbers; {named} takes {num_parts}")
    if 0 in counts:
        raise ValueError(f"--layers-per-stage {text} has a part without a layer; give each at least 1")
    if sum(counts) != num_layers:
        raise ValueError(
            f"--layers-per-stage {text} adds up to {sum(counts)} layers, not to the model's {num_layers}; change one "
            f"of them, or --model.num-layers to {sum(counts)}"
        )
    return counts


def _attention_kernel(config: Config, dtype: jnp.dtype, num_context_ranks: int) -> Kernel:
    """For the backend that runs, not for devices that are only compiled for."""
    model = config.model
    return choose(
        config.parallel.attention,
        jax.default_backend(),
        head_dim=model.head_dim,
        dtype=dtype,
        mask=AttentionMask(causal=True, window=model.sliding_window),
        has_documents=config.data.pack_documents,
        seq_len=config.data.seq_len,
        is_in_order=num_context_ranks == 1 or config.parallel.context_order == "contiguous",
    )


def check(config: Config, layout: Layout) -> None:
    """Raise ValueError, in one line, for the first size that the layout cannot cut into equal parts."""
    if layout.mesh is not None:
        check_offload(layout.remat, layout.mesh.devices.flat[0])
    if kinds.is_asynchronous(layout.schedule):
        asynchronous.check(config)
    layout.check_divisible(config.data.batch_size, "batch", "--batch-size", config.parallel.grad_accumulation)
    layout.check_divisible(config.model.num_heads, "heads", "--model.num-heads")
    layout.check_divisible(config.model.mlp_dim, "mlp", "--model.mlp-dim")
    ranks = layout.axis_size("context")
    parts = layout.axis_size(*layout.present(mesh_axes(layout.spec("residual_seq"))))
    layout.check_divisible(config.data.seq_len, "residual_seq", "--seq-len", unit=multiple(layout.context.order, ranks))
    layout.context.check(config.data.seq_len, config.model.num_heads, ranks, layout.axis_size("tensor"), unit=parts)
