"""The collectives of a compiled program, read from its text: mesh axes, operation, bytes, executions.

The text is optimised HLO, `jax.stages.Compiled.as_text()`, of the NVIDIA or the CPU backend. Reading it is
more than a search for names: devices are grouped in several notations, none of which need name our axes; a
collective may stand in another computation (a fusion, an asynchronous wrapper) than the one that starts it;
and a loop's body is written once, however often it runs. So the text is parsed into computations, executions
are multiplied down the call graph from ENTRY, and each collective's groups are matched with the mesh's axes.

Limits: a conditional's branches count once each, an upper bound, since one of them runs, but where the caller
knows by its name how often it is taken. Point-to-point `send` and `recv` are not collectives and are not read.

Source: XLA's HLO text and https://openxla.org/xla/operation_semantics.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from graphlib import TopologicalSorter
from typing import NamedTuple

import numpy as np

COLLECTIVES = frozenset(
    {"all-gather", "all-reduce", "all-to-all", "reduce-scatter"}
    | {"collective-broadcast", "collective-permute", "ragged-all-to-all"}
)
UNKNOWN = ("?",)  # the axes of groups that no set of mesh axes makes


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    `bytes` is the buffer that is whole over the axes, per device and execution: an all-gather's result, any
    other operation's operand. So an all-gather and its transpose, a reduce-scatter, have the same bytes at
    equal dtype. An operation that combines several buffers is one `Collective` with their sum. A ragged
    all-to-all's buffer counts whole, though a part of it may be sent.
    """

    op: str
    """HLO's name, one of `COLLECTIVES`; the asynchronous form of an operation has the same."""
    axes: tuple[str, ...]
    """The mesh axes of size > 1 that the groups span, in the mesh's order, or `UNKNOWN`."""
    bytes: int
    count: int
    """Executions per run of the program: the product of the trip counts of the loops around it."""
    computation: str
    """The HLO computation that holds it."""
    op_name: str
    """Where in the JAX program it is from; "" if XLA does not say."""


def read_collectives(
    hlo_text: str, mesh: Mapping[str, int], taken: Mapping[str, Fraction] | None = None
) -> list[Collective]:
    """The program's collectives, in the text's order. Groups of one device do not communicate: left out.

    `mesh` has the axes' sizes, outermost first: HLO numbers devices by their row-major place in the mesh. `taken` has
    the share of times that the second branch of a `lax.cond` in a `jax.named_scope` is taken, by the scope's name, for
    conditionals whose other branch has no collective.

    Raises ValueError if the program is for another number of devices, if the trip count of a loop around a
    collective is stated neither by XLA nor by the loop's own constants, or if shares do not make whole executions.
    """
    module = _Module.parse(hlo_text)
    num_devices = math.prod(mesh.values())
    if module.num_partitions != num_devices:
        raise ValueError(
            f"the program is compiled for {module.num_partitions} devices, but mesh {dict(mesh)} has "
            f"{num_devices}; pass the sizes of the mesh that it was compiled for"
        )
    executions = _executions(module, taken or {})
    # A program repeats few groupings, each long to parse: 16,384 devices may be listed one by one.
    span = functools.cache(functools.partial(_span, mesh=mesh))
    collectives = []
    for computation in module.computations.values():
        count = executions[computation.name]
        for instruction in computation.collectives if count else ():
            axes, group_size = span(_grouping(instruction))
            if group_size > 1:
                op = instruction.opcode.removesuffix("-start")
                num_bytes = _operand_bytes(computation, instruction)
                num_bytes *= group_size if op == "all-gather" else 1
                op_name = _first(_OP_NAME, instruction.rest) or ""
                collectives.append(Collective(op, axes, num_bytes, count, computation.name, op_name))
    return collectives


def summarize(collectives: Iterable[Collective]) -> dict[str, dict[str, dict[str, int]]]:
    """Totals per run of the program: `{"fsdp": {"all-gather": {"count": 8, "bytes": 4096}}}`.

    Several axes are joined by "+", as "data+fsdp". `bytes` is per device, over all executions.
    """
    totals: dict[str, dict[str, dict[str, int]]] = {}
    for c in collectives:
        total = totals.setdefault("+".join(c.axes), {}).setdefault(c.op, {"count": 0, "bytes": 0})
        total["count"] += c.count
        total["bytes"] += c.bytes * c.count
    return totals


# The text.

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
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"(?:pred|[a-z]+(\d+)\w*)\[([^\]]*)\]")


class _Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes, as printed after the opening parenthesis

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(_OPERANDS_END.split(self.rest, maxsplit=1)[0])

    @property
    def attributes(self) -> str:
        return _FREE_TEXT.split(_OPERANDS_END.split(self.rest, maxsplit=1)[1], maxsplit=1)[0]

    @property
    def callees(self) -> list[tuple[str, str]]:
        """(role, computation) of all that it runs; the second half of an asynchronous pair runs nothing."""
        names_any = "=%" in self.rest or "={%" in self.rest  # most name none, and splitting is slow
        if not names_any or self.opcode.endswith(("-done", "-update")):
            return []
        return [(role, c) for role, names in _CALLEES.findall(self.attributes) for c in _NAME.findall(names)]


