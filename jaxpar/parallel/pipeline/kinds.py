"""The schedules of the literature, each as the order in which a stage acts.

Most are one pattern: some forward passes to warm up, then one forward and one backward pass in turn (1F1B), then what
is left of the backward passes. They differ in the sequence of forward and of backward passes, in how many warm up, and
in when the weight gradients run. The two with a V placement have phases of their own.
"""

import difflib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxpar.parallel.pipeline.schedule import Action, Op, Schedule, from_orders
from jaxpar.parallel.pipeline.simulate import Times, lockstep_makespan


@dataclass(frozen=True)
class Kind:
    """One schedule of the literature. `build(stages, microbatches, chunks, slices)` takes only what `make` lets by."""

    name: str
    build: Callable[[int, int, int, int], Schedule]
    chunks: tuple[int, int | None] = (1, 1)
    """The least and the most chunks per stage; None is no bound."""
    needs_slices: bool = False
    synchronous: bool = True
    """Whether gradients are those of one device; if not, weights change between a microbatch and the next."""


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes, last microbatch first; every activation is kept.

    Source: GPipe (arXiv 1811.06965), figure 2c. Bubble (P-1)/(M+P-1) of the total.
    """
    forwards = [Action(Op.F, m) for m in range(num_microbatches)]
    backwards = [Action(Op.BW, m) for m in reversed(range(num_microbatches))]
    return from_orders("gpipe", [[*forwards, *backwards]] * num_stages, num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int, kind: str = "1f1b", eager: bool = False) -> Schedule:
    """A backward pass as soon as it can run: stage s holds P - s activations at most, GPipe's bubble.

    Source: PipeDream-Flush, in Memory-Efficient Pipeline-Parallel DNN Training (arXiv 2006.09503), section 3.2.
    The same table without the flush is PipeDream (SOSP 2019, arXiv 1806.03377, section 3.2: NOAM microbatches in
    flight) and PipeDream-2BW (arXiv 2006.09503, section 3.1): what differs is which weights an action uses.

    eager: twice the forward passes to warm up, 2 (P - s) - 1 activations, so that a hop has the time of a forward and
    a backward pass to arrive. Source: On Optimizing the Communication of Model Parallelism (arXiv 2211.05322),
    section 4 (eager-1F1B).
    """
    forwards = [Action(Op.F, m) for m in range(num_microbatches)]
    orders = [
        _in_turn(forwards, [replace(each, op=Op.BW) for each in forwards], (1 + eager) * (num_stages - 1 - stage))
        for stage in range(num_stages)
    ]
    return _shortest(kind, orders, num_microbatches, 1)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over chunks, in rounds: P microbatches through one chunk, then through the next; the bubble is 1/C of
    1F1B's.

    Source: Megatron-LM (arXiv 2104.04473), section 2.2.2, for microbatches that the stages divide. Otherwise a round
    has as equal a share as possible of floor(M / P) rounds (one, below P), since a round's length is free: The Llama 3
    Herd of Models (arXiv 2407.21783), section 3.3.2.
    """
    num_rounds = max(1, num_microbatches // num_stages)
    bounds = [num_microbatches * r // num_rounds for r in range(num_rounds + 1)]
    rounds = [range(a, b) for a, b in itertools.pairwise(bounds)]
    forwards = [Action(Op.F, m, c) for each in rounds for c in range(num_chunks) for m in each]
    backwards = [Action(Op.BW, m, c) for each in rounds for c in reversed(range(num_chunks)) for m in each]
    longest = max(map(len, rounds))
    orders = [
        _in_turn(forwards, backwards, (num_chunks - 1) * longest + 2 * (num_stages - 1 - stage))
        for stage in range(num_stages)
    ]
    return _shortest("interleaved-1f1b", orders, num_microbatches, num_chunks)


def looped_bfs(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """All microbatches through one chunk, then all through the next; backward alike. Interleaved 1F1B's bubble, GPipe's
    memory; under FSDP a chunk's weights are gathered once a pass.

    Source: Breadth-First Pipeline Parallelism (arXiv 2211.05953), section 4.
    """
    passes = [(c, m) for c in range(num_chunks) for m in range(num_microbatches)]
    forwards = [Action(Op.F, m, c) for c, m in passes]
    backwards = [Action(Op.BW, m, num_chunks - 1 - c) for c, m in passes]
    orders = [[*forwards, *backwards]] * num_stages
    return from_orders("looped-bfs", orders, num_microbatches, num_chunks=num_chunks)


def terapipe(num_stages: int, num_microbatches: int, num_slices: int) -> Schedule:
    """Each microbatch in slices of its tokens, one after another, all forward, then all backward from the last slice.

    Source: TeraPipe (arXiv 2102.07988), section 3.2; for slices of unequal length see partition.token_slices.
    """
    forwards = [Action(Op.F, m, slice=k) for m in range(num_microbatches) for k in range(num_slices)]
    backwards = [replace(each, op=Op.BW) for each in reversed(forwards)]
    orders = [[*forwards, *backwards]] * num_stages
    return from_orders("terapipe", orders, num_microbatches, num_slices=num_slices)


def zero_bubble(num_stages: int, num_microbatches: int, eager: bool) -> Schedule:
    """1F1B whose weight gradients wait until they fill the bubble: ZB-H1, with 1F1B's memory, or, eager, ZB-H2, with
    2P - 1 activations on the first stage and no bubble when F, B and W take the same time and M >= 2P - 1.

    Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2, figure 3. Bubble
    (P-1)(F + B - W) and (P-1)(F + B - 2W).
    """
    forwards = [Action(Op.F, m) for m in range(num_microbatches)]
    backwards = [Action(Op.B, m) for m in range(num_microbatches)]
    depth = 1 + eager
    orders = [
        _in_turn(forwards, backwards, depth * (num_stages - 1 - stage), weights_wait=depth * stage)
        for stage in range(num_stages)
    ]
    return from_orders("zb-h2" if eager else "zb-h1", orders, num_microbatches)


def _shortest(kind: str, orders: Sequence[Sequence[Action]], num_microbatches: int, num_chunks: int) -> Schedule:
    """Of the tables with hops of one and of two ticks the one that is faster in lockstep, when F, B and W take the same
    time.

    With one, a stage runs its forward pass while its neighbours run their backward passes, and a tick takes as long as
    the longer of them. With two, all run the same; a stage needs two microbatches in flight for each one after it
    then, which eager and interleaved 1F1B have and 1F1B has not.
    """
    tables = [from_orders(kind, orders, num_microbatches, num_chunks=num_chunks, hop_ticks=ticks) for ticks in (1, 2)]
    return min(tables, key=lambda table: lockstep_makespan(table, Times()))


def _in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int, weights_wait: int | None = None
) -> list[Action]:
    """Warm up, then a forward and a backward pass in turn. With weights_wait, a weight gradient follows each backward
    pass but the first so many; those come at the end."""
    order = list(forwards[:warm_up])
    weights = [replace(each, op=Op.W) for each in backwards]
    for i, backward in enumerate(backwards):
        order += [*forwards[warm_up + i : warm_up + i + 1], backward]
        if weights_wait is not None and i >= weights_wait:
            order.append(weights[i - weights_wait])
    if weights_wait is not None:
        order += weights[max(0, len(weights) - weights_wait) :]
    return order


class _V:
    """A stage's order under the V placement, each pass taking its chunk's next microbatch."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.count = {(op, chunk): 0 for op in (Op.F, Op.B) for chunk in (0, 1)}
        self.waiting: deque[Action] = deque()
        """Weight gradients put off, the oldest first."""

    def f(self, chunk: int) -> None:
        self._add(Op.F, chunk)

    def bw(self, chunk: int) -> None:
        self._add(Op.BW, chunk)

    def b(self, chunk: int) -> None:
        self._add(Op.B, chunk)
        self.waiting.append(replace(self.order[-1], op=Op.W))

    def w(self, chunk: int | None = None) -> None:
        """The oldest weight gradient that waits, of a chunk if one is given."""
        oldest = next(each for each in self.waiting if chunk in (None, each.chunk))
        self.waiting.remove(oldest)
        self.order.append(oldest)

    def _add(self, op: Op, chunk: int) -> None:
        counted = (Op.F if op is Op.F else Op.B, chunk)
        self.order.append(Action(op, self.count[counted], chunk))
        self.count[counted] += 1


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """No bubble when F, B and W take the same time and M >= 2P - 1, in 1F1B's memory, the same on all stages: the loss
    and the first layers are on the first stage.

    Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6.
    """
    num_full = max(num_microbatches, 2 * num_stages - 1)

    def order(stage: int) -> list[Action]:
        v, after = _V(), num_stages - stage
        for _ in range(2 * after - 1):
            v.f(0)
        for _ in range(stage):
            v.f(1)
            v.f(0)
        for _ in range(after):
            v.f(1)
            v.b(1)
            v.w()
        while v.count[Op.F, 1] < num_full:
            if v.count[Op.F, 0] < num_full:
                v.f(0)
            v.b(0)
            v.w()
            v.f(1)
            v.b(1)
            v.w()
        for _ in range(stage):
            v.b(0)
            v.b(1)
        for _ in range(after):
            v.b(0)
            v.w(0)
        while v.waiting:
            v.w()
        return v.order

    return _v_schedule("zb-v", map(order, range(num_stages)), num_microbatches)


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """DualPipe folded in half: a forward pass of one chunk is paired with a backward pass of the other, so that the
    one's communication hides under the other's compute. A pair is two ticks here.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, and DualPipeV in deepseek-ai/DualPipe, which has the eight
    phases; it needs M >= 2P there, fewer here leave their places empty. Where both outputs of a pair leave together the
    bubble is its authors' (P-1)(F&B + B - 3W), in a chunk's times, B the whole backward pass; where the forward pass's
    leave first, as here, it is smaller.
    """
    num_full = max(num_microbatches, 2 * num_stages)

    def order(stage: int) -> list[Action]:
        v, after = _V(), num_stages - 1 - stage
        for _ in range(2 * after):
            v.f(0)
        for _ in range(stage + 1):
            v.f(0)
            v.f(1)
        for _ in range(after):
            v.b(1)
            v.w()
            v.f(1)
        for _ in range(num_full - 2 * num_stages + stage + 1):
            v.f(0)
            v.bw(1)
            v.f(1)
            v.bw(0)
        for _ in range(after):
            v.bw(1)
            v.f(1)
            v.bw(0)
        # The second half of the passes in this phase put their weight gradients off, for the bubbles that follow.
        for i in range(2 * (stage + 1)):
            (v.b if i > stage else v.bw)(1 - i % 2)
        for _ in range(after):
            v.w()
            v.b(0)
        while v.waiting:
            v.w()
        return v.order

    return _v_schedule("dualpipe-v", map(order, range(num_stages)), num_microbatches)


def _v_schedule(kind: str, orders: Iterable[list[Action]], num_microbatches: int) -> Schedule:
    """Without the microbatches that only filled the phases up; the rest keeps its order, so it stays valid."""
    kept = [[each for each in order if each.microbatch < num_microbatches] for order in orders]
    return from_orders(kind, kept, num_microbatches, num_chunks=2, placement="v")


KINDS = {
    kind.name: kind
    for kind in (
        Kind("gpipe", lambda p, m, c, k: gpipe(p, m)),
        Kind("1f1b", lambda p, m, c, k: one_f_one_b(p, m)),
        Kind("eager-1f1b", lambda p, m, c, k: one_f_one_b(p, m, "eager-1f1b", eager=True)),
        Kind("interleaved-1f1b", lambda p, m, c, k: interleaved(p, m, c), chunks=(2, None)),
        Kind("looped-bfs", lambda p, m, c, k: looped_bfs(p, m, c), chunks=(2, None)),
        Kind("zb-h1", lambda p, m, c, k: zero_bubble(p, m, eager=False)),
        Kind("zb-h2", lambda p, m, c, k: zero_bubble(p, m, eager=True)),
        Kind("zb-v", lambda p, m, c, k: zb_v(p, m), chunks=(2, 2)),
        Kind("dualpipe-v", lambda p, m, c, k: dualpipe_v(p, m), chunks=(2, 2)),
        Kind("terapipe", lambda p, m, c, k: terapipe(p, m, k), needs_slices=True),
        Kind("pipedream", lambda p, m, c, k: one_f_one_b(p, m, "pipedream"), synchronous=False),
        Kind("pipedream-2bw", lambda p, m, c, k: one_f_one_b(p, m, "pipedream-2bw"), synchronous=False),
    )
}
"""Every kind by name; `auto` searches for a table of its own."""


def make(
    kind: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None, num_slices: int | None = None
) -> Schedule:
    """The table of a kind. Chunks may be left out where only one number is possible.

    ValueError, naming what works, for an unknown kind and for sizes that it cannot have.
    """
    check_known(kind)
    for name, value in (("stages", num_stages), ("microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{kind} with {value} {name} is no pipeline; take at least 1")
    chosen = KINDS[kind]
    least, most = chosen.chunks
    if least == most and num_chunks is None:
        num_chunks = least
    if num_chunks is None or num_chunks < least or (most is not None and num_chunks > most):
        wanted = f"exactly {least}" if least == most else f"{least} or more"
        other = {1: "; interleaved-1f1b and looped-bfs take more", 2: "; 1f1b and gpipe have one"}[least]
        given = "none given" if num_chunks is None else f"not {num_chunks}"
        raise ValueError(f"{kind} needs {wanted} chunk{'s' * (wanted != 'exactly 1')} per stage, {given}{other}")
    if chosen.needs_slices and (num_slices is None or num_slices < 1):
        given = "none given" if num_slices is None else f"not {num_slices}"
        raise ValueError(f"{kind} needs the number of token slices per microbatch, 1 or more, {given}")
    if not chosen.needs_slices and num_slices not in (None, 1):
        raise ValueError(f"{kind} does not slice sequences, so not {num_slices} slices; terapipe does")
    return chosen.build(num_stages, num_microbatches, num_chunks, num_slices or 1)


def check_known(kind: str) -> None:
    """ValueError for what is no kind."""
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(KINDS)} and auto"
        raise ValueError(f"pipeline schedule {kind!r} is unknown; {hint}")


def is_asynchronous(schedule: Schedule | None) -> bool:
    """Whether weights change between a microbatch of the schedule and the next."""
    return schedule is not None and schedule.kind in KINDS and not KINDS[schedule.kind].synchronous


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """How many versions of its weights each stage holds at most.

    PipeDream stashes one per microbatch in flight (arXiv 1806.03377, section 3.3), 2BW two (arXiv 2006.09503,
    section 3.1); with a flush there is one.
    """
    if schedule.kind == "pipedream":
        return tuple(
            min(schedule.num_stages - stage, schedule.num_microbatches) for stage in range(schedule.num_stages)
        )
    return (2 if schedule.kind == "pipedream-2bw" else 1,) * schedule.num_stages
