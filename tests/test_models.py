"""The models and the attention kernel against the papers, written out once more in plain NumPy, float64.

The reference attends one query of one head at a time. Its gradients are complex steps, f(w + ih) = f(w) + ih f'(w):
exact to rounding, and without a backward pass that could share a mistake with the model's.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import attention
from jaxpar.kernels.mask import AttentionMask, Tokens
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.layout import Layout
from jaxpar.training.model import Model
from jaxpar.verify import true_sizes
from models.config import ModelConfig
from models.count import num_parameters
from models.layers import rope_frequencies
from models.parameters import normal
from models.presets import preset, preset_names

F32, F64 = jnp.dtype("float32"), jnp.dtype("float64")
TOLERANCE = 1e-12
DOCUMENTS = ((7, 9), (4, 1, 3, 8))
"""Lengths of the documents packed into each row."""


# The reference -------------------------------------------------------------------------------------------------------


def reference_loss(config, weights, batch):
    """sum(loss_weights * cross-entropy)."""
    logits = reference_logits(config, weights, batch)
    at_target = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    return np.sum(batch.loss_weights * (np.log(np.sum(np.exp(logits), axis=-1)) - at_target))


def reference_logits(config, weights, batch):
    """[B, S, V], row by row."""
    rows = zip(batch.tokens, batch.positions, batch.segment_ids, strict=True)
    return np.stack([decode(config, weights, *row) for row in rows])


def decode(config, weights, tokens, positions, segments):
    x = weights["embedding"][tokens]
    if config.positions == "learned":
        x = x + weights["position_embedding"][positions]
    for layer in range(config.num_layers):
        w = {name.removeprefix("blocks."): weights[name][layer] for name in weights if name.startswith("blocks.")}
        x = x + self_attention(config, w, norm(config, w, "attention_norm", x), positions, segments)
        x = x + mlp(config, w, norm(config, w, "mlp_norm", x))
    x = norm(config, weights, "final_norm", x)
    return x @ (weights["embedding"].T if config.tie_embeddings else weights["head"])


def norm(config, w, name, x):
    if config.norm == "rmsnorm":
        return rms_norm(config, x, w[f"{name}.scale"])
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + config.norm_eps) * w[f"{name}.scale"] + w[f"{name}.bias"]


def rms_norm(config, x, scale):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * scale


def self_attention(config, w, x, positions, segments):
    q, k, v = (np.einsum("sd,dhk->shk", x, w[f"attention.{name}"]) for name in ("query", "key", "value"))
    if config.qkv_bias:
        q, k, v = (y + w[f"attention.{name}_bias"] for y, name in ((q, "query"), (k, "key"), (v, "value")))
    if config.qk_norm:
        q = rms_norm(config, q, w["attention.query_norm.scale"])
        k = rms_norm(config, k, w["attention.key_norm.scale"])
    if config.positions == "rope":
        q, k = rotate(config, q, positions), rotate(config, k, positions)
    mask = AttentionMask(causal=True, window=config.sliding_window)
    attended = attend(q, k, v, positions, positions, segments, segments, mask, 1 / math.sqrt(config.head_dim))
    out = np.einsum("shk,hkd->sd", attended, w["attention.out"])
    return out + w["attention.out_bias"] if config.attention_output_bias else out


def attend(q, k, v, q_positions, k_positions, q_segments, k_segments, mask, scale):
    """softmax(scale q k^T) v, for one query of one head at a time: [T, H, K]."""
    out = np.empty(q.shape, np.result_type(q, k, v))
    group = q.shape[1] // k.shape[1]
    for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        seen = []
        for s in range(k.shape[0]):
            distance = q_positions[t] - k_positions[s]
            if q_segments[t] != k_segments[s] or (mask.causal and distance < 0):
                continue
            if mask.window is None or -mask.window < distance < mask.window:
                seen.append(s)
        scores = scale * (k[seen, h // group] @ q[t, h])
        if mask.soft_cap is not None:
            scores = mask.soft_cap * np.tanh(scores / mask.soft_cap)
        weights = np.exp(scores) / np.sum(np.exp(scores))
        out[t, h] = weights @ v[seen, h // group]
    return out


def rotate(config, x, positions):
    out, half = np.empty_like(x), config.head_dim // 2
    for i in range(half):
        angle = positions[:, None] * frequency(config, i)
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., i + half] = a * np.sin(angle) + b * np.cos(angle)
    return out


def frequency(config, i):
    """Of pair i, in radians a position; scaled as in section 3.4.2 of Llama 3's paper (arXiv 2407.21783)."""
    plain = config.rope_theta ** (-2 * i / config.head_dim)
    if config.rope_scaling_factor == 1:
        return plain
    turns = config.rope_original_seq_len / (2 * math.pi / plain)
    if turns > config.rope_high_freq_factor:
        return plain
    if turns < config.rope_low_freq_factor:
        return plain / config.rope_scaling_factor
    smooth = (turns - config.rope_low_freq_factor) / (config.rope_high_freq_factor - config.rope_low_freq_factor)
    return (1 - smooth) * plain / config.rope_scaling_factor + smooth * plain


