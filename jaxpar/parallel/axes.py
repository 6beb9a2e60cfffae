"""The one rules table: which mesh axes a logical axis of a parameter or an activation lies over.

A strategy that is only a mapping is rows here and nothing else:

    data parallel (DP)       batch over `data`
    fully sharded (FSDP)     batch over `fsdp`; a parameter's embed over `fsdp`              (arXiv 1910.02054, ZeRO-3)
    ZeRO-1, ZeRO-2           embed over `data` too, for gradients and optimizer state alone  (arXiv 1910.02054)
    hybrid sharded (HSDP)    both: FSDP within `data`'s groups, replicas across them         (arXiv 2304.11277, §3.2.2)
    expert parallel (EP)     experts over `expert`, see expert.py                        (arXiv 2006.16668)
    tensor parallel (TP)     heads, mlp, vocab over `tensor`, column then row                (arXiv 1909.08053, §3)
    sequence parallel (SP)   the residual stream's seq over `tensor` too                     (arXiv 2205.05198, §4.2)
    pipeline parallel (PP)   layers over `pipe`, see pipeline/executor.py                    (arXiv 1811.06965)
"""

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from jax.sharding import PartitionSpec as P

log = logging.getLogger(__name__)

BATCH_AXES = ("data", "fsdp", "expert")
TOKEN_AXES = frozenset((*BATCH_AXES, "context"))
"""Every axis that tokens are cut over: a weight's gradient is a sum over all of them."""

VOCAB_MULTIPLE = 256


def gathered_axes(names: Sequence[str | None]) -> frozenset[str]:
    """Those of TOKEN_AXES over which a rank needs the whole of a parameter with these logical axes: tokens go to their
    experts, and an expert stays where it is."""
    return TOKEN_AXES - {"expert"} if "experts" in names else TOKEN_AXES


PARAMETER_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": ("pipe",),
        # Context and expert ranks hold no copies either. Axes that a strategy may make manual come first.
        "embed": ("expert", "context", "fsdp"),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "mlp": ("tensor",),
        # Stages hold no copies of the ends. A tensor rank's parts of all stages are then neighbours.
        "vocab": ("tensor", "pipe"),
        "experts": ("expert",),
        # A vector along embed (norms, output biases) is whole everywhere: gathering it would cost two small
        # collectives a layer, its gradient is summed once a step.
        "vector": (),
        "position": (),
    }
)

STATE_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**PARAMETER_RULES, "embed": ("data", *PARAMETER_RULES["embed"])}
)
"""Under ZeRO-1 and 2, of what a parameter's optimizer state is: its master copy and moments."""

ACTIVATION_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": BATCH_AXES,
        "seq": ("context",),
        # The stream between blocks, under sequence parallelism; without it, as `seq`.
        "residual_seq": ("context", "tensor"),
        "embed": (),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "mlp": ("tensor",),
        "vocab": ("tensor",),
        "experts": ("expert",),
        "capacity": (),
    }
)


def partition_spec(
    names: Sequence[str | None],
    rules: Mapping[str, tuple[str, ...]],
    mesh_shape: Mapping[str, int],
    dims: Sequence[int] | None = None,
) -> P:
    """The spec of an array whose dims have these logical names (None: not cut).

    A mesh axis that an earlier dim has taken is dropped; so is one that does not divide the dim, where `dims` gives
    the sizes, which the log says. Raises KeyError for a name that the table lacks.
    """
    taken: set[str] = set()
    partitions = []
    for position, name in enumerate(names):
        axes: list[str] = []
        for axis in rules[name] if name is not None else ():
            if axis in taken:
                continue
            if dims is not None and dims[position] % math.prod(mesh_shape[a] for a in (*axes, axis)):
                _log_dropped(name, dims[position], axis, mesh_shape[axis])
                continue
            axes.append(axis)
        taken.update(axes)
        partitions.append(tuple(axes) or None)
    return P(*(axes[0] if axes and len(axes) == 1 else axes for axes in partitions))


def padded_vocab(vocab_size: int, mesh_shape: Mapping[str, int]) -> int:
    """A multiple of 256, the same on every mesh, but where the axes that cut it do not divide 256."""
    multiple = math.lcm(VOCAB_MULTIPLE, math.prod(mesh_shape[axis] for axis in PARAMETER_RULES["vocab"]))
    return -(-vocab_size // multiple) * multiple


@functools.cache
def _log_dropped(name: str | None, size: int, axis: str, axis_size: int) -> None:
    """Once, however many parameters it is true of."""
    log.info(
        "%s of size %d is not cut over %s=%d, which does not divide it: it is whole there", name, size, axis, axis_size
    )


def axes_of(partition: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One dim's entry of a spec as a tuple of mesh axes."""
    if partition is None:
        return ()
    return (partition,) if isinstance(partition, str) else tuple(partition)


def mesh_axes(spec: P) -> frozenset[str]:
    """Every mesh axis that a spec cuts a dim over."""
    return frozenset(axis for partition in spec.partitions for axis in axes_of(partition))


def without(spec: P, axes: Iterable[str]) -> P:
    """The spec with these mesh axes dropped from every dim, as after gathering over them."""
    drop = frozenset(axes)
    kept = [tuple(axis for axis in axes_of(partition) if axis not in drop) for partition in spec.partitions]
    return P(*(k[0] if len(k) == 1 else k or None for k in kept))
