"""Pipelines: bubbles and memory of the schedules, by running them."""

from collections.abc import Sequence

from jaxpar.parallel.pipeline.auto import auto
from jaxpar.parallel.pipeline.kinds import make
from jaxpar.parallel.pipeline.schedule import Schedule
from jaxpar.parallel.pipeline.simulate import Report, Times, simulate
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule

_KINDS = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "f1b": "1f1b",
    "1f1b-i": "interleaved-1f1b",
    "interleaved": "interleaved-1f1b",
    "zb-h1": "zb-h1",
    "zb-1p": "zb-h1",  # with 1F1B's memory the search finds nothing better
    "zb1p": "zb-h1",
    "zb-h2": "zb-h2",
    "zb-v": "zb-v",
    "zbv": "zb-v",
}
# TeraPipe (arXiv 2102.07988), table 1: layers and width.
_TERAPIPE = {"1b": (24, 2048), "13b": (40, 5120), "44b": (96, 6144), "175b": (96, 12288)}


@rule("pipeline", "seed", stages="stages", microbatches="microbatches", forward="tf", backward="tb")
def one_f_one_b(stages: int, microbatches: int, forward: float = 1, backward: float = 2, chunks: int = 1) -> Quantities:
    """backward is the whole backward pass."""
    kind = "1f1b" if chunks == 1 else "interleaved-1f1b"
    table = make(kind, stages, microbatches, chunks)
    report = simulate(table, Times(forward, backward / 2, backward / 2))
    return {
        VALUE: report.utilisation,
        "max_mfu": report.utilisation,
        "pct": 100 * report.utilisation,
        "utilisation": report.utilisation,
        "bubble_of_total": report.bubble_of_total,
        "bubble_of_ideal": report.bubble_of_ideal,
        "makespan": report.makespan,
    }


@rule("pipeline", stages="p", microbatches="m", forward="TF", backward="TB", weight="TW", hop="Tcomm", chunks="v")
def scheduled(
    schedule: str,
    stages: int,
    microbatches: int,
    forward: float,
    backward: float,
    weight: float,
    hop: float = 0.0,
    chunks: int | None = None,
    mem_limit: str | float | None = None,
) -> Quantities:
    """Zero Bubble's bubble, and its rate where a bare number is asked for."""
    times = Times(forward, backward, weight, hop)
    report = simulate(_table(schedule, stages, microbatches, chunks, mem_limit, times), times)
    return {
        VALUE: report.bubble_longest_stage,
        "bubble_rate": report.bubble_longest_stage,
        "bubble": report.cost - microbatches * (forward + backward + weight),
        "cost": report.cost,
        "makespan": report.makespan,
        "peak_mem": max(report.peak_activations),
        "peak_mem_MB": max(report.peak_activations),
    }


def _table(
    name: str, stages: int, microbatches: int, chunks: int | None, limit: str | float | None, times: Times
) -> Schedule:
    """Kinds of the literature; ZB-2p is a search under twice 1F1B's memory."""
    key = name.lower().replace("_", "-")
    if key in ("zb-2p", "zb2p") or (key == "zb-auto" and limit is not None):
        factor = float(str(limit or "2p").split("p")[0])
        return auto(stages, microbatches, times, factor * stages if isinstance(limit, str) or limit is None else limit)
    return make(_KINDS[key], stages, microbatches, chunks if _KINDS[key] == "interleaved-1f1b" else None)


@rule("pipeline", stages="p", microbatches="m", forward="TF", backward="TB", weight="TW", hop="Tcomm")
def zb_v(
    stages: int, microbatches: int, forward: float, backward: float, weight: float, hop: float = 0.0
) -> Quantities:
    """Where no schedule is named: ZB-V's bubble and memory; and for fewer microbatches than stages the closed forms of
    Zero Bubble (arXiv 2401.10241), appendix H."""
    report = _run("zb-v", stages, microbatches, Times(forward, backward, weight, hop))
    waves = microbatches + stages - 1
    return {
        "bubble": round(report.cost - microbatches * (forward + backward + weight), 9),
        "peak_mem_MB": max(report.peak_activations),
        "f1b": waves * (forward + backward + weight),
        "zb": waves * (forward + backward) + weight,
    }


