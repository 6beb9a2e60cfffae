"""Every optimizer on sharded parameters against optax by hand on whole ones: ten steps in float64, to 1e-9."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.audit.hlo import read_collectives, summarize
from jaxpar.config import Config, OptimizerConfig, ParallelConfig, RunConfig
from jaxpar.training import optimizers, setup
from jaxpar.training.optimizers.muon import deal
from models.config import ModelConfig

VOCAB = 250  # padded to 256
MODEL = ModelConfig(
    vocab_size=VOCAB,
    embed_dim=32,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    mlp_dim=48,
    qkv_bias=True,
    qk_norm=True,
)
NUM_STEPS = 10
MATRICES = {
    *(f"blocks.attention.{name}" for name in ("query", "key", "value", "out")),
    *(f"blocks.mlp.{name}" for name in ("gate", "up", "down")),
}
KERNELS = {*MATRICES, "head"}
CONFIGS = {
    "adamw": OptimizerConfig(),
    "adafactor": OptimizerConfig(name="adafactor", schedule="rsqrt"),
    "lion": OptimizerConfig(name="lion", schedule="linear"),
    "sgd": OptimizerConfig(name="sgd", schedule="wsd"),
    "muon": OptimizerConfig(name="muon", schedule="constant"),
    "schedule-free": OptimizerConfig(name="schedule-free", schedule="constant"),
}
CONFIGS = {name: dataclasses.replace(config, warmup_steps=3, weight_decay=0.3) for name, config in CONFIGS.items()}


@functools.cache
def model_on(mesh: str):
    config = Config(model=MODEL, parallel=ParallelConfig(mesh=mesh), run=RunConfig(precision="float64"))
    devices = math.prod(int(item.split("=")[1]) for item in mesh.split(","))
    made = setup.make_mesh(config, jax.devices()[:devices])
    return setup.make_model(config, made), made


def dotted(tree) -> dict:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, tuple))
    }


NAMES = dotted(model_on("data=1")[0].names)


@functools.cache
def whole() -> tuple[dict, list[dict]]:
    """(parameters, gradients of each step) of the true size, by name, on the host."""
    cut = {name: tuple(slice(VOCAB if axis == "vocab" else None) for axis in axes) for name, axes in NAMES.items()}
    params = {name: np.asarray(leaf)[cut[name]] for name, leaf in dotted(model_on("data=1")[0].init(0)).items()}
    rng = np.random.default_rng(0)
    return params, [{name: rng.normal(size=leaf.shape) for name, leaf in params.items()} for _ in range(NUM_STEPS)]


def standard(function):
    def under_standard_promotion(*args):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args)

    return under_standard_promotion


def by_hand(name: str) -> optax.GradientTransformation:
    """optax on whole parameters in a flat dict."""
    c = CONFIGS[name]
    rate = optimizers.schedule(c, NUM_STEPS)
    mask = {name: name in KERNELS for name in NAMES}
    decayed = optax.chain(optax.add_decayed_weights(c.weight_decay, mask), optax.scale_by_learning_rate(rate))
    match name:
        case "adamw":
            return optax.adamw(rate, c.beta1, c.beta2, c.eps, weight_decay=c.weight_decay, mask=mask)
        case "lion":
            return optax.lion(rate, c.beta1, c.beta2, weight_decay=c.weight_decay, mask=mask)
        case "sgd":
            return optax.chain(optax.trace(c.beta1), decayed)
        case "adafactor":
            return optax.chain(adafactor_by_matrix(), decayed)
        case "schedule-free":
            rms = optax.scale_by_rms(c.beta2, c.eps, eps_in_sqrt=False, bias_correction=True)
            return optax.contrib.schedule_free(optax.chain(rms, decayed), rate, c.beta1)
        case "muon":
            matrices = optax.contrib.muon(
                rate,
                beta=c.beta1,
                eps=c.eps,
                weight_decay=c.weight_decay,
                muon_weight_dimension_numbers={name: matrix_of(name) for name in MATRICES},
                consistent_rms=0.2,
            )
            # optax.contrib.muon's own Adam is Nesterov's too
            rest = {name: decays for name, decays in mask.items() if name not in MATRICES}
            adamw = optax.adamw(rate, c.beta1, c.beta2, c.eps, weight_decay=c.weight_decay, mask=rest)
            labels = {name: "muon" if name in MATRICES else "adamw" for name in NAMES}
            return side_by_side({"muon": matrices, "adamw": adamw}, labels)
    raise AssertionError(name)


def side_by_side(
    kinds: dict[str, optax.GradientTransformation], labels: dict[str, str]
) -> optax.GradientTransformation:
    def of(tree: dict, kind: str) -> dict:
        return {name: leaf for name, leaf in tree.items() if labels[name] == kind}

    def init(params):
        return {kind: tx.init(of(params, kind)) for kind, tx in kinds.items()}

    def update(grads, state, params):
        both = {kind: tx.update(of(grads, kind), state[kind], of(params, kind)) for kind, tx in kinds.items()}
        updates = {name: update for updates, _ in both.values() for name, update in updates.items()}
        return {name: updates[name] for name in grads}, {kind: new for kind, (_, new) in both.items()}

    return optax.GradientTransformation(init, update)


def matrix_of(name: str) -> optax.contrib.MuonDimensionNumbers:
    first, *rest = (dim for dim, axis in enumerate(NAMES[name]) if axis != "layers")
    *heads, last = first, *rest
    if NAMES[name][first] == "embed":
        return optax.contrib.MuonDimensionNumbers((first,), tuple(rest))
    return optax.contrib.MuonDimensionNumbers(tuple(heads), (last,))


def adafactor_by_matrix() -> optax.GradientTransformation:
    """optax's Adafactor, each parameter as a stack of matrices or vectors, one at a time."""
    one = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )

    def stacked(name: str, leaf: jax.Array) -> jax.Array:
        num_layers = leaf.shape[0] if NAMES[name][0] == "layers" else 1
        if "embed" not in NAMES[name]:
            return leaf.reshape(num_layers, -1)
        rows = np.prod([leaf.shape[d] for d in matrix_of(name).reduction_axis], dtype=int)
        return leaf.reshape(num_layers, rows, -1)

    def stacks(tree: dict) -> dict:
        return {name: stacked(name, leaf) for name, leaf in tree.items()}

    def init(params):
        return {name: jax.vmap(one.init)(leaf) for name, leaf in stacks(params).items()}

    def update(grads, state, params):
        grads_by, params_by = stacks(grads), stacks(params)
        both = {name: jax.vmap(one.update)(grads_by[name], state[name], params_by[name]) for name in grads}
        updates = {name: update.reshape(grads[name].shape) for name, (update, _) in both.items()}
        return updates, {name: new for name, (_, new) in both.items()}

    return optax.GradientTransformation(init, update)


