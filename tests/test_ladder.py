"""Any mesh, the same numbers: rungs 1, 2 and 4 of the ladder, against one device without a mesh.

1. initial parameters bitwise equal; 2. loss, every gradient and five steps' losses and gradient norms, in float64 to
1e-9, and once in bfloat16, loosely; 4. the state's types are the same after a step as before it.
Rung 3, the traffic, is tests/test_traffic.py.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxpar.config import Config, DataConfig, OptimizerConfig, ParallelConfig, RunConfig
from jaxpar.parallel import parameter as parameters
from jaxpar.parallel.batch import Batch
from jaxpar.parallel.layout import Layout
from jaxpar.training import optimizers, setup
from jaxpar.training.step import init_state, make_step
from jaxpar.verify import gradient_errors, random_batch, true_sizes
from models.config import ModelConfig
from models.presets import preset

TINY = ModelConfig(vocab_size=250, embed_dim=32, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=48)
GPT2 = preset("gpt2").replace(
    vocab_size=300, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, mlp_dim=64, max_seq_len=40
)
QWEN = TINY.replace(qkv_bias=True, qk_norm=True, tie_embeddings=True, num_kv_heads=2, sliding_window=5)
MODELS = {"tiny": TINY, "gpt2": GPT2, "qwen": QWEN}
NUM_STEPS = 5


def config(model: str, mesh: str = "", precision: str = "float64", **parallel) -> Config:
    return Config(
        model=MODELS[model],
        data=DataConfig(batch_size=16, seq_len=16),
        parallel=ParallelConfig(mesh=mesh, **parallel),
        run=RunConfig(precision=precision, steps=20),
    )


def num_devices(mesh: str) -> int:
    return int(np.prod([int(size) for item in mesh.split(",") for size in item.split("=")[1:]]))


@functools.cache
def outcome(config: Config, on_mesh: bool = True):
    """(initial parameters, gradients, losses and gradient norms of five steps), all on the host.

    One program is compiled: the first step's (clipped) gradients are read from AdamW's first moment, which was zero.
    Every layout is given the same 16 sequences, in one microbatch for one device, in whatever it takes here.
    """
    mesh = setup.make_mesh(config, jax.devices()[: num_devices(config.parallel.mesh)]) if on_mesh else None
    model = setup.make_model(config, mesh)
    tx = optimizers.make(config.optimizer, config.run.steps, model.names, config.model.vocab_size)
    with jax.set_mesh(mesh) if mesh is not None else jax.default_device(jax.devices()[0]):
        state = init_state(model, tx, seed=0)
        params = true_sizes(model, state.params)
        sharding = model.layout.sharding(model.layout.stacked_batch_spec())
        whole = random_batch(dataclasses.replace(config, parallel=ParallelConfig()))  # one microbatch
        order = model.layout.sequence_order(config.data.seq_len)
        microbatches = config.parallel.grad_accumulation
        batch: Batch = jax.tree.map(
            lambda x: jax.device_put(x.reshape(microbatches, -1, x.shape[-1]), sharding), whole.in_order(order)
        )
        step = jax.jit(make_step(model, tx, config.optimizer.clip_norm))
        types = jax.tree.map(jax.typeof, state)
        curve = []
        for number in range(NUM_STEPS):
            state, metrics = step(state, batch)
            curve += [float(metrics.loss), float(metrics.grad_norm)]
            if number == 0:
                grads = true_sizes(model, state.opt_state[0].mu)
        assert jax.tree.map(jax.typeof, state) == types
    return params, grads, np.array(curve)


def check_same(layout: Config, reference: Config, tolerance: float) -> None:
    check_outcome(outcome(layout), outcome(reference, on_mesh=False), tolerance)


def check_outcome(have, want, tolerance: float) -> None:
    (params, grads, curve), (want_params, want_grads, want_curve) = have, want
    assert params.keys() == want_params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(value, want_params[name], err_msg=name)
    errors = gradient_errors(grads, want_grads)
    assert max(errors.values()) <= tolerance, max(errors.items(), key=lambda item: item[1])
    assert np.all(want_curve[:2] > 0.1)  # a sum over no tokens would be zero on both sides
    assert np.ptp(want_curve[::2]) > 0.01  # the steps do something
    np.testing.assert_allclose(curve, want_curve, rtol=tolerance)


@pytest.mark.parametrize(
    "mesh",
    [
        "data=8",
        "fsdp=8",
        "tensor=8",
        "data=2,fsdp=4",
        pytest.param("data=4,fsdp=2", marks=pytest.mark.slow),
        "data=2,tensor=4",
        pytest.param("data=4,tensor=2", marks=pytest.mark.slow),
        "fsdp=2,tensor=4",
        pytest.param("fsdp=4,tensor=2", marks=pytest.mark.slow),
        "data=2,fsdp=2,tensor=2",
        pytest.param("data=2,fsdp=4,tensor=2", marks=pytest.mark.slow),
        "fsdp=2,expert=2,tensor=2",
        "context=4,tensor=2",
        "fsdp=2,context=4",
        "data=1",
        "fsdp=3",  # does not divide the embedding: its weights are whole
    ],
)
def test_any_mesh_gives_the_numbers_of_one_device(mesh):
    layout = config("tiny", mesh)
    if "=3" in mesh:  # 16 rows do not divide by 3
        layout = dataclasses.replace(layout, data=DataConfig(batch_size=12, seq_len=16))
    check_same(layout, dataclasses.replace(config("tiny"), data=layout.data), 1e-9)


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ("data=2,fsdp=2,tensor=2", {"grad_accumulation": 2}),
        ("data=2,fsdp=2,tensor=2", {"sequence_parallel": False, "grad_accumulation": 4}),
        pytest.param("fsdp=2,tensor=4", {"sequence_parallel": False}, marks=pytest.mark.slow),
        pytest.param("fsdp=4,tensor=2", {"reshard_after_forward": "never"}, marks=pytest.mark.slow),
        pytest.param("data=2,fsdp=4", {"remat": "none"}, marks=pytest.mark.slow),
        ("data=4,fsdp=2", {"remat": "none", "reshard_after_forward": "never", "grad_accumulation": 2}),
        ("data=8", {"zero": 1}),
        pytest.param(
            "data=2,fsdp=2,tensor=2",
            {"zero": 1, "grad_accumulation": 2, "sequence_parallel": False},
            marks=pytest.mark.slow,
        ),
        ("fsdp=4,tensor=2", {"zero": 2, "remat": "every=2"}),
        ("data=2,fsdp=2,tensor=2", {"zero": 2, "grad_accumulation": 2}),
        pytest.param("fsdp=2,expert=2,tensor=2", {"zero": 2}, marks=pytest.mark.slow),
        pytest.param("data=2,fsdp=2,tensor=2", {"remat": "every=2"}, marks=pytest.mark.slow),
        ("fsdp=4,tensor=2", {"remat": "every=3", "reshard_after_forward": "never"}),
        ("data=2,fsdp=2,tensor=2", {"remat": "sqrt", "grad_accumulation": 2}),
        ("data=2,fsdp=2,tensor=2", {"remat": "dots"}),
        ("fsdp=2,tensor=4", {"remat": "save=attention,mlp_up,block_input"}),
        ("data=2,fsdp=2,tensor=2", {"remat": "offload"}),
    ],
)
def test_no_option_of_a_layout_changes_the_numbers(mesh, parallel):
    check_same(config("tiny", mesh, **parallel), config("tiny"), 1e-9)


@pytest.mark.parametrize(
    ("mesh", "parallel", "model", "packs"),
    [
        ("data=2,fsdp=2,context=2,tensor=2", {"grad_accumulation": 2}, "gpt2", True),
        ("data=2,context=4", {"context_strategy": "ring", "context_order": "contiguous"}, "tiny", True),
        ("data=4,context=2", {"context_strategy": "ring", "context_order": "striped", "remat": "none"}, "qwen", False),
        ("context=8", {"context_strategy": "ulysses"}, "tiny", True),
        ("fsdp=2,context=2,tensor=2", {"context_strategy": "ulysses", "context_order": "contiguous"}, "qwen", True),
        ("fsdp=2,context=4", {"context_strategy": "allgather", "zero": 2}, "qwen", True),
        ("context=4,tensor=2", {"context_strategy": "hybrid=2x2", "remat": "save=attention"}, "tiny", True),
        pytest.param(
            "expert=2,context=4",
            {"context_strategy": "hybrid=2x2", "context_order": "striped"},
            "qwen",
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_context_parallelism(mesh, parallel, model, packs):
    def of(config: Config) -> Config:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, pack_documents=packs))

    check_same(of(config(model, mesh, **parallel)), of(config(model)), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4", "fsdp=4", "tensor=4", "data=2,fsdp=4,tensor=2"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("remat", ["none", "full", "every=2", "sqrt", "dots", "save=query,mlp_gate", "offload"])
def test_every_remat_on_every_stage_of_zero(mesh, zero, remat):
    check_same(config("tiny", mesh, zero=zero, remat=remat), config("tiny"), 1e-9)


def test_zero_2_with_learned_positions_and_sequence_parallelism():
    check_same(config("gpt2", "data=2,tensor=2", zero=2), config("gpt2"), 1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {"label_smoothing": 0.1},
        {"z_loss": 0.1, "ema": 0.9},
        pytest.param({"z_loss": 1e-2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_objective(settings):
    def of(config: Config) -> Config:
        return dataclasses.replace(config, optimizer=OptimizerConfig(**settings))

    check_same(of(config("tiny", "data=2,fsdp=2,tensor=2", zero=2)), of(config("tiny")), 1e-9)


WITHOUT_SEQUENCE_PARALLELISM = {"sequence_parallel": False, "grad_accumulation": 2}


@pytest.mark.parametrize(
    ("model", "mesh", "parallel"),
    [
        ("qwen", "data=2,fsdp=2,tensor=4", {}),  # 2 kv heads over 4 ranks
        ("gpt2", "fsdp=4,tensor=2", WITHOUT_SEQUENCE_PARALLELISM),
        pytest.param("gpt2", "data=2,fsdp=2,tensor=4", {}, marks=pytest.mark.slow),
        pytest.param("qwen", "fsdp=4,tensor=2", WITHOUT_SEQUENCE_PARALLELISM, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_block(model, mesh, parallel):
    check_same(config(model, mesh, **parallel), config(model), 1e-9)


@pytest.mark.parametrize(("model", "mesh"), [("tiny", "data=2,fsdp=2,tensor=2"), ("gpt2", "fsdp=4,tensor=2")])
def test_what_is_done_on_tpus_alone(monkeypatch, model, mesh):
    monkeypatch.setattr(Layout, "_is_on_tpus", True)
    monkeypatch.setattr(parameters, "LANES", 4)
    monkeypatch.setattr(parameters, "LEAST_WIDTH", 8)
    have, want = outcome.__wrapped__(config(model, mesh)), outcome(config(model), on_mesh=False)
    check_outcome(have, want, 1e-9)


@pytest.mark.parametrize(
    ("precision", "zero", "run", "tolerance"),
    [
        ("bfloat16", 3, {}, 0.05),
        pytest.param("bfloat16", 1, {"reduce_dtype": "bfloat16"}, 0.05, marks=pytest.mark.slow),
        ("bfloat16", 2, {"reduce_dtype": "bfloat16"}, 0.05),
        ("float16", 3, {}, 0.01),
        pytest.param("float16", 2, {}, 0.01, marks=pytest.mark.slow),
        ("bfloat16", 3, {"params_dtype": "bfloat16"}, 0.1),
        ("bfloat16", 3, {"matmul": "fp8"}, 0.15),
    ],
)
def test_in_short_formats_loosely(precision, zero, run, tolerance):
    def of(config: Config) -> Config:
        return dataclasses.replace(config, run=dataclasses.replace(config.run, **run))

    layout = config("tiny", "data=2,fsdp=2,tensor=2", precision, zero=zero)
    check_same(of(layout), of(config("tiny", precision=precision)), tolerance)


def test_float32_to_1e_5():
    check_same(
        config("tiny", "fsdp=2,tensor=2", "float32", grad_accumulation=2), config("tiny", precision="float32"), 1e-5
    )


def test_a_vocabulary_that_tensor_does_not_divide_is_padded():
    model = TINY.replace(num_heads=6, num_kv_heads=2)
    layout = dataclasses.replace(
        config("tiny", "fsdp=2,tensor=3"), model=model, data=DataConfig(batch_size=16, seq_len=18)
    )
    check_same(layout, dataclasses.replace(config("tiny"), model=model, data=layout.data), 1e-9)
