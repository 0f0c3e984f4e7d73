"""Where documents begin in packed sequences, and that none of them predicts the next one.

Tests of data/documents.py, and of what data/batches.py, data/synthetic.py and data/data_checks.py make of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches, SplitSequences
from hpctrain.data.data_checks import token_problems
from hpctrain.data.documents import Documents, DocumentSpan
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.data.tokens import TokenFile
from tests.data.preparing import prepare
from tests.engines import small_deck

END = 9


@pytest.fixture
def file(world: World, tmp_path: Path) -> TokenFile:
    """Documents of 1 to 14 bytes and their ends."""
    for length in range(1, 15):
        (tmp_path / f"{length:02}.txt").write_bytes(bytes(range(65, 65 + length)))
    prepare(world.single_rank_world(), tmp_path / "tokens.h5", [str(tmp_path)])
    return TokenFile(tmp_path / "tokens.h5")


def test_pieces_and_places() -> None:
    tokens = torch.tensor([[1, END, 2, 3, END], [END, END, 4, 5, 6], [1, 2, 3, 4, 5]])
    documents = Documents.of(tokens, END)
    assert documents.pieces == [
        DocumentSpan(0, 0, 2),
        DocumentSpan(0, 2, 5),
        DocumentSpan(1, 0, 1),
        DocumentSpan(1, 1, 2),
        DocumentSpan(1, 2, 5),
        DocumentSpan(2, 0, 5),
    ]
    assert documents.places.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert documents.at(torch.tensor([1, 4])).tolist() == [[1, 0, 1], [2, 2, 4]]


def test_rows_that_are_no_samples_are_a_document_each() -> None:
    documents = Documents.of(torch.zeros(3, 4, dtype=torch.int64), 0, 1)
    assert documents.pieces == [
        *(DocumentSpan(0, at, at + 1) for at in range(4)),
        DocumentSpan(1, 0, 4),
        DocumentSpan(2, 0, 4),
    ]


def test_a_document_that_ends_predicts_nothing() -> None:
    source, plain = (SyntheticSource(64, 11, masked=0.1, documents=share) for share in (0.2, 0.0))
    micro = next(Batches(source, 0).step(0, 2, 0, 1, 3))
    assert micro.documents is not None
    ends = micro.tokens == source.end_of_document
    assert ends[:2].any() and bool((micro.targets[ends] == MASKED).all())
    assert micro.documents.pieces == Documents.of(micro.tokens, 10, 2).pieces
    other = next(Batches(plain, 0).step(0, 2, 0, 1, 3))
    assert other.documents is None
    assert torch.equal(other.targets[~ends], micro.targets[~ends])
    assert torch.equal(other.tokens[~ends], micro.tokens[~ends])


@pytest.mark.parametrize("sequence", [5, 8, 16])
def test_of_a_token_file_documents_are_those_that_were_prepared(file: TokenFile, sequence: int) -> None:
    """Also where a window begins in the middle of one."""
    source = SplitSequences(file, sequence, 0.0, "train", document_mask=True)
    begins = {0, *(file.document_end(number) for number in range(file.documents))}
    (micro,) = Batches(source, 0).evaluation(source.count, 0, 1, source.count)
    assert micro.documents is not None
    for row in range(source.count):
        window = range(row * sequence, (row + 1) * sequence)
        found = [piece.begin + window.start for piece in micro.documents.pieces if piece.row == row]
        assert found == sorted({window.start, *(begins & set(window))})
        masked = (micro.targets[row] == MASKED).nonzero().flatten().tolist()
        assert [window.start + each for each in masked] == [at for at in window if at + 1 in begins]
    unmasked = SplitSequences(file, sequence, 0.0, "train")
    (plain,) = Batches(unmasked, 0).evaluation(source.count, 0, 1, source.count)
    assert plain.documents is None and bool((plain.targets >= 0).all())


def test_a_file_that_ends_no_document_is_refused(file: TokenFile) -> None:
    deck = small_deck("model.vocabulary=257", "data.document_mask=true", "data.validation=0")
    assert not list(token_problems(deck, [file]))
    file.end_of_document = 255
    (problem,) = token_problems(deck, [file])
    assert problem.key == "data.document_mask"
    assert "does not end with token 255, which ends a document" in problem.sentence
    assert not list(token_problems(deck.with_keys(data={"document_mask": False}), [file]))
