"""Rung 3: the compiled program moves what the strategies' formulas say, by axis, operation and bytes.

Compiled for H100s, without any: the CPU backend turns a reduce-scatter into an all-reduce and a slice.
"""

import dataclasses
import itertools

import pytest

from jaxpar.config import Config, DataConfig, ParallelConfig, RunConfig
from jaxpar.parallel.fsdp import Folds
from jaxpar.verify import Target, agree, compiled_traffic, expected_traffic
from meshes import MESH_AXES
from models.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=8192, embed_dim=1024, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=64, mlp_dim=3072
)


def sizes(**axes: int) -> dict[str, int]:
    return {axis: axes.get(axis, 1) for axis in MESH_AXES}


def config(model: ModelConfig = MODEL, **parallel) -> Config:
    return Config(
        model=model,
        data=DataConfig(batch_size=64, seq_len=512),
        parallel=ParallelConfig(**parallel),
        run=RunConfig(precision="bfloat16"),
    )


def check(config: Config, mesh: dict[str, int]) -> tuple[dict, dict]:
    found, expected = compiled_traffic(config, mesh), expected_traffic(config, mesh)
    assert agree(found, expected), (found, expected)
    return found, expected


KERNELS = 4 * (2 * 1024 * 16 * 64 + 2 * 1024 * 8 * 64 + 3 * 1024 * 3072)  # of all layers
EMBEDDING = HEAD = 8192 * 1024
VECTORS = (2 * 4 + 1) * 1024


@pytest.mark.parametrize("num_microbatches", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_data_parallelism_is_one_all_reduce_of_the_gradients_a_step(num_microbatches):
    found, _ = check(config(grad_accumulation=num_microbatches), sizes(data=8))
    assert set(found) == {"data"}
    gradients = 4 * (KERNELS + EMBEDDING + HEAD + VECTORS)
    assert found["data"]["all-reduce"]["bytes"] == pytest.approx(gradients, rel=1e-5)


@pytest.mark.parametrize(("reshard", "gathers"), [("auto", 2), ("never", 1)])
def test_fsdp_transfers_the_weights_three_times_or_twice(reshard, gathers):
    found, _ = check(config(reshard_after_forward=reshard), sizes(fsdp=8))
    assert set(found) == {"fsdp"}
    assert found["fsdp"]["all-gather"]["bytes"] == pytest.approx(2 * (gathers * KERNELS + HEAD), rel=1e-2)
    assert found["fsdp"]["reduce-scatter"]["bytes"] == 4 * (KERNELS + HEAD)
    assert found["fsdp"]["all-to-all"]["bytes"] == 2 * 2 * (64 // 8 * 512 * 1024)  # the lookup, there and back


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_gathers_the_weights_once_a_step(zero):
    found, _ = check(config(zero=zero, grad_accumulation=2), sizes(data=8))
    assert set(found) == {"data"}
    assert found["data"]["all-gather"]["bytes"] == 2 * (KERNELS + EMBEDDING + HEAD)
    times = 1 if zero == 1 else 2
    assert found["data"]["reduce-scatter"]["bytes"] == times * 4 * (KERNELS + EMBEDDING + HEAD)
    assert found["data"]["all-reduce"]["bytes"] == pytest.approx(4 * VECTORS, rel=1e-2)


def test_gradients_are_summed_in_the_dtype_asked_for():
    short = config()
    short = dataclasses.replace(short, run=dataclasses.replace(short.run, reduce_dtype="bfloat16"))
    found, _ = check(short, sizes(data=2, fsdp=4))
    assert found["fsdp"]["reduce-scatter"]["bytes"] == 2 * (KERNELS + HEAD)
    assert found["data"]["all-reduce"]["bytes"] == 2 * (KERNELS + EMBEDDING + HEAD) // 4


def test_keeping_activations_does_not_keep_gathered_weights():
    found, _ = check(config(remat="none"), sizes(fsdp=8))
    assert found["fsdp"]["all-gather"]["bytes"] == pytest.approx(2 * (2 * KERNELS + HEAD), rel=1e-2)


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_tensor_parallelism_reduces_an_activation_twice_a_layer_and_direction(remat):
    activation = 2 * (64 * 512 * 1024)
    again = 1 if remat == "full" else 0
    found, _ = check(config(remat=remat, sequence_parallel=False), sizes(tensor=8))
    # 2 forward, 2 backward and, recomputed, 1 in each of 4 layers; the embedding's and the loss's.
    reductions = 4 * (2 + 2 + again) + 2
    assert found["tensor"]["all-reduce"]["bytes"] == pytest.approx(reductions * activation, rel=1e-2)

    found, _ = check(config(remat=remat), sizes(tensor=8))
    assert found["tensor"]["reduce-scatter"]["bytes"] == reductions * activation
    assert found["tensor"]["all-gather"]["bytes"] == (4 * (2 + 2 + 2 * again) + 2) * activation


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        (sizes(data=2, fsdp=4), {"grad_accumulation": 2}),
        pytest.param(sizes(data=4, fsdp=2), {"remat": "none"}, marks=pytest.mark.slow),
        (sizes(data=2, tensor=4), {"grad_accumulation": 2}),
        pytest.param(sizes(data=4, tensor=2), {"sequence_parallel": False}, marks=pytest.mark.slow),
        pytest.param(sizes(fsdp=2, tensor=4), {"grad_accumulation": 2}, marks=pytest.mark.slow),
        pytest.param(sizes(fsdp=4, tensor=2), {"reshard_after_forward": "never"}, marks=pytest.mark.slow),
        pytest.param(sizes(data=2, fsdp=2, tensor=2), {"grad_accumulation": 2}, marks=pytest.mark.slow),
        pytest.param(sizes(fsdp=2, expert=2, tensor=2), {}, marks=pytest.mark.slow),
        pytest.param(sizes(data=2, fsdp=2, tensor=2), {"zero": 1, "grad_accumulation": 2}, marks=pytest.mark.slow),
        (sizes(data=2, fsdp=2, tensor=2), {"zero": 2, "grad_accumulation": 2}),
        (sizes(fsdp=2, tensor=4), {"remat": "every=3"}),
        (sizes(fsdp=4, tensor=2), {"remat": "dots"}),
        (sizes(fsdp=2, context=4), {}),
        (sizes(context=4, tensor=2), {"remat": "none", "context_order": "striped"}),
        (sizes(data=2, context=4), {"context_strategy": "ulysses", "grad_accumulation": 2}),
        (sizes(data=2, context=2, tensor=2), {"context_strategy": "allgather", "zero": 1}),
        (sizes(context=8), {"context_strategy": "hybrid=2x4"}),
        *(
            pytest.param(
                sizes(context=8), {"context_strategy": kind, "remat": "save=attention"}, marks=pytest.mark.slow
            )
            for kind in ("allgather", "hybrid=2x4", "ring")
        ),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items() if v != 1),
)
def test_compositions(mesh, parallel):
    found, expected = check(config(**parallel), mesh)
    # Each strategy's traffic is there, and a check that passed without it would be none.
    for axes, op in itertools.chain.from_iterable(((a, o) for o in ops) for a, ops in expected.items()):
        lacking = {a: {o: v for o, v in ops.items() if (a, o) != (axes, op)} for a, ops in found.items()}
        assert agree(lacking, expected) is (expected[axes][op] <= 1024)


