"""Compare Muon with `torch.optim.Muon`, and every layout with one rank, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import gradient_bytes, state_bytes, value_bytes
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.matrix import local_matrices
from hpctrain.optim.matrix.matrix_optimizer import MatrixOptimizer
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.matrix.muon import LearningRateMatch, Muon, orthogonalize
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.plan.deck_references import reference_problems
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.sharding.replication import Replications
from hpctrain.train.layout_verification import LayoutError, verify_layout
from tests.engines import LLAMA, alone, make_buckets, one_thread, reference, small_deck, trainer
from tests.optim.matrix.runs import EXPERTS, MUON, give_gradients, losses_after_checkpoint

SHAPES = ((400, 200), (200, 400), (230, 230), (40, 3), (16, 16), (1, 8))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("match", "theirs"), [("original", "original"), ("adamw-rms", "match_rms_adamw")], ids=["original", "rms"]
)
def test_updates_are_those_of_torch(
    world: World, match: LearningRateMatch, theirs: str, nesterov: bool
) -> None:
    """Update matrices of several shapes, three stacked ones, and a vector by AdamW.

    Matrix "slow" has half of the learning rate but the same decay; "bare" has no decay.
    """
    one_thread()
    torch.manual_seed(5)
    parameters = {
        f"m{number}": Parameter(Shard.replicated(f"m{number}", s)) for number, s in enumerate(SHAPES)
    }
    parameters["stack"] = Parameter(Shard.replicated("stack", (3, 24, 40)))
    parameters["slow"], parameters["bare"] = (
        Parameter(Shard.replicated(name, (30, 50)), has_weight_decay=name == "slow")
        for name in ("slow", "bare")
    )
    parameters["slow"].learning_rate_factor = 0.5
    parameters["v"] = Parameter(Shard.replicated("v", (33,)), has_weight_decay=False)
    rules = MatrixRules(
        Muon(0.95, nesterov, 0.1, 5, torch.bfloat16, match), ("*",), AdamW((0.9, 0.95), 1e-8, 0.1), 0.25
    )
    rules.assign(list(parameters.values()))
    units = [[[each] for each in parameters.values()]]
    buckets = make_buckets(units, Replications.of_one_rank(alone(world).tensor), torch.float32, 100_000)
    ours = MatrixOptimizer(rules, buckets)
    for parameter in parameters.values():
        parameter.data.copy_(torch.randn(parameter.shape))
    copies = {name: p.detach().clone().requires_grad_() for name, p in parameters.items() if name != "stack"}
    stacked = [each.clone().requires_grad_() for each in parameters["stack"].detach()]
    groups = {0.1: [*(copies[f"m{number}"] for number in range(len(SHAPES))), *stacked]}
    groups |= {0.2: [copies["slow"]], 0.0: [copies["bare"]]}
    by_decay = [{"params": matrices, "weight_decay": decay} for decay, matrices in groups.items()]
    muon = torch.optim.Muon(by_decay, momentum=0.95, nesterov=nesterov, adjust_lr_fn=theirs)
    adamw = torch.optim.AdamW([copies["v"]], betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(4):
        rate = 0.01 * (step + 1)
        for group, factor in zip(muon.param_groups, (1, 0.5, 1), strict=True):
            group["lr"] = rate * factor
        adamw.param_groups[0]["lr"] = rate / 4
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape)
            assert parameter.gradient is not None
            parameter.gradient.copy_(gradient * 4.0)
            if name != "stack":
                copies[name].grad = gradient
                continue
            for each, of_each in zip(stacked, gradient, strict=True):
                each.grad = of_each.clone()
        muon.step()
        adamw.step()
        ours.step(rate, 4.0)
        for name, parameter in parameters.items():
            expected = torch.stack([*stacked]) if name == "stack" else copies[name]
            if name == "v":
                torch.testing.assert_close(parameter.detach(), expected.detach(), rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(parameter.detach(), expected.detach()), (step, name)
    kinds = {each.kind: each.values.numel() for each in ours.state() if each.shard.name == "m0"}
    assert kinds == {"model": 80_000, "optimizer/momentum": 80_000}


def plain(matrix: Tensor, steps: int) -> Tensor:
    """Return the result of the Newton-Schulz iteration in double precision."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(steps):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(300, 500), (500, 300), (256, 256), (700, 500)])
def test_a_matrix_is_orthogonalized_in_single_precision(shape: tuple[int, int]) -> None:
    """Symmetric products are computed in blocks of 192 rows, and singular values approach 1."""
    torch.manual_seed(2)
    matrix = torch.randn(shape)
    found = orthogonalize(matrix.clone(), 5)
    wide = matrix if shape[0] <= shape[1] else matrix.t()
    expected = plain(wide, 5) if shape[0] <= shape[1] else plain(wide, 5).t()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    values = torch.linalg.svdvals(found)
    assert (values < 1.3).all() and (values > 0.3).float().mean() > 0.95
    assert orthogonalize(torch.zeros(shape), 5).abs().max() == 0


LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    1: [("precision.gradients=compute", "precision.compute=bf16")],
    2: [
        ("layout.zero=0",),
        ("layout.zero=1", "communication.bucket_bytes=1000000"),
        ("layout.zero=2", "memory.accumulate=sliced"),
        ("layout.zero=3",),
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.tensor=2", "model.key_value_heads=1", "optimizer.muon.newton_schulz=fp32"),
        ("layout.pipeline=2", "model.tied=true"),
        ("layout.context=2", "layout.zero=1", 'model.frozen=["blocks.1.attention.*"]'),
        (*EXPERTS, "layout.expert=2", "layout.zero=1"),
        (*EXPERTS, "layout.zero=1"),
        (*EXPERTS, "layout.tensor=2", "layout.expert_tensor=2"),
    ],
    4: [
        ("layout.zero=2", "layout.zero_group=2"),
        ("layout.tensor=2", "layout.zero=0"),
        ("layout.tensor=2", "layout.zero=3"),
        ("layout.pipeline=2", "layout.zero=1", "model.tied=true"),
        (*EXPERTS, "layout.expert=2", "layout.tensor=2", "layout.expert_tensor=2", "layout.zero=1"),
    ],
    8: [("layout.tensor=2", "layout.pipeline=2", "layout.zero=3"), ("layout.zero=1",)],
}


