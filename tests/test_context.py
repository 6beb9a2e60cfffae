"""Context strategies against dense attention, and what they compute and send against the plan."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.attention_report import (
    SHORT_BLOCK,
    TOLERANCE,
    Case,
    compiled,
    densely,
    errors,
    make_layout,
    on_mesh,
    random_arrays,
    relative_error,
)
from jaxpar.audit.hlo import read_collectives
from jaxpar.kernels.mask import AttentionMask
from jaxpar.parallel.context import ContextStrategy
from jaxpar.parallel.context.allgather import gather, gather_in_sequence
from jaxpar.parallel.context.order import in_sequence
from jaxpar.planning.attention import AttentionSize, attention_plan, causal_flops, documents
from meshes import build_mesh

STRATEGIES = ("ring", "ulysses", "allgather", "hybrid=2x4", "hybrid=4x2")
ORDERS = ("zigzag", "contiguous", "striped")
KV_HEADS = {"mha": 8, "gqa": 2, "mqa": 1}
# Documents of 25 or 26 tokens, of 11 or 12: none begins where a rank's 16 tokens do, but the first.
KINDS = {
    "plain": {},
    "packed": {"num_documents": 5},
    "window": {"window": 21},
    "packed in short": {"num_documents": 11},
    "packed and window": {"num_documents": 3, "window": 30},
}
LENGTH = 128


def case(strategy: str, order: str, num_kv_heads: int = 2, ranks: int = 8, seq_len: int = LENGTH, **kind) -> Case:
    parsed = dataclasses.replace(ContextStrategy.parse(strategy, order, ranks), block=SHORT_BLOCK)
    return Case(parsed, ranks, AttentionSize(seq_len, 8, num_kv_heads, 4), **kind)


QUICK = [
    (*pair, list(KV_HEADS)[i % 3], list(KINDS)[i % 5]) for i, pair in enumerate(itertools.product(STRATEGIES, ORDERS))
]
ALL = list(itertools.product(STRATEGIES, ORDERS, KV_HEADS, KINDS))


@pytest.mark.parametrize(
    ("strategy", "order", "heads", "kind"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in ALL],
)
def test_against_dense(strategy, order, heads, kind):
    """And the tiles computed are the planned ones, which `errors` asserts."""
    assert max(errors(case(strategy, order, KV_HEADS[heads], **KINDS[kind]))) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_errors_do_not_grow_with_ranks(dtype):
    tokens, mask = documents(LENGTH, 1), AttentionMask()
    arrays = [x.astype(jnp.dtype(dtype)) for x in random_arrays(1, AttentionSize(LENGTH, 8, 2, 4))]
    want = densely(mask, tokens, [x.astype("float64") for x in arrays])
    found = []
    for ranks in (2, 4, 8, 16):
        ring = case("ring", "zigzag", ranks=ranks)
        layout = make_layout(ring, build_mesh(f"context={ranks}", devices=jax.devices()[:ranks]), jnp.dtype(dtype))
        results, _ = on_mesh(layout, mask, tokens, arrays)
        found.append(max(relative_error(x.astype("float64"), y) for x, y in zip(results, want)))
    assert max(found) <= (1e-14 if dtype == "float64" else 0.02)
    assert max(found) <= 1.5 * found[0], found


@pytest.mark.parametrize(("strategy", "order"), [("ring", "zigzag"), ("ring", "contiguous"), ("hybrid=2x2", "striped")])
@pytest.mark.parametrize("window", [None, 20])
def test_rows_and_data_ranks_with_documents_of_their_own(strategy, order, window):
    """Which rounds are left out is agreed over all devices, though each data rank would need others."""
    sequence = case(strategy, order, ranks=4, num_documents=2, window=window)
    layout = make_layout(sequence, build_mesh("data=2,context=4", devices=jax.devices()[:8]), jnp.dtype("float64"))
    rows = [documents(LENGTH, count) for count in (16, 9, 1, 3)]
    tokens = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    arrays = random_arrays(4, sequence.size)
    results, tiles = on_mesh(layout, sequence.mask, tokens, arrays)
    assert max(map(relative_error, results, densely(sequence.mask, tokens, arrays))) <= TOLERANCE
    assert sum(tiles[:4]) < sum(tiles[4:])


@pytest.mark.parametrize("order", ["zigzag", "striped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seq_len", [65536, 8 * 17 * 512])
def test_balance(strategy, order, seq_len):
    """With 16 blocks per rank, and with 17, that zigzag's two parts cannot share."""
    size = AttentionSize(seq_len, 8, 2, 64)
    flops = attention_plan(ContextStrategy.parse(strategy, order, 8), 8, size, AttentionMask()).flops_per_rank
    assert max(flops) <= 1.02 * np.mean(flops)
    assert sum(flops) <= 1.10 * causal_flops(size)


