"""Conversations in sequences, pairs in rows, and prompts, compared with rows written by hand.

Tests of data/conversations.py and data/packing.py, and of their use in data/data_checks.py,
data/data_mixture.py and data/epochs.py.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches, SequenceSource, SplitSequences
from hpctrain.data.conversations import ConversationSource, PreferenceSource, PromptSequences
from hpctrain.data.data_checks import token_problems
from hpctrain.data.data_mixture import JoinedSources, SplitDatasets
from hpctrain.data.deck_tokens import open_entries
from hpctrain.data.epochs import EpochReader
from hpctrain.data.order import PairedOrder
from hpctrain.data.packing import Packing
from hpctrain.data.token_files import TokenFiles, open_tokens
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from tests.data.chats import talk, write_rows
from tests.data.preparing import prepare, prepare_rows
from tests.deck.small_text import SMALL
from tests.engines import small_deck

CHATS = [
    {"messages": talk("q" * (n % 7), "a" * (n * 5 % 13), *(["more", "b" * n] if n % 3 == 0 else []))}
    for n in range(30)
]
PAIRS = [{"prompt": "p" * (n + 1), "chosen": "c" * 3, "rejected": "r" * (n % 4), "n": n} for n in range(20)]
PROMPTS = [{"prompt": "p" * n, "answer": n} for n in range(1, 20)]


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    """Files of each kind, of bytes, by the template `raw`."""
    for kind, rows in (("chat", CHATS), ("preferences", PAIRS), ("prompts", PROMPTS)):
        source = write_rows(tmp_path / f"{kind}.jsonl", rows)
        prepare_rows(world.single_rank_world(), tmp_path / f"{kind}.h5", [source], kind=kind, template="raw")
    half = write_rows(tmp_path / "half.jsonl", CHATS[:11])
    prepare_rows(world.single_rank_world(), tmp_path / "half.h5", [half], kind="chat", template="raw")
    (tmp_path / "text.txt").write_text("some text " * 40)
    prepare(world.single_rank_world(), tmp_path / "text.h5", [str(tmp_path / "text.txt")])
    return tmp_path


def by_hand(rows: list[dict], length: int) -> list[tuple[list[int], list[int]]]:
    """Of each conversation inputs and targets, by the template `raw`."""
    found = []
    for row in rows:
        tokens, learned = [], []
        for message in row["messages"]:
            said = [*message["content"].encode(), *([256] if message["role"] == "assistant" else [])]
            tokens += said
            learned += [message["role"] == "assistant"] * len(said)
        targets = [token if own else MASKED for token, own in zip(tokens[1:], learned[1:], strict=True)]
        if targets:
            found.append((tokens[:-1][:length], targets[:length]))
    return found


@pytest.mark.parametrize("length", [8, 24, 64])
@pytest.mark.parametrize("pack", [True, False])
def test_conversations_lie_whole_in_sequences(folder: Path, length: int, pack: bool) -> None:
    """In their order, as many in each as fit, none in two; what is left is nobody's."""
    source = ConversationSource(TokenFile(folder / "chat.h5"), length, 0.0, "train", pack)
    (micro,) = Batches(source, 0).evaluation(source.count, 0, 1, source.count + 1)
    assert micro.documents is not None and micro.samples == source.count
    expected = by_hand(CHATS, length)
    found, room = [], []
    for row in range(source.count):
        pieces = [piece for piece in micro.documents.pieces if piece.row == row]
        own = [(micro.tokens[row, p.begin : p.end].tolist(), micro.targets[row, p.begin : p.end].tolist())
               for p in pieces]  # fmt: skip
        whole = len(source.packing.documents(row))
        rest = [tokens for tokens, _ in own[whole:]]
        assert len(rest) <= 1 and not any(map(any, rest))
        assert all(set(targets) == {MASKED} for _, targets in own[whole:])
        found += own[:whole]
        room.append(sum(map(len, rest)))
    assert found == expected
    assert bool((micro.targets[source.count :] == MASKED).all())
    if pack:
        at = 0
        for row, rest in enumerate(room[:-1]):
            at += len(source.packing.documents(row))
            assert len(expected[at][0]) > rest  # the next one did not fit
    else:
        assert source.count == len(expected)
    cut = [whole[0] for whole in by_hand(CHATS, 10**6) if len(whole[0]) > length]
    assert (source.packing.cut, source.packing.lost) == (len(cut), sum(len(each) - length for each in cut))
    words = f"{len(cut)} longer than batch.sequence = {length} truncated by {source.packing.lost} tokens"
    assert (words in source.summary("x")) == bool(cut)


