"""`hpctrain inspect`: contents and checksums of checkpoints and token files, and their differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, examine
from hpctrain.checkpoint.names import BEST, checkpoint_step
from hpctrain.checkpoint.provenance import losses
from hpctrain.checkpoint.retention import link_target, list_checkpoints, newest_valid
from hpctrain.checkpoint.stored_deck import stored_deck_text
from hpctrain.checkpoint.verify_checksums import verify
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
    """Options of `hpctrain inspect`.

    Attributes:
        tensors: True to show all tensors.
        bad_samples: True to show the samples that the run skipped because of spikes.
        deck: True to show only the deck.
        verify: True to compare the data with its checksums.
        other: Checkpoint to compare with; None for none.
        as_json: True for JSON.
        trust: Decision which code of the deck may be called.
    """

    tensors: bool = False
    bad_samples: bool = False
    deck: bool = False
    verify: bool = False
    other: Path | None = None
    as_json: bool = False
    trust: CodeTrust = CodeTrust()  # noqa: RUF009 - nothing is trusted


def inspect(group: Group, target: Path, options: InspectOptions, show: Callable[[str], None]) -> int:
    """Show the contents of a checkpoint, a token file, or all checkpoints of a folder. Collective.

    Args:
        group: The ranks.
        target: The file or folder.
        options: What to show.
        show: Function that prints a text, called on rank 0.

    Returns:
        The exit code: 1 if the tensors of two files differ, 3 if a checkpoint of a folder is damaged.

    Raises:
        HpctrainError: As in `examine`, `verify` and `compare`, on all ranks.
    """
    with raise_on_all_ranks(group):
        if not target.exists():
            if gone := link_target(target.parent, target.name):
                raise InputOutputError(f"{target}: is a link to {escaped(gone)}, which does not exist")
            raise InputOutputError(f"{target}: no such checkpoint or run folder")
        if target.is_dir() and (options.deck or options.other is not None or options.tensors):
            raise HpctrainError(
                f"{target}: a folder, of which the checkpoints are listed; --tensors, --deck and --diff "
                "need one checkpoint file"
            )
    if not target.is_dir() and is_token_file(target):
        return _inspect_tokens(group, target, options, show)
    if options.bad_samples:
        return _inspect_samples(group, target, options, show)
    if target.is_dir():
        return _inspect_folder(group, target, options, show)
    read = _verify if options.verify else examine
    structure = read(target, group)
    if options.other is not None:
        differing = differences(structure, read(options.other, group), group)
        if group.rank == 0:
            show(
                _json(differing)
                if options.as_json
                else "\n".join(differences_text(differing, options.tensors))
            )
        return EXIT_DONE if differing["equal"] else EXIT_DIFFERENT
    with raise_on_all_ranks(group):
        if group.rank == 0:
            if options.deck:
                show(stored_deck_text(structure.state, structure.path).removesuffix("\n"))
                return EXIT_DONE
            contents_of_folder = contents(structure, options.tensors)
            verified = f"All {len(structure.datasets)} tensors match their checksums."
            if options.as_json:
                show(_json(contents_of_folder | ({"verified": True} if options.verify else {})))
            else:
                show(
                    "\n".join(
                        [*contents_text(contents_of_folder), "", verified if options.verify else UNVERIFIED]
                    )
                )
    return EXIT_DONE


def _verify(path: Path, group: Group) -> CheckpointIndex:
    """Compare tensors with checksums, and parameters with the deck. Collective; errors as in `verify`."""
    structure = verify(path, group)
    with raise_on_all_ranks(group):
        require_described_model(structure)
    return structure


def _inspect_tokens(group: Group, target: Path, options: InspectOptions, show: Callable[[str], None]) -> int:
    """Show the contents of a token file."""
    with raise_on_all_ranks(group):
        ignored_options = {
            "tensors": options.tensors,
            "deck": options.deck,
            "bad-samples": options.bad_samples,
            "diff": options.other,
        }
        wrong = [f"--{name}" for name, value in ignored_options.items() if value]
        if wrong:
            raise HpctrainError(f"{target}: is a token file, so that {wrong[0]} has no effect")
        if group.rank == 0:
            contents_of_file = token_contents(target, options.verify)
            show(
                _json(contents_of_file)
                if options.as_json
                else "\n".join(token_contents_text(contents_of_file))
            )
    return EXIT_DONE


def _inspect_samples(group: Group, target: Path, options: InspectOptions, show: Callable[[str], None]) -> int:
    """Show the samples that a run skipped because of spikes, by its newest checkpoint."""
    path: Path | None = target
    if target.is_dir():
        folder = target / "checkpoints" if (target / "checkpoints").is_dir() else target
        path, _ = newest_valid(folder, group)
        if path is None:
            raise InputOutputError(f"{folder}: has no valid checkpoint")
    assert path is not None
    structure = examine(path, group)
    with raise_on_all_ranks(group):
        if group.rank == 0:
            spikes = bad_samples(structure, options.trust)
            show(
                _json({"spikes": spikes})
                if options.as_json
                else "\n".join(bad_samples_text(spikes, columns()))
            )
    return EXIT_DONE


def _inspect_folder(group: Group, target: Path, options: InspectOptions, show: Callable[[str], None]) -> int:
    """Show a table of the checkpoints, newest first, and return the exit code.

    A file is "good" if all its data matches its checksums, "readable" if only its structure was read, or
    "damaged". The table marks the newest file that is not damaged, and the file to which the link `best`
    leads, with the evaluation loss for which it is the best.
    """
    folder = target / "checkpoints" if (target / "checkpoints").is_dir() else target
    paths = list_checkpoints(folder, group)
    if not paths:
        is_model = (folder / "config.json").is_file()
        hint = "; `hpctrain import` makes a checkpoint of a Hugging Face folder" if is_model else ""
        raise InputOutputError(f"{folder}: has no checkpoint (files such as step-00000100.h5){hint}")
    best = ""
    with raise_on_all_ranks(group):
        if group.rank == 0:
            best = link_target(folder, BEST)
    rows: list[dict[str, Any]] = []
    by_file: dict[str, str] = {}
    for path in paths:
        row = dict[str, Any](file=path.name, step=checkpoint_step(path), problems=[], bytes=0, written="")
        try:
            structure = (_verify if options.verify else examine)(path, group)
        except HpctrainError as error:
            row["problems"] = [problem.removeprefix(f"{path}: ") for problem in error.problems]
        else:
            recorded = losses(structure.state)
            row["loss"] = recorded[-1].loss if recorded else None
            by_file[path.name] = loss_text(row["loss"]) if recorded else ""
            if path.name == best:
                row["evaluated"] = _best_loss(structure.state, row["step"])
        with raise_on_all_ranks(group):
            if group.rank == 0 and path.exists():
                status = path.stat()
                written = datetime.fromtimestamp(status.st_mtime, timezone.utc)
                row |= {"bytes": status.st_size, "written": written.strftime("%Y-%m-%dT%H:%M:%SZ")}
        rows.append(row)
    newest = next((row for row in rows if not row["problems"]), None)
    damaged = [row for row in rows if row["problems"]]
    if group.rank == 0:
        name = newest["file"] if newest else None
        contents_of_folder = {
            "folder": str(folder),
            "newest": name,
            "best": best or None,
            "checkpoints": rows,
        }
        show(
            _json(contents_of_folder)
            if options.as_json
            else _folder_text(folder, rows, name, best, by_file, options.verify)
        )
    return EXIT_INPUT_OUTPUT if damaged else EXIT_DONE


def _best_loss(state: Mapping[str, Any], step: object) -> dict[str, Any] | None:
    """Return the evaluation loss for which a checkpoint is the best, and the evaluation set; None without."""
    record = state.get(BEST)
    if not isinstance(record, dict) or record.get("kept") != step:
        return None
    best_loss = {"of": record.get("of"), "loss": record.get("kept_loss")}
    return best_loss if isinstance(best_loss["of"], str) and isinstance(best_loss["loss"], float) else None


def _folder_text(
    folder: Path,
    rows: list[dict[str, Any]],
    newest: str | None,
    best: str,
    by_file: dict[str, str],
    verified: bool,
) -> str:
    """Return the table of a folder. `by_file` has the recorded losses by file."""
    cells = [("file", "step", "size", "written (UTC)", "loss", "")]
    for row in rows:
        marks = ["damaged" if row["problems"] else "good" if verified else "readable"]
        marks += ["newest"] if row["file"] == newest else []
        if row["file"] == best:
            evaluated = row.get("evaluated")
            marks.append(f"best ({evaluated['of']} {evaluated['loss']:.4f})" if evaluated else "best")
        written = row["written"].replace("T", " ").removesuffix("Z")
        numbers = str(row["step"]), format_bytes(row["bytes"]), written, by_file.get(row["file"], "")
        cells.append((row["file"], *numbers, ", ".join(marks)))
    problems = [f"{row['file']}: {problem}" for row in rows for problem in row["problems"]]
    if best and best not in (row["file"] for row in rows):
        problems.append(f"{BEST}: is a link to {escaped(best)}, which does not exist")
    lines = [f"{folder}:", "", *fitted(cells, (0, 3, 5), columns())]
    lines += [] if verified else ["", UNVERIFIED]
    return "\n".join([*lines, "", *problems] if problems else lines)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, allow_nan=False)
