"""Utilization, hours and energy of published runs, each by its source's own convention."""

from jaxpar.planning import budget
from jaxpar.planning.flop_conventions import (
    CONVENTIONS,
    gpt_flops_per_token,
    gpt_parameters,
    utilization,
    with_attention,
)
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule
from models.published import shape as published

_T = 1e12
# Pythia (arXiv 2304.01373), table 5: parameters in billions to A100 hours.
_PYTHIA_HOURS = {0.07: 510, 0.16: 1030, 0.41: 2540, 1.0: 4830, 1.4: 7120, 2.8: 14240, 6.9: 33500, 12.0: 72300}


@rule("mfu_llmfoundry", tokens_per_second="tokens_per_s")
def llm_foundry(
    params: int,
    layers: int,
    hidden: int,
    seq: int,
    devices: int,
    tokens_per_second: float,
    peak: float,
    act_ckpt: bool = False,
) -> Quantities:
    flops = with_attention(params, layers, hidden, seq, causal=False)
    mfu = 100 * utilization(flops, tokens_per_second, devices, peak)
    return {
        "mfu": mfu,
        "hfu": mfu * 4 / 3 if act_ckpt else mfu,
        "model_tflops_per_gpu": flops * tokens_per_second / devices / _T,
    }


@rule("mfu_nvidia_bridge", tokens_per_second="tokens_per_s_per_gpu")
def nvidia_bridge(model: str, seq: int, tokens_per_second: float) -> Quantities:
    tera = CONVENTIONS["nvidia-bridge"].flops_per_token(published(model), seq) * tokens_per_second / _T
    return {VALUE: tera, "model_tflops_per_gpu": tera}


@rule("mfu_published", step_seconds="iter_s")
def korthikanti(
    step_seconds: float,
    devices: int,
    peak: float,
    batch: int,
    layers: int,
    hidden: int,
    seq: int,
    vocab: int,
    config: str = "",
) -> Quantities:
    per_second = batch * seq / step_seconds
    model, hardware = (
        utilization(gpt_flops_per_token(layers, hidden, vocab, seq, again), per_second, devices, peak)
        for again in ("none", "selective")
    )
    return {"mfu": model, "hfu": hardware, "mfu_pct": 100 * model, "hfu_pct": 100 * hardware}


@rule("mfu_published", before="full_recompute_s", after="present_s")
def throughput_gain(before: float, after: float) -> Quantities:
    return {VALUE: 100 * (before / after - 1)}


@rule("mfu_published", tokens_per_second="tokens_s", params="params")
def palm(
    tokens_per_second: float,
    params: float,
    devices: int,
    peak: float,
    layers: int = 0,
    heads: int = 0,
    head_dim: int = 0,
    seq: int = 0,
) -> Quantities:
    """Without attention's products where the layers are not given."""
    flops = with_attention(params, layers, heads * head_dim, seq, causal=False)
    mfu = 100 * utilization(flops, tokens_per_second, devices, peak)
    return {VALUE: mfu, "mfu": mfu, "mfu_pct": mfu}


@rule("mfu_published", element_bytes="bytes")
def gradients_per_host(params: float, hosts_per_pod: int, element_bytes: float) -> Quantities:
    """GiB."""
    return {VALUE: params * element_bytes / hosts_per_pod / 2**30}


@rule("mfu_published", "megatron2021", "published_runs")
def share_of_peak(tflops: float, peak: float) -> Quantities:
    return {VALUE: 100 * tflops / peak, "mfu": 100 * tflops / peak, "mfu_pct": 100 * tflops / peak}


@rule("mfu_published", per_device="tflop_per_device")
def step(per_device: float, step_s: float, peak: float, tokens: float) -> Quantities:
    rate = per_device / step_s
    return {"tflops": rate, "mfu": 100 * rate / peak, "tok_s": tokens / step_s}


@rule("mfu_published", stages="pp", microbatches="m")
def one_f_one_b(stages: int, microbatches: int) -> Quantities:
    return {"f1b_util": microbatches / (microbatches + stages - 1)}


@rule("megatron2021", devices="n", data="d", batch="b_prime")
def bubble(devices: int, data: int, batch: float) -> Quantities:
    """Narayanan et al. (arXiv 2104.04473), section 3.3.1: pipeline stages n/d, of t = 1, and b'/d microbatches."""
    found = (devices - data) / batch
    return {"bubble": found, VALUE: found}


@rule("megatron2021", batch="B")
def megatron_flops(batch: int, seq: int, layers: int, hidden: int, vocab: int) -> Quantities:
    per_token = gpt_flops_per_token(layers, hidden, vocab, seq, "full")
    return {VALUE: batch * seq * per_token, "flops": batch * seq * per_token}


@rule("megatron2021")
def megatron_parameters(layers: int, hidden: int, vocab: int, seq: int) -> Quantities:
    found = gpt_parameters(layers, hidden, vocab, seq)
    return {VALUE: found, "params": found}


@rule("megatron2021", tokens="T", params="P", devices="n", rate="X")
def training_days(tokens: float, params: float, devices: int, rate: float) -> Quantities:
    seconds = budget.training_seconds(budget.training_flops(params, tokens, 8), devices, rate)
    return {VALUE: seconds / budget.DAY, "days": seconds / budget.DAY}


