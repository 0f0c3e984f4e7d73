"""Parameters that are not trained stay as they are, and the others are trained as if those were constants."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import resumed_entries, training_entries
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from tests.engines import LLAMA, reference, small_deck, trainer

FROZEN = 'model.frozen=["embedding.*", "blocks.0.*", "blocks.1.attention_norm.*"]'


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_frozen_parameters_stay_and_the_others_train_as_on_one_rank(
    world: World, zero: int, tied: str
) -> None:
    if zero == 3 and world.size == 1:
        pytest.skip("cuts over two ranks or more")
    for layout in ([], ["layout.pipeline=2", "layout.schedule=zb-h1"]):
        if layout and (world.size % 2 or (world.size == 2 and zero == 3)):
            continue
        deck = small_deck(FROZEN, f"model.tied={tied}", f"layout.zero={zero}", *layout)
        run, single = trainer(world, deck), reference(world, deck)
        before = {name: values.clone() for name, values in run.parameters().items()}
        losses = [step.loss for step in run.train(5)]
        assert losses == pytest.approx([step.loss for step in single.train(5)], rel=1e-5)
        assert losses[-1] < losses[0]
        for name, values in run.parameters().items():
            held = name.startswith(("embedding.", "blocks.0.", "blocks.1.attention_norm."))
            assert torch.equal(values, before[name]) == held, (layout, name)


def test_gradients_of_the_others_are_those_without_freezing(world: World) -> None:
    deck = (*LLAMA, "optimizer.clip=0")
    free, frozen = (
        trainer(world.single_rank_world(), small_deck(*deck)),
        trainer(world.single_rank_world(), small_deck(*deck, FROZEN)),
    )
    free.train(1), frozen.train(1)
    expected = free.gradients()
    for name, gradient in frozen.gradients().items():
        if name.startswith(("embedding.", "blocks.0.", "blocks.1.attention_norm.")):
            assert not gradient.any(), name
        else:
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["block.0.*"], 'no parameter matches "block.0.*" (an example of a name is embedding.tokens.weight'),
        (["blocks.0.attention.query.weight"], "freezes blocks.0.attention.query.weight, but not"),
        (["*"], "leaves nothing to train"),
    ],
)
def test_what_cannot_be_frozen(world: World, patterns: list[str], told: str) -> None:
    names = ", ".join(f'"{pattern}"' for pattern in patterns)
    with pytest.raises(HpctrainError) as caught:
        trainer(world.single_rank_world(), small_deck(f"model.frozen=[{names}]"))
    assert told in str(caught.value.problems[0])


@pytest.mark.parametrize("where", ["memory.optimizer=device", "memory.optimizer=disk"])
def test_what_is_frozen_when_a_run_goes_on_stays(world: World, tmp_path: Path, where: str) -> None:
    deck = (*LLAMA, where, f"memory.offload_dir={tmp_path}")
    alone, path = world.single_rank_world(), tmp_path / "step.h5"
    free, frozen = trainer(alone, small_deck(*deck)), trainer(alone, small_deck(*deck, FROZEN))
    free.train(2)
    save(path, alone.everyone, training_entries(free.engine.state()), {})
    entries, left = resumed_entries(frozen.engine.state(), examine(path).datasets)
    assert left == {"optimizer/exp_avg", "optimizer/exp_avg_sq"}
    load(examine(path), alone.everyone, entries, left=left)
    before = {name: values.clone() for name, values in frozen.parameters().items()}
    frozen.train(2)
    for name, values in frozen.parameters().items():
        held = name.startswith(("embedding.", "blocks.0.", "blocks.1.attention_norm."))
        assert torch.equal(values, before[name]) == held, name
    free.engine.close()
    frozen.engine.close()


MIXTURE = (
    *LLAMA,
    "model.experts.count=4",
    "model.experts.mlp=24",
    "model.experts.shared=1",
    "model.experts.every=2",
    "layout.expert=2",
)

PARTS_OF_MIXTURES = {
    "experts": ["*.experts.*"],
    "routers": ["*.router.*"],
    "all before": ["embedding.*", "blocks.0.*", "blocks.1.attention*", "blocks.1.feed_forward_norm.*"],
    "all but experts": [
        "embedding.*",
        "blocks.0.*",
        "*attention*",
        "*norm*",
        "*.router.*",
        "*.shared.*",
        "head*",
    ],
    "all but routers": [
        "embedding.*",
        "*attention*",
        "*norm*",
        "*.experts.*",
        "*.shared.*",
        "blocks.0.*",
        "head*",
    ],
    "all but shared experts": [
        "embedding.*",
        "*attention*",
        "*norm*",
        "*.router.*",
        "*.experts.*",
        "blocks.0.*",
        "head*",
    ],
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("which", PARTS_OF_MIXTURES)
@pytest.mark.parametrize("zero", [0, 3])
def test_parts_of_mixtures_are_frozen_on_their_own(world: World, which: str, zero: int) -> None:
    patterns = PARTS_OF_MIXTURES[which]
    deck = small_deck(f"model.frozen={patterns}".replace("'", '"'), *MIXTURE, f"layout.zero={zero}")
    run, single = trainer(world, deck), reference(world, deck)
    before = {name: values.clone() for name, values in run.parameters().items()}
    losses = [step.loss for step in run.train(3)]
    assert losses == pytest.approx([step.loss for step in single.train(3)], rel=1e-5)
    for name, values in run.parameters().items():
        held = any(fnmatchcase(name, pattern) for pattern in patterns)
        assert torch.equal(values, before[name]) == held, name
