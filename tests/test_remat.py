"""Compute and live activations of the remat policies, counted in the traced program; what is asked for amiss."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxpar.parallel import layers
from jaxpar.parallel.remat import NAMES, Remat

NUM_LAYERS, WIDTH = 16, 8


def block(w, x):
    """One layer: one `exp`, whose result is all that the backward pass wants beside the layer's input."""
    return jnp.exp(checkpoint_name(x * w, "attention")), {}


def trace(remat: str, num_layers: int):
    policy = Remat.parse(remat, num_layers)

    def loss(w, x):
        return layers.scan(block, w, x, remat=policy, regather=True)[0].sum()

    w, x = jnp.ones((num_layers, WIDTH)), jnp.ones(WIDTH)
    return jax.make_jaxpr(jax.grad(loss))(w, x).jaxpr


def executions(jaxpr, times: int = 1) -> Counter[str]:
    """How often each primitive is executed, through loops."""
    total: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        inner = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        total[equation.primitive.name] += times
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    total += executions(part, inner)
    return total


def kept(jaxpr) -> int:
    """Layer activations that the forward loop hands to the backward pass, in arrays of one layer's width."""
    forward = next(equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    stacked = [var for var in forward.outvars if var.aval.ndim == 2]  # beside the carry, one layer's [WIDTH]
    return sum(math.prod(var.aval.shape) // WIDTH for var in stacked)


@pytest.mark.parametrize(
    ("remat", "again", "live"),
    [
        ("none", 0, 2 * NUM_LAYERS),  # two arrays a layer: its input and the exp's result
        ("full", NUM_LAYERS, NUM_LAYERS),
        ("every=2", NUM_LAYERS, NUM_LAYERS // 2),
        ("sqrt", NUM_LAYERS, 4),
        ("save=attention", NUM_LAYERS, 2 * NUM_LAYERS),
    ],
)
def test_compute_and_live_activations(remat, again, live):
    jaxpr = trace(remat, NUM_LAYERS)
    counts = executions(jaxpr)
    assert counts["exp"] == NUM_LAYERS + again
    assert kept(jaxpr) == live


@pytest.mark.parametrize("num_layers", [9, 16, 64, 126])
def test_sqrt_keeps_about_two_roots(num_layers):
    every = Remat.parse("sqrt", num_layers).every
    groups = -(-num_layers // every)
    assert groups + every == pytest.approx(2 * math.sqrt(num_layers), abs=1)


def test_a_shorter_last_group():
    jaxpr = trace("every=5", 16)
    assert kept(jaxpr) == 3  # and the last layer by itself
    assert executions(jaxpr)["exp"] == 32


def test_every_name_is_one_of_a_blocks_seams():
    for name in NAMES:
        assert Remat.parse(f"save={name}", 4).saves == (name,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some", "--remat some: it must be one of none, full, sqrt, dots, offload, every=K or save=NAME,NAME"),
        ("every=0", "1 to 4"),
        ("every=5", "1 to 4"),
        ("every", "1 to 4"),
        ("save=", "no tensor is called ''"),
        ("save=query,keys", "no tensor is called 'keys'; known: block_input, query"),
    ],
)
def test_bad_policies(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Remat.parse(text, 4)
