"""From what `hpctrain plan` is asked for to a sweep's table, JSON and picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.plan.sweep import sweep_deck
from hpctrain.plan.sweep_words import plot_sweep, sweep_text
from hpctrain.plan.swept import parse_sweeps
from hpctrain.plan.time.machine import Machine
from hpctrain.report.bar import progress_bar
from hpctrain.report.figures import demand_ending


def demand_sweep(ranks: int | None, *, weak: bool, plot: Path | None, pareto: bool) -> int:
    """The ranks of a plan that is no sweep. HpctrainError where they are not given, or what only sweeps have
    is asked for.
    """
    asked = [name for name, given in (("--plot", plot), ("--pareto", pareto), ("--weak", weak)) if given]
    if asked:
        raise HpctrainError(
            f"{asked[0]}: is of a sweep: give --sweep KEY=V,V,... too, such as --sweep ranks=64,128"
        )
    if ranks is None:
        raise HpctrainError("how many ranks the run has is not said: give --ranks N")
    return ranks


def swept(
    deck: Path,
    ranks: int | None,
    overrides: Sequence[str],
    arguments: Sequence[str],
    ranks_per_node: int | None,
    rates: Machine | None,
    weak: bool,
    plot: Path | None,
    pareto: bool,
    as_json: bool,
) -> str:
    """The table of a sweep, or its JSON; with `plot` its picture is written, too.

    HpctrainError, before anything is planned, for options that do not go together.
    """
    sweeps = parse_sweeps(arguments)
    if pareto and plot is None:
        raise HpctrainError("--pareto: is a picture: give --plot FILE too")
    if plot is not None:
        demand_ending(plot)
    count = 1
    for each in sweeps:
        count *= len(each.values)
    with progress_bar(count) as reached:
        sweep = sweep_deck(deck, ranks, overrides, sweeps, ranks_per_node, rates, weak, reached)
    if plot is not None:
        plot_sweep(sweep, plot, pareto)
    return json.dumps(sweep.row(), indent=1) if as_json else sweep_text(sweep)
