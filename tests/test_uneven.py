"""Layers that a pipeline's parts do not divide: which part has how many, and that empty slots are nothing at all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_ladder import check_same, config, num_devices
from test_pipeline import by_one_device, functions, toy, with_layers

from jaxpar import verify
from jaxpar.audit import hlo_text
from jaxpar.config import Config, OptimizerConfig
from jaxpar.parallel import layers
from jaxpar.parallel.pipeline import executor
from jaxpar.parallel.pipeline.kinds import make
from jaxpar.parallel.pipeline.simulate import simulate
from jaxpar.parallel.pipeline.stack import EMPTY, layer_order, slots_of
from jaxpar.parallel.product import product
from jaxpar.parallel.remat import FULL, Remat
from jaxpar.planning.pipeline import stage_times
from jaxpar.training import optimizers, pipelines, setup
from jaxpar.training.checkpoints import canonical
from jaxpar.training.checkpoints.checkpoint import Checkpoints
from jaxpar.training.precision import round_stochastically
from jaxpar.training.reporting.norms import group_norms
from jaxpar.training.step import TrainState, init_state, make_step
from jaxpar.verify import true_sizes
from meshes import build_mesh, parse_mesh
from models.presets import preset


def with_optimizer(config: Config, **settings) -> Config:
    return dataclasses.replace(config, optimizer=OptimizerConfig(**settings))


def made(asked: Config, on_mesh: bool = True):
    """(mesh, model, optimizer)."""
    mesh = setup.make_mesh(asked, jax.devices()[: num_devices(asked.parallel.mesh)]) if on_mesh else None
    model = setup.make_model(asked, mesh)
    return mesh, model, optimizers.make(asked.optimizer, 20, model.names, model.config.vocab_size)


# Which part has how many ---------------------------------------------------------------------------------------------


def counts(config: Config, num_stages: int) -> tuple[int, ...]:
    return pipelines.layers_per_part(config, pipelines.make_schedule(config, num_stages))


def test_how_many_layers_each_part_has():
    llama = dataclasses.replace(config("tiny"), model=preset("llama3-405b"))
    assert counts(llama, 16) == (7, *[8] * 14, 7)
    assert counts(llama, 14) == (9,) * 14
    # The head is worth most of a layer of this model: what is over goes before it.
    assert counts(with_layers(5, "tiny"), 2) == (3, 2)
    assert counts(with_layers(7, "tiny"), 4) == (2, 2, 2, 1)
    assert counts(with_layers(7, "tiny", layers_per_stage="1, 2,2,2"), 4) == (1, 2, 2, 2)
    assert counts(with_layers(4, "tiny", layers_per_stage="3,1"), 2) == (3, 1)
    # In a V both ends of the model are on the first stage.
    shared = counts(with_layers(10, "tiny", pipeline="zb-v"), 2)
    assert shared[0] + shared[3] == shared[1] + shared[2] == 5


def test_where_layers_lie():
    order = layer_order(make("zb-v", 2, 4), (2, 1, 1, 2))
    assert order.tolist() == [0, 1, 4, 5, 2, EMPTY, 3, EMPTY]
    assert slots_of(order).tolist() == [0, 1, 4, 6, 2, 3]
    assert layer_order(make("interleaved-1f1b", 2, 4, 2), (1, 1, 1, 1)).tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize(("mesh", "parallel"), [("pipe=4", {}), ("pipe=2", {"pipeline": "zb-v"})])
def test_a_small_model_to_verify_is_as_uneven(mesh, parallel):
    asked = dataclasses.replace(config("tiny", mesh, **parallel), model=preset("llama3-405b").replace(num_layers=78))
    sizes = parse_mesh(mesh, num_devices(mesh))
    small = verify.small(asked, sizes, scale=1)
    large, few = counts(asked, sizes["pipe"]), counts(small, sizes["pipe"])
    assert sum(few) == small.model.num_layers < 13
    assert np.diff(large).tolist() == np.diff(few).tolist()
    assert np.any(np.diff(few))


def test_auto_goes_by_the_stages_own_times():
    """The table that is searched for is no slower than those that are known, and within its limit."""
    asked = dataclasses.replace(config("tiny", pipeline="auto", grad_accumulation=8), model=preset("gpt2"))
    work = stage_times(asked.model, asked.data.seq_len, (4, 4, 4), FULL)
    assert isinstance(work.forward, list)
    assert work.forward[2] > work.forward[1] == work.forward[0] > 0
    assert work.backward[0] > work.backward[1] == work.backward[2] > work.weight[1]
    found = simulate(pipelines.make_schedule(asked, 3), work)
    known = [simulate(make(kind, 3, 8), work).cost for kind in ("1f1b", "gpipe", "zb-h1", "zb-h2")]
    assert found.cost <= min(known)
    limited = dataclasses.replace(asked.parallel, pipeline_memory_limit=2.0)
    tight = simulate(pipelines.make_schedule(dataclasses.replace(asked, parallel=limited), 3), work)
    assert max(tight.peak_memory) <= 2 < max(found.peak_memory)
    mesh = setup.make_mesh(
        dataclasses.replace(asked, parallel=dataclasses.replace(limited, mesh="pipe=3")), jax.devices()[:3]
    )
    assert setup.make_model(dataclasses.replace(asked, model=asked.model.replace(vocab_size=256)), mesh).layout.schedule


# The same numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "mesh", "parallel"),
    [
        (5, "pipe=2,fsdp=2", {"pipeline": "zb-h1", "grad_accumulation": 2, "zero": 1}),
        (7, "pipe=4,fsdp=2", {"pipeline": "1f1b", "grad_accumulation": 4}),
        (6, "pipe=2", {"pipeline": "zb-v", "grad_accumulation": 4}),
        pytest.param(
            5, "pipe=2,fsdp=2", {"pipeline": "auto", "grad_accumulation": 4, "remat": "dots"}, marks=pytest.mark.slow
        ),
        pytest.param(
            5,
            "pipe=2,tensor=2",
            {"pipeline": "1f1b", "grad_accumulation": 2, "remat": "every=2"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            5,
            "pipe=2,context=2",
            {"pipeline": "zb-h2", "grad_accumulation": 2, "remat": "none"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4, "data=2,pipe=2", {"layers_per_stage": "3,1", "reshard_after_forward": False}, marks=pytest.mark.slow
        ),
    ],
)
def test_training_is_that_of_one_device(num_layers, mesh, parallel):
    check_same(with_layers(num_layers, "tiny", mesh, **parallel), with_layers(num_layers, "tiny"), 1e-9)


SETTINGS = {
    "adamw": {"ema": 0.9},
    "lion": {},
    "sgd": {},
    "adafactor": {"ema": 0.5},
    "muon": {},
    "schedule-free": {},
}


@pytest.mark.parametrize(
    "name",
    # Lion and SGD take each element by itself, as AdamW does.
    [pytest.param(name, marks=pytest.mark.slow if name in ("lion", "sgd") else ()) for name in SETTINGS],
)
def test_no_optimizer_sees_empty_slots(name):
    """Four updates by made-up gradients of the layers are those without a mesh; what belongs to no layer stays zero,
    but for the floor under Adafactor's squares, which multiplies zeros."""
    settings = {"name": name, "weight_decay": 0.1, "learning_rate": 0.05, "warmup_steps": 0, **SETTINGS[name]}
    asked = with_optimizer(with_layers(5, "tiny", "pipe=2,fsdp=2"), **settings)
    asked = dataclasses.replace(asked, model=asked.model.replace(vocab_size=256))  # without padding
    outcomes = []
    for on_mesh in (True, False):
        mesh, model, tx = made(asked, on_mesh)
        order = model.layout.layer_order(5)
        with jax.set_mesh(mesh) if mesh is not None else jax.default_device(jax.devices()[0]):
            params = model.init(0)
            opt_state = jax.jit(tx.init)(params)

            def gradient(param, names, order=order):
                """Of each element's own, by its layer; zero where there is none."""
                grad = jnp.cos(40 * param)
                if names[0] != "layers":
                    return grad
                which = jnp.asarray(order + 1, param.dtype).reshape(-1, *[1] * (param.ndim - 1))
                return grad * which

            @jax.jit
            def update(params, opt_state, model=model, tx=tx, gradient=gradient):
                grads = jax.tree.map(gradient, params, model.names)
                norms = group_norms(params), group_norms(grads), optax.tree.norm(grads)
                with jax.numpy_dtype_promotion("standard"):
                    updates, opt_state = tx.update(grads, opt_state, params)
                    return optax.apply_updates(params, updates), opt_state, norms

            start = true_sizes(model, params)
            for _ in range(4):
                params, opt_state, norms = update(params, opt_state)
            moved = true_sizes(model, params)
            averaged = true_sizes(model, jax.jit(optimizers.evaluation_params)(opt_state, params))
            assert all(np.abs(moved[path] - start[path]).max() > 1e-5 for path in start)
            outcomes.append((moved, averaged, norms))
        if on_mesh:
            held = canonical.flat(TrainState(jnp.int32(4), params, opt_state))
            forms = canonical.forms(model, tx)
            stacked = {path: np.asarray(held[path]) for path, form in forms.items() if form.order is not None}
            assert len(stacked) >= 2 * 9  # parameters and their moments
            floor = 1e-29 if name == "adafactor" else 0.0
            for path, leaf in stacked.items():
                limit = floor if ".second." in path else 0.0
                assert np.abs(leaf[order == EMPTY]).max() <= limit < np.abs(leaf[order != EMPTY]).max(), path
    for got, want in zip(jax.tree.leaves(outcomes[0]), jax.tree.leaves(outcomes[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_rounding_leaves_empty_slots_zero():
    asked = with_layers(5, "tiny", "pipe=2,fsdp=2")
    asked = dataclasses.replace(asked, run=dataclasses.replace(asked.run, precision="float32"))
    mesh, model, _ = made(asked)
    order = model.layout.layer_order(5)
    with jax.set_mesh(mesh):
        blocks = model.init(0)["blocks"]
        short = jax.jit(lambda p: round_stochastically(p, jnp.dtype("bfloat16"), jnp.int32(3)))(blocks)
    for leaf in jax.tree.leaves(short):
        assert leaf.dtype == jnp.bfloat16
        rounded = np.asarray(leaf, np.float32)
        assert not rounded[order == EMPTY].any()
        assert rounded[order != EMPTY].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_training_with_other_optimizers(name):
    def losses(asked: Config, on_mesh: bool) -> list[float]:
        mesh, model, tx = made(asked, on_mesh)
        with jax.set_mesh(mesh) if mesh is not None else jax.default_device(jax.devices()[0]):
            state = init_state(model, tx, seed=0)
            sharding = model.layout.sharding(model.layout.stacked_batch_spec())
            batch = jax.device_put(verify.random_batch(asked), sharding)
            step = jax.jit(make_step(model, tx, asked.optimizer.clip_norm))
            found = []
            for _ in range(4):
                state, metrics = step(state, batch)
                found += [float(metrics.loss), float(metrics.grad_norm)]
        return found

    asked = with_optimizer(with_layers(5, "tiny", "pipe=2,fsdp=2", grad_accumulation=2), name=name, warmup_steps=0)
    np.testing.assert_allclose(losses(asked, True), losses(asked, False), rtol=1e-9)


# Empty slots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layers_per_part"), [("1f1b", (2, 3, 1, 2)), ("zb-h1", (1, 1, 2, 1)), ("zb-v", (1, 2, 1, 2))]
)
def test_nothing_comes_out_of_an_empty_slot(kind, layers_per_part):
    """NaN in the slots' weights as in the buffers; their gradients are zero."""
    num_stages = 4 if kind != "zb-v" else 2
    schedule = make(kind, num_stages, 6)
    parts, (ends, weights, batch) = functions(), toy(sum(layers_per_part), 6)

    def stage(layers_of, x, microbatch, part):
        def layer(weight, x):
            x = jnp.sin(product("rd,de->re", x, weight))
            return x, jnp.sum(microbatch["weights"][:, None] * jnp.square(x))

        count = jnp.asarray(layers_per_part, jnp.int32)[part]
        x, told = layers.scan(layer, layers_of, x, remat=FULL, regather=True, count=count)
        return x, jnp.sum(told), {"squares": told}

    padded = dataclasses.replace(parts, stage=stage)
    order = layer_order(schedule, layers_per_part)
    stack = np.where((order == EMPTY)[:, None, None], np.nan, weights[order])

    def local(ends, stack, batch):
        loss, told, by_ends, by_layers = executor.run(schedule, padded, ends, stack, batch, fill=np.nan)
        return loss, jax.tree.map(lambda g: jax.lax.psum(g, "pipe"), by_ends), told["squares"], by_layers

    mesh = build_mesh(f"pipe={num_stages}", "", jax.devices()[:num_stages])
    with jax.set_mesh(mesh):
        placed = jax.device_put(stack, NamedSharding(mesh, P("pipe")))
        specs = (P(), P("pipe"), P()), (P(), P(), P("pipe"), P("pipe"))
        run = jax.shard_map(local, in_specs=specs[0], out_specs=specs[1], check_vma=False)
        loss, by_ends, *by_slots = jax.device_get(jax.jit(run)(ends, placed, batch))
    assert all(np.all(each[order == EMPTY] == 0) for each in by_slots)
    got = loss, by_ends, *(each[slots_of(order)] for each in by_slots)
    want = by_one_device(ends, weights, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max())


@pytest.mark.parametrize("remat", ["full", "none", "every=2", "every=3", "every=4"])
def test_an_empty_slot_is_skipped(remat):
    """Not computed and dropped: the blocks that run are counted, forward and again in the backward pass."""
    runs = []

    def block(weight, x):
        jax.debug.callback(lambda: runs.append(None))
        return jnp.sin(x * weight), jnp.sum(x)

    weights = jnp.linspace(1.0, 2.0, 5)

    def loss(weights, count, remat):
        return jnp.sum(layers.scan(block, weights, jnp.ones(3), remat=remat, regather=True, count=count)[0])

    again = Remat.parse(remat, 5)
    jax.block_until_ready(jax.jit(loss, static_argnums=2)(weights, jnp.int32(3), again))
    jax.effects_barrier()
    assert len(runs) == 3
    by_slots = jax.jit(jax.grad(loss), static_argnums=2)(weights, jnp.int32(3), again)
    np.testing.assert_allclose(by_slots[:3], jax.grad(loss)(weights[:3], None, FULL), rtol=1e-12)
    assert not np.any(by_slots[3:])


def test_equal_parts_have_no_conditional():
    def conditionals(num_layers: int) -> int:
        model = made(with_layers(num_layers, "tiny", "pipe=2"))[1]

        def stack(weights, x):
            return model.layout.layers(lambda weight, x: (x * weight, {}), weights, x, jnp.int32(1))

        return str(jax.make_jaxpr(stack)(jnp.ones(2), jnp.ones(3))).count("cond")

    assert (conditionals(4), conditionals(3)) == (0, 1)


def test_a_skipped_layer_as_compiled_for_gpus():
    """A branch holds a layer's collectives within its stage, and no permute."""
    asked = with_layers(3, "tiny", pipeline="1f1b", grad_accumulation=2, reshard_after_forward="always")
    module = hlo_text.Module.parse(verify.compiled_step(asked, parse_mesh("pipe=2,fsdp=2", 4)).as_text())

    def reached(name: str) -> set[str]:
        return {name}.union(*(reached(callee) for _, _, callee in module.computations[name].calls))

    taken = [
        collective.opcode.removesuffix("-start")
        for computation in module.computations.values()
        for instruction, _, branch in computation.calls
        if instruction.opcode == "conditional"
        for name in reached(branch)
        for collective in module.computations[name].collectives
    ]
    assert "all-gather" in taken
    assert "collective-permute" not in taken


# Stored --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adafactor", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_checkpoint_knows_no_slots(tmp_path, optimizer):
    """Of 7 layers on 4 stages, read on 2 with chunks in a V, under ZeRO-1, and by no pipeline; and back."""

    def on(mesh: str, **parallel):
        asked = with_optimizer(with_layers(7, "tiny", mesh, **parallel), name=optimizer)
        mesh, model, tx = made(asked)
        return mesh, model, tx, Checkpoints(tmp_path, model, tx, asked)

    def in_order(model, tx, state) -> dict[str, np.ndarray]:
        """Each array of a state, layers in order."""
        order = model.layout.layer_order(7)
        held = canonical.flat(dataclasses.replace(state, whole=None))
        forms = canonical.forms(model, tx)
        cut = {path: np.asarray(leaf) for path, leaf in held.items()}
        cut |= {path: cut[path][slots_of(order)] for path, form in forms.items() if form.order is not None}
        return cut

    def marked(leaf, form):
        """A stack with its layer in each element."""
        if form.order is None:
            return leaf
        layers = jnp.where(form.order == EMPTY, 0, form.order + 1).astype(leaf.dtype)
        layers = jnp.broadcast_to(layers.reshape(-1, *[1] * (leaf.ndim - 1)), leaf.shape)
        return leaf + jax.device_put(layers, leaf.sharding)

    mesh, model, tx, checkpoints = on("pipe=4,fsdp=2")
    with jax.set_mesh(mesh), checkpoints:
        state = init_state(model, tx, seed=0)
        forms = canonical.forms(model, tx)
        leaves = [marked(leaf, form) for leaf, form in zip(jax.tree.leaves(state), forms.values(), strict=True)]
        state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        want = in_order(model, tx, state)
        checkpoints.save(state)
        checkpoints.wait()
    assert sum(form.shape[:1] == (7,) for form in forms.values()) > 2 * 9
    for name, parallel in (
        ("pipe=2,fsdp=2", {"pipeline": "zb-v", "layers_per_stage": "1,3,2,1", "zero": 1}),
        ("fsdp=2", {}),
        ("pipe=4,fsdp=2", {}),
    ):
        mesh, model, tx, checkpoints = on(name, **parallel)
        with jax.set_mesh(mesh), checkpoints:
            restored = checkpoints.restore(0)
        got = in_order(model, tx, restored)
        assert got.keys() == want.keys()
        for path, value in want.items():
            np.testing.assert_array_equal(got[path], value, err_msg=f"{name} {path}")
        empty = model.layout.layer_order(7) == EMPTY
        for path, form in canonical.forms(model, tx).items():
            leaf = canonical.flat(dataclasses.replace(restored, whole=None))[path]
            assert leaf.sharding.is_equivalent_to(form.here.sharding, leaf.ndim), path
            if form.order is not None:
                assert not np.asarray(leaf)[empty].any(), path
