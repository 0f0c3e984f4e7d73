"""The chunked, vocabulary-parallel loss against torch's cross-entropy over whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.parallel import vocabulary
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.shard import Parameter
from hpctrain.parallel.vocabulary import LossTerms, VocabularyLoss, vocabulary_shard

VOCABULARY, HIDDEN, SEQUENCE, BATCH = 37, 8, 12, 3


def head(world: World, weight: Tensor) -> VocabularyLoss:
    mesh = Mesh(world, {"tensor": world.size})
    groups = LayerGroups(mesh.group("tensor"), mesh.group("context"))
    table = Parameter(vocabulary_shard("head.weight", VOCABULARY, HIDDEN, groups))
    table.data = table.shard.take(weight)
    table.gradient = torch.zeros(table.shape)
    return VocabularyLoss(table, groups)


def test_chunks_are_even_and_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(vocabulary, "CHUNK_ROWS", 4)
    assert vocabulary.chunk_rows(512, 10) == 86  # six chunks, of at most 100
    assert vocabulary.chunk_rows(30, 10) == 30
    assert vocabulary.chunk_rows(9, 5000) == 3  # three chunks, of at most 4
    assert vocabulary.chunk_rows(0, 10) == 1


@pytest.mark.parametrize("block", [1, 7, VOCABULARY])
def test_products_by_blocks_are_the_products(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(vocabulary, "BLOCK_ROWS", block)
    hidden, table = torch.randn(5, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    torch.testing.assert_close(vocabulary.products(hidden, table), hidden @ table.t())
    half = vocabulary.products(hidden.bfloat16(), table.bfloat16())
    torch.testing.assert_close(half, hidden.bfloat16() @ table.bfloat16().t())


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_loss_and_gradients(world: World, monkeypatch: pytest.MonkeyPatch, z_loss: float, chunk: int) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(vocabulary, "CHUNK_ROWS", 5)
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (SEQUENCE, BATCH))
    targets[0, :2] = -1
    logits = functional.linear(hidden, weight)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    square = (logits.logsumexp(-1).square() * (targets >= 0)).sum()
    (0.25 * (loss + z_loss * square)).backward()

    layer = head(world, weight.detach())
    mine = hidden.detach().requires_grad_()
    found = layer(mine, LossTerms(targets, torch.tensor(0.25), z_loss))
    found.backward()
    torch.testing.assert_close(found.detach(), loss.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.grad, hidden.grad, rtol=1e-4, atol=1e-6)
    table = layer.weight[0]
    assert weight.grad is not None
    torch.testing.assert_close(table.gradient, table.shard.take(weight.grad), rtol=1e-4, atol=1e-6)


@pytest.mark.mpi(min_size=1)
def test_without_gradients_nothing_is_added(world: World) -> None:
    layer = head(world, torch.randn(VOCABULARY, HIDDEN))
    with torch.no_grad():
        layer(torch.randn(2, 2, HIDDEN), LossTerms(torch.zeros(2, 2, dtype=torch.int64), torch.ones(())))
    gradient = layer.weight[0].gradient
    assert gradient is not None
    assert not gradient.any()
