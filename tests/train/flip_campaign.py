"""Single bits that are flipped in runs, of every kind and anywhere: found, located, and nothing left of them.

`mpirun -n 2 python -m tests.train.flip_campaign FOLDER --flips 500` prints a table, and ends with 1 where one
was missed. A run has many flips, each in a segment of three steps, at whose end the state is compared with
that of a run which nothing happened to; where a flip that is lost in rounding has left anything, that is put
right for the next one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.state_snapshots import StateSnapshot
from hpctrain.comm.world import World
from hpctrain.plan import engine as planned
from hpctrain.sharding.bucket import Bucket
from hpctrain.text import table
from hpctrain.train import fault_recovery
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.layout_verification import NOISE_STD
from hpctrain.train.training_loop import Loop
from tests.train.flipped_bits import MOMENTS, Campaign, Planted
from tests.train.poisoned import make_deck, train

SEGMENT = 3
"""Steps; the first of them has no flip."""

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "data": (),
    "zero-1": ("layout.zero=1", "model.family=gpt2", "model.tied=true"),
    "zero-3": ("layout.zero=3", "communication.transport=mpi"),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "pipeline": ("layout.pipeline=2", "layout.schedule=zb-h1", "model.tied=true"),
}
FORMATS = ("fp32", "bf16")
COMMON = (
    "learning_rate.warmup=2",
    "learning_rate.decay_steps=200",
    "model.initial_std=0.1",
    "model.hidden=16",
    "model.heads=2",
    "data.validation=0",
    "run.evaluate_every=0",
    "batch.global_size=8",
    "batch.micro_size=2",
    "batch.sequence=16",
    "machine.products=library",
    "run.log_every=1000",
    'communication.bucket_bytes="6 kB"',
)
LOOKS: Mapping[str, tuple[str, ...]] = {
    "cheap": ("parameter", "moment", "gradient", "sum"),
    "full": ("message", "product"),
}
"""What is planted under each. A "sum" is a message of a reduction, beyond the 500."""

COUNTED = ("parameter", "moment", "gradient", "message", "product")


def whole_values(buckets: Sequence[Bucket]) -> list[Tensor]:
    """Each parameter's values in whole buckets, those that other ranks update, too."""
    return [
        values
        for bucket in buckets
        if bucket.values is not None
        for _, values, _ in bucket.segments_within(bucket.values, slice(0, bucket.length))
    ]


class End:
    """All of the state at the end of a segment: what is stored of it, and the weights of other ranks here."""

    def __init__(self, loop: Loop) -> None:
        engine, state = loop.trainer.engine, loop.trainer.state
        self.held, self.state = StateSnapshot(state.step, loop.checkpoints.stored(state)), replace(state)
        self.held.take(engine.state())
        self.whole = [values.clone() for values in whole_values(engine.stage.buckets)]

    def same(self, other: End) -> bool:
        """Whether no bit of another one differs."""
        mine, theirs = ([*each.held._values, *each.whole] for each in (self, other))
        return self.state == other.state and all(
            torch.equal(one.view(torch.uint8), two.view(torch.uint8))
            for one, two in zip(mine, theirs, strict=True)
        )

    def give_back(self, loop: Loop) -> None:
        """Have a run go on from it, as if it had never been in another state. Collective."""
        loop.checkpoints.restore_snapshot(self.held)
        for values, clean in zip(whole_values(loop.trainer.engine.stage.buckets), self.whole, strict=True):
            values.copy_(clean)
        loop.trainer.world.communicator.barrier()
        loop.checkpoints.snapshots.discard_after(-1)
        loop.trainer.guard.discard_fingerprints()


class Comparison(Hook):
    """At the end of segments: whether all is as in the run that nothing happened to, of which it has `ends`.

    Without any, it makes them of its own run. `same` tells of each end what came out.
    """

    def __init__(self, ends: dict[int, End]) -> None:
        self.makes, self.ends = not ends, ends
        self.same: dict[int, bool] = {}
        self.loop: Loop | None = None

    def watch(self, loop: Loop) -> None:
        """Come last after each step of a run."""
        self.loop = loop
        loop.trainer.hooks.append(self)

    def after_step(self, done: StepDone) -> None:
        """Compare, and put right."""
        step, loop = done.state.step, self.loop
        assert loop is not None
        if step % SEGMENT or step in self.same:
            return
        if self.makes:
            self.ends[step] = End(loop)
            return
        same = self.ends[step].same(End(loop))
        self.same[step] = all(loop.trainer.world.communicator.allgather(same))
        if not self.same[step]:
            self.ends[step].give_back(loop)


def planned_flips(kinds: Sequence[str], each: int, draw: random.Random) -> list[Planted]:
    """So many of each kind, in random order, one in a segment."""
    order = [kind for kind in kinds for _ in range(each)]
    draw.shuffle(order)
    return [
        Planted(
            kind,
            (number + 1) * SEGMENT + draw.randrange(1, SEGMENT),
            draw.randrange(2),
            draw.choice(MOMENTS[kind]),
            (draw.random(), draw.random(), draw.random()),
        )
        for number, kind in enumerate(order)
    ]


@dataclass
class Count:
    """Of one kind, how many flips were planted, and what became of them."""

    planted: int = 0
    happened: int = 0
    above: int = 0
    found: int = 0
    of_above: int = 0
    located: int = 0
    healed: int = 0

    def row(self, name: str) -> list[str]:
        return [name, *map(str, vars(self).values())]


