"""What `hpctrain prepare` makes: a token file of text, or of rows of some kind, by what a user chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.data.file_contents import NOUNS, PROMPTS, TEXT_KIND
from hpctrain.data.output_lock import lock_output
from hpctrain.data.prepare import Prepared, Say, prepare
from hpctrain.data.token_writer import Report
from hpctrain.data.tokenizer import BYTES
from hpctrain.errors import HpctrainError
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.comm.world import World

_OF_TEXT = {
    "train_bpe": (None, "--train-bpe"),
    "text_key": ("text", "--field"),
    "binary": (False, "--binary"),
    "shard_bytes": (None, "--shard-bytes"),
}
"""Choices that are of text alone: what they are where nobody makes them, and how they are typed."""


def prepare_any(
    world: World, out: Path, paths: Sequence[str], choices: Mapping[str, Any], say: Say, report: Report
) -> Prepared:
    """Write `out` with `prepare_rows` if the choices contain a `kind`, else with `prepare`. Collective.

    Raises:
        HpctrainError: As for these functions, and if another process writes the same output.
    """
    rest = dict(choices)
    kind, template = rest.pop("kind", None), rest.pop("template", None)
    if kind is None:
        if template is not None:
            raise HpctrainError("--template requires --chat, --preferences or --prompts")
        with lock_output(world, out, say):
            return prepare(world, out, paths, **rest, say=say, report=report)
    from hpctrain.data.prepare_rows import prepare_rows

    wrong = [f"{typed} conflicts with --{kind}, since it requires text" for typed in _given(rest)]
    if wrong:
        raise HpctrainError(wrong)
    rest["tokenizer"] = rest.get("tokenizer") or BYTES
    with lock_output(world, out, say):
        return prepare_rows(world, out, paths, kind=kind, template=template, **rest, say=say, report=report)


def made_text(made: Prepared, in_shards: bool = False) -> str:
    """What was made, in a line."""
    files = counted(made.files, "file")
    what = counted(made.documents, "document")
    if made.kind != TEXT_KIND:
        learned = "" if made.kind == PROMPTS else f", {made.learned} of them learned"
        what = f"{counted(made.rows, NOUNS[made.kind])}{learned}"
    shards = f"in {counted(made.shards, 'token file')}, " if in_shards else ""
    return (
        f"{made.path}: {counted(made.tokens, 'token')} of {what}, "
        f"vocabulary {made.vocabulary}, {shards}from {counted(made.size, 'byte')} in {files}, "
        f"{made.seconds:.1f} s"
    )


def _given(rest: dict[str, Any]) -> list[str]:
    """How choices of text were typed; they are taken out."""
    return [typed for name, (usual, typed) in _OF_TEXT.items() if rest.pop(name, usual) != usual]