@functools.cache
def wanted(name: str) -> tuple[dict, dict]:
    """(parameters, parameters to evaluate) after the steps."""
    params, all_grads = whole()
    tx = by_hand(name)
    state = standard(tx.init)(params)

    @jax.jit
    @standard
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in all_grads:
        params, state = step(params, state, grads)
    evaluated = params
    if name == "schedule-free":
        evaluated = optax.contrib.schedule_free_eval_params(state, params)
    return jax.tree.map(np.asarray, (params, evaluated))


def on_mesh(tree: dict, abstract) -> dict:
    """Whole arrays by name, padded and laid out as the abstract parameters are."""

    def place(path, leaf):
        value = tree[jax.tree_util.keystr(path, simple=True, separator=".")]
        padded = np.pad(value, [(0, to - size) for size, to in zip(value.shape, leaf.shape)])
        return jax.device_put(padded.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(place, abstract)


def zero_typed(model, mesh):
    """The model's abstract parameters with their embed dim over `data` too, as ZeRO's updates see them."""

    def typed(leaf, axes):
        parts = [("data", "fsdp") if axis == "embed" else part for axis, part in zip(axes, leaf.sharding.spec)]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*parts)))

    return jax.tree.map(typed, model.abstract, model.names)


def compiled_update(tx: optax.GradientTransformation, abstract, mesh):
    """(update, its state) for abstract parameters; the state's types go in as they come out."""
    abstract_state = optimizers.abstract_state(tx, abstract, mesh)

    @standard
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        init = jax.jit(tx.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state))
        return init, jax.jit(step).lower(abstract, abstract_state, abstract).compile()


