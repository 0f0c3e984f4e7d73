"""Selection between text and rows in `hpctrain prepare`, and the line about the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.data.file_contents import NOUNS, PROMPTS, TEXT_KIND
from hpctrain.data.output_lock import lock_output
from hpctrain.data.prepare_options import PreparationResult, RowOptions, Say, TextOptions
from hpctrain.data.prepare_text import prepare_text
from hpctrain.data.token_writer import Report
from hpctrain.errors import HpctrainError
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.comm.world import World

_TEXT_OPTIONS = {
    "train_bpe": (None, "--train-bpe"),
    "text_key": ("text", "--field"),
    "binary": (False, "--binary"),
    "shard_bytes": (None, "--shard-bytes"),
}
"""Options that are only for text: default value, and name on the command line."""


def prepare_any(
    world: World, out: Path, paths: Sequence[str], options: Mapping[str, Any], say: Say, report: Report
) -> PreparationResult:
    """Write a token file of text, or of rows if the options contain a `kind`. Collective.

    Args:
        world: The world.
        out: The token file.
        paths: Files and folders.
        options: Fields of TextOptions or RowOptions by name.
        say: Function that prints a line for the user.
        report: Function that shows progress.

    Raises:
        HpctrainError: As for `prepare_text` and `prepare_rows`, and if another process writes this output.
    """
    fields = dict(options)
    if fields.get("kind") is None:
        fields.pop("kind", None)
        if fields.pop("template", None) is not None:
            raise HpctrainError("--template requires --chat, --preferences or --prompts")
        with lock_output(world, out, say):
            return prepare_text(world, out, paths, TextOptions(**fields), say, report)
    from hpctrain.data.prepare_rows import prepare_rows

    conflicts = [
        f"{typed} conflicts with --{fields['kind']}, since it requires text"
        for name, (default, typed) in _TEXT_OPTIONS.items()
        if fields.pop(name, default) != default
    ]
    if conflicts:
        raise HpctrainError(conflicts)
    with lock_output(world, out, say):
        return prepare_rows(world, out, paths, RowOptions(**fields), say, report)


def result_text(result: PreparationResult, in_shards: bool = False) -> str:
    """Return a line about the result."""
    files = counted(result.files, "file")
    what = counted(result.documents, "document")
    if result.kind != TEXT_KIND:
        learned = "" if result.kind == PROMPTS else f", {result.learned} of them learned"
        what = f"{counted(result.rows, NOUNS[result.kind])}{learned}"
    shards = f"in {counted(result.shards, 'token file')}, " if in_shards else ""
    return (
        f"{result.path}: {counted(result.tokens, 'token')} of {what}, "
        f"vocabulary {result.vocabulary}, {shards}from {counted(result.size, 'byte')} in {files}, "
        f"{result.seconds:.1f} s"
    )
