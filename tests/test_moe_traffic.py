"""Mixtures of experts as they compile for devices that are not here: what they send, compute and keep."""

import dataclasses
import re

import jax
import pytest
from jax.experimental import topologies
from test_traffic import check, config, sizes

from jaxpar.kernels import grouped
from jaxpar.parallel import expert
from jaxpar.planning.traffic import ideal_expert_bytes
from jaxpar.training import optimizers, setup
from jaxpar.training.step import abstract_state, make_step
from jaxpar.verify import abstract_batch, compiled_step, traffic_settings
from meshes import build_mesh
from models.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=8192, embed_dim=1024, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=64, mlp_dim=3072,
    num_experts=8, expert_mlp_dim=1024,
)  # fmt: skip
ALL_KINDS = MODEL.replace(
    num_layers=5, num_dense_layers=1, moe_every=2, num_shared_experts=1, balancing="bias", qk_norm=True,
    qk_norm_over="heads",
)  # fmt: skip
TOKENS, WIDTH, PER_TOKEN = 64 * 512, 1024, 2


def test_capacity_exchanges_its_buffers_six_times_a_layer():
    settings = config(MODEL, moe_dispatch="capacity")
    mesh = sizes(expert=4, fsdp=2)
    found, _ = check(settings, mesh)
    buffer = 8 * (64 // 8) * 160 * WIDTH * 2  # experts, sequences, ceil(512 x 2 / 8 x 1.25), width, bytes
    assert found["expert"]["all-to-all"]["bytes"] == 4 * 6 * buffer
    assert set(found["expert"]) == {"all-to-all"}
    ideal = ideal_expert_bytes(MODEL, traffic_settings(settings, mesh))
    assert ideal == 4 * 4 * (TOKENS // 8) * PER_TOKEN * WIDTH * 2 * 3 / 4
    # Slots to spare, what remat sends again, and a rank's own part, which a ring does not send.
    assert found["expert"]["all-to-all"]["bytes"] / ideal == pytest.approx(1.25 * 6 / 4 * 4 / 3)


def test_dropless_exchanges_what_is_there_in_buffers_for_the_most():
    found, _ = check(config(MODEL, remat="none"), sizes(expert=4, fsdp=2))
    pairs = TOKENS // 8 * PER_TOKEN
    assert expert.arrivals(TOKENS // 8, 4, 8, PER_TOKEN) == 4 * pairs
    assert found["expert"]["ragged-all-to-all"]["bytes"] == 4 * 2 * (pairs + 4 * pairs) * WIDTH * 2


@pytest.mark.parametrize(
    ("mesh", "model", "parallel"),
    [
        (sizes(expert=2, context=2, tensor=2), MODEL, {"moe_dispatch": "capacity", "grad_accumulation": 2}),
        (sizes(expert=2, fsdp=2, tensor=2), MODEL, {"remat": "dots"}),
        (sizes(expert=2, context=2, tensor=2), ALL_KINDS, {}),
        (sizes(expert=2, tensor=4), ALL_KINDS, {"moe_dispatch": "capacity", "capacity_order": "score", "zero": 2}),
        (sizes(data=2, expert=4), MODEL.replace(balancing_over="batch"), {"remat": "every=3"}),
    ],
    ids=str,
)
def test_compositions(mesh, model, parallel):
    check(config(model, **parallel), mesh)


def test_experts_flops_on_h100s_are_those_of_the_tokens():
    """Tiles of the grouped matmuls in the program, and no product by all experts beside them."""
    text = compiled_step(config(MODEL), sizes(fsdp=2)).as_text()
    pairs = TOKENS // 2 * PER_TOKEN
    tiles = pairs // grouped.ROWS + 8 - 1
    assert len(re.findall(rf"custom-call.*s32\[{tiles}\].*triton|triton.*s32\[{tiles}\]", text)) >= 6  # 2 x 3 products
    assert pairs <= tiles * grouped.ROWS <= 1.05 * pairs
    assert not re.search(rf"\[8,{pairs},1024\]", text)  # all rows by all experts


def test_temporaries_are_linear_in_tokens():
    def temporaries(batch_size: int, dispatch: str) -> int:
        settings = config(MODEL.replace(num_experts=64, expert_mlp_dim=256), moe_dispatch=dispatch)
        settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, batch_size=batch_size))
        return compiled_step(settings, sizes(expert=2)).memory_analysis().temp_size_in_bytes

    for dispatch in "dropless", "capacity":
        once, twice, thrice = (temporaries(batch_size, dispatch) for batch_size in (64, 128, 192))
        assert twice > 1.2 * once  # tokens are most of it
        assert thrice - twice == pytest.approx(twice - once, rel=0.1)


def compiled_for_tpus(model: ModelConfig, dispatch: str) -> str:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:8x8").devices
    settings = config(model, moe_dispatch=dispatch, attention="tiled")
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, batch_size=64))
    mesh = build_mesh("expert=8,fsdp=8", "", devices)
    model_on_mesh = setup.make_model(settings, mesh)
    tx = optimizers.make(settings.optimizer, settings.run.steps, model_on_mesh.names)
    with jax.enable_x64(False):
        arguments = abstract_state(model_on_mesh, tx), abstract_batch(settings, model_on_mesh)
        with jax.set_mesh(mesh):
            step = jax.jit(make_step(model_on_mesh, tx, 1.0), donate_argnums=0)
            return step.lower(*arguments).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize(("dispatch", "op"), [("capacity", "all-to-all"), ("dropless", "ragged-all-to-all")])
def test_on_64_tpus_tokens_travel_and_experts_stay(dispatch, op):
    mixtral = MODEL.replace(num_layers=2, expert_mlp_dim=3584)
    text = compiled_for_tpus(mixtral, dispatch)
    # The groups of `expert`, the innermost axis.
    over_expert = re.findall(r" = (\S+) ([\w-]+)\(.*replica_groups=\{\{0,1,2,3,4,5,6,7\},", text)
    exchanged = [kind for kind, name in over_expert if name.removesuffix("-start") == op]
    assert len(exchanged) >= 6  # out and back, forward, again and backward
    gathered = {kind.split("{")[0] for kind, name in over_expert if name.startswith("all-gather")}
    assert gathered <= {"s32[8,8]"}  # dropless: how many tokens each rank has for each expert
