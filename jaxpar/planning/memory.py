"""Memory of a training step on each device, by stage and part, at its fullest: pure arithmetic.

That is the end of the backward pass, when all gradients are there, and of our own program (convention jaxpar):

    parameters    4 bytes of the master copy; ZeRO-1, 2: 2 bytes of the whole copy that a step computes with
    gradients     4 bytes, cut as FSDP cuts parameters; ZeRO-1: whole, ZeRO-2: cut over `data` too. With several
                  microbatches twice: the sums, and one microbatch's own
    optimizer     8 bytes of AdamW's moments, cut alike; ZeRO-1, 2: 12, with the master copy, over `data` too
    activations   what layers keep for their backward pass, by `activations`
    other         what one layer works with and its whole gradient, the head's whole gradient, gathered weights, copies
                  that the compiler makes of kernels whose last dim is cut, a pipeline's buffers between stages

Under `pipe` a stage gathers its weights once a step, and its gradients are whole in float32 until the step's end.
Held against compiled programs in tests/test_memory.py.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.parallel.axes import PARAMETER_RULES
from jaxpar.parallel.pipeline.schedule import Placement, part_of
from jaxpar.parallel.remat import Remat
from jaxpar.planning.activations import LayerBytes, chunk_bytes, kept_by_all, kept_by_name, sizes, working_bytes
from jaxpar.planning.conventions import CONVENTIONS, Convention
from jaxpar.planning.job import SELECTIVE, Job
from jaxpar.planning.schedules import stashes
from jaxpar.planning.shapes import Share, num_moe_layers, shares

JAXPAR = CONVENTIONS["jaxpar"]
PARTS = ("parameters", "gradients", "optimizer", "activations", "other")


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of one stage."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    others: Mapping[str, float]
    """By what it is."""

    @property
    def other(self) -> float:
        return sum(self.others.values())

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.other


@dataclass(frozen=True)
class Memory:
    """Of a whole run."""

    stages: tuple[StageMemory, ...]
    limit: int
    """Bytes that one device may use."""

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.limit

    def summary(self) -> dict[str, int]:
        """Of the fullest stage: each part of PARTS, total and limit."""
        parts = {part: round(getattr(self.fullest, part)) for part in PARTS}
        return parts | {"total": sum(parts.values()), "limit": self.limit}


def memory(job: Job, convention: Convention = JAXPAR) -> Memory:
    """Of a job that `Job.check` passes. KeyError for a schedule that cannot run in one program."""
    footprint = Footprint(job, convention)
    held = stashes(job.pipeline, job.mesh["pipe"], job.num_microbatches, job.chunks).memory
    stages = stages_of(job.model.num_layers, job.mesh["pipe"], job.chunks, _placement(job.pipeline))
    if convention.is_one_program:
        stages, held = (max(stages, key=lambda stage: stage.layers),) * len(stages), [max(held)] * len(stages)
    return Memory(tuple(map(footprint.stage, stages, map(float, held))), memory_limit(job, convention))


def _placement(kind: str) -> Placement:
    return "v" if kind in ("zb-v", "dualpipe-v") else "loop"


def memory_limit(job: Job, convention: Convention = JAXPAR) -> int:
    """Bytes of a device that a step may use."""
    return int(job.cluster.chip.memory_bytes * convention.limit)


@dataclass(frozen=True)
class Stage:
    """What a stage has of the model."""

    layers: int
    chunks: int
    has_embedding: bool
    has_head: bool


@functools.lru_cache(maxsize=4096)
def stages_of(num_layers: int, num_stages: int, num_chunks: int, placement: Placement) -> tuple[Stage, ...]:
    """Where layers do not divide, the last part and the first have one fewer, then the next ones from both ends: the
    head and the embedding take their place (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    parts = num_stages * num_chunks
    most = -(-num_layers // parts)
    missing = most * parts - num_layers
    counts = [most] * parts
    for i in range(missing):
        counts[i // 2 if i % 2 else -1 - i // 2] -= 1
    last = parts - 1
    held = [[part_of(placement, num_stages, stage, chunk) for chunk in range(num_chunks)] for stage in range(num_stages)]
    return tuple(
        Stage(sum(counts[part] for part in parts_held), num_chunks, 0 in parts_held, last in parts_held)
        for parts_held in held
    )


class Footprint:
    """What a job's stages need, whatever the schedule: made once, asked for many."""

    def __init__(self, job: Job, convention: Convention = JAXPAR):
        self._job, self._convention = job, convention
        self._shares = shares(job.model, job.mesh)
        self._moe_share = num_moe_layers(job.model) / job.model.num_layers
        self._layer = self._shares.layers(1 - self._moe_share, self._moe_share)
        of = sizes(job)
        kept = "fused" if job.remat == SELECTIVE and convention.kept == "scores" else convention.kept
        self._all = self._mixed(kept_by_all(job, of, kept, convention.remakes_elementwise))
        self._input = job.compute_bytes * of.stream
        names = convention.selective if job.remat == SELECTIVE else None
        self._remat = Remat(saves=names) if names else job.remat_policy
        self._named = self._mixed(kept_by_name(job, of, self._remat, convention.kept))
        self._working = working_bytes(job, of)
        self._chunk = chunk_bytes(job)
        self._is_cut = self._layer.whole > self._layer.kept and job.zero == 3

    def _mixed(self, layer: LayerBytes) -> float:
        return layer.dense * (1 - self._moe_share) + layer.moe * self._moe_share

    def stage(self, stage: Stage, held: float) -> StageMemory:
        """held: microbatches whose activations it has at once."""
        ends = self._ends(stage)
        own = self._layer * stage.layers
        if self._convention.is_one_program:
            return self._compiled(stage, own, *ends, held)
        return self._framework(stage, own, *ends, held)

    def _ends(self, stage: Stage) -> tuple[Share, Share]:
        """Embedding and head."""
        nothing, both = Share(0, 0, 0, 0), (self._shares.embedding, self._shares.head)
        if self._convention.is_one_program:
            parts = 1 if "pipe" in PARAMETER_RULES["vocab"] else self._job.mesh["pipe"]
            return both[0] * (1 / parts), both[1] * (1 / parts)
        return both[0] if stage.has_embedding else nothing, both[1] if stage.has_head else nothing

    def _state(self, share: Share) -> tuple[float, float, float]:
        """Parameters, gradients, optimizer."""
        zero, convention = self._job.zero, self._convention
        each = (convention.zero or _bytes(convention)) if zero < 3 else _bytes(convention)
        optimizer = {0: share.whole, 1: share.state, 2: share.state}.get(zero, share.kept)
        gradients = {0: share.whole, 1: share.whole, 2: share.state}.get(zero, share.kept)
        return each[0] * (share.kept if zero == 3 else share.whole), each[1] * gradients, each[2] * optimizer

    def _kept(self, num_layers: float) -> tuple[float, float]:
        """By a microbatch's forward pass through so many layers; and by its backward pass, one group being made again."""
        remat = self._remat
        if remat.keeps_all:
            return num_layers * self._all, 0.0
        if remat.every > 1:
            size = min(remat.every, num_layers)
            return num_layers // size * self._input, size * self._all
        return num_layers * self._named, 0.0

    def _framework(self, stage: Stage, own: Share, embedding: Share, head: Share, held: float) -> StageMemory:
        job, convention = self._job, self._convention
        parameters, gradients, optimizer = self._state(own + embedding + head)
        kept, again = self._kept(stage.layers)
        others = {"working": self._working + again, "reserved": float(convention.reserved)}
        if self._is_cut:
            # Two layers' weights, one of them ahead of time, a layer's whole gradient, and the ends' weights.
            weights = job.compute_bytes * (2 * self._layer.whole + embedding.whole + head.whole)
            others["gathered weights"] = weights + convention.gradients * self._layer.whole
        if stage.has_head:
            others["logits"] = convention.logit_bytes * job.microbatch_tokens * job.model.vocab_size / job.mesh["tensor"]
        if job.mesh["pipe"] > 1:
            others["between stages"] = 4 * self._input
        return StageMemory(parameters, gradients, optimizer, held * kept, others)

    def _compiled(self, stage: Stage, own: Share, embedding: Share, head: Share, held: float) -> StageMemory:
        job, short = self._job, self._job.compute_bytes
        parameters, sums, optimizer = self._state(own + embedding + head)
        tied, last = job.model.tie_embeddings, embedding if job.model.tie_embeddings else head
        others = {"working": self._working}
        if job.zero == 3:
            others["compiler's copies"] = 4 * own.transposed
        if self._is_cut or job.zero == 2:
            others["a layer's gradient"] = 4 * self._layer.whole
        if job.mesh["pipe"] > 1:
            part = own * (1 / stage.chunks)
            kept, again = self._kept(stage.layers / stage.chunks)
            slots = 2 * held * stage.chunks if job.pipeline in ("gpipe", "looped-bfs") else held * stage.chunks + 2
            others["between stages"] = (slots + 2) * self._input
            if self._is_cut:
                copied = part.whole if stage.chunks > 1 else 0.0
                others["gathered weights"] = short * (own.whole + embedding.whole + head.whole + copied)
                sums = 4 * (own.whole + embedding.whole + head.whole)
            gradients = sums + short * part.whole
            others["head"] = 4 * last.whole
            return StageMemory(parameters, gradients, optimizer, kept + again, others)
        kept, again = self._kept(stage.layers)
        several = job.num_microbatches > 1
        per_layer = {1: short * own.whole, 2: 4 * own.state}.get(job.zero, 4 * own.kept)
        gradients = per_layer + (sums if several else self._state(embedding)[1])
        others["head"] = 4 * last.whole * (2 if tied else 1) + (short * last.whole if several else 0.0)
        if job.zero == 2:
            others["head"] += 4 * embedding.whole
        if job.zero == 3 and (self._remat.keeps_all or not job.reshard_after_forward):
            others["gathered weights"] = short * (own.kept if job.reshard_after_forward else own.whole)
        if self._remat.every > 1:
            rest = stage.layers % self._remat.every
            others["compiler's copies"] += 4 * own.kept * (stage.layers - rest) / stage.layers if rest else 0.0
        loss = short * last.whole + self._chunk - self._working - per_layer
        others["loss"] = max(0.0, loss)
        return StageMemory(parameters, gradients, optimizer, kept + again, others)


def _bytes(convention: Convention) -> tuple[float, float, float]:
    return convention.parameters, convention.gradients, convention.optimizer
