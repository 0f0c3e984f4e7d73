"""What every key of the deck has: a type, bounds, a default, a unit, one line of help, and its name."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from hpctrain.units import parse_bytes, parse_link, parse_seconds

_FORMER = {("machine", "memory_per_node"): "memory"}  # former names of keys, with their sections

Bytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value)]
"""A size; written as a number of bytes or as "25 MB", printed as a number."""

Duration = Annotated[
    float, BeforeValidator(lambda value: parse_seconds(value) if isinstance(value, str) else value)
]
"""A time; written as a number of seconds or as "50 min", printed as a number."""


Whole = Annotated[
    int,
    BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value),
]
"""A whole number, which may be written as 1e9, printed as a whole one."""


def expand_home(path: str) -> str:
    """Return a path with "~" or "~user" at its beginning replaced by the home folder, as shells do."""
    return os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111 - "~" alone stays text


PathText = Annotated[str, AfterValidator(expand_home)]
"""A path as text, whose "~" is expanded; also a name or a "FILE.py:FUNCTION", where a key takes either."""


def _link(value: str) -> str:
    parse_link(value)
    return value


LinkText = Annotated[str, AfterValidator(_link)]
"""A link's speed and latency, written, and kept, as "100 Mbit/s, 20 ms"."""


def key(text: str, default: Any = ..., *, unit: str = "", derived: str = "", **bounds: Any) -> Any:
    """A key of a section: one line of help, default, unit, bounds (ge, gt, le, lt).

    `alias` is the key's name in the deck, where that can be no name in Python.
    """
    return Field(default, description=text, json_schema_extra={"unit": unit, "derived": derived}, **bounds)


class Section(BaseModel):
    """One table of the deck."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def extra(field: FieldInfo, name: Literal["unit", "derived"]) -> str:
    """The unit of a key, or in words the default that it gets from other keys; "" if it has none."""
    stored = field.json_schema_extra
    return str(stored[name]) if isinstance(stored, dict) else ""


def name_of(attribute: str, field: FieldInfo) -> str:
    """The name in the deck of the key that is this attribute of its section."""
    return field.alias or attribute


def present_name(section: str, name: str) -> str:
    """The name of a key that older decks and checkpoints call by another; of any other, its own."""
    return _FORMER.get((section, name), name)
