"""Description of what another value of `model.frozen` means for a run that resumes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import clipped, toml_value
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import bare_model
from hpctrain.model.part import parameter_list
from hpctrain.text import counted

_EXAMPLES = 2


def frozen_change(deck: Deck, before: Deck, path: Path, architecture: Architecture) -> Iterator[str]:
    """Yield a sentence about the parameters that are frozen from now on, and one about those that are not.

    Args:
        deck: The deck of the resumed run.
        before: The deck that the checkpoint was trained with.
        path: The checkpoint, for the sentences.
        architecture: The model.
    """
    if set(deck.model.frozen) == set(before.model.frozen):
        return
    names = [parameter.shard.name for parameter in parameter_list(bare_model(architecture))]
    now, earlier = (_matching(each.model.frozen, names) for each in (deck, before))
    old = clipped(toml_value(before.model.frozen))
    start = f"{path} was trained with {old}"
    if added := [name for name in names if name in now - earlier]:
        rest = "not trained from now on, and their optimizer state is dropped"
        sentence = f"{start}; {_listed(added)} {rest} ({old} would continue to train them)"
        yield deck.problem("model.frozen", sentence)
    if removed := [name for name in names if name in earlier - now]:
        rest = "trained from now on, with new optimizer state"
        sentence = f"{start}; {_listed(removed)} {rest} ({old} would keep them frozen)"
        yield deck.problem("model.frozen", sentence)


def _matching(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _listed(names: Sequence[str]) -> str:
    """Return a phrase such as "2 parameters (a, b) are"."""
    examples = ", ".join(names[:_EXAMPLES]) + (" ..." if len(names) > _EXAMPLES else "")
    return f"{counted(len(names), 'parameter')} ({examples}) {'is' if len(names) == 1 else 'are'}"
