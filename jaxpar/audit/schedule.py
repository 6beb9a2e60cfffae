"""What runs between the start and the end of an asynchronous collective, by the order of the scheduled text."""

from dataclasses import dataclass

from jaxpar.audit.hlo_text import Computation, Instruction, Module
from jaxpar.audit.work import Work, runs_on_its_own


@dataclass(frozen=True)
class Window:
    """The instructions between a start and its end."""

    computation: Computation
    between: tuple[Instruction, ...]

    def matmul(self, work: Work) -> str:
        """The name of what has the most FLOPs in it, loops included; "" if nothing has any."""
        flops = {each.name: work.of(work.own_flops, self.computation, each) for each in self.between}
        most = max(flops, key=lambda name: flops[name], default="")
        return most if most and flops[most] > 0 else ""


def windows(module: Module, computation: Computation) -> dict[str, Window]:
    """By the name of what starts: a collective's own operation, the wrapper of one, a fusion that holds one."""
    open_: dict[str, list[Instruction]] = {}
    starts: dict[str, str] = {}  # what carries on with a start, or its channel -> its name
    closed = {}
    chained = {
        caller.name: chain
        for caller, _, callee in computation.calls
        if caller.opcode == "fusion" and (chain := module.computations[callee].chained) is not None
    }
    for instruction in computation.instructions.values():
        channel, part = chained.get(instruction.name, ("", ""))
        if instruction.opcode == "recv-done":
            # Of a collective between slices: what it receives was started by a send.
            recv = computation.instructions[instruction.operands[0]]
            if start := starts.get(recv.rendezvous):
                closed[start] = Window(computation, tuple(open_.pop(start)))
        elif instruction.opcode == "send" and instruction.between_slices:
            open_[instruction.name] = []
            starts[instruction.rendezvous] = instruction.name
        elif part == "start" or instruction.opcode.endswith("-start"):
            open_[instruction.name] = []
            starts[channel or instruction.name] = instruction.name
        elif part == "done" or instruction.opcode.endswith(("-done", "-update")):
            start = starts.get(channel or instruction.operands[0], "")
            if instruction.opcode.endswith("-update"):
                starts[instruction.name] = start
            elif start in open_:
                closed[start] = Window(computation, tuple(open_.pop(start)))
        elif runs_on_its_own(instruction) or instruction.opcode in ("while", "conditional", "call"):
            for between in open_.values():
                between.append(instruction)
    return closed


def all_windows(module: Module) -> dict[tuple[str, str], Window]:
    """Of every collective that is asynchronous, by (computation, its own operation's name)."""
    found = {}
    for computation in module.computations.values():
        started = windows(module, computation)
        for name, window in started.items():
            found[computation.name, name] = window
            for _, callee in computation.instructions[name].callees:
                for collective in module.computations[callee].collectives:
                    found[callee, collective.name] = window
    return found
