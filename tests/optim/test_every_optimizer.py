"""Tests of every optimizer in `RULES`. A new one is tested as soon as it is registered.

On layouts it trains as on one rank and has the state that is planned, it goes on on another layout from the
same bits, files and slices change nothing where it updates by element, replicas have state of their own, and
what is frozen stays. Its formula is tested in a file of its own. Also tests engine/stages/update_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import gradient_bytes, state_bytes, value_bytes
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.optimizer import MATRIX_OPTIMIZERS
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.optimizer import AveragedRule
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.savings import find_savings
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.layout_verification import verify_layout
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, Trainer, by_rank_0, reference, small_deck, trainer
from tests.train.test_run import contents

NAMES = sorted(RULES)
BY_ELEMENT = [name for name in NAMES if name not in MATRIX_OPTIMIZERS]
KEYS: Mapping[str, tuple[str, ...]] = {
    "adam-mini": ("optimizer.epsilon=1e-3",),
    "adamw": ("optimizer.epsilon=1e-3",),
    "lion": ("learning_rate.peak=1e-3", "optimizer.weight_decay=0.5"),
    "muon": ("optimizer.muon.newton_schulz=fp32",),
    "schedule-free": ("optimizer.epsilon=1e-3", "optimizer.weight_decay=0.5"),
    "sgd": ("optimizer.momentum=0.9", "learning_rate.peak=0.1"),
}
"""Keys that keep rounding errors small."""

OTHERS = {
    "adafactor with means": ("optimizer.name=adafactor", "optimizer.adafactor.beta1=0.9"),
    "sgd with nesterov": ("optimizer.name=sgd", "optimizer.sgd.momentum=0.9", "optimizer.sgd.nesterov=true"),
    "sgd without momentum": ("optimizer.name=sgd",),
}
"""Variants of optimizers with other state or other steps."""

ELSEWHERE = {"lion": 1e-3}
"""Share of elements that may differ by a whole step, because rounding decides the sign of their mean."""

EXPERTS = ("model.experts.count=4", "model.experts.per_token=2", "model.experts.mlp=48")

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    **{f"zero {stage}": (2, (f"layout.zero={stage}",)) for stage in range(4)},
    "tensor": (2, ("layout.tensor=2", "layout.sequence_parallel=true", "model.family=gpt2")),
    "pipeline, tied": (2, ("layout.pipeline=2", "model.tied=true")),
    "tensor, shared heads": (2, ("layout.tensor=2", "model.key_value_heads=1")),
    "tensor, uneven heads": (
        2,
        ("layout.tensor=2", "model.heads=3", "model.key_value_heads=3", "model.head_size=8"),
    ),
    "experts": (2, (*EXPERTS, "layout.expert=2", "layout.zero=1")),
    "experts, cut": (2, (*EXPERTS, "layout.tensor=2", "layout.expert_tensor=2")),
    "hybrid": (4, ("layout.zero=1", "layout.zero_group=2")),
}
OF_MATRICES = ("tensor, shared heads", "tensor, uneven heads", "experts", "experts, cut")
"""Layouts that place whole matrices differently, which does not matter to elementwise rules."""


def keys_of(name: str) -> tuple[str, ...]:
    """Return the keys of an optimizer or of a variant."""
    return (*LLAMA, *OTHERS.get(name, (f"optimizer.name={name}", *KEYS.get(name, ()))))


def layouts() -> list[tuple[str, str]]:
    """Yield all tested layouts of each optimizer."""
    return [
        (name, layout)
        for name in NAMES
        for layout in LAYOUTS
        if layout not in (("hybrid",) if name in MATRIX_OPTIMIZERS else OF_MATRICES)
        or (name, layout) == ("schedule-free", "experts")
    ]


@dataclass(frozen=True)
class OneRank:
    """Results of a deck's training on one rank."""

    losses: list[float]
    parameters: dict[str, Tensor]
    shown: float


OnOneRank = Callable[[Deck], OneRank]


@pytest.fixture(scope="module")
def one_rank(world: World) -> OnOneRank:
    """Return the results of one rank, which all layouts of a deck share."""
    known: dict[str, OneRank] = {}

    def find(deck: Deck) -> OneRank:
        def train() -> OneRank:
            alone = reference(world, deck)
            losses = [step.loss for step in alone.train(3)]
            parameters = {name: values.clone() for name, values in alone.parameters().items()}
            return OneRank(losses, parameters, alone.evaluate(alone.step.batches, 8)["loss"])

        name = repr(on_one_rank(deck))
        if name not in known:
            known[name] = by_rank_0(world, train)
        return known[name]

    return find