def test_balance_is_what_a_contiguous_order_lacks():
    flops = attention_plan(
        ContextStrategy.parse("ring", "contiguous", 8), 8, AttentionSize(65536, 8, 2, 64), AttentionMask()
    ).flops_per_rank
    assert max(flops) > 1.8 * np.mean(flops)


@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_balance_is_counted(order):
    """16 blocks per rank, but of 8 tokens each: the tiles computed are the planned ones, and those are balanced."""
    balanced = case("ring", order, seq_len=8 * 16 * SHORT_BLOCK)
    assert max(errors(balanced)) <= TOLERANCE
    plan = attention_plan(balanced.strategy, 8, balanced.size, balanced.mask)
    assert max(plan.tiles_per_rank) <= 1.02 * np.mean(plan.tiles_per_rank)
    assert sum(plan.flops_per_rank) <= 1.10 * causal_flops(balanced.size)


def sent(asked: Case) -> float:
    """Bytes that each rank sends, by the program compiled for H100s."""
    hlo = compiled(asked).as_text()
    assert hlo is not None
    ranks = {"all-to-all": asked.strategy.group, "all-gather": asked.ranks, "reduce-scatter": asked.ranks}
    total = 0.0
    for each in read_collectives(hlo, {"context": asked.ranks}):
        share = 1 if each.op == "collective-permute" else 1 - 1 / ranks[each.op]
        total += each.count * each.bytes * share
    return total


@pytest.mark.parametrize(
    ("strategy", "kv_heads", "window", "forward", "backward"),
    [
        # |K| + |V| = 2 x 512 tokens x 2 heads x 64 x 2 bytes = 256 KiB (8 heads: 1 MiB), |dK| + |dV| twice that,
        # but for the last of their 8 permutes.
        ("ring", 2, None, 7 * 2**18, 7 * 2**18 + 7 * 2**19 + 2**18),
        ("ring", 8, None, 7 * 2**20, 7 * 2**20 + 7 * 2**21 + 2**20),
        ("ring", 2, 200, 2 * 2**18, 2 * 2**18 + 2 * 2**19 + 2**18),  # the rank before and, in zigzag, the one after
        # |q| = 512 x 8 x 64 x 2 = 512 KiB, as k's once it has 8 heads
        ("ulysses", 2, None, 7 / 8 * 4 * 2**19, 7 / 8 * 4 * 2**19),
        ("allgather", 2, None, 7 * 2**18, 7 * 2**18),
        ("hybrid=4x2", 2, None, 2**19 + 2**17 + 3 * 2**18, 2**19 + 2**17 + 3 * 2**18 + 3 * 2**19 + 2**18),
    ],
)
def test_bytes_sent_are_those_of_the_compiled_program(strategy, kv_heads, window, forward, backward):
    asked = Case(ContextStrategy.parse(strategy, "zigzag", 8), 8, AttentionSize(4096, 8, kv_heads, 64), window)
    plan = attention_plan(asked.strategy, 8, asked.size, asked.mask)
    assert (plan.bytes_sent_forward, plan.bytes_sent_backward) == (forward, backward)
    assert sent(asked) == forward + backward


@pytest.mark.parametrize("order", ORDERS)
def test_rounds_left_out_send_less(order):
    size, strategy = AttentionSize(65536, 8, 2, 64), ContextStrategy.parse("ring", order, 8)
    full = attention_plan(strategy, 8, size, AttentionMask())
    if order == "striped":  # each rank has tokens from everywhere: all rounds are needed until a window is tiny
        assert (
            attention_plan(strategy, 8, size, AttentionMask(window=4)).bytes_sent_forward
            == full.bytes_sent_forward * 3 // 7
        )
        return
    window = attention_plan(strategy, 8, size, AttentionMask(window=4096))
    packed = attention_plan(strategy, 8, size, AttentionMask(), num_documents=15)
    rounds = 2 if order == "contiguous" else 3
    assert window.bytes_sent_forward * 7 == full.bytes_sent_forward * (rounds - 1)
    assert packed.bytes_sent_forward < full.bytes_sent_forward / 2
    assert packed.bytes_sent_backward < full.bytes_sent_backward
    assert sum(packed.flops_per_rank) < 0.1 * sum(full.flops_per_rank)


