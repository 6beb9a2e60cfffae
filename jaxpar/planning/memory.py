"""Memory of a training step on each device, by stage and part, at its fullest: pure arithmetic.

That is the end of the backward pass, when all gradients are there, and of our own program (convention jaxpar):

    parameters    4 bytes of the master copy; ZeRO-1, 2: 2 bytes of the whole copy that a step computes with
    gradients     4 bytes, cut as FSDP cuts parameters; ZeRO-1: whole, ZeRO-2: cut over `data` too. With several
                  microbatches twice: the sums, and one microbatch's own
    optimizer     8 bytes of AdamW's moments, cut alike; ZeRO-1, 2: 12, with the master copy, over `data` too
    activations   what layers keep for their backward pass, by `activations`
    other         what one layer works with, its own and the next layer's whole gradients, the head's whole gradient,
                  gathered weights, copies that the compiler makes of kernels whose last dim is cut, a pipeline's
                  buffers between stages

Under `pipe` a stage gathers its weights once a step, and its gradients are whole in float32 until the step's end.
Held against compiled programs in tests/test_memory.py.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from jaxpar.parallel.axes import PARAMETER_RULES
from jaxpar.parallel.pipeline.schedule import Placement, part_of
from jaxpar.parallel.remat import Remat
from jaxpar.planning.activations import (
    LayerBytes,
    backward_bytes,
    chunk_bytes,
    compiled_working_bytes,
    hidden_parts,
    kept_by_all,
    kept_by_name,
    operand_bytes,
    sizes,
    working_bytes,
)
from jaxpar.planning.conventions import CONVENTIONS, Convention
from jaxpar.planning.job import SELECTIVE, Job, Numbers
from jaxpar.planning.schedules import stashes
from jaxpar.planning.shapes import Share, num_moe_layers, shares
from meshes.spec import Chip

JAXPAR = CONVENTIONS["jaxpar"]
PARTS = ("parameters", "gradients", "optimizer", "activations", "other")
Schedules = tuple[tuple[str, int], ...]
"""Kinds of a pipeline, each with its chunks."""


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Bytes on each device of one stage, or of several cases at once."""

    parameters: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    others: Mapping[str, Numbers]
    """By what it is."""

    @property
    def other(self) -> Numbers:
        return sum(self.others.values(), 0.0)

    @property
    def total(self) -> Numbers:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.other

    def at(self, case: tuple[int, ...], shape: tuple[int, ...]) -> "StageMemory":
        """One case of several, which have this shape."""

        def one(numbers: Numbers) -> float:
            return float(np.broadcast_to(numbers, shape)[case])

        return StageMemory(
            one(self.parameters),
            one(self.gradients),
            one(self.optimizer),
            one(self.activations),
            {name: one(numbers) for name, numbers in self.others.items()},
        )


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
        return bool(self.fullest.total <= self.limit)

    def summary(self) -> dict[str, int]:
        """Of the fullest stage: each part of PARTS, total and limit."""
        parts = {part: round(getattr(self.fullest, part)) for part in PARTS}
        return parts | {"total": sum(parts.values()), "limit": self.limit}


def memory(job: Job, convention: Convention = JAXPAR) -> Memory:
    """Of a job that `Job.check` passes. KeyError for a schedule that cannot run in one program."""
    cases = Cases.of(
        job.model.num_layers,
        job.mesh["pipe"],
        (job.num_microbatches,),
        ((job.pipeline, job.chunks),),
        convention.is_one_program,
    )
    found = Footprint(job, convention, cases).with_remat(job.remat, job.pipeline_residuals)
    return Memory(
        tuple(found.at((0, 0, stage), cases.shape) for stage in range(cases.shape[-1])),
        memory_limit(job.cluster.chip, convention),
    )


def memory_limit(chip: Chip, convention: Convention = JAXPAR) -> int:
    """Bytes of a device that a step may use."""
    return int(chip.memory_bytes * convention.limit)