def mlp(config, w, x):
    def affine(name, x):
        return x @ w[f"mlp.{name}"] + (w[f"mlp.{name}_bias"] if config.mlp_bias else 0)

    if config.mlp == "swiglu":
        gate = affine("gate", x)
        return affine("down", gate / (1 + np.exp(-gate)) * affine("up", x))
    up = affine("up", x)
    return affine("down", up / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))))


# The models ----------------------------------------------------------------------------------------------------------


def shrunk(name: str, **changes) -> ModelConfig:
    """A preset with its own structure, small; of RoPE's four frequencies Llama 3.1 keeps, blends, slows, slows."""
    full = preset(name)
    num_kv_heads = min(full.num_kv_heads, 2)
    small = full.replace(
        vocab_size=250,
        embed_dim=20,
        num_layers=2,
        num_heads=num_kv_heads * full.num_heads // full.num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        mlp_dim=28,
        max_seq_len=24,
        rope_original_seq_len=400,
        sliding_window=full.sliding_window and 5,
    )
    return small.replace(**changes)


CONFIGS = {
    "gpt2": shrunk("gpt2"),
    "llama3.1": shrunk("llama3.1-8b"),
    "qwen2.5": shrunk("qwen2.5-3b"),
    "qwen3": shrunk("qwen3-0.6b"),
    "mistral": shrunk("mistral-7b", vocab_size=256),  # no padding
    # What no preset combines, and multi-query attention.
    "qwen3-all": shrunk(
        "qwen3-8b", norm="layernorm", qkv_bias=True, attention_output_bias=True, mlp_bias=True, num_kv_heads=1
    ),
}


def random_params(model: Model) -> dict:
    """Every parameter random, also those that start as zeros or ones, and nonsense where the vocabulary is padding."""
    rng = np.random.default_rng(3)

    def draw(path, leaf, names):
        is_scale = jax.tree_util.keystr(path).endswith("['scale']")
        value = 0.3 * rng.standard_normal(leaf.shape) + is_scale
        if "vocab" in names:
            np.moveaxis(value, names.index("vocab"), 0)[model.config.vocab_size :] = 1e3
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, model.abstract, model.names)


def packed_batch(config: ModelConfig) -> Batch:
    """DOCUMENTS of random tokens, about a third of them not counted."""
    rng = np.random.default_rng(4)
    positions = np.array([[p for length in row for p in range(length)] for row in DOCUMENTS], np.int32)
    segments = np.array([np.repeat(range(len(row)), row) for row in DOCUMENTS], np.int32)
    tokens, targets = rng.integers(0, config.vocab_size, (2, *positions.shape), dtype=np.int32)
    weights = rng.random(positions.shape) * (rng.random(positions.shape) < 2 / 3)
    return Batch(tokens, targets, positions, segments, weights)


