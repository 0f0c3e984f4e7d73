"""Conflicts and requirements of the options of `hpctrain plan`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpctrain.errors import HpctrainError
from hpctrain.text import either

PLAIN = ""
MODES = (PLAIN, "--sweep", "--search", "--rehearse")
"""Options that select what is planned; without any of them, it is the deck as it is."""

_SYNTAX = {"--sweep": "--sweep KEY=V,V,..."}
_SINGLE_DECK_MODES = (PLAIN, "--rehearse")

MODES_OF_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "--link": _SINGLE_DECK_MODES,
    "--step-seconds": _SINGLE_DECK_MODES,
    "--like": _SINGLE_DECK_MODES,
    "--forms": _SINGLE_DECK_MODES,
    "--all-schedules": ("--search",),
    "--write": ("--search",),
    "--force": ("--search",),
    "--weak": ("--sweep",),
    "--pareto": ("--sweep",),
    "--plot": ("--sweep", "--search"),
}
"""Options that have an effect only in some modes."""

_NEEDED = {"--force": ("--write", "--write FILE"), "--pareto": ("--plot", "--plot FILE")}


def require_fitting(options: Collection[str]) -> None:
    """Raise HpctrainError if options, given by name, conflict or lack one that they require."""
    modes = [mode for mode in MODES if mode in options]
    if len(modes) > 1:
        raise HpctrainError(f"{' and '.join(modes)} conflict with each other")
    problems = list(_problems(options, modes[0] if modes else PLAIN))
    if problems:
        raise HpctrainError(problems)


def required_ranks(ranks: int | None) -> int:
    """Return the number of ranks. Raises HpctrainError if it is None."""
    if ranks is None:
        raise HpctrainError("the number of ranks is missing: add --ranks N")
    return ranks


def _problems(options: Collection[str], mode: str) -> Iterator[str]:
    for option, modes in MODES_OF_OPTIONS.items():
        if option not in options:
            continue
        needed, syntax = _NEEDED.get(option, (option, ""))
        if mode in modes:
            if needed not in options:
                yield f"{option} requires {syntax}"
        elif mode == PLAIN:
            yield f"{option} requires {either(_SYNTAX.get(each, each) for each in modes)}"
        else:
            yield f"{option} conflicts with {mode}"
