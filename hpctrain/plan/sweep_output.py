"""Output of `hpctrain plan --sweep`: table, JSON and picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.plan.planned_sweep import SweepOptions, sweep_deck
from hpctrain.plan.sweep_arguments import RANKS, parse_sweeps
from hpctrain.plan.sweep_text import plot_sweep, sweep_text
from hpctrain.report.bar import progress_bar
from hpctrain.report.figures import require_picture_suffix


@dataclass(frozen=True)
class OutputOptions:
    """Output of a sweep.

    Attributes:
        plot: File of a picture; None for none.
        pareto: True for a picture of memory against time.
        as_json: True for JSON instead of a table.
    """

    plot: Path | None
    pareto: bool
    as_json: bool


def sweep_output(
    deck: Path,
    ranks: int | None,
    overrides: Sequence[str],
    arguments: Sequence[str],
    options: SweepOptions,
    output: OutputOptions,
) -> str:
    """Return the table or the JSON of a sweep, and write its picture.

    Args:
        deck: File of the deck.
        ranks: Number of ranks; None if they are swept.
        overrides: Arguments of `--set`.
        arguments: Arguments of `--sweep`.
        options: Options of the sweep.
        output: Output of the sweep.

    Raises:
        HpctrainError: Options conflict. Nothing has been planned.
    """
    sweeps = parse_sweeps(arguments)
    if ranks is not None and not options.weak and RANKS in [each.key for each in sweeps]:
        raise HpctrainError(
            f"--ranks {ranks} conflicts with --sweep {RANKS} (with --weak, batch.global_size of the deck is "
            "that for --ranks)"
        )
    if output.plot is not None:
        require_picture_suffix(output.plot)
    count = 1
    for each in sweeps:
        count *= len(each.values)
    with progress_bar(count) as progress:
        sweep = sweep_deck(deck, ranks, overrides, sweeps, options, progress)
    if output.plot is not None:
        plot_sweep(sweep, output.plot, output.pareto)
    return json.dumps(sweep.row(), indent=1) if output.as_json else sweep_text(sweep)
