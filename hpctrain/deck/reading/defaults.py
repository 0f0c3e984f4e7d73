"""Defaults that depend on other keys, which are added to the tables of a deck before their validation."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeGuard

from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.decays import ENDLESS, WITH_COOLDOWN
from hpctrain.deck.families import FAMILIES, family_values
from hpctrain.deck.key import selecting_key
from hpctrain.deck.presets import preset_named
from hpctrain.deck.reading.nested import Tables, choices_in, look_up, remove, table_in
from hpctrain.deck.reading.old_keys import NONE
from hpctrain.deck.run_length import CompletedWork, add_steps
from hpctrain.deck.schedules import TWO_CHUNKS
from hpctrain.deck.schema import field_of, fields
from hpctrain.deck.schema import tables as schema_tables
from hpctrain.deck.sections.data import fill_dataset
from hpctrain.deck.sections.mixture import fill_mixture
from hpctrain.deck.sections.module import fill_module
from hpctrain.deck.sections.objective import SCORE_KINDS
from hpctrain.deck.sections.optimizer import MuonTable
from hpctrain.deck.sections.policy import fill_policy, fill_rewards


@dataclass(frozen=True)
class FilledKeys:
    """Full names of the keys that `fill_defaults` added, by the origin of their values, for messages.

    Attributes:
        preset: Keys whose values are from the preset.
        source: Keys whose values are from the model in `model.from`.
        others: Keys whose values follow from other keys of the deck.
    """

    preset: set[str]
    source: set[str]
    others: set[str]


def fill_defaults(
    tables: Tables,
    deck_name: str,
    source: Mapping[str, object],
    completed: CompletedWork = CompletedWork(),  # noqa: B008
) -> FilledKeys:
    """Add all defaults that depend on other keys to the tables in place, and return which keys were added.

    A default is left out if the keys that it depends on are missing or have a wrong type. Names of files with
    the user's functions become absolute, and tables with the value "none" are removed. Defaults that do not
    depend on other keys are not added, except for those of keys that select a table, and these tables.
    Nothing is read or validated.

    Args:
        tables: All sections of the deck, empty ones included. Old keys have no effect here, so `rename_keys`
            must have renamed them.
        deck_name: Name of the deck's file, to whose folder files with functions are relative.
        source: Keys that the model in `model.from` determines, by full name; empty without such a model.
        completed: Work that the resumed run has completed.
    """
    batch = tables["batch"]
    filled = FilledKeys(set(), set(), set())
    preset = preset_named(tables["model"].get("preset"))
    if preset is not None:
        model = tables["model"]
        # A default that follows from another key follows from the deck's value of it, not from the preset's.
        follows = {"key_value_heads": "heads", "mlp": "hidden", "tied": "family", "head_size": "heads"}
        scored = _of_scores(tables)
        values = {
            name: value
            for name, value in preset.model.items()
            if follows.get(name) not in model and (name, scored) != ("tied", True)
        }
        for table, keys in preset.tables.items():
            own = model.get(table, {})
            if not isinstance(own, dict) or own.get("kind", keys.get("kind")) != keys.get("kind"):
                continue
            follows_others = {"mlp"} if {"hidden", "mlp"} & model.keys() else set[str]()
            defaults = {name: value for name, value in keys.items() if name not in follows_others}
            filled.preset.update(f"model.{table}.{name}" for name in defaults if name not in own)
            model = {**model, table: {**defaults, **own}}
        filled.preset.update(f"model.{name}" for name in values if name not in model)
        tables["model"] = {**values, **model}
        if "sequence" not in batch:
            batch["sequence"] = preset.sequence
            filled.preset.add("batch.sequence")

    for full, value in source.items():
        path, _, name = full.rpartition(".")
        if look_up(tables, path) == NONE:  # a deck without this table, which contradicts the model
            continue
        if look_up(tables, full) is None and not (full == "model.tied" and _of_scores(tables)):
            table_in(tables, path)[name] = value
            filled.source.add(full)

    if tables["model"].get("module") is not None:
        fill_module(tables["model"], deck_name)
    if tables["data"].get("dataset") is not None:
        fill_dataset(tables, deck_name)
    elif tables["data"].get("mixture") is not None:
        fill_mixture(tables)
    fill_rewards(tables["policy"], deck_name)
    _select_tables(tables)
    tables["run"].setdefault("title", PurePath(deck_name).stem or "deck")
    _add_dependent_defaults(tables, filled.others, completed)
    return filled


def _select_tables(tables: Tables) -> None:
    """Add defaults of keys that select tables, and the selected tables. Remove optional "none" tables."""
    for name in schema_tables():
        if look_up(tables, name) == NONE and (field := field_of(name)) and not selecting_key(field):
            remove(tables, name)
    for path, table, choice, names in choices_in(tables):
        if not (field := fields(path)[choice]).is_required():
            table.setdefault(choice, field.default)
        if isinstance(value := table.get(choice), str) and value in names:
            table.setdefault(value, {})


def is_default(tables: Tables, key: str) -> bool:
    """Return True if a key has the value that it would get from other keys if it were missing.

    The result is False for keys whose default does not depend on other keys, and for a key that is missing.
    Values from `model.from` and from the preset, and work that a run has completed, do not count.

    Args:
        tables: All sections of the deck, empty ones included, before or after `fill_defaults`. They are not
            changed.
        key: Full name of the key.
    """
    without = deepcopy(tables)
    remove(without, key)
    followed = fill_defaults(without, "", {}).others
    return key in followed and look_up(without, key) == look_up(tables, key)


def default_decay(optimizer: object) -> str:
    """Return the default of learning_rate.decay for a value of optimizer.name, which need not be valid."""
    return "constant" if optimizer == "schedule-free" else "cosine"


def _add_dependent_defaults(tables: Tables, filled: set[str], completed: CompletedWork) -> None:
    def default(path: str, name: str, value: object) -> None:
        table = table_in(tables, path)
        if name not in table:
            table[name] = value
            filled.add(f"{path}.{name}")

    run, model = tables["run"], tables["model"]
    if add_steps(tables, completed):
        filled.add("run.steps")
    if isinstance(run["title"], str) and run["title"]:
        default("run", "dir", f"runs/{run['title']}")
    steps = run.get("steps")
    rate = tables["learning_rate"]
    default("learning_rate", "decay", default_decay(tables["optimizer"].get("name")))
    if _is_integer(steps):
        end = rate.get("decay_steps") if rate.get("decay") not in ENDLESS else None
        default("learning_rate", "warmup", min(100, min(steps, end if _is_integer(end) else steps) // 10))
        warmup = rate["warmup"]
        default("learning_rate", "decay_steps", max(steps, warmup) if _is_integer(warmup) else steps)
        if rate.get("decay") not in WITH_COOLDOWN:
            default("learning_rate", "cooldown", 0)
        elif _is_integer(warmup) and _is_integer(end := rate["decay_steps"]):
            default("learning_rate", "cooldown", max(0, min(max(1, end // 10), end - warmup)))

    if isinstance(muon := tables["optimizer"].get("muon"), dict):
        default(
            "optimizer.muon",
            "nesterov",
            muon.get("momentum", MuonTable.model_fields["momentum"].default) != 0,
        )

    fill_policy(tables, default)
    schedule = tables["layout"].get("schedule")
    two = isinstance(schedule, str) and schedule in TWO_CHUNKS
    default("layout", "chunks", 2 if two else 1)

    if isinstance(experts := model.get("experts"), dict):
        if isinstance(name := model.get("family"), str) and name in FAMILIES:
            for key, value in FAMILIES[name].experts.items():
                default("model.experts", key, value)
        default("model.experts", "balance_loss", 0.01 if experts.get("balance", "loss") == "loss" else 0.0)
    family, hidden, heads = (model.get(name) for name in ("family", "hidden", "heads"))
    if _is_integer(heads):
        default("model", "key_value_heads", heads)
        if _is_integer(hidden) and heads > 0:
            default("model", "head_size", max(1, hidden // heads))
    if isinstance(model.get("latent"), dict) and _is_integer(model.get("head_size")):
        default("model.latent", "value_size", model["head_size"])
    as_base = model.get("parametrization") == "mup" and model.get("base_width") == hidden
    if as_base and _is_integer(model.get("head_size")):
        default("model", "base_head_size", model["head_size"])
    if isinstance(family, str) and family in FAMILIES:
        for key, value in family_values(family, hidden if _is_integer(hidden) and hidden > 0 else 1).items():
            default("model", key, value and not _of_scores(tables) if key == "tied" else value)
        name = model["activation"]
        activation = ACTIVATIONS.get(name) if isinstance(name, str) else None
        if _is_integer(hidden) and activation is not None:
            default("model", "mlp", -(-8 * hidden // (3 * 256)) * 256 if activation.gated else 4 * hidden)
    if isinstance(experts, dict) and _is_integer(model.get("mlp")):
        default("model.experts", "mlp", model["mlp"])


def _of_scores(tables: Tables) -> bool:
    """Return True if the model computes scores, so that its output layer is not tied to the embedding."""
    return tables["objective"].get("kind") in SCORE_KINDS


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