def test_memory_is_constant_while_ranks_and_length_grow():
    """Ring attention to 1M tokens: forward and backward, compiled for H100s."""

    def temporaries(ranks: int) -> int:
        strategy, size = ContextStrategy.parse("ring", "zigzag", ranks), AttentionSize(8192 * ranks, 8, 1, 64)
        memory = compiled(Case(strategy, ranks, size)).memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporaries(128) <= 1.02 * temporaries(8)


def test_a_plan_of_1m_tokens_over_128_ranks():
    size, strategy = AttentionSize(2**20, 128, 8, 128), ContextStrategy.parse("hybrid=16x8", "zigzag", 128)
    plan = attention_plan(strategy, 128, size, AttentionMask())
    assert len(plan.flops_per_rank) == 128
    assert len(set(plan.flops_per_rank)) == 1
    assert math.isclose(sum(plan.flops_per_rank), causal_flops(size), rel_tol=1e-3)


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("ring", {"seq_len": 1000}, "--seq-len 1000 .* 16 parts .* the nearest that does: 992 or 1008"),
        (
            "ulysses",
            {"num_heads": 12},
            "12 / 1 = 12, which 8 does not divide; the nearest number of ranks that does: 4",
        ),
        ("ring", {"num_kv_heads": 3}, "--kv-heads 3 does not divide --heads 8; the nearest that does: 2"),
        ("ring", {"window": 0}, "--window 0: .* the least that works: 1"),
        ("ring", {"num_documents": 5000}, "--documents 5000 .* --seq-len 4096"),
        ("hybrid=3x3", {}, "must multiply to context=8: hybrid=8x1, hybrid=4x2"),
        ("rings", {}, "must be one of ring"),
    ],
)
def test_bad_input(strategy, changes, message):
    sizes = {"seq_len": 4096, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    size = AttentionSize(**{name: changes.get(name, value) for name, value in sizes.items()})
    rest = {name: value for name, value in changes.items() if name not in sizes}
    with pytest.raises(ValueError, match=message):
        Case(ContextStrategy.parse(strategy, "zigzag", 8), 8, size, **rest).check()


def test_the_command():
    command = [sys.executable, "-c", "from jaxpar.cli import main; main()", "attention", "--ranks=4", "--json"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [*command, "--strategy=hybrid=2x2", "--seq-len=8192", "--window=3000"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["flops_per_rank"]) == 4
    assert 0 < found["max_error"] <= TOLERANCE
    assert 0 < found["max_gradient_error"] <= TOLERANCE
    assert found["flops_dense_causal"] == 4 * 8 * 64 * 8192**2 / 2
    assert found["bytes_sent_per_rank"] > 0
    assert found["peak_temp_bytes_per_rank"] > 0
    done = subprocess.run([*command, "--window=0"], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --window 0")


@pytest.mark.parametrize("order", ORDERS)
def test_gathered_in_the_sequences_order(order):
    """As `in_sequence` has it of what is gathered in the ranks' order, and its gradient."""
    mesh = build_mesh("context=4,data=2", devices=jax.devices()[:8])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 32, 3)))
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2, 5, 32, 3)))
    part = P(None, None, "context", None)

    def total(gather):
        def local(x, weights):
            return jnp.sum(gather(x) * weights[0])[None]

        region = jax.shard_map(local, in_specs=(part, P("context")), out_specs=P("context"), check_vma=False)
        return jax.value_and_grad(lambda x: jnp.sum(region(x, jax.reshard(weights, P("context")))))

    def in_two_steps(x):
        whole = gather(jnp.swapaxes(x, 1, 2), "context")
        return jnp.swapaxes(in_sequence(order, whole, 4), 1, 2)

    with jax.set_mesh(mesh):
        placed = jax.reshard(x, part)
        got = total(lambda x: gather_in_sequence(order, x, "context", 4))(placed)
        want = total(in_two_steps)(placed)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12)
    assert np.abs(want[1]).max() > 0.1
