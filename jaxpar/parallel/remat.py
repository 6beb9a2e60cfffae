"""What a stack of layers keeps for its backward pass, and what it computes again: `jax.checkpoint` policies by name.

For N layers, in units of one layer (compute beyond one forward and one backward pass; activations live at once):

    none        nothing again; N layers' intermediates
    full        one forward again; N inputs and 1 layer's intermediates
    every=K     one forward again; N / K inputs and K layers' intermediates    (arXiv 1604.06174, section 4)
    sqrt        every=sqrt(N): about 2 sqrt(N) in all
    dots        attention and all that is no matmul again; the outputs of matmuls with weights
    save=A,B    all again that these named tensors do not give
    offload     as full, inputs in the host's memory

Gathered weights are never kept with them (`reshard_after_forward`): a group of `every=K` gathers a third time.
"""

import math
from dataclasses import dataclass

import jax

from jaxpar.kernels import cudnn
from jaxpar.kernels.attention import RESULT
from jaxpar.parallel import fsdp

MATMULS = ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up", "mlp_out")
INPUT = "block_input"
NAMES = (INPUT, *MATMULS, RESULT)
"""Tensors at a block's seams; `attention` is what the heads give, before the output projection."""


@dataclass(frozen=True)
class Remat:
    """`every` layers form a group that keeps its input and, of the rest, the tensors named in `saves`."""

    every: int = 1
    saves: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    keeps_all: bool = False

    @classmethod
    def parse(cls, text: str, num_layers: int) -> "Remat":
        """Raises ValueError for what is none of the above."""
        kind, _, value = text.partition("=")
        if kind == "every":
            if not value.isdigit() or not 1 <= int(value) <= num_layers:
                raise ValueError(f"--remat {text}: it takes a number of layers, 1 to {num_layers}, as in every=2")
            return cls(every=int(value))
        if kind == "save":
            names = tuple(value.split(","))
            unknown = [name for name in names if name not in NAMES]
            if unknown:
                raise ValueError(f"--remat {text}: no tensor is called {unknown[0]!r}; known: {', '.join(NAMES)}")
            return cls(saves=names)
        kinds = {
            "none": cls(keeps_all=True),
            "full": cls(),
            "sqrt": cls(every=max(1, round(math.sqrt(num_layers)))),
            "dots": cls(saves=MATMULS),
            "offload": cls(offload=(INPUT,)),
        }
        if text not in kinds:
            raise ValueError(f"--remat {text}: it must be one of {', '.join(kinds)}, every=K or save=NAME,NAME")
        return kinds[text]

    def policy(self, regather: bool):
        """Of a group, for `jax.checkpoint`."""
        policies = jax.checkpoint_policies
        if self.keeps_all:
            return fsdp.save_all_but_gathered if regather else policies.everything_saveable
        saves = [*self.saves, *([] if regather else [fsdp.GATHERED])]
        if self.offload:
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=saves,
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        named = policies.save_only_these_names(*saves)
        return policies.save_from_both_policies(named, cudnn.is_kernel) if RESULT in saves else named


NONE = Remat(keeps_all=True)
FULL = Remat()


def check_offload(remat: Remat, device: jax.Device) -> None:
    """Raise ValueError where activations are to go to a host's memory that the devices cannot reach."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    if remat.offload and kinds and "pinned_host" not in kinds:
        raise ValueError(
            f"--remat offload needs devices with a host's memory beside their own; {device.platform} has none: "
            "take --remat full"
        )
