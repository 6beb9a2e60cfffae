"""The ladder of tests/test_ladder.py for mixtures of experts: `expert` beside every other axis, both dispatches."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ladder
from jax import lax
from jax.sharding import PartitionSpec as P
from test_ladder import check_same

from jaxpar.config import Config
from jaxpar.parallel import expert
from jaxpar.parallel.expert import ExpertStrategy, Place
from jaxpar.training import setup
from meshes import build_mesh
from models.transformer import balanced

MOE = test_ladder.TINY.replace(
    num_layers=2, num_experts=8, num_experts_per_token=2, expert_mlp_dim=16, router_z_loss_weight=0.01
)
KINDS = {
    "moe": MOE,
    "deepseek": MOE.replace(
        num_layers=3,
        num_dense_layers=1,
        num_shared_experts=1,
        router_score="sigmoid",
        num_expert_groups=4,
        num_groups_per_token=2,
        routed_scaling_factor=2.5,
        balancing="bias",
        bias_update_rate=0.01,
        router_jitter=0.1,
    ),
    "switch": MOE.replace(
        num_layers=4, moe_every=2, num_experts_per_token=1, normalize_expert_weights=False, mlp="gelu"
    ),
    "olmoe": MOE.replace(qk_norm=True, qk_norm_over="heads", num_kv_heads=2, normalize_expert_weights=False),
}
ROUTED = ("moe_dispatch", "capacity_factor", "capacity_order")
CAPACITY = {"moe_dispatch": "capacity", "capacity_factor": 0.75}  # some tokens find no slot


def check(model: str, mesh: str, parallel: dict) -> None:
    """Against one device, which routes alike."""

    def of(mesh: str, parallel: dict) -> Config:
        return dataclasses.replace(test_ladder.config("tiny", mesh, **parallel), model=KINDS[model])

    check_same(of(mesh, parallel), of("", {name: parallel[name] for name in ROUTED if name in parallel}), 1e-9)


@pytest.mark.parametrize(
    ("model", "mesh", "parallel"),
    [
        ("moe", "expert=4,fsdp=2", {}),
        ("moe", "fsdp=2,expert=2,context=2", {**CAPACITY, "grad_accumulation": 2}),
        ("moe", "pipe=2,expert=2,tensor=2", {**CAPACITY, "grad_accumulation": 2, "sequence_parallel": False}),
        ("deepseek", "expert=2,context=2,tensor=2", {**CAPACITY, "capacity_order": "score", "zero": 1}),
    ],
    ids=str,
)
def test_any_mesh_gives_the_numbers_of_one_device(model, mesh, parallel):
    check(model, mesh, parallel)


PAIRS = [f"{axis}={8 // n},expert={n}" for axis in ("data", "fsdp", "context", "tensor") for n in (2, 4)]
TRIPLES = [f"{a}=2,{b}=2,expert=2" for a, b in itertools.combinations(("data", "pipe", "fsdp", "context", "tensor"), 2)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, CAPACITY, {**CAPACITY, "capacity_order": "score"}], ids=str)
@pytest.mark.parametrize("mesh", [*PAIRS, *TRIPLES, "pipe=2,expert=4", "data=2,fsdp=2,expert=2,tensor=2"])
@pytest.mark.parametrize("model", KINDS)
def test_every_pair_and_triple(model, mesh, parallel):
    check(model, mesh, parallel | ({"grad_accumulation": 2} if "pipe" in mesh else {}))


@pytest.mark.slow
def test_units_of_several_layers_in_groups_of_remat():
    check("switch", "expert=2,tensor=4", {"remat": "every=2"})


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("remat", ["none", "full", "every=2", "dots", "save=mlp_out", "offload"])
@pytest.mark.parametrize("parallel", [{}, CAPACITY], ids=str)
def test_every_remat_on_every_stage_of_zero(zero, remat, parallel):
    check("moe", "fsdp=2,expert=2,tensor=2", parallel | {"zero": zero, "remat": remat})


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` by its definition, for a backend that has none; NaN where sizes do not agree."""
    operands, begins, sizes, ends = (
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    ranks, num_chunks = sizes.shape
    rows = jnp.arange(operand.shape[0], dtype=sizes.dtype)
    for sender, i in itertools.product(range(ranks), range(num_chunks // ranks)):
        chunk = lax.axis_index(axis_name) * (num_chunks // ranks) + i
        begin, size, end = (x[sender, chunk] for x in (begins, sizes, ends))
        to = jnp.where((rows >= begin) & (rows < begin + size), end + rows - begin, output.shape[0])
        output = output.at[to].set(operands[sender], mode="drop")
        output = jnp.where(recv_sizes[sender * (num_chunks // ranks) + i] == size, output, jnp.nan)
    return output


@pytest.mark.parametrize("skew", [0.0, 20.0])
def test_both_exchanges_give_the_same(monkeypatch, skew):
    """Of dropless dispatch, values and gradients; at 20 nearly all tokens go to the experts of one rank."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 6, 4)))
    scores = rng.normal(size=(8, 6, 8)) + skew * (np.arange(8) // 2 == 1)
    ids = jnp.asarray(np.argsort(-scores)[..., :3], jnp.int32)
    weights = jnp.asarray(rng.uniform(size=ids.shape))
    kernels = jnp.asarray(rng.normal(size=(8, 4, 4)))

    def total(exchange, x, weights, kernels, ids):
        strategy = ExpertStrategy(exchange=exchange)

        def ffn(rows, multiply):
            return jnp.sin(multiply(rows, kernels))

        y, _ = expert.experts(strategy, "dense", Place(ranks=4), 8, x, weights, ids, ffn)
        return y, jnp.sum(jnp.cos(y))

    def gradients(exchange):
        def local(x, weights, kernels, ids):
            y = total(exchange, x, weights, kernels, ids)[0]
            by = jax.grad(lambda *by: total(exchange, *by, ids)[1], argnums=(0, 1, 2))
            return y, *by(x, weights, kernels)

        cut = P("expert")
        return jax.jit(jax.shard_map(local, in_specs=(cut,) * 4, out_specs=(cut,) * 4, check_vma=False))

    with jax.set_mesh(mesh := build_mesh("expert=4", "", jax.devices()[:4])):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, P("expert"))) for a in (x, weights, kernels, ids)]
        gathered, ragged = (gradients(exchange)(*placed) for exchange in ("gather", "ragged"))
    each = np.sin(np.einsum("bsd,edf->bsef", x, kernels))
    by_hand = (np.take_along_axis(each, np.asarray(ids)[..., None], 2) * np.asarray(weights)[..., None]).sum(2)
    np.testing.assert_allclose(gathered[0], by_hand, rtol=0, atol=1e-12)
    for a, b in zip(gathered, ragged):
        assert np.abs(np.asarray(b)).max() > 0.1
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_a_bias_moves_towards_equal_loads():
    config = KINDS["deepseek"]
    params = {"blocks": {"mlp": {"bias": jnp.zeros((2, 8)), "up": jnp.ones((2, 8, 1, 1))}}}
    told = {"tokens_per_expert": jnp.asarray([[9.0] + [1.0] * 7, [2.0] * 8])}
    moved = balanced(config, params, told)["blocks"]["mlp"]
    np.testing.assert_allclose(moved["bias"], [[-0.01] + [0.01] * 7, [0.0] * 8])
    np.testing.assert_array_equal(moved["up"], params["blocks"]["mlp"]["up"])
    assert balanced(MOE, params, told) is params


@pytest.mark.parametrize(
    ("mesh", "model", "message"),
    [
        (
            "expert=4",
            {"num_experts": 6},
            "--model.num-experts 6 is not divisible by expert=4; the nearest that is: 4 or 8",
        ),
        ("tensor=4,fsdp=2", {"expert_mlp_dim": 18}, "--model.expert-mlp-dim 18 is not divisible by tensor=4"),
        ("pipe=3", {"num_layers": 2}, "--model.num-layers 2 is too few for pipe=3; .* take 3 or more"),
        ("pipe=3", {"num_layers": 5, "num_dense_layers": 1, "moe_every": 2}, "2 units of .* too few .* 7 or more"),
    ],
)
def test_what_an_axis_cannot_cut_is_said_in_one_line(mesh, model, message):
    settings = dataclasses.replace(test_ladder.config("tiny", mesh), model=MOE.replace(**model))
    with pytest.raises(ValueError, match=message):
        setup.make_model(settings, setup.make_mesh(settings, jax.devices()[: test_ladder.num_devices(mesh)]))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_capacity_factor_is_above_zero(factor):
    settings = test_ladder.config("tiny", "", capacity_factor=factor)
    with pytest.raises(ValueError, match="it must be above 0, and finite"):
        settings.check()
