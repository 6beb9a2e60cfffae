"""The scaling recipe at its thresholds, and the commands `jaxpar recipe` and `jaxpar mfu`."""

import json

import pytest

from jaxpar import cli
from jaxpar.planning.flop_conventions import convention
from jaxpar.planning.recipe import recipe
from models.published import shape


@pytest.mark.parametrize(
    ("params", "devices", "seq_len", "strategy", "steps"),
    [
        (0.5e9, 8, 4096, "DP", ["DP"]),
        (1e9, 128, 16384, "DP", ["DP"]),
        (1e9, 129, 16384, "FSDP", ["FSDP", "activation checkpointing"]),
        (1.1e9, 8, 4096, "FSDP", ["FSDP", "activation checkpointing"]),
        (50e9, 256, 16384, "FSDP", ["FSDP", "activation checkpointing"]),
        (7e9, 257, 8192, "HSDP", ["FSDP", "activation checkpointing", "HSDP"]),
        (7e9, 1000, 8192, "HSDP", ["FSDP", "activation checkpointing", "HSDP"]),
        (7e9, 1001, 8192, "ND", ["FSDP", "activation checkpointing", "HSDP", "PP", "TP"]),
        (70e9, 64, 8192, "ND", ["FSDP", "activation checkpointing", "PP", "TP"]),
        (0.5e9, 8, 16385, "ND", ["FSDP", "activation checkpointing", "CP"]),
        (405e9, 16384, 131072, "ND", ["FSDP", "activation checkpointing", "HSDP", "CP", "PP", "TP"]),
    ],
)
def test_thresholds(params, devices, seq_len, strategy, steps):
    found = recipe(params, devices, seq_len)
    assert found.strategy == strategy
    assert [step.name for step in found.steps] == steps
    assert all(step.reason for step in found.steps)


def test_reasons_say_the_number_and_the_limit():
    reasons = {step.name: step.reason for step in recipe(7e9, 2048, 32768).steps}
    assert reasons["FSDP"].startswith("7B parameters are more than 1B parameters")
    assert "2,048 devices are more than 256" in reasons["HSDP"]
    assert "32,768 tokens are more than 16,384" in reasons["CP"]
    assert "2,048 devices are more than 1,000" in reasons["TP"]


def test_sizes_below_one():
    with pytest.raises(ValueError, match="0 devices: take at least 1"):
        recipe(1e9, 0, 8192)


def test_recipe_command(capsys):
    cli.main(["recipe", "--params", "7e9", "--devices", "512", "--seq-len", "8192", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["strategy"] == "HSDP"
    assert [step["name"] for step in found["steps"]][-1] == "HSDP"
    cli.main(["recipe", "--params", "7e9", "--devices", "512"])
    assert "gathered within groups" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_mfu_command(capsys):
    """LLM Foundry's benchmark README: MPT-13B on 256 H100s at 1,277,214 tokens/s is 41.42 %."""
    flags = "--model mpt-13b --chip H100 --devices 256 --seq-len 2048 --tokens-per-second 1277214"
    cli.main(["mfu", *flags.split(), "--convention", "llm-foundry", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert 100 * found["mfu"] == pytest.approx(41.42, abs=0.01)
    assert found["tokens_per_second_per_device"] == pytest.approx(1277214 / 256)
    assert found["flops_per_token"] == convention("llm-foundry").flops_per_token(shape("mpt-13b"), 2048)
    cli.main(["mfu", *flags.split(), "--precision", "float8"])
    assert "of H100-SXM's 1,978.9 TFLOP/s float8" in capsys.readouterr().out


def test_mfu_of_a_file(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "llama3-8b"\n')
    flags = ["--chip", "H100", "--devices", "8", "--seq-len", "8192", "--tokens-per-second", "5e4", "--json"]
    found = []
    for model in (str(path), "llama3-8b"):
        cli.main(["mfu", "--model", model, *flags])
        found.append(json.loads(capsys.readouterr().out)["mfu"])
    assert found[0] == found[1] > 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--chip H10", "no chip is called 'H10': did you mean 'H100-SXM'"),
        ("--model lama3-8b", "no model is called 'lama3-8b'; nearest: llama3-8b"),
        ("--precision float4", "H100-SXM has no float4 peak; known: bfloat16, "),
        ("--convention plam", "no FLOP convention is called 'plam'; known: palm, "),
        ("--tokens-per-second fast", "fast is no number"),
        ("--tokens-per-second 0", "0 is not a number from 1 up"),
        ("--devices 0", "0 is not a positive integer"),
        ("--batch 3", "unknown flag --batch; known: --chip, "),
    ],
)
def test_bad_input(change, message, capsys):
    flags = [
        "--model",
        "llama3-8b",
        "--chip",
        "H100",
        "--devices",
        "8",
        "--seq-len",
        "8192",
        "--tokens-per-second",
        "5e4",
    ]
    with pytest.raises(SystemExit) as stop:
        cli.main(["mfu", *flags, *change.split()])
    assert stop.value.code
    captured = capsys.readouterr()
    said = captured.err + captured.out + str(stop.value.code)
    assert message in said
    assert said.count("\n") <= 1
