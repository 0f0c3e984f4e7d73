"""Whole runs of reward models: what they learn, going on elsewhere, evaluation, and what they are not for.

Tests of [objective] kind = "reward" from prepare to evaluate.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.generate.generation_model import load
from hpctrain.generate.model_loading import load_model
from hpctrain.post.task import evaluate_task
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.evaluate import EvaluationData, evaluate
from hpctrain.train.run import resume, run_deck
from tests.data.chats import write_rows
from tests.data.preparing import prepare, prepare_rows

DECK = """
[run]
title = "reward"
steps = 60
evaluate_every = 30
evaluate_sequences = 200
dir = "{folder}/run"
[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
[data]
tokens = "{folder}/pairs.h5"
validation = 0.2
[objective]
kind = "reward"
centering = 0.01
[batch]
global_size = 64
micro_size = 8
sequence = 24
[learning_rate]
peak = 1e-2
warmup = 4
[checkpoint]
every = 0
[machine]
peak_flops = 1e10
"""


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Answers of random letters; the one with more of b is preferred."""
    draw, rows = random.Random(seed), list[dict[str, Any]]()
    while len(rows) < count:
        answers = []
        for _ in range(2):
            share = draw.choice([0.2, 0.4, 0.6, 0.8])
            letters = (
                "b" if draw.random() < share else draw.choice("acd") for _ in range(draw.randrange(4, 14))
            )
            answers.append("".join(letters))
        answers.sort(key=lambda text: -text.count("b"))
        if answers[0].count("b") > answers[1].count("b"):
            rows.append(
                {"prompt": "xyz"[: draw.randrange(1, 4)], "chosen": answers[0], "rejected": answers[1]}
            )
    return rows


@pytest.fixture
def folder(world: World, mpi_tmp_path: Path) -> Path:
    """A deck, and files of pairs to train on and others, of bytes."""
    for name, count in (("pairs", 800), ("others", 100)):
        if world.rank == 0:
            source = write_rows(mpi_tmp_path / f"{name}.jsonl", pairs(count, len(name)))
            prepare_rows(
                world.single_rank_world(),
                mpi_tmp_path / f"{name}.h5",
                [source],
                kind="preferences",
                template="raw",
            )
    if world.rank == 0:
        (mpi_tmp_path / "deck.toml").write_text(DECK.format(folder=mpi_tmp_path))
    world.everyone.barrier()
    return mpi_tmp_path


def told(world: World, run: Path, files: Sequence[Path], *overrides: str) -> Any:
    """What `evaluate` tells, on all ranks."""
    shown: list[str] = []
    evaluate(world, run, EvaluationData(files), overrides, True, shown.append, lambda _: None)
    return world.everyone.broadcast_object(json.loads(shown[0]) if shown else None)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_is_preferred_is_learned(world: World, folder: Path) -> None:
    """Of pairs that were not trained on nearly all are told apart, by the run and by `evaluate` alike."""
    run_deck(world, folder / "deck.toml", ["layout.zero=1"] if world.size > 1 else [])
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert rows[0]["accuracy"] < 0.8
    assert rows[-1]["validation_accuracy"] >= 0.95
    assert rows[-1]["validation_margin"] == pytest.approx(
        rows[-1]["validation_chosen"] - rows[-1]["validation_rejected"]
    )
    layouts = [()] if world.size == 1 else [("layout.tensor=2", "layout.zero=0"), ("layout.pipeline=2",)]
    found = []
    for layout in layouts:
        [figures] = told(world, folder / "run", [folder / "others.h5"], *layout)["evaluations"]
        assert figures["sequences"] == 200 and figures["accuracy"] >= 0.95 and "predicted" not in figures
        assert figures["loss"] < 0.3
        found.append(figures)
    assert found[0] == {**found[-1], **{name: pytest.approx(found[-1][name], rel=1e-4) for name in _FIGURES}}

    with pytest.raises(
        HpctrainError, match=r"step-00000060.h5: is a reward model, which computes scores and"
    ):
        load_model(world, folder / "run" / "checkpoints" / "step-00000060.h5")
    if world.rank == 0:
        (folder / "task.jsonl").write_text('{"prompt": "a", "answer": "b", "choices": ["b", "c"]}\n')
    world.everyone.barrier()
    with pytest.raises(HpctrainError, match="is a reward model"):
        evaluate_task(world, folder / "run", [folder / "task.jsonl"], (), False, print, print)
    if world.size == 1:
        with pytest.raises(HpctrainError, match="is a reward model"):
            load(folder / "run")


@pytest.mark.mpi(max_size=1)
def test_what_is_refused_at_the_start(world: World, folder: Path) -> None:
    (folder / "text.txt").write_text("some text " * 200)
    prepare(world, folder / "text.h5", [str(folder / "text.txt")])
    learns = r'text.h5 holds text, but objective.kind = "reward" requires preferences'
    with pytest.raises(HpctrainError, match=learns):
        run_deck(world, folder / "deck.toml", [f"data.tokens={folder}/text.h5"])
    rows = [{**row, "margin": "large"} for row in pairs(10, 1)]
    source = write_rows(folder / "wrong.jsonl", rows)
    prepare_rows(world, folder / "wrong.h5", [source], kind="preferences", template="raw")
    with pytest.raises(HpctrainError, match=r'wrong.h5: pair 1 has margin = "large": must be a number'):
        run_deck(world, folder / "deck.toml", [f"data.tokens={folder}/wrong.h5"])
    with pytest.raises(HpctrainError, match=r"objective.kind = .*: conflicts with model.module = "):
        run_deck(world, folder / "deck.toml", ["model.module=x.py:X"])
    run_deck(world, folder / "deck.toml", ["run.steps=1", "run.evaluate_every=0"])
    with pytest.raises(HpctrainError, match=r'=next-token: .* was trained with "reward", and another'):
        resume(world, folder / "run", ["run.steps=2", "objective.kind=next-token", "objective.centering=0"])
    with pytest.raises(HpctrainError, match=r"--sequences 5: must be even, as a pair of answers"):
        evaluate(world, folder / "run", EvaluationData([folder / "others.h5"], 5), (), True, print, print)


_FIGURES = ("loss", "margin", "chosen", "rejected")


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_run_goes_on_in_another_layout(world: World, folder: Path) -> None:
    keys = ["run.evaluate_every=0", "run.steps=4", "learning_rate.decay_steps=8"]
    # Adam moves what has next to no gradient by the sign of rounding, which another layout has otherwise.
    keys += ["optimizer.name=sgd", "optimizer.sgd.momentum=0.9", "learning_rate.peak=0.05"]
    run_deck(world, folder / "deck.toml", [*keys, "run.steps=8", f"run.dir={folder}/whole"])
    expected = read_metrics(folder / "whole" / "metrics.jsonl")
    layouts = [("layout.pipeline=2",), ("layout.tensor=2", "layout.sequence_parallel=true")]
    for number, layout in enumerate(layouts):
        run = folder / f"run{number}"
        run_deck(world, folder / "deck.toml", [*keys, f"run.dir={run}", *layout])
        whole = [
            f"{key.partition('=')[0]}={usual}" for key, usual in zip(layout, ("1", "false"), strict=False)
        ]
        resume(world, run, ["run.steps=8", "layout.context=2", *whole])
        rows = read_metrics(run / "metrics.jsonl")
        for name in ("loss", "margin", "grad_norm"):
            got, wanted = ([row[name] for row in each] for each in (rows, expected))
            assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5), (layout, name)
