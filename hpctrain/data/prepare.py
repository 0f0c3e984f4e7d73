"""Text files to one token file, over all ranks.

Rank 0 finds the files; all cut them into the same pieces and each tokenizes a contiguous run of them,
balanced by bytes, so that the documents keep their order. The token file is the same for any number
of ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hpctrain
from hpctrain.comm.parallel_files import require_parallel_files
from hpctrain.data.file_contents import TEXT_KIND
from hpctrain.data.input_files import (
    BINARY,
    TEXT_ENDINGS,
    LeftOut,
    TextSource,
    find_sources,
    printable,
    raise_all,
)
from hpctrain.data.shard_files import ShardFiles, slices_of
from hpctrain.data.text_pieces import (
    PIECE,
    PROBLEMS,
    Complaint,
    TextPiece,
    cut_into_pieces,
    examine_piece,
    read_piece,
    share_of,
)
from hpctrain.data.token_files import MOST_FILES
from hpctrain.data.token_part import TokenPart, part_path, remove_stale_files
from hpctrain.data.token_writer import Report, write_files, write_tokens
from hpctrain.data.tokenizer import BYTES, TOKENIZER_FILE, Tokenizer
from hpctrain.data.tokenizer_argument import read_tokenizer, tokenizer_warnings
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.errors import HpctrainError, failing_as
from hpctrain.files import JSON_BYTES, check_output, flush_to_disk, read_text, write_text
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.comm.world import World


@dataclass(frozen=True)
class Prepared:
    """What was made of what: `shards` token files, of which `path` is the name or the pattern, of `files` of
    `size` bytes on the disk, in `seconds`; of a `kind` other than text, so many `rows`, and tokens that are
    `learned`.
    """

    path: Path
    files: int
    size: int
    documents: int
    tokens: int
    vocabulary: int
    seconds: float
    shards: int = 1
    kind: str = TEXT_KIND
    rows: int = 0
    learned: int = 0


# Called on rank 0 with a line of what the user should know.
Say = Callable[[str], None]


def prepare(
    world: World,
    out: Path,
    paths: Sequence[str],
    *,
    globs: Sequence[str] = (),
    tokenizer: str | None = None,
    train_bpe: int | None = None,
    end_of_document: str | None = None,
    text_key: str = "text",
    replace: bool = False,
    binary: bool = False,
    shard_bytes: int | None = None,
    say: Say = lambda _: None,
    report: Report = lambda *_: None,
    piece_bytes: int = PIECE,
) -> Prepared:
    """Tokenize the text of `paths` into the token file `out`; collective, the same arguments everywhere.

    `tokenizer` (None is "bytes") and `end_of_document` are as of `read_tokenizer`; `train_bpe` makes a
    tokenizer of that vocabulary from the text instead (on rank 0: its time does not shrink with ranks), and a
    `tokenizer.json` of it beside `out`. Files that are
    binary, or not UTF-8, are refused if named and else left out, unless `binary`: then the tokenizer "bytes"
    takes their bytes, and others, and texts in lines of JSON, have U+FFFD for what is no text. An existing
    `out` is only replaced if asked to, and stays what it is until the new file is complete. With
    `shard_bytes` there are several files of so many bytes of tokens at most, but where a document has more,
    as ShardFiles names them. Every error is an HpctrainError, the same on all ranks, and leaves no file
    behind; a process that is ended does, for the next one to go on from.
    """
    begun = time.perf_counter()
    shards = None if shard_bytes is None else ShardFiles(out)
    with world.agreement():
        if tokenizer is not None and train_bpe is not None:
            raise HpctrainError(f"--train-bpe {train_bpe} conflicts with --tokenizer {tokenizer}")
        if end_of_document is not None and tokenizer is None:
            problem = "requires --tokenizer FILE.json or DIR"
            raise HpctrainError(f"--end-of-document {end_of_document}: {problem} (leave it out)")
    sources, left = begin(world, out, paths, globs, replace, shards)
    sources = [dataclasses.replace(each, lenient=binary) for each in sources]
    faults = examine(world, cut_into_pieces(sources, piece_bytes), report)
    with world.agreement():
        if not binary:
            sources = text_alone(sources, faults, left)
        if world.rank == 0:
            for line in left.lines():
                say(line)
        if not sources:
            raise HpctrainError(f"{', '.join(paths)}: no text found")
    pieces = cut_into_pieces(sources, piece_bytes)
    if train_bpe is None:
        used = _agree_on_tokenizer(world, tokenizer or BYTES, end_of_document, say)
    else:
        used = _train(world, pieces, train_bpe, text_key, say, report)
        with world.agreement():
            if world.rank == 0:
                _require_free(out.parent / TOKENIZER_FILE, out, used, replace)
    if used.text == BYTES:
        sources = [dataclasses.replace(each, raw=each.path in faults and not each.lines) for each in sources]
        pieces = cut_into_pieces(sources, piece_bytes)
    key = _key_of(world, sources, used, text_key, piece_bytes)
    mine = share_of(pieces, world.rank, world.size)
    world.ledger.activity = "tokenizing"
    with TokenPart(part_path(out, world.rank), used, key) as part:
        with world.agreement():
            done = part.resume()
        before = sum(world.everyone.all_gather_object(done))
        if before and world.rank == 0:
            done_pieces = f"{before} of {counted(len(pieces), 'piece')} of text are tokenized"
            say(f"continues an interrupted run: {done_pieces}")
        with world.agreement():
            unknown = _tokenize(mine[done:], used, text_key, part, report)
        _tell_unknown(world, unknown, part, used, say)
        source = ", ".join([*paths, *globs])
        if shards is None or shard_bytes is None:
            headers = [write_tokens(world, out, part, used, source, report)]
        else:
            slices = slices_of(world, part, shard_bytes)
            with world.agreement():
                outs = shards.paths(len(slices))
            headers = write_files(world, outs, slices, used, source, report, shards.place)
    if train_bpe is not None:
        _write_tokenizer(world, out.parent / TOKENIZER_FILE, used)
    if len(headers) > MOST_FILES and world.rank == 0:
        say(f"{len(headers)} token files exceed the {MOST_FILES} that a run can read; increase --shard-bytes")
    return Prepared(
        path=out if shards is None else shards.pattern,
        files=len(sources),
        size=sum(source.size for source in sources),
        documents=sum(header.documents for header in headers),
        tokens=sum(header.tokens for header in headers),
        vocabulary=headers[0].vocabulary,
        seconds=time.perf_counter() - begun,
        shards=len(headers),
    )


def begin(
    world: World,
    out: Path,
    paths: Sequence[str],
    globs: Sequence[str],
    replace: bool,
    shards: ShardFiles | None = None,
    endings: Sequence[str] = TEXT_ENDINGS,
) -> tuple[list[TextSource], LeftOut]:
    """Return the files that `paths` mean; rank 0 also gets those that are left out. Collective.

    Raises:
        HpctrainError: `out` cannot be made, or a path gives no file.
    """
    world.ledger.activity = "looking for the text files"
    sources: list[TextSource] = []
    left = LeftOut()
    with world.agreement():
        if world.rank == 0:
            if shards is None:
                check_output(out, replace)
            else:
                shards.check(replace)
                shards.remove_left()
            out.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_files(out, world.size)
            outputs = [out] if shards is None else shards.present()
            sources, left = find_sources(paths, globs, outputs, endings)
    require_parallel_files(world, out.parent)
    rows = world.everyone.broadcast_object([dataclasses.astuple(source) for source in sources])
    return [TextSource(*row) for row in rows], left


def _key_of(
    world: World, sources: Sequence[TextSource], tokenizer: Tokenizer, text_key: str, piece_bytes: int
) -> str:
    """What tokens of a rank are known by, when an ended process has left them: all that they follow from."""
    facts: list[object] = [
        hpctrain.__version__,
        tokenizer.text,
        tokenizer.settings.to_object(),
        text_key,
        piece_bytes,
        world.rank,
        world.size,
    ]
    with suppress(OSError):  # a file that is gone is told of where it is read
        facts += [
            [each.path, each.size, each.raw, each.lenient, Path(each.path).stat().st_mtime_ns]
            for each in sources
        ]
    return hashlib.sha256(json.dumps(facts).encode("utf-8", "surrogatepass")).hexdigest()


def examine(world: World, pieces: Sequence[TextPiece], report: Report) -> dict[str, int]:
    """Which files are no text, by path, and why; every rank looks at its share. Collective."""
    world.ledger.activity = "examining the text files"
    mine: dict[str, int] = {}
    with world.agreement(), collecting() as complain:
        for piece in in_progress(share_of(pieces, world.rank, world.size), "examine", report):
            fault = examine_piece(piece, complain)
            if fault is not None:
                mine[piece.source.path] = min(fault, mine.get(piece.source.path, fault))
    faults: dict[str, int] = {}
    for each in world.everyone.all_gather_object(mine):
        faults |= {path: min(fault, faults.get(path, fault)) for path, fault in each.items()}
    return faults


def text_alone(sources: Sequence[TextSource], faults: Mapping[str, int], left: LeftOut) -> list[TextSource]:
    """The sources that are text; the others of folders go to `left`, those that were named are an error."""
    refused = []
    for source in sources:
        if source.path not in faults:
            continue
        if source.named:
            what = "binary" if faults[source.path] == BINARY else "not UTF-8"
            sentence = f"is {what}, so it is not text; give --binary to read it"
            refused.append(HpctrainError(f"{printable(source.path)}: {sentence}"))
        else:
            left.files[source.path] = faults[source.path]
    raise_all(refused)
    return [source for source in sources if source.path not in faults]


def _agree_on_tokenizer(world: World, tokenizer: str, end_of_document: str | None, say: Say) -> Tokenizer:
    """Return the tokenizer that rank 0 reads."""
    with world.agreement():
        found: Tokenizer | None = None
        if world.rank == 0:
            found = read_tokenizer(tokenizer, end_of_document)
            for line in tokenizer_warnings(found, tokenizer):
                say(line)
    return _shared(world, found, f"tokenizer = {tokenizer}")


def _train(
    world: World, pieces: Sequence[TextPiece], vocabulary: int, text_key: str, say: Say, report: Report
) -> Tokenizer:
    """Return the tokenizer that rank 0 trains."""
    with world.agreement():
        trained: Tokenizer | None = None
        if world.rank == 0:
            texts = _documents(pieces, text_key, "train the tokenizer", report)
            trained = Tokenizer.train((part for _, part, _ in texts), vocabulary)
            if trained.vocabulary < vocabulary:
                say(
                    f"--train-bpe {vocabulary}: the tokenizer has only {trained.vocabulary} tokens, since "
                    "the text has no more pairs to merge"
                )
    return _shared(world, trained, f"--train-bpe {vocabulary}")


def _shared(world: World, tokenizer: Tokenizer | None, where: str) -> Tokenizer:
    """Return rank 0's tokenizer on all ranks. Collective."""
    texts = None if tokenizer is None else (tokenizer.text, tokenizer.settings.to_json())
    text, settings = world.everyone.broadcast_object(texts)
    return tokenizer or Tokenizer(text, where, TokenizerSettings.from_json(settings))


