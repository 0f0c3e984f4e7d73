"""Tokenization of text files into one token file, or several, by all ranks.

Rank 0 finds the files. All ranks cut them into the same pieces, and each tokenizes contiguous pieces with
about the same number of bytes, so the documents keep their order. The token file is the same for any number
of ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import hpctrain
from hpctrain.comm.error_messages import raise_together
from hpctrain.comm.parallel_files import require_parallel_files
from hpctrain.data.input_files import (
    BINARY,
    TEXT_ENDINGS,
    SkippedInput,
    TextSource,
    find_sources,
    printable,
)
from hpctrain.data.prepare_options import PreparationResult, Say, TextOptions
from hpctrain.data.shard_files import ShardFiles, slices_of
from hpctrain.data.text_pieces import (
    PROBLEMS,
    ErrorHandler,
    TextPiece,
    cut_into_pieces,
    examine_piece,
    read_piece,
    share_of,
)
from hpctrain.data.token_files import MOST_FILES
from hpctrain.data.token_part import TokenPart, part_path, remove_stale_files
from hpctrain.data.token_writer import Report, TokenWriter
from hpctrain.data.tokenizer import BYTES, TOKENIZER_FILE, Tokenizer
from hpctrain.data.tokenizer_argument import read_tokenizer, tokenizer_warnings
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.errors import HpctrainError, failing_as
from hpctrain.files import JSON_BYTES, check_output, flush_to_disk, read_text, write_text
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.comm.world import World


def prepare_text(
    world: World, out: Path, paths: Sequence[str], options: TextOptions, say: Say, report: Report
) -> PreparationResult:
    """Tokenize text into a token file. Collective, with the same arguments on all ranks.

    An error leaves no file behind. If the process is killed, the next call with the same arguments continues.

    Args:
        world: The world.
        out: The token file, or the name from which the names of several are formed.
        paths: Files and folders.
        options: How the text becomes a token file.
        say: Function that prints a line for the user.
        report: Function that shows progress.

    Raises:
        HpctrainError: On all ranks if a file, an argument or the tokenizer is invalid.
    """
    start = time.perf_counter()
    shards = None if options.shard_bytes is None else ShardFiles(out)
    _check_tokenizer_options(world, options)
    sources, skipped = find_input(world, out, paths, options.globs, options.replace, shards)
    sources = [dataclasses.replace(each, lenient=options.binary) for each in sources]
    faults = examine(world, cut_into_pieces(sources, options.piece_bytes), report)
    with world.agreement():
        if not options.binary:
            sources = keep_text_sources(sources, faults, skipped)
        if world.rank == 0:
            for line in skipped.lines():
                say(line)
        if not sources:
            raise HpctrainError(f"{', '.join(paths)}: no text found")
    pieces = cut_into_pieces(sources, options.piece_bytes)
    if options.train_bpe is None:
        tokenizer = _agree_on_tokenizer(world, options.tokenizer or BYTES, options.end_of_document, say)
    else:
        tokenizer = _train(world, pieces, options.train_bpe, options.text_key, say, report)
        with world.agreement():
            if world.rank == 0:
                _require_free(out.parent / TOKENIZER_FILE, out, tokenizer, options.replace)
    if tokenizer.text == BYTES:
        sources = [dataclasses.replace(each, raw=each.path in faults and not each.lines) for each in sources]
        pieces = cut_into_pieces(sources, options.piece_bytes)
    key = _resume_key(world, sources, tokenizer, options)
    rank_pieces = share_of(pieces, world.rank, world.size)
    world.ledger.activity = "tokenizing"
    with TokenPart(part_path(out, world.rank), tokenizer, key) as part:
        with world.agreement():
            completed = part.resume()
        total = sum(world.everyone.all_gather_object(completed))
        if total and world.rank == 0:
            done_pieces = f"{total} of {counted(len(pieces), 'piece')} of text are tokenized"
            say(f"continues an interrupted run: {done_pieces}")
        with world.agreement():
            unknown = _tokenize(rank_pieces[completed:], tokenizer, options.text_key, part, report)
        _report_unknown(world, unknown, part, tokenizer, say)
        writer = TokenWriter(world, tokenizer, ", ".join([*paths, *options.globs]), report)
        if shards is None or options.shard_bytes is None:
            headers = [writer.write(out, part)]
        else:
            slices = slices_of(world, part, options.shard_bytes)
            with world.agreement():
                outs = shards.paths(len(slices))
            headers = writer.write_files(outs, slices, shards.place)
    if options.train_bpe is not None:
        _write_tokenizer(world, out.parent / TOKENIZER_FILE, tokenizer)
    if len(headers) > MOST_FILES and world.rank == 0:
        say(f"{len(headers)} token files exceed the {MOST_FILES} that a run can read; increase --shard-bytes")
    return PreparationResult(
        path=out if shards is None else shards.pattern,
        files=len(sources),
        size=sum(source.size for source in sources),
        documents=sum(header.documents for header in headers),
        tokens=sum(header.tokens for header in headers),
        vocabulary=headers[0].vocabulary,
        seconds=time.perf_counter() - start,
        shards=len(headers),
    )


def _check_tokenizer_options(world: World, options: TextOptions) -> None:
    """Raise HpctrainError on all ranks if options contradict each other. Collective."""
    with world.agreement():
        tokenizer, train_bpe = options.tokenizer, options.train_bpe
        if tokenizer is not None and train_bpe is not None:
            raise HpctrainError(f"--train-bpe {train_bpe} conflicts with --tokenizer {tokenizer}")
        if options.end_of_document is not None and tokenizer is None:
            problem = "requires --tokenizer FILE.json or DIR"
            raise HpctrainError(f"--end-of-document {options.end_of_document}: {problem} (leave it out)")


def find_input(
    world: World,
    out: Path,
    paths: Sequence[str],
    globs: Sequence[str],
    replace: bool,
    shards: ShardFiles | None = None,
    endings: Sequence[str] = TEXT_ENDINGS,
) -> tuple[list[TextSource], SkippedInput]:
    """Return the files that `paths` mean; rank 0 also gets those that are left out. Collective.

    Files that killed processes have left are removed, unless this call can continue from them.

    Args:
        world: The world.
        out: The output file.
        paths: Files and folders.
        globs: Patterns of the files of folders.
        replace: True if an existing output may be replaced.
        shards: Names of the output files if there are several, else None.
        endings: Endings of the files of folders.

    Raises:
        HpctrainError: `out` cannot be written, or a path gives no file.
    """
    world.ledger.activity = "looking for the text files"
    sources: list[TextSource] = []
    skipped = SkippedInput()
    with world.agreement():
        if world.rank == 0:
            if shards is None:
                check_output(out, replace)
            else:
                shards.check(replace)
                shards.remove_temporary_files()
            out.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_files(out, world.size)
            outputs = [out] if shards is None else shards.present()
            sources, skipped = find_sources(paths, globs, outputs, endings)
    require_parallel_files(world, out.parent)
    rows = world.everyone.broadcast_object([dataclasses.astuple(source) for source in sources])
    return [TextSource(*row) for row in rows], skipped


def _resume_key(
    world: World, sources: Sequence[TextSource], tokenizer: Tokenizer, options: TextOptions
) -> str:
    """Return a checksum of all that this rank's tokens depend on."""
    facts: list[object] = [
        hpctrain.__version__,
        tokenizer.text,
        tokenizer.settings.to_object(),
        options.text_key,
        options.piece_bytes,
        world.rank,
        world.size,
    ]
    with suppress(OSError):  # reading a missing file raises a better error
        facts += [
            [each.path, each.size, each.raw, each.lenient, Path(each.path).stat().st_mtime_ns]
            for each in sources
        ]
    return hashlib.sha256(json.dumps(facts).encode("utf-8", "surrogatepass")).hexdigest()


