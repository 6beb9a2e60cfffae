"""What a compiled program computes: FLOPs of its matmuls and kernels, bytes its fusions touch, the compiler's cycles.

A loop's body counts as often as it runs. A loop whose trip count depends on data (tiles of attention that a mask
admits) counts `dynamic_trips` times; of a conditional's branches the costliest counts, for the share of its runs that
`taken` has for its scope (a pipeline's stage is at one kind of work in a part of the ticks).

FLOPs are of dots and convolutions, a multiply-add as two (a convolution's by XLA's HloCostAnalysis: only pairs of
input and window within bounds), of matmuls in cuBLAS's calls, and of attention kernels by convention: 4 x queries x
keys x heads x head_dim forward, masked or not, and 8 backward. Of grouped products, whose groups data decides, `filled`
of the rows count.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from jaxpar.audit.hlo_text import Computation, Instruction, Module, arrays, first, share_taken, trip_count, type_bytes

_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CUBLAS_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')
_CYCLES = re.compile(r'"estimated_cycles":\s*"(\d+)"')
_TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'
_UNKNOWN_CYCLES = 2**63 - 1
_GROUPED = re.compile(r"grouped_(?:product|outer)\b|^ragged-dot-(?!metadata)|^tgmm\b")
_SPLASH = re.compile(r"splash_\w*?(fwd|dq|dkv)")

_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
)
"""What runs nothing."""


@dataclass(frozen=True)
class Kernel:
    """A custom call that computes."""

    target: str
    op_name: str
    flops: float
    """Of one execution."""


@dataclass(frozen=True)
class Duplicates:
    """What the compiler computes again of its own accord, to save memory: it names such instructions `.remat`."""

    count: int
    """Executions in one run."""
    flops: float
    """Of one run, and of all that the instructions call."""


_Own = Callable[[Computation, Instruction], float]


class Work:
    """Sums over a module, of what one device does in one run."""

    def __init__(
        self,
        module: Module,
        taken: Mapping[str, Fraction] | None = None,
        dynamic_trips: float = 1.0,
        filled: float = 1.0,
    ):
        self.module = module
        self.taken = taken or {}
        self._dynamic_trips = dynamic_trips
        self._filled = filled
        self._totals: dict[tuple[_Own, str], float] = {}

    @functools.cached_property
    def flops(self) -> float:
        return self.total(self.own_flops)

    @functools.cached_property
    def kernel_flops(self) -> float:
        """Of `flops`, those of custom calls."""
        return self.total(self._kernel_flops)

    @functools.cached_property
    def estimated_cycles(self) -> float | None:
        """The compiler's own, where it states any; kernels are not among them."""
        return self.total(own_cycles) or None

    def kernels(self) -> list[Kernel]:
        """Every custom call of the text that has FLOPs."""
        found = []
        for computation in self.module.computations.values():
            for instruction in computation.instructions.values():
                if flops := self._kernel_flops(computation, instruction):
                    found.append(Kernel(first(_TARGET, instruction.rest) or "", instruction.op_name, flops))
        return found

    @functools.cached_property
    def duplicates(self) -> Duplicates:
        again = _called_by_duplicates(self.module)

        def count(computation: Computation, instruction: Instruction) -> float:
            is_part = instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update"))
            return float(instruction.is_duplicate and not is_part and computation.name not in again)

        def flops(computation: Computation, instruction: Instruction) -> float:
            is_again = instruction.is_duplicate or computation.name in again
            return self.own_flops(computation, instruction) if is_again else 0.0

        return Duplicates(round(self.total(count)), self.total(flops))

    def total(self, own: _Own) -> float:
        """The sum of `own` over all that runs."""
        return self._of_computation(own, self.module.entry)

    def of(self, own: _Own, computation: Computation, instruction: Instruction) -> float:
        """`own` of one instruction and of all that it runs, loops in full."""
        total = own(computation, instruction)
        callees = instruction.callees
        if not callees:
            return total
        if instruction.opcode == "conditional":
            share = float(share_taken(instruction, self.taken))
            return total + share * max(self._of_computation(own, name) for _, name in callees)
        times = 1.0
        if instruction.opcode == "while":
            trips = trip_count(self.module, computation, instruction)
            times = self._dynamic_trips if trips is None else trips
        return total + times * sum(self._of_computation(own, name) for _, name in callees)

    def own_flops(self, computation: Computation, instruction: Instruction) -> float:
        """Of one execution, without what it calls."""
        if instruction.opcode == "dot":
            return _dot_flops(computation, instruction, first(_CONTRACTING, instruction.attributes) or "")
        if instruction.opcode == "convolution":
            return _convolution_flops(computation, instruction)
        return self._kernel_flops(computation, instruction)

    def _kernel_flops(self, computation: Computation, instruction: Instruction) -> float:
        if instruction.opcode != "custom-call":
            return 0.0
        # TPUs' are called so, GPUs' are named among the call's attributes.
        if _GROUPED.search(instruction.name) or (_TRITON in instruction.rest and _GROUPED.search(instruction.rest)):
            return self._filled * _grouped_flops(computation, instruction)
        return _custom_call_flops(computation, instruction)

    def _of_computation(self, own: _Own, name: str) -> float:
        if (own, name) not in self._totals:
            computation = self.module.computations[name]
            self._totals[own, name] = sum(self.of(own, computation, each) for each in computation.instructions.values())
        return self._totals[own, name]


