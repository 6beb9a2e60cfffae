"""Pipeline schedules: valid over a sweep, with the published times, bubbles and memory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar import cli
from jaxpar.parallel.pipeline.auto import auto
from jaxpar.parallel.pipeline.kinds import KINDS, make, weight_versions
from jaxpar.parallel.pipeline.schedule import Action, Op, Schedule, from_orders
from jaxpar.parallel.pipeline.simulate import Times, simulate
from jaxpar.parallel.pipeline.validate import assign_slots, validate

CASES = json.loads((Path(__file__).parent / "data" / "pipeline_cases.json").read_text())
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved-1f1b", "ZB1P": "zb-h1"}
"""Of schedules in papers where they are not ours in capitals."""


def rows(table: str) -> list:
    """A table's rows, the long ones slow."""
    return [
        pytest.param(
            row, marks=[pytest.mark.slow] * (row["inputs"]["p"] * row["inputs"]["m"] > 3500), id=f"{row['inputs']}"
        )
        for row in CASES[table]["rows"]
    ]


def published(inputs: dict, name: str) -> tuple[Schedule, Times]:
    """The schedule of a published case, and its times."""
    times = Times(inputs["TF"], inputs["TB"], inputs["TW"], inputs["Tcomm"])
    if name in ("ZB-1p", "ZB-2p"):
        return auto(inputs["p"], inputs["m"], times, int(name[3]) * inputs["p"]), times
    chunks = inputs["v"] if name == "1F1B-I" else None
    return make(NAMES.get(name, name.lower()), inputs["p"], inputs["m"], chunks), times


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_valid(kind):
    least, most = KINDS[kind].chunks
    for stages in range(1, 9):
        for microbatches in range(1, 17):
            for chunks in range(least, (most or 4) + 1):
                schedule = make(kind, stages, microbatches, chunks, 3 if KINDS[kind].needs_slices else None)
                validate(schedule)
                assert schedule.kind == kind
                actions = sum(1 for _ in schedule.actions())
                whole = stages * microbatches * schedule.num_chunks * schedule.num_slices
                assert 2 * whole <= actions <= 3 * whole
                assert (actions > 2 * whole) == schedule.splits_backward


@pytest.mark.parametrize("case", CASES["utilisation"], ids=lambda case: case["source"])
def test_utilisation(case):
    inputs = case["inputs"]
    kind = inputs.get("kind", "interleaved-1f1b" if "v" in inputs else "gpipe")
    schedule = make(kind, inputs["stages"], inputs["microbatches"], inputs.get("v"))
    report = simulate(schedule, Times(inputs["tf"], inputs["tb"] / 2, inputs["tb"] / 2))
    for name, value in case["expected"].items():
        assert getattr(report, name) == pytest.approx(value, abs=case.get("tolerance", 1e-9)), name


@pytest.mark.parametrize("case", CASES["zero_bubble"], ids=lambda case: f"{case['inputs']}")
def test_zero_bubble(case):
    inputs, expected = case["inputs"], case["expected"]
    schedule, times = published(inputs, inputs["schedule"])
    report = simulate(schedule, times, inputs.get("M_W", 0.5))
    ideal = inputs["m"] * (inputs["TF"] + inputs["TB"] + inputs["TW"])
    got = {
        "bubble": report.cost - ideal,
        "makespan": report.makespan,
        "peak_mem_MB": max(report.peak_memory),
        "peak_mem_per_worker": list(report.peak_memory),
    }
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=1e-9), name


@pytest.mark.parametrize("row", rows("table5"))
def test_profiled_bubbles(row):
    """Zero Bubble's table 5 to its last digit, found schedules included."""
    for name, bubble in row["expected"].items():
        schedule, times = published(row["inputs"], name)
        assert simulate(schedule, times).bubble_longest_stage == pytest.approx(bubble, abs=6e-5), name


@pytest.mark.parametrize("row", rows("table8"))
def test_profiled_bubbles_of_zb_v(row):
    """Table 8: ZB-V's there are a search's with these times, ours the hand-made schedule's."""
    for name, bubble in row["expected"].items():
        schedule, times = published(row["inputs"], name)
        tolerance = 2e-3 if name == "ZB-V" else 6e-5
        assert simulate(schedule, times).bubble_longest_stage == pytest.approx(bubble, abs=tolerance), name


