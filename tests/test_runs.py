"""Predictions of published runs: the accuracy that docs/planner-accuracy.md states, and what is filled in."""

import dataclasses
import json
import math
import tomllib
from importlib import resources

import numpy as np
import pytest

from jaxpar.planning import runs as command
from jaxpar.planning.accuracy import errors, to_toml
from jaxpar.planning.calibration import calibration_table, parse
from jaxpar.planning.fit import NUMBERS, Run, fit, get, with_numbers
from jaxpar.planning.run_defaults import FRAMEWORKS
from jaxpar.planning.runs import chip_of, framework_of, job_of, mesh_of, predict_run, read_runs
from models.count import num_parameters

DATA = resources.files("jaxpar.planning") / "data"
ROWS = json.loads((DATA / "published_runs.json").read_text())
BY_ID = {row["id"]: row for row in ROWS}


@pytest.fixture(scope="module")
def published():
    return [Run.of(row) for row in ROWS]


def test_every_source_within_its_bar(published):
    """Half of the runs within 10%, nine of ten within 25%: of each source and of all."""
    table = calibration_table()
    by_source = {}
    for run in published:
        by_source.setdefault(run.framework.name, []).append(run)
    assert len(by_source) == len(FRAMEWORKS) - 1
    for each in (*by_source.values(), published):
        found = np.array(errors(each, table))
        assert np.median(found) <= 0.10
        assert np.mean(found <= 0.25) >= 0.9


@pytest.mark.parametrize("name", ["llama3.405b.8192.8192", "llama3.405b.16384.8192", "llama3.405b.16384.131072"])
def test_llama3_within_three_points(name):
    assert predict_run(BY_ID[name], calibration_table()).mfu == pytest.approx(BY_ID[name]["measured"]["mfu"], abs=0.03)


def test_a_source_that_the_fit_has_not_seen(published):
    """Llama 3's runs, from everyone else's."""
    others = [run for run in published if run.framework.name != "llama3"]
    blind = fit(others, calibration_table())
    assert max(errors((run for run in published if run.framework.name == "llama3"), blind)) < 0.1


def test_the_fit_finds_numbers_again(published):
    """Of runs made up from other numbers than the priors, where these hold them loosely; what no run tells stays."""
    table, some = calibration_table(), published[::4]
    true = with_numbers(table, NUMBERS, [number.prior * math.exp(0.5 * number.width) for number in NUMBERS])
    made_up = [dataclasses.replace(run, measured=run.measured * math.exp(run.log_error(true))) for run in some]
    assert max(errors(made_up, true)) < 1e-9
    found = fit(made_up, table, [dataclasses.replace(number, width=10 * number.width) for number in NUMBERS])
    assert max(errors(made_up, found)) < 0.01
    untold = next(number for number in NUMBERS if number.places[0][1:] == ("jaxpar", "overhead"))
    assert get(found, untold.places[0]) == pytest.approx(untold.prior)


def test_the_table_comes_from_the_fit(published):
    """What is in the package is what its own writer writes, and the fit stays there."""
    table = calibration_table()
    assert parse(tomllib.loads(to_toml(table, published))) == table
    again = fit(published, table)
    for number in NUMBERS:
        assert get(again, number.places[0]) == pytest.approx(get(table, number.places[0]), rel=0.02)


def test_what_was_measured_is_not_read(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(ROWS[:3]))
    assert all("measured" not in row for row in read_runs(path))
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no list of runs"):
        read_runs(path)


def test_command_prints_predictions_and_says_what_it_leaves_out(tmp_path, capsys):
    unknown = {**ROWS[0], "id": "other", "chip": "H1000"}
    (tmp_path / "runs.json").write_text(json.dumps([ROWS[0], unknown]))
    command.main([str(tmp_path / "runs.json")])
    printed = capsys.readouterr()
    predictions = json.loads(printed.out)
    assert list(predictions) == [ROWS[0]["id"]]
    assert set(predictions[ROWS[0]["id"]]) == {"tokens_per_second_per_device", "mfu", "memory_bytes"}
    assert predictions[ROWS[0]["id"]]["memory_bytes"] < 80e9
    assert printed.err.startswith("other: no chip is called 'H1000'")


def test_mfu_is_the_sources_own(published):
    """Where both were published, tokens per second times what the source counts for a token is its MFU."""
    for run in published:
        measured = BY_ID[run.row["id"]]["measured"]
        if "mfu" in measured and run.key != "mfu":
            found = predict_run(run.row, calibration_table())
            per_token = found.mfu / found.time.tokens_per_second_per_device
            assert per_token * run.measured == pytest.approx(measured["mfu"], rel=0.02)


