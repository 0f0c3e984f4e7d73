"""Classes of transformers, untouched, take the steps of a plain torch loop on every layout.

Images, masked sentences, a ResNet and a regression are in tests/train/test_dataset_run.py, modules of our own
and pieces of sequences in tests/model/modules.
"""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from tests.engines import by_rank_0, reference, trainer
from tests.model.modules.tensor_parallel.test_apply_plan import assert_equal_steps, deck_of

STEPS = 10
STOCK = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "neox", "opt")


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", STOCK)
def test_data_ranks(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind), STEPS)


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("kind", STOCK)
def test_parameters_that_are_cut(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, "layout.zero=3"), STEPS)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", STOCK)
def test_tensor_ranks(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, "layout.tensor=2"), STEPS)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", STOCK)
def test_pipeline_stages(world: World, kind: str, schedule: str) -> None:
    assert_equal_steps(world, deck_of(kind, "layout.pipeline=2", f"layout.schedule={schedule}"), STEPS)


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("kind", STOCK)
def test_pipeline_stages_of_tensor_ranks(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, "layout.pipeline=2", "layout.tensor=2"), STEPS)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", ["muon", "adam-mini"])
def test_whole_matrices_are_updated_on_stages(world: World, name: str) -> None:
    changes = [f"optimizer.name={name}"]
    if name == "muon":
        changes += ["optimizer.muon.matrices=['transformer.h.*.weight']", "optimizer.epsilon="]
        changes += ["optimizer.muon.newton_schulz=fp32", "optimizer.muon.newton_schulz_steps=1"]
    deck = deck_of("gpt2", *changes, "layout.pipeline=2")

    def alone() -> list[list[float]]:
        return [[each.loss, each.grad_norm] for each in reference(world, deck).train(4)]

    expected = torch.tensor(by_rank_0(world, alone))
    found = torch.tensor([[each.loss, each.grad_norm] for each in trainer(world, deck).train(4)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