@pytest.mark.sampled(4)
@pytest.mark.mpi
@pytest.mark.parametrize("number", range(max(map(len, LAYOUTS.values()))))
def test_every_layout_has_the_bits_of_one_rank(world: World, number: int) -> None:
    """Give all layouts the same gradients. Some ranks own whole matrices, others gather them."""
    one_thread()
    layouts = LAYOUTS.get(world.size, [])
    if number >= len(layouts):
        pytest.skip(f"{len(layouts)} layouts of {world.size} ranks")
    deck = small_deck(*LLAMA, *MUON, *layouts[number])
    training, alone = trainer(world, deck), reference(world, deck)
    for step in range(3):
        for each in (training, alone):
            give_gradients(each, step)
            each.engine.stage.optimizer.step(1e-2, 2.0)
    whole = alone.parameters()
    for bucket in training.engine.stage.buckets:
        flat = bucket.gather_owned(bucket.owned_values)
        for segment in bucket.segments:
            shard = segment.parameter.shard
            assert torch.equal(segment.view(flat), shard.take(whole[shard.name])), shard.name


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("key", ["layout.zero=1", "layout.pipeline=2"])
def test_a_checkpoint_of_a_layout_continues_on_one_rank(world: World, mpi_tmp_path: Path, key: str) -> None:
    keys = (*MUON, "optimizer.muon.newton_schulz=fp32")
    expected, found = losses_after_checkpoint(world, mpi_tmp_path, keys, (key,))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("key", ["layout.tensor=2", "layout.zero=1"])
def test_the_layout_check_finds_pieces_that_are_orthogonalized(
    world: World, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    deck = small_deck(*LLAMA, *MUON, key)
    made = trainer(world, deck).engine.mesh
    verify_layout(deck, world, made)
    if key == "layout.zero=1":
        return
    monkeypatch.setattr(local_matrices.SplitMatrix, "of", lambda *_: None)
    with pytest.raises(LayoutError, match="in the second step"):
        verify_layout(deck, world, made)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ('["blocks.*", "head.*.x"]', 'no parameter matches "head.*.x"'),
        (
            '["*.query.weight"]',
            "names blocks.0.attention.query.weight, but not ",
        ),
        ('["*norm*"]', "names no matrix"),
        ('["blocks.*", "nothing"]', 'no parameter matches "nothing"'),
    ],
)
def test_wrong_patterns_are_refused_by_a_run_and_by_its_plan(
    world: World, pattern: str, sentence: str
) -> None:
    deck = small_deck(*LLAMA, *MUON, f"optimizer.muon.matrices={pattern}")
    with pytest.raises(HpctrainError) as raised:
        trainer(world, deck)
    assert sentence in str(raised.value)
    foreseen = tuple(deck.problem(each.key, each.sentence) for each in reference_problems(deck))
    assert foreseen == raised.value.problems
    assert not list(reference_problems(small_deck(*LLAMA, *MUON)))


def test_a_skipped_step_changes_nothing(world: World) -> None:
    deck = small_deck(*LLAMA, *MUON, "precision.compute=fp16", "precision.initial_loss_scale=16777216")
    training = trainer(world, deck)
    before = [(each.kind, each.values.clone()) for each in training.engine.stage.optimizer.state()]
    (step,) = training.train(1)
    assert step.skipped
    for (kind, values), after in zip(before, training.engine.stage.optimizer.state(), strict=True):
        assert torch.equal(values, after.values), kind


def test_a_deck_makes_its_rule() -> None:
    deck = small_deck("optimizer.name=muon", "optimizer.weight_decay=0.2")
    rules = RULES["muon"](deck)
    assert isinstance(rules, MatrixRules)
    assert rules.matrix_rule == Muon(0.95, True, 0.2, 5, torch.bfloat16, "adamw-rms")
    assert rules.element_rule == RULES["adamw"](deck)
    assert (rules.patterns, rules.element_rate) == (("blocks.*",), 1.0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_plan_has_the_bytes_of_the_rank_that_holds_most(world: World, zero: int, precision: str) -> None:
    """Matrices have one moment, other elements two. Ranks that own other matrices hold other amounts."""
    layouts = [("layout.tensor=2",), ("layout.pipeline=2",), ("layout.zero_group=2",)] * (world.size > 2)
    layouts += [(*EXPERTS, "layout.expert=2")] if world.size in {2, 4} else []
    for layout in layouts:
        if "layout.zero_group=2" in layout and not zero:
            continue
        deck = small_deck(*LLAMA, *MUON, *layout, f"layout.zero={zero}", f"precision.compute={precision}")
        engine = trainer(world, deck).engine
        state = state_bytes(engine.state(), engine.stage.buckets)
        own = state, gradient_bytes(engine.stage.buckets), value_bytes(engine.stage.buckets)
        everyone = world.everyone.all_gather_object((engine.mesh.coordinate("pipeline"), own))
        for stage in plan_memory(deck, world.size, 61).stages:
            most = max((held for number, held in everyone if number == stage.stage), key=sum)
            told = stage.memory.optimizer, stage.memory.gradient, stage.memory.parameter
            assert told == tuple(most), layout
