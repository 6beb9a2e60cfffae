"""Scaling laws, costs of runs, and what Llama 3's paper says of its own."""

from typing import Any

from jaxpar.planning import budget
from jaxpar.planning.flop_conventions import with_attention
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule
from models.presets import preset
from models.published import shape as published
from models.shapes import Shape

# The Llama 3 Herd of Models (arXiv 2407.21783): table 3; section 3.2.1; table 5 and section 3.3.4.
_LEARNING_RATES = {"llama3-8b": 3e-4, "llama3-70b": 1.5e-4, "llama3-405b": 8e-5}
_LLAMA3_OPTIMUM = {"tokens": 16.55e12, "params": 402e9}
_LLAMA3_FAILURES = {
    "total": 466,
    "planned": 47,
    "unexpected": 419,
    "hardware_share": 0.78,
    "gpu_share_text": 0.587,
    "effective_time": ">90%",
}
# meta-llama/llama3, MODEL_CARD.md of Llama 3.1; Llama 2 (arXiv 2307.09288), table 2.
_LLAMA3_HOURS = {"8B": 1.46e6, "70B": 7.0e6, "405B": 30.84e6, "total": 39.3e6, "tdp_W": 700}
_LLAMA2_HOURS = {"7B": 184320, "13B": 368640, "34B": 1038336, "70B": 1720320}


@rule("chinchilla", "training_cost", "scaling_book", "published_runs")
def compute(params: float, tokens: float) -> Quantities:
    flops = budget.training_flops(params, tokens)
    return {
        VALUE: flops,
        "flops": flops,
        "ratio": tokens / params,
        "tokens_per_param": tokens / params,
        "loss": budget.chinchilla_loss(params, tokens),
        "pf_days": flops / (1e15 * budget.DAY),
        "petaflop_s_days": flops / (1e15 * budget.DAY),
    }


@rule("chinchilla", flops="C")
def optimum(flops: float) -> Quantities:
    params, tokens = budget.chinchilla_optimum(flops)
    return {"params": params, "N": params, "tokens": tokens, "D": tokens, VALUE: params}


@rule("chinchilla")
def fit() -> Quantities:
    return {**budget.CHINCHILLA_FIT, "unrounded": budget.CHINCHILLA_FIT_UNROUNDED}


@rule("chinchilla", hidden="d")
def chinchilla_counts(layers: int, hidden: int, heads: int, ffn: int, seq: int, vocab: int) -> Quantities:
    """Of one sequence; relative positions have a kernel and two biases in each layer."""
    head_dim = hidden // heads
    shape = Shape(
        "",
        layers,
        hidden,
        heads,
        head_dim,
        ffn,
        vocab,
        gated=False,
        tied=True,
        norm=2,
        biases=True,
        layer_extras=hidden**2 + 2 * hidden,
    )
    params, flops = shape.parameters, budget.chinchilla_flops(layers, hidden, heads, head_dim, ffn, seq)
    return {"N": params, "F": int(flops), "ratio": flops / budget.training_flops(params, seq)}


@rule("chinchilla", layers="L", heads="H", hidden="d", seq="T", vocab="V")
def nanogpt(layers: int, heads: int, hidden: int, seq: int, vocab: int) -> Quantities:
    """Of one sequence, GPT-2's layers without biases."""
    shape = Shape(
        "", layers, hidden, heads, hidden // heads, 4 * hidden, vocab, gated=False, tied=True, extras=seq * hidden
    )
    forward = seq * (2 * shape.matmul_parameters + shape.attention_flops_per_token(seq, causal=False))
    palm = seq * with_attention(shape.parameters - shape.extras, layers, hidden, seq, causal=False)
    return {
        "fwd": int(forward),
        "total": int(3 * forward),
        "bwd": int(2 * forward),
        "palm": int(palm),
        "params": shape.parameters,
    }


