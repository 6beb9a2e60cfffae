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
from jaxpar.parallel.remat import Remat, check_offload
from jaxpar.parallel.vocab import Objective
from jaxpar.training import asynchronous, pipelines
from jaxpar.training.model import Model
from jaxpar.training.precision import Precision
from meshes import build_mesh
from models.count import num_moe_layers


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The config's mesh over these devices (all, by default)."""
    return build_mesh(config.parallel.mesh, config.parallel.dcn_mesh, devices)


def make_model(config: Config, mesh: Mesh | None, platform: str | None = None) -> Model:
    """The config's model on a mesh, or with None on one device without one, with the kernels of a platform ("gpu"): of
    the backend that runs, if not told what the mesh's devices are. Raises ValueError for sizes that the mesh cannot
    cut."""
    dtypes = Precision.of(config.run)
    parallel = config.parallel
    sizes = mesh.shape if mesh is not None else {"pipe": 1, "context": 1, "tensor": 1}
    device = mesh.devices.flat[0] if mesh is not None else jax.devices("cpu")[0]
    schedule = pipelines.make_schedule(config, sizes["pipe"]) if mesh is not None else None
    counts = pipelines.layers_per_part(config, schedule)
    layout = Layout(
        mesh=mesh,
        compute_dtype=dtypes.compute,
        reduce_dtype=dtypes.reduce,
        sequence_parallel=parallel.sequence_parallel,
        reshard_after_forward=pipelines.reshards(parallel.reshard_after_forward, sizes["pipe"]),
        remat=Remat.parse(parallel.remat, max(counts)),
        zero=parallel.zero,
        context=pipelines.context_strategy(config, sizes, schedule) if mesh is not None else ContextStrategy(),
        dispatch=expert_strategy(config, device.platform, device.device_kind),
        grouped_kernel=_grouped_kernel(config, device.platform, dtypes.compute, sizes["tensor"]),
        packs_documents=config.data.pack_documents,
        attention_kernel=(
            _attention_kernel(config, dtypes.compute, sizes["context"], platform or jax.default_backend())
            if mesh is not None
            else "tiled"
        ),
        is_fp8=config.run.matmul == "fp8",
        schedule=schedule,
        layers_per_part=counts if len({*counts}) > 1 else None,
        slices=pipelines.slice_lengths(config, sizes, schedule) if schedule is not None else (),
        keeps_residuals=parallel.pipeline_residuals,
        spreads_head=parallel.spread_head and schedule is not None,
    )
    check(config, layout)
    return Model(
        config.model, layout, dtypes.params, Objective(config.optimizer.z_loss, config.optimizer.label_smoothing)
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


def _attention_kernel(config: Config, dtype: jnp.dtype, num_context_ranks: int, platform: str) -> Kernel:
    model = config.model
    return choose(
        config.parallel.attention,
        platform,
        head_dim=model.head_dim,
        dtype=dtype,
        mask=AttentionMask(causal=True, window=model.sliding_window),
        has_documents=config.data.pack_documents,
        seq_len=config.data.seq_len // num_context_ranks,
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
