"""The chunked, vocabulary-parallel loss against torch's cross-entropy over whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.parallel import vocabulary
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.shard import Parameter
from hpctrain.parallel.vocabulary import VocabularyHead, vocabulary_shard

VOCABULARY, HIDDEN, SEQUENCE, BATCH = 37, 8, 12, 3


def head(world: World, weight: Tensor) -> VocabularyHead:
    mesh = Mesh(world, {"tensor": world.size})
    groups = LayerGroups(mesh.group("tensor"), mesh.group("context"))
    table = Parameter(vocabulary_shard("head.weight", VOCABULARY, HIDDEN, groups))
    table.data = table.shard.take(weight)
    table.gradient = torch.zeros(table.shape)
    return VocabularyHead(table, groups)


@pytest.mark.mpi(min_size=1, max_size=2)
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
    found = CrossEntropy(targets, torch.tensor(0.25), z_loss)(layer, mine).total
    found.backward()
    torch.testing.assert_close(found.detach(), loss.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.grad, hidden.grad, rtol=1e-4, atol=1e-6)
    table = layer.table
    assert weight.grad is not None
    torch.testing.assert_close(table.gradient, table.shard.take(weight.grad), rtol=1e-4, atol=1e-6)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_without_gradients_nothing_is_added(world: World) -> None:
    layer = head(world, torch.randn(VOCABULARY, HIDDEN))
    with torch.no_grad():
        targets = torch.zeros(2, 2, dtype=torch.int64)
        CrossEntropy(targets, torch.ones(()))(layer, torch.randn(2, 2, HIDDEN))
    gradient = layer.table.gradient
    assert gradient is not None
    assert not gradient.any()
