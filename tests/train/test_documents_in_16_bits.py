"""Packed documents in bf16 and fp16 through the run's own step, resumed on other layouts, and replayed.

Tests of data.document_mask with precision.compute, a loss scale, recomputation and mixtures of token files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.replay import LOSS_ROUNDING, replay
from hpctrain.train.run import resume, run_deck
from hpctrain.train.run_comparison import compare
from tests.data.preparing import prepare
from tests.engines import LLAMA, by_rank_0, small_deck
from tests.train.test_documents import KEYS, Gradients, expected, make_trainer

RING = ("layout.context=2", "layout.context_form=ring")
ALL_TO_ALL = ("layout.context=2", "layout.context_form=all_to_all")
TENSOR = ("layout.tensor=2", "layout.sequence_parallel=true")
FULL, SELECTIVE = ("memory.recompute=full",), ("memory.recompute=selective",)
LAYOUTS = {
    1: [(), FULL, SELECTIVE],
    2: [
        (),
        (*FULL, "layout.zero=3"),
        (*TENSOR, *FULL),
        (*TENSOR, *SELECTIVE),
        RING,
        (*RING, *FULL),
        (*RING, *SELECTIVE),
        ALL_TO_ALL,
        (*ALL_TO_ALL, *FULL),
        (*ALL_TO_ALL, *SELECTIVE),
        ("layout.pipeline=2", *FULL),
        ("layout.pipeline=2", "layout.schedule=zb-h1", *SELECTIVE),
    ],
}
SCALE = 1024
PRECISIONS = {
    "bf16": ("precision.compute=bf16",),
    "fp16": ("precision.compute=fp16", f"precision.initial_loss_scale={SCALE}"),
}
ALLOWED = {"bf16": 0.03, "fp16": 0.004}  # of a gradient's norm: some roundings of the format


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_are_those_of_separate_documents(world: World, family: str, precision: str) -> None:
    """By plain torch in double precision; what is kept or computed again changes no bit."""
    keys = (*(LLAMA if family == "llama" else ()), *KEYS)
    loss, count, gradients = by_rank_0(world, lambda: expected(world, small_deck(*keys)))
    scale = SCALE if precision == "fp16" else 1
    for layout in LAYOUTS[world.size]:
        trainer = make_trainer(world, small_deck(*keys, *PRECISIONS[precision], *layout))
        found = Gradients(trainer)
        trainer.hooks.append(found)
        result = trainer.train_step()
        assert result.tokens == count and not result.skipped, layout
        assert abs(result.loss - loss) <= 1e-3 * loss, layout
        assert found.pieces
        for shard, piece in found.pieces:
            if shard.name.endswith("key.bias"):  # which softmax does not see
                continue
            right = shard.take(gradients[shard.name].view(shard.shape)).reshape(-1)
            difference = piece.double().view(-1) / scale - right
            assert difference.norm() <= ALLOWED[precision] * right.norm(), (layout, shard.name)
        trainer.engine.close()


DECK = """
[run]
title = "packed"
seed = 3
steps = 6
evaluate_every = 3
evaluate_sequences = 4
[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
initial_std = 0.1
[data]
validation = 0.1
document_mask = true
[[data.mixture]]
tokens = "a.h5"
weight = 5
[[data.mixture]]
tokens = ["b.h5", "c.h5"]
weight = 3
[batch]
global_size = 8
micro_size = 2
sequence = 32
[learning_rate]
peak = 3e-2
warmup = 0
decay = "constant"
[checkpoint]
every = 3
keep = 9
[machine]
peak_flops = 1e10
"""
TEXTS = {"a": "the quick brown fox\n", "b": "jumps over\n", "c": "the lazy dog, "}
OTHERS = {1: [FULL], 2: [(*TENSOR, *SELECTIVE), (*RING, *FULL), ALL_TO_ALL, ("layout.pipeline=2", *FULL)]}


@pytest.fixture
def work(world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a deck and the files of its mixture, of short documents, in which ranks work."""
    monkeypatch.chdir(mpi_tmp_path)
    names = {name: [f"{name}{n}.txt" for n in range(40)] for name in TEXTS}
    if world.rank == 0:
        for name, text in TEXTS.items():
            for number, file in enumerate(names[name]):
                Path(file).write_text(text * (1 + number % 4))
        Path("deck.toml").write_text(DECK)
    world.everyone.barrier()
    for name, files in names.items():
        prepare(world, Path(f"{name}.h5"), files)
    return mpi_tmp_path


def rows_of(folder: str) -> list[tuple[int, float, float]]:
    """Tokens so far and losses of each step of a run."""
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    return [(row["tokens"], row["loss"], row.get("validation_loss", 0.0)) for row in rows]


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_runs_go_on_on_other_layouts_and_are_replayed(world: World, work: Path, precision: str) -> None:
    """Of a packed mixture, whose losses are others where documents see each other."""
    deck, keys = Path("deck.toml"), PRECISIONS[precision]
    assert run_deck(world, deck, ["run.dir=whole", *keys]) == 0
    assert run_deck(world, deck, ["run.dir=seen", *keys, "data.document_mask=false"]) == 0
    whole, path = rows_of("whole"), Path("whole/checkpoints/step-00000003.h5")
    seen = rows_of("seen")
    assert whole[-1][0] < 6 * 256 == seen[-1][0]  # ends of documents predict nothing
    assert abs(whole[-1][1] - seen[-1][1]) > 4 * LOSS_ROUNDING[precision] * whole[-1][1]
    others = OTHERS[world.size]
    turn = others if len(others) == 1 else others[list(PRECISIONS).index(precision) :: 2]
    for number, layout in enumerate(turn):
        folder = f"other-{number}"
        assert resume(world, path, [f"run.dir={folder}", *layout]) == 0
        for mine, right in zip(rows_of(folder), whole[3:], strict=True):
            assert mine == pytest.approx(right, rel=LOSS_ROUNDING[precision]), layout
        assert replay(world, path, None, list(layout), None, lambda _: None) == 0
        assert compare(world, (Path(folder), Path("whole")), None, True, lambda _: None) == 0
    assert replay(world, path, None, ["data.document_mask=false"], None, lambda _: None) == 1
