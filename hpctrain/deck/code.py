"""Code that a deck names, and the decision whether it may be called.

A deck names functions and classes, such as its module, dataset, loss and rewards. A deck that the user passes
is the user's own program: all code that it names may be called. A deck that is stored in a checkpoint or a
run folder may come from somebody else: code that it names may be called only if the user names it, too, or
trusts the file. `import_function` accepts only a `NamedCode`, so that no name is imported without this
decision.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hpctrain.deck.key import expand_user_path
from hpctrain.deck.sources import clipped, toml_value
from hpctrain.errors import HpctrainError

CODE_KEYS = ("model.module", "model.loss", "model.initial", "data.dataset", "data.collate", "policy.reward")
"""Keys of a deck that name functions or classes. `policy.reward` may also name built-in rewards."""

CAUSAL_MODEL = "transformers:AutoModelForCausalLM"
"""Value of `model.module` for a model of `transformers` that its configuration, an argument, describes.

It needs no trust: hpctrain builds it from the installed `transformers` alone, without code of other origin.
"""

ARGUMENT_KEYS = ("model.arguments", "data.arguments")
"""Keys of a deck that hold arguments of a function. Some arguments let a library download code and run it."""

_TRUSTS_REMOTE = "trust_remote_code"
_KERNELS = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
_NOT_CODE = ("exact-match", "regular-expression")


@dataclass(frozen=True, order=True)
class CodeEntry:
    """Entry of a deck that names code: the full name of the key, and the code (`target`) that it names.

    Attributes:
        key: Full name of the key, such as "model.module".
        target: Code that it names, such as "/home/me/train.py:build". The paths of files are absolute.
    """

    key: str
    target: str

    def __str__(self) -> str:
        """Return the entry as in a deck: `model.module = "train.py:build"`."""
        return f"{self.key} = {clipped(toml_value(self.target))}"


@dataclass(frozen=True)
class NamedCode:
    """Function or class that a deck names, and the error message if it may not be called.

    Attributes:
        target: Its name, such as "train.py:build" or "package.module:Class".
        refusal: The error message if it may not be called; "" if it may.
    """

    target: str
    refusal: str = ""

    @property
    def title(self) -> str:
        """The target without the folder of its file, such as "train.py:build"."""
        return self.target.rpartition("/")[2]

    def require_trusted(self) -> None:
        """Raise `UntrustedCodeError` with the message `refusal` if the code may not be called."""
        if self.refusal:
            raise UntrustedCodeError(self.refusal)


class UntrustedCodeError(HpctrainError):
    """Error about code that a stored deck names and that the user has not allowed to run."""


@dataclass(frozen=True)
class CodeTrust:
    """The user's decision which code of stored decks may be called; `CodeTrust()` trusts none.

    `CodeTrust(everything=True)` trusts all code, and `CodeTrust(entries=...)` the code of these entries.

    Attributes:
        everything: True if all code that a stored deck names may be called (--trust-code).
        entries: Entries of the user's own deck (--trust-deck); a stored deck may call the same code.
        logged_files: Files whose trusted code was already logged.
    """

    everything: bool = False
    entries: frozenset[CodeEntry] = frozenset()
    logged_files: set[str] = field(default_factory=set, compare=False)


class Overrides(tuple[str, ...]):
    """`--set` arguments for a stored deck, together with the user's decision which code it may call."""

    trust: CodeTrust

    @classmethod
    def of(cls, arguments: Iterable[str], trust: CodeTrust) -> Overrides:
        """Return `--set` arguments as a tuple that also has the user's decision as `trust`.

        Args:
            arguments: `--set` arguments, such as "batch.micro_size=4", in their order. They are neither
                parsed nor checked here: the functions that read a deck report wrong ones.
            trust: Code that a stored deck may call, such as `CodeTrust()` for none.
        """
        overrides = cls(arguments)
        overrides.trust = trust
        return overrides


def trust_of(overrides: Iterable[str]) -> CodeTrust:
    """Return the `trust` of `Overrides`; for any other arguments, a CodeTrust that trusts no code."""
    return overrides.trust if isinstance(overrides, Overrides) else CodeTrust()


def is_target(target: str | None) -> bool:
    """Return True if a text has the form "FILE.py:FUNCTION" or "PACKAGE:FUNCTION", and for None and "".

    Only the form is checked: neither the file nor the function need exist.
    """
    home, _, function = (target or "x:x").rpartition(":")
    return bool(home) and function.replace(".", "_").isidentifier()