def held(training: Trainer) -> tuple[int, int, int]:
    """Return the bytes of state without parameters, of gradients, and of parameters."""
    engine = training.engine
    return (
        state_bytes(engine.state(), engine.stage.buckets),
        gradient_bytes(engine.stage.buckets),
        value_bytes(engine.stage.buckets),
    )


def assert_planned(world: World, training: Trainer) -> None:
    """Check that the planned bytes of a pipeline stage are those of its rank with most bytes. Collective."""
    everyone = world.everyone.all_gather_object((training.stage, held(training)))
    for stage in plan_memory(training.deck, world.size, 61).stages:
        told = stage.memory.optimizer, stage.memory.gradient, stage.memory.parameter
        assert told == max((each for number, each in everyone if number == stage.stage), key=sum)


@pytest.mark.sampled(20)
@pytest.mark.mpi
@pytest.mark.parametrize(("name", "layout"), layouts())
def test_layouts_train_like_one_rank_with_the_planned_bytes(
    world: World, one_rank: OnOneRank, name: str, layout: str
) -> None:
    ranks, keys = LAYOUTS[layout]
    if ranks != world.size:
        pytest.skip(f"of {ranks} ranks")
    deck = small_deck(*keys_of(name), *keys)
    training, alone = trainer(world, deck), one_rank(deck)
    assert_planned(world, training)
    assert alone.losses[-1] < alone.losses[0]
    assert [step.loss for step in training.train(3)] == pytest.approx(alone.losses, rel=1e-5)
    apart = elements = 0
    for bucket in training.engine.stage.buckets:
        flat = bucket.gather_owned(bucket.owned_values)
        for segment in bucket.segments:
            shard = segment.parameter.shard
            if shard.name.endswith("key.bias"):
                continue  # which softmax does not see: its gradient is rounding
            whole = alone.parameters[shard.name]
            other = (segment.view(flat) - shard.take(whole)).abs() > 1e-4 * whole.abs().max()
            assert name in ELSEWHERE or not other.any(), shard.name
            apart, elements = apart + int(other.sum()), elements + other.numel()
    assert apart <= ELSEWHERE.get(name, 0.0) * elements
    if isinstance(RULES[name](deck), AveragedRule):
        shown = training.evaluate(training.step.batches, 8)["loss"]
        assert shown == pytest.approx(alone.shown, rel=1e-5)
    assert_planned(world, trainer(world, small_deck(*keys_of(name), *keys, "precision.compute=bf16")))


def restored(world: World, folder: Path, *keys: str) -> tuple[Trainer, Trainer, Path]:
    """Return a run after three steps, one on another layout with the same bits, and their checkpoint."""
    layouts = ("layout.zero=3", "layout.tensor=2")
    decks = [small_deck(*keys, layout, f"run.dir={folder / layout}") for layout in layouts]
    first, second = (trainer(world, deck) for deck in decks)
    first.train(3)
    paths: list[Path] = []
    for deck, training in zip(decks, (first, second), strict=True):
        checkpoints = Checkpoints(deck, training.engine, {})
        if paths:
            training.state = checkpoints.restore(paths[0])
        checkpoints.save(training.state)
        assert checkpoints.newest is not None
        paths.append(checkpoints.newest)
    before, after = map(contents, paths)
    assert before.keys() == after.keys()
    assert all(values.tobytes() == after[name].tobytes() for name, values in before.items())
    assert second.engine.stage.optimizer.totals == first.engine.stage.optimizer.totals
    return first, second, paths[0]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", [*NAMES, "adafactor with means"])
def test_a_run_resumes_on_another_layout(world: World, mpi_tmp_path: Path, name: str) -> None:
    """Both start with the same bits and make the same steps."""
    keys = (*keys_of(name), *EXPERTS)
    first, second, path = restored(world, mpi_tmp_path, *keys)
    rule = RULES[first.deck.optimizer.name](first.deck)
    kinds = {each.rsplit("/", 1)[0] for each in contents(path)}
    assert {f"optimizer/{each}" for each in rule.names} <= kinds
    expected = [step.loss for step in first.train(2)]
    assert [step.loss for step in second.train(2)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.sampled(5)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*BY_ELEMENT, "sgd with nesterov", "sgd without momentum"])
