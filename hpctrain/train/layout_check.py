"""The layout check as a verb (`hpctrain check`): a comparison of a layout with one rank, without training."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

from hpctrain.comm.call_check import MismatchError
from hpctrain.comm.mesh import sizes_text
from hpctrain.comm.world import World
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE
from hpctrain.model.modules.causal_model import model_title
from hpctrain.report.terminal import columns, fit
from hpctrain.text import counted, fitted
from hpctrain.train.automatic_layout import choose_layout
from hpctrain.train.layout_difference import TOLERANCE, LayoutDifference
from hpctrain.train.layout_verification import compare_scaled_down, is_state
from hpctrain.train.module_probe import ProbeFinding
from hpctrain.train.startup import read_deck_on_all_ranks
from hpctrain.units import format_seconds

_MAX_LINES = 20
"""Largest number of differences that are printed."""

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
    """Compare two steps of a scaled-down deck on these ranks with those of one rank. Collective.

    Args:
        world: The world.
        source: Path of the deck, or a deck that a script has made.
        overrides: `--set` arguments.
        show: Prints the result, on rank 0.

    Returns:
        The exit code; 1 if a tensor differs.
    """
    start_time = perf_counter()
    world.ledger.activity = "reading the deck"
    deck = read_deck_on_all_ranks(world, source, overrides, world.size)
    world.hang.set_limit(deck.stability.hang_seconds)
    deck, layout_note = choose_layout(world, deck)
    world.ledger.activity = "comparing the layout with one rank"
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    # A module may make other calls on other ranks. The check of calls reports that instead of a hang.
    world.compare_calls(deck.communication.check or deck.model.module is not None)
    deck = choose_functions(deck, world)
    mesh = make_mesh(deck, world)
    try:
        small, findings, differences = compare_scaled_down(deck, world, mesh)
    except MismatchError as error:
        if deck.model.module is None:
            raise
        likely = "the module likely runs other code on other ranks, for example skips a block"
        raise MismatchError(f"{'; '.join(error.problems)}: {likely}") from error
    if world.rank == 0:
        lines = _result_lines(deck, small, findings, differences, world.size, start_time)
        show("\n".join([*([layout_note] if layout_note else []), *lines]))
    fails = [*(each.fails for each in findings), *(each.fails for each in differences)]
    return EXIT_DIFFERENT if any(fails) else EXIT_DONE


def _result_lines(
    deck: Deck,
    small: Deck,
    findings: Sequence[ProbeFinding],
    differences: Sequence[LayoutDifference],
    ranks: int,
    start_time: float,
) -> list[str]:
    layout = deck.layout
    sizes = {name: getattr(layout, name) for name in ("pipeline", "context", "tensor")}
    data = ranks // (sizes["pipeline"] * sizes["context"] * sizes["tensor"])
    axes = sizes_text({"data": data} | sizes)
    of_kinds = {kind: [each for each in differences if _kind(each.name) == kind] for kind in _KINDS}
    rows = [
        (kind, str(len(some)), f"{max(each.error for each in some):.1e}", max(some, key=_error).name)
        for kind, some in of_kinds.items()
        if some
    ]
    failing = [each for each in differences if each.fails]
    selected = _select_differences(failing)[:_MAX_LINES]
    lines = [
        f"{deck.run.title}: {counted(ranks, 'rank')} ({axes}), layout.zero = {layout.zero}",
        _describe_model(small),
        "",
        *fitted([("", "compared", "largest difference", "tensor"), *rows], (0, 3), columns()),
        "",
        *(each.sentence for each in findings),
        *(f"{each}" for each in selected),
        *([f"... and {len(failing) - len(selected)} more"] if len(failing) > len(selected) else []),
    ]
    took, bound = format_seconds(perf_counter() - start_time), f"{TOLERANCE:.0e} of their largest element"
    if any(each.fails for each in findings) and not failing:
        lines.append(
            f"All {len(differences)} are within {bound}, but this module has other problems ({took})."
        )
    elif failing:
        wrong = f"{len(failing)} of {len(differences)} differ by more than {bound}"
        lines.append(f"{wrong}: this layout computes a different model ({took}).")
    else:
        lines.append(
            f"All {len(differences)} are within {bound}: this layout computes the same model ({took})."
        )
    return [line for each in lines for line in fit(each, columns())]


def _select_differences(failing: Sequence[LayoutDifference]) -> list[LayoutDifference]:
    """Return the most informative differences.

    These are the first one, which causes most of the others, and those that a sum or a factor explains. The
    second step is left out for a tensor that differs in the first.
    """
    later = re.compile(r" in the second step(?=$|, with)| after both steps(?=$|, with)")
    names = {each.name for each in failing}
    new = [each for each in failing if not later.search(each.name) or later.sub("", each.name) not in names]
    return [each for number, each in enumerate(new) if number == 0 or each.explained]


def _describe_model(small: Deck) -> str:
    """Return a line about the model that is compared."""
    model = small.model
    if model.module is not None:
        given = ", ".join(f"{key} = {value}" for key, value in (model.arguments or {}).items())
        title = f"{model.module.rpartition('/')[2]}({given})"
        if model.module == CAUSAL_MODEL and model.arguments:
            title = f"{model_title(model.arguments)} of transformers"
        own = "the first step also with its own code in plain PyTorch"
        return f"Two steps of {title} in fp64, compared with one rank, {own}:"
    what = f"{counted(model.layers, 'layer')}, hidden {model.hidden}, vocabulary {model.vocabulary}"
    return f"Two steps of a small version of the model ({what}) in fp32, compared with one rank:"


def _error(difference: LayoutDifference) -> float:
    return difference.error


def _kind(name: str) -> str:
    """Return the kind of a compared value, from its name."""
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