def _require_free(path: Path, out: Path, tokenizer: Tokenizer, replace: bool) -> None:
    """Raise HpctrainError if the trained tokenizer would replace the file of another tokenizer."""
    check_output(path, replace=True)
    if replace or not path.exists():
        return
    with suppress(OSError, UnicodeDecodeError):
        if read_text(path, JSON_BYTES) == tokenizer.text:
            return
    problem = f"contains another tokenizer, and --train-bpe would replace it when it writes {out.name}"
    raise HpctrainError(
        f"{path}: {problem}; add --force to replace it, or write {out.name} into another folder"
    )


def _write_tokenizer(world: World, path: Path, tokenizer: Tokenizer) -> None:
    """Write a trained tokenizer to a file. Collective."""
    with world.agreement():
        if world.rank == 0:
            temporary = path.with_name(f".{path.name}.partial")
            with failing_as(f"{path}: cannot be written"):
                write_text(temporary, tokenizer.text)
                flush_to_disk(temporary)
                temporary.replace(path)


def _tokenize(
    pieces: Sequence[TextPiece], tokenizer: Tokenizer, text_key: str, part: TokenPart, report: Report
) -> int:
    """Append the tokens of pieces; return how many of them replace text outside the vocabulary."""
    faulty, lacking = False, 0

    with collecting() as complain:

        def complain_of(problem: HpctrainError) -> None:
            nonlocal faulty
            faulty = True  # a piece that is told of is to be told of again
            complain(problem)

        for piece in in_progress(pieces, "tokenize", report):
            unknown = "surrogateescape" if piece.source.raw else "replace"
            for text, ends in read_piece(piece, text_key, complain_of):
                try:
                    ids = tokenizer.encode_array(text, unknown)
                except HpctrainError as error:
                    complain_of(HpctrainError(f"{printable(piece.source.path)}: {error.problems[0]}"))
                    break
                lacking += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
                part.add(ids)
                if ends:
                    part.end_document(tokenizer.end_of_document)
            if not faulty:
                part.end_piece()
    part.finish()
    return lacking