def test_chips_as_people_write_them():
    assert chip_of("H100").name == chip_of("H100-SXM-80GB").name == "H100-SXM"
    assert chip_of("TPU v5e").name == "TPU-v5e"
    assert chip_of("A100-40GB").memory_bytes == 40e9
    other = chip_of("H100-SXM-96GB-2.4TBps-500W")
    assert (other.name, other.memory_bytes, other.memory_bandwidth) == ("H100-SXM", 96e9, 2.4e12)


def test_megatrons_experts_lie_over_its_batch():
    row = next(row for row in ROWS if row["mesh"].get("expert", 1) > 1)
    assert row["mesh"] == {"data": 16, "tensor": 2, "pipe": 8, "context": 1, "expert": 32}
    assert mesh_of(row) == {"data": 1, "pipe": 8, "fsdp": 1, "expert": 16, "context": 1, "tensor": 2}
    assert mesh_of({"mesh": {"tensor": 2}, "devices": 64, "fsdp": 32})["fsdp"] == 32


@pytest.mark.parametrize("billions", [16, 32, 64, 128])
def test_models_known_by_size_have_it(billions):
    maxtext = {**BY_ID["maxtext.v5e.16B.256"], "model": {"parameters": billions * 1e9}}
    megatron = {**BY_ID["mcore2024.70B"], "model": {"parameters": billions * 1e9}}
    for row, within in ((maxtext, 0.05), (megatron, 0.2)):
        assert num_parameters(job_of(row, framework_of(row)).model) == pytest.approx(billions * 1e9, rel=within)


def test_what_a_row_leaves_out():
    jobs = {name: job_of(BY_ID[name], framework_of(BY_ID[name])) for name in BY_ID}
    llama = jobs["llama3.405b.8192.8192"]
    assert (llama.chunks, llama.num_microbatches, llama.remat) == (8, 32, "none")
    assert llama.cluster.name == "llama3-h100"
    assert (jobs["megatron2021.145.6B"].chunks, jobs["megatron2021.529.6B"].chunks) == (2, 3)
    assert jobs["maxtext.v5e.16B.512"].batch_size == 6 * 512
    assert [level.size for level in jobs["maxtext.v5e.16B.512"].cluster.levels] == [256, 512]
    assert jobs["titan.8b.fsdp128.compile"].remat.startswith("save=")
    assert all(job.check() is job for job in jobs.values())
    with pytest.raises(ValueError, match="no model is called"):
        predict_run({**ROWS[0], "model": {}, "model_name": "none"}, calibration_table())


@pytest.mark.parametrize(
    ("text", "ours"),
    [("bf16", "bfloat16"), ("FP8-CS", "float8"), ("MXFP8", "float8"), ("NVFP4", "float4"), (None, "bfloat16")],
)
def test_precisions_as_people_write_them(text, ours):
    assert command.precision_of(text) == ours


@pytest.mark.parametrize(
    ("name", "ours"),
    [("DGX-GB200", "GB200"), ("NVIDIA H100 80GB HBM3", "H100-SXM"), ("NVIDIA A100-SXM4-40GB", "A100-40GB")],
)
def test_chips_under_longer_names(name, ours):
    assert chip_of(name).name == ours


@pytest.mark.parametrize(
    "missing", ["microbatch", "global_batch", "mesh", "remat", "pipeline_chunks", "precision", "devices_per_node"]
)
def test_a_run_that_lacks_a_field_is_predicted(missing):
    for row in ROWS[:: len(ROWS) // 12]:
        found = predict_run({key: value for key, value in row.items() if key != missing}, calibration_table())
        assert 0.1 < found.mfu < 0.75


def test_a_microbatch_that_is_left_to_the_framework():
    automatic, unsaid = (predict_run(ROWS[0] | {"microbatch": each}, calibration_table()) for each in ("auto", None))
    assert automatic == unsaid


def test_a_row_that_cannot_be_read_leaves_the_others(tmp_path, capsys):
    path = tmp_path / "runs.json"
    path.write_text(
        json.dumps([{**ROWS[0], "id": "bad", "pipeline": 3, "mesh": {"pipe": 2, "fsdp": 8}}, {"id": "worse"}, ROWS[0]])
    )
    command.main([str(path)])
    assert ROWS[0]["id"] in json.loads(capsys.readouterr().out)
