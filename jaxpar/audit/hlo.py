"""The collectives of a compiled program, read from its text: mesh axes, operation, bytes, executions, what hides them.

The text is optimised HLO, `jax.stages.Compiled.as_text()`, of the NVIDIA, the TPU or the CPU backend. Reading it is
more than a search for names: devices are grouped in several notations, none of which need name our axes; a
collective may stand in another computation (a fusion, an asynchronous wrapper) than the one that starts it;
and a loop's body is written once, however often it runs. So executions are multiplied down the call graph from ENTRY,
and each collective's groups are matched with the mesh's axes.

Limits: a conditional's branches count once each, an upper bound, since one of them runs, but where the caller
knows by its name how often it is taken. Point-to-point `send` and `recv` are not collectives and are not read, but for
those by which TPU slices' hosts do one.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from graphlib import TopologicalSorter

from jaxpar.audit.groups import UNKNOWN, grouping_of, span
from jaxpar.audit.hlo_text import Computation, Instruction, Module, arrays, share_taken, trip_count, type_bytes
from jaxpar.audit.schedule import Window, all_windows
from jaxpar.audit.work import Work

__all__ = ["UNKNOWN", "Collective", "read_collectives", "summarize"]


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    `bytes` is the buffer that is whole over the axes, per device and execution: an all-gather's result, any
    other operation's operand. So an all-gather and its transpose, a reduce-scatter, have the same bytes at
    equal dtype. An operation that combines several buffers is one `Collective` with their sum. A ragged
    all-to-all's buffer counts whole, though a part of it may be sent.
    """

    op: str
    """HLO's name, one of `COLLECTIVES`; the asynchronous form of an operation has the same, and an all-reduce that is
    fused with the slice that each device keeps is a reduce-scatter."""
    axes: tuple[str, ...]
    """The mesh axes of size > 1 that the groups span, in the mesh's order, or `UNKNOWN`."""
    bytes: int
    count: int
    """Executions per run of the program: the product of the trip counts of the loops around it."""
    computation: str
    """The HLO computation that holds it."""
    op_name: str
    """Where in the JAX program it is from; "" if XLA does not say."""
    beside: str = ""
    """The instruction with the most FLOPs between its start and its end; "" where no matmul or kernel hides it."""
    elements: tuple[int, ...] = field(default=(), compare=False)
    """Of each of its buffers, whole over the axes."""
    window: Window | None = field(default=None, compare=False, repr=False)
    """What runs between its start and its end; None for a synchronous one."""
    name: str = field(default="", compare=False)
    """The instruction's."""


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
    return collectives_of(Work(Module.parse(hlo_text), taken), mesh)


