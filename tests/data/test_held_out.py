"""What a run is evaluated on: sets by their files, figures of a loss, and files that do not do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.data.corpus import open_corpus
from hpctrain.data.held_out import HeldOut, open_held_out
from hpctrain.data.tokenizer import bytes_json
from hpctrain.deck.read import parse_deck
from hpctrain.deck.rows import place_and_message
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.deck_references import reference_problems
from tests.data.preparing import prepare
from tests.deck.small_text import SMALL

TEXT = "a text of ninety bytes, or nearly so many of them; none that matters to anybody at all: the end."


def deck_of(world: World, folder: Path, *overrides: str, other: str = TEXT * 3) -> Deck:
    """A deck with files in a folder that all ranks share: trained on a text, evaluated on another one."""
    if world.rank == 0:
        (folder / "a.txt").write_text(TEXT * 9)
        for number in range(3):
            (folder / f"b{number}.txt").write_text(other)
    world.everyone.barrier()
    prepare(world, folder / "a.h5", [str(folder / "a.txt")], replace=True)
    prepare(world, folder / "b.h5", [str(folder / f"b{number}.txt") for number in range(3)], replace=True)
    table = f'[[evaluation]]\nname = "other"\ntokens = "{folder / "b.h5"}"\n'
    return parse_deck(SMALL + table, [f"data.tokens={folder / 'a.h5'}", "batch.sequence=32", *overrides])


def opened(world: World, deck: Deck) -> tuple[HeldOut, ...]:
    corpus = open_corpus(deck, world)
    return open_held_out(deck, world, corpus)


def foreseen(deck: Deck) -> list[str]:
    """What `hpctrain deck` says of the files of a deck."""
    return [place_and_message(deck, problem)[1] for problem in reference_problems(deck)]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_tokens_and_bytes_of_sets(world: World, mpi_tmp_path: Path) -> None:
    deck = deck_of(world, mpi_tmp_path, "data.validation=0.2", "run.evaluate_sequences=3")
    held_out, other = opened(world, deck)
    assert (held_out.name, other.name) == ("validation", "other")
    assert (held_out.tokens, held_out.text_bytes) == (3 * 32, 3 * 32)
    assert (other.tokens, other.text_bytes) == (96, 96)
    both = 'evaluation=[{name = "x", tokens = "B", sequences = 999}]'.replace("B", str(mpi_tmp_path / "b.h5"))
    [whole] = opened(world, deck_of(world, mpi_tmp_path, "data.validation=0", both))
    length = 3 * (3 * len(TEXT) + 1)  # three documents and their ends, of which the last one may be left over
    assert whole.tokens == (length - 1) // 32 * 32
    assert whole.text_bytes == whole.tokens - 2 - (whole.tokens + 1 == length)
    one = both.replace("999", "1")
    [first] = opened(world, deck_of(world, mpi_tmp_path, "data.validation=0", one, other="x" * 32))
    assert (first.tokens, first.text_bytes) == (32, 31)  # the last target is the document's end


def test_figures_of_a_loss() -> None:
    figures = HeldOut("x", None, 1, tokens=100, text_bytes=400, in_nats=True).metrics(2.0)  # type: ignore[arg-type]
    assert figures == {
        "loss": 2.0,
        "perplexity": pytest.approx(math.e**2),
        "bits_per_byte": pytest.approx(2.0 / math.log(2) / 4),
    }
    assert HeldOut("x", None, 1).metrics(2.0) == {"loss": 2.0}  # type: ignore[arg-type]
    endless = HeldOut("x", None, 1, tokens=1, in_nats=True).metrics(1e4)  # type: ignore[arg-type]
    assert endless == {"loss": 1e4, "perplexity": math.inf}
    lost = HeldOut("x", None, 1, in_nats=True).metrics(math.nan)  # type: ignore[arg-type]
    assert math.isnan(lost["perplexity"])


@pytest.mark.mpi(min_size=1, max_size=2)
def test_files_that_do_not_do(world: World, mpi_tmp_path: Path) -> None:
    deck = deck_of(world, mpi_tmp_path, other="too short")
    sequence = len("too short") * 3 + 3
    with pytest.raises(HpctrainError) as caught:
        opened(world, deck)
    [told] = caught.value.problems
    assert foreseen(deck) == [told]
    assert f"has {sequence} tokens, but requires at least 33, one more than batch.sequence = 32" in told
    assert told.startswith(f'deck.toml:21: evaluation.tokens = "{mpi_tmp_path / "b.h5"}": ')

    if world.rank == 0:
        (mpi_tmp_path / "other.json").write_text(
            bytes_json().replace('"!":33', '"!":34').replace('"\\"":34', '"\\"":33')
        )
    world.everyone.barrier()
    prepare(
        world,
        mpi_tmp_path / "c.h5",
        [str(mpi_tmp_path / "a.txt")],
        tokenizer=str(mpi_tmp_path / "other.json"),
    )
    table = 'evaluation=[{name = "x", tokens = "C"}]'.replace("C", str(mpi_tmp_path / "c.h5"))
    deck = deck_of(world, mpi_tmp_path, table)
    with pytest.raises(
        HpctrainError, match="its tokenizer differs from that of the training data: BPE of"
    ) as caught:
        opened(world, deck)
    assert foreseen(deck) == list(caught.value.problems)
    assert not foreseen(deck.with_keys(data={"tokens": "still to be made.h5"}))
    table = 'evaluation=[{name = "x", tokens = "nowhere.h5"}]'
    deck = deck_of(world, mpi_tmp_path, table)
    with pytest.raises(HpctrainError, match=r"evaluation.tokens of x = nowhere.h5: no such file"):
        opened(world, deck)
    assert not foreseen(deck)  # it may still be made
    if world.rank == 0:
        (mpi_tmp_path / "d.h5").write_text("no tokens")
    world.everyone.barrier()
    damaged = str(mpi_tmp_path / "d.h5")
    [told] = foreseen(deck_of(world, mpi_tmp_path, table.replace("nowhere.h5", damaged)))
    assert f'evaluation.tokens = "{damaged}": is ' in told


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_name_under_which_ranks_find_other_tokens(
    world: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As long, and of the same tokenizer: nothing but their checksums tells."""
    monkeypatch.chdir(tmp_path_factory.mktemp("own"))
    for each in ("a", "b"):
        Path(f"{each}.txt").write_text(TEXT.replace("text", f"tex{world.rank if each == name else 0}"))
        prepare(world.single_rank_world(), Path(f"{each}.h5"), [f"{each}.txt"])
    table = '[[evaluation]]\nname = "other"\ntokens = "b.h5"\n'
    deck = parse_deck(SMALL + table, ["data.tokens=a.h5", "batch.sequence=16"])
    key = "data.tokens = a.h5" if name == "a" else "evaluation.tokens of other = b.h5"
    with pytest.raises(HpctrainError, match=f"^{key}: not all ranks read the same tokens from this path"):
        opened(world, deck)
