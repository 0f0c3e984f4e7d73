"""Code that a deck names, and whether it may be called.

A deck names functions and classes: its module, dataset, loss, rewards and so on. A deck that the user gives
is the user's own program, and all code that it names may be called. A deck that is stored in a checkpoint or
a run folder may be somebody else's: code that it names may be called only where the user names it, too, or
trusts the file. `find_function` takes a `NamedCode` and nothing else, so that no name reaches an import
without this decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hpctrain.deck.sources import clipped, toml_value
from hpctrain.deck.target import found_from, is_target
from hpctrain.errors import HpctrainError

CODE_KEYS = ("model.module", "model.loss", "model.initial", "data.dataset", "data.collate", "policy.reward")
"""Keys of a deck that name functions or classes; values of `policy.reward` may also be other rewards."""

ARGUMENT_KEYS = ("model.arguments", "data.arguments")
"""Keys of a deck with the arguments of a function; some arguments have a library load code from elsewhere."""

_TRUSTS_REMOTE = "trust_remote_code"
_KERNELS = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
_NOT_CODE = ("exact-match", "regular-expression")


@dataclass(frozen=True, order=True)
class CodeName:
    """Full name of a key, such as "model.module", and the code that it names, such as "train.py:build"."""

    key: str
    target: str

    def __str__(self) -> str:
        """Return the name as a deck has it: `model.module = "train.py:build"`."""
        return f"{self.key} = {clipped(toml_value(self.target))}"


@dataclass(frozen=True)
class NamedCode:
    """A function or class that a deck names; `refusal` says why it may not be called, or is empty."""

    target: str
    refusal: str = ""

    @property
    def title(self) -> str:
        """The target without the folder of its file."""
        return self.target.rpartition("/")[2]

    def require_trusted(self) -> None:
        """Raise `UntrustedCodeError` if the code may not be called."""
        if self.refusal:
            raise UntrustedCodeError(self.refusal)


class UntrustedCodeError(HpctrainError):
    """Code was to be called that only a stored deck names."""


@dataclass(frozen=True)
class CodeTrust:
    """What the user says about the code that stored decks name.

    Args:
        everything: True if the user trusts whatever code a stored deck names.
        names: Names that a deck of the user's own has.
    """

    everything: bool = False
    names: frozenset[CodeName] = frozenset()
    announced: set[str] = field(default_factory=set, compare=False)
    """Files whose code was announced already."""


class Overrides(tuple[str, ...]):
    """`--set` arguments on top of a stored deck, with what the user says of the code that it names."""

    trust: CodeTrust

    @classmethod
    def of(cls, arguments: Iterable[str], trust: CodeTrust) -> Overrides:
        """Return arguments with the trust that was given beside them."""
        made = cls(arguments)
        made.trust = trust
        return made


def trust_of(overrides: Iterable[str]) -> CodeTrust:
    """Return what the user says of code beside `--set` arguments; of plain arguments nothing is trusted."""
    return overrides.trust if isinstance(overrides, Overrides) else CodeTrust()


def code_names(tables: Mapping[str, object], deck_name: str) -> frozenset[CodeName]:
    """Return all code that the sections of a deck name; files are resolved relative to the deck `deck_name`.

    Values of a wrong type are skipped: the validation of the deck reports them.
    """
    names = set[CodeName]()
    for key in CODE_KEYS:
        value = _value(tables, key)
        targets = value if isinstance(value, list | tuple) else [value]
        for target in targets:
            if isinstance(target, str) and _names_code(key, target):
                names.add(CodeName(key, found_from(target, deck_name)))
    for key in ARGUMENT_KEYS:
        names.update(remote_code(key, _value(tables, key)))
    return frozenset(names)


def refusal(names: Iterable[CodeName], file: str) -> str:
    """Return the sentence that refuses code which only the deck in `file` names."""
    named = ", ".join(map(str, sorted(names)))
    return (
        f"{file} names code that is not run unless you name it, too: {named}; give the same keys by --set, "
        "or a deck of your own that has them by --trust-deck DECK, or trust the file with --trust-code "
        "(trust_code=True in Python)"
    )


def remote_code(key: str, value: object) -> Iterator[CodeName]:
    """Yield what is in a value of a key and has a library such as `transformers` load code from elsewhere."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from remote_code(key, each)
    if not isinstance(value, Mapping):
        return
    for name, each in value.items():
        if (name == _TRUSTS_REMOTE and each) or (name in _KERNELS and any(map(_is_of_hub, _texts(each)))):
            yield CodeName(f"{key}.{name}", each if isinstance(each, str) else toml_value(each))
        yield from remote_code(f"{key}.{name}", each)


def _texts(value: object) -> Iterator[str]:
    """Yield a text, or the texts in a table of them."""
    yield from map(str, value.values() if isinstance(value, Mapping) else [value])


def _is_of_hub(kernels: str) -> bool:
    """True for kernels that `transformers` downloads, which have a user's name: "someone/kernels"."""
    return "/" in kernels


def _names_code(key: str, target: str) -> bool:
    """True if the value of a key is to be imported; a reward may also be a pattern or a checkpoint."""
    if key != "policy.reward":
        return True
    return target.partition(":")[0] not in _NOT_CODE and ":" in target and is_target(target)


def _value(tables: Mapping[str, object], key: str) -> object:
    section, _, name = key.partition(".")
    table = tables.get(section)
    return table.get(name) if isinstance(table, Mapping) else None
