"""Keys of [model] for a module of the user's own (`model.module`), and their checks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import TYPE_CHECKING, Any

from hpctrain.deck.code import CAUSAL_MODEL, is_target, resolve_target
from hpctrain.deck.key import expand_user_path, key_name
from hpctrain.deck.problem import DeckProblem, multiples
from hpctrain.deck.sections.layout import schedule_problems
from hpctrain.deck.sections.model import Model

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

_MODULE_ONLY_KEYS = ("module", "arguments", "miniature", "blocks", "loss", "initial", "buffers", "plan")
"""Keys of [model] that only a deck with a module may have."""


MODULE_KEYS = (*_MODULE_ONLY_KEYS, "frozen", "vocabulary", "from")
"""Keys of [model] that a deck with a module may have."""


FUNCTION_KEYS = "module", "loss", "initial"
"""Keys of `MODULE_KEYS` that name a function or class."""


PLACEHOLDERS: Mapping[str, Any] = {"family": "gpt2", "layers": 1, "hidden": 2, "heads": 1}
"""Values of keys that a transformer requires and that are not read for a deck with a module."""


def fill_module(model: dict[str, Any], deck_name: str) -> None:
    """Make the files of a module's functions absolute, and set placeholders for missing keys, in place.

    The placeholders are those of PLACEHOLDERS. The files need not exist.

    Args:
        model: Table [model] of a deck with `model.module`.
        deck_name: Path of the deck, to whose folder the files are relative.
    """
    for name in FUNCTION_KEYS:
        if isinstance(model.get(name), str):
            model[name] = resolve_target(model[name], deck_name)
    for name, value in PLACEHOLDERS.items():
        model.setdefault(name, value)


def config_arguments(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a class of `transformers` whose configuration `model.from` contains.

    This looks for the file `config.json`, but does not read it.

    Args:
        model: Table `model` of a deck. `model.from` is a folder, absolute or relative to the working
            directory.

    Returns:
        The absolute path of the folder that contains `config.json`, as the argument `config`. None if the
        deck gives arguments, if its module is not a class of `transformers`, or if there is no such file, as
        for a name on a hub.
    """
    target, source = model.get("module"), model.get("from")
    if model.get("arguments") is not None or not isinstance(target, str) or not isinstance(source, str):
        return None
    if target.partition(":")[0].partition(".")[0] != "transformers":
        return None
    folder = os.path.abspath(expand_user_path(source))  # noqa: PTH100
    return {"config": folder} if os.path.isfile(os.path.join(folder, "config.json")) else None  # noqa: PTH113, PTH118


def is_in_resolved_deck(
    key: str, has_module: bool, has_dataset: bool = False, has_mixture: bool = False, has_policy: bool = True
) -> bool:
    """Return True if `deck_text` writes a key, also as a comment, of a deck with these properties.

    It is False for keys that have no use in such a deck, such as model.layers in one with a module. The key
    need not be in the schema.

    Args:
        key: Full name of the key.
        has_module: True if the deck has `model.module`.
        has_dataset: True if it has `data.dataset`.
        has_mixture: True if it has `data.mixture`.
        has_policy: True if its objective trains a policy. It matters only for keys of [policy].
    """
    if (has_mixture and key == "data.tokens") or (key.startswith("policy.") and not has_policy):
        return False
    section, _, name = key.partition(".")
    if has_dataset and key in {"data.tokens", "data.other_tokenizer", "batch.sequence", "model.vocabulary"}:
        return False
    return section != "model" or not has_module or name in MODULE_KEYS


def model_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of [model] that have an effect, with their values.

    For a deck with a module of the user, they are those of MODULE_KEYS; for other decks, all.

    Args:
        model: All keys of the section by name, `module` among them.
    """
    has_module = model["module"] is not None
    return {name: value for name, value in model.items() if is_in_resolved_deck(f"model.{name}", has_module)}


_WITH = ("model.module",)


def module_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of a deck with a module of the user, which is not imported.

    These are functions that are not named as FILE.py:FUNCTION or PACKAGE:FUNCTION, keys of built-in
    transformers that the deck gives, and keys of pipeline stages and tensor ranks that contradict each other,
    or that require model.blocks or model.plan.
    """
    for key in FUNCTION_KEYS:
        if not is_target(getattr(deck.model, key)):
            yield DeckProblem(f"model.{key}", 'must be "FILE.py:FUNCTION" or "PACKAGE:FUNCTION"')
    for name in starmap(key_name, Model.model_fields.items()):
        place = deck.sources.places.get(f"model.{name}")
        if name not in MODULE_KEYS and place is not None and not place.note:
            remedy = "leave it out" + ("" if _has_stored_config(deck) else ", or use [model.arguments]")
            yield DeckProblem(f"model.{name}", f"has no effect with model.module ({remedy})")
    yield from _pipeline(deck)
    yield from _tensor(deck)


def _has_stored_config(deck: Deck) -> bool:
    """Return True if [model.arguments] contain a config.json, as `model.from` sets them."""
    config = (deck.model.arguments or {}).get("config")
    return deck.model.module == CAUSAL_MODEL and str(config).lstrip().startswith("{")


def _tensor(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of tensor parallelism that do not depend on the module."""
    tensor, sequence = deck.layout.tensor, deck.batch.sequence
    if tensor > 1 and deck.model.plan is None:
        sentence = 'requires model.plan for a module (models of transformers may use "its own")'
        if _has_stored_config(deck):
            # model.from sets the plan of every model that has one.
            sentence = "requires model.plan, a table of patterns: transformers has no plan for this model"
        yield DeckProblem("layout.tensor", sentence, ("model.plan", *_WITH))
    if tensor == 1 or not deck.layout.sequence_parallel:
        return
    if deck.data.dataset is not None:
        sentence = "conflicts with data.dataset: it splits the sequences of token files"
        yield DeckProblem("layout.sequence_parallel", sentence, ("data.dataset",))
    elif sequence % tensor:
        sentence = (
            f"must be a multiple of layout.tensor = {tensor} with layout.sequence_parallel "
            f"(use {multiples(sequence, tensor)})"
        )
        yield DeckProblem("batch.sequence", sentence, ("layout.tensor", "layout.sequence_parallel"))


def _pipeline(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of pipeline stages that do not depend on the module."""
    layout = deck.layout
    if layout.pipeline > 1 and deck.model.blocks is None:
        sentence = 'requires model.blocks, which names the blocks of a module (such as "layers.*")'
        yield DeckProblem("layout.pipeline", sentence, ("model.blocks", *_WITH))
    if layout.pipeline > 1 and layout.sequence_parallel:
        sentence = "is unsupported with layout.pipeline above 1 and model.module"
        yield DeckProblem("layout.sequence_parallel", sentence, ("layout.pipeline", *_WITH))
    if isinstance(layout.split, tuple):
        parts = layout.pipeline * layout.chunks
        if len(layout.split) != parts or min(layout.split) < 0 or 0 in layout.split[:-1]:
            made = f"layout.pipeline x layout.chunks = {layout.pipeline} x {layout.chunks}"
            sentence = (
                f"must give 1 block or more to each of the {parts} parts of {made}, or 0 to the "
                "last part, which has the layers after the blocks"
            )
            yield DeckProblem("layout.split", sentence, ("layout.pipeline", "layout.chunks", *_WITH))
    yield from schedule_problems(deck)
