"""Mixtures of experts on one device: against every expert on every token, against rules by hand, against papers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.noise import mixed
from jaxpar.parallel import expert
from jaxpar.parallel.batch import Routing
from jaxpar.parallel.expert import ExpertStrategy
from jaxpar.parallel.layout import Layout
from models.config import ModelConfig
from models.moe import Moe, figures
from models.presets import preset

BATCH, SEQ, EMBED = 2, 12, 8


def config(num_experts: int, per_token: int, **changes) -> ModelConfig:
    return ModelConfig(
        embed_dim=EMBED, num_experts=num_experts, num_experts_per_token=per_token, expert_mlp_dim=4, init_std=0.5,
        **changes,
    ).check()  # fmt: skip


def layout(**dispatch) -> Layout:
    return dataclasses.replace(Layout.single(jnp.dtype("float64")), dispatch=ExpertStrategy(**dispatch))


def moe(config: ModelConfig, seed: int = 0) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(Moe(config, nnx.Rngs(params=jax.random.key(seed)), jnp.dtype("float64")))


def inputs(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, SEQ, EMBED)))


ROUTING = Routing(jnp.full((BATCH, SEQ), 1 / (BATCH * SEQ), jnp.float64))


def through(graph: nnx.GraphDef, layout: Layout, routing: Routing | None = None):
    return lambda state, x: nnx.merge(graph, state)(x, routing, layout)


def dense(graph: nnx.GraphDef):
    """Every expert on every token, weighted."""

    def apply(state: nnx.State, x: jax.Array) -> jax.Array:
        module = nnx.merge(graph, state)
        weights, ids = module._choose(jnp.einsum("bsd,de->bse", x, module.router[...]))
        gates = jnp.sum(weights[..., None] * jax.nn.one_hot(ids, module.config.num_experts, dtype=x.dtype), axis=-2)
        hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, module.gate[...]))
        hidden = hidden * jnp.einsum("bsd,edf->bsef", x, module.up[...])
        return jnp.einsum("bsef,efd,bse->bsd", hidden, module.down[...], gates)

    return apply


def relative(a, b) -> float:
    return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))


@pytest.mark.parametrize(
    ("num_experts", "per_token", "towards"),
    [
        (4, 1, None),
        (8, 2, None),
        (64, 8, None),  # 192 pairs: some experts have no token
        (16, 1, 3),  # one expert has all tokens
        (8, 8, None),  # each expert has all tokens
    ],
)
def test_dropless_is_every_expert_on_every_token_weighted(num_experts, per_token, towards):
    graph, state = moe(config(num_experts, per_token, normalize_expert_weights=per_token != 1))
    x = inputs()
    if towards is not None:
        x = jnp.abs(x)
        state["router"] = state["router"].replace(jnp.zeros((EMBED, num_experts)).at[:, towards].set(1.0))

    def value_and_grads(apply):
        y, pull, told = jax.vjp(apply, state, x, has_aux=True)
        return (y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))), told

    got, told = jax.jit(lambda: value_and_grads(through(graph, layout())))()
    want, _ = jax.jit(lambda: value_and_grads(lambda state, x: (dense(graph)(state, x), None)))()
    counts = told["tokens_per_expert"]
    assert int(counts.sum()) == BATCH * SEQ * per_token
    if num_experts == 64:
        assert int(counts.min()) == 0
    if towards is not None:
        assert int(counts[towards]) == BATCH * SEQ
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert float(jnp.max(jnp.abs(b))) > 1e-3 or num_experts == 16  # a router that is certain has no gradient
        assert float(jnp.max(jnp.abs(a - b))) <= 1e-10 * max(1.0, float(jnp.max(jnp.abs(b))))


def kept_by_hand(ids: np.ndarray, weights: np.ndarray, capacity: int, by_score: bool) -> np.ndarray:
    is_kept = np.zeros(ids.shape, bool)
    for row in range(ids.shape[0]):
        for e in np.unique(ids[row]):
            pairs = np.argwhere(ids[row] == e)
            if by_score:
                pairs = pairs[np.argsort([-weights[row, s, i] for s, i in pairs], kind="stable")]
            for s, i in pairs[:capacity]:
                is_kept[row, s, i] = True
    return is_kept


@pytest.mark.parametrize("order", ["arrival", "score"])
@pytest.mark.parametrize(("num_experts", "per_token", "factor"), [(4, 2, 0.5), (8, 2, 1.25), (6, 1, 1.0)])
def test_capacity_keeps_the_first_or_the_best_of_each_sequence(order, num_experts, per_token, factor):
    graph, state = moe(config(num_experts, per_token))
    x = inputs(1)
    strategy = layout(dispatch="capacity", capacity_factor=factor, capacity_order=order)

    def total(x):
        y, told = through(graph, strategy)(state, x)
        return jnp.sum(jnp.sin(y)), (y, told)

    grad, (y, told) = jax.jit(jax.grad(total, has_aux=True))(x)
    module = nnx.merge(graph, state)

    def choose(x):
        return module._choose(jnp.einsum("bsd,de->bse", x, module.router[...]))

    weights, ids = jax.jit(choose)(x)
    capacity = expert.capacity(SEQ, num_experts, per_token, factor)
    kept = kept_by_hand(np.asarray(ids), np.asarray(weights), capacity, order == "score")
    assert 0 < (~kept).sum() == int(told["dropped"])

    def by_hand(x):
        weights, ids = choose(x)
        each = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, module.gate[...]))
        each = jnp.einsum("bsef,efd->bsed", each * jnp.einsum("bsd,edf->bsef", x, module.up[...]), module.down[...])
        chosen = jnp.take_along_axis(each, ids[..., None], axis=2)
        y = jnp.sum(chosen * (weights * kept.astype(x.dtype))[..., None], axis=2)
        return jnp.sum(jnp.sin(y)), y

    want_grad, want = jax.jit(jax.grad(by_hand, has_aux=True))(x)
    assert relative(y, want) < 1e-10
    assert relative(grad, want_grad) < 1e-10


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "factor", "expected"),
    [
        (6, 3, 1, 1.0, 2),  # Switch, figure 3
        (6, 3, 1, 1.5, 3),
        (1024, 16, 2, 1.0, 128),  # GShard: 2 N / E of a group
        (10, 3, 2, 1.1, 8),  # rounded up
        (100, 8, 2, 1.1 * 4 / 5, 22),  # 22.000000000000004 in floats
    ],
)
def test_capacity_is_tokens_by_experts_by_factor(tokens, experts, per_token, factor, expected):
    assert expert.capacity(tokens, experts, per_token, factor) == expected


def test_the_balancing_loss_is_switchs():
    """alpha x E x sum(f P): alpha for uniform routing, by hand for any other."""
    settings = config(4, 1, balancing_loss_weight=0.01)
    graph, state = moe(settings)
    zero = state["router"].replace(jnp.zeros((EMBED, 4)))
    uniform = through(graph, layout(), ROUTING)(nnx.State({**state, "router": zero}), inputs())[1]
    assert float(uniform["auxiliary_loss"]) == pytest.approx(0.01, abs=1e-12)
    assert float(uniform["router_entropy"]) == pytest.approx(BATCH * SEQ * np.log(4))

    told = through(graph, layout(), ROUTING)(state, inputs())[1]
    scores = np.asarray(jax.nn.softmax(jnp.einsum("bsd,de->bse", inputs(), state["router"][...])))
    want = 0.0
    for row in scores:
        share = np.bincount(row.argmax(-1), minlength=4) / SEQ
        want += 0.01 * 4 * (share * row.mean(0)).sum() / BATCH
    assert float(told["auxiliary_loss"]) == pytest.approx(want, rel=1e-12)

    batch_wise = settings.replace(balancing_over="batch", router_z_loss_weight=0.5)
    graph, state = moe(batch_wise)
    told = through(graph, layout(), ROUTING)(state, inputs())[1]
    logits = np.asarray(jnp.einsum("bsd,de->bse", inputs(), state["router"][...])).reshape(-1, 4)
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    share = np.bincount(scores.argmax(-1), minlength=4) / len(scores)
    want = 0.01 * 4 * (share * scores.mean(0)).sum() + 0.5 * (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    assert float(told["auxiliary_loss"]) == pytest.approx(want, rel=1e-12)


def test_deepseeks_routing_by_hand():
    """Sigmoid scores; the choice by score + bias within the 2 groups whose two best sum highest; weights without it."""
    settings = config(
        8, 3, router_score="sigmoid", num_expert_groups=4, num_groups_per_token=2, balancing="bias",
        routed_scaling_factor=2.5,
    )  # fmt: skip
    graph, state = moe(settings)
    bias = np.random.default_rng(2).normal(size=8)
    state["bias"] = state["bias"].replace(jnp.asarray(bias))
    module = nnx.merge(graph, state)
    logits = np.asarray(jnp.einsum("bsd,de->bse", inputs(), module.router[...]))
    weights, ids = module._choose(jnp.asarray(logits))
    scores = 1 / (1 + np.exp(-logits))
    unbiased = 0
    for b in range(BATCH):
        for s in range(SEQ):
            choice = scores[b, s] + bias
            groups = np.argsort(-choice.reshape(4, 2).sum(-1))[:2]
            allowed = [e for e in range(8) if e // 2 in groups]
            want = sorted(allowed, key=lambda e: -choice[e])[:3]
            assert list(np.asarray(ids[b, s])) == want
            unbiased += set(want) != set(np.argsort(-scores[b, s])[:3])
            np.testing.assert_allclose(weights[b, s], 2.5 * scores[b, s][want] / scores[b, s][want].sum(), rtol=1e-12)
    assert unbiased > 0  # groups and bias made a difference
    grads = jax.grad(lambda state: jnp.sum(through(graph, layout(), ROUTING)(state, inputs())[0]))(state)
    assert float(jnp.max(jnp.abs(grads["bias"][...]))) == 0.0
    assert float(jnp.max(jnp.abs(grads["router"][...]))) > 0.0


def test_shared_experts_are_an_mlp_beside_the_routed_ones():
    plain, with_shared = config(4, 2), config(4, 2, num_shared_experts=2)
    graph, state = moe(with_shared)
    module = nnx.merge(graph, state)
    routed = nnx.State({name: leaf for name, leaf in state.items() if name != "shared"})
    alone, _ = through(moe(plain)[0], layout())(routed, inputs())
    both, _ = through(graph, layout())(state, inputs())
    assert module.shared.up[...].shape == (EMBED, 2 * 4)
    assert relative(both, alone + module.shared(inputs(), layout())) < 1e-12


def test_jitter_is_noise_of_the_asked_width_in_training_alone():
    graph, state = moe(config(4, 2, router_jitter=0.2))
    module = nnx.merge(graph, state)
    seeds = mixed(jnp.arange(BATCH * SEQ, dtype=jnp.uint32)).reshape(BATCH, SEQ)
    factor = np.asarray(module._jittered(jnp.ones((BATCH, SEQ, 256)), Routing(ROUTING.shares, seeds)))
    assert 0.8 <= factor.min() < 0.81
    assert 1.19 < factor.max() <= 1.2
    assert abs(factor.mean() - 1) < 0.005
    assert np.unique(factor[0, 0]).size > 200
    np.testing.assert_array_equal(module._jittered(inputs(), None), inputs())


def test_figures_of_what_layers_told():
    told = {
        "auxiliary_loss": jnp.asarray([0.5, 0.25]),
        "tokens_per_expert": jnp.asarray([[4.0, 4.0], [6.0, 2.0]]),
        "dropped": jnp.asarray([0.0, 2.0]),
        "router_entropy": jnp.asarray([8.0, 4.0]),
    }
    got = {name: float(value) for name, value in figures(config(2, 2), told).items()}
    assert got == {"aux_loss": 0.75, "moe_dropped_fraction": 0.125, "moe_max_load": 1.5, "router_entropy": 1.5}
    assert figures(preset("tiny"), {}) == {}
