"""Names that keys of a deck had before, and how a deck that has them is read.

`OLD_KEYS` is the whole table. A key that moved into a table that a choice selects (`{name}` stands for the
value of `optimizer.name`) is dropped if the deck makes another choice and the key has its default there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from hpctrain.deck.nested import look_up, table_in
from hpctrain.deck.schema import field_of, fields, tables
from hpctrain.deck.sources import Place, toml_value

NONE = "none"
"""Value that a deck may give to a key of an optional table, to have no such table."""


@dataclass(frozen=True)
class OldKey:
    """New name of a key.

    Attributes:
        name: Full name; a part in braces is the value of the key of that name in the table before it.
        off: Value of the old key that switched the optional table of the new key off, if there was one.
        default: Default that the key had, if it differs from the one that it has now.
    """

    name: str
    off: object = None
    default: object = None


OLD_KEYS: Mapping[str, OldKey] = {
    "machine.memory_per_node": OldKey("machine.memory"),
    **{
        f"optimizer.{name}": OldKey(f"optimizer.{{name}}.{name}")
        for name in ("beta1", "beta2", "epsilon", "momentum", "nesterov")
    },
    **{
        f"optimizer.{name}": OldKey(f"optimizer.muon.{name}")
        for name in ("matrices", "match", "newton_schulz", "newton_schulz_steps", "others_rate")
    },
    "model.experts": OldKey("model.experts.count", off=0),
    "model.experts_per_token": OldKey("model.experts.per_token"),
    "model.expert_mlp": OldKey("model.experts.mlp"),
    "model.shared_experts": OldKey("model.experts.shared"),
    "model.expert_every": OldKey("model.experts.every"),
    **{
        f"model.{name}": OldKey(f"model.experts.{name}")
        for name in (
            *("dense_first", "router", "router_normalize", "router_scale", "router_groups"),
            *("router_groups_per_token", "router_dtype", "router_z_loss", "balance", "balance_loss"),
            *("balance_over", "balance_rate", "capacity", "record_routing"),
        )
    },
    "communication.ratio": OldKey("communication.topk.ratio"),
    "communication.rank": OldKey("communication.powersgd.rank"),
    "communication.compress_between": OldKey("communication.{compress}.between"),
    "communication.error_feedback": OldKey("communication.{compress}.error_feedback"),
    "layout.replicas": OldKey("layout.local_steps.replicas", off=1),
    "communication.outer": OldKey("layout.local_steps.outer", off="average"),
    "communication.local_steps": OldKey("layout.local_steps.steps"),
    "communication.outer_learning_rate": OldKey("layout.local_steps.diloco.learning_rate"),
    "communication.outer_momentum": OldKey("layout.local_steps.diloco.momentum"),
    "communication.fragments": OldKey("layout.local_steps.fragments"),
    "communication.delay": OldKey("layout.local_steps.delay"),
    "communication.blend": OldKey("layout.local_steps.blend"),
    "communication.outer_format": OldKey("layout.local_steps.format"),
    "communication.server": OldKey("communication.server.mode", off=NONE),
    "communication.server_ranks": OldKey("communication.server.ranks"),
    "communication.staleness": OldKey("communication.server.staleness"),
    "communication.staleness_correction": OldKey("communication.server.correction"),
    "communication.compensation": OldKey("communication.server.compensation"),
}
"""Old full name -> new one. Keys that select tables stand before the keys of these tables."""


def current_field(key: str) -> FieldInfo | None:
    """Return the field of a key by its present or an old name; None if there never was such a key."""
    names = new_names(key)
    return field_of(names[0]) if names else field_of(key)


def new_names(key: str) -> list[str]:
    """Return all names that an old key may have now, depending on choices; none if it is no old key."""
    old = OLD_KEYS.get(key)
    if old is None:
        return []
    head, brace, rest = old.name.partition("{")
    if not brace:
        return [old.name]
    choice, _, tail = rest.partition("}")
    names = (f"{head}{value}{tail}" for value in tables()[head.rstrip(".")].choices()[choice])
    return [name for name in names if field_of(name) is not None]


@dataclass(frozen=True)
class RenamedKey:
    """One old key that a deck has.

    Attributes:
        old: Its old name.
        new: Its new name; "" if it has no effect and was dropped.
        place: Where it was written.
        problem: End of a sentence if it has no effect and another value than its default; else "".
        others: Keys that the problem depends on.
    """

    old: str
    new: str
    place: Place
    value: object
    problem: str = ""
    others: tuple[str, ...] = ()

    @property
    def warning(self) -> str:
        """One line that names the new key."""
        now = (
            f"is now {self.new}"
            if self.new
            else f"is now a key of {_homes(self.old)}, and has no effect here"
        )
        return f"{self.place.prefix}: {self.old} {now}"


def _homes(old: str) -> str:
    homes = dict.fromkeys(f"[{name.rpartition('.')[0]}]" for name in new_names(old))
    return " and ".join(homes)


def rename_keys(
    values: dict[str, Any], places: dict[str, Place], has_table: Callable[[str], bool]
) -> Iterator[RenamedKey]:
    """Move the values of old keys to their new names, in place, and yield what was moved or dropped.

    Args:
        values: Sections of a deck by name, as a file gives them.
        places: Places of its keys by full name.
        has_table: Tells whether the preset or source of the model brings an optional table.
    """
    names = (key for key in OLD_KEYS if key not in tables())
    written = {key: value for key in names if (value := _take(values, key)) is not None}
    in_use = {
        table
        for key, value in written.items()
        if OLD_KEYS[key].off is not None and value != OLD_KEYS[key].off
        for table in _optional_tables(new_names(key)[0])
    }
    for key, value in written.items():
        place = places.pop(key)
        new, others = _target(key, values, lambda table: table in in_use or has_table(table))
        old = OLD_KEYS[key]
        if new:
            _put(values, places, new, value, place)
            yield RenamedKey(key, new, place, value)
        elif value == old.off:
            optional = _optional_tables(new_names(key)[0])[0]
            if has_table(optional) and look_up(values, optional) is None:
                _put(values, places, optional, NONE, place)
            yield RenamedKey(key, "", place, value)
        else:
            same = value == (_default(new_names(key)[0]) if old.default is None else old.default)
            problem = "" if same else f"has no effect {_choice_text(values, others[0])} (leave it out)"
            yield RenamedKey(key, "", place, value, problem, others)


def renamed_word(key: str, value: object, place: Place) -> tuple[object, RenamedKey | None]:
    """Return the table that a value stands for which the name of a table had when it was a key with values.

    Any other value is returned as it is, with None.
    """
    old = OLD_KEYS.get(key) if key in tables() else None
    if old is None or isinstance(value, dict) or value == NONE:
        return value, None
    renamed = RenamedKey(key, old.name, place, value)
    return (NONE if value == old.off else {old.name.rpartition(".")[2]: value}), renamed


def _target(
    key: str, values: Mapping[str, Any], has_table: Callable[[str], bool]
) -> tuple[str, tuple[str, ...]]:
    """Return the new name of an old key, or "" and the keys because of which it has no effect."""
    others: tuple[str, ...] = ()
    for name in new_names(key):
        parts = name.split(".")
        for length in range(2, len(parts)):
            table, parent = ".".join(parts[:length]), ".".join(parts[: length - 1])
            choice = next(
                (each for each, of in tables()[parent].choices().items() if parts[length - 1] in of), ""
            )
            if choice:
                if _chosen(values, f"{parent}.{choice}") != parts[length - 1]:
                    others = (f"{parent}.{choice}",)
                    break
            elif not (has_table(table) or isinstance(look_up(values, table), dict)):
                others = (table,)
                break
        else:
            return name, ()
    return "", others


def _choice_text(values: Mapping[str, Any], key: str) -> str:
    """Return a choice with its value, or an absent table, as a message names it."""
    if key in tables():
        return f"without [{key}]"
    return f"with {key} = {toml_value(_chosen(values, key))}"


def _chosen(values: Mapping[str, Any], key: str) -> object:
    """Return the value of a key that selects a table: as given, of a table that is given, or the default."""
    path, _, choice = key.rpartition(".")
    names = tables()[path].choices()[choice]
    given = (name for name in names if isinstance(look_up(values, f"{path}.{name}"), dict))
    return look_up(values, key, next(given, fields(path)[choice].default))


def _optional_tables(key: str) -> list[str]:
    """Return the tables of a full name that no choice selects, the outermost first; without the section."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(2, len(parts)))
    return [name for name in names if not any(name.rpartition(".")[2] in of for of in _choices_of(name))]


def _choices_of(table: str) -> list[dict[str, str]]:
    return list(tables()[table.rpartition(".")[0]].choices().values())


def _default(key: str) -> object:
    field = field_of(key)
    return None if field is None or field.is_required() else field.default


def _take(values: dict[str, Any], key: str) -> Any:
    """Remove and return the value of an old key; None if the deck does not have it."""
    table, _, name = key.rpartition(".")
    section = values.get(table)
    if not isinstance(section, dict) or name not in section:
        return None
    return section.pop(name)


def _put(values: dict[str, Any], places: dict[str, Place], key: str, value: object, place: Place) -> None:
    """Write a value under its new name, unless a `--set` argument or the same file has it there."""
    path, _, name = key.rpartition(".")
    table = table_in(values, path)
    known = places.get(key)
    if name not in table or (place.override is not None and (known is None or known.override is None)):
        table[name], places[key] = value, place
        for length in range(2, path.count(".") + 2):
            places.setdefault(".".join(path.split(".")[:length]), place)
