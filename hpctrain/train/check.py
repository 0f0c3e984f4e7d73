"""`hpctrain check`: whether a layout computes what one rank does, tensor by tensor, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

from hpctrain.checkpoint.exchange.source import settled_keys
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import make_mesh
from hpctrain.engine.functions import with_functions
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE
from hpctrain.report.terminal import columns, fit
from hpctrain.table import fitted
from hpctrain.train.layout import choose_layout
from hpctrain.train.startup import check_deck_file
from hpctrain.train.verify import TOLERANCE, LayoutDifference, compare_miniature
from hpctrain.units import format_seconds
from hpctrain.words import counted

_MOST = 20
"""Of differences that are told."""

_KINDS = ("initial parameters", "losses", "gradients", "gradient norms", "parameters after both steps")


def check(world: World, path: Path, overrides: Sequence[str], show: Callable[[str], None]) -> int:
    """Compare two steps of a deck in miniature on these ranks with those of one, and `show` on rank 0 what
    came of it; the exit code, 1 where a tensor differs. Collective.
    """
    began = perf_counter()
    check_deck_file(world, path)
    with world.agreement():
        deck = read_deck(path, overrides, world.size, settled_keys)
    deck, chose = choose_layout(world, deck)
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device)
    world.compare_calls(deck.communication.check)
    deck = with_functions(deck, world)
    small, found = compare_miniature(deck, world, make_mesh(deck, world))
    if world.rank == 0:
        show("\n".join([*([chose] if chose else []), *_told(deck, small, found, world.size, began)]))
    return EXIT_DIFFERENT if any(each.fails for each in found) else EXIT_DONE


def _told(deck: Deck, small: Deck, found: Sequence[LayoutDifference], ranks: int, began: float) -> list[str]:
    layout, model = deck.layout, small.model
    sizes = {name: getattr(layout, name) for name in ("pipeline", "context", "tensor")}
    data = ranks // (sizes["pipeline"] * sizes["context"] * sizes["tensor"])
    axes = " x ".join(f"{name} {size}" for name, size in ({"data": data} | sizes).items())
    what = f"{counted(model.layers, 'layer')}, hidden {model.hidden}, vocabulary {model.vocabulary}"
    of_kinds = {kind: [each for each in found if _kind(each.name) == kind] for kind in _KINDS}
    rows = [
        (kind, str(len(some)), f"{max(each.error for each in some):.1e}", max(some, key=_error).name)
        for kind, some in of_kinds.items()
        if some
    ]
    failing = [each for each in found if each.fails]
    lines = [
        f"{deck.run.title}: {counted(ranks, 'rank')} ({axes}), layout.zero = {layout.zero}",
        f"Two steps of the model in miniature ({what}), in fp32, beside those of one rank:",
        "",
        *fitted([("", "compared", "largest difference", "of"), *rows], (0, 3), columns()),
        "",
        *(f"{each}" for each in failing[:_MOST]),
        *([f"... and {len(failing) - _MOST} more"] if len(failing) > _MOST else []),
    ]
    took, bound = format_seconds(perf_counter() - began), f"{TOLERANCE:.0e} of their largest element"
    if failing:
        wrong = f"{len(failing)} of {len(found)} differ by more than {bound}"
        lines.append(f"{wrong}: this layout computes another model ({took}).")
    else:
        lines.append(f"All {len(found)} are within {bound}: this layout computes the same model ({took}).")
    return [line for each in lines for line in fit(each, columns())]


def _error(difference: LayoutDifference) -> float:
    return difference.error


def _kind(name: str) -> str:
    """Which of the kinds a comparison is of."""
    if name.startswith("gradient norm"):
        return "gradient norms"
    if name.startswith("gradient"):
        return "gradients"
    if name.startswith("loss"):
        return "losses"
    return "parameters after both steps" if name.endswith("after both steps") else "initial parameters"