def is_file_target(target: str) -> bool:
    """Return True if a target has the form "FILE.py:FUNCTION", and False for any other text.

    Only the form is checked: the file need not exist.
    """
    return target.rpartition(":")[0].endswith(".py")


def resolve_target(target: str, deck_name: str) -> str:
    """Return a target with the absolute path of its file; any other text is returned as it is.

    Other texts are "PACKAGE:FUNCTION", and those without a colon. A "~" at the beginning is expanded.
    Symbolic links are not followed, and the file need not exist.

    Args:
        target: The target, such as "~/train.py:build".
        deck_name: Path of the deck, to whose folder the path of the file is relative.
    """
    if not is_file_target(target):
        return target
    return os.path.abspath(os.path.join(os.path.dirname(deck_name), expand_user_path(target)))  # noqa: PTH100, PTH118, PTH120


def code_entries(tables: Mapping[str, object], deck_name: str) -> frozenset[CodeEntry]:
    """Return all code that a deck names, without reading or importing it.

    Besides functions and classes, these are arguments that let a library download code and run it. Values of
    a wrong type are skipped, since the validation of the deck reports them.

    Args:
        tables: Sections of the deck, by name, before or after its validation. Only [model], [data] and
            [policy] are read, and they may be missing.
        deck_name: Path of the deck, to whose folder paths of files are relative; in the result they are
            absolute.
    """
    names = set[CodeEntry]()
    for key in CODE_KEYS:
        value = _value(tables, key)
        targets = value if isinstance(value, list | tuple) else [value]
        for target in targets:
            if isinstance(target, str) and target != CAUSAL_MODEL and _names_code(key, target):
                names.add(CodeEntry(key, resolve_target(target, deck_name)))
    for key in ARGUMENT_KEYS:
        names.update(remote_code(key, _value(tables, key)))
    return frozenset(names)


def refusal_message(names: Iterable[CodeEntry], file: str) -> str:
    """Return the error message about code that only the deck in `file` names. Nothing is raised.

    It ends with the ways in which the user can allow the code.

    Args:
        names: Entries of the deck that may not be called, at least one. The message lists all of them, sorted
            by key and target.
        file: Name of the deck in the message.
    """
    listed = ", ".join(map(str, sorted(names)))
    return (
        f"{file} names code that runs only if you allow it: {listed}; repeat these keys with --set, "
        "or pass a deck of your own that contains them with --trust-deck DECK, or trust the file with "
        "--trust-code (trust_code=True in Python)"
    )


def remote_code(key: str, value: object) -> Iterator[CodeEntry]:
    """Yield a CodeEntry for each argument that lets a library (`transformers`) download code and run it.

    These are `trust_remote_code` with a true value, and names of kernels with a "/". An argument with the
    value false is not yielded.

    Args:
        key: Full name of the key that holds the arguments, such as "model.arguments". The entries have longer
            names, such as "model.arguments.trust_remote_code".
        value: Value of the key, which is searched at all depths. Nothing is yielded for a value that is not a
            table or a list.
    """
    if isinstance(value, list | tuple):
        for each in value:
            yield from remote_code(key, each)
    if not isinstance(value, Mapping):
        return
    for name, each in value.items():
        if (name == _TRUSTS_REMOTE and each) or (name in _KERNELS and any(map(_is_downloaded, _texts(each)))):
            yield CodeEntry(f"{key}.{name}", each if isinstance(each, str) else toml_value(each))
        yield from remote_code(f"{key}.{name}", each)


def _texts(value: object) -> Iterator[str]:
    """Yield the value as text, or the values of a table as texts."""
    yield from map(str, value.values() if isinstance(value, Mapping) else [value])


def _is_downloaded(kernels: str) -> bool:
    """Return True for the name of kernels that `transformers` downloads, such as "someone/kernels"."""
    return "/" in kernels


def _names_code(key: str, target: str) -> bool:
    """Return True if the value of a key names code to import; a reward may be a pattern or a checkpoint."""
    if key != "policy.reward":
        return True
    return target.partition(":")[0] not in _NOT_CODE and ":" in target and is_target(target)


def _value(tables: Mapping[str, object], key: str) -> object:
    section, _, name = key.partition(".")
    table = tables.get(section)
    return table.get(name) if isinstance(table, Mapping) else None
