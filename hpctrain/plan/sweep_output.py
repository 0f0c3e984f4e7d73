"""From what `hpctrain plan` is asked for to a sweep's table, JSON and picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.plan.planned_sweep import sweep_deck
from hpctrain.plan.sweep_arguments import RANKS, parse_sweeps
from hpctrain.plan.sweep_text import plot_sweep, sweep_text
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.report.bar import progress_bar
from hpctrain.report.figures import require_picture_suffix


def swept(
    deck: Path,
    ranks: int | None,
    overrides: Sequence[str],
    arguments: Sequence[str],
    ranks_per_node: int | None,
    rates: MachineRates | None,
    weak: bool,
    plot: Path | None,
    pareto: bool,
    as_json: bool,
) -> str:
    """The table of a sweep, or its JSON; with `plot` its picture is written, too.

    HpctrainError, before anything is planned, for options that do not go together.
    """
    sweeps = parse_sweeps(arguments)
    if ranks is not None and not weak and RANKS in [each.key for each in sweeps]:
        raise HpctrainError(
            f"--ranks {ranks} conflicts with --sweep {RANKS} (with --weak, batch.global_size of the deck is "
            "that for --ranks)"
        )
    if plot is not None:
        require_picture_suffix(plot)
    count = 1
    for each in sweeps:
        count *= len(each.values)
    with progress_bar(count) as reached:
        sweep = sweep_deck(deck, ranks, overrides, sweeps, ranks_per_node, rates, weak, reached)
    if plot is not None:
        plot_sweep(sweep, plot, pareto)
    return json.dumps(sweep.row(), indent=1) if as_json else sweep_text(sweep)