@pytest.mark.parametrize("case", CASES["dualpipe"], ids=lambda case: f"{case['inputs']}")
def test_bubbles_as_dualpipe_counts(case):
    inputs = case["inputs"]
    parts, forward, backward, weight = (inputs[name] for name in ("PP", "F", "B", "W"))
    if inputs["schedule"] == "DualPipe":
        bubble = paired_bubble(make("dualpipe-v", parts // 2, 2 * parts), forward, backward, weight, inputs["FB"])
    else:
        schedule = make(NAMES[inputs["schedule"]], parts, 2 * parts)
        report = simulate(schedule, Times(forward, backward - weight, weight))
        bubble = report.makespan - 2 * parts * (forward + backward)
    assert bubble == pytest.approx(case["expected"]["bubble"], abs=1e-9)


def paired_bubble(schedule: Schedule, forward: float, backward: float, weight: float, pair: float) -> float:
    """The longest stage's bubble where a forward pass and the other chunk's backward pass after it are one unit, whose
    outputs leave together; times are a chunk's."""
    time = {Op.F: forward, Op.BW: backward, Op.B: backward - weight, Op.W: weight}
    units: list[list[list[Action]]] = []
    for stage in range(schedule.num_stages):
        units.append([])
        for action in schedule.order(stage):
            last = units[-1][-1] if units[-1] else []
            if action.op is Op.BW and [each.op for each in last] == [Op.F] and last[0].chunk != action.chunk:
                last.append(action)
            else:
                units[-1].append([action])
    waiting = [list(each) for each in units]
    clock, end_of = [0.0] * schedule.num_stages, {}
    while any(waiting):
        before = len(end_of)
        for stage, queue in enumerate(waiting):
            needed = [task for action in queue[0] for task in schedule.needs(stage, action)] if queue else []
            if queue and all(task in end_of for task in needed):
                unit = queue.pop(0)
                start = max([clock[stage], *(end_of[task] for task in needed)])
                clock[stage] = start + (pair if len(unit) == 2 else time[unit[0].op])
                end_of.update((task, clock[stage]) for action in unit for task in schedule.tasks(stage, action))
        assert len(end_of) > before
    busy = [sum(pair if len(unit) == 2 else time[unit[0].op] for unit in each) for each in units]
    return max(clock) - max(busy)


def test_memory():
    for stages, microbatches in ((4, 8), (8, 3), (3, 16)):
        in_flight = [min(stages - stage, microbatches) for stage in range(stages)]
        assert list(simulate(make("1f1b", stages, microbatches)).peak_activations) == in_flight
        assert list(weight_versions(make("pipedream", stages, microbatches))) == in_flight
        assert set(weight_versions(make("pipedream-2bw", stages, microbatches))) == {2}
        assert set(simulate(make("gpipe", stages, microbatches)).peak_activations) == {microbatches}
    assert simulate(make("eager-1f1b", 4, 8)).peak_activations == (7, 5, 3, 1)
    # Megatron-LM: 1 + (P - 1) / (P C) of 1F1B's on the first stage.
    assert simulate(make("interleaved-1f1b", 4, 8, 2)).peak_activations[0] == 5.5
    # DualPipe's README: one more than the parts of the model, in parts.
    assert set(simulate(make("dualpipe-v", 4, 12)).peak_activations) == {(8 + 1) / 2}


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "terapipe"])
def test_slots_are_as_few_as_values_alive(kind):
    """Counted tick by tick; what is in flight from stage to stage has its slot on arrival."""
    schedule = make(kind, 4, 10, num_slices=2 if kind == "terapipe" else None)
    slots, tick_of = assign_slots(schedule), schedule.tick_of
    alive = [[0] * 4 for _ in range(schedule.num_ticks)]
    for task, tick in tick_of.items():
        if task.op is Op.F:
            arrival = tick_of[task._replace(part=task.part - 1)] + 1 if task.part else tick
            for each in range(arrival, tick_of[task._replace(op=Op.B)] + 1):
                alive[each][schedule.locate(task.part)[0]] += 1
    assert slots.count(slots.inputs, 4) == tuple(map(max, zip(*alive)))
    if kind in ("1f1b", "zb-h1"):
        assert slots.count(slots.residuals, 4) == (4, 3, 2, 1)
    if kind == "zb-h1":
        assert slots.count(slots.deferred, 4) == (1, 2, 3, 4)
    if kind in ("1f1b", "zb-h1"):
        assert slots.count(slots.gradients, 4) == (1, 1, 1, 1)
    if kind == "1f1b":
        assert not slots.deferred


