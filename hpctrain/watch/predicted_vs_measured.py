"""Predicted and measured values of a run: memory by kind, seconds by cause, bytes by axis.

They are read from `plan.json`, `ledger.json` and the deck, which another version or other programs may have
written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import fsum, isfinite
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.files import JSON_BYTES, parse_json, read_text
from hpctrain.report.page.run_summary import PredictedVsMeasured, ValuePair
from hpctrain.report.plots import PlottedRun
from hpctrain.text import counted

PLAN_FILE, LEDGER_FILE, DECK_FILE = "plan.json", "ledger.json", "deck.toml"
STAGES_SHOWN = 8
"""Largest number of pipeline stages whose memory is compared."""

MAX_PLANNED_RANKS = 1 << 14
"""Largest number of ranks for which a report plans the bytes that ranks send."""

_OF_STEP = frozenset({"forward", "backward", "synchronize", "step"})
"""Phases of the ledger that make up a step."""

_LEAST_SHARE = 5e-4
"""Smallest share of a step for which a cause gets a line."""

_AXES = 50


def compare_with_plan(
    folder: Path, tables: Mapping[str, Any], run: PlottedRun, problems: list[str]
) -> list[PredictedVsMeasured]:
    """Return all comparisons for which the files of a run have values.

    Args:
        folder: The run folder.
        tables: Tables of its deck.
        run: Metrics of the run.
        problems: List to which a sentence is added for each file that cannot be read.
    """
    plan = _json(folder / PLAN_FILE, problems)
    ledger = _json(folder / LEDGER_FILE, problems)
    plan = plan if isinstance(plan, dict) else {}
    comparisons = [*_memory(plan), *_seconds(plan), *_traffic(folder, plan, ledger, tables, run)]
    return [each for each in comparisons if each.pairs]


def _json(path: Path, problems: list[str]) -> Any:
    if not os.path.lexists(path):
        return None
    try:
        return parse_json(read_text(path, JSON_BYTES))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return None


def _memory(plan: Mapping[str, Any]) -> Iterator[PredictedVsMeasured]:
    """Yield the memory of a rank of each stage, by kind."""
    from hpctrain.plan.plan_text import KINDS

    predicted = _dicts(_dict(plan.get("predicted")).get("stages"))
    measured = _dicts(plan.get("measured"))
    roles = list(_dict(_dict(plan.get("predicted")).get("roles")))
    kinds = {**KINDS, "total": "total"}
    for stage in range(min(STAGES_SHOWN, max(len(predicted), len(measured)))):
        sides = [each[stage] if stage < len(each) else {} for each in (predicted, measured)]
        pairs = [
            ValuePair(words, *(_number(side.get(f"{kind}_bytes")) for side in sides))
            for kind, words in kinds.items()
        ]
        several = max(len(predicted), len(measured)) > 1
        holder = f"a rank of stage {stage}" if several else "a rank"
        if stage < len(roles):
            holder = f"a rank of the {roles[stage]}"
        # Kinds that neither holds would fill the table with zeros.
        shown = [pair for pair in pairs if any(pair[1:])]
        yield PredictedVsMeasured(f"Memory of {holder}", "bytes", shown)


def _seconds(plan: Mapping[str, Any]) -> Iterator[PredictedVsMeasured]:
    """Yield the seconds of a step, by cause if causes were measured."""
    from hpctrain.plan.time.measured_step import side_by_side
    from hpctrain.plan.time.time_text import WHAT, WHAT_TOGETHER

    time = _dict(plan.get("time"))
    predicted, measured = _dict(time.get("predicted")), _dict(time.get("measured"))
    total = ValuePair("total", _number(predicted.get("seconds")), _number(measured.get("seconds")))
    if total.predicted is None and total.measured is None:
        return
    predicted_causes = _numbers(predicted.get("seconds_by_cause"))
    measured_causes = _numbers(measured.get("seconds_by_cause"))
    pairs: list[ValuePair] = []
    try:
        rows = (
            side_by_side(predicted_causes, measured_causes)
            if measured_causes
            else [(cause, each, None) for cause, each in predicted_causes.items()]
        )
    except KeyError:  # causes of another version
        rows = []
    words = WHAT | WHAT_TOGETHER
    least = _LEAST_SHARE * max(total.predicted or 0.0, total.measured or 0.0)
    for cause, one, other in rows:
        if max(one, other or 0.0) > least:
            pairs.append(ValuePair(words.get(cause, cause), one, other))
    machine = time.get("machine")
    note = f"Predicted by the rates of {machine}." if isinstance(machine, str) else ""
    yield PredictedVsMeasured("Step time", "seconds", [*pairs, total], note)


def _traffic(
    folder: Path, plan: Mapping[str, Any], ledger: Any, tables: Mapping[str, Any], run: PlottedRun
) -> Iterator[PredictedVsMeasured]:
    """Yield the bytes that rank 0 sent or received in a step, by axis."""
    steps = _steps(run)
    measured: dict[str, float] = {}
    for row in _dicts(ledger):
        size, axis, phase = _number(row.get("bytes")), row.get("axis"), row.get("phase")
        if isinstance(axis, str) and isinstance(phase, str) and phase in _OF_STEP and size and steps:
            measured[axis] = measured.get(axis, 0.0) + size / steps
    ranks, roles = (_dict(plan.get("predicted")).get(name) for name in ("ranks", "roles"))
    predicted: dict[str, float] = {}
    if measured and isinstance(ranks, int) and 0 < ranks <= MAX_PLANNED_RANKS and not roles:
        predicted = _planned(folder, tables, ranks)
    axes = list(dict.fromkeys((*predicted, *measured)))[:_AXES]
    pairs = [ValuePair(axis, predicted.get(axis), measured.get(axis)) for axis in axes]
    if not pairs:
        return
    sums = [fsum(each.values()) if each else None for each in (predicted, measured)]
    pairs.append(ValuePair("all axes", *sums))
    note = f"Payload as counted by the ledger. Measured: mean of {counted(steps, 'step')} of rank 0."
    yield PredictedVsMeasured("Bytes that a rank sends and receives per step, by axis", "bytes", pairs, note)


def _steps(run: PlottedRun) -> int:
    """Return the number of steps of a run's last job, which its ledger counts."""
    first = max((mark.step for mark in run.marks if mark.kind == "resumed"), default=0)
    return max(0, int(run.rows[-1]["step"]) - first)


def _planned(folder: Path, tables: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """Return the planned bytes of a step by axis for the first stage.

    It is empty if the plan would run code of the user, or if the deck is not valid in this version.
    """
    model, data = _dict(tables.get("model")), _dict(tables.get("data"))
    if "module" in model or "dataset" in data:
        return {}
    from hpctrain.deck.code import CodeTrust
    from hpctrain.deck.read import read_stored_deck
    from hpctrain.plan.traffic_plan import plan_traffic

    try:
        deck = read_stored_deck(folder / DECK_FILE, CodeTrust())
        if deck.model.vocabulary is None:
            return {}
        return plan_traffic(deck, ranks, deck.model.vocabulary).stages[0].payload()
    except HpctrainError:
        return {}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        return None
    return float(value) if isfinite(value) else None


def _numbers(value: object) -> dict[str, float]:
    return {name: each for name, number in _dict(value).items() if (each := _number(number)) is not None}