class Learned:
    """What Packing reads of a file of documents that end before `ends`, of which `learned` is learned."""

    def __init__(self, ends: list[int], learned: set[int] | None = None) -> None:
        self.ends = np.array(ends)
        self.mask = torch.tensor([learned is None or token in learned for token in range(ends[-1])])

    def document_ends(self) -> np.ndarray:
        return self.ends

    def learned(self, start: int, count: int) -> torch.Tensor:
        return self.mask[start : start + count]


@pytest.mark.parametrize("kind", ["packed", "separate", "pairs", "prompts", "mixed"])
def test_padding_is_what_lies_behind_the_last_document(folder: Path, kind: str) -> None:
    """Micro-batches tell of every row how long it is; those of text, which are full, tell nothing."""
    length = 24
    files = {name: TokenFile(folder / f"{name}.h5") for name in ("chat", "preferences", "prompts", "text")}
    source: SequenceSource
    if kind == "pairs":
        source = PreferenceSource(files["preferences"], length, 0.0, "train")
    elif kind == "prompts":
        source = PromptSequences(files["prompts"], length, 0.0, "train")
    else:
        source = ConversationSource(files["chat"], length, 0.0, "train", kind == "packed")
    text = SplitSequences(files["text"], length, 0.0, "train")
    joined = JoinedSources([text, source])
    taken = (joined if kind == "mixed" else source).count
    (micro,) = Batches(joined if kind == "mixed" else source, 0).evaluation(taken, 0, 1, taken + 2)
    assert micro.lengths is not None and micro.lengths == micro.row_lengths
    # Nothing of these files is the token 0 but padding.
    real = (micro.tokens != 0).sum(1)
    assert micro.lengths.values.tolist() == real.tolist() and micro.real_tokens == int(real.sum())
    assert 0 < int(real[:taken].min()) < length and real[taken:].tolist() == [0, 0]
    padding = micro.lengths.padding_at(torch.tensor([3, 23, 10]))
    assert torch.equal(padding, (micro.tokens == 0).t()[[3, 23, 10]])
    (whole,) = Batches(text, 0).evaluation(3, 0, 1, 3)
    (partial,) = Batches(text, 0).evaluation(3, 0, 1, 4)
    assert whole.row_lengths is None and whole.real_tokens == partial.real_tokens == 3 * length
    assert partial.lengths is None and partial.row_lengths is not None
    assert partial.row_lengths.values.tolist() == [length] * 3 + [0]


def test_what_has_nothing_to_predict_takes_no_place() -> None:
    documents = Learned([1, 1, 4, 5, 9])
    packing = Packing.of(documents, 4)
    assert packing.begins.tolist() == [1, 5] and packing.places.tolist() == [2, 3]
    assert packing.rows == 2
    assert Packing.of(documents, 5).rows == 1
    nothing = Learned([1, 1])
    assert Packing.of(nothing, 5).rows == Packing.of(nothing, 5, False).rows == 0


@pytest.mark.parametrize("pack", [True, False])
def test_conversations_whose_answers_lie_beyond_a_sequence_are_left_out(pack: bool) -> None:
    documents = Learned([5, 15, 20], {4, 13, 14, 19})
    packing = Packing.of(documents, 4, pack)
    assert packing.begins.tolist() == [0, 15] and (packing.left_out, packing.cut, packing.lost) == (1, 0, 0)
    packing = Packing.of(documents, 8, pack)
    assert packing.begins.tolist() == [0, 5, 15] and (packing.left_out, packing.cut, packing.lost) == (
        0,
        1,
        1,
    )
    assert Packing.of(documents, 3, pack).left_out == 3


def test_what_is_left_out_is_counted_and_told(world: World, tmp_path: Path) -> None:
    """Without anything to learn a run does not begin; one that goes on knows what was left out before."""
    rows = [{"prompt": "p" * 30, "response": "yes"}] * 4 + [{"prompt": "p", "response": "no"}] * 3
    for name, taken in (("both", rows), ("none", rows[:4])):
        source = write_rows(tmp_path / f"{name}.jsonl", taken)
        prepare_rows(
            world.single_rank_world(), tmp_path / f"{name}.h5", [source], kind="chat", template="raw"
        )

    def deck_of(name: str, sequence: int) -> Deck:
        keys = f"data.tokens={tmp_path / name}.h5", f"batch.sequence={sequence}", "model.vocabulary=257"
        return small_deck(*keys)

    decks = {size: deck_of("both", size) for size in (24, 64)}
    trained = {size: SplitDatasets.of(deck, open_entries(deck)) for size, deck in decks.items()}
    assert "4 left out, whose answers begin beyond batch.sequence = 24" in trained[24].notes[0]
    assert "left out" not in trained[64].notes[0]
    assert trained[24].description() != trained[64].description()
    deck = deck_of("none", 24)
    (problem,) = token_problems(deck, open_entries(deck))
    assert problem.key == "batch.sequence"
    assert problem.sentence == (
        f"is too short: in the 4 conversations of {tmp_path}/none.h5, no answer begins within it, "
        "so there is nothing to learn (increase it)"
    )
    assert not list(token_problems(deck_of("none", 64), open_entries(deck)))


