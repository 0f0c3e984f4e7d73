"""`hpctrain check`: whether a layout computes what one rank does, tensor by tensor, without training."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

from hpctrain.comm.call_check import MismatchError
from hpctrain.comm.mesh import sizes_text
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE
from hpctrain.report.terminal import columns, fit
from hpctrain.text import counted, fitted
from hpctrain.train.automatic_layout import choose_layout
from hpctrain.train.layout_difference import TOLERANCE, LayoutDifference
from hpctrain.train.layout_verification import compare_miniature, is_state
from hpctrain.train.module_probe import ProbeFinding
from hpctrain.train.startup import read_deck_on_all_ranks
from hpctrain.units import format_seconds

_MOST = 20
"""Of differences that are told."""

_KINDS = (
    "initial parameters",
    "outputs",
    "losses and metrics",
    "gradients",
    "gradient norms",
    "parameters after both steps",
    "state after both steps",
)


def check(world: World, source: Path | Deck, overrides: Sequence[str], show: Callable[[str], None]) -> int:
    """Compare two steps of a deck in miniature on these ranks with those of one, and `show` on rank 0 what
    came of it; the exit code, 1 where a tensor differs. Collective.
    """
    began = perf_counter()
    world.ledger.activity = "reading the deck"
    deck = read_deck_on_all_ranks(world, source, overrides, world.size)
    world.hang.set_limit(deck.stability.hang_seconds)
    deck, chose = choose_layout(world, deck)
    world.ledger.activity = "comparing the layout with one rank"
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    # What a module calls on a rank is its own to say: where ranks differ, this has a name instead of no end.
    world.compare_calls(deck.communication.check or deck.model.module is not None)
    deck = choose_functions(deck, world)
    mesh = make_mesh(deck, world)
    try:
        small, noticed, found = compare_miniature(deck, world, mesh)
    except MismatchError as error:
        if deck.model.module is None:
            raise
        likely = "likely code of the module that goes another way on other ranks, as a block that is left out"
        raise MismatchError(f"{'; '.join(error.problems)}: {likely}") from error
    if world.rank == 0:
        lines = _told(deck, small, noticed, found, world.size, began)
        show("\n".join([*([chose] if chose else []), *lines]))
    fails = [*(each.fails for each in noticed), *(each.fails for each in found)]
    return EXIT_DIFFERENT if any(fails) else EXIT_DONE


def _told(
    deck: Deck,
    small: Deck,
    noticed: Sequence[ProbeFinding],
    found: Sequence[LayoutDifference],
    ranks: int,
    began: float,
) -> list[str]:
    layout = deck.layout
    sizes = {name: getattr(layout, name) for name in ("pipeline", "context", "tensor")}
    data = ranks // (sizes["pipeline"] * sizes["context"] * sizes["tensor"])
    axes = sizes_text({"data": data} | sizes)
    of_kinds = {kind: [each for each in found if _kind(each.name) == kind] for kind in _KINDS}
    rows = [
        (kind, str(len(some)), f"{max(each.error for each in some):.1e}", max(some, key=_error).name)
        for kind, some in of_kinds.items()
        if some
    ]
    failing = [each for each in found if each.fails]
    shown = _telling(failing)[:_MOST]
    lines = [
        f"{deck.run.title}: {counted(ranks, 'rank')} ({axes}), layout.zero = {layout.zero}",
        _beside(small),
        "",
        *fitted([("", "compared", "largest difference", "tensor"), *rows], (0, 3), columns()),
        "",
        *(each.sentence for each in noticed),
        *(f"{each}" for each in shown),
        *([f"... and {len(failing) - len(shown)} more"] if len(failing) > len(shown) else []),
    ]
    took, bound = format_seconds(perf_counter() - began), f"{TOLERANCE:.0e} of their largest element"
    if any(each.fails for each in noticed) and not failing:
        lines.append(f"All {len(found)} are within {bound}, but this module has other problems ({took}).")
    elif failing:
        wrong = f"{len(failing)} of {len(found)} differ by more than {bound}"
        lines.append(f"{wrong}: this layout computes a different model ({took}).")
    else:
        lines.append(f"All {len(found)} are within {bound}: this layout computes the same model ({took}).")
    return [line for each in lines for line in fit(each, columns())]


def _telling(failing: Sequence[LayoutDifference]) -> list[LayoutDifference]:
    """Of all that differs the first, from which most of the rest follows, and what one sum or factor
    explains; of a tensor that differs in the first step not the second.
    """
    later = re.compile(r" in the second step(?=$|, with)| after both steps(?=$|, with)")
    names = {each.name for each in failing}
    new = [each for each in failing if not later.search(each.name) or later.sub("", each.name) not in names]
    return [each for number, each in enumerate(new) if number == 0 or each.explained]


def _beside(small: Deck) -> str:
    """What is compared with what."""
    model = small.model
    if model.module is not None:
        name = model.module.rpartition("/")[2]
        given = ", ".join(f"{key} = {value}" for key, value in (model.arguments or {}).items())
        own = "the first step also with its own code in plain PyTorch"
        return f"Two steps of {name}({given}) in fp64, compared with one rank, {own}:"
    what = f"{counted(model.layers, 'layer')}, hidden {model.hidden}, vocabulary {model.vocabulary}"
    return f"Two steps of a small version of the model ({what}) in fp32, compared with one rank:"


def _error(difference: LayoutDifference) -> float:
    return difference.error


def _kind(name: str) -> str:
    """Return which of the kinds a comparison is of."""
    name = name.partition(", with ")[0]
    if name.startswith("gradient norm"):
        return "gradient norms"
    if name.startswith("gradient"):
        return "gradients"
    if name.startswith("output"):
        return "outputs"
    if is_state(name):
        return "state after both steps"
    if not name.startswith("parameter "):
        return "losses and metrics"
    return "parameters after both steps" if name.endswith("after both steps") else "initial parameters"
