"""Mixtures of experts as a user trains them."""

import numpy as np
import pytest
import test_train
from test_train import KEYS, metrics, train

SETTINGS = [
    *("--model", "tiny-moe", "--precision", "float32", "--steps", "3", "--batch-size", "16", "--seq-len", "32"),
    *("--model.num-layers", "2", "--run.sample-tokens", "4", "--warmup-steps", "2", "--moe-dispatch", "capacity"),
]
FIGURES = ["aux_loss", "moe_dropped_fraction", "moe_max_load", "router_entropy"]
work = test_train.work


def test_metrics_tell_how_tokens_are_routed(work):
    done = train(work, "eight", "--emulate", "8", "--mesh", "expert=4,fsdp=2", "--eval-every", "3", settings=SETTINGS)
    assert done.returncode == 0, done.stderr
    rows = metrics(work, "eight")
    for row in rows:
        assert list(row)[: len(KEYS + FIGURES)] == KEYS + FIGURES
        assert 0 < row["moe_dropped_fraction"] < 1
        assert 1 < row["moe_max_load"] <= 4  # 2 of 8 experts take all
        assert 0 < row["router_entropy"] <= np.log(8)
        assert 0 < row["aux_loss"] < 0.1
    assert rows[-1]["eval_loss"] > 0


@pytest.mark.slow
def test_a_run_goes_on_over_other_expert_ranks(work):
    commands = [
        ("one", "--emulate", "1", "--mesh", "data=1"),
        ("moved", "--emulate", "8", "--mesh", "expert=4,fsdp=2", "--stop-at", "2"),
        ("moved", "--emulate", "4", "--mesh", "expert=2,tensor=2"),
    ]
    for command in commands:
        done = train(work, *command, settings=SETTINGS)
        assert done.returncode == 0, done.stderr
    one, moved = metrics(work, "one"), metrics(work, "moved")
    assert len(one) == len(moved) == 3
    for key in ("loss", "grad_norm", *FIGURES):
        np.testing.assert_allclose([row[key] for row in moved], [row[key] for row in one], rtol=1e-4, err_msg=key)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--mesh", "expert=4,fsdp=2", "--model.num-experts", "6"),
            "--model.num-experts 6 is not divisible by expert=4",
        ),
        (("--model.num-experts-per-token", "9"), "model.num_experts_per_token is 9; it must be from 1 to 8"),
        (("--capacity-factor", "0"), "--capacity-factor is 0.0; it must be above 0"),
    ],
)
def test_what_cannot_be_routed_is_said_at_once(work, args, message):
    done = train(work, "none", "--emulate", "8", *args, settings=SETTINGS)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