def test_several_files_are_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    files = open_tokens(["chat.h5", "half.h5"], "data.tokens")
    assert isinstance(files, TokenFiles) and files.kind == "chat"
    source = ConversationSource(files, 24, 0.0, "train", pack=False)
    expected = by_hand([*CHATS, *CHATS[:11]], 24)
    rows = [source.sequence(index) for index in range(source.count)]
    pairs = zip(rows, expected, strict=True)
    assert all(tokens[: len(own)].tolist() == own for (tokens, _), (own, _) in pairs)
    assert files.learned(3, files.tokens - 5).tolist() == [
        *files.files[0].learned(3, files.files[0].tokens - 3).tolist(),
        *files.files[1].learned(0, files.files[1].tokens - 2).tolist(),
    ]
    with pytest.raises(
        HpctrainError, match=r"text.h5 holds text, but .*chat.h5 holds chat; all files of a corpus"
    ):
        open_tokens(["chat.h5", "text.h5"], "data.tokens")


def test_any_ranks_have_the_same_samples(folder: Path) -> None:
    source = ConversationSource(TokenFile(folder / "chat.h5"), 24, 0.1, "train")
    whole = [row for micro in Batches(source, 5).step(6, 6, 0, 1, 6) for row in micro.tokens.tolist()]
    parts = [list(Batches(source, 5).step(6, 6, rank, 2, 1)) for rank in (0, 1)]
    assert whole == [micro.tokens[0].tolist() for pair in zip(*parts, strict=True) for micro in pair]
    held_out = ConversationSource(TokenFile(folder / "chat.h5"), 24, 0.1, "validation")
    every = ConversationSource(TokenFile(folder / "chat.h5"), 24, 0.0, "train")
    assert source.count + held_out.count == every.count
    assert torch.equal(held_out.sequence(0)[0], every.sequence(source.count)[0])


def test_a_mixture_with_text(folder: Path) -> None:
    """Text that is trained on with conversations keeps its documents apart, too."""
    weights = {"chat": 3, "text": 1}
    rows = "".join(f'{{tokens="{folder}/{name}.h5", weight={each}}},' for name, each in weights.items())
    keys = ["data.tokens=", f"data.mixture=[{rows}]", "batch.sequence=24", "data.validation=0.1"]
    deck = parse_deck(SMALL, keys)
    tokens = open_entries(deck)
    assert not list(token_problems(deck, tokens))
    trained = SplitDatasets.of(deck, tokens)
    (micro,) = trained.train.step(0, 16, 0, 1, 16)
    assert micro.documents is not None
    text = [bool((row >= 0).all()) for row in micro.targets]
    assert sum(text) == 4
    chat = ConversationSource(tokens[0], 24, 0.1, "train")
    for row, of_text in enumerate(text):
        if of_text:
            assert micro.documents.places[row].tolist() == list(range(24))
    alone = [chat.row(index) for index in range(chat.count)]
    for row in (row for row, of_text in enumerate(text) if not of_text):
        assert any(
            torch.equal(micro.tokens[row], tokens_) and torch.equal(micro.documents.places[row], places)
            for tokens_, _, places in alone
            if places is not None
        )
    assert trained.notes == (chat.summary(f"{folder}/chat.h5"),)
    assert EpochReader.sequences(deck) == sum(trained.counts)
    assert (
        SplitDatasets.of(deck.with_keys(data={"pack": False}), tokens).description() != trained.description()
    )


def test_description_of_unpacked_conversations_never_changes(folder: Path) -> None:
    """Checkpoints store it, so a resumed run would refuse its own data."""
    deck = small_deck(f'data.tokens="{folder}/chat.h5"', "data.pack=false")
    trained = SplitDatasets.of(deck, open_entries(deck))
    assert trained.description()["fingerprint"] == zlib.crc32(b" apart", trained.tokens[0].fingerprint)