def _tell_unknown(world: World, lacking: int, part: TokenPart, tokenizer: Tokenizer, say: Say) -> None:
    """Print how many tokens replace text outside the vocabulary. Collective."""
    if tokenizer.unknown is None:
        return
    counts = world.everyone.all_gather_object([lacking, part.tokens])
    lost, tokens = (sum(count[i] for count in counts) for i in (0, 1))
    if lost and world.rank == 0:
        say(f"{lost} of {tokens} tokens replace text outside the vocabulary, which is lost")


def _documents(
    pieces: Sequence[TextPiece], text_key: str, activity: str, report: Report
) -> Iterator[tuple[TextSource, str, bool]]:
    """Parts of documents in order, with their source, and whether the document ends there.

    All problems are raised together.
    """
    with collecting() as complain:
        for piece in in_progress(pieces, activity, report):
            for text, ends in read_piece(piece, text_key, complain):
                yield piece.source, text, ends


@contextmanager
def collecting() -> Iterator[Complaint]:
    """Takes complaints, and raises all of them at the end, or before it when they are many."""
    problems: list[HpctrainError] = []

    def complain(problem: HpctrainError) -> None:
        problems.append(problem)
        if len(problems) >= PROBLEMS:
            raise_all(problems)

    yield complain
    raise_all(problems)


def in_progress(pieces: Sequence[TextPiece], activity: str, report: Report) -> Iterator[TextPiece]:
    """The pieces, each reported when it is done."""
    done, total = 0, sum(piece.size for piece in pieces)
    for piece in pieces:
        yield piece
        done += piece.size
        report(activity, done, total)