def _called_by_duplicates(module: Module) -> frozenset[str]:
    """The computations of what is computed again."""
    found: set[str] = set()
    callers = [each for computation in module.computations.values() for each in computation.instructions.values()]
    callers = [each for each in callers if each.is_duplicate]
    while callers:
        called = {name for caller in callers for _, name in caller.callees} - found
        found |= called
        callers = [each for name in called for each in module.computations[name].instructions.values()]
    return frozenset(found)


def own_cycles(_: Computation, instruction: Instruction) -> float:
    cycles = int(first(_CYCLES, instruction.rest) or 0)
    return 0.0 if cycles == _UNKNOWN_CYCLES else float(cycles)


def runs_on_its_own(instruction: Instruction) -> bool:
    """Whether it is a kernel, and not a name for a part of something or what calls further ones."""
    return instruction.opcode not in _FREE and instruction.opcode not in ("while", "conditional", "call")


def _dims(computation: Computation, name: str) -> tuple[int, ...]:
    return arrays(computation.instructions[name].type)[0][1]


def _dot_flops(computation: Computation, instruction: Instruction, contracting: str) -> float:
    left = _dims(computation, instruction.operands[0])
    contracted = math.prod(left[int(dim)] for dim in re.findall(r"\d+", contracting))
    return 2.0 * math.prod(arrays(instruction.type)[0][1]) * contracted


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    labels = _DIM_LABELS.search(instruction.attributes)
    assert labels is not None, instruction.name
    image, window, result = (dict(zip(text, range(len(text)))) for text in labels.groups())
    left, right = (_dims(computation, name) for name in instruction.operands[:2])
    out = arrays(instruction.type)[0][1]
    groups = {kind: int(count) for kind, count in _GROUPS.findall(instruction.attributes)}
    settings = dict(item.split("=") for item in (first(_WINDOW, instruction.attributes) or "").split())
    spatial = sorted(label for label in window if label.isdigit())
    pairs = 1
    for i, label in enumerate(spatial):
        stride, lhs_dilate, rhs_dilate = (
            int(settings[key].split("x")[i]) if key in settings else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(settings["pad"].split("x")[i].split("_")[0]) if "pad" in settings else 0
        pairs *= _pairs_in_bounds(
            left[image[label]], right[window[label]], out[result[label]], stride, lhs_dilate, rhs_dilate, low
        )
    features = right[window["i"]] * right[window["o"]]
    return 2.0 * pairs * features * left[image["b"]] / groups.get("batch", 1)


@functools.cache
def _pairs_in_bounds(size: int, window: int, out: int, stride: int, lhs_dilate: int, rhs_dilate: int, low: int) -> int:
    """Of a dim of a convolution: (output, place in the window) that meet an input, not padding or a dilation's hole."""
    if window == 1 and stride == lhs_dilate == 1 and low == 0:
        return out
    at = np.arange(out)[:, None] * stride + np.arange(window)[None] * rhs_dilate - low
    return int(np.sum((at >= 0) & (at % lhs_dilate == 0) & (at // lhs_dilate < size)))


def _custom_call_flops(computation: Computation, instruction: Instruction) -> float:
    target = first(_TARGET, instruction.rest) or ""
    if target.startswith("__cublas"):
        return _dot_flops(computation, instruction, first(_CUBLAS_CONTRACTING, instruction.rest) or "")
    if target.startswith("__cudnn$fmha"):
        scores = math.prod(int(size) for size in re.findall(r"\d+", first(_SCORES, instruction.rest) or "0"))
        head_dim = _dims(computation, instruction.operands[0])[-1]
        return (8.0 if target.endswith("Backward") else 4.0) * scores * head_dim
    if match := _SPLASH.search(instruction.name):
        return _splash_flops(computation, instruction, match[1])
    return 0.0


def _splash_flops(computation: Computation, instruction: Instruction, part: str) -> float:
    """Of splash attention: queries [..., heads, S, head_dim] and keys [..., S, head_dim] are its first matrices."""
    q, k = _matrices(computation, instruction)[:2]
    return 4.0 * math.prod(q) * k[-2]


def _grouped_flops(computation: Computation, instruction: Instruction) -> float:
    """Of rows [R, D], its first matrix, by matrices [G, D, F], or by other rows [R, F] to [G, D, F]."""
    rows = _matrices(computation, instruction)[0]
    return 2.0 * math.prod(rows) * arrays(instruction.type)[0][1][-1]


def _matrices(computation: Computation, instruction: Instruction) -> list[tuple[int, ...]]:
    """Shapes of its operands of floats and two dims or more."""
    types = [computation.instructions[name].type for name in instruction.operands]
    shapes = [arrays(type_)[0][1] for type_ in types if type_.startswith(("bf16", "f32", "f16"))]
    return [shape for shape in shapes if len(shape) >= 2]


def touched_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Read and written by one kernel; of an array that it only slices, or updates a slice of, the slice."""
    if instruction.opcode == "fusion":
        return _fusion_bytes(module, computation, instruction)
    if instruction.opcode == "dynamic-slice":
        return 2.0 * type_bytes(instruction.type)
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * type_bytes(computation.instructions[instruction.operands[1]].type)
    read = sum(type_bytes(computation.instructions[name].type) for name in instruction.operands)
    return float(read + type_bytes(instruction.type))


def _fusion_bytes(module: Module, computation: Computation, fusion: Instruction) -> float:
    fused = module.computations[dict(fusion.callees)["calls"]]
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for instruction in fused.instructions.values():
        for place, name in enumerate(instruction.operands):
            users.setdefault(name, []).append((instruction, place))

    def behind_bitcasts(name: str) -> list[tuple[Instruction, int]]:
        found = []
        for user, place in users.get(name, []):
            is_view = user.opcode in ("bitcast", "convert", "copy")
            found += behind_bitcasts(user.name) if is_view else [(user, place)]
        return found

    total = 0.0
    for parameter in fused.instructions.values():
        if parameter.opcode == "parameter":
            of = behind_bitcasts(parameter.name)
            size = type_bytes(parameter.type)
            if of and all(user.opcode == "dynamic-update-slice" and place == 0 for user, place in of):
                size = 0  # written in place
            elif of and all(user.opcode in ("dynamic-slice", "slice", "gather") for user, _ in of):
                size = min(size, sum(type_bytes(user.type) for user, _ in of))
            total += size
    updates = [each for each in fused.instructions.values() if each.opcode == "dynamic-update-slice"]
    written = [fused.instructions[update.operands[1]].type for update in updates] or [fusion.type]
    return total + sum(map(type_bytes, written))
