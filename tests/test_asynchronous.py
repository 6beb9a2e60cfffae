"""Asynchronous pipelines: weights, optimizer state and losses are those of a simulation of the delayed updates, which
has every version of all weights and no pipeline."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_ladder import MODELS, num_devices
from test_pipeline import functions, toy

from jaxpar import verify
from jaxpar.audit import hlo_text
from jaxpar.config import Config, DataConfig, OptimizerConfig, ParallelConfig, RunConfig
from jaxpar.parallel.pipeline import asynchronous
from jaxpar.parallel.pipeline.asynchronous import Parts, Versions
from jaxpar.parallel.pipeline.kinds import make, weight_versions
from jaxpar.training import optimizers, setup
from jaxpar.training.optimizers.groups import decay_mask
from jaxpar.training.step import init_state, make_step
from jaxpar.verify import gradient_errors, true_sizes
from meshes import build_mesh, parse_mesh


def read_at(kind: str, num_stages: int, update: int) -> list[int]:
    """The version of each stage's weights at which an update's gradient is taken, as the papers' formulas say."""
    if kind == "pipedream":
        return [max(0, update - num_stages + 1 + stage) for stage in range(num_stages)]
    return [max(0, update - 1)] * num_stages


def mixed(history, versions, num_layers: int, parts_of):
    """Weights of several versions: the embedding of the first stage's, the head of the last one's. `parts_of` takes
    weights apart into (first, layers, last)."""
    first, last = parts_of(history[versions[0]])[0], parts_of(history[versions[-1]])[2]
    size = num_layers // len(versions)

    def rows(*leaves):
        return jnp.concatenate([leaf[s * size : (s + 1) * size] for s, leaf in enumerate(leaves)])

    return {**first, **jax.tree.map(rows, *(parts_of(history[version])[1] for version in versions)), **last}


# The algorithm, with a model of a few linear layers and an optimizer with momentum.


def descend(weights, velocity, gradients):
    velocity = jax.tree.map(lambda v, g: 0.5 * v + g, velocity, gradients)
    return jax.tree.map(lambda w, v: w - 0.02 * v, weights, velocity), velocity


def toy_parts(weights):
    return Parts(*({name: weights[name]} for name in ("table", "layers", "head")))


def toy_by_pipeline(schedule, weights, batch, shares):
    mesh = build_mesh(f"pipe={schedule.num_stages}", "", jax.devices()[: schedule.num_stages])
    pieces = functions()

    def stage(own, x, **where):
        return pieces.stage(own["layers"], x, **where)

    def local(weights, batch):
        velocity = jax.tree.map(jnp.zeros_like, weights)
        loss, told, weights, velocity = asynchronous.run(
            schedule,
            dataclasses.replace(pieces, stage=stage),
            Parts(descend, descend, descend),
            toy_parts(weights),
            toy_parts(velocity),
            batch,
            shares,
            fill=jnp.nan,
        )
        return loss, told["squares"], *({**a, **b, **c} for a, b, c in (weights, velocity))

    specs = {"table": P(), "layers": P("pipe"), "head": P()}
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in weights.items()}
        run = jax.shard_map(local, in_specs=(specs, P()), out_specs=(P(), P("pipe"), specs, specs), check_vma=False)
        return jax.device_get(jax.jit(run)(placed, batch))


def toy_by_simulation(kind, num_stages, sizes, weights, batch, shares):
    pieces = functions()

    @jax.jit
    def gradient(weights, microbatch):
        def loss(weights):
            x = pieces.embed(weights, microbatch)
            x, added, told = pieces.stage(weights["layers"], x, microbatch, part=0)
            minimised, reported = pieces.head(weights, x, microbatch)
            return minimised + added, (reported, told["squares"])

        return jax.grad(loss, has_aux=True)(weights)

    history, velocity = [weights], jax.tree.map(jnp.zeros_like, weights)
    total, squares, done = 0.0, 0.0, 0
    for update, size in enumerate(sizes):
        at = mixed(history, read_at(kind, num_stages, update), len(weights["layers"]), toy_parts)
        gradients = jax.tree.map(jnp.zeros_like, weights)
        for m in range(done, done + size):
            addend, (reported, told) = gradient(at, jax.tree.map(lambda x, m=m: x[m], batch))
            gradients = jax.tree.map(jnp.add, gradients, addend)
            total, squares = total + shares[m] * reported, squares + shares[m] * told
        done += size
        new, velocity = descend(history[-1], velocity, gradients)
        history.append(new)
    return total, squares, history[-1], velocity


