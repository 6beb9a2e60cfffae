"""From a config to a model on a mesh; what cannot work is said here, before anything is compiled."""

from collections.abc import Sequence

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
from jaxpar.parallel.remat import Remat, check_offload
from jaxpar.parallel.vocab import Objective
from jaxpar.training.model import Model
from jaxpar.training.precision import Precision
from meshes import build_mesh

_NOT_YET = {"pipe": "pipeline parallelism"}


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The config's mesh over these devices (all, by default)."""
    return build_mesh(config.parallel.mesh, config.parallel.dcn_mesh, devices)


def make_model(config: Config, mesh: Mesh | None) -> Model:
    """The config's model on a mesh, or with None on one device without one. Raises ValueError for sizes that the
    mesh cannot cut."""
    dtypes = Precision.of(config.run)
    parallel = config.parallel
    layout = Layout(
        mesh=mesh,
        compute_dtype=dtypes.compute,
        reduce_dtype=dtypes.reduce,
        sequence_parallel=parallel.sequence_parallel,
        reshard_after_forward=parallel.reshard_after_forward,
        remat=Remat.parse(parallel.remat, config.model.num_layers),
        zero=parallel.zero,
        context=ContextStrategy()
        if mesh is None
        else ContextStrategy.parse(parallel.context_strategy, parallel.context_order, mesh.shape["context"]),
        packs_documents=config.data.pack_documents,
        attention_kernel=_attention_kernel(config, dtypes.compute, mesh.shape["context"])
        if mesh is not None
        else "tiled",
        is_fp8=config.run.matmul == "fp8",
    )
    check(config, layout)
    return Model(
        config.model, layout, dtypes.params, Objective(config.optimizer.z_loss, config.optimizer.label_smoothing)
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
    for axis, what in _NOT_YET.items():
        if layout.axis_size(axis) > 1:
            raise ValueError(f"--mesh has {axis}={layout.axis_size(axis)}, but there is no {what} yet; set {axis}=1")
    if layout.mesh is not None:
        check_offload(layout.remat, layout.mesh.devices.flat[0])
    layout.check_divisible(config.data.batch_size, "batch", "--batch-size", config.parallel.grad_accumulation)
    layout.check_divisible(config.model.num_heads, "heads", "--model.num-heads")
    layout.check_divisible(config.model.mlp_dim, "mlp", "--model.mlp-dim")
    ranks = layout.axis_size("context")
    parts = layout.axis_size(*layout.present(mesh_axes(layout.spec("residual_seq"))))
    layout.check_divisible(config.data.seq_len, "residual_seq", "--seq-len", unit=multiple(layout.context.order, ranks))
    layout.context.check(config.data.seq_len, config.model.num_heads, ranks, layout.axis_size("tensor"), unit=parts)
