"""Contents of a checkpoint file, as an object for JSON and as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

from hpctrain.checkpoint.checkpoint_index import VERSION, CheckpointIndex, StoredTensor
from hpctrain.checkpoint.provenance import HistorySegment, RecordedLoss, history, losses
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.module import model_keys
from hpctrain.deck.sections.objective import SCORE_KINDS
from hpctrain.errors import HpctrainError
from hpctrain.report.terminal import columns, fit
from hpctrain.text import counted, escaped, fitted, table
from hpctrain.units import format_bytes, format_count

SEGMENTS_SHOWN = 8
LOSSES_SHOWN = 5

UNVERIFIED = "The data was not compared with its checksums; --verify does that."
"""Sentence below the contents of a file of which only the structure was read."""

Contents = dict[str, Any]


def contents(structure: CheckpointIndex, tensors: bool = False) -> Contents:
    """Return the contents of a file, with all datasets if `tensors`. Unknown values are None or empty."""
    state, path = structure.state, structure.path
    deck: Deck | None = None
    problem = ""
    try:
        deck = stored_deck(state, path)
    except HpctrainError as error:
        problem = error.problems[0]
    chain = history(state)
    last = chain[-1] if chain else None
    facts: Contents = {
        "file": str(path),
        "leads_to": escaped(path.readlink().name) if path.is_symlink() else None,
        "bytes": path.stat().st_size,
        "format": VERSION,
        "title": deck.run.title if deck else None,
        "step": state.get("step"),
        "steps": deck.run.steps if deck else None,
        "samples": state.get("samples"),
        "tokens": state.get("tokens"),
        "skipped": state.get("skipped"),
        "parameters": sum(
            stored.elements
            for name, stored in structure.datasets.items()
            if name.startswith("/model/") and not structure.auxiliary_model(name)
        ),
        "model": model_keys(deck.model.model_dump(mode="json")) if deck else None,
        "objective": deck.objective.kind if deck else None,
        "sequence": deck.batch.sequence if deck and deck.data.dataset is None else None,
        "dataset": deck.data.dataset if deck else None,
        "precision": deck.precision.format_name if deck else None,
        "deck_problem": problem,
        "ranks": state.get("ranks"),
        "layout": last.layout if last else None,
        "versions": state.get("versions", {}),
        "commit": last.commit if last else None,
        "folders": _folders(structure.datasets.values()),
        "history": [asdict(segment) for segment in chain],
        "losses": [asdict(loss) for loss in losses(state)],
    }
    if tensors:
        facts["tensors"] = [
            {
                "name": stored.dataset,
                "shape": list(stored.shape),
                "type": stored.kind,
                "bytes": stored.elements * stored.item_bytes,
            }
            for stored in structure.datasets.values()
        ]
    return facts


def contents_text(facts: Contents) -> list[str]:
    """Return the contents as lines that fit the terminal, or about a hundred columns."""
    width = columns()
    link = f" ({facts['leads_to']})" if facts["leads_to"] else ""
    head = f"{facts['file']}{link}: checkpoint, format {facts['format']}, {format_bytes(facts['bytes'])}"
    lines = [*fit(head, width), ""]
    for name, text in _sentences(facts):
        lines += fit(f"{name:<11} {text}", width) if text else []
    lines += ["", *_folder_table(facts["folders"])]
    chain = [segment for row in facts["history"] if (segment := HistorySegment.of(row)) is not None]
    if chain:
        lines += ["", *history_table(chain)]
    recorded = [RecordedLoss(**row) for row in facts["losses"]]
    if recorded:
        lines += ["", *_loss_table(recorded)]
    if "tensors" in facts:
        rows = [("tensor", "shape", "type", "bytes")]
        for each in facts["tensors"]:
            size = format_bytes(each["bytes"])
            rows.append((each["name"], shape_text(each["shape"]), each["type"], size))
        lines += ["", *fitted(rows, (0, 2), width)]
    return lines


def layout_text(layout: Mapping[str, int]) -> str:
    """Return a text such as `data 2 x tensor 4, zero 1`, with the axes of more than one rank."""
    cut = {name: size for name, size in layout.items() if name in {"zero", "replicas", "servers"}}
    axes = [f"{axis} {size}" for axis, size in layout.items() if axis not in cut and size != 1]
    return ", ".join(
        [" x ".join(axes) or "one rank", *(f"{name} {size}" for name, size in cut.items() if size)]
    )


def shape_text(shape: Sequence[int]) -> str:
    """Return a text such as `1024 x 768`."""
    return " x ".join(map(str, shape))


def loss_text(loss: float | None) -> str:
    """Return a loss with the digits of the log; "not finite" if it was not finite."""
    return "not finite" if loss is None else f"{loss:.4f}"


def history_table(chain: Sequence[HistorySegment]) -> list[str]:
    """Return a table of the runs of a chain, only the newest ones if there are many."""
    rows = [("run", "steps", "layout", "started (UTC)", "version", "commit", "resumed from")]
    for segment in chain[-SEGMENTS_SHOWN:]:
        title = shorten(segment.title, 20, placeholder="...") or segment.title[:20]
        steps = f"{segment.first_step}-{segment.last_step}"
        started = segment.started.replace("T", " ").removesuffix("Z")
        code = segment.versions.get("hpctrain", ""), (segment.commit or "")[:8]
        origin = Path(segment.went_on_from).name if segment.went_on_from else ""
        rows.append((title, steps, layout_text(segment.layout), started, *code, origin[-24:]))
    more = len(chain) - SEGMENTS_SHOWN
    note = [f"and {more} earlier (see --json)"] if more > 0 else []
    return fitted(rows, (0, 2, 3, 4, 5, 6), columns()) + note


def _sentences(facts: Contents) -> Iterator[tuple[str, str]]:
    """Yield names and sentences about the run and its model."""
    if facts["step"] is not None:
        of = f" of {facts['steps']}" if facts["steps"] else ""
        skipped = f", {facts['skipped']} of them skipped" if facts["skipped"] else ""
        unit = "tokens" if facts["dataset"] is None else "samples"
        trained = f", {format_count(facts[unit])} {unit}" if facts[unit] is not None else ""
        title = f"{shorten(facts['title'], 40, placeholder='...')}, " if facts["title"] else ""
        yield "run", f"{title}step {facts['step']}{of}{skipped}{trained}"
    parameters = f"{format_count(facts['parameters'])} parameters"
    model = facts["model"]
    if model is not None and model.get("module") is not None:
        yield "model", f"{model['module'].rpartition('/')[2]}, {parameters}"
        vocabulary = f"vocabulary {model['vocabulary']}, " if model["vocabulary"] else ""
        if facts["dataset"] is not None:
            yield "dataset", facts["dataset"].rpartition("/")[2]
        else:
            yield "", f"{vocabulary}sequence {facts['sequence']}"
        yield "precision", facts["precision"]
    elif model is not None:
        shared = model["key_value_heads"] != model["heads"]
        heads = counted(model["heads"], "head") + f" ({model['key_value_heads']} of keys)" * shared
        layers = counted(model["layers"], "layer")
        yield (
            "model",
            f"{model['family']}, {parameters}: {layers}, hidden {model['hidden']}, {heads}",
        )
        if model["experts"]:
            yield "", _mixture_text(model["experts"])
        vocabulary = f"vocabulary {model['vocabulary']}, " if model["vocabulary"] else ""
        head = f"{'tied' if model['tied'] else 'untied'} embeddings"
        head = "a score head" if facts["objective"] in SCORE_KINDS else head
        yield "", f"feed-forward {model['mlp']}, {vocabulary}sequence {facts['sequence']}, {head}"
        yield "precision", facts["precision"]
    else:
        yield "model", parameters
        yield "deck", facts["deck_problem"]
    if facts["ranks"] is not None:
        layout = layout_text(facts["layout"]) if facts["layout"] else ""
        ranks = counted(facts["ranks"], "rank")
        yield "written by", ranks if layout in {"", "one rank"} else f"{ranks} ({layout})"
    yield "versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    yield "commit", facts["commit"] or ""


def _mixture_text(experts: Mapping[str, Any]) -> str:
    """Return a text such as `mixtures of 8 experts of 128, 2 a token, in every block; softmax`."""
    shared = f", {experts['shared']} shared by all" if experts["shared"] else ""
    every = "every block" if experts["every"] == 1 else f"one of {experts['every']} blocks"
    if pattern := experts.get("pattern"):
        every = f"{sum(pattern)} of {counted(len(pattern), 'block')}"
    first = f" after the first {experts['dense_first']}" if experts["dense_first"] else ""
    balance = {"loss": "balanced by a loss", "bias": "balanced by a bias", "none": "not balanced"}
    capacity = f", capacity {experts['capacity']:g}" if experts["capacity"] is not None else ""
    return (
        f"mixtures of {counted(experts['count'], 'expert')} of {experts['mlp']}, "
        f"{experts['per_token']} a token{shared}, in {every}{first}; "
        f"{experts['router']}, {balance[experts['balance']]}{capacity}"
    )


def _folders(datasets: Iterable[StoredTensor]) -> list[dict[str, Any]]:
    """Return number, types, elements and bytes of the tensors in each folder of the file."""
    rows: dict[str, dict[str, Any]] = {}
    for stored in datasets:
        folder = stored.dataset.rpartition("/")[0] or "/"
        empty = {"folder": folder, "tensors": 0, "types": [], "elements": 0, "bytes": 0}
        row = rows.setdefault(folder, empty)
        row["tensors"] += 1
        row["elements"] += stored.elements
        row["bytes"] += stored.elements * stored.item_bytes
        if stored.kind not in row["types"]:
            row["types"].append(stored.kind)
    return list(rows.values())


def _folder_table(folders: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("folder", "tensors", "type", "elements", "bytes")]
    for row in folders:
        sizes = format_count(row["elements"]), format_bytes(row["bytes"])
        rows.append((row["folder"], str(row["tensors"]), ", ".join(row["types"]), *sizes))
    return fitted(rows, (0, 2), columns())


def _loss_table(recorded: Sequence[RecordedLoss]) -> list[str]:
    rows = [("step", "loss", "grad norm")]
    for each in recorded[-LOSSES_SHOWN:]:
        norm = "not finite" if each.grad_norm is None else f"{each.grad_norm:.4g}"
        rows.append((str(each.step), loss_text(each.loss), norm))
    return table(rows, left=())
