"""The Python interface, for those who write a `train.py` and start it as `mpirun -n 8 python train.py`, and
for notebooks. `import hpctrain` has the same names.

    from hpctrain import run

    def build(hidden=512, layers=8): ...

    if __name__ == "__main__":
        run("deck.toml", build=build, blocks="layers.*")

What is given here stands in the deck of the run as "FILE.py:FUNCTION", so that `hpctrain resume`, `replay`
and all others find it again: functions and classes are those of a file, not made within another.
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
from hpctrain.comm.outcome import print_problems
from hpctrain.comm.verb import ENDED, run_verb_of_script
from hpctrain.comm.world import World
from hpctrain.deck.code import CodeTrust, Overrides
from hpctrain.deck.python_tables import tables_to_toml, toml_compatible
from hpctrain.deck.read import deck_text, parse_deck, read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import ApiArgument, toml_value
from hpctrain.deck.user_code import is_loaded_file
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE, HpctrainError, failing_as
from hpctrain.files import check_output, path_of, write_text
from hpctrain.generate.loaded import GenerationModel, load
from hpctrain.host.mpi_library import MPI
from hpctrain.report.series import metrics
from hpctrain.text import kind_of

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
"""One at the top of a file, or its name, as a deck has it."""


class DeckDefaults(TypedDict, total=False):
    """What stands above a deck, each as the key that it is there.

    `build` (model.module) gives the module, called with `arguments` (model.arguments); `plan` (model.plan)
    says how it is split over tensor ranks, `blocks` (model.blocks) which submodules follow each other; `loss`
    (model.loss) gives a sum and a count of (outputs, batch), `initial` (model.initial) changes initial
    values; `data` (data.dataset) gives a dataset, and `collate` (data.collate) a batch of its items.
    `changes` are other keys: {"batch.micro_size": 4}; None is for what is to be as if no deck had it.
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
    **given: Unpack[DeckDefaults],
) -> None:
    """Train a deck, a file or one of `make_deck`, as `hpctrain run` does, on all ranks that call it: without
    mpirun that is this process alone. `fresh` and `again` are its options --fresh and --resume, see
    `DeckDefaults` for what stands above the deck.

    Without a `world` what goes wrong ends the script with the command's exit code, after one sentence of rank
    0; MPI is started here and ends with the process, so that other runs and `load` can follow. With one
    (`World.start()`) that is an HpctrainError on all ranks, and the world is the caller's to `finish`.
    """
    source = _source(deck)

    def verb(own: World) -> int:
        from hpctrain.post.trainer import make_trainer
        from hpctrain.train.run import run_deck

        return run_deck(own, source, _changes(given), fresh, again, make=make_trainer)

    _within(world, verb)


def make_deck(
    base: str | Path | Mapping[str, object],
    *,
    ranks: int | None = None,
    file: str | Path | None = None,
    **given: Unpack[DeckDefaults],
) -> Deck:
    """The deck of a file, or of sections of keys, {"run": {"steps": 10}}, with what is `given` on top:
    checked, for so many `ranks` if that is said, and with every default there (deck.learning_rate.peak).

    It is for `run` and `check`; with a `file` it is written there, too, for `hpctrain run`, `plan` and `job`,
    which makes of it what is to be submitted. HpctrainError with all that is wrong with it.
    """
    from hpctrain.checkpoint.exchange.source import settled_keys

    changes = _changes(given)
    _require_ranks(ranks)
    if isinstance(base, Mapping):
        deck = parse_deck(tables_to_toml(base), changes, "the deck", ranks, settled_keys)
    else:
        deck = read_deck(path_of(base, "base"), changes, ranks, settled_keys)
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
    """Go on from a checkpoint, or from the newest good one of a run's folder, as `hpctrain resume` does.

    Code that the stored deck names (modules, datasets, losses, rewards) runs only if `changes` name it, too,
    or with `trust_code`. All else is as for `run`.
    """
    path = path_of(target, "target")

    def verb(own: World) -> int:
        from hpctrain.train.run import resume as go_on

        given: DeckDefaults = {"changes": {} if changes is None else changes}
        return go_on(own, path, Overrides.of(_changes(given), CodeTrust(everything=trust_code)))

    _within(world, verb)