def is_quick(name: str, mesh: str) -> bool:
    """Optimizers that take each element by itself are quick on the meshes that cut by two axes."""
    return name in ("adafactor", "muon") or "," in mesh


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if is_quick(name, mesh) else pytest.mark.slow)
        for name, mesh in itertools.product(CONFIGS, ["fsdp=4", "tensor=2", "fsdp=4,tensor=2", "data=4,fsdp=2"])
    ],
)
def test_sharded_is_optax_on_one_device(name, mesh):
    model, made = model_on(mesh)
    abstract = zero_typed(model, made) if "data" in mesh else model.abstract
    params, all_grads = whole()
    params = on_mesh(params, abstract)
    tx = optimizers.make(CONFIGS[name], NUM_STEPS, model.names, VOCAB)
    init, step = compiled_update(tx, abstract, made)
    with jax.set_mesh(made):
        state = init(params)
        types = jax.tree.map(jax.typeof, (params, state))
        for grads in all_grads:
            params, state = step(params, state, on_mesh(grads, abstract))
        assert jax.tree.map(jax.typeof, (params, state)) == types
        evaluated = optimizers.evaluation_params(state, params)
        assert jax.tree.map(jax.typeof, evaluated) == types[0]
    start = whole()[0]
    for got, want in zip((params, evaluated), wanted(name)):
        for path, leaf in dotted(got).items():
            value = np.asarray(leaf)
            true = value[tuple(slice(size) for size in want[path].shape)]
            moved = np.abs(want[path] - start[path]).max()
            assert moved > 1e-5, path
            assert np.abs(true - want[path]).max() <= 1e-9 * moved, path
            assert np.count_nonzero(value) == np.count_nonzero(true), path  # padding stays zero


def test_muon_moves_shards_and_gathers_no_stack():
    """Layers that fsdp divides are dealt out: four all-to-alls' worth of bytes, and only scalars besides."""
    model, mesh = model_on("fsdp=4")
    _, step = compiled_update(optimizers.make(CONFIGS["muon"], NUM_STEPS, model.names, VOCAB), model.abstract, mesh)
    traffic = summarize(read_collectives(step.as_text(), mesh.shape))
    shards = sum(math.prod(leaf.shape) // 4 * 8 for name, leaf in dotted(model.abstract).items() if name in MATRICES)
    assert {axes: set(ops) for axes, ops in traffic.items()} == {"fsdp": {"all-to-all"}}
    assert traffic["fsdp"]["all-to-all"]["bytes"] == 2 * shards


@pytest.mark.parametrize(
    ("shape", "spec", "sizes", "specs"),
    [
        # embed and mlp move to the layers, one axis at a time
        (
            (8, 32, 48),
            P(None, "fsdp", "tensor"),
            (1, 4, 2),
            [P(None, "fsdp", "tensor"), P("tensor", "fsdp"), P(("tensor", "fsdp"))],
        ),
        # six layers divide by tensor only: fsdp goes to the longer side
        (
            (6, 32, 48),
            P(None, "fsdp", "tensor"),
            (1, 4, 2),
            [P(None, "fsdp", "tensor"), P("tensor", "fsdp"), P("tensor", None, "fsdp")],
        ),
        # copies over data share the work
        ((8, 32, 48), P(None, "fsdp"), (2, 4, 1), [P(None, "fsdp"), P("fsdp"), P(("fsdp", "data"))]),
        # three layers by four ranks, and three by a shorter side of 32: copies
        ((4, 32, 48), P(None, None, "tensor"), (1, 1, 3), [P(None, None, "tensor"), P()]),
    ],
)
def test_how_muon_deals_matrices_out(shape, spec, sizes, specs):
    mesh = dict(zip(("data", "fsdp", "tensor"), sizes))
    dealt = deal(shape, 1, spec, mesh, 2, 1)

    def parts(spec):
        tuples = [part if isinstance(part, tuple) else (part,) if part else () for part in spec.partitions]
        return [*tuples, *[()] * (len(shape) - len(tuples))]

    assert [parts(spec) for spec in dealt] == [parts(spec) for spec in specs]


PEAK, FINAL, WARMUP, STEPS = 3e-3, 3e-4, 20, 200


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cosine", {65: FINAL + (PEAK - FINAL) * (1 + 0.5**0.5) / 2, 110: (PEAK + FINAL) / 2, STEPS: FINAL}),
        ("linear", {65: PEAK - (PEAK - FINAL) / 4, STEPS: FINAL, STEPS + 5: FINAL}),
        ("wsd", {160: PEAK, 180: (PEAK + FINAL) / 2, STEPS: FINAL}),
        ("constant", {STEPS: PEAK}),
        ("rsqrt", {80: PEAK / 2, STEPS: PEAK / 10**0.5}),
    ],
)
def test_schedules_at_their_corners(name, values):
    config = OptimizerConfig(schedule=name)
    rate = optimizers.schedule(config, STEPS)
    for step, want in {0: 0.0, 5: PEAK / 4, WARMUP: PEAK, **values}.items():
        np.testing.assert_allclose(float(rate(step)), want, rtol=1e-12, err_msg=f"{name} at {step}")
        np.testing.assert_allclose(float(standard(jax.jit(rate))(jnp.int32(step))), want, rtol=1e-6)
    assert float(optimizers.schedule(dataclasses.replace(config, warmup_steps=0), STEPS)(0)) == PEAK
    # A warm-up longer than the run ends with it.
    short = optimizers.schedule(config, 10)
    np.testing.assert_allclose([float(short(step)) for step in (0, 5, 10)], [0, PEAK / 2, PEAK], rtol=1e-12)
    high = optimizers.schedule(dataclasses.replace(config, final_learning_rate=1.0), STEPS)
    assert float(high(STEPS)) <= PEAK


