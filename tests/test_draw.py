"""Drawings of schedules: every action has its bar, and the files are what their names say."""

import re
import xml.etree.ElementTree as ET

import pytest

from jaxpar import cli
from jaxpar.parallel.pipeline import draw
from jaxpar.parallel.pipeline.kinds import make
from jaxpar.parallel.pipeline.simulate import Times, simulate


def test_text():
    lines = draw.text(make("zb-h1", 2, 3), width=80).plain.splitlines()
    assert [re.sub(r" +", " ", line).strip() for line in lines] == [
        "tick 0 5",
        "stage 0 F0 F1 · B0 W0 F2 B1 W1 B2 W2",
        "stage 1 · F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]
    blocks = draw.text(make("gpipe", 4, 16), width=40).plain.splitlines()
    assert max(map(len, blocks)) <= 40
    assert sum(line.count("BW") for line in blocks) == 4 * 16


@pytest.mark.parametrize("kind", ["1f1b", "zb-v", "terapipe"])
def test_svg_has_every_action(kind, tmp_path):
    schedule = make(kind, 3, 4, num_slices=2 if kind == "terapipe" else None)
    path = tmp_path / "plan.svg"
    draw.save(schedule, simulate(schedule, Times(1, 1, 1, hop=0.1)), path)
    first = path.read_bytes()
    root = ET.fromstring(first)
    assert root.tag.endswith("svg")
    names = re.findall(r"<!-- (.*?) -->", first.decode())
    for microbatch in range(4):
        label = f"{microbatch}:1" if kind == "terapipe" else f"{microbatch}"
        per_stage = {"1f1b": 2, "zb-v": 6, "terapipe": 2}[kind]
        assert names.count(label) >= 3 * per_stage
    assert any(name.startswith(f"{kind}: bubble") for name in names)
    draw.save(schedule, simulate(schedule, Times(1, 1, 1, hop=0.1)), path)
    assert re.sub(rb'id="\w+"|#\w+', b"", path.read_bytes()) == re.sub(rb'id="\w+"|#\w+', b"", first)


def test_png_of_the_command(tmp_path, capsys):
    path = tmp_path / "plan.png"
    arguments = "--kind interleaved-1f1b --chunks 2 --stages 4 --microbatches 8 --json --draw"
    cli.main(["schedule", *arguments.split(), str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    assert capsys.readouterr().out.startswith("{")
