"""Conflicts and requirements of the options of `hpctrain plan`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpctrain.errors import HpctrainError
from hpctrain.text import either

PLAIN = ""
MODES = (PLAIN, "--sweep", "--search", "--rehearse")
"""Options that select what is planned; without any of them, it is the deck as it is."""

_WRITTEN = {"--sweep": "--sweep KEY=V,V,..."}
_AS_IT_IS = (PLAIN, "--rehearse")

OF: Mapping[str, tuple[str, ...]] = {
    "--link": _AS_IT_IS,
    "--step-seconds": _AS_IT_IS,
    "--like": _AS_IT_IS,
    "--forms": _AS_IT_IS,
    "--all-schedules": ("--search",),
    "--write": ("--search",),
    "--force": ("--search",),
    "--weak": ("--sweep",),
    "--pareto": ("--sweep",),
    "--plot": ("--sweep", "--search"),
}
"""Options that have an effect only in some modes."""

_NEEDED = {"--force": ("--write", "--write FILE"), "--pareto": ("--plot", "--plot FILE")}


def require_fitting(asked: Collection[str]) -> None:
    """Raise HpctrainError if options, given by name, conflict or lack one that they require."""
    ways = [way for way in MODES if way in asked]
    if len(ways) > 1:
        raise HpctrainError(f"{' and '.join(ways)} conflict with each other")
    problems = list(_problems(asked, ways[0] if ways else PLAIN))
    if problems:
        raise HpctrainError(problems)


def required_ranks(ranks: int | None) -> int:
    """Return the number of ranks. Raises HpctrainError if it is None."""
    if ranks is None:
        raise HpctrainError("the number of ranks is missing: add --ranks N")
    return ranks


def _problems(asked: Collection[str], way: str) -> Iterator[str]:
    for option, ways in OF.items():
        if option not in asked:
            continue
        needed, written = _NEEDED.get(option, (option, ""))
        if way in ways:
            if needed not in asked:
                yield f"{option} requires {written}"
        elif way == PLAIN:
            yield f"{option} requires {either(_WRITTEN.get(each, each) for each in ways)}"
        else:
            yield f"{option} conflicts with {way}"