@dataclass
class _Computation:
    name: str
    instructions: dict[str, _Instruction] = field(default_factory=dict)
    collectives: list[_Instruction] = field(default_factory=list)
    calls: list[tuple[_Instruction, str, str]] = field(default_factory=list)  # caller, role, computation
    root: str = ""

    def value(self, name: str) -> _Instruction:
        """The instruction that makes a value, behind copies of it."""
        instruction = self.instructions[name]
        while instruction.opcode in ("copy", "bitcast"):
            instruction = self.instructions[instruction.operands[0]]
        return instruction


@dataclass
class _Module:
    num_partitions: int
    computations: dict[str, _Computation] = field(default_factory=dict)
    entry: str = ""

    @staticmethod
    def parse(text: str) -> "_Module":
        lines = text.split("\n")  # splitlines() would also split at characters that strings may hold
        module = _Module(num_partitions=int(_first(_NUM_PARTITIONS, lines[0]) or 1))
        computation = _Computation("")
        for line in lines:
            if match := _INSTRUCTION.match(line):
                is_root, *fields = match.groups()
                instruction = _Instruction(*fields)
                computation.instructions[instruction.name] = instruction
                if is_root:
                    computation.root = instruction.name
                if instruction.opcode.removesuffix("-start") in COLLECTIVES:
                    computation.collectives.append(instruction)
                computation.calls += [(instruction, role, callee) for role, callee in instruction.callees]
            elif match := _COMPUTATION.match(line):
                is_entry, name = match.groups()
                computation = module.computations[name] = _Computation(name)
                if is_entry:
                    module.entry = name
        if not module.entry:
            raise ValueError("the text has no ENTRY computation; pass the HLO that compiled.as_text() gives")
        return module


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match and match[1]


def _operand_bytes(computation: _Computation, instruction: _Instruction) -> int:
    operands = instruction.operands
    if instruction.opcode.startswith("ragged-all-to-all"):
        operands = operands[:1]  # then come the output's buffer, offsets and sizes
    return sum(_type_bytes(computation.instructions[name].type) for name in operands)


def _type_bytes(type_: str) -> int:
    """The bytes of an array, or of all in a tuple; dtypes of less than 8 bits are packed."""
    total = 0
    for bits, dims in _ARRAY.findall(type_):  # a dtype's name states its bits; pred, which does not, has 8
        total += math.ceil(math.prod(int(size) for size in re.findall(r"\d+", dims)) * int(bits or 8) / 8)
    return total


# The call graph.


def _executions(module: _Module, taken: Mapping[str, Fraction]) -> dict[str, int]:
    """How often each computation runs per run of the program; 0 for those that lead to no collective."""
    callees = {c.name: [callee for _, _, callee in c.calls] for c in module.computations.values()}
    callees_first = list(TopologicalSorter(callees).static_order())
    communicates: dict[str, bool] = {}
    for name in callees_first:
        holds_any = bool(module.computations[name].collectives)
        communicates[name] = holds_any or any(communicates[callee] for callee in callees[name])
    executions = dict.fromkeys(callees_first, Fraction(0))
    executions[module.entry] = Fraction(1)
    for name in reversed(callees_first):
        computation = module.computations[name]
        for caller, role, callee in computation.calls if executions[name] else ():
            if communicates[callee]:  # a loop that does not may have no static trip count
                executions[callee] += executions[name] * _repetitions(module, computation, caller, role, taken)
    for name, count in executions.items():
        if count.denominator > 1 and module.computations[name].collectives:
            raise ValueError(
                f"%{name} holds collectives and would run {count} times; state how often the conditional around it is "
                "taken as a share of the trips of its loop"
            )
    return {name: int(count) for name, count in executions.items()}


def _repetitions(
    module: _Module, computation: _Computation, caller: _Instruction, role: str, taken: Mapping[str, Fraction]
) -> int | Fraction:
    if caller.opcode == "conditional":
        # Its own scope is the last: what is in a branch has the branch's scope before its own.
        scope = _first(_COND_SCOPE, caller.rest)
        return taken.get(scope, 1) if scope else 1
    if caller.opcode != "while":
        return 1
    known = _first(_TRIP_COUNT, caller.rest)
    trip_count = int(known) if known else _count_trips(module, computation, caller)
    if trip_count is None:
        raise ValueError(
            f"loop %{caller.name} ({_first(_OP_NAME, caller.rest)}) holds collectives and has no static trip "
            "count; write it as lax.scan or lax.fori_loop with static bounds"
        )
    return trip_count + (role == "condition")  # which is asked once more, to end the loop


