"""From a config to a model on a mesh; what cannot work is said here, before anything is compiled."""

from collections.abc import Mapping, Sequence
from functools import partial

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
from jaxpar.parallel.pipeline import kinds, looped, partition
from jaxpar.parallel.pipeline.kinds import KINDS
from jaxpar.parallel.pipeline.schedule import Schedule
from jaxpar.parallel.pipeline.validate import validate
from jaxpar.parallel.remat import Remat, check_offload
from jaxpar.parallel.vocab import Objective
from jaxpar.planning.pipeline import slice_flops
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
    schedule = make_schedule(config, sizes["pipe"])
    num_parts = schedule.num_parts if schedule is not None else 1
    layout = Layout(
        mesh=mesh,
        compute_dtype=dtypes.compute,
        reduce_dtype=dtypes.reduce,
        sequence_parallel=parallel.sequence_parallel,
        reshard_after_forward=parallel.reshard_after_forward,
        remat=Remat.parse(parallel.remat, config.model.num_layers // num_parts),
        zero=parallel.zero,
        context=context_strategy(config, sizes, schedule) if mesh is not None else ContextStrategy(),
        packs_documents=config.data.pack_documents,
        attention_kernel=_attention_kernel(config, dtypes.compute, sizes["context"]) if mesh is not None else "tiled",
        is_fp8=config.run.matmul == "fp8",
        schedule=schedule,
        slices=slice_lengths(config, mesh.shape, schedule) if mesh is not None and schedule is not None else (),
    )
    check(config, layout)
    return Model(
        config.model, layout, dtypes.params, Objective(config.optimizer.z_loss, config.optimizer.label_smoothing)
    )


def context_strategy(config: Config, mesh: Mapping[str, int], schedule: Schedule | None) -> ContextStrategy:
    """The config's, on a mesh of these sizes. Raises ValueError for what the schedule rules out."""
    branches = schedule is not None and schedule.kind not in looped.KINDS
    return ContextStrategy.parse(
        config.parallel.context_strategy, config.parallel.context_order, mesh["context"], branches
    )


def make_schedule(config: Config, num_stages: int) -> Schedule | None:
    """Of the config's pipeline; None for one stage. Raises ValueError for what cannot run, or not on so many."""
    if num_stages == 1:
        return None
    parallel, num_layers = config.parallel, config.model.num_layers
    kind = KINDS.get(parallel.pipeline)
    if kind and not kind.synchronous:
        works = ", ".join(name for name, kind in KINDS.items() if kind.synchronous)
        raise ValueError(
            f"--pipeline {parallel.pipeline} can be drawn and simulated, but not run yet; these can: {works}"
        )
    schedule = kinds.make(
        parallel.pipeline,
        num_stages,
        parallel.grad_accumulation,
        parallel.chunks if parallel.chunks > 1 else None,
        parallel.slices if parallel.slices > 1 or (kind and kind.needs_slices) else None,
    )
    if num_layers % schedule.num_parts:
        chunks = f" x {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
        parts = schedule.num_parts
        nearest = [n for n in (num_layers // parts * parts, -(-num_layers // parts) * parts) if n]
        raise ValueError(
            f"--model.num-layers {num_layers} is not divisible by pipe={num_stages}{chunks}; the nearest that is: "
            f"{' or '.join(map(str, nearest))}"
        )
    if parallel.zero == 2:
        raise ValueError(f"--zero 2 does not go with pipe={num_stages}, which keeps a step's gradients; take 1 or 3")
    validate(schedule)
    return schedule


def slice_lengths(config: Config, mesh: Mapping[str, int], schedule: Schedule) -> tuple[int, ...]:
    """Of the token slices of a schedule that has some, on a mesh of these sizes: the dynamic program's, by
    modelled FLOPs. Raises ValueError."""
    if not KINDS[schedule.kind].needs_slices:
        return ()
    if mesh["context"] > 1:
        raise ValueError(
            f"--pipeline {schedule.kind} cuts sequences into slices, context={mesh['context']} into parts of its own; "
            "take context=1 or another schedule"
        )
    seq_len = config.data.seq_len
    unit = mesh["tensor"] if config.parallel.sequence_parallel else 1
    fine = [n for n in range(unit, seq_len + 1, unit) if seq_len % n == 0 and seq_len // n >= schedule.num_slices]
    # Cuts to the nearest of 64 places are even enough.
    granularity = next((n for n in fine if seq_len // n <= 64), fine[-1] if fine else unit)
    time = partial(slice_flops, config.model)
    return partition.token_slices(
        time, seq_len, schedule.num_stages, schedule.num_microbatches, granularity, schedule.num_slices
    )


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
    layout.check_divisible(config.data.batch_size, "batch", "--batch-size", config.parallel.grad_accumulation)
    layout.check_divisible(config.model.num_heads, "heads", "--model.num-heads")
    layout.check_divisible(config.model.mlp_dim, "mlp", "--model.mlp-dim")
    ranks = layout.axis_size("context")
    parts = layout.axis_size(*layout.present(mesh_axes(layout.spec("residual_seq"))))
    layout.check_divisible(config.data.seq_len, "residual_seq", "--seq-len", unit=multiple(layout.context.order, ranks))
    layout.context.check(config.data.seq_len, config.model.num_heads, ranks, layout.axis_size("tensor"), unit=parts)
