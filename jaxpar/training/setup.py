"""From a config to a model on a mesh; what cannot work is said here, before anything is compiled."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.kernels import grouped
from jaxpar.kernels.attention import Kernel, choose
from jaxpar.kernels.mask import AttentionMask
from jaxpar.parallel.axes import mesh_axes
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.order import multiple
from jaxpar.parallel.expert import ExpertStrategy
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.pipeline import kinds
from jaxpar.parallel.pipeline.kinds import KINDS
from jaxpar.parallel.pipeline.schedule import Schedule
from jaxpar.parallel.pipeline.validate import validate
from jaxpar.parallel.remat import Remat, check_offload
from jaxpar.parallel.vocab import Objective
from jaxpar.training.model import Model
from jaxpar.training.precision import Precision
from meshes import build_mesh
from models.count import num_moe_layers


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The config's mesh over these devices (all, by default)."""
    return build_mesh(config.parallel.mesh, config.parallel.dcn_mesh, devices)


def make_model(config: Config, mesh: Mesh | None) -> Model:
    """The config's model on a mesh, or with None on one device without one. Raises ValueError for sizes that the
    mesh cannot cut."""
    dtypes = Precision.of(config.run)
    parallel = config.parallel
    sizes = mesh.shape if mesh is not None else {"pipe": 1, "context": 1, "tensor": 1}
    device = mesh.devices.flat[0] if mesh is not None else jax.devices("cpu")[0]
    schedule = make_schedule(config, sizes["pipe"])
    num_parts = schedule.num_parts if schedule is not None else 1
    strategy = parallel.context_strategy if mesh is not None else "auto"
    layout = Layout(
        mesh=mesh,
        compute_dtype=dtypes.compute,
        reduce_dtype=dtypes.reduce,
        sequence_parallel=parallel.sequence_parallel,
        reshard_after_forward=parallel.reshard_after_forward,
        remat=Remat.parse(parallel.remat, config.model.num_units // num_parts),
        zero=parallel.zero,
        context=ContextStrategy.parse(strategy, parallel.context_order, sizes["context"], sizes["pipe"]),
        dispatch=expert_strategy(config, device.platform, device.device_kind),
        grouped_kernel=_grouped_kernel(config, device.platform, dtypes.compute, sizes["tensor"]),
        packs_documents=config.data.pack_documents,
        attention_kernel=_attention_kernel(config, dtypes.compute, sizes["context"]) if mesh is not None else "tiled",
        is_fp8=config.run.matmul == "fp8",
        schedule=schedule,
    )
    check(config, layout)
    return Model(
        config.model, layout, dtypes.params, Objective(config.optimizer.z_loss, config.optimizer.label_smoothing)
    )


def make_schedule(config: Config, num_stages: int) -> Schedule | None:
    """Of the config's pipeline; None for one stage. Raises ValueError for what cannot run, or not on so many."""
    if num_stages == 1:
        return None
    parallel, model, num_layers = config.parallel, config.model, config.model.num_units
    kind = KINDS.get(parallel.pipeline)
    if kind and (kind.needs_slices or not kind.synchronous):
        works = ", ".join(name for name, kind in KINDS.items() if kind.synchronous and not kind.needs_slices)
        raise ValueError(
            f"--pipeline {parallel.pipeline} can be drawn and simulated, but not run yet; these can: {works}"
        )
    schedule = kinds.make(
        parallel.pipeline, num_stages, parallel.grad_accumulation, parallel.chunks if parallel.chunks > 1 else None
    )
    if num_layers % schedule.num_parts:
        chunks = f" x {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
        parts = schedule.num_parts
        units = "" if num_layers == model.num_layers else f", or {num_layers} units of --model.moe-every,"
        nearest = [n for n in (num_layers // parts * parts, -(-num_layers // parts) * parts) if n]
        raise ValueError(
            f"--model.num-layers {model.num_layers}{units} is not divisible by pipe={num_stages}{chunks}; the nearest "
            f"that is: {' or '.join(str(model.num_dense_layers + n * model.moe_every) for n in nearest)}"
        )
    if parallel.zero == 2:
        raise ValueError(f"--zero 2 does not go with pipe={num_stages}, which keeps a step's gradients; take 1 or 3")
    validate(schedule)
    return schedule


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


def expert_strategy(config: Config, platform: str, device_kind: str = "") -> ExpertStrategy:
    """How the config's mixtures send tokens to experts on a platform's devices."""
    parallel = config.parallel
    # TPUs v5e and v6e, "lite", do not route a ragged all-to-all.
    has_ragged = platform == "gpu" or (platform == "tpu" and "lite" not in device_kind)
    exchange: Literal["gather", "ragged"] = "ragged" if has_ragged else "gather"
    return ExpertStrategy(parallel.moe_dispatch, parallel.capacity_factor, parallel.capacity_order, exchange)


def _grouped_kernel(config: Config, platform: str, dtype: jnp.dtype, num_tensor_ranks: int) -> grouped.Kernel:
    """For the mesh's devices, be they only compiled for."""
    model = config.model
    if not model.num_experts or config.parallel.moe_dispatch == "capacity":
        return "dense"
    return grouped.choose(platform, dtype, (model.embed_dim, model.expert_mlp_dim // num_tensor_ranks))


def check(config: Config, layout: Layout) -> None:
    """Raise ValueError, in one line, for the first size that the layout cannot cut into equal parts."""
    if layout.mesh is not None:
        check_offload(layout.remat, layout.mesh.devices.flat[0])
    layout.check_divisible(config.data.batch_size, "batch", "--batch-size", config.parallel.grad_accumulation)
    layout.check_divisible(config.model.num_heads, "heads", "--model.num-heads")
    model = config.model
    if num_moe_layers(model) < model.num_layers:
        layout.check_divisible(model.mlp_dim, "mlp", "--model.mlp-dim")
    if model.num_experts:
        layout.check_divisible(model.num_experts, "experts", "--model.num-experts")
        layout.check_divisible(model.expert_mlp_dim, "mlp", "--model.expert-mlp-dim")
        if model.balancing == "bias" and config.optimizer.name == "schedule-free":
            raise ValueError(
                "--model.balancing bias moves a parameter beside the optimizer, whose average schedule-free would not "
                "have it in; take another --optimizer or --model.balancing loss"
            )
    ranks = layout.axis_size("context")
    parts = layout.axis_size(*layout.present(mesh_axes(layout.spec("residual_seq"))))
    layout.check_divisible(config.data.seq_len, "residual_seq", "--seq-len", unit=multiple(layout.context.order, ranks))
    layout.context.check(config.data.seq_len, config.model.num_heads, ranks, layout.axis_size("tensor"), unit=parts)