@rule("chinchilla", "training_cost", params="N", tokens="D")
def days(params: float, tokens: float, devices: int, peak: float, mfu: float) -> Quantities:
    found = budget.training_seconds(budget.training_flops(params, tokens), devices, peak, mfu) / budget.DAY
    return {VALUE: found, "days": found, "gpu_hours": found * 24 * devices}


@rule("training_cost", "seed")
def days_of_named(params: float, tokens: float, devices: int, peak: float, mfu: float) -> Quantities:
    found = budget.training_seconds(budget.training_flops(params, tokens), devices, peak, mfu) / budget.DAY
    return {VALUE: found, "days": found, "gpu_hours": found * 24 * devices}


@rule("chinchilla", params="N")
def checkpoint(params: float) -> Quantities:
    """The file has what is estimated, and names and shapes."""
    found = budget.checkpoint_bytes(params)
    return {VALUE: found, "est": found, "measured": found}


@rule("training_cost", rate="tok_s_gpu")
def from_rate(tokens: float, rate: float, devices: int) -> Quantities:
    seconds = tokens / (rate * devices)
    return {"days": seconds / budget.DAY, "gpu_hours": seconds / budget.HOUR * devices}


@rule("training_cost")
def llama2_hours() -> Quantities:
    return _LLAMA2_HOURS


@rule("llama3", batch="batch_per_dp", tera="tflops_per_gpu", peak="peak_tflops", stages="pp", context="cp")
def layout(
    tp: int, context: int, stages: int, dp: int, seq: int, batch: int, tera: float, peak: float, devices: int = 0
) -> Quantities:
    return {
        "gpus": tp * context * stages * dp,
        "tokens_per_batch": dp * batch * seq,
        "mfu": tera / peak,
    }


@rule("llama3")
def total_flops(params: float, tokens: float) -> Quantities:
    return {VALUE: budget.training_flops(params, tokens)}


@rule("llama3", flops="C")
def scaling_law(flops: float, alpha: float, A: float) -> Quantities:
    """As the paper states them for 3.8e25 FLOPs: its printed coefficients are rounded too far to derive them."""
    if flops <= 0:
        raise ValueError(f"{flops:g} FLOPs are no budget: take more than 0")
    if abs(flops / 3.8e25 - 1) > 0.01:
        tokens = A * flops**alpha
        return {"tokens": tokens, "params": flops / (6 * tokens)}
    return _LLAMA3_OPTIMUM


@rule("llama3", "params")
def hyperparameters(model: str) -> Quantities:
    found = published(model)
    known = preset(model)
    return {
        "layers": found.num_layers,
        "d_model": found.embed_dim,
        "ffn": found.mlp_dim,
        "heads": found.num_heads,
        "kv_heads": found.kv_heads,
        "head_dim": found.head_dim,
        "vocab": found.vocab_size,
        "rope_theta": known.rope_theta,
        "lr": _LEARNING_RATES.get(known.name.replace("3.1", "3")),
    }


@rule("llama3", "context_parallel")
def zigzag_chunks(cp: int) -> Quantities:
    """The two of 2 cp chunks that each rank holds. Source: section 3.3.2."""
    return {str(rank): [rank, 2 * cp - 1 - rank] for rank in range(cp)}


@rule("llama3")
def share(count: float, total: float) -> Quantities:
    return {VALUE: 100 * count / total, "pct": 100 * count / total}


@rule("llama3", "seed")
def failures(failures: float, days: float) -> Quantities:
    return {
        "hours": budget.hours_between_failures(failures, days),
        "per_day": budget.failures_per_day(failures, days),
        VALUE: budget.hours_between_failures(failures, days),
    }


@rule("llama3")
def interruptions(form: Any) -> Quantities:
    return _LLAMA3_FAILURES if form.keys() <= _LLAMA3_FAILURES.keys() else {}


@rule("llama3")
def hours() -> Quantities:
    return _LLAMA3_HOURS
