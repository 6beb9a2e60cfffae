"""Mixtures of experts as they compile for devices that are not here: what they send, compute and keep."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_traffic import check, config, sizes

from jaxpar.audit.topology import gpu_devices
from jaxpar.kernels import grouped
from jaxpar.parallel import expert
from jaxpar.parallel.expert import ExpertStrategy
from jaxpar.parallel.layout import Layout
from jaxpar.planning.traffic import ideal_expert_bytes
from jaxpar.training import optimizers, setup
from jaxpar.training.step import abstract_batch, abstract_state, make_step
from jaxpar.verify import traffic_settings
from meshes import build_mesh
from models.config import ModelConfig
from models.moe import Moe

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


def test_every_kind_of_mixture():
    settings = config(ALL_KINDS, moe_dispatch="capacity", capacity_order="score", zero=2)
    check(settings, sizes(expert=2, tensor=4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "model", "parallel"),
    [
        (sizes(expert=2, context=2, tensor=2), MODEL, {"moe_dispatch": "capacity", "grad_accumulation": 2}),
        (sizes(expert=2, fsdp=2, tensor=2), MODEL, {"remat": "dots"}),
        (sizes(expert=2, context=2, tensor=2), ALL_KINDS, {}),
        (sizes(data=2, expert=4), MODEL.replace(balancing_over="batch"), {"remat": "every=3"}),
        (sizes(data=2, context=2, expert=2), ALL_KINDS, {"remat": "every=2", "moe_dispatch": "capacity"}),
    ],
    ids=["context-tensor", "fsdp-tensor", "all-kinds", "data", "groups"],
)
def test_compositions(mesh, model, parallel):
    check(config(model, **parallel), mesh)


def compiled_mixture(shape: tuple[int, int], dispatch: str, config: ModelConfig) -> jax.stages.Compiled:
    """A mixture's forward and backward pass for one H100."""
    mesh = build_mesh("data=1", "", gpu_devices("h100:1x1"))
    one = NamedSharding(mesh, P())
    layout = dataclasses.replace(
        Layout.single(jnp.dtype("bfloat16")), dispatch=ExpertStrategy(dispatch), grouped_kernel="triton"
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: Moe(config, nnx.Rngs(params=jax.random.key(0)), jnp.float32)))

    def total(state: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, state)(x, None, layout)[0].astype(jnp.float32))

    def like(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one)

    x = jax.ShapeDtypeStruct((*shape, config.embed_dim), jnp.bfloat16, sharding=one)
    gradients = jax.shard_map(jax.grad(total, argnums=(0, 1)), in_specs=P(), out_specs=P(), check_vma=False)
    with jax.enable_x64(False), jax.set_mesh(mesh):
        return jax.jit(gradients).lower(jax.tree.map(like, state), x).compile()


def test_experts_flops_on_h100s_are_those_of_the_tokens():
    """The tiles that grouped matmuls are given, and no product by all experts beside them."""
    text = compiled_mixture((32, 512), "dropless", MODEL).as_text()
    pairs = TOKENS // 2 * PER_TOKEN
    kernels = [line for line in text.split("\n") if '"__gpu$xla.gpu.triton"' in line and "grouped" in line]
    assert len(kernels) == 3 + 3 + 3  # forward, by rows, by kernels
    tiles = {int(n) for line in kernels if "grouped_product" in line for n in re.findall(r"s32\[(\d+)\]", line)} - {8}
    assert tiles == {pairs // grouped.ROWS + 8 - 1}
    assert pairs <= tiles.pop() * grouped.ROWS <= 1.05 * pairs
    experts = [
        line for line in text.split("\n") if re.search(r" (dot|custom-call)\(", line) and "[8,1024,1024]" in line
    ]
    assert {line for line in experts if line not in kernels} == set()


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_temporaries_are_linear_in_a_sequences_tokens(dispatch):
    """A one-hot tensor of tokens x experts x slots would grow with their square."""
    many = MODEL.replace(num_experts=64, num_experts_per_token=8, expert_mlp_dim=64)
    once, twice = (compiled_mixture((4, n * 8192), dispatch, many).memory_analysis().temp_size_in_bytes for n in (1, 2))
    assert 1.8 < twice / once < 2.1
    assert once < 8 * (4 * 8192 * 8) * WIDTH * 2  # of the rows that experts are given


def compiled_for_tpus(model: ModelConfig, topology: str, dispatch: str) -> str:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
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
@pytest.mark.parametrize(
    ("topology", "dispatch", "op"),
    [("v5e:8x8", "capacity", "all-to-all"), ("v5p:4x4x4", "dropless", "ragged-all-to-all")],
)
def test_on_64_tpus_tokens_travel_and_experts_stay(topology, dispatch, op):
    mixtral = MODEL.replace(num_layers=2, expert_mlp_dim=3584)
    text = compiled_for_tpus(mixtral, topology, dispatch)
    # The groups of `expert`, the innermost axis.
    over_expert = re.findall(r" = (\S+) ([\w-]+)\(.*replica_groups=\{\{0,1,2,3,4,5,6,7\},", text)
    exchanged = [kind for kind, name in over_expert if name.removesuffix("-start") == op]
    assert len(exchanged) >= 6  # out and back, forward, again and backward
    gathered = {kind.split("{")[0] for kind, name in over_expert if name.startswith("all-gather")}
    assert gathered <= {"s32[8,8]"}  # dropless: how many tokens each rank has for each expert