def check(deck: str | Path | Deck, *, world: World | None = None, **given: Unpack[DeckDefaults]) -> bool:
    """Whether the layout of a deck computes what one rank does, as `hpctrain check` does, which prints what
    came of it; else as `run`.
    """
    source = _source(deck)

    def verb(own: World) -> int:
        from hpctrain.train.check import check as compare

        return compare(own, source, _changes(given), print)

    return _within(world, verb, EXIT_DIFFERENT) == EXIT_DONE


def _within(world: World | None, verb: Callable[[World], int], *expected: int) -> int:
    """Do a verb on a world, or between its start and its end; the exit code, one of those `expected` or 0."""
    if is_loaded_file(str(sys._getframe(2).f_globals.get("__name__"))):
        raise HpctrainError(
            "a run begins where another one loads this file for its functions: what begins it is to be under "
            '`if __name__ == "__main__":`'
        )
    if world is not None:
        with Watchdog(world):
            code = verb(world)
        if code not in {EXIT_DONE, *expected}:
            raise HpctrainError(f"the run stopped in good order with exit code {code}")
        return code
    if MPI.Is_finalized():
        print_problems([ENDED])
        sys.exit(HpctrainError.exit_code)
    return run_verb_of_script(verb, {EXIT_DONE, *expected})


def _require_ranks(ranks: object) -> None:
    """HpctrainError for what is neither None nor a number of ranks."""
    if ranks is None:
        return
    if isinstance(ranks, bool) or not isinstance(ranks, Integral) or int(ranks) < 1:
        raise HpctrainError(f"ranks: is to be a whole number of at least 1, not {ranks!r}")


def _source(deck: object) -> Path | Deck:
    """What a deck is read from."""
    return deck if isinstance(deck, Deck) else path_of(deck, "deck")


def _changes(given: DeckDefaults) -> list[str]:
    """What is given, as `--set` has it."""
    unknown = sorted(given.keys() - DeckDefaults.__annotations__.keys())
    if unknown:
        known = ", ".join(DeckDefaults.__annotations__)
        raise HpctrainError(f"{', '.join(unknown)}: nothing of that name is taken ({known} are)")
    changes: object = given.get("changes", {})
    if not isinstance(changes, Mapping) or not all(isinstance(key, str) for key in changes):
        raise HpctrainError(
            f'changes: is to have values by keys, as {{"batch.micro_size": 4}}, not {kind_of(changes)}'
        )
    named = {name: value for name, value in given.items() if name in _KEYS}
    keys = {_KEYS[name]: (name, _written(name, value)) for name, value in named.items()}
    keys |= {key: ("changes", toml_compatible(f"changes: {key}", value)) for key, value in changes.items()}
    return [
        ApiArgument.of(name, f"{key}={'' if value is None else toml_value(value)}")
        for key, (name, value) in keys.items()
    ]


def _written(name: str, value: object) -> object:
    """A value as TOML has it; a function by the name by which a run finds it again. HpctrainError where there
    is none.
    """
    if name not in _FUNCTIONS or value is None or isinstance(value, str):
        return toml_compatible(name, value)
    qualified = getattr(value, "__qualname__", None)
    if qualified is None or not callable(value):
        raise HpctrainError(
            f"{name}: give a function or a class at the top of a file, or its name, not {kind_of(value)} "
            "itself, as what goes on with a run has to make it again"
        )
    home = inspect.getmodule(value)
    file = getattr(home, "__file__", None)
    begun = home is not None and home.__name__ == "__main__"
    found = home is not None and qualified.replace(".", "_").isidentifier()
    if not found or (begun and (file is None or _is_guarded(Path(file), qualified.partition(".")[0]))):
        raise HpctrainError(
            f"{name}: {value!r} is not found again by its name: it has to be a function or class at the top "
            "of a file, or the name of one" + " (and not where that is begun alone)" * (found and begun)
        )
    assert home is not None
    package = sys.modules.get(home.__name__.partition(".")[0])
    if file is None or (not begun and hasattr(package, "__path__")):
        return f"{home.__name__}:{qualified}"
    return f"{Path(file).resolve()}:{qualified}"


def _is_guarded(file: Path, name: str) -> bool:
    """Whether a file has a function or class under `if __name__ == "__main__":` alone."""
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
            asks = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from places(getattr(node, part, []), guarded or (asks and part == "body"))

    found = list(places(tree.body, guarded=False))
    return bool(found) and all(found)