@pytest.mark.parametrize(
    # Of 64 tokens a rank: the last two ranks, or either side.
    ("order", "hops"),
    [("contiguous", 2), pytest.param("zigzag", 7, marks=pytest.mark.slow)],
)
def test_a_window_that_few_ranks_reach_sends_less(order, hops):
    model = dataclasses.replace(MODEL, sliding_window=100)
    _, expected = check(config(model, context_order=order, remat="none"), sizes(context=8))
    keys = 4 * 64 * 64 * 2 * 8 * 64  # layers, rows, tokens, K and V, heads, dim
    assert expected["context"]["collective-permute"] == keys * (hops * (2 + 2 + 4) + 2)


def test_kv_heads_that_tensor_does_not_divide_and_biases_and_tied_embeddings():
    model = dataclasses.replace(MODEL, num_kv_heads=2, qkv_bias=True, qk_norm=True, tie_embeddings=True)
    _, expected = check(config(model), sizes(fsdp=2, tensor=4))
    assert expected["tensor"]["all-reduce"] > 2 * 4 * (32 * 512) * 2 * 64 * 2  # dK and dV, beside the loss's sums


def test_gpt2s_learned_positions_and_biases():
    model = dataclasses.replace(
        MODEL, num_kv_heads=16, norm="layernorm", mlp="gelu", positions="learned", qkv_bias=True, mlp_bias=True,
        attention_output_bias=True,
    )  # fmt: skip
    _, expected = check(config(model), sizes(data=2, fsdp=2, tensor=2))
    assert expected["data+fsdp"]["all-reduce"] == 4 * 4 * (3 * 16 * 64 + 3072) // 2  # biases that `tensor` cuts