def examine(world: World, pieces: Sequence[TextPiece], report: Report) -> dict[str, int]:
    """Return the files that are not text, by path, with the reason. Collective; each rank reads its share."""
    world.ledger.activity = "examining the text files"
    own_faults: dict[str, int] = {}
    with world.agreement(), collect_errors() as handle_error:
        for piece in reporting_progress(share_of(pieces, world.rank, world.size), "examine", report):
            fault = examine_piece(piece, handle_error)
            if fault is not None:
                own_faults[piece.source.path] = min(fault, own_faults.get(piece.source.path, fault))
    faults: dict[str, int] = {}
    for each in world.everyone.all_gather_object(own_faults):
        faults |= {path: min(fault, faults.get(path, fault)) for path, fault in each.items()}
    return faults


def keep_text_sources(
    sources: Sequence[TextSource], faults: Mapping[str, int], skipped: SkippedInput
) -> list[TextSource]:
    """Return the sources that are text, and add the others to `skipped`.

    Raises:
        HpctrainError: With each source that is not text and that a path names.
    """
    refused = []
    for source in sources:
        if source.path not in faults:
            continue
        if source.named:
            what = "binary" if faults[source.path] == BINARY else "not UTF-8"
            sentence = f"is {what}, so it is not text; give --binary to read it"
            refused.append(HpctrainError(f"{printable(source.path)}: {sentence}"))
        else:
            skipped.files[source.path] = faults[source.path]
    raise_together(refused)
    return [source for source in sources if source.path not in faults]


