"""`hpctrain inspect`: what a checkpoint holds, whether it is whole, how it differs from another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.agree import together
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, examine
from hpctrain.checkpoint.keep import agreed_checkpoints, linked, newest_good
from hpctrain.checkpoint.names import BEST, checkpoint_step
from hpctrain.checkpoint.provenance import losses
from hpctrain.checkpoint.stored_deck import stored_deck_text
from hpctrain.checkpoint.verify import verify
from hpctrain.comm.group import Group
from hpctrain.deck.code import CodeTrust
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_INPUT_OUTPUT, HpctrainError, InputOutputError
from hpctrain.report.bad_samples import bad_samples, bad_samples_text
from hpctrain.report.contents import UNVERIFIED, contents, contents_text, loss_text
from hpctrain.report.described_model import require_described_model
from hpctrain.report.differences import differences, differences_text
from hpctrain.report.terminal import columns
from hpctrain.report.token_contents import is_token_file, token_contents, token_contents_text
from hpctrain.text import escaped, fitted
from hpctrain.units import format_bytes


@dataclass(frozen=True)
class InspectOptions:
    """What to tell of a file: its tensors, its deck alone, its checksums, the difference from another; or
    the samples that its run left out for spikes.
    """

    tensors: bool = False
    bad_samples: bool = False
    deck: bool = False
    verify: bool = False
    other: Path | None = None
    as_json: bool = False
    trust: CodeTrust = CodeTrust()  # noqa: RUF009 - nothing is trusted


def inspect(group: Group, target: Path, wish: InspectOptions, show: Callable[[str], None]) -> int:
    """Tell of a checkpoint, a token file, or all checkpoints of a folder; the exit code. Collective, rank 0
    shows.

    1 where the tensors of two files differ, 3 where a checkpoint of a folder is damaged;
    errors are raised on all ranks as `examine`, `verify` and `compare` raise them.
    """
    with together(group):
        if not target.exists():
            if gone := linked(target.parent, target.name):
                raise InputOutputError(f"{target}: is a link to {escaped(gone)}, which does not exist")
            raise InputOutputError(f"{target}: no such checkpoint or run folder")
        if target.is_dir() and (wish.deck or wish.other is not None or wish.tensors):
            raise HpctrainError(
                f"{target}: a folder, of which the checkpoints are listed; --tensors, --deck and --diff "
                "need one checkpoint file"
            )
    if not target.is_dir() and is_token_file(target):
        return _inspect_tokens(group, target, wish, show)
    if wish.bad_samples:
        return _inspect_samples(group, target, wish, show)
    if target.is_dir():
        return _inspect_folder(group, target, wish, show)
    read = _verify if wish.verify else examine
    structure = read(target, group)
    if wish.other is not None:
        differing = differences(structure, read(wish.other, group), group)
        if group.rank == 0:
            show(_json(differing) if wish.as_json else "\n".join(differences_text(differing, wish.tensors)))
        return EXIT_DONE if differing["equal"] else EXIT_DIFFERENT
    with together(group):
        if group.rank == 0:
            if wish.deck:
                show(stored_deck_text(structure.state, structure.path).removesuffix("\n"))
                return EXIT_DONE
            held = contents(structure, wish.tensors)
            verified = f"All {len(structure.datasets)} tensors match their checksums."
            if wish.as_json:
                show(_json(held | ({"verified": True} if wish.verify else {})))
            else:
                show("\n".join([*contents_text(held), "", verified if wish.verify else UNVERIFIED]))
    return EXIT_DONE


def _verify(path: Path, group: Group) -> CheckpointIndex:
    """Compare tensors with checksums, and parameters with the deck; collective, errors as of `verify`."""
    structure = verify(path, group)
    with together(group):
        require_described_model(structure)
    return structure


def _inspect_tokens(group: Group, target: Path, wish: InspectOptions, show: Callable[[str], None]) -> int:
    """What a token file holds."""
    with together(group):
        asked = {
            "tensors": wish.tensors,
            "deck": wish.deck,
            "bad-samples": wish.bad_samples,
            "diff": wish.other,
        }
        wrong = [f"--{name}" for name, value in asked.items() if value]
        if wrong:
            raise HpctrainError(f"{target}: is a token file, so that {wrong[0]} has no effect")
        if group.rank == 0:
            found = token_contents(target, wish.verify)
            show(_json(found) if wish.as_json else "\n".join(token_contents_text(found)))
    return EXIT_DONE


def _inspect_samples(group: Group, target: Path, wish: InspectOptions, show: Callable[[str], None]) -> int:
    """The samples that a run left out for spikes, as its newest checkpoint tells."""
    path: Path | None = target
    if target.is_dir():
        folder = target / "checkpoints" if (target / "checkpoints").is_dir() else target
        path, _ = newest_good(folder, group)
        if path is None:
            raise InputOutputError(f"{folder}: has no valid checkpoint")
    assert path is not None
    structure = examine(path, group)
    with together(group):
        if group.rank == 0:
            spikes = bad_samples(structure, wish.trust)
            show(
                _json({"spikes": spikes}) if wish.as_json else "\n".join(bad_samples_text(spikes, columns()))
            )
    return EXIT_DONE


def _inspect_folder(group: Group, target: Path, wish: InspectOptions, show: Callable[[str], None]) -> int:
    """Show a table of the checkpoints, newest first, and return the exit code.

    A file is good if all its data matches, readable if only its structure was read, or damaged. The newest
    one that is not damaged is marked, and that to which the link `best` leads, with the loss of an evaluation
    that made it that.
    """
    folder = target / "checkpoints" if (target / "checkpoints").is_dir() else target
    paths = agreed_checkpoints(folder, group)
    if not paths:
        raise InputOutputError(f"{folder}: has no checkpoint (files such as step-00000100.h5)")
    best = ""
    with together(group):
        if group.rank == 0:
            best = linked(folder, BEST)
    rows: list[dict[str, Any]] = []
    by_file: dict[str, str] = {}
    for path in paths:
        row = dict[str, Any](file=path.name, step=checkpoint_step(path), problems=[], bytes=0, written="")
        try:
            structure = (_verify if wish.verify else examine)(path, group)
        except HpctrainError as error:
            row["problems"] = [problem.removeprefix(f"{path}: ") for problem in error.problems]
        else:
            recorded = losses(structure.state)
            row["loss"] = recorded[-1].loss if recorded else None
            by_file[path.name] = loss_text(row["loss"]) if recorded else ""
            if path.name == best:
                row["evaluated"] = _evaluated(structure.state, row["step"])
        with together(group):
            if group.rank == 0 and path.exists():
                status = path.stat()
                written = datetime.fromtimestamp(status.st_mtime, timezone.utc)
                row |= {"bytes": status.st_size, "written": written.strftime("%Y-%m-%dT%H:%M:%SZ")}
        rows.append(row)
    newest = next((row for row in rows if not row["problems"]), None)
    damaged = [row for row in rows if row["problems"]]
    if group.rank == 0:
        name = newest["file"] if newest else None
        held = {"folder": str(folder), "newest": name, "best": best or None, "checkpoints": rows}
        show(_json(held) if wish.as_json else _folder_text(folder, rows, name, best, by_file, wish.verify))
    return EXIT_INPUT_OUTPUT if damaged else EXIT_DONE


def _evaluated(state: Mapping[str, Any], step: object) -> dict[str, Any] | None:
    """The loss for which a checkpoint is the best, and of what it is one; None where it does not tell."""
    record = state.get(BEST)
    if not isinstance(record, dict) or record.get("kept") != step:
        return None
    found = {"of": record.get("of"), "loss": record.get("kept_loss")}
    return found if isinstance(found["of"], str) and isinstance(found["loss"], float) else None


def _folder_text(
    folder: Path,
    rows: list[dict[str, Any]],
    newest: str | None,
    best: str,
    by_file: dict[str, str],
    verified: bool,
) -> str:
    """Return the table, and whether data was compared; `by_file` are the recorded losses by file."""
    cells = [("file", "step", "size", "written (UTC)", "loss", "")]
    for row in rows:
        marks = ["damaged" if row["problems"] else "good" if verified else "readable"]
        marks += ["newest"] if row["file"] == newest else []
        if row["file"] == best:
            evaluated = row.get("evaluated")
            marks.append(f"best ({evaluated['of']} {evaluated['loss']:.4f})" if evaluated else "best")
        told = row["written"].replace("T", " ").removesuffix("Z"), by_file.get(row["file"], "")
        cells.append((row["file"], str(row["step"]), format_bytes(row["bytes"]), *told, ", ".join(marks)))
    problems = [f"{row['file']}: {problem}" for row in rows for problem in row["problems"]]
    if best and best not in (row["file"] for row in rows):
        problems.append(f"{BEST}: is a link to {escaped(best)}, which does not exist")
    lines = [f"{folder}:", "", *fitted(cells, (0, 3, 5), columns())]
    lines += [] if verified else ["", UNVERIFIED]
    return "\n".join([*lines, "", *problems] if problems else lines)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, allow_nan=False)