def collectives_of(work: Work, mesh: Mapping[str, int], slices: Mapping[str, int] | None = None) -> list[Collective]:
    """Likewise, of a parsed program; on several slices of TPUs it is one slice's, and `slices` has in how many of them
    each axis has ranks."""
    module, slices = work.module, slices or {}
    num_devices = math.prod(mesh.values()) // math.prod(slices.values())
    if module.num_partitions != num_devices:
        raise ValueError(
            f"the program is compiled for {module.num_partitions} devices, but mesh {dict(mesh)} has "
            f"{num_devices}; pass the sizes of the mesh that it was compiled for"
        )
    executions = _executions(module, work.taken)
    windows = all_windows(module)
    # A program repeats few groupings, each long to parse: 16,384 devices may be listed one by one.
    in_slice = {axis: size // slices.get(axis, 1) for axis, size in mesh.items()}
    cached_span = functools.cache(functools.partial(span, mesh=in_slice))
    collectives = []
    for computation in module.computations.values():
        count = executions[computation.name]
        if (chained := computation.chained) and chained[1] != "start":
            continue  # further parts of one that is counted where it starts
        for instruction in computation.collectives if count else ():
            axes, group_size = cached_span(grouping_of(instruction.name, instruction.attributes))
            if group_size > 1:
                op = _op(computation, instruction)
                times = group_size if op == "all-gather" else 1
                types = [_unpadded(computation, name) for name in _operands(instruction)]
                window = windows.get((computation.name, instruction.name))
                collectives.append(
                    Collective(
                        op,
                        axes,
                        bytes=times * sum(map(type_bytes, types)),
                        count=count,
                        computation=computation.name,
                        op_name=instruction.op_name,
                        beside="" if window is None else window.matmul(work),
                        elements=tuple(times * math.prod(dims) for type_ in types for _, dims in arrays(type_)),
                        window=window,
                        name=instruction.name,
                    )
                )
        for send in computation.between_slices if count else ():
            window = windows.get((computation.name, send.name))
            collectives.append(_between_slices(computation, send, slices, count, window, work))
    return collectives


def _between_slices(
    computation: Computation,
    send: Instruction,
    slices: Mapping[str, int],
    count: int,
    window: Window | None,
    work: Work,
) -> Collective:
    type_ = computation.instructions[send.operands[0]].type
    axes = tuple(axis for axis, number in slices.items() if number > 1)
    times = math.prod(slices.values()) if send.between_slices == "all-gather" else 1
    return Collective(
        send.between_slices,
        axes,
        bytes=times * type_bytes(type_),
        count=count,
        computation=computation.name,
        op_name=send.op_name,
        beside="" if window is None else window.matmul(work),
        window=window,
        elements=tuple(times * math.prod(dims) for _, dims in arrays(type_)),
        name=send.name,
    )


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


def _operands(instruction: Instruction) -> list[str]:
    operands = instruction.operands
    # Of a ragged all-to-all then come the output's buffer, offsets and sizes.
    return operands[:1] if instruction.opcode.startswith("ragged-all-to-all") else operands


def _unpadded(computation: Computation, name: str) -> str:
    """The type of an operand. TPUs pad what they reduce and scatter to parts of a size that their memory likes: what is
    added is no one's data."""
    instruction = computation.instructions[name]
    return computation.instructions[instruction.operands[0]].type if instruction.opcode == "pad" else instruction.type


def _op(computation: Computation, instruction: Instruction) -> str:
    """TPUs reduce and scatter by an all-reduce that is fused with each device's slice of its result."""
    op = instruction.opcode.removesuffix("-start")
    if op != "all-reduce" or not computation.root:
        return op
    kept = computation.value(computation.root)
    is_sliced = kept.opcode == "dynamic-slice" and computation.value(kept.operands[0]) is instruction
    return "reduce-scatter" if is_sliced else op


def _executions(module: Module, taken: Mapping[str, Fraction]) -> dict[str, int]:
    """How often each computation runs per run of the program; 0 for those that lead to no collective."""
    callees = {c.name: [callee for _, _, callee in c.calls] for c in module.computations.values()}
    callees_first = list(TopologicalSorter(callees).static_order())
    communicates: dict[str, bool] = {}
    for name in callees_first:
        communicates[name] = module.computations[name].communicates or any(
            communicates[callee] for callee in callees[name]
        )
    executions = dict.fromkeys(callees_first, Fraction(0))
    executions[module.entry] = Fraction(1)
    for name in reversed(callees_first):
        computation = module.computations[name]
        for caller, role, callee in computation.calls if executions[name] else ():
            if communicates[callee]:  # a loop that does not may have no static trip count
                executions[callee] += executions[name] * _repetitions(module, computation, caller, role, taken)
    for name, count in executions.items():
        if count.denominator > 1 and module.computations[name].communicates:
            raise ValueError(
                f"%{name} holds collectives and would run {count} times; state how often the conditional around it is "
                "taken as a share of the trips of its loop"
            )
    return {name: int(count) for name, count in executions.items()}


def _repetitions(
    module: Module, computation: Computation, caller: Instruction, role: str, taken: Mapping[str, Fraction]
) -> int | Fraction:
    if caller.opcode == "conditional":
        return share_taken(caller, taken)
    if caller.opcode != "while":
        return 1
    trips = trip_count(module, computation, caller)
    if trips is None:
        raise ValueError(
            f"loop %{caller.name} ({caller.op_name}) holds collectives and has no static trip "
            "count; write it as lax.scan or lax.fori_loop with static bounds"
        )
    return trips + (role == "condition")  # which is asked once more, to end the loop