@rule("megatron2021", stages="pp", tera="tflops_per_gpu", peak="peak")
def weak_scaling(
    hidden: int, layers: int, tp: int, stages: int, devices: int, tera: float, seq: int, vocab: int, peak: float
) -> Quantities:
    """Table 1; parameters by the formula."""
    return {
        "params_B": gpt_parameters(layers, hidden, vocab, seq) / 1e9,
        "dp": devices // (tp * stages),
        "pct_peak": 100 * tera / peak,
        "total_PF": tera * devices / 1000,
    }


@rule("megatron2021", tera="tflops", billions="params_B")
def days_at_rate(billions: float, devices: int, tera: float, tokens: float) -> Quantities:
    seconds = budget.training_seconds(budget.training_flops(billions * 1e9, tokens, 8), devices, tera * _T)
    return {VALUE: seconds / budget.DAY, "days": seconds / budget.DAY}


@rule("published_runs")
def pythia(params: float, tokens: float, devices: int, peak: float) -> Quantities:
    """gpu_hours is the published figure of the size that is nearest; it was measured."""
    nearest = min(_PYTHIA_HOURS, key=lambda size: abs(size * 1e9 / params - 1))
    if abs(nearest * 1e9 / params - 1) > 0.1:
        raise ValueError(f"{params:.3g} parameters are not a size of Pythia's")
    hours = _PYTHIA_HOURS[nearest]
    return {"gpu_hours": hours, "implied_mfu": budget.implied_mfu(params, tokens, hours, peak)}


@rule("published_runs", step_seconds="step_s")
def hardware_flops(
    layers: int, hidden: int, vocab: int, seq: int, batch: int, devices: int, step_seconds: float
) -> Quantities:
    flops = batch * seq * gpt_flops_per_token(layers, hidden, vocab, seq, "full")
    return {"hw_tflops_per_gpu": flops / step_seconds / devices / _T}


@rule("published_runs", step_seconds="step_s")
def tokens_per_second(batch: float, seq: float, step_seconds: float) -> Quantities:
    return {VALUE: batch * seq / step_seconds, "tokens_s": batch * seq / step_seconds}


@rule("published_runs", "training_cost", "scaling_book", "mfu_published", "seed")
def from_hours(params: float, tokens: float, hours: float, peak: float) -> Quantities:
    found = budget.implied_mfu(params, tokens, hours, peak)
    return {VALUE: found, "implied_mfu": found, "mfu": found, "flops": budget.training_flops(params, tokens)}


@rule("published_runs", "training_cost")
def from_days(devices: int, days: float, params: float, tokens: float, peak: float) -> Quantities:
    hours = devices * days * 24
    found = budget.implied_mfu(params, tokens, hours, peak)
    return {"gpu_hours": hours, "implied_mfu": found, VALUE: found}


@rule("published_runs", step_seconds="step_s")
def from_steps(steps: float, step_seconds: float, devices: int, params: float, tokens: float) -> Quantities:
    """Hardware FLOPs with the forward pass computed again."""
    days = steps * step_seconds / budget.DAY
    return {"days": days, "gpu_hours": days * 24 * devices, "hw_flops": budget.training_flops(params, tokens, 8)}


@rule("published_runs", "training_cost")
def energy(devices: float, days: float, watts: float, pue: float = 1.0) -> Quantities:
    found = budget.energy_mwh(devices, days, watts, pue)
    return {VALUE: found, "MWh": found}


@rule("published_runs", "training_cost")
def energy_of_hours(hours: float, watts: float, pue: float = 1.0) -> Quantities:
    found = budget.energy_mwh(1, hours / 24, watts, pue)
    return {VALUE: found, "MWh": found}


@rule("published_runs", "training_cost", energy="MWh", intensity="kg_per_kWh")
def carbon(energy: float, intensity: float) -> Quantities:
    """Tonnes of CO2."""
    return {VALUE: energy * intensity, "tCO2": energy * intensity, "tCO2e": energy * intensity}


@rule("published_runs", "training_cost", tokens_per_second="tokens_s")
def from_rate_of_all(params: float, tokens_per_second: float, devices: int, peak: float) -> Quantities:
    found = utilization(with_attention(params, 0, 0, 0, causal=False), tokens_per_second, devices, peak)
    return {VALUE: found, "mfu": found, "implied_mfu": found}


@rule("mfu_published", "published_runs", "llama3")
def of_model(model: str, rate: float, seq: int, peak: float) -> Quantities:
    """Percent, by torchtitan's convention; rate is one device's."""
    flops = CONVENTIONS["torchtitan"].flops_per_token(published(model), seq)
    return {VALUE: 100 * flops * rate / peak, "mfu": 100 * flops * rate / peak, "tflops": flops * rate / _T}


@rule("megatron2021", stages="p", microbatches="m", chunks="v")
def pipeline_bubble(stages: int, microbatches: int, chunks: int = 1) -> Quantities:
    """Section 2.2: of the ideal time."""
    found = (stages - 1) / (microbatches * chunks)
    return {VALUE: found, "bubble": found, "bubble_of_ideal": found}