def _agree_on_tokenizer(world: World, tokenizer: str, end_of_document: str | None, say: Say) -> Tokenizer:
    """Return the tokenizer that rank 0 reads."""
    with world.agreement():
        used: Tokenizer | None = None
        if world.rank == 0:
            used = read_tokenizer(tokenizer, end_of_document)
            for line in tokenizer_warnings(used, tokenizer):
                say(line)
    return _shared(world, used, f"tokenizer = {tokenizer}")


def _train(
    world: World, pieces: Sequence[TextPiece], vocabulary: int, text_key: str, say: Say, report: Report
) -> Tokenizer:
    """Return the tokenizer that rank 0 trains."""
    with world.agreement():
        trained: Tokenizer | None = None
        if world.rank == 0:
            trained = Tokenizer.train(_texts(pieces, text_key, report), vocabulary)
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
    has_error, unknown_tokens = False, 0

    with collect_errors() as handle_error:

        def handle_piece_error(problem: HpctrainError) -> None:
            nonlocal has_error
            has_error = True  # the piece is not recorded, so that the next process reports its errors again
            handle_error(problem)

        for piece in reporting_progress(pieces, "tokenize", report):
            errors = "surrogateescape" if piece.source.raw else "replace"
            for text, ends in read_piece(piece, text_key, handle_piece_error):
                try:
                    ids = tokenizer.encode_array(text, errors)
                except HpctrainError as error:
                    handle_piece_error(HpctrainError(f"{printable(piece.source.path)}: {error.problems[0]}"))
                    break
                unknown_tokens += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
                part.add(ids)
                if ends:
                    part.end_document(tokenizer.end_of_document)
            if not has_error:
                part.end_piece()
    part.finish()
    return unknown_tokens


def _report_unknown(world: World, unknown: int, part: TokenPart, tokenizer: Tokenizer, say: Say) -> None:
    """Print how many tokens replace text outside the vocabulary. Collective."""
    if tokenizer.unknown is None:
        return
    counts = world.everyone.all_gather_object([unknown, part.tokens])
    lost, tokens = (sum(count[i] for count in counts) for i in (0, 1))
    if lost and world.rank == 0:
        say(f"{lost} of {tokens} tokens replace text outside the vocabulary, which is lost")


def _texts(pieces: Sequence[TextPiece], text_key: str, report: Report) -> Iterator[str]:
    """Yield parts of documents in order. All problems are raised together."""
    with collect_errors() as handle_error:
        for piece in reporting_progress(pieces, "train the tokenizer", report):
            for text, _ in read_piece(piece, text_key, handle_error):
                yield text


@contextmanager
def collect_errors() -> Iterator[ErrorHandler]:
    """Collect problems during the block, and raise them together at its end, or when there are PROBLEMS."""
    problems: list[HpctrainError] = []

    def handle_error(problem: HpctrainError) -> None:
        problems.append(problem)
        if len(problems) >= PROBLEMS:
            raise_together(problems)

    yield handle_error
    raise_together(problems)


def reporting_progress(pieces: Sequence[TextPiece], activity: str, report: Report) -> Iterator[TextPiece]:
    """Yield the pieces, and report the progress after each."""
    done, total = 0, sum(piece.size for piece in pieces)
    for piece in pieces:
        yield piece
        done += piece.size
        report(activity, done, total)
