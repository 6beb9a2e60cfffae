"""Which strategy, and its body: what each rank does in a region that is manual over `context`."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float, Int

from jaxpar.kernels import attention as on_one_device
from jaxpar.kernels import tiled
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel.context import allgather, ring, ulysses
from jaxpar.parallel.context.halves import Halves, fits
from jaxpar.parallel.context.order import Order, in_sequence, multiple, needed_shifts, permutation

AXIS = "context"


@dataclass(frozen=True)
class ContextStrategy:
    kind: Literal["exchange", "allgather"] = "exchange"
    group: int = 1
    """Of `exchange`: so many consecutive ranks trade tokens for heads (Ulysses), and the groups form a ring: 1 is ring
    attention alone, all ranks Ulysses alone, anything between both (USP, arXiv 2405.07719)."""
    order: Order = "zigzag"
    block: int = tiled.BLOCK
    """Most queries, and most keys, of a tile."""

    @classmethod
    def parse(cls, text: str, order: Order, ranks: int, branches: bool = False) -> "ContextStrategy":
        """`auto`, `ring`, `ulysses`, `allgather` or `hybrid=RxU` with R x U = ranks. Raises ValueError.

        `branches`: whether the stages of `pipe` are at different branches of a schedule. Nothing may be sent around a
        ring then, see pipeline/executor.py: auto is allgather.
        """
        if text == "auto":
            text = "allgather" if branches else "ring"
        kind, _, factors = text.partition("=")
        if branches and ranks > 1 and kind in ("ring", "hybrid"):
            raise ValueError(
                f"--context-strategy {text} sends around a ring, which cannot be done while the stages of `pipe` are "
                "at different branches; take allgather or ulysses, or --pipeline gpipe or looped-bfs, which do not "
                "branch where all parts have as many layers"
            )
        if kind == "hybrid":
            r, _, u = factors.partition("x")
            if not (r.isdigit() and u.isdigit()) or int(r) * int(u) != ranks:
                works = [f"hybrid={ranks // n}x{n}" for n in range(1, ranks + 1) if ranks % n == 0]
                raise ValueError(
                    f"--context-strategy {text}: the factors must multiply to context={ranks}: {', '.join(works)}"
                )
            return cls(group=int(u), order=order)
        strategies = {
            "ring": cls(order=order),
            "ulysses": cls(group=ranks, order=order),
            "allgather": cls(kind="allgather", order=order),
        }
        if text not in strategies:
            known = ", ".join([*strategies, "auto"])
            raise ValueError(f"--context-strategy {text}: it must be one of {known} or hybrid=RxU")
        return strategies[text]

    def goes_by_halves(self, kernel: on_one_device.Kernel, window: int | None, length: int) -> bool:
        """Whether a ring's rounds, of so many tokens of a rank, are the kernel's; else they go by tiles."""
        return self.kind == "exchange" and self.group == 1 and kernel == "splash" and window is None and fits(length)

    def block_of(self, seq_len: int, ranks: int) -> int:
        """Tokens of a block, such that none reaches from one of zigzag's parts into the next, if a size not far below
        the most divides them: few of such a block's tiles could be left out."""
        part = seq_len // multiple(self.order, ranks)
        fits = (size for size in range(self.block, self.block // 4, -1) if part % size == 0)
        return next(fits, tiled.block_size(part, self.block))

    def check(self, seq_len: int, num_heads: int, ranks: int, tensor: int, unit: int = 1) -> None:
        """Raise ValueError for sizes that do not divide; seq_len must be a multiple of `unit` besides."""
        parts = multiple(self.order, ranks)
        if seq_len % parts:
            step = math.lcm(parts, unit)
            nearest = [n for n in (seq_len // step * step, -(-seq_len // step) * step) if n]
            raise ValueError(
                f"--seq-len {seq_len} does not divide into the {parts} parts of --context-order {self.order} over "
                f"context={ranks}; the nearest that does: {' or '.join(map(str, nearest))}"
            )
        ulysses.check_heads(num_heads, tensor, self.group)


def attention(
    strategy: ContextStrategy,
    axis_sizes: dict[str, int],
    kernel: on_one_device.Kernel,
    skips_documents: bool,
    mask: AttentionMask,
    scale: float,
    q: Float[Array, "B C H K"],
    k: Float[Array, "B C G K"],
    v: Float[Array, "B C G K"],
    tokens: Tokens,
) -> tuple[Float[Array, "B C H K"], Int[Array, ""]]:
    """This rank's queries over the whole sequence, whose `tokens` [B, S] lie as the ranks hold them; and how many tiles
    its forward pass computed. `kernel` attends where a rank has all of the sequence."""
    ranks, group = axis_sizes[AXIS], strategy.group
    by_halves = strategy.goes_by_halves(kernel, mask.window, q.shape[1])
    halves = Halves(strategy.order, scale, mask.soft_cap) if by_halves else None
    block = strategy.block_of(tokens.positions.shape[1], ranks)
    if ranks == 1:
        return on_one_device.whole_sequence(kernel, q, k, v, tokens, mask, scale, block)
    whole = ring.Ring(
        axis=AXIS,
        ranks=ranks // group,
        stride=group,
        shifts=needed_shifts(strategy.order, tokens.positions.shape[1], ranks, group, mask.causal, mask.window),
        skips_documents=skips_documents,
        mask=mask,
        scale=scale,
        all_axes=tuple(axis_sizes),
        block=block,
        halves=halves,
    )

    def by_splash(q: Array, k: Array, v: Array, q_tokens: Tokens, num_parts: int, part: Int[Array, ""] | int):
        """Of keys in the sequence's own order, as the kernel has them."""
        places = permutation(strategy.order, tokens.positions.shape[1], ranks)
        k_segments = in_sequence(strategy.order, tokens.segment_ids, ranks)
        return on_one_device.by_splash(q, k, v, q_tokens.segment_ids, k_segments, mask, scale, places, num_parts, part)

    if strategy.kind == "allgather":
        q_tokens = whole.tokens_of(tokens, whole.index())
        if kernel == "splash":
            # Laid out before they are gathered: that of a rank's part is less.
            k, v = (on_one_device.heads_first(x) for x in (k, v))
            k, v = (allgather.gather_in_sequence(strategy.order, x, AXIS, ranks) for x in (k, v))
            return by_splash(q, k, v, q_tokens, ranks, whole.index())
        k, v = allgather.gather(k, AXIS), allgather.gather(v, AXIS)
        return on_one_device.counted(q, k, v, q_tokens, tokens, mask, scale, block)
    if group == 1:
        return ring.attention(whole, q, k, v, tokens)
    groups = ulysses.rank_groups(ranks, group)
    q, k, v = (ulysses.to_heads(x, AXIS, group, groups) for x in (q, k, v))
    if group == ranks and kernel == "splash":
        k, v = (on_one_device.heads_first(in_sequence(strategy.order, x, ranks)) for x in (k, v))
        out, tiles = by_splash(q, k, v, tokens, 1, 0)
    elif group == ranks:
        out, tiles = on_one_device.whole_sequence(kernel, q, k, v, tokens, mask, scale, block)
    else:
        out, tiles = ring.attention(whole, q, k, v, tokens)
    return ulysses.to_tokens(out, AXIS, groups), tiles