def _run(kind: str, stages: int, microbatches: int, times: Times | None = None) -> Report:
    return simulate(make(kind, stages, microbatches), times)


@rule("pipeline", stages="p")
def peaks(stages: int) -> Quantities:
    """Activations of the fullest stage, with microbatches to spare."""
    names = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-V": "zb-v", "GPipe": "gpipe"}
    return {name: max(_run(kind, stages, 3 * stages).peak_activations) for name, kind in names.items()}


@rule("pipeline", stages="p", activations="M_B", deferred="M_W")
def peaks_per_worker(stages: int, activations: float, deferred: float) -> Quantities:
    """Zero Bubble (arXiv 2401.10241), section 2.3: worker i of 1..p."""
    workers = range(1, stages + 1)
    return {
        "1F1B": [(stages - i + 1) * activations for i in workers],
        "H1": [(stages - i + 1) * activations + (i - 1) * deferred for i in workers],
        "H2": [(2 * stages - 2 * i + 1) * activations + (2 * i - 2) * deferred for i in workers],
    }


@rule("pipeline", stages="PP", forward="F", backward="B", weight="W", pair="FB")
def dualpipe(stages: int, forward: float, backward: float, weight: float, pair: float) -> Quantities:
    """deepseek-ai/DualPipe, README: backward is the whole pass."""
    bidirectional = (stages / 2 - 1) * (pair + backward - 3 * weight)
    return {
        "1F1B": (stages - 1) * (forward + backward),
        "ZB1P": (stages - 1) * (forward + backward - 2 * weight),
        "DualPipe": bidirectional,
        "DualPipeV": bidirectional,
    }


@rule("pipeline")
def dualpipe_memory() -> Quantities:
    """The same table: copies of the parameters, activations in flight, devices."""
    one_way = {"params": 1, "act": "PP", "devices": "PP"}
    both_ways = {"params": 2, "act": "PP+1", "devices": "PP"}
    return {
        "1F1B": one_way,
        "ZB1P": one_way,
        "DualPipe": both_ways,
        "DualPipeV": both_ways | {"devices": "PP/2"},
    }


@rule("pipeline", slices="t", stages="K")
def terapipe_seconds(slices: Sequence[float], stages: int) -> Quantities:
    """TeraPipe (arXiv 2102.07988), section 3.3, equation 4."""
    found = sum(slices) + (stages - 1) * max(slices)
    return {"T": found, VALUE: found}


@rule("pipeline", without="latency_wo_s", with_slices="latency_w_s")
def terapipe_speedup(
    model: str, batch: int, devices: int, without: float, with_slices: float, seq: int = 2048
) -> Quantities:
    tera = _terapipe_flops(model, batch, seq) / devices / 1e12
    return {
        VALUE: without / with_slices,
        "speedup": without / with_slices,
        "TF_wo": tera / without,
        "TF_w": tera / with_slices,
    }


@rule("pipeline", without="wo", with_slices="w")
def terapipe_ratio(without: float, with_slices: float) -> Quantities:
    return {VALUE: without / with_slices, "speedup": without / with_slices}


@rule("pipeline", batches="batch", lengths="seq", seconds="w")
def terapipe_appendix(lengths: Sequence[int], batches: Sequence[int], seconds: Sequence[float]) -> Quantities:
    """Its appendix's TFLOP/s of the 13B model on 320 GPUs, which took 2,048 tokens for every length."""
    return {
        "printed": [
            _terapipe_flops("13b", batch, 2048) / time / 320 / 1e12
            for batch, time in zip(batches, seconds, strict=True)
        ],
        "factor_low": [length / 2048 for length in lengths],
    }


def _terapipe_flops(model: str, batch: int, seq: int) -> float:
    """Forward and backward, of the layers alone, attention causal: 72 B s l h^2 (1 + s/12h)."""
    layers, hidden = _TERAPIPE[model.lower()]
    return 72.0 * batch * seq * layers * hidden**2 * (1 + seq / (12 * hidden))


@rule("pipeline", stages="pp", microbatches="m", chunks="vp")
def layout(stages: int, microbatches: int, chunks: int = 1) -> Quantities:
    return one_f_one_b.function(stages, microbatches, 1, 2, chunks)
