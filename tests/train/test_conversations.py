"""Conversations that share sequences train as separate ones do: losses and gradients of the run's own step on
all layouts, beside those of plain torch in double precision, which has each conversation by itself.

Tests of what data/conversations.py gives to a run, and data/corpus.py settles.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.bench.peers.torch_model import TorchModel
from hpctrain.comm.world import World
from hpctrain.data.corpus import open_corpus, resolve_vocabulary
from hpctrain.data.held_out import open_held_out
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.train.layout_verification import NOISE_STD, _pieces
from hpctrain.train.trainer import Trainer
from tests.data.chats import talk, write_rows
from tests.data.preparing import prepare_rows
from tests.engines import LLAMA, by_rank_0, small_deck
from tests.train.test_documents import FAMILIES, Gradients

LENGTH = 32
CHATS = [
    {
        "messages": talk(
            "q" * (n % 5), f"{n} " * (n % 3 + 1), *(["and", "so " * (n % 3)] if n % 4 == 0 else [])
        )
    }
    for n in range(60)
]
KEYS = ("batch.global_size=8", "model.dropout=0", "model.vocabulary=", "data.validation=0.1")
LAYOUTS = {
    1: [(), ("batch.micro_size=1",), ("memory.recompute=full",), ("data.pack=false", "batch.micro_size=4")],
    2: [
        (),
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.context=2", "layout.context_form=ring"),
        ("layout.context=2", "layout.context_form=all_to_all"),
        ("layout.pipeline=2",),
        ("layout.zero=3",),
    ],
    4: [
        ("layout.tensor=2", "layout.context=2", "layout.context_form=ring"),
        ("layout.pipeline=2", "layout.zero=1"),
    ],
}


def prepared(world: World, folder: Path) -> str:
    """A file of these conversations."""
    path = folder / "chat.h5"
    if world.rank == 0:
        source = write_rows(folder / "chat.jsonl", CHATS)
        prepare_rows(world.single_rank_world(), path, [source], kind="chat", template="raw")
    world.everyone.barrier()
    return f"data.tokens={path}"


def make_trainer(world: World, deck: Deck) -> Trainer:
    """That of a run."""
    corpus = open_corpus(deck, world)
    deck = choose_functions(resolve_vocabulary(deck, corpus), world)
    assert deck.data.document_mask and deck.model.vocabulary == 257
    engine = build_engine(deck, world, make_mesh(deck, world), noise_std=NOISE_STD)
    return Trainer(deck, engine, corpus.train)


def separate(file: TokenFile, documents: set[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of these conversations, as far as a sequence goes."""
    ends = [0, *file.document_ends().tolist()]
    for number in sorted(documents):
        begin, end = ends[number], min(ends[number + 1], ends[number] + LENGTH + 1)
        tokens, learned = file.read(begin, end - begin), file.learned(begin, end - begin)
        yield tokens[:-1], tokens[1:].masked_fill(~learned[1:], -1)


def expected(world: World, deck: Deck) -> tuple[float, int, dict[str, Tensor]]:
    """Loss, predicted tokens and gradients of the first step by plain torch, of the weights of a run."""
    alone = on_one_rank(deck).with_keys(machine={"compile": False})
    trainer = make_trainer(world.single_rank_world(), alone)
    weights = {shard.name: piece for shard, piece in _pieces(trainer.engine, gradients=False)}
    model = TorchModel(trainer.engine.shape).double()
    names = {"embedding.weight": "embedding.tokens.weight", "positions.weight": "embedding.positions.weight"}
    names |= {"head.weight": "embedding.tokens.weight"} if trainer.engine.shape.tied else {}
    parameters = {names.get(name, name): each for name, each in model.named_parameters()}
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name].view(parameter.shape))
    batches, file = trainer.step.batches, TokenFile(str(deck.data.tokens))
    rows = batches.order.at(torch.arange(deck.batch.global_size).numpy()).tolist()
    packing = batches.source.packing
    assert not deck.data.pack or sum(len(packing.documents(row)) > 1 for row in rows) > 4
    losses, count = torch.zeros((), dtype=torch.float64), 0
    for inputs, targets in separate(file, {document for row in rows for document in packing.documents(row)}):
        logits = model(inputs.unsqueeze(0))[0]
        losses = losses + functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-1)
        count += int((targets >= 0).sum())
    (losses / count).backward()
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    return float(losses.detach()) / count, count, gradients


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_separate_conversations(
    world: World, mpi_tmp_path: Path, family: str
) -> None:
    keys = (*FAMILIES[family], *KEYS, prepared(world, mpi_tmp_path))
    found: dict[bool, tuple[float, int, dict[str, Tensor]]] = {}
    for layout in LAYOUTS.get(world.size, []):
        deck = small_deck(*keys, *layout)
        pack = deck.data.pack
        if pack not in found:
            found[pack] = by_rank_0(world, lambda deck=deck: expected(world, deck))
        loss, count, gradients = found[pack]
        trainer = make_trainer(world, deck)
        hook = Gradients(trainer)
        trainer.hooks.append(hook)
        result = trainer.train_step()
        assert result.tokens == count, layout
        assert abs(result.loss - loss) <= 1e-6 * loss, layout
        assert hook.pieces
        for shard, piece in hook.pieces:
            right = gradients[shard.name]
            difference = piece.double().view(-1) - shard.take(right.view(shard.shape)).reshape(-1)
            largest = float(right.abs().max())
            assert largest > 1e-3 or shard.name.endswith("key.bias")
            assert float(difference.abs().max()) <= 1e-6 * max(largest, 0.1), (layout, shard.name)
        trainer.engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_a_run_is_evaluated_on(world: World, mpi_tmp_path: Path) -> None:
    tokens = prepared(world, mpi_tmp_path)
    sets = f'evaluation.sets=[{{name="own", {tokens.replace("data.", "").replace("=", "=" + chr(34))}"}}]'
    deck = small_deck(*LLAMA, *KEYS, tokens, sets)
    corpus = open_corpus(deck, world)
    deck = resolve_vocabulary(deck, corpus)
    shares = {each.name: each for each in open_held_out(deck, world, corpus)}
    file = TokenFile(mpi_tmp_path / "chat.h5")
    trainer = make_trainer(world, deck)
    figures, predicted, _ = trainer.step.evaluate_with_counts(shares["own"].batches, 1000)
    assert predicted == sum(int((each >= 0).sum()) for _, each in separate(file, set(range(file.documents))))
    assert 0 < trainer.step.evaluate_with_counts(corpus.validation, 1000)[1] < predicted / 4
    assert figures["loss"] > 0
    trainer.engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("kind", ["preferences", "prompts"])
def test_other_rows_are_not_trained_on(world: World, mpi_tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": f"p {n}", "chosen": "c", "rejected": "r"} for n in range(20)]
    path = mpi_tmp_path / "x.h5"
    if world.rank == 0:
        source = write_rows(mpi_tmp_path / "x.jsonl", rows)
        prepare_rows(world.single_rank_world(), path, [source], kind=kind, template="plain")
    world.everyone.barrier()
    with pytest.raises(HpctrainError) as caught:
        open_corpus(small_deck(*KEYS, f"data.tokens={path}"), world)
    (problem,) = caught.value.problems
    assert (
        f"x.h5 holds {kind}, but objective.kind = " in problem and "requires text or conversations" in problem
    )
    assert caught.value.exit_code == 2
