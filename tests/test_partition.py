"""Cuts of layers and of tokens, against brute force."""

import itertools
import json

import numpy as np
import pytest

from jaxpar import cli
from jaxpar.parallel.pipeline.partition import latency, partition, partition_among_stages, token_slices
from jaxpar.parallel.pipeline.schedule import part_of
from jaxpar.planning.flops import step_flops
from jaxpar.planning.pipeline import part_work, slice_flops
from models.presets import preset


def compositions(total: int, parts: int):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        bounds = [0, *cuts, total]
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def part_times(times, counts, embedding, head):
    bounds = np.cumsum([0, *counts])
    sums = [sum(times[a:b]) for a, b in itertools.pairwise(bounds)]
    sums[0] += embedding
    sums[-1] += head
    return sums


def test_partition_against_brute_force():
    rng = np.random.default_rng(0)
    for trial in range(40):
        layers, parts = int(rng.integers(1, 11)), int(rng.integers(1, 7))
        if parts > layers:
            continue
        times = [1.0] * layers if trial % 4 == 0 else list(rng.integers(1, 9, layers) / 4)
        embedding, head = rng.integers(0, 6, 2) / 4
        options = [part_times(times, counts, embedding, head) for counts in compositions(layers, parts)]
        best = min((max(option), sum(t**2 for t in option)) for option in options)
        got = part_times(times, partition(times, parts, embedding, head), embedding, head)
        assert (max(got), sum(t**2 for t in got)) == pytest.approx(best)


def stage_times(times, counts, embedding, head, stages, chunks, placement):
    parts = part_times(times, counts, embedding, head)
    return [sum(parts[part_of(placement, stages, s, c)] for c in range(chunks)) for s in range(stages)]


def test_chunks_of_the_slowest_stage_against_brute_force():
    """Equal layers are dealt out, others solved for; the slowest part may be another than the slowest stage's."""
    rng = np.random.default_rng(2)
    for trial in range(48):
        stages, chunks = int(rng.integers(1, 4)), int(rng.integers(2, 4))
        placement = "v" if chunks == 2 and trial % 2 else "loop"
        layers = int(rng.integers(stages * chunks, 12))
        times = [0.75] * layers if trial % 3 == 0 else list(rng.integers(1, 9, layers) / 4)
        embedding, head = rng.integers(0, 6, 2) / 4
        rest = embedding, head, stages, chunks, placement
        best = min(max(stage_times(times, counts, *rest)) for counts in compositions(layers, stages * chunks))
        got = partition_among_stages(times, stages, chunks, placement, embedding, head)
        assert min(got) >= 1
        assert sum(got) == layers
        assert max(stage_times(times, got, *rest)) == pytest.approx(best)


def test_chunks_as_asked_for(capsys):
    """Llama 3 405B's 126 layers as it ran them: two stages have one layer less, those of the model's ends."""
    cli.main(["partition", "--model", "llama3-405b", "--stages", "16", "--chunks", "2", "--json"])
    got = json.loads(capsys.readouterr().out)
    of_stages = [got["layers"][stage] + got["layers"][16 + stage] for stage in range(16)]
    assert of_stages == [7, *[8] * 14, 7]
    assert max(got["layers"]) == 4
    assert len(got["times"]) == 16
    assert got["balance"] == pytest.approx(sum(got["times"]) / 16)
    v = ["--chunks", "2", "--placement", "v", "--layer-times", "0,1,3,1,2,0"]
    cli.main(["partition", "--model", "tiny", "--stages", "2", *v])
    assert "1 + 1" in capsys.readouterr().out