def test_hops_that_suit_lockstep():
    """Interleaved and eager 1F1B run one kind of pass per tick: nearly the makespan, where 1F1B takes a third more."""
    report = simulate(make("1f1b", 4, 64))
    assert (report.makespan, report.lockstep_makespan) == (201, 264)
    report = simulate(make("eager-1f1b", 4, 64))
    assert (report.makespan, report.lockstep_makespan) == (201, 204)
    report = simulate(make("interleaved-1f1b", 4, 64, 2))
    assert (report.makespan, report.lockstep_makespan) == (196.5, 200)
    report = simulate(make("zb-h1", 4, 64))
    assert (report.makespan, report.lockstep_makespan) == (195, 195)


def test_unequal_stages_hops_and_slices():
    schedule = make("1f1b", 2, 2)
    report = simulate(schedule, Times((1, 2), (1, 2), (1, 2), hop=0.5))
    # F0 0-1, F1 1-2; the second stage 1.5-3.5, B0 -7.5, F1 -9.5, B1 -13.5; B0 8-10, B1 14-16.
    assert report.makespan == 16
    assert report.utilisation == pytest.approx((2 * 3 + 2 * 6) / (2 * 16))
    assert report.bubble_of_ideal == pytest.approx((32 - 18) / 18)
    assert report.bubble_longest_stage == pytest.approx((16 - 12) / 16)
    # TeraPipe's formula, forward and backward: sum t + (K - 1) max t for slices 1, 2, 3 on 4 stages.
    report = simulate(make("terapipe", 4, 1, num_slices=3), Times(6, 6, 0, slices=(1, 2, 3)))
    assert max(span.end for spans in report.timeline for span in spans if span.action.op is Op.F) == 15


def test_auto_keeps_the_limit():
    times = Times(1.0, 1.1, 0.6, hop=0.1)
    bubbles = []
    for limit in (1, 2.5, 4, 6, 8):
        schedule = auto(4, 12, times, limit, deferred_size=0.4)
        validate(schedule)
        report = simulate(schedule, times, deferred_size=0.4)
        assert max(report.peak_memory) <= limit
        bubbles.append(report.bubble_longest_stage)
    assert bubbles == sorted(bubbles, reverse=True)
    known = [simulate(make(kind, 4, 12), times).bubble_longest_stage for kind in ("zb-h1", "zb-h2")]
    assert bubbles[0] > 0.5
    assert bubbles[2] <= known[0]
    assert bubbles[4] <= known[1]
    for stages, microbatches in ((1, 1), (1, 5), (5, 1), (8, 3), (7, 16)):
        validate(auto(stages, microbatches))


def test_validator_finds_what_is_wrong():
    good = make("zb-h1", 3, 4)
    validate(good)
    rows = [list(row) for row in good.table]

    def broken(change) -> str:
        table = [list(row) for row in rows]
        change(table)
        with pytest.raises(ValueError, match="zb-h1: ") as error:
            validate(replace(good, table=tuple(map(tuple, table))))
        return str(error.value)

    def swap(table):
        table[0], table[1] = table[1], table[0]

    def lose(table):
        table[-1][0] = None

    def repeat(table):
        table[0][2] = Action(Op.F, 3)

    def shorten(table):
        table[2].pop()

    assert "F0 runs on stage 1 in tick 0, but needs F of part 0, which runs in tick 1" in broken(swap)
    assert "W of microbatch 3, slice 0 in part 0 runs 0 times, not 1" in broken(lose)
    assert "F of microbatch 3, slice 0 in part 2 runs 2 times, not 1" in broken(repeat)
    assert "tick 2 has not 3 stages" in broken(shorten)
    with pytest.raises(ValueError, match="x is stuck at tick 1: stage 0 waits for ever to run BW0"):
        from_orders("x", [[Action(Op.F, 0), Action(Op.BW, 0)], [Action(Op.BW, 0), Action(Op.F, 0)]], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zbh1", 4, 8), "pipeline schedule 'zbh1' is unknown; did you mean zb-h1"),
        (("gpip", 0, 8), "pipeline schedule 'gpip' is unknown; did you mean gpipe"),
        (("interleaved-1f1b", 4, 8), "interleaved-1f1b needs 2 or more chunks per stage, none given"),
        (("1f1b", 4, 8, 2), "1f1b needs exactly 1 chunk per stage, not 2; interleaved-1f1b and looped-bfs take more"),
        (("zb-v", 4, 8, 3), "zb-v needs exactly 2 chunks per stage, not 3"),
        (("terapipe", 4, 8), "terapipe needs the number of token slices per microbatch, 1 or more, none given"),
        (("gpipe", 4, 8, 1, 2), "gpipe does not slice sequences, so not 2 slices; terapipe does"),
        (("1f1b", 4, 0), "1f1b with 0 microbatches is no pipeline; take at least 1"),
    ],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(*arguments)