HEAD = ["", "planted", "happened", "above rounding", "found", "of those above", "located", "healed"]


def located(each: Planted, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what was found says where that flip was, and of no other place."""
    step, exact = each.step + 1, each.kind in {"parameter", "moment", "gradient", "product"}
    if exact and not all(row["ranks"] == [each.rank] and row["step"] == step for row in rows):
        return False
    if each.kind == "sum":
        return all(each.rank in row["ranks"] for row in rows)
    if not all(each.rank in row["ranks"] for row in rows):
        return False
    return any(
        row["ranks"] == [each.rank] and row["name"] in each.names and row["phase"] == each.phase
        for row in rows
    )


def flipped(
    world: World, deck: Path, name: str, keys: Sequence[str], each: int, counts: dict[str, Count]
) -> Iterator[str]:
    """What went wrong with the flips of one layout, in words; what did not is counted. Collective."""
    most = max(each * len(kinds) for kinds in LOOKS.values())
    ends: dict[int, End] = {}
    losses: dict[str, dict[int, float]] = {}
    for look, kinds in {"clean": (), **LOOKS}.items():
        flips = planned_flips(kinds, each, random.Random(f"{name} {look}"))
        steps = (most + 1) * SEGMENT + 1 if look == "clean" else (len(flips) + 1) * SEGMENT + 1
        looks = [] if look == "clean" else [f"stability.corruption={look}", "stability.corruption_every=4"]
        comparison = Comparison(ends)
        campaign = Campaign(flips, world.rank, look == "cheap", comparison.watch)
        with pytest.MonkeyPatch.context() as patch:
            campaign.install(patch)
            looks += ["checkpoint.memory_every=4"] if looks else []
            own = f"{name}-{look}"
            code, metrics = train(world, deck, own, *keys, f"run.steps={steps}", *looks)
        losses[look] = {row["step"]: row["loss"] for row in metrics}
        if code:
            yield f"{name}-{look} ends with {code}"
            continue
        if look == "clean":
            continue
        path = deck.parent / f"{name}-{look}" / "faults.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        of_ranks = world.communicator.allgather(flips)
        for number, planted in enumerate(flips):
            yield from judged(of_ranks[planted.rank][number], rows, comparison.same, counts, f"{name}-{look}")
        yield from (f"{name}-{look}: a false alarm, {row}" for row in rows)
        for step, one in losses[look].items():
            other = losses["clean"][step]
            if one != other and comparison.same.get(-(-step // SEGMENT) * SEGMENT, True):
                yield f"{name}-{look}: the loss of step {step} is {one}, and {other} without flips"
        if len(losses[look]) != steps:
            yield f"{name}-{look}: {len(losses[look])} of {steps} steps were written down"
    world.decorate_transports(None)


def judged(
    each: Planted, rows: list[dict[str, Any]], same: Mapping[int, bool], counts: dict[str, Count], name: str
) -> Iterator[str]:
    """Count what became of a flip, and take what was found of it from the rows of all."""
    step = each.step + 1
    mine = [row for row in rows if row["step"] in {step, step + 1}]
    rows[:] = [row for row in rows if row not in mine]
    count, what = counts[each.kind], f"{name}: {each}"
    healed = same[-(-step // SEGMENT) * SEGMENT]
    count.planted += 1
    if not each.happened:
        if mine or not healed:
            yield f"{what} did not happen, and yet {mine}"
        return
    count.happened += 1
    count.above += each.above
    count.found += bool(mine)
    count.of_above += bool(mine) and each.above
    count.located += bool(mine) and located(each, mine)
    count.healed += bool(mine) and healed
    if each.above and not mine:
        yield f"{what} was not found"
    if mine and not located(each, mine):
        yield f"{what} was found elsewhere: {mine}"
    if mine and not healed:
        yield f"{what} has left something"


def main() -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flips", type=int, default=500, help="of all layouts, formats and kinds together")
    parser.add_argument("--only", default="", help="those with this in their names")
    given = parser.parse_args()
    world = World.start("cpu")
    deck = make_deck(world, given.folder)
    each = given.flips // (len(LAYOUTS) * len(FORMATS) * len(COUNTED))
    counts = {kind: Count() for kind in MOMENTS}
    wrong: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "assemble", partial(planned.assemble, noise_std=NOISE_STD))
        patch.setattr(fault_recovery, "MAX_FAULTS_OF_RANK", 10**6)
        patch.setattr(fault_recovery, "MAX_FAULTS", 10**6)
        for layout, own in LAYOUTS.items():
            for form in FORMATS:
                name, keys = f"{layout}-{form}", (*COMMON, *own, f"precision.compute={form}")
                if given.only in name:
                    wrong += flipped(world, deck, name, keys, each, counts)
    if world.rank == 0:
        print("", *wrong, *table([HEAD, *(count.row(kind) for kind, count in counts.items())]), sep="\n")
    beyond = [line for line in wrong if "kind='product'" not in line or "was not found" not in line]
    seen = counts["product"].of_above >= 0.95 * counts["product"].above
    return world.finish(1 if beyond or not seen else 0)


if __name__ == "__main__":
    raise SystemExit(main())
