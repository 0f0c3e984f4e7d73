"""Options of `hpctrain plan`, pair by pair: each has an effect or is refused."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.plan import command
from hpctrain.errors import HpctrainError
from hpctrain.plan.option_conflicts import require_fitting, required_ranks

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
        assert refused(other, one) == f"{one} and {other} conflict with each other"
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
        (("--weak",), "--weak requires --sweep KEY=V,V,..."),
        (("--plot",), "--plot requires --sweep KEY=V,V,... or --search"),
        (("--write",), "--write requires --search"),
        (("--search", "--weak"), "--weak conflicts with --search"),
        (("--sweep", "--link"), "--link conflicts with --sweep"),
        (("--search", "--force"), "--force requires --write FILE"),
        (("--sweep", "--pareto"), "--pareto requires --plot FILE"),
        (("--sweep", "--plot", "--pareto"), ""),
        (("--search", "--write", "--force"), ""),
    ],
)
def test_what_would_be_right_is_said(asked: tuple[str, ...], sentence: str) -> None:
    assert refused(*asked) == sentence


def test_ranks_are_to_be_said() -> None:
    assert required_ranks(4) == 4
    with pytest.raises(HpctrainError, match="add --ranks N"):
        required_ranks(None)


def test_the_verb_asks_before_it_reads_anything(tmp_path: Path) -> None:
    asked = [str(tmp_path / "none.toml"), "--ranks", "4", "--search", "--weak", "--machine", "none"]
    result = CliRunner().invoke(command, asked)
    assert isinstance(result.exception, HpctrainError)
    assert result.exception.problems == ("--weak conflicts with --search",)
