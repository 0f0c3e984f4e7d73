"""Checks of a config.json before `transformers` uses it, and one-line messages for its exceptions."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpctrain.deck.families.computation_keys import (
    ROPE_TABLES,
    computation_keys,
    ignored_key_problem,
    rope_types,
)
from hpctrain.deck.user_code import run_user_code
from hpctrain.errors import UserCodeError
from hpctrain.text import either, nearest

_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
"""Keys of the activation of feed-forward layers."""

_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ROPE_TABLES, ROPE_TABLES),
    # Architectures that leave out modules of multi-token prediction list the names of their tensors there.
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "_keys_to_ignore_on_load_unexpected"),
}
"""Names of which an architecture's source code has one if it uses a key, if not only the key's own name."""

_MODELS = "transformers.models."
"""Prefix of the Python modules that define architectures."""

_CONFIG_KEY = re.compile(r"\b(?:config|self)\.(\w+)")
"""Expression that reads a key, or an attribute with its name, in the source code of an architecture."""


def config_problems(config: Mapping[str, Any], classes: Sequence[type]) -> Iterator[str]:
    """Yield problems of values of a config.json for which `transformers` has no check or no clear message.

    These are keys that the architecture ignores although they change what other architectures compute, and
    unknown names of activations and kinds of rotary positions. An architecture counts as using a key if the
    source code of its classes contains the name of the key.

    Args:
        config: Content of the file.
        classes: Class of the configuration, and the classes of causal models of this type.
    """
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sources = _sources(classes)
    for key, value in computation_keys(config):
        if not any(re.search(rf"\b{name}\b", sources) for name in _SYNONYMS.get(key, (key,))):
            yield f"{key} = {value!r}: {ignored_key_problem(config['model_type'])}"
    known = tuple(dict.fromkeys(("default", *ROPE_INIT_FUNCTIONS)))
    for key in ROPE_TABLES:
        for kind in rope_types(config.get(key)):
            if kind not in known and f'"{kind}"' not in sources:
                yield f"{key}: rope_type = {kind!r}: unknown; expected {either(map(repr, known))}"
    for key in _ACTIVATIONS:
        value = config.get(key)
        if isinstance(value, str) and value not in ACT2FN and key in sources:
            near = nearest(value, ACT2FN)
            meant = f" (did you mean {near!r}?)" if near else ""
            yield f"{key} = {value!r}: transformers has no activation of this name{meant}"


def reads_key(classes: Sequence[type], key: str) -> bool:
    """Return True if the source code of an architecture's classes reads a key of its configuration."""
    return re.search(rf"\bconfig\.{key}\b", _sources(classes)) is not None


@contextmanager
def transformers_errors(activity: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Return a context manager that reports an exception of `transformers` as one line.

    The line names the keys that the failing line of the architecture's source code reads, with their values.

    Args:
        activity: Beginning of the message, such as "config.json: transformers cannot build the model".
        config: Content of the config.json.

    Raises:
        UserCodeError: `transformers` failed.
    """
    try:
        with run_user_code(activity):
            yield
    except UserCodeError as error:
        cause: BaseException = error.__cause__ or error
        keys = _failing_keys(cause)
        used = ", ".join(f"{key} = {config[key]!r}" for key in keys if _is_scalar(config.get(key)))
        while cause.__cause__ is not None:  # the message of the original exception names the key
            cause = cause.__cause__
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise UserCodeError(f"{activity}: {used}{': ' if used else ''}{reason}") from error


def _failing_keys(error: BaseException) -> list[str]:
    """Return the keys that the innermost traceback line in an architecture's source code reads."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in frames if "transformers/models/" in frame.filename]
    return list(dict.fromkeys(_CONFIG_KEY.findall(lines[-1]))) if lines else []


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float | str)


def _sources(classes: Sequence[type]) -> str:
    """Return the source code of the Python modules that define classes and their base classes."""
    inherited = [base for each in classes for base in each.__mro__]
    names = dict.fromkeys(base.__module__ for base in inherited if base.__module__.startswith(_MODELS))
    return "\n".join(inspect.getsource(sys.modules[name]) for name in names)
