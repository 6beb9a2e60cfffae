"""Optimised HLO as text, `jax.stages.Compiled.as_text()`, parsed into computations, with the trip counts of its loops.

A collective, or a matmul, may stand in another computation (a fusion, an asynchronous wrapper) than the one that starts
it, and a loop's body is written once, however often it runs: so instructions keep whom they call, and as what.

Source: XLA's HLO text and https://openxla.org/xla/operation_semantics.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

COLLECTIVES = frozenset(
    {"all-gather", "all-reduce", "all-to-all", "reduce-scatter"}
    | {"collective-broadcast", "collective-permute", "ragged-all-to-all"}
)

_NUM_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
# Operands end at the parenthesis that attributes follow: types among them have parentheses of their own.
_OPERANDS_END = re.compile(r"\)(?:, (?=[\w-]+=)|$)")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEES = re.compile(
    r"\b(calls|to_apply|condition|body|(?:branch|called)_computations|(?:true|false)_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_FREE_TEXT = re.compile(r"\b(?:frontend_attributes|metadata|backend_config)=")  # last, and any text
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_COND_SCOPE = re.compile(r'op_name="(?:[^"]*/)?([^"/]+)/cond"')
_CHAIN = 'chain_id="'
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"(?:pred|[a-z]+(\d+)\w*)\[([^\]]*)\]")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_REMAT = re.compile(r"\.remat\d*(?:\.|$)")


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    rest: str
    """Operands and attributes, as printed after the opening parenthesis."""

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(_OPERANDS_END.split(self.rest, maxsplit=1)[0])

    @property
    def attributes(self) -> str:
        return _FREE_TEXT.split(_OPERANDS_END.split(self.rest, maxsplit=1)[1], maxsplit=1)[0]

    @property
    def op_name(self) -> str:
        """Where in the JAX program it is from; "" if XLA does not say."""
        return first(_OP_NAME, self.rest) or ""

    @property
    def between_slices(self) -> str:
        """Of a send or recv: the collective between TPU slices that it is an end of, "" for none."""
        return (first(_TRANSFER, self.rest) or "").lower().replace("_", "-")

    @property
    def rendezvous(self) -> str:
        """What such a send has in common with its recv."""
        return first(_RENDEZVOUS, self.rest) or ""

    @property
    def is_duplicate(self) -> bool:
        """Whether the compiler computes again, of its own accord, what another instruction computes."""
        return _REMAT.search(self.name) is not None

    @property
    def callees(self) -> list[tuple[str, str]]:
        """(role, computation) of all that it runs; the second half of an asynchronous pair runs nothing."""
        names_any = "=%" in self.rest or "={%" in self.rest  # most name none, and splitting is slow
        if not names_any or self.opcode.endswith(("-done", "-update")):
            return []
        return [(role, c) for role, names in _CALLEES.findall(self.attributes) for c in _NAME.findall(names)]


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    """In the order of the schedule, where there is one."""
    collectives: list[Instruction] = field(default_factory=list)
    between_slices: list[Instruction] = field(default_factory=list)
    """Collectives between slices of TPUs, by their hosts: what a slice's program has of one is a send."""
    calls: list[tuple[Instruction, str, str]] = field(default_factory=list)
    """(caller, role, computation)"""
    root: str = ""

    def value(self, name: str) -> Instruction:
        """The instruction that makes a value, behind copies of it."""
        instruction = self.instructions[name]
        while instruction.opcode in ("copy", "bitcast"):
            instruction = self.instructions[instruction.operands[0]]
        return instruction

    @property
    def communicates(self) -> bool:
        """Whether a collective starts in it."""
        starts = self.collectives and not (self.chained and self.chained[1] != "start")
        return bool(starts or self.between_slices)

    @property
    def chained(self) -> tuple[str, str] | None:
        """(channel, "start", "step" or "done") of a fusion that holds a part of a TPU's asynchronous collective: the
        compiler writes the whole collective into each, and runs steps of it beside the matmul of another fusion."""
        for collective in self.collectives:
            if _CHAIN in collective.rest:
                calls = [each.rest for each in self.instructions.values() if each.opcode == "custom-call"]
                ends = {"start": "AsyncCollectiveStart", "done": "AsyncCollectiveDone"}
                part = next((part for part, target in ends.items() if any(target in rest for rest in calls)), "step")
                return first(_CHANNEL, collective.rest) or "", part
        return None