@pytest.mark.parametrize(
    ("kind", "stages", "sizes"),
    [
        ("pipedream", 1, [1, 1, 1]),
        ("pipedream", 2, [1]),
        ("pipedream", 4, [1]),
        ("pipedream", 4, [1, 1]),
        ("pipedream", 2, [1] * 10),
        ("pipedream", 4, [1] * 4),
        ("pipedream", 4, [1] * 10),
        ("pipedream-2bw", 1, [1, 1, 1]),
        ("pipedream-2bw", 2, [1]),
        ("pipedream-2bw", 4, [2]),
        ("pipedream-2bw", 2, [2] * 5),
        ("pipedream-2bw", 4, [4]),
        ("pipedream-2bw", 4, [5, 5]),
        ("pipedream-2bw", 4, [5, 5, 4]),
    ],
)
def test_delayed_updates_with_nan_in_what_holds_nothing(kind, stages, sizes):
    """Microbatches fewer than, as many as, more than the stages, and no multiple of them."""
    num_microbatches = sum(sizes)
    ends, layers, batch = toy(2 * stages, num_microbatches)
    weights = {**ends, "layers": 0.7 * layers}
    shares = np.random.default_rng(1).random(num_microbatches)
    schedule = make(kind, stages, num_microbatches)
    got = toy_by_pipeline(schedule, weights, batch, jnp.asarray(shares))
    want = toy_by_simulation(kind, stages, sizes, weights, batch, shares)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = np.asarray(b)
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max())
    assert all(np.abs(want[2][name] - weights[name]).max() > 1e-4 for name in weights)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 20])
def test_versions_kept_are_those_of_the_papers(stages, microbatches):
    kept = Versions.of(make("pipedream", stages, microbatches)).num_kept
    assert kept == Parts(1, max(weight_versions(make("pipedream", stages, microbatches))), 1)
    buffers = Versions.of(make("pipedream-2bw", stages, microbatches))
    assert set(buffers.num_kept) == {1 if buffers.num_updates == 1 else 2}
    assert all(
        size >= min(stages, microbatches)
        for size in np.bincount(asynchronous.updates_of(make("pipedream-2bw", stages, microbatches)))
    )


# A Transformer's train step.

ZERO_BY_MATHEMATICS = "blocks.attention.key_bias"
"""Its gradient: a softmax is the same when all of its inputs move."""


def config(mesh: str, model: str = "tiny", optimizer: str = "adamw", microbatches: int = 4, **parallel) -> Config:
    return Config(
        model=MODELS[model.removesuffix("-untied")].replace(num_layers=4, tie_embeddings=False),
        data=DataConfig(batch_size=4 * microbatches, seq_len=16),
        optimizer=OptimizerConfig(
            name=optimizer,
            clip_norm=0.0,
            warmup_steps=0,
            learning_rate=1e-2,
            decay_groups="blocks.*,head,embedding",
            ema=0.5 if optimizer == "sgd" else 0.0,
        ),
        parallel=ParallelConfig(mesh=mesh, grad_accumulation=microbatches, **parallel),
        run=RunConfig(precision="float64", steps=4),
    )


def by_training(asked: Config, batches):
    """(parameters, moments and the parameters' average, counts, losses and gradient norms), on the host."""
    mesh = setup.make_mesh(asked, jax.devices()[: num_devices(asked.parallel.mesh)])
    model = setup.make_model(asked, mesh)
    tx = optimizers.make(asked.optimizer, asked.run.steps, model.names)
    curve = []
    with jax.set_mesh(mesh):
        state = init_state(model, tx, seed=0)
        types = jax.tree.map(jax.typeof, state)
        step = jax.jit(make_step(model, tx, asked.optimizer.clip_norm, log_norms=True))
        for batch in batches:
            placed = jax.device_put(batch, model.layout.sharding(model.layout.stacked_batch_spec()))
            state, metrics = step(state, placed)
            of_grads = [float(grad) for _, grad in metrics.norms.values()]
            np.testing.assert_allclose(metrics.grad_norm, np.sqrt(np.sum(np.square(of_grads))))
            curve += [float(metrics.loss), float(metrics.grad_norm)]
        assert jax.tree.map(jax.typeof, state) == types
    assert int(state.step) == len(batches)
    kept = moments_of(state.opt_state[0]) | {"average": optimizers.evaluation_params(state.opt_state, state.params)}
    moments = {name: true_sizes(model, tree) for name, tree in kept.items()}
    counts = [int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 0]
    return true_sizes(model, state.params), moments, counts, np.array(curve)


