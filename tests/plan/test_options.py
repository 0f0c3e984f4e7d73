"""Options of `hpctrain plan`, pair by pair: none is given in vain."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.plan import command
from hpctrain.errors import HpctrainError
from hpctrain.plan.options import require_fitting, required_ranks

WAYS = ("--sweep", "--search", "--rehearse")
ANYWHERE = ("--ranks", "--set", "--ranks-per-node", "--machine", "--json")
OF_SEARCH, OF_SWEEP = ("--write", "--all-schedules"), ("--weak",)
OF_PLAN = ("--link", "--step-seconds", "--like", "--forms")


def refused(*asked: str) -> str:
    """The sentence, "" where they go together."""
    try:
        require_fitting(asked)
    except HpctrainError as error:
        (sentence,) = error.problems
        return sentence
    return ""


def test_what_goes_with_what() -> None:
    """All that are listed here, which are all that the verb has."""
    every = {each.opts[0] for each in command.params} - {"deck"}
    assert every == {*WAYS, *ANYWHERE, *OF_SEARCH, *OF_SWEEP, *OF_PLAN, "--force", "--pareto", "--plot"}
    for one, other in combinations(WAYS, 2):
        assert refused(other, one) == f"{one} and {other}: give one of them"
    for way in (*WAYS, ""):
        for option in ANYWHERE:
            assert not refused(*filter(None, (way, option)))
        for options, ways in (
            (OF_SEARCH, {"--search"}),
            (OF_SWEEP, {"--sweep"}),
            (OF_PLAN, {"", "--rehearse"}),
            (("--plot",), {"--sweep", "--search"}),
        ):
            for option in options:
                assert bool(refused(*filter(None, (way, option)))) == (way not in ways), (way, option)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("--weak",), "--weak: is of a sweep: give --sweep KEY=V,V,... too"),
        (("--plot",), "--plot: is of a sweep or a search: give --sweep KEY=V,V,... or --search too"),
        (("--write",), "--write: is of a search: give --search too"),
        (("--search", "--weak"), "--weak: is of a sweep, not of a search: leave --weak or --search out"),
        (
            ("--sweep", "--link"),
            "--link: is of a plan of the deck as it is or a rehearsal, not of a sweep: leave --link or "
            "--sweep out",
        ),
        (("--search", "--force"), "--force: says nothing by itself: give --write FILE too"),
        (("--sweep", "--pareto"), "--pareto: says nothing by itself: give --plot FILE too"),
        (("--sweep", "--plot", "--pareto"), ""),
        (("--search", "--write", "--force"), ""),
    ],
)
def test_what_would_be_right_is_said(asked: tuple[str, ...], sentence: str) -> None:
    assert refused(*asked) == sentence


def test_ranks_are_to_be_said() -> None:
    assert required_ranks(4) == 4
    with pytest.raises(HpctrainError, match="give --ranks N"):
        required_ranks(None)


def test_the_verb_asks_before_it_reads_anything(tmp_path: Path) -> None:
    asked = [str(tmp_path / "none.toml"), "--ranks", "4", "--search", "--weak", "--machine", "none"]
    result = CliRunner().invoke(command, asked)
    assert isinstance(result.exception, HpctrainError)
    assert result.exception.problems == (
        "--weak: is of a sweep, not of a search: leave --weak or --search out",
    )