@dataclass(frozen=True, eq=False)
class Cases:
    """Numbers of microbatches x schedules x stages, all at once; each array has these dims, or 1 in their place."""

    microbatches: Float[np.ndarray, "M 1 1"]
    chunks: Float[np.ndarray, "1 K 1"]
    layers: Float[np.ndarray, "1 K P"]
    has_embedding: Bool[np.ndarray, "1 K P"]
    has_head: Bool[np.ndarray, "1 K P"]
    held: Float[np.ndarray, "M K P"]
    """Microbatches whose activations a stage has at once."""
    slots: Float[np.ndarray, "M K P"]
    """Of a stage's buffers for what its neighbours send."""
    waiting: Float[np.ndarray, "M K P"]
    """Weight gradients of a chunk that wait at most, the one that is made included."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(
        num_layers: int, num_stages: int, microbatches: tuple[int, ...], schedules: Schedules, is_one_program: bool
    ) -> "Cases":
        """With is_one_program all stages have the arrays of the fullest, and are one case."""
        found = [[stashes(kind, num_stages, m, c) for kind, c in schedules] for m in microbatches]
        held = np.array([[each.memory for each in row] for row in found])
        splits = np.array([[(each.waiting.max() > 0) for each in row] for row in found])[..., None]
        waiting = np.array([[each.waiting for each in row] for row in found])
        chunks = np.array([float(c) for _, c in schedules])[None, :, None]
        stages = [_stages(num_layers, num_stages, c, kind in ("zb-v", "dualpipe-v")) for kind, c in schedules]
        layers, has_embedding, has_head = (np.array(each)[None] for each in zip(*stages))
        if is_one_program:
            held, waiting = held.max(-1, keepdims=True), waiting.max(-1, keepdims=True)
            layers = -(-num_layers // (num_stages * chunks)) * chunks
            has_embedding = has_head = np.ones_like(layers, bool)
        # The last part makes a gradient in its forward pass, which then waits for all of the others.
        waits = np.array([kind in ("gpipe", "looped-bfs") for kind, _ in schedules])[None, :, None]
        slots = np.where(waits, 2 * held * chunks, held * chunks + 2) + 2 if num_stages > 1 else np.zeros_like(held)
        waiting = np.where(splits, waiting * chunks + 1, 0.0)
        counts = np.array(microbatches, float)[:, None, None]
        return Cases(counts, chunks, layers, has_embedding, has_head, held, slots, waiting)


@functools.cache
def _stages(
    num_layers: int, num_stages: int, num_chunks: int, is_v: bool
) -> tuple[list[float], list[bool], list[bool]]:
    """Of each stage: its layers, whether it has the embedding, and the head. Where layers do not divide, the last part
    and the first have one fewer, then the next ones from both ends: head and embedding take their place (Llama 3, arXiv
    2407.21783, section 3.3.2)."""
    parts = num_stages * num_chunks
    most = -(-num_layers // parts)
    counts = [most] * parts
    for i in range(most * parts - num_layers):
        counts[i // 2 if i % 2 else -1 - i // 2] -= 1
    placement: Placement = "v" if is_v else "loop"
    chunks = range(num_chunks)
    held = [[part_of(placement, num_stages, stage, c) for c in chunks] for stage in range(num_stages)]
    layers = [float(sum(counts[part] for part in own)) for own in held]
    return layers, [0 in own for own in held], [parts - 1 in own for own in held]


class Footprint:
    """What a job needs in each of several cases, whatever its own are; its remat is left open."""

    def __init__(self, job: Job, convention: Convention, cases: Cases):
        self._job, self._convention, self._cases = job, convention, cases
        # ZeRO-3 cuts nothing over `data`: fewer meshes differ.
        found = shares(job.model, job.mesh if job.zero < 3 else {**job.mesh, "data": 1})
        if not convention.is_one_program:
            # Others cut one flat buffer: no dim is there to be divided.
            ranks = math.prod(job.mesh[axis] for axis in ("fsdp", "expert", "context"))
            found = found.flat(ranks, ranks * job.mesh["data"])
        self._moe_share = num_moe_layers(job.model) / job.model.num_layers
        self._layer = found.layers(1 - self._moe_share, self._moe_share)
        self._of = sizes(job, cases.microbatches)
        self._is_cut: Numbers = (job.zero == 3) * (self._layer.whole > self._layer.kept)
        self._own = self._layer * cases.layers
        if convention.is_one_program:
            cut = 1 if "pipe" in PARAMETER_RULES["vocab"] else job.mesh["pipe"]
            self._embedding, self._head = found.embedding * (1 / cut), found.head * (1 / cut)
        else:
            self._embedding, self._head = found.embedding * cases.has_embedding, found.head * cases.has_head
        self._operands: Numbers = 0.0
        """Of a chunk's weight gradients that wait, one microbatch."""
        self._fixed = self._compiled() if convention.is_one_program else self._framework()

    def with_remat(self, text: str, residuals: bool = False) -> StageMemory:
        """residuals: whether a pipeline's stage keeps them, where it can be asked not to. Raises ValueError for what is
        no kind of remat."""
        job, convention, layers = self._job, self._convention, self._cases.layers
        names = convention.selective if text == SELECTIVE else None
        remat = Remat(saves=names) if names else job.replace(remat=text).remat_policy
        per_pass = layers / self._cases.chunks if convention.is_one_program else layers
        kept, again = self._kept(remat, per_pass, text)
        if not convention.is_one_program:
            working = working_bytes(job, self._of) * (0.5 if remat.keeps_all else 1.0)  # half of it is kept already
            return self._sum(self._cases.held * kept, {"working": working + again})
        others: dict[str, Numbers] = {}
        if remat.keeps_all and job.zero == 3 and job.mesh["pipe"] == 1 and job.reshard_after_forward:
            others["gathered weights"] = job.compute_bytes * self._own.kept
        if remat.every > 1 and job.zero == 3:
            rest = layers % remat.every
            others["compiler's copies"] = np.where(rest > 0, 4 * self._layer.kept * (layers - rest), 0.0)
        if residuals:
            # One more than are held at once: a chunk's before they are put to the others; and one that an input's
            # gradient is made of, beside what it leaves for the weights'.
            splits = self._cases.waiting > 0
            kept = kept * (self._cases.held * self._cases.chunks + 1 + splits)
            others["waiting weight gradients"] = splits * self._operands
        return self._sum(kept + again, others)

    def _sum(self, activations: Numbers, others: Mapping[str, Numbers]) -> StageMemory:
        fixed = self._fixed
        merged = {name: fixed.others.get(name, 0.0) + others.get(name, 0.0) for name in {**fixed.others, **others}}
        return StageMemory(fixed.parameters, fixed.gradients, fixed.optimizer, activations, merged)

    def _kept(self, remat: Remat, num_layers: Numbers, text: str) -> tuple[Numbers, Numbers]:
        """By a microbatch's forward pass through so many layers; and by its backward pass, for the group that is made
        again."""
        job, convention = self._job, self._convention
        kept = "fused" if text == SELECTIVE and convention.kept == "scores" else convention.kept
        if remat.keeps_all or remat.every > 1:
            of_all = self._mixed(kept_by_all(job, self._of, kept, convention.remakes_elementwise))
            if remat.keeps_all:
                return num_layers * of_all, 0.0
            every = np.maximum(1, np.round(np.sqrt(num_layers))) if text == "sqrt" else remat.every  # of each chunk
            size = np.clip(num_layers, 1, every)
            return num_layers // size * job.compute_bytes * self._of.stream, size * of_all
        return num_layers * self._mixed(kept_by_name(job, self._of, remat, kept)), 0.0

    def _mixed(self, layer: LayerBytes) -> Numbers:
        return layer.dense * (1 - self._moe_share) + layer.moe * self._moe_share if self._moe_share else layer.dense

    def _state(self, share: Share) -> tuple[Numbers, Numbers, Numbers]:
        """Parameters, gradients, optimizer."""
        zero, convention = self._job.zero, self._convention
        each = convention.parameters, convention.gradients, convention.optimizer
        if zero < 3 and convention.zero is not None:
            each = convention.zero
        optimizer = {0: share.whole, 1: share.state, 2: share.state}.get(zero, share.kept)
        gradients = {0: share.whole, 1: share.whole, 2: share.state}.get(zero, share.kept)
        return each[0] * (share.kept if zero == 3 else share.whole), each[1] * gradients, each[2] * optimizer

    def _framework(self) -> StageMemory:
        job, convention, of = self._job, self._convention, self._of
        parameters, gradients, optimizer = self._state(self._own + self._embedding + self._head)
        others: dict[str, Numbers] = {
            "reserved": float(convention.reserved),
            "logits": convention.logit_bytes
            * of.tokens
            * job.model.vocab_size
            / job.mesh["tensor"]
            * self._cases.has_head,
        }
        if convention.gathers_kernels:
            # Two, one of them ahead of time, and one's whole gradient.
            kernel = job.model.embed_dim * job.model.mlp_dim / job.mesh["tensor"]
            others["gathered weights"] = self._is_cut * 3 * job.compute_bytes * kernel
        else:
            # A whole stage's weights, or two layers', one of them ahead of time; and a layer's whole gradient.
            layers = 2 * self._layer.whole if job.reshard_after_forward else self._own.whole
            weights = job.compute_bytes * (layers + self._embedding.whole + self._head.whole)
            others["gathered weights"] = self._is_cut * (weights + convention.gradients * self._layer.whole)
        if job.mesh["pipe"] > 1:
            others["between stages"] = 2 * job.compute_bytes * of.stream
        return StageMemory(parameters, gradients, optimizer, 0.0, others)

    def _compiled(self) -> StageMemory:
        job, short, of, cases = self._job, self._job.compute_bytes, self._of, self._cases
        own, embedding, head, tied = self._own, self._embedding, self._head, job.model.tie_embeddings
        last = embedding if tied else head
        parameters, sums, optimizer = self._state(own + embedding + head)
        if job.mesh["pipe"] > 1:
            return self._of_stage(parameters, optimizer)
        several, layer = cases.microbatches > 1, self._layer.whole
        per_layer = {1: short * own.whole, 2: 4 * own.state}.get(job.zero, 4 * own.kept)
        gradients = per_layer + np.where(several, sums, self._state(embedding)[1])
        of_head = 4 * last.whole * (2 if tied else 1) + (4 * embedding.whole if job.zero == 2 else 0.0)
        # A layer's gradient is reduced beside the backward pass of the layer before it.
        reduced = (1 if job.zero == 2 else self._is_cut) * 4 * layer
        copies = 4 * own.transposed if job.zero == 3 else 0.0
        others: dict[str, Numbers] = {"compiler's copies": copies}
        if not job.reshard_after_forward:
            others["gathered weights"] = self._is_cut * short * own.whole
        # The loss, with the gathered head and a chunk of logits, is there in place of a layer's backward pass.
        if job.cluster.torus:
            # TPUs' compiler reduces the head's gradient before the layers', and a part's of a hidden layer before the
            # next's is made.
            parts, model = hidden_parts(job), job.model
            mlp = (3 if model.mlp == "swiglu" else 2) * model.embed_dim * model.mlp_dim / job.mesh["tensor"]
            reduced = reduced - self._is_cut * 4 * mlp * (1 - 1 / parts)
            working = compiled_working_bytes(job, replace(of, mlp=of.mlp / parts))
            loss = of_head + short * last.whole + chunk_bytes(job, of) - per_layer - copies
        else:
            # Beside it are the stream with its norm and gradient, and the last layer's weights on their way.
            working = backward_bytes(job, of, layer)
            loss = short * (last.whole + layer + 3 * of.stream) + chunk_bytes(job, of)
            others["head"] = of_head
        others |= {"a layer's gradient": reduced, "working": working}
        others["loss"] = np.maximum(0.0, loss - working - reduced)
        return StageMemory(parameters, gradients, optimizer, 0.0, others)

    def _of_stage(self, parameters: Numbers, optimizer: Numbers) -> StageMemory:
        """Under `pipe`: weights gathered for the whole step, those of both ends on every stage, and as much in float32
        of their gradients; one chunk's own gradients beside them."""
        job, short, of, cases = self._job, self._job.compute_bytes, self._of, self._cases
        ends = (self._embedding.whole + self._head.whole) * (job.mesh["pipe"] if self._convention.is_one_program else 1)
        whole, part = self._own.whole + ends, self._own.whole / cases.chunks
        self._operands = self._mixed(operand_bytes(job, of)) * (cases.layers / cases.chunks)
        others = {
            "working": compiled_working_bytes(job, of),
            "between stages": cases.slots * short * of.stream,
            "waiting weight gradients": cases.waiting * self._operands,
            "gathered weights": short * ((whole if job.zero == 3 else ends) + np.where(cases.chunks > 1, part, 0.0)),
        }
        return StageMemory(parameters, 4 * whole + short * part, optimizer, 0.0, others)