@dataclass
class Module:
    num_partitions: int
    computations: dict[str, Computation] = field(default_factory=dict)
    entry: str = ""

    @staticmethod
    def parse(text: str) -> "Module":
        lines = text.split("\n")  # splitlines() would also split at characters that strings may hold
        module = Module(num_partitions=int(first(_NUM_PARTITIONS, lines[0]) or 1))
        computation = Computation("")
        for line in lines:
            if match := _INSTRUCTION.match(line):
                is_root, *fields = match.groups()
                instruction = Instruction(*fields)
                computation.instructions[instruction.name] = instruction
                if is_root:
                    computation.root = instruction.name
                if instruction.opcode.removesuffix("-start") in COLLECTIVES:
                    computation.collectives.append(instruction)
                if instruction.opcode == "send" and instruction.between_slices:
                    computation.between_slices.append(instruction)
                computation.calls += [(instruction, role, callee) for role, callee in instruction.callees]
            elif match := _COMPUTATION.match(line):
                is_entry, name = match.groups()
                computation = module.computations[name] = Computation(name)
                if is_entry:
                    module.entry = name
        if not module.entry:
            raise ValueError("the text has no ENTRY computation; pass the HLO that compiled.as_text() gives")
        return module


def first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match and match[1]


@functools.cache
def arrays(type_: str) -> list[tuple[int, tuple[int, ...]]]:
    """(bits of an element, dims) of an array, or of all in a tuple."""
    # A dtype's name states its bits; pred, which does not, has 8.
    return [
        (int(bits or 8), tuple(int(size) for size in re.findall(r"\d+", dims))) for bits, dims in _ARRAY.findall(type_)
    ]


def type_bytes(type_: str) -> int:
    """The bytes of an array, or of all in a tuple; dtypes of less than 8 bits are packed."""
    return sum(math.ceil(math.prod(dims) * bits / 8) for bits, dims in arrays(type_))


def share_taken(conditional: Instruction, taken: Mapping[str, Fraction]) -> Fraction | int:
    """By the name of its scope; 1 if that has none."""
    # Its own scope is the last: what is in a branch has the branch's scope before its own.
    scope = first(_COND_SCOPE, conditional.rest)
    return taken.get(scope, 1) if scope else 1


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Of a `while`: as XLA states it, or else of `for (i = start; i < limit; i += step)` over constants; None for any
    other loop."""
    known = first(_TRIP_COUNT, loop.rest)
    return int(known) if known else _count_trips(module, computation, loop)


def _count_trips(module: Module, computation: Computation, loop: Instruction) -> int | None:
    callees = dict(loop.callees)
    condition, body = module.computations[callees["condition"]], module.computations[callees["body"]]
    start_values, next_values = computation.value(loop.operands[0]), body.value(body.root)
    compare, compared = _scalar_op(module, condition, condition.root)
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    index, limit = _carried(condition, compared[0]), _constant(compared[1])
    if index is None or start_values.opcode != "tuple" or next_values.opcode != "tuple":
        return None
    start = _constant(computation.value(start_values.operands[index]))
    add, terms = _scalar_op(module, body, next_values.operands[index])
    steps = [_constant(term) for term in terms if _carried(body, term) != index]
    step = steps[0] if add.opcode == "add" and len(steps) == 1 else None
    if start is None or limit is None or step is None or step <= 0:
        return None
    return max(0, math.ceil((limit - start) / step))


def _scalar_op(module: Module, computation: Computation, name: str) -> tuple[Instruction, list[Instruction]]:
    """The operation that makes a value and the makers of its operands, seen through a fusion around it."""
    outer = computation.value(name)
    if outer.opcode not in ("fusion", "call"):
        return outer, [computation.value(operand) for operand in outer.operands]
    fused = module.computations[outer.callees[0][1]]
    op = fused.value(fused.root)
    makers = []
    for maker in map(fused.value, op.operands):
        if maker.opcode == "parameter":
            maker = computation.value(outer.operands[int(maker.rest.partition(")")[0])])
        makers.append(maker)
    return op, makers


def _carried(computation: Computation, instruction: Instruction) -> int | None:
    """A value's place in the tuple that a loop hands to its condition and body, if it is from there."""
    if instruction.opcode != "get-tuple-element":
        return None
    index = first(_INDEX, instruction.attributes)
    is_parameter = computation.value(instruction.operands[0]).opcode == "parameter"
    return int(index) if index and is_parameter else None


def _constant(instruction: Instruction) -> int | None:
    literal = re.match(r"(-?\d+)\)", instruction.rest) if instruction.opcode == "constant" else None
    return literal and int(literal[1])
