"""Tokenization of conversations, preferences and prompts from JSON or tables into a token file, by all ranks.

Each rank tokenizes contiguous pieces of the files, as for text. The token file is the same for any number of
ranks.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.data.chat_rows import (
    conversation_of,
    ignored_words,
    left_out_words,
    preference_of,
    prompt_of,
)
from hpctrain.data.chat_template import ChatTemplate
from hpctrain.data.chat_tokens import ChatTokenizer, ConversationTokens, TokenRequest
from hpctrain.data.file_contents import CHAT, KINDS, NOUNS, PREFERENCES, PROMPTS, TEXT_KIND
from hpctrain.data.input_files import ROW_ENDINGS
from hpctrain.data.prepare_options import PreparationResult, RowOptions, Say
from hpctrain.data.prepare_text import (
    collect_errors,
    examine,
    find_input,
    keep_text_sources,
    reporting_progress,
)
from hpctrain.data.template_process import TemplateLimitError
from hpctrain.data.text_pieces import (
    ErrorHandler,
    JsonRow,
    TextPiece,
    cut_into_pieces,
    read_rows,
    share_of,
)
from hpctrain.data.token_part import TokenPart, part_path
from hpctrain.data.token_writer import Report, RowsPart, TokenWriter
from hpctrain.data.tokenizer import BYTES, Tokenizer
from hpctrain.data.tokenizer_argument import read_tokenizer, tokenizer_warnings
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.data.tokens import TokenFile
from hpctrain.data.training_keys import row_keys
from hpctrain.errors import HpctrainError
from hpctrain.text import either

if TYPE_CHECKING:
    from hpctrain.comm.world import World

_LEARNED_VALUES, _BYTE_VALUES = 2, 256
EQUAL, SILENT = "whose answers are equal", "in which there is no assistant message"
UNLEARNED = "in which every answer is excluded from training"
_EXAMPLES = 3
_ROWS_PER_REQUEST = 64
"""Number of rows in a request to the process that renders the chat template."""


def prepare_rows(
    world: World, out: Path, paths: Sequence[str], options: RowOptions, say: Say, report: Report
) -> PreparationResult:
    """Make a token file of conversations, preferences or prompts. Collective.

    Pairs with equal answers and conversations without an assistant message are left out; `say` reports them.
    An error leaves no file behind.

    Args:
        world: The world.
        out: The token file.
        paths: Files and folders.
        options: How the rows become a token file.
        say: Function that prints a line for the user.
        report: Function that shows progress.

    Raises:
        HpctrainError: On all ranks if a file, a row or an argument is invalid.
    """
    assert options.kind in KINDS and options.kind != TEXT_KIND, options.kind
    start = time.perf_counter()
    sources, skipped = find_input(world, out, paths, options.globs, options.replace, endings=ROW_ENDINGS)
    faults = examine(world, cut_into_pieces(sources, options.piece_bytes), report)
    with world.agreement():
        sources = keep_text_sources(sources, faults, skipped)
        if world.rank == 0:
            for line in skipped.lines():
                say(line)
        if not sources:
            raise HpctrainError(f"{', '.join(paths)}: no rows found")
    chat = _agree_on_template(world, options, say)
    if world.rank == 0 and (names := chat.unknown_tokens):
        listed = either(names) if len(names) < 5 else f"{', '.join(names[:4])} ..."
        say(f"{chat.template.title}: {listed} is not in the vocabulary, so text of messages can imitate it")
    pieces = cut_into_pieces(sources, options.piece_bytes)
    world.ledger.activity = "tokenizing"
    with ExitStack() as stack:
        stack.callback(chat.template.process.close)
        with world.agreement():
            chat.template.process.start()
        preparation = _RowPreparation(options.kind, chat, out, world.rank, stack)
        with world.agreement():
            preparation.add_all(share_of(pieces, world.rank, world.size), report)
        _report_rows(world, preparation, say)
        _require_rows(world, preparation, paths)
        writer = TokenWriter(world, chat.tokenizer, ", ".join([*paths, *options.globs]), report)
        header = writer.write(out, preparation.tokens, preparation.part)
    contents = TokenFile(out, "written file").contents
    return PreparationResult(
        path=out,
        files=len(sources),
        size=sum(source.size for source in sources),
        documents=header.documents,
        tokens=header.tokens,
        vocabulary=header.vocabulary,
        seconds=time.perf_counter() - start,
        kind=options.kind,
        rows=contents.rows,
        learned=contents.learned,
    )


@dataclass(frozen=True)
class _ParsedRow:
    """Parsed row.

    Attributes:
        requests: Its conversations; none if it is left out.
        other_keys: Other keys, which are stored with prompts and preferences.
        problem: Error of the row, or None.
        left_out: Why the row is left out, as a clause; "" if it is not.
        ignored: Keys that control training in other trainers but have no effect here, each with the reason.
    """

    requests: Sequence[TokenRequest] = ()
    other_keys: Mapping[str, Any] | None = None
    problem: HpctrainError | None = None
    left_out: str = ""
    ignored: Collection[str] = ()


def _at(row: JsonRow, error: HpctrainError) -> HpctrainError:
    """Return the error with the place of the row in front of each message."""
    return type(error)([f"{row.where}: {each}" for each in error.problems])


Counts = dict[str, tuple[int, list[str]]]
"""Number of rows by what applies to them, with the places of the first ones."""


def _count(counts: Counts, what: str, row: JsonRow) -> None:
    """Count a row in `counts`."""
    number, examples = counts.get(what, (0, []))
    if len(examples) < _EXAMPLES:
        examples = [*examples, row.where]
    counts[what] = number + 1, examples


class _RowPreparation:
    """Tokens that a rank makes from its rows, and counts of rows that are left out."""

    def __init__(self, kind: str, chat: ChatTokenizer, out: Path, rank: int, stack: ExitStack) -> None:
        self.kind, self.chat = kind, chat
        self.rows = self.learned_tokens = 0
        self.left_out: Counts = {}
        self.ignored: Counts = {}
        parts = (
            TokenPart(part_path(out, rank), chat.tokenizer),
            TokenPart(part_path(out, rank, "learned"), _LEARNED_VALUES),
            TokenPart(part_path(out, rank, "others"), _BYTE_VALUES),
        )
        self.tokens, self.learned, self.other_keys = map(stack.enter_context, parts)

    @property
    def part(self) -> RowsPart:
        """Data that is written besides the tokens."""
        other_keys = self.other_keys if self.kind != CHAT else None
        template = self.chat.template.to_json()
        return RowsPart(self.kind, template, self.rows, self.learned, self.learned_tokens, other_keys)

    def add_all(self, pieces: Sequence[TextPiece], report: Report) -> None:
        """Add all rows of pieces.

        Raises:
            HpctrainError: With the problems of all rows.
        """
        with collect_errors() as handle_error:
            for piece in reporting_progress(pieces, "tokenize", report):
                rows = iter(read_rows(piece, handle_error))
                while batch := [*islice(rows, _ROWS_PER_REQUEST)]:
                    self._add(batch, handle_error)
        for part in (self.tokens, self.learned, self.other_keys):
            part.finish()

    def _add(self, rows: Sequence[JsonRow], handle_error: ErrorHandler) -> None:
        """Add rows, whose conversations are rendered by one request.

        Raises:
            TemplateLimitError: The template exceeded its time limit or ended its process.
        """
        parsed = [(row, self._parsed(row)) for row in rows]
        outcomes = iter(self.chat.tokens_of([request for _, each in parsed for request in each.requests]))
        for row, each in parsed:
            tokens = [next(outcomes) for _ in each.requests]
            problems = [outcome for outcome in (*tokens, each.problem) if isinstance(outcome, HpctrainError)]
            if any(isinstance(problem, TemplateLimitError) for problem in problems):
                raise _at(row, problems[0])
            if problems:
                handle_error(_at(row, problems[0]))
            else:
                try:
                    self._add_row(
                        row, each, [outcome for outcome in tokens if isinstance(outcome, ConversationTokens)]
                    )
                except HpctrainError as error:
                    handle_error(_at(row, error))

    def _parsed(self, row: JsonRow) -> _ParsedRow:
        """Parse a row."""
        try:
            if self.kind == PROMPTS:  # rewards use the other keys
                prompt = prompt_of(row.value)
                return _ParsedRow([TokenRequest(prompt.conversation, prompt=True)], prompt.other_keys)
            keys = row_keys(row.value, answers=self.kind == CHAT)
            if keys.left_out:
                return _ParsedRow(left_out=keys.left_out)
            if self.kind == CHAT:
                return _ParsedRow([TokenRequest(conversation_of(row.value))], ignored=keys.ignored)
            pair = preference_of(row.value)
        except HpctrainError as error:
            return _ParsedRow(problem=error)
        if pair.equal:
            return _ParsedRow(left_out=EQUAL)
        requests = [TokenRequest(pair.chosen), TokenRequest(pair.rejected)]
        return _ParsedRow(requests, pair.other_keys, ignored=keys.ignored)

    def _add_row(self, row: JsonRow, parsed: _ParsedRow, documents: Sequence[ConversationTokens]) -> None:
        left_out = parsed.left_out
        if self.kind == CHAT and documents and not documents[0].learned.any():
            left_out = SILENT if parsed.requests[0].conversation.silent else UNLEARNED
        if left_out:
            _count(self.left_out, left_out, row)
            return
        if any(not len(each.ids) for each in documents):
            raise HpctrainError("is rendered as an empty text by the template")
        for key in parsed.ignored:
            _count(self.ignored, key, row)
        for document in documents:
            self._append(document)
        self.rows += 1
        if parsed.other_keys is not None:
            text = json.dumps(parsed.other_keys, ensure_ascii=True, default=str)
            self.other_keys.add(np.frombuffer(text.encode(), np.uint8))
            self.other_keys.end_here()

    def _append(self, document: ConversationTokens) -> None:
        self.tokens.add(document.ids)
        self.tokens.end_here()
        self.learned.add(document.learned)
        self.learned_tokens += int(document.learned.sum())


def _agree_on_template(world: World, options: RowOptions, say: Say) -> ChatTokenizer:
    """Return the tokenizer and the template that rank 0 reads."""
    tokenizer = options.tokenizer or BYTES
    texts = "", "", ""
    with world.agreement():
        if world.rank == 0:
            used = read_tokenizer(tokenizer, options.end_of_document)
            for line in tokenizer_warnings(used, tokenizer):
                say(line)
            chosen = ChatTemplate.of(options.template, tokenizer, used.end_name, used.settings)
            try:
                chosen.process.start()
                ends = ChatTokenizer(used, chosen).end_of_turn()
            finally:
                chosen.process.close()
            texts = used.text, dataclasses.replace(used.settings, ends=ends).to_json(), chosen.to_json()
    text, settings, chat = world.everyone.broadcast_object(texts)
    where = f"tokenizer = {tokenizer}"
    known = Tokenizer(text, where, TokenizerSettings.from_json(settings))
    return ChatTokenizer(known, ChatTemplate.from_json(chat))


def _report_rows(world: World, preparation: _RowPreparation, say: Say) -> None:
    """Say which rows of all ranks are left out, and which of their keys have no effect. Collective."""
    left_out, ignored = _merged(world, preparation.left_out), _merged(world, preparation.ignored)
    if world.rank == 0:
        for why, (number, examples) in left_out.items():
            say(left_out_words(number, examples, NOUNS[preparation.kind], why))
        for key, (number, examples) in ignored.items():
            say(ignored_words(number, examples, NOUNS[preparation.kind], key))


def _merged(world: World, counts: Counts) -> Counts:
    """Return the sum of the counts of all ranks. Collective."""
    merged: Counts = {}
    for each in world.everyone.all_gather_object(counts):
        for what, (number, examples) in each.items():
            before = merged.get(what, (0, []))
            merged[what] = before[0] + number, [*before[1], *examples]
    return merged


def _require_rows(world: World, preparation: _RowPreparation, paths: Sequence[str]) -> None:
    """Raise HpctrainError on all ranks if there is no row or no learned token. Collective."""
    counts = world.everyone.all_gather_object([preparation.rows, preparation.learned_tokens])
    rows, learned = (sum(count[i] for count in counts) for i in (0, 1))
    with world.agreement():
        if rows and (preparation.kind == PROMPTS or learned):
            return
        what = {
            CHAT: "no conversation with an assistant message",
            PREFERENCES: "no pair of different answers",
        }
        raise HpctrainError(f"{', '.join(paths)}: {what.get(preparation.kind, 'no prompt')} found")