def test_token_slices_as_asked_for(capsys):
    cli.main(["partition", "--model", "llama3-8b", "--stages", "8", "--slices", "--seq-len", "8192", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert sum(got["slices"]) == got["seq_len"] == 8192
    assert all(length % 128 == 0 for length in got["slices"])
    assert got["slices"][0] > got["slices"][-1]  # later ones attend to more
    assert 4 < got["speedup"] < 8
    flags = ["--seq-len", "96", "--microbatches", "3", "--granularity", "8", "--slice-overhead", "4"]
    cli.main(["partition", "--model", "tiny", "--stages", "2", "--slices", *flags])
    assert "as fast as with whole sequences" in capsys.readouterr().out


def test_llama_405b_over_16(capsys):
    cli.main(["partition", "--model", "llama3-405b", "--stages", "16", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert got["layers"] == [7, *[8] * 14, 7]
    assert got["times"][1:15] == [1] * 14
    assert got["times"][0] < got["times"][15] < 1
    assert got["balance"] == pytest.approx(sum(got["times"]) / 16)


def test_work_is_that_of_a_step():
    model = preset("llama3-8b")
    work = part_work(model, 4096)
    total = model.num_layers * work.layer + work.head
    assert total == pytest.approx(step_flops(model, 1, 4096, "none").model_causal)
    whole = slice_flops(model, 4096, 0)
    assert sum(slice_flops(model, 1024, 1024 * k) for k in range(4)) == pytest.approx(whole)
    assert whole == pytest.approx(model.num_layers * work.layer / 3 * 4096, rel=1e-3)


def test_measured_times(capsys):
    for times, layers, balance in (
        ("1,3,1,1,1,1", [1, 3], 1),
        ("0,3,1,1,1,2", [2, 2], 1),
        ("0,4,1,1,1,0", [1, 3], 7 / 8),
    ):
        arguments = ["partition", "--model", "tiny", "--stages", "2", "--layer-times", times]
        cli.main([*arguments, "--json"])
        got = json.loads(capsys.readouterr().out)
        assert (got["layers"], got["balance"]) == (layers, pytest.approx(balance))
    cli.main(arguments)
    assert "balance 87.5%" in capsys.readouterr().out


def test_token_slices_against_brute_force():
    rng = np.random.default_rng(1)
    for _ in range(12):
        tokens, stages, microbatches = int(rng.integers(2, 10)), int(rng.integers(1, 6)), int(rng.integers(1, 3))
        table = rng.integers(1, 9, (tokens + 1, tokens + 1)) / 2

        def time(length: int, before: int, table=table) -> float:
            return float(table[length, before] + length)

        def total(lengths, time=time, stages=stages, microbatches=microbatches):
            starts = np.cumsum([0, *lengths])
            return latency([time(n, int(at)) for n, at in zip(lengths, starts)], stages, microbatches)

        options = [c for parts in range(1, tokens + 1) for c in compositions(tokens, parts)]
        got = token_slices(time, tokens, stages, microbatches)
        assert sum(got) == tokens
        assert total(got) == pytest.approx(min(map(total, options)))
        count = int(rng.integers(1, tokens + 1))
        got = token_slices(time, tokens, stages, microbatches, num_slices=count)
        assert (sum(got), len(got)) == (tokens, count)
        assert total(got) == pytest.approx(min(map(total, compositions(tokens, count))))


def test_token_slices_of_a_model():
    """TeraPipe's figure: uniform slices are best at some middle number, and unequal ones, shorter towards the end,
    better still."""
    model = preset("llama3-8b")
    fixed = slice_flops(model, 64, 0)  # what a slice costs however short it is

    def time(length: int, before: int) -> float:
        return fixed + slice_flops(model, length, before)

    def total(lengths) -> float:
        starts = np.cumsum([0, *lengths])
        return latency([time(n, int(at)) for n, at in zip(lengths, starts)], 8)

    uniform = {count: total([8192 // count] * count) for count in (1, 2, 4, 8, 16, 32, 64, 128)}
    best = min(uniform, key=uniform.__getitem__)
    assert best == 32
    assert uniform[1] > uniform[8] > uniform[32] < uniform[64] < uniform[128]
    lengths = token_slices(time, 8192, 8, granularity=64)
    assert total(lengths) < uniform[best]
    assert lengths[0] > lengths[-1]
    assert latency([1, 2, 3], 4) == 15


def test_bad_cuts(capsys):
    with pytest.raises(ValueError, match=r"4 layers cannot be cut into 5 parts \(stages x chunks\); take 1 to 4"):
        partition([1.0] * 4, 5)
    with pytest.raises(ValueError, match="a layer's time is 0; take a positive number"):
        partition([1.0, 0.0], 2)
    with pytest.raises(ValueError, match="granularity 3 does not divide the sequence's 8 tokens"):
        token_slices(lambda length, before: 1.0, 8, 2, granularity=3)
    with pytest.raises(ValueError, match="8 tokens cannot be cut into 5 slices of a multiple of 2; take 1 to 4"):
        token_slices(lambda length, before: 1.0, 8, 2, granularity=2, num_slices=5)
    for flags, message in (
        ("--stages 3 --chunks 2", "4 layers cannot be cut into 6 parts"),
        ("--stages 0", "--stages 0 --chunks 1: no parts; take at least 1 of each"),
        ("--stages 2 --chunks 1 --placement v", "--placement v has two chunks per stage, not 1; give --chunks 2"),
        ("--stages 2 --granularity 8", "--granularity is of token slices; give --slices too"),
        ("--stages 2 --slices --chunks 2", "--chunks is of layers; leave it or --slices out"),
        ("--stages 2 --slices --seq-len 8 --granularity 3", "granularity 3 does not divide the sequence's 8 tokens"),
        ("--stages 2 --slices --slice-overhead -1", "take at least 1 stage and token, and no negative overhead"),
        ("--stages 2 --layer-times 1,2", "--layer-times has 2 numbers; give 6: the embedding's, 4 layers' and the"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["partition", "--model", "tiny", *flags.split()])
        assert message in capsys.readouterr().err
