"""How frameworks lay out and count memory: bytes per parameter, what layers keep, and what is on a device besides."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxpar.kernels.attention import RESULT
from jaxpar.planning.activations import Kept


@dataclass(frozen=True)
class Convention:
    """One framework's, or one paper's. Bytes are per parameter; which ranks share them is the job's `zero`."""

    name: str
    source: str
    parameters: float
    gradients: float
    optimizer: float
    zero: tuple[float, float, float] | None = None
    """The three under ZeRO-1 and 2, where they are others: a whole copy of the weights is kept beside the master's."""
    kept: Kept = "fused"
    selective: tuple[str, ...] | None = None
    """What remat selective keeps by name; None: all but attention's scores."""
    is_one_program: bool = False
    """All stages of a pipeline run one program: each has the fullest one's arrays, embedding and head are cut over the
    stages, and a stage keeps a microbatch's input alone and runs its forward pass again."""
    gathers_kernels: bool = False
    """FSDP gathers a kernel as it is used; else a layer ahead of time, embedding and head for the whole step."""
    remakes_elementwise: bool = False
    """Norms' outputs and the MLP's product are made again, which costs no matrix product."""
    logit_bytes: float = 12.0
    """Per logit, in all copies that live at once; 0 where the loss goes by in chunks."""
    reserved: int = 0
    """Bytes of a device that no tensor of the model has: context, collectives' buffers, what an allocator loses."""
    limit: float = 1.06
    """Share of the vendor's gigabytes (1e9) that may be used. Devices report 1.06 to 1.07 of them (an H100 of 80 GB
    81,559 MiB); our own programs are to leave that margin to what no program knows of."""

    def bytes_per_parameter(self, ranks: int = 1, zero: int = 0) -> float:
        """On each of `ranks` devices: ZeRO-1 cuts optimizer state, 2 gradients too, 3 parameters too (arXiv 1910.02054,
        section 5); 0 nothing."""
        cut = [self.optimizer, self.gradients, self.parameters][:zero]
        whole = [self.optimizer, self.gradients, self.parameters][zero:]
        return sum(cut) / ranks + sum(whole)


GIB = 2**30
_TORCH = 3 * GIB

CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        each.name: each
        for each in (
            Convention(
                "jaxpar",
                "our own programs, as compiled: float32 master parameters, moments and gradients",
                4,
                4,
                8,
                zero=(2, 4, 12),
                kept="compiled",
                is_one_program=True,
                logit_bytes=0,
                limit=1.0,
            ),
            Convention("lecture", "16-bit weights, gradients and both moments: 8 bytes", 2, 2, 4),
            Convention("zero", "ZeRO (arXiv 1910.02054), section 3.1: 2 + 2 + K, K = 12 for mixed precision", 2, 2, 12),
            Convention(
                "megatron",
                "Megatron-LM, theoretical_memory_usage.py: 18 bytes, with the distributed optimizer 6 + 12 / dp",
                2,
                4,
                12,
                reserved=_TORCH,
            ),
            Convention(
                "megatron-2021",
                "Megatron-LM (arXiv 2104.04473), and Zero Bubble's runs: before flash attention, 16-bit gradients",
                2,
                2,
                12,
                kept="scores",
                reserved=int(3.5 * GIB),
            ),
            Convention(
                "megatron-core",
                "Megatron-LM with the distributed optimizer, gradients in bfloat16 (grad_reduce_in_fp32 off)",
                2,
                2,
                12,
                reserved=_TORCH,
            ),
            Convention(
                "megatron-bridge",
                "its performance recipes: as megatron-core",
                2,
                2,
                12,
                logit_bytes=6,
                reserved=_TORCH,
            ),
            Convention(
                "torchtitan",
                "FSDP2: float32 parameters, gradients and moments, all cut; logits in bfloat16, then float32; "
                "selective keeps attention and every other product",
                4,
                4,
                8,
                selective=("query", "value", "mlp_gate", "mlp_out", RESULT),
                reserved=4 * GIB,
            ),
            Convention(
                "llm-foundry",
                "Composer's FSDP, mixed_precision PURE; fused cross-entropy on 16-bit logits",
                4,
                2,
                8,
                logit_bytes=4,
                reserved=_TORCH,
            ),
            Convention(
                "llama3",
                "arXiv 2407.21783, section 3.3: float32 gradients, reduce-scattered; tensors that can be made again "
                "without a product taken as deallocated, without which its layouts exceed 80 GB",
                2,
                4,
                12,
                remakes_elementwise=True,
                logit_bytes=6,
                reserved=_TORCH,
            ),
            Convention(
                "maxtext",
                "float32 parameters and moments, all cut, by XLA's own partitioner",
                4,
                4,
                8,
                gathers_kernels=True,
                logit_bytes=6,
            ),
        )
    }
)


def convention(name: str) -> Convention:
    """By name. ValueError for another, which names those that are."""
    if name not in CONVENTIONS:
        close = difflib.get_close_matches(name, CONVENTIONS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no memory convention is called {name!r}: did you mean {close!r}? {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]
