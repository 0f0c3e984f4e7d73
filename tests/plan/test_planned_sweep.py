"""Sweeps: every point as the plan of that deck alone, tables, pictures, and what cannot be swept.

Tests of plan/sweep_arguments.py, plan/planned_sweep.py, plan/sweep_text.py and plan/sweep_output.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.plan import command
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.plan import planned_sweep as sweep_module
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.planned_sweep import SweepOptions, short_reason, sweep_deck
from hpctrain.plan.sweep_arguments import parse_sweep, parse_sweeps, points
from hpctrain.plan.sweep_text import sweep_text
from hpctrain.plan.time.machine_rates import parse_machine
from tests.engines import DECK
from tests.plan.time.test_machine_rates import FILE

MACHINE = parse_machine(FILE, "")


@pytest.fixture
def deck(tmp_path: Path) -> Path:
    (tmp_path / "machine.toml").write_text(FILE)
    path = tmp_path / "small.toml"
    path.write_text(DECK)
    return path


def plan(deck: Path, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(deck), *map(str, arguments)])


def refused(deck: Path, *arguments: object) -> HpctrainError:
    result = plan(deck, *arguments)
    assert isinstance(result.exception, HpctrainError), result.output
    assert len(result.exception.problems) == 1
    return result.exception


def test_a_point_is_the_plan_of_its_deck_alone(deck: Path) -> None:
    sweeps = parse_sweeps(["ranks=2,4", "layout.tensor=1,2", "layout.zero=0,3"])
    swept = sweep_deck(deck, None, ["model.layers=4"], sweeps, SweepOptions(rates=MACHINE))
    assert [point.changes for point in swept.points] == list(points(sweeps))
    for point in swept.planned:
        changes = [f"{key}={value}" for key, value in point.changes if key != "ranks"]
        alone = plan_deck(
            deck,
            point.ranks,
            ["model.layers=4", *changes],
            options=PlanOptions(with_savings=False, rates=MACHINE),
        )
        assert point.step == alone.step
        assert point.memory is not None and point.demand is not None and alone.demand is not None
        there, here = point.memory.largest.memory, alone.memory.largest.memory
        assert there.total - there.other == here.total - here.other
        assert (point.fits, point.demand.limit) == (alone.demand.fits, alone.demand.limit)
    without = [dict(point.changes) for point in swept.points if point.memory is None]
    assert without == [{"ranks": "2", "layout.tensor": "2", "layout.zero": "3"}]  # a single data rank


def test_a_point_that_cannot_be_is_a_row_with_its_reason(deck: Path) -> None:
    result = plan(deck, "--ranks", 4, "--sweep", "layout.tensor=2,3", "--json")
    good, bad = json.loads(result.stdout)["points"]
    assert good["changes"] == {"layout.tensor": "2"} and good["total_bytes"] > 0 and "seconds" not in good
    assert bad["problem"].startswith("--set layout.tensor=3: ")
    text = plan(deck, "--ranks", 4, "--sweep", "layout.tensor=2,3").stdout
    row = next(line for line in text.splitlines() if line.startswith("3 "))
    assert "must divide" in row and "--set" not in row


def test_where_no_point_can_be_it_is_said_once(deck: Path) -> None:
    error = refused(deck, "--ranks", 4, "--sweep", "layout.tensor=3,5,6", "--sweep", "layout.zero=0,1")
    assert error.exit_code == 2
    assert error.problems[0].startswith(
        "none of 6 points is supported; the first: --set layout.tensor=3: must"
    )
    wrong = plan(
        deck, "--ranks", 4, "--set", "batch.micro=1", "--set", "run.step=2", "--sweep", "layout.tensor=1,3"
    )
    assert isinstance(wrong.exception, HpctrainError)  # what is wrong with the deck itself
    assert [each.partition(":")[0] for each in wrong.exception.problems] == [
        "--set batch.micro=1",
        "--set run.step=2",
    ]


def test_reasons_leave_out_where_they_are_asked_for() -> None:
    assert short_reason("--set layout.tensor=3: must be 4 (use 5); or 6") == "must be 4"
    assert short_reason("a/deck.toml:14: layout.tensor = 3: must be 4") == "layout.tensor = 3: must be 4"
    assert short_reason("batch.global_size = 3: grown is no whole number") == (
        "batch.global_size = 3: grown is no whole number"
    )


def test_the_batch_grows_with_the_ranks(deck: Path) -> None:
    sweeps = parse_sweeps(["ranks=2,3,4"])
    weak = sweep_deck(deck, None, (), sweeps, SweepOptions(rates=MACHINE, weak=True))
    steps = [point.step for point in weak.points]
    assert all(step is not None for step in steps)
    tokens = [step.tokens for step in steps if step is not None]
    assert tokens == [8 * 32, 12 * 32, 16 * 32]
    base = sweep_deck(deck, 4, (), sweeps, SweepOptions(rates=MACHINE, weak=True))
    assert [point.step.tokens for point in base.points if point.step] == [4 * 32, 6 * 32, 8 * 32]
    five = ["layout.tensor=8", "batch.global_size=5", "batch.micro_size=1"]
    odd = sweep_deck(deck, 8, five, parse_sweeps(["ranks=4,16"]), SweepOptions(weak=True))
    assert "be a whole number" in odd.points[0].problem and odd.points[1].problem == ""


def test_what_does_not_change_is_planned_once(deck: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = sweep_module.MemoryBudget.plan
    monkeypatch.setattr(sweep_module.MemoryBudget, "plan", lambda *all_: calls.append(1) or original(*all_))
    seen = list[int]()
    sweeps = parse_sweeps(["layout.zero=0,1", "learning_rate.peak=1e-3,2e-3,3e-3"])
    swept = sweep_deck(deck, 2, (), sweeps, progress=seen.append)
    assert len(calls) == 2 and len(swept.planned) == 6 and seen == [1, 2, 3, 4, 5, 6]


def test_the_table_tells_every_point(deck: Path) -> None:
    swept = sweep_deck(deck, 4, (), parse_sweeps(["layout.tensor=1,2"]), SweepOptions(rates=MACHINE))
    lines = sweep_text(swept).splitlines()
    assert lines[0] == "small: 2 points on ours"
    assert lines[2].split()[:4] == ["tensor", "step", "tokens/s", "TFLOP/s"]
    assert "products" in lines[3] and "yes" in lines[3]
    best = min(swept.planned, key=lambda point: point.step.seconds if point.step else 0)
    assert f"The fastest that fits is tensor = {best.changes[0][1]}" in lines[-1]
    small = sweep_deck(
        deck, 4, ["machine.memory=1 MB"], parse_sweeps(["layout.tensor=1,2"]), SweepOptions(rates=MACHINE)
    )
    assert sweep_text(small).endswith("No point fits into memory.\n")


def test_rows_of_a_narrow_table_name_their_keys(deck: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = parse_sweeps(["layout.tensor=1,2", "layout.zero=0,1"])
    swept = sweep_deck(deck, 4, (), sweeps, SweepOptions(rates=MACHINE))
    monkeypatch.setattr("hpctrain.plan.sweep_text.columns", lambda: 60)
    lines = sweep_text(swept).splitlines()
    assert max(map(len, lines)) <= 60
    named = [f"tensor = {tensor}, zero = {zero}" for tensor in (1, 2) for zero in (0, 1)]
    assert [line for line in lines[2:] if " = " in line and line[0] == "t"] == named
    monkeypatch.setattr("hpctrain.plan.sweep_text.columns", lambda: 200)
    assert sweep_text(swept).splitlines()[2].split()[:3] == ["tensor", "zero", "step"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sweep", "ranks=2,4"), ("strong scaling", "ideal", "gradient reduction")),
        (("--sweep", "ranks=2,4", "--weak"), ("weak scaling", "planned")),
        (("--ranks", "4", "--sweep", "layout.zero=0,1"), ("zero = 1", "matrix products")),
        (("--ranks", "4", "--sweep", "layout.zero=0,1", "--pareto"), ("memory against time", "1: zero = ")),
    ],
)
def test_pictures_have_their_words(
    deck: Path, ending: str, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    path = deck.parent / f"picture.{ending}"
    result = plan(deck, "--machine", deck.parent / "machine.toml", *options, "--plot", path)
    assert result.exit_code == 0, result.output
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[ending])
    if ending == "svg":
        text = path.read_text()
        assert not [word for word in words if word not in text]


def test_values_may_hold_commas() -> None:
    assert parse_sweep("layout.split=[1, 2],[2,1]").values == ("[1, 2]", "[2,1]")
    links = parse_sweep('communication.emulate="100 Mbit/s, 20 ms","1 Gbit/s"')
    assert links.values == ('"100 Mbit/s, 20 ms"', '"1 Gbit/s"')
    named = parse_sweep("""model.frozen=["a,]b", 'c"'],[]""")
    assert named.values == ("""["a,]b", 'c"']""", "[]")
    assert parse_sweep(" layout.schedule = 1f1b , zb-h1 ").values == ("1f1b", "zb-h1")
    assert parse_sweep("model.from=a,it's").values == ("a", "it's")
    assert parse_sweep("ranks=64,128").key == "ranks"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("layout.tensr=1,2", "did you mean layout.tensor?"),
        ("layuot.tensor=1,2", "did you mean [layout]?"),
        ("tensor=1,2", "did you mean layout.tensor?"),
        ("layout=1,2", "must be written as layout.key=value"),
        ("rank=1", "unknown key"),
        ("layout.tensor", "must be written as section.key=value,value"),
        ("layout.tensor=", "has no values"),
        ("layout.tensor=1,,2", "a value that is empty"),
        ("layout.tensor=1,x", "x: must be a whole number of at least 1, not text"),
        ("layout.tensor=1,0", "0: must be a whole number of at least 1"),
        ("layout.zero=1,4", "4: must be a whole number from 0 to 3"),
        ("layout.tensor=2,2", "2 is given twice"),
        ("precision.compute=fp32,bf61", 'did you mean "bf16"?'),
        ("layout.split=[1,2", "a ] is missing"),
        ('communication.emulate="100 Mbit/s', "a quote is not closed"),
        ("ranks=0", "must be a whole number from 1 to"),
        ("ranks=many", "must be a whole number from 1 to"),
    ],
)
def test_what_cannot_be_swept_is_told_at_its_place(deck: Path, argument: str, words: str) -> None:
    error = refused(deck, "--ranks", 2, "--sweep", argument)
    assert error.exit_code == 2
    assert error.problems[0].startswith(f"--sweep {argument}: ") and words in error.problems[0]


def test_options_that_do_not_go_together_are_told(deck: Path) -> None:
    machine, tensor = ("--machine", deck.parent / "machine.toml"), ("--sweep", "layout.zero=0,1")
    many = ",".join(map(str, range(1, 41)))
    cases = [
        (
            ("--sweep", f"model.layers={many}", "--sweep", f"ranks={many}"),
            "40 x 40 = 1600 points are more than 1000",
        ),
        (("--sweep", "layout.zero=0", "--sweep", "layout.zero=1"), "swept twice"),
        ((), "the number of ranks is missing"),
        (tensor, "the number of ranks is missing"),
        (("--ranks", 2, *tensor, "--weak"), "--weak requires --sweep ranks=N,N"),
        (("--ranks", 2, "--sweep", "ranks=2,4"), "--ranks 2 conflicts with --sweep ranks"),
        (("--ranks", 2, *tensor, "--plot", "a.png"), "--plot requires --machine"),
        (
            ("--ranks", 2, *tensor, *machine, "--plot", "a.gif"),
            "a.gif: the name of a picture must end with",
        ),
    ]
    for arguments, words in cases:
        error = refused(deck, *arguments)
        assert words in error.problems[0] and error.exit_code == 2


def test_files_that_cannot_be_written_or_read_are_told(deck: Path) -> None:
    asked = "--ranks", 2, "--machine", deck.parent / "machine.toml", "--sweep", "layout.zero=0,1"
    error = refused(deck, *asked, "--plot", deck.parent / "nowhere" / "a.png")
    assert isinstance(error, InputOutputError) and error.exit_code == 3
    error = refused(deck.parent / "none.toml", *asked)
    assert isinstance(error, InputOutputError) and "none.toml: cannot be read" in error.problems[0]
