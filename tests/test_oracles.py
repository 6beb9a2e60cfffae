"""Published figures, answered from their topic, their inputs and the form of the answer alone."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from jaxpar.planning.oracles import answer

ROOT = Path(__file__).parent.parent
FIGURES = json.loads((ROOT / "tests" / "data" / "published_figures.json").read_text())
TOPICS = sorted({figure["topic"] for figure in FIGURES})


def form(value):
    """The structure of an answer, without it."""
    if isinstance(value, dict):
        return {key: form(each) for key, each in value.items()}
    return [form(each) for each in value] if isinstance(value, list) else None


def agrees(given, expected, tolerance):
    if isinstance(expected, dict):
        return given.keys() == expected.keys() and all(
            agrees(given[key], each, tolerance) for key, each in expected.items()
        )
    if isinstance(expected, list):
        return len(given) == len(expected) and all(agrees(*pair, tolerance) for pair in zip(given, expected))
    if tolerance == "exact" or isinstance(expected, (bool, str)):
        return given == expected
    return given == pytest.approx(expected, rel=tolerance.get("rel", 0), abs=tolerance.get("abs", 0) + 1e-12)


def test_every_topic_has_figures():
    assert len(FIGURES) > 150
    assert min(Counter(figure["topic"] for figure in FIGURES).values()) >= 2


@pytest.mark.parametrize("topic", TOPICS)
def test_figures(topic):
    wrong = []
    for figure in FIGURES:
        if figure["topic"] == topic:
            case = {"topic": topic, "inputs": figure["inputs"], "answer_form": form(figure["expected"])}
            given = answer(case)
            if given is None or not agrees(given, figure["expected"], figure["tolerance"]):
                wrong.append((figure["source"], figure["inputs"], given, figure["expected"]))
    assert not wrong


@pytest.mark.parametrize("topic", ["zero", "params", "accelerators"])
def test_expected_values_are_not_looked_at(topic):
    figure = next(figure for figure in FIGURES if figure["topic"] == topic)
    case = {"topic": topic, "inputs": figure["inputs"]}
    fake = {key: -1 for key in figure["expected"]} if isinstance(figure["expected"], dict) else -1
    assert answer({**case, "expected": fake}) == answer({**case, "answer_form": form(figure["expected"])})
    assert agrees(answer({**case, "expected": fake}), figure["expected"], figure["tolerance"])


@pytest.mark.parametrize(
    "case",
    [
        {"topic": "weather", "inputs": {"params": 1e9}, "answer_form": None},
        {"topic": "params", "inputs": {"model": "no-such-model"}, "answer_form": None},
        {"topic": "params", "inputs": {}, "answer_form": None},
        {"topic": "zero", "inputs": {"params": 1e9, "dp": 8}, "answer_form": {"Pos": None, "unheard_of": None}},
        {"topic": "zero", "inputs": {"params": "many", "dp": 8}, "answer_form": {"Pos": None}},
        {"topic": "accelerators", "inputs": {"chip": "A100-80GB"}, "answer_form": {"fp8": None}},
    ],
)
def test_what_is_not_known_is_left_out(case):
    assert answer(case) is None


@pytest.mark.parametrize(
    ("topic", "inputs", "answer_form", "expected"),
    [
        # Other numbers and spellings of what the figures ask.
        ("params", {"model": "meta-llama/Llama-2-70b-hf"}, None, 68976648192),
        (
            "params",
            {"model": "Mixtral-8x7B"},
            {"total": None, "active": None},
            {"total": 46702792704, "active": 12879925248},
        ),
        ("zero", {"params": 1e9, "dp": 2}, {"Pos_g_p": None}, {"Pos_g_p": 8.0}),
        ("collectives", {"ranks": 4, "algbw": 100}, {"all_reduce": None}, {"all_reduce": 150.0}),
        ("accelerators", {"chip": "H100"}, {"hbm_GB": None, "link_GBps": None}, {"hbm_GB": 80.0, "link_GBps": 450.0}),
        ("pipeline", {"stages": 2, "microbatches": 2}, {"bubble_of_ideal": None}, {"bubble_of_ideal": 0.5}),
        ("training_cost", {"params": 1e9, "tokens": 1e9, "gpu_hours": 10, "peak": 1e15}, None, 1 / 6),
    ],
)
def test_other_inputs(topic, inputs, answer_form, expected):
    given = answer({"topic": topic, "inputs": inputs, "answer_form": answer_form})
    assert agrees(given, expected, {"rel": 1e-12})


def test_command(tmp_path):
    path = tmp_path / "cases.json"
    cases = [
        {"id": "a", "topic": "zero", "inputs": {"params": 1e9, "dp": 4}, "answer_form": {"Pos": None}},
        {"id": "b", "topic": "zero", "inputs": {}, "answer_form": None},
    ]
    path.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "jaxpar.planning.oracles"]
    done = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {"a": {"Pos": 7.0}}
    failed = subprocess.run([*command, "none.json"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert failed.returncode == 2
    assert "No such file or directory: 'none.json'" in failed.stderr
