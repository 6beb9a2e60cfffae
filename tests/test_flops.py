"""FLOPs and MFU against published formulas, published measurements and a count of the mask's pairs."""

import pytest

from jaxpar.planning.flops import (
    StepFlops,
    attention_flops_per_token,
    head_matmul_flops_per_token,
    layers_matmul_flops_per_token,
    matmul_flops_per_token,
    mfu,
    step_flops,
)
from jaxpar.planning.pipeline import PassFlops, pass_flops, slice_flops
from models.config import ModelConfig
from models.count import num_parameters, parameter_counts
from models.presets import preset


def gpt(num_layers, embed_dim, num_heads):
    """A GPT of the Megatron papers, with their padded vocabulary of 51,200."""
    return preset("gpt3").replace(
        vocab_size=51200,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=embed_dim // num_heads,
        mlp_dim=4 * embed_dim,
    )


# arXiv 2204.02311, table 1; multi-query attention.
PALM_540B = ModelConfig(
    name="palm-540b",
    vocab_size=256000,
    embed_dim=18432,
    num_layers=118,
    num_heads=48,
    num_kv_heads=1,
    head_dim=256,
    mlp_dim=73728,
    tie_embeddings=True,
)


def test_tiny_by_hand():
    tiny = preset("tiny")
    assert layers_matmul_flops_per_token(tiny) == 2 * 4 * (128 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 256)
    assert head_matmul_flops_per_token(tiny) == 2 * 128 * 256
    assert attention_flops_per_token(tiny, seq_len=64, causal=False) == 4 * (2 * 64 * 128 + 2 * 64 * 128)


def test_nanogpt():
    """karpathy/nanoGPT@3adf61e, transformer_sizing.ipynb: GPT-2, one sequence of 1,024, attention in full."""
    gpt2, seq_len = preset("gpt2"), 1024
    forward = matmul_flops_per_token(gpt2) + attention_flops_per_token(gpt2, seq_len, causal=False)
    assert forward * seq_len == 291648307200
    step = step_flops(gpt2, num_tokens=seq_len, seq_len=seq_len, remat="none")
    assert step.model == 874944921600
    # PaLM's 6 N there has in N the norms' scales, which multiply no matrix: half of a LayerNorm's parameters.
    assert step.model + 6 * seq_len * parameter_counts(gpt2)["norms"] / 2 == 875062886400


@pytest.mark.parametrize(
    "model",
    [PALM_540B, preset("llama2-7b"), preset("llama3-8b"), preset("qwen3-8b"), preset("gpt2-xl"), preset("tiny")],
    ids=lambda model: model.name,
)
def test_palms_formula(model):
    """6 N + 12 L H Q T per token, N the parameters that multiply (arXiv 2204.02311, appendix B)."""
    seq_len = 2048
    counts = parameter_counts(model)
    biases = 0
    if model.qkv_bias:  # GPT-2: four biases of width d in attention, 4 d + d in the MLP
        biases = model.num_layers * 9 * model.embed_dim
    embedding = 0 if model.tie_embeddings else counts["embedding"]
    n = num_parameters(model) - embedding - counts["positions"] - counts["norms"] - biases
    per_token = 6 * n + 12 * model.num_layers * model.num_heads * model.head_dim * seq_len
    assert step_flops(model, 1, seq_len, "none").model == per_token


@pytest.mark.parametrize(
    "model", [gpt(48, 6144, 64), gpt(96, 12288, 96), gpt(105, 20480, 128)], ids=["22B", "175B", "530B"]
)
def test_megatrons_formulas(model):
    batch, s, layers, h, v = 512, 2048, model.num_layers, model.embed_dim, model.vocab_size
    full = step_flops(model, batch * s, s, remat="full")
    # Korthikanti et al. (arXiv 2205.05198), equation 7.
    assert full.model == pytest.approx(
        72 * batch * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers)), rel=1e-12
    )
    # Narayanan et al. (arXiv 2104.04473), section 5.1: with every layer's forward recomputed.
    assert full.hardware == pytest.approx(
        96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h)), rel=1e-12
    )


def test_remat_changes_the_hardwares_work_only():
    none, full = (step_flops(preset("llama3-8b"), 8192, 8192, remat) for remat in ("none", "full"))
    assert none.hardware == none.model
    layers = 8192 * (
        layers_matmul_flops_per_token(preset("llama3-8b"))
        + attention_flops_per_token(preset("llama3-8b"), 8192, causal=False)
    )
    assert full == StepFlops(none.model, none.model_causal, none.model + layers)


# NVIDIA-NeMo/Megatron-Bridge@067f987, docs/performance-summary.md: tokens/s and model TFLOP/s per GPU, in
# sequences of 8,192. They count half of attention. The two columns are rounded apart, so to 0.1 % only.
@pytest.mark.parametrize(
    ("name", "tokens_per_second", "tflops"),
    [
        ("llama3-8b", 29994, 1544),
        ("llama3-70b", 4798, 2157),
        ("llama3-70b", 5003, 2248),
        ("llama3.1-405b", 1358, 3428),
        ("llama3.1-405b", 1424, 3594),
    ],
)
def test_causal_count_is_the_one_that_nvidia_publishes(name, tokens_per_second, tflops):
    step = step_flops(preset(name), tokens_per_second, 8192, "none")
    assert step.model_causal / 1e12 == pytest.approx(tflops, rel=1e-3)
    assert step.model / 1e12 > 1.03 * tflops


