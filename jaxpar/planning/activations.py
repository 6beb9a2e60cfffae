"""Bytes of activations: what a layer keeps for its backward pass, what it works with, and what the loss takes.

Per token of a rank, D wide streams cut over `tensor` under sequence parallelism (D / t), heads and MLP always:

    norms             2 x (4 D + 2 D) of the cut stream: the norm's input in float32, its output
    entries           2 x 2 D, gathered over `tensor`
    attention         2 (2 H + 2 G) K / t: q, k, v and the output; a float per query head
    MLP               six tensors of 2 F / t
    qk_norm           6 (H + G) K / t more

That is our own program with remat none, as its backward pass takes it (see the compiled one). Other frameworks write
kernels that keep less, see `Kept`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxpar.kernels.attention import RESULT
from jaxpar.parallel.parameter import num_parts
from jaxpar.parallel.remat import INPUT, Remat
from jaxpar.parallel.vocab import CHUNK_BYTES
from jaxpar.planning.job import Job, Numbers

Kept = Literal["compiled", "fused", "scores"]
"""What remat none keeps: compiled, as our own program; fused, as kernels written by hand (no copies in float32, norms'
outputs and inputs once); scores: fused, and attention's scores and softmax too, as before flash attention."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """Elements of one microbatch's tensors on one device."""

    tokens: Numbers
    """Of a rank's part of batch and sequence."""
    stream: Numbers
    """The residual stream, cut over `tensor` under sequence parallelism."""
    entry: Numbers
    """The stream as column-parallel products take it: whole over `tensor`."""
    query: Numbers
    key: Numbers
    """K or V alone."""
    keys_seen: Numbers
    """K or V as attention takes it: of the whole sequence where `context` gathers it."""
    queries_seen: Numbers
    scores: Numbers
    """Queries x keys of all heads."""
    floats: Numbers
    """One for each query and head."""
    mlp: Numbers
    """A layer's hidden activation, dense MLP."""
    routed: Numbers
    """The same of experts, shared ones among them."""
    exchanged: Numbers
    """Tokens on their way to experts, D wide."""
    room: Numbers
    """As `routed`, of all that may arrive at a rank's experts, for which our own program's buffers have room."""


def sizes(job: Job, num_microbatches: Numbers) -> Sizes:
    """Of the job cut into so many microbatches."""
    model, tensor, context = job.model, job.mesh["tensor"], job.mesh["context"]
    tokens = job.batch_size * job.seq_len / (num_microbatches * job.batch_ranks * context)
    heads = model.num_heads / tensor
    kv_heads = np.maximum(1.0, model.num_kv_heads / tensor)
    key = tokens * kv_heads * model.head_dim
    routed = tokens * (model.num_experts_per_token + model.num_shared_experts) * model.expert_mlp_dim / tensor
    stream = tokens * model.embed_dim / (tensor if job.sequence_parallel else 1)
    if job.capacity_factor is not None:
        room = tokens * model.num_experts_per_token * job.capacity_factor
    else:
        # A token's experts differ (expert.arrivals).
        room = tokens * np.minimum(job.mesh["expert"] * model.num_experts_per_token, model.num_experts)
    return Sizes(
        tokens=tokens,
        stream=stream,
        entry=tokens * model.embed_dim,
        query=tokens * heads * model.head_dim,
        key=key,
        keys_seen=key * (context if job.context.kind == "allgather" else 1),
        queries_seen=tokens * heads * model.head_dim,
        scores=tokens * heads * job.seq_len,
        floats=tokens * heads,
        mlp=tokens * model.mlp_dim / tensor,
        routed=routed,
        exchanged=stream * model.num_experts_per_token,
        room=room * model.expert_mlp_dim / tensor,
    )


@dataclass(frozen=True, eq=False)
class LayerBytes:
    """Of one layer and microbatch, kept for the backward pass, its input included."""

    dense: Numbers
    moe: Numbers


def kept_by_all(job: Job, of: Sizes, kept: Kept, remakes_elementwise: bool = False) -> LayerBytes:
    """With remat none; see conventions.Convention."""
    short = job.compute_bytes
    attention = short * (2 * of.queries_seen + 2 * of.keys_seen) + 4 * of.floats
    wide = max(short, 4)
    if kept == "compiled":
        streams = 2 * ((wide + short) * of.stream + short * of.entry)
        if job.model.qk_norm:
            attention += (wide + short) * (of.query + of.key)
        mlp_tensors, input_bytes = 6.0 * short, short
    else:
        # Products whose operands are 8-bit floats keep those: their inputs, of one byte.
        input_bytes = 1 if job.precision in ("float8", "float4") else short
        outputs = 0 if remakes_elementwise else input_bytes
        streams = 2 * (short + outputs) * of.stream
        attention += input_bytes * of.query if input_bytes < short else 0
        mlp_tensors = outputs + (2 if job.model.mlp == "swiglu" else 1) * short
    if kept == "scores":
        attention += 5 * of.scores
    mlp = mlp_tensors * of.mlp
    moe = mlp_tensors * of.routed + (input_bytes + short) * of.exchanged
    return LayerBytes(streams + attention + mlp, streams + attention + moe)