def test_updates_have_the_same_bits_in_slices_and_in_files(
    world: World, mpi_tmp_path: Path, name: str, compute: str
) -> None:
    keys = (*keys_of(name), f"precision.compute={compute}")
    plain = trainer(world, small_deck(*keys))
    losses = [step.loss for step in plain.train(3)]
    known, expected = plain.evaluate(plain.step.batches, 8)["loss"], plain.parameters()
    disk = ("memory.optimizer=disk", "memory.offload_buffer=12000", f"memory.offload_dir={mpi_tmp_path}")
    cut = [("layout.zero=1",), ("layout.zero=1", *disk), ("layout.zero=3", *disk, "memory.parameters=disk")]
    for more in cut if world.size > 1 else [disk]:
        other, found = trainer(world, small_deck(*keys, *more)), list[float]()
        for steps in (2, 1):
            found += [step.loss for step in other.train(steps)]
            evaluated = other.evaluate(other.step.batches, 8)["loss"]
        assert (found, evaluated) == (losses, known), more
        assert all(torch.equal(values, expected[name]) for name, values in other.parameters().items()), more
        other.engine.close()
        world.everyone.barrier()


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_layout_is_verified(world: World, name: str) -> None:
    """Verify with a rule with as much state, if rounding errors alone would cause steps."""
    deck = small_deck(f"optimizer.name={name}", "layout.tensor=2", "layout.sequence_parallel=true")
    small = scale_down_family(deck)
    standing = RULES[small.optimizer.name](small), RULES[name](deck)
    for kind in (MatrixRules, AveragedRule):
        assert len({isinstance(rule, kind) for rule in standing}) == 1
    assert verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_replicas_have_their_own_state_and_synchronize(world: World, name: str) -> None:
    """Some optimizers are refused."""
    keys = (*keys_of(name), "layout.local_steps.replicas=2")
    if isinstance(RULES[name](small_deck(*keys_of(name))), AveragedRule):
        with pytest.raises(HpctrainError, match=r"conflicts with \[layout.local_steps\]"):
            small_deck(*keys)
        return
    training = trainer(world, small_deck(*keys, "layout.local_steps.steps=2"))
    training.train(2)
    optimizer = training.engine.stage.optimizer
    for master in optimizer.masters:
        assert isinstance(master, Tensor)
        both = world.everyone.all_gather(master[None])
        assert torch.equal(both[0], both[1])
    kept = [each for each in optimizer.state() if each.kind.startswith("optimizer/")]
    assert kept and all(each.per_replica and each.shard.shape[0] == 2 for each in kept)
    apart = set[str]()
    for each in kept:
        assert isinstance(each.values, Tensor)
        both = world.everyone.all_gather(each.values[None])
        if not torch.equal(both[0], both[1]):
            apart.add(each.kind)
    assert {each.kind for each in kept} - {"optimizer/updates"} == apart


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters_do_not_change(world: World, name: str) -> None:
    """State that depends on it is not updated either."""
    training = trainer(world.single_rank_world(), small_deck(*keys_of(name), 'model.frozen=["blocks.0.*"]'))
    before = {name: values.clone() for name, values in training.parameters().items()}
    training.train(2)
    same = {name for name, values in training.parameters().items() if torch.equal(values, before[name])}
    assert same == {name for name in before if name.startswith("blocks.0.")}


@pytest.mark.parametrize("name", NAMES)
def test_only_elementwise_rules_are_offloaded(name: str) -> None:
    """Other optimizers are refused with an explanation, and are not suggested."""
    deck = small_deck(f"optimizer.name={name}")
    assert isinstance(RULES[name](deck), MatrixRules) == (name in MATRIX_OPTIMIZERS)
    if name not in MATRIX_OPTIMIZERS:
        small_deck(f"optimizer.name={name}", "memory.optimizer=disk")
        return
    with pytest.raises(HpctrainError, match=r"memory.optimizer=disk: conflicts with optimizer.name"):
        small_deck(f"optimizer.name={name}", "memory.optimizer=disk")
    plan = plan_memory(deck, 1, 61)

    def changed(*keys: str) -> Deck:
        return small_deck(f"optimizer.name={name}", *keys)

    savings = find_savings(deck, plan, changed, lambda changed: plan_memory(changed, 1, 61))
    assert all("memory.optimizer" not in each.change for each in savings)
