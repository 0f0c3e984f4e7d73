"""Which options of `hpctrain plan` go together: each is of some of the things that it makes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpctrain.errors import HpctrainError
from hpctrain.text import either

PLAIN = ""
MADE: Mapping[str, str] = {
    PLAIN: "a plan of the deck as it is",
    "--sweep": "a sweep",
    "--search": "a search",
    "--rehearse": "a rehearsal",
}
"""What is made, by the option that asks for it."""

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
"""Options that not all of these have."""

_NEEDED = {"--force": ("--write", "--write FILE"), "--pareto": ("--plot", "--plot FILE")}


def require_fitting(asked: Collection[str]) -> None:
    """HpctrainError where of the options, by name, one would be given in vain."""
    ways = [way for way in MADE if way in asked]
    if len(ways) > 1:
        raise HpctrainError(f"{' and '.join(ways)}: give one of them")
    problems = list(_problems(asked, ways[0] if ways else PLAIN))
    if problems:
        raise HpctrainError(problems)


def required_ranks(ranks: int | None) -> int:
    """Those of a plan or a search. HpctrainError where they are not given."""
    if ranks is None:
        raise HpctrainError("how many ranks the run has is not said: give --ranks N")
    return ranks


def _problems(asked: Collection[str], way: str) -> Iterator[str]:
    for option, ways in OF.items():
        if option not in asked:
            continue
        of = either(MADE[each] for each in ways)
        needed, written = _NEEDED.get(option, (option, ""))
        if way in ways:
            if needed not in asked:
                yield f"{option}: says nothing by itself: give {written} too"
        elif way == PLAIN:
            yield f"{option}: is of {of}: give {either(_WRITTEN.get(each, each) for each in ways)} too"
        else:
            yield f"{option}: is of {of}, not of {MADE[way]}: leave {option} or {way} out"
