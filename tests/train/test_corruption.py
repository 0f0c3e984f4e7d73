"""Silent faults in memory: each is found and located, and healed so that nothing is left of it.

Tests of train/corruption.py, train/fault_recovery.py, train/rollback.py, train/update_only_state.py,
audit/bits.py, train/counters.py and deck/sections/stability.py.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hpctrain.audit.bits import word_sum
from hpctrain.audit.detected_fault import DetectedFault, SilentFaultError
from hpctrain.audit.message_audit import MessageAudit
from hpctrain.checkpoint.background import BackgroundSave
from hpctrain.comm.group import Group
from hpctrain.comm.transports.choose import TransportPair
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError
from hpctrain.report.marks import read_faults
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import corruption, fault_recovery
from hpctrain.train.control import Control, StepDecision
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.rollback import Rollback
from hpctrain.train.run import resume
from hpctrain.train.run_construction import open_run
from hpctrain.train.signals import Signals
from hpctrain.train.step import ReadBatches, Step
from hpctrain.train.trainer import Trainer
from hpctrain.watch.run_files import STOP_FILE
from tests.comm.transports.random_calls import Flip as Message
from tests.comm.transports.random_calls import FlippingTransport
from tests.engines import LLAMA, small_deck, trainer
from tests.train.flips import Flip, Flips, flip, gradients, states
from tests.train.poisoned import make_deck, train
from tests.train.test_run import contents

STEPS = 16
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "data": (),
    "zero-1": ("layout.zero=1", "precision.compute=bf16"),
    "zero-3": ("layout.zero=3", "communication.transport=mpi"),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true", "optimizer.name=muon"),
    "pipeline": ("layout.pipeline=2", "layout.schedule=zb-h1", "precision.compute=fp16"),
    "experts": ("model.experts.count=4", "model.experts.balance=bias", "layout.expert=2", "layout.zero=2"),
    "replicas": (
        "layout.local_steps.replicas=2",
        "layout.local_steps.steps=3",
        "layout.local_steps.outer=diloco",
    ),
    "compressed": ("communication.compress=topk", "optimizer.name=lion"),
    "fp8": ("precision.compute=fp8", "layout.zero=1"),
}
SHORT = (
    f"run.steps={STEPS}",
    "learning_rate.warmup=2",
    "data.validation=0",
    "batch.global_size=8",
    "batch.micro_size=2",
)
CHEAP = ("stability.corruption=cheap", "stability.corruption_every=3", "checkpoint.memory_every=4")


def keys_of(layout: str) -> tuple[str, ...]:
    muon = ('optimizer.muon.matrices=["blocks.*"]',) if "optimizer.name=muon" in LAYOUTS[layout] else ()
    return (*SHORT, *LAYOUTS[layout], *muon)


def found_in(folder: Path) -> list[dict[str, Any]]:
    path = folder / "faults.jsonl"
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def assert_same_end(one: Path, other: Path) -> None:
    ends = [contents(folder / "checkpoints" / f"step-{STEPS:08d}.h5") for folder in (one, other)]
    assert ends[0].keys() == ends[1].keys()
    assert all(np.array_equal(ends[0][key], ends[1][key]) for key in ends[0])
    losses = [[row["loss"] for row in read_metrics(folder / "metrics.jsonl")] for folder in (one, other)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS


@pytest.fixture(autouse=True)
def unchecked_transports(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove the message audit of a test's run, since later tests use the same World."""
    yield
    if "world" in request.fixturenames:
        request.getfixturevalue("world").decorate_transports(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64])
