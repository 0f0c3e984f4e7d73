"""What peers in plain torch train with: our first weights, and linear layers that oneDNN computes.

Tests of bench/peers/torch_training.py, bench/peers/torch_data.py and bench/peers/torch_module.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hpctrain.bench.peers.torch_data import use_onednn
from hpctrain.bench.peers.torch_model import TorchModel, mean_loss
from hpctrain.bench.peers.torch_training import TorchTraining, clip_gradients
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.engine.build import build_engine
from hpctrain.model.part import LayerRange
from tests.engines import LLAMA, small_deck
from tests.model.modules.tensor_parallel.test_unsplit_linear import gpt2


@pytest.mark.parametrize("changes", [(), LLAMA, ("model.tied=false",)], ids=["gpt2", "llama", "untied"])
def test_peers_begin_with_our_weights(world: World, changes: tuple[str, ...]) -> None:
    alone, deck = world.single_rank_world(), small_deck("model.dropout=0", "model.layers=3", *changes)
    engine = build_engine(deck, alone, Mesh(alone, {}))
    ours = {p.shard.name: p.detach() for model in engine.stage.models for p in model.parameters()}
    training = TorchTraining(deck)
    spans = (LayerRange(0, 2, True, False), LayerRange(2, 3, False, True))
    parts = [training.initialize(TorchModel(training.shape, span)) for span in spans]
    assert torch.equal(parts[0].embedding.weight, ours["embedding.tokens.weight"])
    head = "embedding.tokens.weight" if deck.model.tied else "head.weight"
    assert torch.equal(parts[1].head.weight, ours[head])
    named = dict(parts[1].named_parameters())
    assert {name for name in named if name.startswith("blocks")} == {
        name.replace("blocks.2", "blocks.0") for name in ours if name.startswith("blocks.2")
    }
    for name, weights in named.items():
        if name.startswith("blocks"):
            assert torch.equal(weights, ours[name.replace("blocks.0", "blocks.2")]), name
    whole = TorchModel(training.shape)
    assert sum(p.numel() for p in whole.parameters()) == sum(p.numel() for p in ours.values())


def test_a_module_begins_with_the_weights_of_a_run(world: World) -> None:
    alone, deck = world.single_rank_world(), gpt2()
    engine = build_engine(deck, alone, Mesh(alone, {}))
    ours = {p.shard.name: p.detach() for layer in engine.model.layers for p in layer.all_parameters}
    training = TorchTraining(deck)
    module = training.full_model()
    theirs = {name.removeprefix("module."): p for name, p in module.named_parameters()}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    tokens = torch.randint(61, (2, 32), generator=torch.Generator().manual_seed(1))
    assert module(tokens).shape == (2, 32, 61)


def test_every_step_has_other_samples_and_its_rate() -> None:
    deck = small_deck("model.dropout=0")
    halves, whole = [TorchTraining(deck, rank, 2) for rank in range(2)], TorchTraining(deck)
    seen = []
    for _ in range(2):
        rows = [torch.cat([micro.tokens for micro in half.micro_batches()]) for half in halves]
        together = torch.cat([micro.tokens for micro in whole.micro_batches()])
        assert {*map(str, torch.cat(rows))} == {*map(str, together)}
        seen.append(together)
        groups = [{"lr": 0.0}]
        for each in (*halves, whole):
            each.begin_update(groups)
    assert not torch.equal(*seen)
    assert groups[0]["lr"] == pytest.approx(deck.learning_rate.peak)  # the second of two steps of warm-up


def test_clipping_is_by_the_norm_of_all() -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(2, 2, requires_grad=True)]
    for limit, factor in ((0.0, 1.0), (100.0, 1.0), (2.5, 0.5)):
        for parameter, value in zip(parameters, (1.0, 2.0), strict=True):
            parameter.grad = torch.full_like(parameter, value)
        # 3 x 1 and 4 x 4 make 19, of which 16 count, and another rank's 9.
        clip_gradients(parameters, limit, parameters[1:], lambda own: own + 9.0)
        for parameter, value in zip(parameters, (1.0, 2.0), strict=True):
            assert torch.allclose(parameter.grad, torch.full_like(parameter, value * factor), rtol=1e-5)


@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_onednn_computes_the_same_gradients(family: tuple[str, ...]) -> None:
    training = TorchTraining(small_deck("model.dropout=0", *family))
    tokens = torch.randint(61, (2, 32), generator=torch.Generator().manual_seed(1))
    gradients = []
    for onednn in (False, True):
        model = training.initialize(TorchModel(training.shape))
        for parameter in model.parameters():
            parameter.data += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
        if onednn:
            use_onednn(model)
        with torch.profiler.profile() as profile:
            mean_loss(model(tokens), tokens.roll(1)).backward()
        names = {event.key for event in profile.key_averages()}
        assert ("mkldnn::_linear_pointwise" in names) == onednn
        assert ("aten::linear" in names) != onednn
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert functional.mse_loss(gradients[1][name], expected) <= 1e-10 * expected.square().mean(), name
