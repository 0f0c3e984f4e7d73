"""Steps of which nothing is wrong, looked at in full: ten layouts, fp32 and bf16, each beside one unguarded.

`mpirun -n 2 python -m tests.train.clean_steps FOLDER --steps 20000` ends with 1 where a check found anything
or a bit of a run's end, or of a loss, is another one with its guard.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.plan import engine as planned
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import corruption
from hpctrain.train.layout_verification import NOISE_STD
from tests.train.poisoned import make_deck, train
from tests.train.test_run import contents

FORMATS = ("fp32", "bf16")
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "data": ("optimizer.clip=0.1",),
    "zero-1": ("layout.zero=1", "memory.recompute=full"),
    "zero-2": ("layout.zero=2", "memory.accumulate=sliced", "batch.micro_size=1", "optimizer.name=lion"),
    "zero-3": ("layout.zero=3", "communication.transport=mpi", "learning_rate.peak=0.3"),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true", "learning_rate.peak=0.1"),
    "muon": ("layout.tensor=2", "optimizer.name=muon", 'optimizer.muon.matrices=["blocks.*"]'),
    "pipeline": ("layout.pipeline=2", "model.layers=2", "layout.schedule=zb-h1", "model.tied=true"),
    "chunks": ("layout.pipeline=2", "layout.chunks=2", "layout.schedule=interleaved", "model.layers=4"),
    "context": ("layout.context=2", "layout.zero=1", "model.family=gpt2", "model.heads=4"),
    "experts": ("model.experts.count=4", "layout.expert=2", "layout.zero=2", "model.experts.balance=bias"),
}
COMMON = (
    "learning_rate.peak=3e-2",  # high enough for losses to go up and down
    "learning_rate.warmup=10",
    "optimizer.clip=1.0",
    "model.initial_std=0.1",
    "data.validation=0",
    "run.evaluate_every=0",
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "batch.global_size=4",
    "batch.micro_size=2",
    "batch.sequence=16",
    "run.log_every=1000",
)
LOOKS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "full": (1, ("stability.corruption=full", "stability.corruption_every=5", "checkpoint.memory_every=20")),
    "cheap": (4, ("stability.corruption=cheap", "stability.corruption_every=5")),
}
"""Of so many steps one is looked at so."""


def compared(world: World, deck: Path, name: str, keys: tuple[str, ...], steps: int) -> Iterator[str]:
    """What is wrong of a layout's runs with a guard, in words."""
    folder = deck.parent
    keeps = f"checkpoint.every={steps // max(share for share, _ in LOOKS.values())}", "checkpoint.keep=100"
    code, rows = train(world, deck, name, *keys, f"run.steps={steps}", *keeps)
    assert code == 0, f"{name} ends with {code} by itself"
    losses = [row["loss"] for row in rows]
    assert len(losses) == steps and np.isfinite(losses).all()
    first, best = np.mean(losses[:10]), min(losses)
    norms = [row["grad_norm"] for row in rows]
    if world.rank == 0:
        print(
            f"{name}: loss {first:.2f} to {best:.2f}, norm {min(norms):.1e} to {max(norms):.1e}", flush=True
        )
    if not best < 0.8 * first:
        yield f"{name}: its loss goes from {first} to {best} only"
    for look, (share, more) in LOOKS.items():
        began, own, many = monotonic(), f"{name}-{look}", steps // share
        code, _ = train(world, deck, own, *keys, f"run.steps={many}", *more)
        seconds = monotonic() - began
        faults = folder / own / "faults.jsonl"
        found = list(map(json.loads, faults.read_text().splitlines())) if faults.exists() else []
        if world.rank == 0:
            print(f"{own}: {many} steps, {len(found)} faults, {seconds:.0f} s", flush=True)
        if code or found:
            yield f"{own} ends with {code}, and has found {found[:3]}"
        if [row["loss"] for row in read_metrics(folder / own / "metrics.jsonl")] != losses[:many]:
            yield f"{own}: losses are others"
        last = f"step-{many:08d}.h5"
        one, other = (contents(folder / each / "checkpoints" / last) for each in (name, own))
        if one.keys() != other.keys() or not all(np.array_equal(one[key], other[key]) for key in one):
            yield f"{own} does not end with the same bits"
    world.decorate_transports(None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20_000, help="of all layouts and formats together")
    parser.add_argument("--only", default="", help="those with this in their names")
    given = parser.parse_args()
    world = World.start("cpu")
    deck = make_deck(world, given.folder)
    steps = given.steps // (len(LAYOUTS) * len(FORMATS))
    wrong: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        # No two tensors are alike at the start; what neighbours compute, too, is looked at more often.
        patch.setattr(planned, "assemble", partial(planned.assemble, noise_std=NOISE_STD))
        patch.setattr(corruption, "COMPARISONS_PER_REPETITION", 2)
        for layout, own in LAYOUTS.items():
            for form in FORMATS:
                if given.only in f"{layout}-{form}":
                    keys = (*COMMON, *own, f"precision.compute={form}", f"learning_rate.decay_steps={steps}")
                    wrong += compared(world, deck, f"{layout}-{form}", keys, steps)
    if world.rank == 0:
        print(*wrong, f"{len(wrong)} wrong", sep="\n", flush=True)
    return world.finish(1 if wrong else 0)


if __name__ == "__main__":
    sys.exit(main())