def _count_trips(module: _Module, computation: _Computation, loop: _Instruction) -> int | None:
    """The trip count of `for (i = start; i < limit; i += step)` over constants; None for any other loop."""
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


def _scalar_op(module: _Module, computation: _Computation, name: str) -> tuple[_Instruction, list[_Instruction]]:
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


def _carried(computation: _Computation, instruction: _Instruction) -> int | None:
    """A value's place in the tuple that a loop hands to its condition and body, if it is from there."""
    if instruction.opcode != "get-tuple-element":
        return None
    index = _first(re.compile(r"\bindex=(\d+)"), instruction.attributes)
    is_parameter = computation.value(instruction.operands[0]).opcode == "parameter"
    return int(index) if index and is_parameter else None


def _constant(instruction: _Instruction) -> int | None:
    literal = re.match(r"(-?\d+)\)", instruction.rest) if instruction.opcode == "constant" else None
    return literal and int(literal[1])


# Groups of devices.

_GROUPING = re.compile(
    r"(?:source_target_pairs|replica_groups)="
    r"(?:\{(?:\{[\d,]*\},?)*\}"  # {{0,1},{2,3}}; {} for all devices
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"  # [4,2]<=[2,4]T(1,0)
    r"|mesh\[.*?\](?:, device_ids=\(.*?\))? \{.*?\})"  # mesh['a'=4,'b'=2], device_ids=(0,2,...) {'a':(1)2}
)
_MESH_GROUPS = re.compile(r"=mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_MESH_AXIS = re.compile(r"'(.+?)'=(\d+)")
_MESH_AXIS_REF = re.compile(r"'(.+?)'(?::\((\d+)\)(\d+))?(?:,|$)")


def _grouping(instruction: _Instruction) -> str:
    match = _GROUPING.search(instruction.attributes)
    if not match:
        raise ValueError(
            f"%{instruction.name} groups devices in an unknown notation, {instruction.attributes[:200]!r}; "
            "report it with the version of jax that compiled it"
        )
    return match[0]


def _span(grouping: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The axes that the groups span and the devices per group; a permute's groups are its pairs."""
    if grouping.startswith("source_target_pairs"):
        axes = _varying_axes(np.array(_listed(grouping), dtype=int).reshape(-1, 2), mesh)
        return axes, 2 if axes else 1
    groups = _groups(grouping, math.prod(mesh.values()))
    if len({len(group) for group in groups}) > 1:
        return UNKNOWN, max(map(len, groups))
    devices = np.array(groups)
    axes = _varying_axes(devices, mesh)
    is_partition = np.array_equal(np.sort(devices, axis=None), np.arange(math.prod(mesh.values())))
    is_whole = devices.shape[1] == math.prod(mesh[axis] for axis in axes)
    # Groups of a part of one axis are a strategy's own (Ulysses in a ring); of parts of several, nobody's.
    return axes if is_partition and (is_whole or len(axes) == 1) else UNKNOWN, devices.shape[1]


def _varying_axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of any group [group, member] differ."""
    coordinates = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(axis for axis, place in zip(mesh, coordinates) if (place != place[:, :1]).any())


def _groups(grouping: str, num_devices: int) -> list[list[int]] | np.ndarray:
    if match := _MESH_GROUPS.search(grouping):
        return _mesh_groups(*match.groups())
    if "<=" in grouping:
        shape, iota = grouping.split("<=")
        return _iota(iota).reshape(_iota_args(shape)[0])
    return _listed(grouping) or [list(range(num_devices))]


def _mesh_groups(axes: str, device_ids: str | None, refs: str) -> np.ndarray:
    """Groups along axes of a mesh of XLA's own; 'a':(p)s is the middle of `a` split into p x s x the rest."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    shape = tuple(sizes.values())
    devices = np.arange(math.prod(shape))
    place = dict(zip(sizes, np.unravel_index(devices, shape)))
    if device_ids:
        devices = _iota(device_ids) if "[" in device_ids else np.array(_iota_args(device_ids)[0])
    group_size = 1
    for name, pre_size, sub_size in _MESH_AXIS_REF.findall(refs):
        size = int(sub_size or sizes[name])
        stride = sizes[name] // (int(pre_size or 1) * size)
        place[name] = place[name] - place[name] // stride % size * stride
        group_size *= size
    first_in_group = np.ravel_multi_index(tuple(place.values()), shape)
    return devices[np.argsort(first_in_group, kind="stable")].reshape(-1, group_size)


def _iota(text: str) -> np.ndarray:
    """[4,2]T(1,0): 0, 1, 2, ... in that shape, transposed, flat."""
    shape, *permutation = _iota_args(text)
    return np.arange(math.prod(shape)).reshape(shape).transpose(*permutation).ravel()


def _iota_args(text: str) -> list[list[int]]:
    return [[int(number) for number in part.split(",")] for part in re.findall(r"\d+(?:,\d+)*", text)]


def _listed(grouping: str) -> list[list[int]]:
    return [[int(device) for device in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", grouping)]