@functools.cache
def compiled(name: str):
    """(model, function): loss, gradients and `logits_at` every index [B, S, V] from parameters and a batch."""
    model = Model(CONFIGS[name], Layout.single(F64), F64)

    def run(params, batch):
        indices = jnp.arange(batch.tokens.shape[1])
        logits = jax.vmap(lambda index: model.logits_at(params, batch, index), out_axes=1)(indices)
        return *jax.value_and_grad(lambda p: model.loss(p, batch)[0])(params), logits

    jitted = jax.jit(run)
    return model, lambda params, batch: jax.tree.map(np.asarray, jitted(params, batch))


@functools.cache
def outcome(name: str):
    """(model, parameters, batch, loss, gradients, logits) of one of CONFIGS."""
    model, run = compiled(name)
    params, batch = random_params(model), packed_batch(model.config)
    return model, params, batch, *run(params, batch)


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_logits_are_the_papers(name):
    model, params, batch, loss, _, logits = outcome(name)
    weights = true_sizes(model, params)
    want = reference_logits(model.config, weights, batch)
    assert 1 < np.abs(want).max() < 100
    np.testing.assert_allclose(
        logits[..., : model.config.vocab_size], want, rtol=0, atol=TOLERANCE * np.abs(want).max()
    )
    np.testing.assert_allclose(loss, reference_loss(model.config, weights, batch), rtol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_the_papers(name):
    """Of each parameter, along a random direction."""
    model, params, batch, _, grads, _ = outcome(name)
    weights, grads = true_sizes(model, params), true_sizes(model, grads)
    rng = np.random.default_rng(5)
    got, want = {}, {}
    for parameter, value in weights.items():
        direction = rng.standard_normal(value.shape)
        stepped = weights | {parameter: value + 1e-30j * direction}
        want[parameter] = reference_loss(model.config, stepped, batch).imag / 1e-30
        got[parameter] = np.sum(direction * grads[parameter])
    # Against the largest of them all: a key bias has none, softmax does not see it.
    scale = max(map(abs, want.values()))
    assert scale > 1
    assert got == pytest.approx(want, rel=0, abs=TOLERANCE * scale)


@pytest.mark.parametrize("name", ["gpt2", "llama3.1"])  # tied, and with a head of its own
def test_padding_of_the_vocabulary_has_no_effect(name):
    model, params, batch, loss, grads, logits = outcome(name)
    true = model.config.vocab_size
    assert params["embedding"].shape[0] == logits.shape[-1] == 256 > true
    assert np.all(np.isneginf(logits[..., true:]))
    clean = params | {"embedding": params["embedding"].at[true:].set(0)}
    assert np.all(grads["embedding"][true:] == 0)
    if "head" in params:
        clean |= {"head": params["head"].at[:, true:].set(0)}
        assert np.all(grads["head"][:, true:] == 0)
    assert compiled(name)[1](clean, batch)[0] == loss


def alone(batch: Batch, row: int, start: int, length: int) -> Batch:
    """A packed document in a row [S] of its own, with tokens after it that it cannot see and that do not count."""
    seq_len = batch.tokens.shape[1]

    def cut(array):
        return np.pad(array[row, start : start + length], (0, seq_len - length))

    return Batch(
        tokens=cut(batch.tokens),
        targets=cut(batch.targets),
        positions=np.arange(seq_len, dtype=np.int32),
        segment_ids=np.zeros(seq_len, np.int32),
        loss_weights=cut(batch.loss_weights),
    )


@pytest.mark.parametrize("name", ["gpt2", "llama3.1", "mistral"])
def test_packed_documents_are_separate_documents(name):
    _, params, batch, loss, _, logits = outcome(name)
    spans = [(row, sum(ns[:i]), n) for row, ns in enumerate(DOCUMENTS) for i, n in enumerate(ns)]
    total = 0.0
    for pair in zip(spans[::2], spans[1::2], strict=True):
        separate = jax.tree.map(lambda *rows: np.stack(rows), *(alone(batch, *span) for span in pair))
        part, _, separate_logits = compiled(name)[1](params, separate)
        total += part
        for own, (row, start, n) in zip(separate_logits, pair, strict=True):
            np.testing.assert_allclose(own[:n], logits[row, start : start + n], rtol=0, atol=1e-11)
    np.testing.assert_allclose(total, loss, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_the_order_of_tokens_in_the_array_means_nothing(name):
    """Positions and segments do: so a strategy may hand each device any part of the sequence."""
    _, params, batch, loss, _, logits = outcome(name)
    order = np.random.default_rng(6).permutation(batch.tokens.shape[1])
    shuffled_loss, _, shuffled_logits = compiled(name)[1](params, jax.tree.map(lambda array: array[:, order], batch))
    np.testing.assert_allclose(shuffled_loss, loss, rtol=TOLERANCE)
    np.testing.assert_allclose(shuffled_logits, logits[:, order], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.1-8b", "llama3.2-1b", "qwen3-8b"])
def test_rope_frequencies_at_full_size(name):
    config = preset(name)
    want = np.array([frequency(config, i) for i in range(config.head_dim // 2)])
    np.testing.assert_allclose(rope_frequencies(config, F64), want, rtol=1e-14)
    np.testing.assert_allclose(rope_frequencies(config, F32), want, rtol=1e-5)


# Parameters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_count_is_of_the_real_arrays(name):
    config = preset(name)
    model = Model(config, Layout.single(F32), F32)

    def true_size(leaf, names):
        return math.prod(config.vocab_size if name == "vocab" else n for n, name in zip(leaf.shape, names, strict=True))

    sizes = jax.tree.leaves(jax.tree.map(true_size, model.abstract, model.names))
    assert sum(sizes) == num_parameters(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_count_of_every_kind_of_block(name):
    model, params, *_ = outcome(name)
    assert sum(leaf.size for leaf in true_sizes(model, params).values()) == num_parameters(model.config)


def test_normal_is_gaussian_to_the_eye():
    x = np.asarray(normal(1.0)(jax.random.key(0), (1000, 1001), F64)).ravel()
    error = 5 / math.sqrt(x.size)
    assert abs(x.mean()) < error
    assert x.std() == pytest.approx(1, abs=error / math.sqrt(2))
    assert np.mean(x**3) == pytest.approx(0, abs=error * math.sqrt(15))
    assert np.mean(x**4) - 3 == pytest.approx(-0.15, abs=error * math.sqrt(96))
    assert 4 < np.abs(x).max() < 4.9
    assert abs(np.mean(x[1:] * x[:-1])) < error
    for within in (0.5, 1.0, 2.0):
        assert np.mean(np.abs(x) < within) == pytest.approx(math.erf(within / math.sqrt(2)), abs=0.006)


def test_normal_is_the_same_numbers_in_any_dtype():
    init, key = normal(0.02), jax.random.key(1)
    single, double, half = (np.asarray(init(key, (37, 5), jnp.dtype(d))) for d in ("float32", "float64", "bfloat16"))
    assert single.std() == pytest.approx(0.02, rel=0.2)
    np.testing.assert_array_equal(single, double)
    np.testing.assert_array_equal(single.astype(half.dtype), half)


@functools.cache
def initial(num_layers: int) -> dict[str, np.ndarray]:
    """Of a model with every kind of parameter, by path."""
    config = shrunk("gpt2", num_layers=num_layers, qk_norm=True, mlp="swiglu", tie_embeddings=False)
    model = Model(config, Layout.single(F32), F32)
    return true_sizes(model, model.init(0))


RESIDUAL_WRITERS = ("blocks.attention.out", "blocks.mlp.down")


def test_initial_parameters():
    """GPT-2's scheme: one std, less by sqrt(2 layers) in the two kernels that write to the residual stream."""
    for name, value in initial(4).items():
        if name.endswith("bias"):
            assert np.all(value == 0), name
        elif name.endswith("scale"):
            assert np.all(value == 1), name
        else:
            std = 0.02 / math.sqrt(8) if name in RESIDUAL_WRITERS else 0.02
            assert value.std() == pytest.approx(std, rel=5 / math.sqrt(2 * value.size)), name
            assert abs(value.mean()) < 5 * std / math.sqrt(value.size), name


def test_a_layer_starts_the_same_however_many_there_are():
    two, four = initial(2), initial(4)
    assert two.keys() == four.keys()
    for name, value in two.items():
        first = four[name][:2] if name.startswith("blocks.") else four[name]
        if name in RESIDUAL_WRITERS:
            np.testing.assert_allclose(first * math.sqrt(2), value, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(first, value, err_msg=name)


def test_no_two_parameters_start_alike():
    """Neither layers nor kernels of one layer: no two of them are correlated in their first 200 numbers."""
    samples = [
        layer.ravel()[:200]
        for name, value in initial(4).items()
        for layer in (value if name.startswith("blocks.") else value[None])
        if np.ptp(layer) > 0
    ]
    assert len(samples) == 3 + 4 * 7
    correlations = np.corrcoef(samples) - np.eye(len(samples))
    assert np.abs(correlations).max() < 0.4


# The kernel ----------------------------------------------------------------------------------------------------------


def attention_inputs(num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int, num_segments: int):
    """Two rows of random q, k, v, positions and segments in any order; each query has its own key among the keys."""
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, num_queries, num_heads, 6))
    k, v = rng.standard_normal((2, 2, num_keys, num_kv_heads, 6))
    k_positions = np.stack([rng.permutation(num_keys) for _ in range(2)])
    k_segments = rng.integers(0, num_segments, (2, num_keys))
    return q, k, v, k_positions[:, :num_queries], k_positions, k_segments[:, :num_queries], k_segments


def attend_with_kernel(q, k, v, q_positions, k_positions, q_segments, k_segments, mask, scale):
    """The arguments of `attend`, in whole rows, to the kernel."""
    q_tokens, k_tokens = (
        Tokens(*(jnp.asarray(x, jnp.int32) for x in pair))
        for pair in ((q_positions, q_segments), (k_positions, k_segments))
    )
    return attention(*map(jnp.asarray, (q, k, v)), q_tokens, k_tokens, mask, scale)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(),
        AttentionMask(window=1),
        AttentionMask(window=4),
        AttentionMask(soft_cap=0.7),
        AttentionMask(window=3, soft_cap=2.0),
        AttentionMask(causal=False),
        AttentionMask(causal=False, window=3),
    ],
    ids=str,
)
def test_attention_is_the_loop(mask, num_heads, num_kv_heads):
    inputs = attention_inputs(9, 13, num_heads, num_kv_heads, num_segments=2)
    got = attend_with_kernel(*inputs, mask, 0.6)
    want = np.stack([attend(*(array[row] for array in inputs), mask, 0.6) for row in range(2)])
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_a_window_of_one_is_the_token_itself():
    q, k, v, *rest = attention_inputs(9, 9, 4, 4, num_segments=1)
    got = attend_with_kernel(q, k, v, *rest, AttentionMask(window=1), 1.0)
    np.testing.assert_array_equal(got, v)


def test_attention_of_bfloat16_scores_in_float32():
    """Scores around 100, of which bfloat16 would tell no two apart that differ by less than a half."""
    q, k, v, *rest = attention_inputs(9, 13, 4, 2, num_segments=2)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    arguments = *rest, AttentionMask(), 20.0
    got = attend_with_kernel(q, k, v, *arguments)
    assert got.dtype == jnp.bfloat16
    want = attend_with_kernel(*(x.astype(jnp.float64) for x in (q, k, v)), *arguments)
    np.testing.assert_allclose(got.astype(jnp.float64), want, rtol=0, atol=0.02)