def test_any_bit_changes_a_fingerprint(dtype: torch.dtype) -> None:
    whole = torch.randint(0, 200, (64,)).to(dtype)
    for offset, length in ((0, 1), (0, 9), (1, 8), (2, 5), (3, 0), (3, 1), (1, 2)):
        values = whole[offset : offset + length]
        before = int(word_sum(values))
        for element in range(length):
            for bit in range(8 * dtype.itemsize):
                flip(values, element, bit)
                assert int(word_sum(values)) != before
                flip(values, element, bit)
        assert int(word_sum(values)) == before


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_changes_between_updates_is_found_and_healed(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(fault_recovery, "MAX_FAULTS_OF_RANK", 100)
    deck, keys, draw = make_deck(world, mpi_tmp_path), keys_of(layout), random.Random(layout)
    train(world, deck, "clean", *keys)
    flips = []
    for step in (2, 5, 6, 9, 11, 13):  # from the first one back to the beginning
        places = draw.choice([states, gradients])
        moment = "summed" if places is gradients else draw.choice(["between", "within", "summed"])
        if step == 2:
            places, moment = states, "between"
        where = draw.randrange(world.size), places, draw.randrange(1000), draw.randrange(10**6)
        flips.append(Flip(step, *where, draw.randrange(32), moment))
    with monkeypatch.context() as patch:
        Flips(flips).install(patch)
        code, _ = train(world, deck, "flipped", *keys, *CHEAP)
    assert code == 0
    assert_same_end(mpi_tmp_path / "clean", mpi_tmp_path / "flipped")
    found = found_in(mpi_tmp_path / "flipped")
    # Ranks have other lists of places.
    told = world.everyone.all_gather_object([each.done for each in flips])
    done = [(each.step + 1, [each.rank], told[each.rank][number]) for number, each in enumerate(flips)]
    assert [each for each in done if each[2]] == [(row["step"], row["ranks"], row["name"]) for row in found]
    assert len(found) > 3


@pytest.mark.mpi(min_size=2, max_size=2)
def test_every_bit_of_what_rests_is_found(world: World, mpi_tmp_path: Path) -> None:
    deck = read_deck(
        make_deck(world, mpi_tmp_path), [*keys_of("zero-1"), f"run.dir={mpi_tmp_path}/run", *CHEAP], 2
    )
    run = open_run(world, deck)
    run.trainer.train_step()
    guard, draw = run.trainer.guard, random.Random(world.rank)
    update_only = guard.update_only  # type: ignore[attr-defined]
    for _ in range(500):
        piece = draw.choice([each for each in update_only.pieces if each.values.numel()])
        element, bit = draw.randrange(piece.values.numel()), draw.randrange(8 * piece.values.element_size())
        flip(piece.values, element, bit)
        assert update_only.find_changes() == [
            DetectedFault("memory", piece.name, "other", (world.rank,), "changed in memory between steps")
        ]
        flip(piece.values, element, bit)
        assert update_only.find_changes() == []
    world.everyone.barrier()
    run.trainer.engine.close()


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_copies_that_part_are_named(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: str
) -> None:
    """A rank whose update went wrong has good fingerprints of it; others have other ones."""
    if axis == "pipeline" and world.size > 2:
        pytest.skip("two stages have the embedding")
    deck = make_deck(world, mpi_tmp_path)
    layout = () if axis == "data" else (f"layout.{axis}={world.size}",)
    keys = (*SHORT, *layout, *(("model.tied=true", "model.family=gpt2") if axis == "pipeline" else ()))
    train(world, deck, "clean", *keys)
    name = "embedding.tokens.weight" if axis == "pipeline" else "final_norm.weight"
    wrong = world.size - 1
    from hpctrain.optim.optimizer import ResidentOptimizer

    step, done = ResidentOptimizer.step, []

    def wrong_step(optimizer: ResidentOptimizer, rate: float, divisor: float) -> None:
        step(optimizer, rate, divisor)
        if optimizer.updates == 6 and not done:
            done.append(True)
            if world.rank == wrong:
                for bucket in optimizer.buckets:
                    for segment, values, _ in bucket.owned_segments(bucket.owned_values):
                        if segment.parameter.shard.name.endswith(name):
                            flip(values, 3, 20)

    with monkeypatch.context() as patch:
        patch.setattr(ResidentOptimizer, "step", wrong_step)
        code, _ = train(world, deck, "wrong", *keys, *CHEAP)
    assert code == 0
    assert_same_end(mpi_tmp_path / "clean", mpi_tmp_path / "wrong")
    found = found_in(mpi_tmp_path / "wrong")
    assert {row["kind"] for row in found} == {"copies"}
    assert any(row["name"].endswith(name) for row in found)
    assert found[0]["ranks"] == ([wrong] if world.size > 2 else [0, 1])


MIXTURE = ("model.experts.count=4", "layout.expert=2")
KEPT_BESIDE: Mapping[str, tuple[str, ...]] = {
    "router/bias": (*MIXTURE, "model.experts.balance=bias"),
    "router/shares": (*MIXTURE, "model.experts.balance=loss", "model.experts.balance_over=step"),
    "fp8/weights": ("precision.compute=fp8", "layout.zero=1"),
    "fp8/inputs": ("precision.compute=fp8", "layout.tensor=2", "layout.sequence_parallel=true"),
    "reducer/q": ("communication.compress=powersgd",),
    "model": (
        "layout.local_steps.replicas=2",
        "layout.local_steps.steps=3",
        "layout.local_steps.outer=diloco",
    ),
    "outer/momentum": (
        "layout.local_steps.replicas=2",
        "layout.local_steps.steps=3",
        "layout.local_steps.outer=diloco",
    ),
}
"""Keys with which ranks have state of a kind in common, besides parameters and what their update needs."""


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", KEPT_BESIDE)
def test_state_beside_parameters_that_parts_is_named(world: World, kind: str) -> None:
    """One rank learns something else of a step than the other, and has good fingerprints of it."""
    every = ("stability.corruption=cheap", "stability.corruption_every=3")
    training = trainer(world, small_deck(*LLAMA, *KEPT_BESIDE[kind], *every))
    training.train(3)
    shared = next(each for each in training.engine.state() if each.kind == kind and not each.per_replica)

    class WrongFirst(Hook):
        def after_step(self, done: StepDone) -> None:
            if done.state.step == 6 and world.rank == 1:
                flip(cast(torch.Tensor, shared.values), 1, 20)

    training.hooks.insert(0, WrongFirst())
    training.train(2)
    with pytest.raises(SilentFaultError) as caught:
        training.train(1)
    assert caught.value.step == 6
    assert [(each.kind, each.name, each.ranks) for each in caught.value.faults] == [
        ("copies", f"{kind}/{shared.shard.name}", (0, 1))
    ]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_rank_with_two_faults_ends_the_job(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck, folder = make_deck(world, mpi_tmp_path), mpi_tmp_path / "flipped"
    train(world, deck, "clean", *SHORT)
    flips = [Flip(step, rank, states, 3, 5, 30, "between") for step, rank in ((3, 0), (6, 1), (10, 1))]
    with monkeypatch.context() as patch:
        Flips(flips).install(patch)
        code, _ = train(world, deck, "flipped", *SHORT, *CHEAP)
    assert code == 75
    if world.rank == 0:
        status = json.loads((folder / "status.json").read_text())
        assert status["reason"].startswith("2 silent faults on rank 1: ")
        assert [(each["rank"], each["faults"]) for each in status["faulty"]] == [(0, 1), (1, 2)]
        assert {each["node"] for each in status["faulty"]} == {world.hostname}
    world.everyone.barrier()
    assert resume(world, folder, []) == 0
    assert_same_end(mpi_tmp_path / "clean", folder)


@pytest.mark.mpi(max_size=1)
def test_half_a_row_of_faults_swallows_no_later_one(world: World, tmp_path: Path) -> None:
    """As a full disk leaves it, or a kill."""
    told: dict[str, Any] = {}
    reporter = SimpleNamespace(status=SimpleNamespace(note=told.update))
    way = SimpleNamespace(trainer=SimpleNamespace(world=world), reporter=reporter)
    fault = DetectedFault("copies", "bias", "step", (0,), "differs")
    for step in (3, 4):
        fault_recovery.FaultRecovery(cast(Rollback, way), tmp_path)._report(
            SilentFaultError(step, [fault], state_unchanged=True)
        )
        with (tmp_path / "faults.jsonl").open("a") as file:
            file.write('{"time": "2026-')
    assert told["silent_faults"] == 1
    assert [row["step"] for row in read_faults(tmp_path / "faults.jsonl")] == [3, 4]


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("disk", [True, False])
def test_without_a_copy_in_memory(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    """The newest checkpoint will do, which was checked before it was written; or the run stops."""
    deck, folder = make_deck(world, mpi_tmp_path), mpi_tmp_path / "flipped"
    keys = (*SHORT, "stability.corruption=cheap", *(("checkpoint.every=4",) if disk else ()))
    train(world, deck, "clean", *keys)
    with monkeypatch.context() as patch:
        Flips([Flip(6, 0, states, 3, 5, 30, "between")]).install(patch)
        code, rows = train(world, deck, "flipped", *keys)
    if disk:
        assert code == 0
        assert_same_end(mpi_tmp_path / "clean", folder)
        return
    assert (code, len(rows)) == (75, 6)
    assert "no valid state to restore" in json.loads((folder / "status.json").read_text())["reason"]
    assert not list((folder / "checkpoints").glob("step-*"))


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_checkpoint_under_way_may_hold_what_changed(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here its thread stores what it has to only after the flip."""
    deck, folder = make_deck(world, mpi_tmp_path), mpi_tmp_path / "flipped"
    background = ("layout.zero=1", "checkpoint.every=3", "checkpoint.mode=background")
    keys = (*SHORT, "stability.corruption=cheap", *background)
    train(world, deck, "clean", *keys)
    changed, write = Flip(6, 1, states, 3, 5, 30, "between"), BackgroundSave._write

    def later(saved: BackgroundSave) -> None:
        while not changed.met and saved.path.name == "step-00000006.h5":
            time.sleep(0.1)
        time.sleep(0.1)
        write(saved)

    with monkeypatch.context() as patch:
        Flips([changed]).install(patch)
        patch.setattr(BackgroundSave, "_write", later)
        code, _ = train(world, deck, "flipped", *keys)
    assert code == 0
    assert_same_end(mpi_tmp_path / "clean", folder)
    assert [(row["step"], row["ranks"]) for row in found_in(folder)] == [(7, [1])]
    if world.rank == 0:
        assert "restored the state after step 3" in (folder / "log.txt").read_text()


@pytest.mark.mpi(max_size=1)
def test_a_copy_that_was_changed_itself_is_passed_over(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck = make_deck(world, mpi_tmp_path)
    keys = (*SHORT, *CHEAP, "checkpoint.every=2")
    train(world, deck, "clean", *keys)

    def spoil(trainer: Any) -> list[tuple[str, torch.Tensor]]:
        from hpctrain.train.checkpoints import Checkpoints

        held = next(hook for hook in trainer.hooks if isinstance(hook, Checkpoints)).snapshots.all[-1]
        flip(held._values[2], 0, 9)
        return states(trainer)

    with monkeypatch.context() as patch:
        Flips([Flip(9, 0, spoil, 3, 5, 30, "between")]).install(patch)
        code, _ = train(world, deck, "flipped", *keys)
    assert code == 0
    assert_same_end(mpi_tmp_path / "clean", mpi_tmp_path / "flipped")
    assert "restored the state after step 8" in (mpi_tmp_path / "flipped" / "log.txt").read_text()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_figures_that_come_wrong_at_one_rank_part_nobody(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck, done = make_deck(world, mpi_tmp_path), []
    train(world, deck, "clean", *SHORT)
    agree = Step.agree

    def wrong(step: Step, sums: torch.Tensor, read: ReadBatches) -> tuple[dict[str, float], list[float]]:
        figures, totals = agree(step, sums, read)
        if step.engine.stage.optimizer.updates == 5 and not done:
            done.append(True)
            if world.rank == 1:
                totals[0] = np.nextafter(totals[0], np.inf)
        return figures, totals

    with monkeypatch.context() as patch:
        patch.setattr(Step, "agree", wrong)
        code, _ = train(world, deck, "wrong", *SHORT, *CHEAP)
    assert code == 0
    assert_same_end(mpi_tmp_path / "clean", mpi_tmp_path / "wrong")
    assert [(row["kind"], row["ranks"]) for row in found_in(mpi_tmp_path / "wrong")] == [("message", [0, 1])]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_is_counted_is_kept_twice(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_recovery, "MAX_FAULTS_OF_RANK", 100)
    deck, keys = make_deck(world, mpi_tmp_path), (*SHORT, "precision.compute=fp16")
    train(world, deck, "clean", *keys)
    make, accumulate = Trainer.train_step, Step.accumulate
    planned = {
        3: ("between", "samples"),
        5: ("between", "step"),
        7: ("within", "step"),
        9: ("within", "samples"),
        11: ("between", "loss_scale"),
        13: ("within", "updates"),
    }

    def change(moment: str, state: Any, engine: Any) -> None:
        if planned.get(state.step, ("",))[0] != moment:
            return
        _, name = planned.pop(state.step)
        if world.rank == 1 and name == "loss_scale":
            engine.control.loss_scale.value *= 2
        elif world.rank == 1:
            at = engine.stage.optimizer if name == "updates" else state
            setattr(at, name, getattr(at, name) ^ 4)

    def train_step(trainer: Trainer, batch: int | None = None) -> Any:
        change("between", trainer.state, trainer.engine)
        return make(trainer, batch)

    def accumulated(step: Step, state: Any, batch: int) -> Any:
        result = accumulate(step, state, batch)
        change("within", state, step.engine)
        return result

    told = [(step + 1, [1], name) for step, (_, name) in planned.items()]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        patch.setattr(Step, "accumulate", accumulated)
        code, _ = train(world, deck, "wrong", *keys, *CHEAP)
    assert (code, planned) == (0, {})
    assert_same_end(mpi_tmp_path / "clean", mpi_tmp_path / "wrong")
    found = found_in(mpi_tmp_path / "wrong")
    assert [(row["step"], row["ranks"], row["name"]) for row in found] == told


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("bit", [0, 1, 40, 63])
def test_an_order_that_comes_wrong_at_one_rank_parts_nobody(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bit: int
) -> None:
    control, reduce = Control(world, mpi_tmp_path, Signals(), str), Group.all_reduce

    def wrong(group: Group, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        result = reduce(group, tensor, *how)
        if world.rank == 1:
            flip(result, random.Random(bit).randrange(len(result)), bit)
        return result

    monkeypatch.setattr(Group, "all_reduce", wrong)
    assert control.agree() == StepDecision()
    if world.rank == 0:
        (mpi_tmp_path / STOP_FILE).touch()
    control._last_check = -np.inf
    order = control.agree()
    assert order.stop and order.checkpoint and "stop exists" in order.reason


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_is_told_wrong_after_an_update_makes_no_step_again(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck = read_deck(make_deck(world, mpi_tmp_path), [*SHORT, f"run.dir={mpi_tmp_path}/run", *CHEAP], 2)
    run = open_run(world, deck)
    guard, gather, done = run.trainer.guard, Group.all_gather, list[int]()
    after_step = guard.after_step  # type: ignore[attr-defined]

    def wrong(group: Group, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        result = gather(group, tensor, *how)
        if len(done) == 1 and tensor.shape == (1, 2):
            done.append(2)
            if world.rank == 1:
                flip(result, 0, 17)
        return result

    def then(step: Any) -> None:
        done.append(1)
        after_step(step)

    guard.after_step = then  # type: ignore[attr-defined]
    monkeypatch.setattr(Group, "all_gather", wrong)
    run.trainer.train_step()
    assert done == [1, 2]
    run.trainer.train_step()
    assert run.trainer.state.step == 2
    run.trainer.engine.close()


@pytest.mark.mpi(max_size=1)
def test_whoever_cannot_heal_fails_with_it(world: World, mpi_tmp_path: Path) -> None:
    deck = read_deck(make_deck(world, mpi_tmp_path), [*SHORT, f"run.dir={mpi_tmp_path}/run", *CHEAP], 1)
    run = open_run(world, deck)
    run.trainer.train_step()
    flip(states(run.trainer)[0][1], 0, 30)
    with pytest.raises(SilentFaultError, match=r"step 2: silent fault on rank 0: model/.* changed in memory"):
        run.trainer.train_step()
    run.trainer.engine.close()


def test_what_a_deck_cannot_have(tmp_path: Path) -> None:
    from tests.train.poisoned import DECK

    path = tmp_path / "deck.toml"
    path.write_text(DECK.format(folder=tmp_path))
    skip, back = "stability.spike=skip", "stability.spike=rollback stability.spike_window=9"
    cases = {
        back: "requires checkpoint.every or checkpoint.memory_every",
        f"{skip} stability.spike_window=200": "must be below run.steps = 120",
        f"{back} checkpoint.every=20": "is longer than the age of the oldest of 2 checkpoints",
        "stability.spike_factor=9.0": 'has no effect without stability.spike = "skip" or "rollback"',
        f"{skip} stability.spike_window=9 stability.spike_back=9": 'without stability.spike = "rollback"',
        "stability.corruption_every=9": 'has no effect without stability.corruption = "cheap" or "full"',
    }
    for keys, words in cases.items():
        with pytest.raises(HpctrainError) as raised:
            read_deck(path, keys.split(), 1)
        assert len(raised.value.problems) == 1, raised.value.problems
        assert words in raised.value.problems[0]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", ["data", "zero-1", "tensor", "pipeline"])
def test_a_full_look_changes_nothing_and_heals_what_arrives_wrong(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """A bit of what comes to rank 1 in its so manieth call, wherever in a step that is."""
    deck, keys = make_deck(world, mpi_tmp_path), keys_of(layout)
    monkeypatch.setattr(corruption, "COMPARISONS_PER_REPETITION", 1)
    full = ("stability.corruption=full", *CHEAP[1:])
    train(world, deck, "clean", *keys)
    train(world, deck, "watched", *keys, *full)
    assert_same_end(mpi_tmp_path / "clean", mpi_tmp_path / "watched")
    assert found_in(mpi_tmp_path / "watched") == []
    wrap = MessageAudit.wrap
    for number in (40, 67):
        wrong = Message(rank=1, number=number, seed=number)

        def flipping(
            audit: MessageAudit, pair: TransportPair, *others: Any, wrong: Message = wrong
        ) -> TransportPair:
            return wrap(audit, (FlippingTransport(pair[0], wrong), pair[1]), *others)

        with monkeypatch.context() as patch:
            patch.setattr(MessageAudit, "wrap", flipping)
            code, _ = train(world, deck, f"wrong-{number}", *keys, *full)
        world.decorate_transports(None)
        assert code == 0
        assert_same_end(mpi_tmp_path / "clean", mpi_tmp_path / f"wrong-{number}")
        found = found_in(mpi_tmp_path / f"wrong-{number}")
        assert {1} <= {rank for row in found for rank in row["ranks"]}
        assert "message" in {row["kind"] for row in found}
        assert len({row["step"] for row in found}) == 1