# Korthikanti et al. (arXiv 2205.05198), table 5: A100s of 312 TFLOP/s, seconds per iteration, MFU in percent.
@pytest.mark.parametrize(
    ("model", "batch", "num_gpus", "seconds", "percent"),
    [
        (gpt(48, 6144, 64), 4, 8, 1.10, 41.5),
        (gpt(96, 12288, 96), 64, 64, 13.75, 51.4),
        (gpt(105, 20480, 128), 280, 280, 37.83, 56.0),
        (gpt(128, 25600, 160), 512, 512, 71.49, 56.3),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_mfu_that_megatron_published(model, batch, num_gpus, seconds, percent):
    flops = step_flops(model, batch * 2048, 2048, "full").model
    rounding = 0.05 + percent * 0.005 / seconds
    assert 100 * mfu(flops, seconds, num_gpus, 312e12) == pytest.approx(percent, rel=0, abs=rounding)


def test_mfu_that_palm_published():
    """46.2 % on 6,144 TPU v4 at 238.3 thousand tokens/s (arXiv 2204.02311, appendix B)."""
    flops = step_flops(PALM_540B, num_tokens=238_300, seq_len=2048, remat="none").model
    assert 100 * mfu(flops, 1.0, 6144, 275e12) == pytest.approx(46.2, rel=0, abs=0.06)


@pytest.mark.parametrize("window", [None, 1, 8, 100, 256, 1000])
def test_attention_counts_the_pairs_that_the_mask_leaves(window):
    seq_len = 256
    model = preset("tiny").replace(sliding_window=window)
    per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
    band = min(window or seq_len, seq_len)
    pairs = sum(min(query + 1, band) for query in range(seq_len))
    # Each query's last key is counted half at a triangle's edge: band / 2 pairs in all.
    causal = attention_flops_per_token(model, seq_len, causal=True) * seq_len
    assert causal == pytest.approx(per_pair * (pairs - band / 2), rel=1e-12)
    assert attention_flops_per_token(model, seq_len, causal=False) == per_pair * band


@pytest.mark.parametrize("seq_len", [1024, 4096])
def test_causal_is_half_of_full_where_no_window_cuts(seq_len):
    mistral = preset("mistral-7b")
    full = attention_flops_per_token(mistral, seq_len, causal=False)
    assert attention_flops_per_token(mistral, seq_len, causal=True) == full / 2
    assert full == attention_flops_per_token(mistral.replace(sliding_window=None), seq_len, causal=False)


def test_unknown_remat():
    with pytest.raises(ValueError, match="--remat selective: it must be one of none, full, "):
        step_flops(preset("tiny"), 1, 64, "selective")


def test_the_three_passes_of_a_pipeline():
    """Zero Bubble's table 1 (arXiv 2401.10241): s h (24 h + 4 s), s h (24 h + 8 s), 24 s h^2 of a layer."""
    s, h = 1024, 4096
    got = pass_flops(gpt(1, h, 32), s)
    assert got == PassFlops(24 * h**2 + 4 * s * h, 24 * h**2 + 8 * s * h, 24 * h**2)
    assert got.forward + got.backward + got.weight == 3 * got.forward


# TeraPipe (arXiv 2102.07988), GPT3-13B on 320 GPUs: sequence length, sequences, seconds, teraFLOP/s a GPU as printed.
# The rows of long sequences were printed as if they had 2,048 tokens.
TERAPIPE = [
    (2048, 32, 1.863, 8.5792),
    (2048, 32, 1.328, 12.0354),
    (4096, 8, 0.913, 4.3765),
    (6144, 4, 0.756, 2.6427),
    (8192, 2, 0.636, 1.5707),
]


@pytest.mark.parametrize(("seq_len", "batch", "seconds", "printed"), TERAPIPE)
def test_throughput_of_token_slices(seq_len, batch, seconds, printed):
    """Causal attention, without the head; the slices of a sequence are its whole work."""
    model = gpt(40, 5120, 40)

    def achieved(seq_len: int) -> float:
        quarter = seq_len // 4
        work = sum(slice_flops(model, quarter, before) for before in range(0, seq_len, quarter))
        return 3 * batch * work / seconds / 320 / 1e12

    assert achieved(2048) == pytest.approx(printed, rel=0.01)
    assert achieved(seq_len) / printed == pytest.approx(seq_len / 2048, rel=0.12)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "llama3-8b"])
@pytest.mark.parametrize("change", [{}, {"num_shared_experts": 1, "num_dense_layers": 2, "moe_every": 2}])
def test_full_remat_runs_all_layers_again(name, change):
    """Experts that a token is sent to, and routers, among them; the head is none of the layers."""
    model = preset(name)
    model = model.replace(**change) if model.num_experts else model
    step = step_flops(model, 1, 4096, "full")
    layers = layers_matmul_flops_per_token(model) + attention_flops_per_token(model, 4096, causal=False)
    assert step.hardware - step.model == pytest.approx(layers, rel=1e-12)
