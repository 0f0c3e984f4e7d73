"""Defaults that depend on other keys: written into the tables of a deck before they are validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, TypeGuard

from hpctrain.deck.presets import PRESETS, Preset

Tables = dict[str, dict[str, Any]]

TWO_CHUNKS = frozenset({"interleaved", "zb-v", "v-half", "v-min", "dualpipe-v"})
"""Schedules that need two parts of the model on each stage, or more."""


def find_preset(tables: Tables) -> Preset | None:
    """The preset that the tables name, if there is one of that name."""
    name = tables["model"].get("preset")
    return next((preset for known, preset in PRESETS.items() if known == name), None)


def fill(tables: Tables, deck_name: str, source: Mapping[str, object]) -> tuple[set[str], set[str]]:
    """Write every default that depends on other keys into the tables, in place.

    `deck_name` is the deck's file name, `source` the keys of the model that model.from names. A key stays
    away where the keys it depends on are not given or of a wrong type. Returns the full names
    ("model.layers") of the keys that came from the preset, and of those that came from the source.
    """
    run, model, batch, rate = (tables[name] for name in ("run", "model", "batch", "learning_rate"))
    from_preset: set[str] = set()
    preset = find_preset(tables)
    if preset is not None:
        # A key that follows another one follows the deck's value of it, not the preset's.
        follows = {"key_value_heads": "heads", "mlp": "hidden", "tied": "family"}
        values = {
            name: value for name, value in preset.model_keys().items() if follows.get(name) not in model
        }
        from_preset = {f"model.{name}" for name in values if name not in model}
        tables["model"] = model = {**values, **model}
        if "sequence" not in batch:
            batch["sequence"] = preset.sequence
            from_preset.add("batch.sequence")

    from_source = set()
    for full, value in source.items():
        section, _, name = full.partition(".")
        if name not in tables[section]:
            tables[section][name] = value
            from_source.add(full)

    run.setdefault("title", PurePath(deck_name).stem or "deck")
    if isinstance(run["title"], str) and run["title"]:
        run.setdefault("dir", f"runs/{run['title']}")
    steps = run.get("steps")
    if _whole(steps):
        rate.setdefault("warmup", min(100, steps // 10))
        warmup = rate["warmup"]
        rate.setdefault("decay_steps", max(steps, warmup) if _whole(warmup) else steps)

    layout = tables["layout"]
    layout.setdefault("chunks", 2 if layout.get("schedule") in TWO_CHUNKS else 1)

    family, hidden, heads = (model.get(name) for name in ("family", "hidden", "heads"))
    if _whole(heads):
        model.setdefault("key_value_heads", heads)
    if family == "gpt2":
        model.setdefault("tied", True)
        if _whole(hidden):
            model.setdefault("mlp", 4 * hidden)
    elif family == "llama":
        model.setdefault("tied", False)
        if _whole(hidden):
            model.setdefault("mlp", -(-8 * hidden // (3 * 256)) * 256)
    return from_preset, from_source


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
