"""Python interface for training scripts (`mpirun -n 8 python train.py`) and notebooks.

`import hpctrain` has the same names.

    from hpctrain import run

    def build(hidden=512, layers=8): ...

    if __name__ == "__main__":
        run("deck.toml", build=build, blocks="layers.*")

The deck of the run stores a function as "FILE.py:FUNCTION", so that `hpctrain resume`, `replay` and all other
verbs can import it. Therefore functions and classes must be defined at the top level of a file.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Unpack

from hpctrain.checkpoint.lazy import Checkpoint, open_checkpoint
from hpctrain.comm.hangs.watchdog import Watchdog
from hpctrain.comm.verb import run_verb_of_script
from hpctrain.comm.world import World
from hpctrain.deck.code import CodeTrust, Overrides
from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import ApiArgument, toml_value
from hpctrain.deck.toml_text import deck_text, tables_to_toml, toml_compatible
from hpctrain.deck.user_code import is_loaded_file
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE, HpctrainError, failing_as
from hpctrain.files import check_output, path_of, write_text
from hpctrain.generate.generation_model import GenerationModel, load
from hpctrain.host.mpi_library import require_unfinalized
from hpctrain.report.series import metrics
from hpctrain.text import either, kind_of

__all__ = [
    "Checkpoint",
    "DeckDefaults",
    "GenerationModel",
    "HpctrainError",
    "World",
    "check",
    "load",
    "make_deck",
    "metrics",
    "open_checkpoint",
    "resume",
    "run",
]

Function = Callable[..., Any] | str
"""Function or class at the top level of a file, or its name as in a deck ("FILE.py:FUNCTION")."""


class DeckDefaults(TypedDict, total=False):
    """Keyword arguments that set keys of a deck.

    Attributes:
        build: Function that returns the module (key model.module).
        arguments: Arguments of `build` (model.arguments).
        plan: How the module is split over tensor ranks (model.plan).
        blocks: Pattern of the submodules that follow each other, for pipelines (model.blocks).
        loss: Function of the outputs and the batch that returns the sum of losses and their number
        (model.loss).
        initial: Function that changes initial values (model.initial).
        data: Function that returns a dataset (data.dataset).
        collate: Function that makes a batch of items of the dataset (data.collate).
        changes: Other keys, such as {"batch.micro_size": 4}. None restores the default of a key.
    """

    build: Function
    arguments: Mapping[str, Any]
    plan: Mapping[str, Any] | str
    blocks: str
    loss: Function
    initial: Function
    data: Function
    collate: Function
    changes: Mapping[str, Any]


_FUNCTIONS = {"build", "loss", "initial", "data", "collate"}
_KEYS = {
    "build": "model.module",
    "arguments": "model.arguments",
    "plan": "model.plan",
    "blocks": "model.blocks",
    "loss": "model.loss",
    "initial": "model.initial",
    "data": "data.dataset",
    "collate": "data.collate",
}


def run(
    deck: str | Path | Deck,
    *,
    fresh: bool = False,
    again: bool = False,
    world: World | None = None,
    **defaults: Unpack[DeckDefaults],
) -> None:
    """Train a deck, as `hpctrain run` does. Collective over all ranks that were started.

    Without mpirun, this process is the only rank. If `world` is None, an error ends the script with the exit
    code of the command, after rank 0 has printed one sentence. MPI is then started here and stays until the
    process ends, so that other runs and `load` can follow.

    Args:
        deck: File of a deck, or a deck of `make_deck`.
        fresh: Start anew and delete the files of an earlier run in the same folder (--fresh).
        again: Continue from the newest checkpoint if there is one (--resume).
        world: Ranks of the run (`World.start()`), which the caller ends with `finish`; None to make one.
        **defaults: Keys that replace those of the deck, see `DeckDefaults`.

    Raises:
        HpctrainError: The run failed, and the caller passed a world; all ranks raise it. With or without a
            world, it is also raised if an argument has a wrong type, or if another run calls this by
            importing the script for its functions.
    """
    source = _source(deck)

    def verb(started: World) -> int:
        from hpctrain.post.policy_trainer import make_trainer
        from hpctrain.train.run import run_deck

        return run_deck(started, source, _changes(defaults), fresh, again, trainer_factory=make_trainer)

    _within(world, verb)


def make_deck(
    base: str | Path | Mapping[str, object],
    *,
    ranks: int | None = None,
    file: str | Path | None = None,
    **defaults: Unpack[DeckDefaults],
) -> Deck:
    """Make a deck for `run` and `check`, with all checks done and all defaults filled in. Local.

    Args:
        base: File of a deck, or its sections: {"run": {"steps": 10}}.
        ranks: Number of ranks for which the deck is checked; None if it is not known yet.
        file: File to which the deck is written, for `hpctrain run`, `plan` and `job`. It is replaced if it
            exists, and each rank that calls this writes it. None to write no file.
        **defaults: Keys that replace those of `base`, see `DeckDefaults`.

    Raises:
        HpctrainError: The deck is not valid. The error lists all its problems.
        InputOutputError: The deck cannot be read, or the file cannot be written.
    """
    from hpctrain.checkpoint.exchange.source import read_source_keys

    changes = _changes(defaults)
    _require_ranks(ranks)
    if isinstance(base, Mapping):
        deck = parse_deck(tables_to_toml(base), changes, "the deck", ranks, read_source_keys)
    else:
        deck = read_deck(path_of(base, "base"), changes, ranks, read_source_keys)
    if file is not None:
        output = path_of(file, "file")
        check_output(output, replace=True)
        with failing_as(f"{output}: cannot be written"):
            write_text(output, deck_text(deck))
    return deck


def resume(
    target: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    world: World | None = None,
    trust_code: bool = False,
) -> None:
    """Continue a run, as `hpctrain resume` does. Collective over all ranks that were started.

    Errors and MPI are treated as by `run`.

    Args:
        target: Checkpoint, or run folder, of which the newest good checkpoint is used.
        changes: Keys that replace those of the stored deck.
        world: As for `run`.
        trust_code: Whether to call all code that the stored deck names (modules, datasets, losses, rewards).
            Otherwise only code that `changes` names as well is called.

    Raises:
        HpctrainError: As for `run`.
    """
    path = path_of(target, "target")

    def verb(started: World) -> int:
        from hpctrain.post.policy_trainer import make_trainer
        from hpctrain.train.run import resume as resume_run

        defaults: DeckDefaults = {"changes": {} if changes is None else changes}
        overrides = Overrides.of(_changes(defaults), CodeTrust(everything=trust_code))
        return resume_run(started, path, overrides, trainer_factory=make_trainer)

    _within(world, verb)


def check(deck: str | Path | Deck, *, world: World | None = None, **defaults: Unpack[DeckDefaults]) -> bool:
    """Return True if the layout of a deck computes what one rank does, as `hpctrain check`. Collective.

    Rank 0 prints the comparison. Arguments and errors are those of `run`.
    """
    source = _source(deck)

    def verb(started: World) -> int:
        from hpctrain.train.layout_check import check as compare

        return compare(started, source, _changes(defaults), print)

    return _within(world, verb, EXIT_DIFFERENT) == EXIT_DONE


def _within(world: World | None, verb: Callable[[World], int], *expected: int) -> int:
    """Run a verb on the caller's world, or on one that is made here. Collective.

    Returns:
        The exit code: EXIT_DONE or one of `expected`.

    Raises:
        HpctrainError: The caller passed a world, and the verb ended with another exit code or MPI was
            finalized before.
    """
    if is_loaded_file(str(sys._getframe(2).f_globals.get("__name__"))):
        raise HpctrainError(
            "this file starts a run while another run imports it for its functions: put the lines that "
            'start a run under `if __name__ == "__main__":`'
        )
    if world is not None:
        require_unfinalized()
        with Watchdog(world):
            code = verb(world)
        if code not in {EXIT_DONE, *expected}:
            raise HpctrainError(f"the run stopped with exit code {code}")
        return code
    return run_verb_of_script(verb, {EXIT_DONE, *expected})


def _require_ranks(ranks: object) -> None:
    """Raise HpctrainError unless `ranks` is None or a positive integer."""
    if ranks is None:
        return
    if isinstance(ranks, bool) or not isinstance(ranks, Integral) or int(ranks) < 1:
        raise HpctrainError(f"ranks: must be a whole number of at least 1, not {ranks!r}")


def _source(deck: object) -> Path | Deck:
    """Return a deck as it is, or the path of one. Raises HpctrainError for anything else."""
    return deck if isinstance(deck, Deck) else path_of(deck, "deck")


def _changes(defaults: DeckDefaults) -> list[str]:
    """Return keyword arguments as values of `--set`. Raises HpctrainError if one is unknown or not valid."""
    unknown = sorted(defaults.keys() - DeckDefaults.__annotations__.keys())
    if unknown:
        known = either(DeckDefaults.__annotations__)
        raise HpctrainError(f"{', '.join(unknown)}: unknown argument (use {known})")
    changes: object = defaults.get("changes", {})
    if not isinstance(changes, Mapping) or not all(isinstance(key, str) for key in changes):
        raise HpctrainError(
            f'changes: must be a dict such as {{"batch.micro_size": 4}}, not {kind_of(changes)}'
        )
    named = {name: value for name, value in defaults.items() if name in _KEYS}
    keys = {_KEYS[name]: (name, _deck_value(name, value)) for name, value in named.items()}
    keys |= {key: ("changes", toml_compatible(f"changes: {key}", value)) for key, value in changes.items()}
    return [
        ApiArgument.of(name, f"{key}={'' if value is None else toml_value(value)}")
        for key, (name, value) in keys.items()
    ]


def _deck_value(name: str, value: object) -> object:
    """Return the value of a keyword argument for a deck: for a function, the name by which a run imports it.

    Raises:
        HpctrainError: TOML has no such value, or the function cannot be imported by its name.
    """
    if name not in _FUNCTIONS or value is None or isinstance(value, str):
        return toml_compatible(name, value)
    qualified = getattr(value, "__qualname__", None)
    if qualified is None or not callable(value):
        raise HpctrainError(
            f"{name}: must be a function or class at the top level of a file, or its name, not "
            f"{kind_of(value)} itself, because a resumed run must create it again"
        )
    home = inspect.getmodule(value)
    file = getattr(home, "__file__", None)
    is_main = home is not None and home.__name__ == "__main__"
    importable = home is not None and qualified.replace(".", "_").isidentifier()
    if not importable or (is_main and (file is None or _is_guarded(Path(file), qualified.partition(".")[0]))):
        raise HpctrainError(
            f"{name}: {value!r}: cannot be imported by its name: must be a function or class at the top "
            "level of a file, or the name of one"
            + ' (outside of `if __name__ == "__main__":`)'
            * (importable and is_main)
        )
    assert home is not None
    package = sys.modules.get(home.__name__.partition(".")[0])
    if file is None or (not is_main and hasattr(package, "__path__")):
        return f"{home.__name__}:{qualified}"
    return f"{Path(file).resolve()}:{qualified}"


def _is_guarded(file: Path, name: str) -> bool:
    """Return True if a file defines a function or class only under `if __name__ == "__main__":`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    def places(nodes: Sequence[ast.stmt], guarded: bool) -> Iterator[bool]:
        for node in nodes:
            if isinstance(node, kinds):
                if node.name == name:
                    yield guarded
                continue
            is_guard = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from places(getattr(node, part, []), guarded or (is_guard and part == "body"))

    definitions = list(places(tree.body, guarded=False))
    return bool(definitions) and all(definitions)