def moments_of(state) -> dict:
    return {name: tree for name, tree in state._asdict().items() if isinstance(tree, dict)}


def transformer_parts(params):
    first = {name: params[name] for name in ("embedding", "position_embedding") if name in params}
    last = {name: params[name] for name in ("final_norm", "head")}
    return Parts(first, {"blocks": params["blocks"]}, last)


def by_simulation(asked: Config, num_stages: int, sizes, batches):
    model = setup.make_model(asked, None)
    settings = asked.optimizer
    moments = {
        "adamw": optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps),
        "sgd": optax.trace(settings.beta1),
        "lion": optax.scale_by_lion(settings.beta1, settings.beta2),
    }[settings.name]
    tx = optax.chain(moments, optax.add_decayed_weights(0.1, decay_mask(settings.decay_groups, model.names)))
    rate = optimizers.schedule(settings, asked.run.steps)
    gradient = jax.jit(jax.grad(lambda *args: (lambda out: (out[0], out[1].loss))(model.loss(*args)), has_aux=True))

    @jax.jit
    def advance(params, state, gradients, rate):
        with jax.numpy_dtype_promotion("standard"):
            changes, state = tx.update(gradients, state, params)
            return jax.tree.map(lambda p, change: p - rate * change, params, changes), state

    params = average = model.init(0)
    state = tx.init(params)
    curve = []
    for number, batch in enumerate(batches):
        history, done, nll, norms = [params], 0, 0.0, []
        for update, size in enumerate(sizes):
            at = mixed(
                history,
                read_at(asked.parallel.pipeline, num_stages, update),
                model.config.num_layers,
                transformer_parts,
            )
            group = jax.tree.map(lambda x, done=done, size=size: x[done : done + size], batch)
            weights = group.loss_weights.astype(np.float64)
            gradients = jax.tree.map(jnp.zeros_like, params)
            for m in range(size):
                one = jax.tree.map(lambda x, m=m: x[m], group)
                one = dataclasses.replace(one, loss_weights=weights[m] / max(weights.sum(), 1.0))
                addend, loss = gradient(at, one)
                gradients = jax.tree.map(jnp.add, gradients, addend)
                nll += float(loss) * weights.sum()
            norms.append(float(optax.tree.norm(gradients)))
            params, state = advance(history[-1], state, gradients, rate(number))
            average = jax.tree.map(lambda a, p: settings.ema * a + (1 - settings.ema) * p, average, params)
            history.append(params)
            done += size
        curve += [nll / batch.loss_weights.sum(), np.sqrt(np.mean(np.square(norms)))]
    kept = moments_of(state[0]) | {"average": average}
    return true_sizes(model, params), {name: true_sizes(model, tree) for name, tree in kept.items()}, np.array(curve)


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        (config("pipe=2,fsdp=2", pipeline="pipedream", microbatches=10), [1] * 10),
        (config("data=2,pipe=2,tensor=2", "gpt2-untied", "sgd", 5, pipeline="pipedream-2bw"), [3, 2]),
        pytest.param(config("pipe=1,fsdp=2,context=2", pipeline="pipedream"), [1] * 4, marks=pytest.mark.slow),
        pytest.param(config("pipe=2,data=2", "tiny", "sgd", 1, pipeline="pipedream"), [1], marks=pytest.mark.slow),
        pytest.param(config("pipe=4,tensor=2", "tiny", "lion", pipeline="pipedream"), [1] * 4, marks=pytest.mark.slow),
        pytest.param(
            config("pipe=4,fsdp=2", "qwen-untied", "adamw", 10, pipeline="pipedream-2bw"),
            [5, 5],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            config("pipe=2,context=2,tensor=2", "tiny", "sgd", 4, pipeline="pipedream-2bw"),
            [2, 2],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_that_of_the_delayed_updates(asked, sizes):
    batches = [
        verify.random_batch(dataclasses.replace(asked, run=dataclasses.replace(asked.run, seed=seed)))
        for seed in range(2)
    ]
    num_stages = int(asked.parallel.mesh.partition("pipe=")[2][0])
    params, moments, counts, curve = by_training(asked, batches)
    want_params, want_moments, want_curve = by_simulation(asked, num_stages, sizes, batches)
    model = setup.make_model(asked, None)
    initial = true_sizes(model, model.init(0))
    assert params.keys() == want_params.keys()
    change, want_change = ({n: p[n] - initial[n] for n in initial} for p in (params, want_params))
    for got, want in (change, want_change), *((moments[name], tree) for name, tree in want_moments.items()):
        errors = gradient_errors(got, want)
        assert max(errors.values()) <= 1e-9, max(errors.items(), key=lambda item: item[1])
    assert min(np.abs(want).max() for name, want in want_change.items() if name != ZERO_BY_MATHEMATICS) > 1e-6
    assert moments.keys() == want_moments.keys() != set()
    # Adam counts updates, the learning rate steps.
    assert counts == ([2 * len(sizes)] if asked.optimizer.name != "sgd" else []) + [2]
    assert np.all(want_curve > 0.1)
    np.testing.assert_allclose(curve, want_curve, rtol=1e-9)


def test_a_tick_permutes_outside_of_its_branches():
    """As compiled for GPUs: two permutes, none in a branch, where a stage's updates are."""
    asked = config("pipe=4,data=2", pipeline="pipedream")
    text = verify.compiled_step(asked, parse_mesh("pipe=4,data=2", 8)).as_text()
    module = hlo_text.Module.parse(text)
    ticks = [c for c in module.computations.values() if any(i.opcode == "conditional" for i, _, _ in c.calls)]

    def reached(name: str) -> set[str]:
        return {name}.union(*(reached(callee) for _, _, callee in module.computations[name].calls))

    def count(opcode: str, names: set[str]) -> int:
        collectives = [i.opcode.removesuffix("-start") for name in names for i in module.computations[name].collectives]
        return collectives.count(opcode)

    assert len(ticks) == 1
    branches = {callee for i, _, callee in ticks[0].calls if i.opcode == "conditional"}
    inside = set().union(*map(reached, branches))
    assert count("collective-permute", reached(ticks[0].name)) == 2
    assert count("collective-permute", inside) == 0
    assert count("all-reduce", inside) > 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"optimizer": {"name": "muon"}}, "--optimizer muon cannot; these can: adamw, lion, sgd"),
        ({"optimizer": {"clip_norm": 0.5}}, "--optimizer.clip-norm 0.5 needs the norm of all stages' gradients"),
        ({"parallel": {"zero": 1}}, "--zero 1 keeps one version of the weights, --pipeline pipedream several; take 3"),
        ({"run": {"precision": "float16"}}, "no loss scale for --precision float16; take bfloat16 or float32"),
        ({"run": {"params_dtype": "bfloat16"}}, "leave --params-dtype at auto"),
        ({"parallel": {"spread_head": True}}, "--spread-head does not go with --pipeline pipedream; leave it out"),
        ({"parallel": {"pipeline_residuals": True}}, "--pipeline-residuals does not go with --pipeline pipedream"),
        ({"parallel": {"chunks": 2}}, "pipedream needs exactly 1 chunk per stage, not 2"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(changes, complaint):
    asked = config("pipe=2", pipeline="pipedream")
    for group, settings in changes.items():
        asked = dataclasses.replace(asked, **{group: dataclasses.replace(getattr(asked, group), **settings)})
    with pytest.raises(ValueError, match=r"--|needs") as raised:
        setup.make_model(asked, setup.make_mesh(asked, jax.devices()[:2]))
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tied_embeddings_and_verify_are_refused_in_a_line():
    asked = config("pipe=2", "qwen-untied", pipeline="pipedream-2bw")
    tied = dataclasses.replace(asked, model=MODELS["qwen"].replace(num_layers=4))
    with pytest.raises(ValueError, match=r"ties its embedding to the head.* set --model.no-tie-embeddings$"):
        setup.make_model(tied, setup.make_mesh(asked, jax.devices()[:2]))
    with pytest.raises(ValueError, match=r"^--pipeline pipedream-2bw changes the weights between .* such as 1f1b$"):
        verify.verify(asked, parse_mesh("pipe=2", 2))
