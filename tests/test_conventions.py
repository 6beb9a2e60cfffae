"""The planner's conventions against published numbers, and against what they are by definition."""

import itertools
import math

import pytest

from jaxpar.planning import budget, collectives, rooflines, routing, serving
from jaxpar.planning.flop_conventions import (
    CONVENTIONS,
    convention,
    gpt_flops_per_token,
    gpt_parameters,
    utilization,
    with_attention,
)
from jaxpar.planning.flops import step_flops
from jaxpar.planning.memory_conventions import (
    CookbookEstimate,
    DeepSpeedEstimate,
    LayerActivations,
    megatron_bytes_per_parameter,
    optimal_checkpoints,
    zero_bytes,
    zero_max_parameters,
)
from models.presets import preset
from models.published import shape
from models.shapes import Shape


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "qwen3-8b", "llama2-70b"])
def test_conventions_of_a_model_that_can_be_trained(name):
    """palm and nvidia-bridge are the two counts of planning.flops."""
    step = step_flops(preset(name), 1, 4096, "none")
    assert CONVENTIONS["palm"].flops_per_token(shape(name), 4096) == pytest.approx(step.model, rel=1e-12)
    window = preset(name).sliding_window
    assert window is None
    assert CONVENTIONS["nvidia-bridge"].flops_per_token(shape(name), 4096) == pytest.approx(
        step.model_causal, rel=1e-12
    )


def test_conventions_of_one_gpt():
    """GPT-3: what each adds to the other."""
    gpt, seq_len = shape("megatron-175b"), 2048
    found = {name: each.flops_per_token(gpt, seq_len) for name, each in CONVENTIONS.items()}
    layers = 72 * 96 * 12288**2 + 12 * 96 * 12288 * seq_len
    assert found["korthikanti"] == pytest.approx(found["palm"], rel=1e-12)
    assert found["megatron-2021"] - found["korthikanti"] == pytest.approx(layers / 3, rel=1e-12)
    assert found["palm"] - found["maxtext"] == pytest.approx(6 * 96 * 12288 * seq_len, rel=1e-12)
    assert found["llm-foundry"] == found["torchtitan"]  # a tied head
    assert found["llm-foundry"] - found["nanogpt"] == 6 * 2048 * 12288
    for each in CONVENTIONS.values():
        assert each.source


def test_experts_count_as_many_as_a_token_visits():
    """NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md: Qwen3 30B-A3B on 8 GB300s, 1,029 TFLOP/s each."""
    per_token = convention("nvidia-bridge").flops_per_token(shape("Qwen3_30B_a3B"), 4096)
    assert 44544 * per_token / 1e12 == pytest.approx(1029, rel=0.02)


def test_unknown_convention():
    with pytest.raises(ValueError, match="no FLOP convention is called 'plam'; known: palm, megatron-2021, "):
        convention("plam")
    with pytest.raises(ValueError, match="recompute 'some': it must be none, selective or full"):
        gpt_flops_per_token(1, 1, 1, 1, "some")


def test_published_utilization():
    """llm-foundry: 70B on 512 H100s; PaLM: 46.2 % with attention, 45.7 % without."""
    mpt = convention("llm-foundry").flops_per_token(shape("mpt-70b"), 2048)
    assert 100 * utilization(mpt, 515636, 512, 989.4e12) == pytest.approx(41.25, abs=0.01)
    palm = {layers: with_attention(540.35e9, layers, 48 * 256, 2048, causal=False) for layers in (0, 118)}
    assert [round(100 * utilization(flops, 238300, 6144, 275e12), 1) for flops in palm.values()] == [45.7, 46.2]


def test_megatrons_parameters():
    exact = shape("megatron-1t").parameters
    assert gpt_parameters(128, 25600, 51200, 2048) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("data", [1, 4, 64])