BIASED = {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True, "tie_embeddings": True}
GPT2 = {
    "num_kv_heads": 16, "norm": "layernorm", "mlp": "gelu", "positions": "learned", "qkv_bias": True, "mlp_bias": True,
    "attention_output_bias": True,
}  # fmt: skip
ALWAYS = {"reshard_after_forward": "always"}


@pytest.mark.parametrize(
    ("mesh", "kind", "parallel", "model"),
    [
        (sizes(pipe=2, fsdp=2, tensor=2), "1f1b", {}, {}),
        (sizes(pipe=2, data=2, tensor=2), "zb-h1", {"spread_head": True, "zero": 1, "remat": "dots"}, BIASED),
        (sizes(pipe=2, fsdp=4), "zb-v", {**ALWAYS, "remat": "none", "pipeline_residuals": True}, {"num_layers": 8}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (sizes(pipe=2, fsdp=2, tensor=2), "zb-h1", ALWAYS, {}),
                (sizes(pipe=2, fsdp=2, tensor=2), "zb-v", {**ALWAYS, "remat": "none"}, {"num_layers": 8}),
                (
                    sizes(pipe=2, fsdp=2, tensor=2),
                    "interleaved-1f1b",
                    {"chunks": 2, "sequence_parallel": False, "spread_head": True},
                    {"num_layers": 8},
                ),
                (sizes(pipe=2, tensor=4), "1f1b", {"remat": "dots"}, BIASED),
                (sizes(pipe=2, data=2, tensor=2), "zb-h1", {"zero": 1, "pipeline_residuals": True}, {}),
                (sizes(pipe=2, data=2, fsdp=2), "1f1b", {**ALWAYS, "spread_head": True}, {"tie_embeddings": True}),
                (sizes(pipe=2, fsdp=2, tensor=2), "1f1b", {**ALWAYS, "spread_head": True}, GPT2),
                (sizes(pipe=4, data=2), "dualpipe-v", {"zero": 1}, {"num_layers": 16}),
                (sizes(pipe=2, context=2, tensor=2), "1f1b", {}, {}),
                (
                    sizes(pipe=2, fsdp=2, context=2),
                    "zb-v",
                    {"context_strategy": "ulysses", "remat": "none"},
                    {"num_layers": 8},
                ),
                (sizes(pipe=2, fsdp=2, context=2), "zb-h1", {"pipeline_residuals": True}, {}),
                # Groups in a loop, a last one of one layer, one group alone.
                (sizes(pipe=2, fsdp=2, tensor=2), "1f1b", {**ALWAYS, "remat": "every=2"}, {"num_layers": 8}),
                (sizes(pipe=2, fsdp=2, tensor=2), "zb-h1", {**ALWAYS, "remat": "every=2"}, {"num_layers": 6}),
                (sizes(pipe=2, fsdp=2, tensor=2), "1f1b", {**ALWAYS, "remat": "every=3"}, {"num_layers": 6}),
                # One layer in a chunk.
                (sizes(pipe=4, tensor=2), "zb-h1", {"remat": "none"}, {}),
                (sizes(pipe=4, fsdp=2), "1f1b", {**ALWAYS, "remat": "dots"}, {}),
                # Unequal stages.
                (sizes(pipe=2, fsdp=2, tensor=2), "zb-h1", ALWAYS, {"num_layers": 5}),
            )
        ),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items() if v != 1) if isinstance(value, dict) else value,
)
def test_a_pipeline_with_what_lies_in_its_stages(mesh, kind, parallel, model):
    asked = config(dataclasses.replace(MODEL, **model), pipeline=kind, grad_accumulation=4, **parallel)
    found, expected = check(asked, mesh)
    for axes, ops in expected.items():
        for op, num_bytes in ops.items():
            assert 0 <= found[axes][op]["bytes"] - num_bytes <= 64  # scalars


def test_a_reduce_scatter_in_steps_counts_each_by_what_it_starts_from():
    asked, mesh = config(), sizes(fsdp=16, context=2)
    folds = Folds((("fsdp", (4, 4)), ("context", (2,))))
    in_one = expected_traffic(asked, mesh)
    in_steps = expected_traffic(asked, mesh, Target("tpu", folds=folds))
    whole = 4 * (KERNELS + HEAD)
    assert in_one["fsdp+context"].pop("reduce-scatter") == whole
    assert in_steps["context"].pop("reduce-scatter") == whole
    assert in_steps["fsdp"].pop("reduce-scatter") == whole // 2 + whole // 8
    assert {axes: ops for axes, ops in in_steps.items() if ops} == in_one
