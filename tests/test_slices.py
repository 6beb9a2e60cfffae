"""TeraPipe: slices of a sequence through the stages give the numbers of one device, however it is cut, and nothing
comes out of a slot that holds nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_ladder import check_same
from test_looped import collectives_in_branches
from test_pipeline import with_layers

from jaxpar import verify
from jaxpar.audit import hlo
from jaxpar.parallel.pipeline import slices
from jaxpar.parallel.pipeline.kinds import make
from jaxpar.training import setup
from meshes import build_mesh, parse_mesh

WIDTH, ROWS = 4, 2


def functions() -> slices.Functions:
    """Linear layers with a bend, each adding the running sum of all tokens' values up to a token's own."""

    def stage(layers, x, before, microbatch, earlier, part):
        weights = microbatch["weights"][..., None]

        def layer(x, each):
            weight, past = each
            value = x @ weight
            total = jnp.cumsum(value if past is None else jnp.concatenate([past, value], axis=1), axis=1)
            x = jnp.sin(x + total[:, -x.shape[1] :])
            return x, (value, jnp.sum(weights * jnp.square(x)))

        x, (made, told) = jax.lax.scan(layer, x, (layers, before))
        return x, made, jnp.sum(told), {"squares": told}

    def head(ends, x, microbatch):
        loss = jnp.sum(microbatch["weights"][..., None] * jnp.square(x @ ends["head"]))
        return loss, 2 * loss

    return slices.Functions(lambda ends, microbatch: ends["table"][microbatch["ids"]], stage, head)


def toy(num_layers: int, num_microbatches: int, seq_len: int):
    rng = np.random.default_rng(0)
    ends = {"table": rng.normal(size=(5, WIDTH)), "head": rng.normal(size=(WIDTH, WIDTH))}
    shape = num_microbatches, ROWS, seq_len
    batch = {"ids": rng.integers(0, 5, shape), "weights": rng.random(shape)}
    return ends, rng.normal(size=(num_layers, WIDTH, WIDTH)) / 4, batch


def by_one_device(ends, layers, batch):
    parts = functions()

    def loss(ends, layers):
        def of(microbatch):
            x, _, added, told = parts.stage(layers, parts.embed(ends, microbatch), None, microbatch, None, part=0)
            minimised, reported = parts.head(ends, x, microbatch)
            return minimised + added, (reported, told["squares"])

        added, sums = jax.lax.map(of, batch)
        return jnp.sum(added), jax.tree.map(lambda each: jnp.sum(each, 0), sums)

    (_, (reported, told)), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(ends, layers)
    return reported, told, *grads


@pytest.mark.parametrize(
    ("stages", "microbatches", "lengths"),
    [(2, 1, (6,)), (2, 3, (2, 4)), (4, 1, (3, 2, 1)), (4, 2, (2, 1, 2, 1)), (4, 6, (4, 2))],
)
def test_nan_in_what_holds_nothing(stages, microbatches, lengths):
    ends, layers, batch = toy(2 * stages, microbatches, 6)
    schedule = make("terapipe", stages, microbatches, num_slices=len(lengths))
    mesh = build_mesh(f"pipe={stages}", "", jax.devices()[:stages])

    def local(ends, layers, batch):
        loss, told, by_ends, by_layers = slices.run(schedule, lengths, functions(), ends, layers, batch, np.nan)
        return loss, told["squares"], jax.tree.map(lambda g: jax.lax.psum(g, "pipe"), by_ends), by_layers

    with jax.set_mesh(mesh):
        placed = jax.device_put(layers, NamedSharding(mesh, P("pipe")))
        specs = (P(), P("pipe"), P()), (P(), P("pipe"), P(), P("pipe"))
        mapped = jax.shard_map(local, in_specs=specs[0], out_specs=specs[1], check_vma=False)
        got = jax.device_get(jax.jit(mapped)(ends, placed, batch))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(by_one_device(ends, layers, batch)), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max())


@pytest.mark.parametrize(
    ("mesh", "parallel", "model", "packs"),
    [
        ("pipe=2,fsdp=2,tensor=2", {"slices": 3, "grad_accumulation": 4}, "qwen", True),
        pytest.param(
            "data=2,pipe=4",
            {"slices": 2, "grad_accumulation": 2, "zero": 1, "remat": "none"},
            "gpt2",
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param("pipe=2", {"slices": 4}, "tiny", True, marks=pytest.mark.slow),
        pytest.param("pipe=4", {"slices": 1, "grad_accumulation": 2}, "tiny", False, marks=pytest.mark.slow),
        pytest.param(
            "pipe=2,fsdp=2,tensor=4",
            {"slices": 4, "reshard_after_forward": False, "grad_accumulation": 2},
            "qwen",
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipe=4,tensor=2",
            {"slices": 3, "sequence_parallel": False, "grad_accumulation": 2, "remat": "dots"},
            "tiny",
            True,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_that_of_one_device(mesh, parallel, model, packs):
    def of(config):
        return dataclasses.replace(config, data=dataclasses.replace(config.data, pack_documents=packs))

    layout = of(with_layers(4, model, mesh, pipeline="terapipe", **parallel))
    check_same(layout, of(with_layers(4, model)), 1e-9)


def test_what_stages_send_as_compiled_for_gpus():
    """Two permutes a tick, of the longest slice, and none in a branch."""
    parallel = {"pipeline": "terapipe", "slices": 3, "reshard_after_forward": "always"}
    asked = with_layers(4, "tiny", grad_accumulation=2, **parallel)
    mesh = parse_mesh("pipe=4,fsdp=2", 8)
    text = verify.compiled_step(asked, mesh).as_text()
    hops = hlo.summarize(hlo.read_collectives(text, mesh))["pipe"]["collective-permute"]
    assert hops["count"] == 2 * make("terapipe", 4, 2, num_slices=3).num_ticks
    assert hops["bytes"] == verify.expected_traffic(asked, mesh)["pipe"]["collective-permute"]
    in_branches = collectives_in_branches(text)
    assert "all-gather" in in_branches
    assert "collective-permute" not in in_branches


def test_later_slices_are_shorter():
    asked = with_layers(4, "tiny", "pipe=2,tensor=2", pipeline="terapipe", slices=3, grad_accumulation=2)
    lengths = setup.make_model(asked, setup.make_mesh(asked, jax.devices()[:4])).layout.slices
    assert (len(lengths), sum(lengths)) == (3, 16)
    assert all(length % 2 == 0 for length in lengths)
    long = dataclasses.replace(asked, data=dataclasses.replace(asked.data, seq_len=2**14))
    first, second, third = setup.make_model(long, setup.make_mesh(long, jax.devices()[:4])).layout.slices
    assert first > second > third
    assert first + second + third == 2**14


@pytest.mark.parametrize(
    ("mesh", "parallel", "complaint"),
    [
        ("pipe=2,context=2", {"slices": 2}, "terapipe cuts sequences into slices, context=2 into parts of its own"),
        ("pipe=2,tensor=2", {"slices": 9}, "--seq-len 16, cut over tensor=2, has no 9 to 512 .* or fewer slices"),
        ("pipe=2", {"pipeline": "1f1b", "slices": 2}, "1f1b does not slice sequences, so not 2 slices; terapipe does"),
    ],
)
def test_what_cannot_be_sliced_is_refused_in_a_line(mesh, parallel, complaint):
    asked = with_layers(4, "tiny", mesh, **{"pipeline": "terapipe"} | parallel)
    with pytest.raises(ValueError, match=complaint):
        setup.make_model(asked, setup.make_mesh(asked, jax.devices()[: 4 if "," in mesh else 2]))
