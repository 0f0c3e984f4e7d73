"""Text files to one token file, over all ranks.

Rank 0 finds the files; all cut them into the same pieces and each tokenizes a contiguous run of them,
balanced by bytes, so that the documents keep their order. The token file is the same for any number
of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.data.text import (
    PIECE,
    PROBLEMS,
    Piece,
    Source,
    cut_into_pieces,
    find_sources,
    raise_all,
    read_piece,
    share_of,
)
from hpctrain.data.tokenizer import BYTES, Tokenizer
from hpctrain.data.write import Part, Report, write_tokens
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.comm.world import World


@dataclass(frozen=True)
class Prepared:
    """What was made of what: `files` of `size` bytes on the disk, in `seconds`."""

    path: Path
    files: int
    size: int
    documents: int
    tokens: int
    vocabulary: int
    seconds: float


def ignore(stage: str, done: int, total: int) -> None:
    """The Report of who wants none."""


def prepare(
    world: World,
    out: Path,
    paths: Sequence[str],
    *,
    globs: Sequence[str] = (),
    tokenizer: str = BYTES,
    train_bpe: int | None = None,
    text_key: str = "text",
    replace: bool = False,
    report: Report = ignore,
    piece_bytes: int = PIECE,
) -> Prepared:
    """Tokenize the text of `paths` into the token file `out`; collective, the same arguments everywhere.

    `tokenizer` is "bytes" or the path of a `tokenizers` JSON; `train_bpe` makes one of that vocabulary
    from the text instead (on rank 0: its time does not shrink with ranks). An existing `out` is only
    replaced if asked to, and stays what it is until the new file is complete. Every error is an
    HpctrainError, the same on all ranks, and leaves no file behind.
    """
    begun = time.perf_counter()
    sources: list[Source] = []
    temporary = out.with_name(f".{out.name}.part-{world.rank}")
    with world.agreement():
        if world.rank == 0:
            _check_output(out, replace)
            sources = find_sources(paths, globs, without=[out])
            if not sources:
                raise HpctrainError(f"{', '.join(paths)}: there is no text in it")
    found = world.everyone.broadcast_object([[source.path, source.size] for source in sources])
    sources = [Source(path, size) for path, size in found]
    pieces = cut_into_pieces(sources, piece_bytes)
    used = _agree_on_tokenizer(world, pieces, tokenizer, train_bpe, text_key, report)
    with Part(temporary, used) as part:
        with world.agreement():
            _tokenize(share_of(pieces, world.rank, world.size), used, text_key, part, report)
        header = write_tokens(world, out, part, used, ", ".join([*paths, *globs]), report)
    return Prepared(
        path=out,
        files=len(sources),
        size=sum(source.size for source in sources),
        documents=header.documents,
        tokens=header.tokens,
        vocabulary=header.vocabulary,
        seconds=time.perf_counter() - begun,
    )


def _check_output(out: Path, replace: bool) -> None:
    """Refuse an output that is in the way; make its folder."""
    if out.is_dir():
        raise HpctrainError(f"{out}: is a folder; name the file to be made")
    if out.exists() and not replace:
        raise HpctrainError(f"{out}: exists already; --force replaces it")
    out.parent.mkdir(parents=True, exist_ok=True)


def _agree_on_tokenizer(
    world: World,
    pieces: Sequence[Piece],
    tokenizer: str,
    train_bpe: int | None,
    text_key: str,
    report: Report,
) -> Tokenizer:
    """The tokenizer that rank 0 reads or trains."""
    text = ""
    with world.agreement():
        if world.rank == 0:
            if train_bpe is None:
                text = Tokenizer.from_argument(tokenizer).text
            elif tokenizer != BYTES:
                raise HpctrainError(f"--train-bpe {train_bpe} and --tokenizer {tokenizer}: give one of them")
            else:
                texts = _documents(pieces, text_key, "train the tokenizer", report)
                text = Tokenizer.train((part for part, _ in texts), train_bpe).text
    return Tokenizer.from_text(world.everyone.broadcast_object(text))


def _tokenize(
    pieces: Sequence[Piece], tokenizer: Tokenizer, text_key: str, part: Part, report: Report
) -> None:
    """All documents of the pieces into `part`."""
    for text, ends in _documents(pieces, text_key, "tokenize", report):
        part.add(tokenizer.encode_array(text))
        if ends:
            part.end_document(tokenizer.end_of_document)
    part.finish()


def _documents(
    pieces: Sequence[Piece], text_key: str, stage: str, report: Report
) -> Iterator[tuple[str, bool]]:
    """Parts of documents in order, and whether the document ends there; all problems raised together."""
    problems: list[HpctrainError] = []

    def complain(problem: HpctrainError) -> None:
        problems.append(problem)
        if len(problems) >= PROBLEMS:
            raise_all(problems)

    done, total = 0, sum(piece.size for piece in pieces)
    for piece in pieces:
        yield from read_piece(piece, text_key, complain)
        done += piece.size
        report(stage, done, total)
    raise_all(problems)