def test_bad_times():
    schedule = make("1f1b", 4, 8)
    for times, message in (
        (Times(-1), "forward time -1 is out of range"),
        (Times(hop=float("nan")), "hop time nan is out of range; take 0 to 1e"),
        (Times((1, 2)), "2 forward times for 4 stages; give one, or one per stage"),
        (Times(0, 0, 0), "every time is 0"),
        (Times(slices=(1, 2)), "2 shares of time for 1 token slices"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(schedule, times)
    with pytest.raises(ValueError, match="deferred size 2 is not a share"):
        simulate(schedule, deferred_size=2)
    with pytest.raises(ValueError, match=r"memory limit 0.5 is below one microbatch's activations; take at least 1"):
        auto(4, 8, memory_limit=0.5)


def test_command(capsys):
    cli.main(["schedule", "--kind", "1f1b", "--stages", "4", "--microbatches", "8", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert got.pop("table")[3] == ["F3", "F2", "F1", "F0"]
    assert got == {
        "kind": "1f1b",
        "stages": 4,
        "microbatches": 8,
        "ticks": 22,
        "makespan": 33,
        "lockstep_makespan": 40,
        "bubble_of_total": pytest.approx(9 / 33),
        "bubble_of_ideal": pytest.approx(9 / 24),
        "bubble_longest_stage": pytest.approx(9 / 33),
        "utilisation": pytest.approx(24 / 33),
        "peak_activations": [4, 3, 2, 1],
        "peak_deferred": [0, 0, 0, 0],
    }
    bubbles = {}
    for kind in ("zb-h1", "zb-h2", "auto"):
        cli.main(["schedule", "--kind", kind, "--stages", "4", "--microbatches", "8", "--memory-limit", "7", "--json"])
        got = json.loads(capsys.readouterr().out)
        bubbles[kind] = got["bubble_longest_stage"]
        assert got["kind"] == kind
    assert bubbles == {"zb-h1": pytest.approx(3 / 27), "zb-h2": 0, "auto": 0}
    arguments = "--kind zb-v --stages 2 --microbatches 3 --times 2,3,1 --hop 0.5"
    cli.main(["schedule", *arguments.split()])
    shown = capsys.readouterr().out
    assert "F0.0 F1.0 F2.0 F0.1 B0.1 W0.1" in shown
    assert "lockstep_makespan" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kind 1f1b --memory-limit 3", "1f1b holds 4 activations, above --memory-limit 3; raise it, or take --kind"),
        ("--kind 1f1b --times 1,2", "--times has 2 numbers; give 3: F,B,W"),
        ("--kind 1f1b --times 1,2,x", "--times '1,2,x' is no list of numbers; give 3: F,B,W"),
        ("--kind 1f1b --times -1,1,1", "error: forward time -1.0 is out of range; take 0 to"),
        ("--kind auto --chunks 2", "--kind auto searches tables of one chunk and one slice"),
        ("--kind 1f1b --draw plan.pdf", "cannot draw plan.pdf; give it a name that ends in .png or .svg"),
        ("--kind 1f1b --draw nowhere/plan.svg", "nowhere is no directory; make it first"),
        ("--kind 1f1b --hopp 3", "unknown flag --hopp; known: --chunks, --deferred-size"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["schedule", "--stages", "4", "--microbatches", "8", *flags.split()])
    assert stop.value.code != 0
    assert message in capsys.readouterr().err