def test_pairs(folder: Path) -> None:
    file = TokenFile(folder / "preferences.h5")
    source = PreferenceSource(file, 24, 0.0, "train")
    assert source.count == 40 and source.left_out == 0 and "20 pairs" in source.summary("x")
    (micro,) = Batches(source, 0).evaluation(6, 0, 1, 8)
    assert micro.rows == 8 and micro.samples == micro.present == 6 and micro.documents is None
    for index in range(3):
        for answer, text in enumerate((PAIRS[index]["chosen"], PAIRS[index]["rejected"])):
            asked = str(PAIRS[index]["prompt"]).encode()
            tokens = [*asked, *str(text).encode(), 256]
            assert micro.tokens[2 * index + answer].tolist() == tokens + [0] * (24 - len(tokens))
            targets = [MASKED] * (len(asked) - 1) + tokens[len(asked) :]
            assert micro.targets[2 * index + answer].tolist() == targets + [MASKED] * (24 - len(targets))
    assert bool((micro.targets[6:] == MASKED).all()) and source.other_keys(7) == {"n": 7}
    short = PreferenceSource(file, 10, 0.25, "train")
    assert short.left_out == 10 and "10 left out, whose answers begin beyond 10 tokens" in short.summary("x")
    assert short.count == 16 and PreferenceSource(file, 10, 0.25, "validation").number(0) == 8
    order = PairedOrder(8, 3).at(np.arange(32))
    assert sorted(order[:16].tolist()) == sorted(order[16:].tolist()) == [*range(16)]
    assert (order[::2] % 2 == 0).all() and (order[1::2] == order[::2] + 1).all()
    assert order[:16].tolist() != order[16:].tolist() != [*range(16)]
    tokens, targets = short.document(20)
    assert tokens.tolist() == [ord("p")] * 10 and targets.tolist() == [MASKED] * 10
    tokens, targets = short.document(18)
    assert tokens.tolist() == [ord("p")] * 10 and targets.tolist() == [MASKED] * 9 + [ord("c")]
    with pytest.raises(HpctrainError, match=r"1 of its 20 pairs fit into 1 tokens, .* none is left"):
        PreferenceSource(file, 1, 0.5, "train")
    with pytest.raises(HpctrainError, match=r"chat.h5: holds chat, expected preferences"):
        PreferenceSource(TokenFile(folder / "chat.h5"), 10, 0.0, "train")


def test_margins_of_pairs(world: World, tmp_path: Path) -> None:
    def source(*margins: object, split: str = "train") -> PreferenceSource:
        rows = [
            {"prompt": "p", "chosen": "yes", "rejected": "no", **({} if each is None else {"margin": each})}
            for each in margins
        ]
        path = tmp_path / "pairs.h5"
        given = write_rows(tmp_path / "pairs.jsonl", rows)
        prepare_rows(world, path, [given], kind="preferences", template="raw", replace=True)
        return PreferenceSource(TokenFile(path), 8, 0.34, split, margins=True)

    (micro,) = Batches(source(2, None, 0.5), 0).evaluation(4, 0, 1, 6)
    assert micro.fields["margin"].tolist() == [[each] * 8 for each in (2.0, 2.0, 0.0, 0.0, 0.0, 0.0)]
    assert micro.fields["margin"].dtype == torch.float32
    assert source(2, None, 0.5).summary("x") == "x: 2 pairs; 1 with a margin"
    (micro,) = Batches(source(2, None, -0.5, split="validation"), 0).evaluation(2, 0, 1, 2)
    assert micro.fields["margin"][:, 0].tolist() == [-0.5, -0.5]
    for none in (source(None, None, None), source(0, None, 0.0)):
        (micro,) = Batches(none, 0).evaluation(4, 0, 1, 4)
        assert "margin" not in micro.fields
    for wrong, shown in (("big", '"big"'), (True, "true"), ([1], r"\[1\]"), (1e30, "1e\\+30")):
        with pytest.raises(HpctrainError, match=rf"pairs.h5: pair 2 has margin = {shown}: must be a number"):
            source(1.0, wrong, 0.5)


def test_prompts(folder: Path) -> None:
    file = TokenFile(folder / "prompts.h5")
    source = PromptSequences(file, 10, 0.2, "train")
    assert source.count == 8 and source.left_out == 9
    assert source.prompt(3) == ([ord("p")] * 4, {"answer": 4})
    assert PromptSequences(file, 10, 0.2, "validation").prompt(0) == ([ord("p")] * 9, {"answer": 9})


def test_files_that_are_not_trained_on(folder: Path) -> None:
    def problems(name: str, *more: str) -> list[str]:
        deck = small_deck(
            f"data.tokens={folder}/{name}.h5", "model.vocabulary=257", "batch.sequence=24", *more
        )
        return [f"{each.key}: {each.sentence}" for each in token_problems(deck, open_entries(deck))]

    assert not problems("chat")
    deck = small_deck(f"data.tokens={folder}/chat.h5", "model.vocabulary=257", "batch.sequence=24")
    described = [
        SplitDatasets.of(deck.with_keys(data={"pack": pack}), open_entries(deck)).description()
        for pack in (True, False)
    ]
    assert described[0] != described[1]
    for name in ("preferences", "prompts"):
        (problem,) = problems(name)
        assert problem.startswith("data.tokens: ") and f"holds {name}, but objective.kind = " in problem
    (problem,) = problems("chat", "batch.sequence=4096")
    assert "has 1 sequence of conversations, one of them held out, so none is left to train on" in problem
    assert not problems("chat", "batch.sequence=4096", "data.validation=0")
