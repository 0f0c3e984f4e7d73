"""The chunked, vocabulary-parallel loss against torch's cross-entropy over whole logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes
from hpctrain.costs.layer_bytes.byte_functions import workspace_bytes
from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.host.c_libraries import open_library
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.parallel import vocabulary
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.kernels.matmul_kernels import KERNELS, LIBRARY, KernelTable, MatmulKernel
from hpctrain.parallel.layer_context import LayerContext, ProductSettings
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.vocabulary import VocabularyHead, vocabulary_shard

VOCABULARY, HIDDEN, SEQUENCE, BATCH = 37, 8, 12, 3


@pytest.fixture(scope="module")
def compiled() -> CompiledFunctions:
    return CompiledFunctions(open_library(compile_functions()))


def head(
    world: World,
    weight: Tensor,
    functions: LayerFunctions = TORCH,
    multiplier: float = 1.0,
    kernel: MatmulKernel = LIBRARY,
) -> VocabularyHead:
    mesh = Mesh(world, {"tensor": world.size})
    layer_context = LayerContext(
        mesh.group("tensor"),
        mesh.group("context"),
        functions=functions,
        products=ProductSettings(KernelTable(kernel)),
    )
    table = Parameter(vocabulary_shard("head.weight", *weight.shape, layer_context))
    table.data = table.shard.take(weight)
    table.gradient = torch.zeros(table.shape)
    return VocabularyHead(table, layer_context, multiplier)


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
@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary_size", [1, 2, 37, 2051])
def test_compiled_losses_are_those_of_torch(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    compiled: CompiledFunctions,
    vocabulary_size: int,
    form: torch.dtype,
) -> None:
    """With a vocabulary of one token, a second rank has only padding."""
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 7)
    monkeypatch.setattr(vocabulary, "CHUNK_ROWS", 7)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(vocabulary_size, HIDDEN, generator=generator).to(form)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(form)
    targets = torch.randint(vocabulary_size, (SEQUENCE, BATCH), generator=generator)
    targets[1:3, 1] = -1
    found = []
    for functions in (compiled, TORCH):
        layer, mine = head(world, weight, functions, 0.5), hidden.clone().requires_grad_()
        loss = CrossEntropy(targets, torch.tensor(0.25), 0.01)(layer, mine).total
        loss.backward()
        found.append((loss.detach(), mine.grad, layer.table.gradient))
    rounding = 3e-6 if form == torch.float32 else 1e-2
    for own, other in zip(*found, strict=True):
        assert own is not None
        assert other is not None
        # The gradient of a vocabulary of one is that of z-loss alone.
        assert (own.double() - other.double()).norm() <= rounding * other.double().norm() + 1e-6


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most memory of torch that a call holds, beyond what it leaves."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = function()
    assert kept is not None
    sizes = [each.nbytes() for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(accumulate(sizes)) - sum(sizes)


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(KERNELS))
def test_temporary_memory_is_the_planned_one(
    world: World, monkeypatch: pytest.MonkeyPatch, compiled: CompiledFunctions, form: torch.dtype, name: str
) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 1 << 20)
    kernel, rows, tokens, hidden_size = KERNELS[name], 4096, 768, 64
    if not kernel.is_available(form):
        pytest.skip("it multiplies no such operands")
    weight = (torch.randn(rows, hidden_size) / 8).to(form)
    hidden, targets = torch.randn(tokens, 1, hidden_size).to(form), torch.randint(rows, (tokens, 1))
    hidden.requires_grad_()
    at = ActivationSizes(tokens, tokens, 1, form.itemsize, 4)
    for functions, cap in ((compiled, 0.0), (TORCH, 0.0), (TORCH, 30.0)):
        layer = head(world, weight, functions, kernel=kernel)
        layer.cap = cap

        def loss(layer: VocabularyHead = layer) -> object:
            return CrossEntropy(targets, torch.tensor(0.25))(layer, hidden).total

        loss()  # what it takes once for all is there
        planned, held = workspace_bytes(layer, at), peak_bytes(loss)
        # oneDNN's products through fp32 are told by the sum of what several of them take.
        over = 1.35 if name == "fp32-onednn" else 1.03
        assert 0.93 * planned < held * over, (functions.compiled, cap, planned, held)
        assert held < 1.07 * planned, (functions.compiled, cap, planned, held)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_without_gradients_nothing_is_added(world: World) -> None:
    layer = head(world, torch.randn(VOCABULARY, HIDDEN))
    with torch.no_grad():
        targets = torch.zeros(2, 2, dtype=torch.int64)
        CrossEntropy(targets, torch.ones(()))(layer, torch.randn(2, 2, HIDDEN))
    gradient = layer.table.gradient
    assert gradient is not None
    assert not gradient.any()