def one_step(tx: optax.GradientTransformation, names, grad: float = 0.0) -> dict:
    """By name, the update of parameters that are all 1 with gradients that are all `grad`."""
    params = jax.tree.map(lambda axes: jnp.ones([2] * len(axes)), names, is_leaf=lambda node: isinstance(node, tuple))
    grads = jax.tree.map(lambda p: jnp.full_like(p, grad), params)
    updates, _ = standard(tx.update)(grads, standard(tx.init)(params), params)
    return {name: float(update.ravel()[0]) for name, update in dotted(updates).items()}


@pytest.mark.parametrize(
    ("groups", "decaying"),
    [
        ("", KERNELS),
        ("head, embedding", {"head", "embedding"}),
        ("blocks.*norm.scale", {name for name in NAMES if name.startswith("blocks.") and name.endswith("norm.scale")}),
    ],
)
def test_which_parameters_decay(groups, decaying):
    config = OptimizerConfig(schedule="constant", warmup_steps=0, learning_rate=0.5, decay_groups=groups)
    updates = one_step(optimizers.make(config, 1, model_on("data=1")[0].names), model_on("data=1")[0].names)
    assert len(updates) == 17
    assert updates == {name: -0.5 * 0.1 if name in decaying else 0.0 for name in NAMES}


def test_learning_rates_of_groups_take_the_first_match():
    config = OptimizerConfig(name="sgd", schedule="constant", warmup_steps=0, learning_rate=0.5, weight_decay=0.0)
    config = dataclasses.replace(config, learning_rate_groups="blocks.mlp.up=4, blocks.mlp.*=2,head=0")
    names = model_on("data=1")[0].names
    updates = one_step(optimizers.make(config, 1, names), names, grad=1.0)
    special = {"blocks.mlp.up": -2.0, "blocks.mlp.gate": -1.0, "blocks.mlp.down": -1.0, "head": 0.0}
    assert updates == {name: special.get(name, -0.5) for name in NAMES}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"decay_groups": "blocks.mpl.up"},
            r"--optimizer\.decay-groups 'blocks\.mpl\.up' matches no parameter; did you mean 'blocks\.mlp\.up'\?",
        ),
        ({"decay_groups": "head,"}, r"--optimizer\.decay-groups '' matches no parameter; known: blocks\.attention"),
        (
            {"learning_rate_groups": "heads=2"},
            r"learning-rate-groups 'heads' matches no parameter; did you mean 'head'\?",
        ),
        ({"learning_rate_groups": "head"}, r"learning-rate-groups 'head' is not NAME=FACTOR, as in embedding=0\.1"),
        ({"learning_rate_groups": "head=-1"}, r"learning-rate-groups head is -1\.0; it must be at least 0"),
        ({"beta2": 1.0}, r"--optimizer\.beta2 is 1\.0; it must be below 1"),
        ({"ema": 1.0}, r"--ema is 1\.0; it must be below 1"),
        ({"name": "schedule-free", "schedule": "cosine"}, r"the place of --schedule cosine; leave that at auto"),
        ({"name": "schedule-free", "schedule": "constant", "beta1": 0.0}, r"--optimizer\.beta1 is 0\.0; schedule-free"),
        ({"name": "schedule-free", "schedule": "constant", "ema": 0.9}, r"--ema 0\.9 has no use with schedule-free"),
        ({"name": "adafactor", "state_dtype": "bfloat16"}, r"--optimizer-dtype bfloat16 has no use with adafactor"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        optimizers.make(OptimizerConfig(**settings), 10, model_on("data=1")[0].names, VOCAB)
    assert "\n" not in str(error.value)


def test_moments_in_bfloat16_are_computed_in_float32():
    names = {"head": ("embed", "vocab")}
    config = OptimizerConfig(state_dtype="bfloat16", schedule="constant", warmup_steps=0, weight_decay=0.0)
    tx = optimizers.make(config, 10, names)
    rng = np.random.default_rng(1)
    params = {"head": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)}
    state = tx.init(params)
    mu = nu = np.zeros((4, 8), np.float32)
    for step in range(1, 4):
        g = rng.normal(size=(4, 8)).astype(np.float32)
        updates, state = standard(tx.update)({"head": jnp.asarray(g)}, state, params)
        mu, nu = 0.9 * mu + 0.1 * g, 0.95 * nu + 0.05 * g * g
        want = -3e-3 * (mu / (1 - 0.9**step)) / (np.sqrt(nu / (1 - 0.95**step)) + 1e-8)
        np.testing.assert_allclose(updates["head"], want, rtol=1e-5)
        for moment, value in ((state[0].mu, mu), (state[0].nu, nu)):
            assert moment["head"].dtype == jnp.bfloat16
            np.testing.assert_allclose(moment["head"].astype(jnp.float32), value, rtol=2**-8)
        mu, nu = (np.asarray(m["head"].astype(jnp.float32)) for m in (state[0].mu, state[0].nu))
    with pytest.raises(ValueError, match=r"a beta of 0\.999 is above 0\.996.*set --optimizer-dtype float32"):
        optimizers.make(dataclasses.replace(config, beta2=0.999), 10, names).init(params)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_in_bfloat16(name):
    """Updates come in float32, to be rounded once; moments are the parameters' own, averages of them in float32."""
    model, mesh = model_on("fsdp=4,tensor=2")
    ema = 0.0 if name == "schedule-free" else 0.99
    tx = optimizers.make(dataclasses.replace(CONFIGS[name], ema=ema), NUM_STEPS, model.names, VOCAB)
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding), model.abstract
    )
    if name == "schedule-free":
        with pytest.raises(ValueError, match="set --params-dtype auto"):
            optimizers.abstract_state(tx, abstract, mesh)
        return
    state = optimizers.abstract_state(tx, abstract, mesh)
    with jax.set_mesh(mesh):
        updates, new = jax.eval_shape(standard(tx.update), abstract, state, abstract)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(new)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)
    ]
    arrays = {leaf.dtype for leaf in jax.tree.leaves(state[0]) if leaf.ndim}
    assert arrays == {jnp.dtype("float32") if name == "adafactor" else jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state[-1].params)} == {jnp.dtype("float32")}