def kept_by_name(job: Job, of: Sizes, remat: Remat, kept: Kept) -> LayerBytes:
    """The layer's input, and the tensors that a policy names."""
    short = job.compute_bytes
    own = {
        "query": of.query, "key": of.key, "value": of.key, "attention_out": of.stream,
        INPUT: 0.0,  # kept as it is
        "mlp_out": 0.0 if kept == "compiled" else of.stream,  # nothing needs it again
    }  # fmt: skip
    mlp = {"mlp_gate", "mlp_up"} if job.model.mlp == "swiglu" else {"mlp_up"}
    block = 0.0 if remat.offload else short * of.stream
    common = block + short * sum(own[name] for name in remat.saves if name in own)
    if RESULT in remat.saves:
        common += short * of.queries_seen + 4 * of.floats
    times = short * sum(name in mlp for name in remat.saves)
    return LayerBytes(common + times * of.mlp, common + times * of.routed)


def working_bytes(job: Job, of: Sizes) -> Numbers:
    """What a layer's backward pass works with at its worst, beside what was kept for it: about seven hidden
    activations of the MLP and seven streams, in compute dtype (measured on compiled programs)."""
    hidden = np.maximum(of.mlp, of.routed + of.exchanged) if job.model.num_experts else of.mlp
    return 7 * job.compute_bytes * (hidden + of.entry) + 4 * (of.keys_seen - of.key)


def compiled_working_bytes(job: Job, of: Sizes) -> Numbers:
    """Likewise of our own program, whose experts work in buffers with room for all that may arrive; and TPUs' grouped
    products give float32: three at once, beside six of what is made of them."""
    if not job.model.num_experts:
        return working_bytes(job, of)
    short = job.compute_bytes
    hidden = np.maximum(7 * short * of.mlp, _experts_bytes(job, of))
    return hidden + 7 * short * of.entry + 4 * (of.keys_seen - of.key)


def _experts_bytes(job: Job, of: Sizes) -> Numbers:
    """Of experts' hidden activations in the backward pass of our own program."""
    short = job.compute_bytes
    return (3 * 4 + 6 * short if job.cluster.torus else 7 * short) * of.room


def hidden_parts(job: Job) -> Numbers:
    """Into how many parts TPUs compute a hidden layer, one after the other (see Layout.hidden_parts)."""
    is_whole = not job.cluster.torus or job.model.num_experts or job.zero < 3 or job.precision == "float8"
    if is_whole or job.mesh["pipe"] > 1:
        return 1.0
    return np.vectorize(num_parts, otypes=[float])(job.model.mlp_dim // job.mesh["tensor"])


def operand_bytes(job: Job, of: Sizes) -> LayerBytes:
    """Of a layer's products with weights: both operands of each weight's gradient, until it is computed."""
    inputs = 2 if job.model.mlp == "swiglu" else 1
    attention = 4 * of.entry + 2 * of.query + 2 * of.key
    mlp = (inputs + 1) * (of.entry + of.mlp)
    routed = (inputs + 1) * (of.exchanged + of.routed)
    return LayerBytes(job.compute_bytes * (attention + mlp), job.compute_bytes * (attention + routed))


def backward_bytes(job: Job, of: Sizes, layer: Numbers) -> Numbers:
    """What the backward pass of a layer of so many parameters (`layer`, whole, as they are gathered) has at once beside
    what was kept for it and what becomes of the layer's after it; the fuller of two times in a loop over layers.

    In its MLP: the gathered weights; four hidden activations (the two that the product is of, the product, its
    gradient); four entries (the MLP's input and gradient, gathered over `tensor`, and one's parts of both inputs'
    gradients), four streams. At its end: its own whole gradient, in float32, which is reduced when all of it is there;
    five entries, four streams. Between both, in attention, is less, cuDNN's own float32 sums of the queries' gradient
    included. A ring's sums, in float32, and a round's beside them, are made (as zeros) ahead of all that.
    """
    short = job.compute_bytes
    hidden = 4 * short * of.mlp
    if job.model.num_experts:
        hidden = np.maximum(hidden, _experts_bytes(job, of))
    in_mlp = hidden + short * (layer + 4 * (of.entry + of.stream))
    at_end = 4 * layer + short * (5 * of.entry + 4 * of.stream)
    is_ring = (job.context.kind == "exchange") * (job.context.group < job.mesh["context"])
    sums = is_ring * (2 * of.query + 4 * of.key)
    return np.maximum(in_mlp, at_end) + 4 * (sums + of.keys_seen - of.key)


def chunk_bytes(job: Job, of: Sizes) -> Numbers:
    """One chunk of logits in float32 (see vocab.CHUNK_BYTES), and its gradient, which TPUs keep in float32 too."""
    columns = job.model.vocab_size / job.mesh["tensor"]
    logits = np.minimum(of.tokens * columns, np.maximum(CHUNK_BYTES, job.model.embed_dim * columns) / 4)
    return (4 + (4 if job.cluster.torus else job.compute_bytes)) * logits