def test_zero_stages(data):
    found = [zero_bytes(1e9, data, stage) for stage in range(4)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 16e9
    assert found[3] == pytest.approx(16e9 / data)
    assert zero_max_parameters(32, data, 3, 2) * zero_bytes(1, data, 3) == pytest.approx(64)


def test_megatrons_bytes():
    assert megatron_bytes_per_parameter() == megatron_bytes_per_parameter(1, distributed_optimizer=True) == 18
    assert megatron_bytes_per_parameter(8, distributed_optimizer=True) == 7.5


def test_layer_activations_of_gpt3():
    """Korthikanti et al. (2205.05198), section 5: for GPT-3 attention's scores are 80 of 114 units of s b h."""
    layer = LayerActivations(2048, 1, 12288, 96, 8)
    unit = 2048 * 12288
    assert layer.no_parallel / unit == 34 + 80
    assert layer.tensor_sequence_parallel_selective / unit == 34 / 8
    assert layer.tensor_parallel_selective - layer.tensor_sequence_parallel_selective == pytest.approx(
        10 * 7 / 8 * unit
    )
    assert layer.full == 2 * unit
    ungrouped = LayerActivations(2048, 1, 12288, 96)
    assert ungrouped.tensor_parallel == ungrouped.tensor_sequence_parallel == ungrouped.no_parallel


def test_optimal_checkpoints_need_least_memory():
    layers, intermediate, layer_input = 24, 34.0, 2.0

    def memory(count):
        return count * layer_input + layers / count * intermediate

    best = optimal_checkpoints(layers, intermediate, layer_input)
    assert memory(best) <= min(memory(best * 0.99), memory(best * 1.01))


def test_deepspeeds_table():
    """deepspeedai/DeepSpeed, docs/code-docs/source/memory.rst: T5-large on 4 GPUs, MB a GPU."""
    found = DeepSpeedEstimate(737.67e6, 32.9e6, 4)
    mega = [each / 2**20 for each in (found.zero3, found.zero3_offload_parameters, found.zero3_offload_optimizer)]
    assert mega == pytest.approx([3291, 125, 477], abs=1)


def test_cookbook_without_parallelism():
    found = CookbookEstimate(2, 64, 4, 128, 1, 1, zero=0, vocab_size=100)
    assert found.communication == 0
    assert found.total == pytest.approx(18 * found.num_parameters + found.activations)


@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_bus_factors(ranks):
    """An all-reduce is a reduce-scatter and an all-gather; a ring's n - 1 steps send 1/n each."""
    factor = {op: collectives.bus_factor(op, ranks) for op in collectives.COLLECTIVES}
    assert factor["all_reduce"] == pytest.approx(factor["reduce_scatter"] + factor["all_gather"])
    assert factor["all_gather"] == pytest.approx(sum(1 / ranks for _ in range(ranks - 1)))
    assert collectives.ring_seconds("all_gather", 1e9, ranks, 1e9, 1.0) == pytest.approx(
        factor["all_gather"] + ranks - 1
    )


def test_unknown_collective():
    with pytest.raises(ValueError, match="no collective is called 'all-reduce'; known: all_reduce, "):
        collectives.bus_factor("all-reduce", 8)


def test_torus_and_tree():
    """How to Scale Your Model: v5e without wraparound, 560 us; H100 servers, 450 GB/s inside and 400 between."""
    line = collectives.torus_gather_seconds(2048 * 8192 * 2, 45e9, (4,), bidirectional=False)
    assert line == pytest.approx(560e-6, rel=0.005)
    assert collectives.torus_gather_seconds(8e9, 1e9, (4, 4)) == collectives.torus_gather_seconds(8e9, 1e9, (4,)) / 2
    assert collectives.torus_gather_seconds(1, 45e9, (8,), hop_latency=1e-6) == 4e-6
    assert collectives.torus_all_to_all_seconds(8e9, 1e9) == collectives.torus_gather_seconds(8e9, 1e9, (8,)) / 4
    levels = [(8, 450e9), (32, 400e9), (4, 12.8e12)]
    assert collectives.tree_levels_seconds(1e9, levels) == pytest.approx(1e9 / (400e9 * 32 / 31))
    assert collectives.tree_seconds(1e6, 256, 1e9, 1e-6) == pytest.approx(2e-3 + 16e-6)


def test_critical_batches():
    assert rooflines.critical_batch(197e12, 820e9) == pytest.approx(240, abs=1)
    found = rooflines.matmul_critical_batch(3.94e14, 8.1e11, 4096, 16384, 1)
    compute, memory = rooflines.matmul_seconds(found, 4096, 16384, 3.94e14, 8.1e11, 1)
    assert compute == pytest.approx(memory)
    assert found == pytest.approx(271, rel=0.035), "the book's answer, from factors rounded to two digits"
    assert rooflines.dot_intensity(found, 4096, 16384, 1) == pytest.approx(3.94e14 / 8.1e11)


def test_the_best_mix_of_fsdp_and_tensor_parallelism():
    """It moves least, and at the least batch its communication takes as long as the compute."""
    mlp_dim, devices, alpha = 32768, 64, 2550.0

    def sends(batch, fsdp):
        return 1 / (devices / fsdp * 2) * mlp_dim + batch / fsdp

    batch = 48000
    best = rooflines.optimal_fsdp(batch, devices, mlp_dim)
    assert sends(batch, best) <= min(sends(batch, best * 0.99), sends(batch, best * 1.01))
    least = rooflines.mixed_batch(alpha, mlp_dim) * devices
    fsdp = rooflines.optimal_fsdp(least, devices, mlp_dim)
    assert alpha * sends(least, fsdp) == pytest.approx(least * mlp_dim / devices)


def test_chinchillas_optimum_is_one():
    params, tokens = budget.chinchilla_optimum(5.76e23)
    assert budget.training_flops(params, tokens) == pytest.approx(5.76e23)
    least = budget.chinchilla_loss(params, tokens)
    for factor in (0.9, 1.1):
        assert budget.chinchilla_loss(params * factor, tokens / factor) > least


def test_costs():
    """Llama 1 65B: 21 days on 2,048 A100s; Megatron-LM: GPT-3 in 34 days at 140 TFLOP/s on 1,024."""
    seconds = budget.training_seconds(budget.training_flops(175e9, 300e9, 8), 1024, 140e12)
    assert seconds / budget.DAY == pytest.approx(34, abs=0.5)
    assert budget.implied_mfu(68.98e9, 2e12, 1720320, 312e12) == pytest.approx(0.428, abs=0.001)
    assert budget.hours_between_failures(419, 54) * budget.failures_per_day(419, 54) == pytest.approx(24)


@pytest.mark.parametrize("acceptance", [0.3, 0.8, 1.0])
def test_speculative_decoding(acceptance):
    """One token always, and each drafted one whose predecessors were all accepted."""
    tokens = 1 + sum(acceptance**count for count in range(1, 6))
    assert serving.speculative_tokens(acceptance, 5) == pytest.approx(tokens)
    assert serving.speculative_speedup(acceptance, 5, 0.05) == pytest.approx(tokens / 1.25)
    assert serving.speculative_operations(acceptance, 5) == pytest.approx(6 / tokens)


def test_online_softmax():
    x = [0.5, -2.0, 3.0, 3.0, 1.0, 7.0, -50.0]
    expected = max(x), sum(math.exp(each - max(x)) for each in x)
    for cut in range(1, len(x)):
        assert serving.online_softmax([x[:cut], x[cut:]]) == pytest.approx(expected)
    assert serving.online_softmax([[each] for each in x]) == pytest.approx(expected)


def test_decode_step():
    """Bound by memory at small batches, where the weights are read once for all."""
    one, two = (serving.decode_step_seconds(batch, 1e9, 1e6, 5e8, 1e15, 1e12) for batch in (1, 2))
    assert one == pytest.approx(1e-3 + 1e-6)
    assert two - one == pytest.approx(1e-6)
    assert serving.decode_step_seconds(1e6, 1e9, 0, 5e8, 1e15, 1e12) == pytest.approx(1.0)


def test_capacity_and_balance():
    assert routing.capacity(6, 3, 1.5) == 3
    assert routing.capacity(7, 3) == 3
    shares = [0.25] * 4
    assert routing.balancing_loss(0.01, shares, shares) == pytest.approx(0.01)
    skewed = [0.7, 0.1, 0.1, 0.1]
    assert routing.balancing_loss(0.01, skewed, skewed) > 0.01


def test_attention_of_a_shape():
    tiny = Shape("", 2, 8, 4, 2, 16, 100)
    assert tiny.attention_flops_per_token(10, causal=False) == 2 * 2 * 2 * (4 * 2) * 10
    pairs = sum(1 for _ in itertools.product(range(10), range(10)))
    assert 10 * tiny.attention_flops_per_token(10, causal=True) == 2 * 4 * (4 * 2) * pairs / 2