def test_average_of_parameters():
    model, mesh = model_on("fsdp=4,tensor=2")
    tx = optimizers.make(dataclasses.replace(CONFIGS["adamw"], ema=0.9), NUM_STEPS, model.names)
    start, all_grads = whole()
    average = start
    params = on_mesh(start, model.abstract)
    init, step = compiled_update(tx, model.abstract, mesh)
    with jax.set_mesh(mesh):
        state = init(params)
        for grads in all_grads:
            params, state = step(params, state, on_mesh(grads, model.abstract))
            now = dotted(params)
            average = {
                name: 0.9 * value + 0.1 * np.asarray(now[name])[tuple(map(slice, value.shape))]
                for name, value in average.items()
            }
        evaluated = dotted(optimizers.evaluation_params(state, params))
    for name, value in average.items():
        np.testing.assert_allclose(np.asarray(evaluated[name])[tuple(map(slice, value.shape))], value, atol=1e-12)
        assert np.abs(value - np.asarray(now[name])[tuple(map(slice, value.shape))]).max() > 1e-4
    for name, leaf in dotted(model.abstract).items():
        assert evaluated[name].sharding == leaf.sharding


@pytest.mark.parametrize("name", CONFIGS)
def test_true_shapes_differ_by_the_vocabulary_alone(name):
    model, mesh = model_on("fsdp=4,tensor=2")
    tx = optimizers.make(CONFIGS[name], NUM_STEPS, model.names, VOCAB)
    true_params = jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(
            tuple(VOCAB if axis == "vocab" else size for axis, size in zip(axes, leaf.shape)), leaf.dtype
        ),
        model.abstract,
        model.names,
    )
    true, padded = optimizers.true_shapes(tx, true_params), optimizers.abstract_state(tx, model.abstract, mesh)
    assert jax.tree.structure(true) == jax.tree.structure(padded)
    pairs = [(a.shape, b.shape) for a, b in zip(jax.tree.leaves(true), jax.tree.leaves(padded))]
    assert all(a == tuple(VOCAB if size == 256 else size for size in b) for a, b in pairs)
    assert any(a != b for a, b in pairs)
