"""`hpctrain evaluate` finds what a run found, on any layout; what it refuses.

Tests of train/evaluate.py and train/inference_engine.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.cli.evaluate import command
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import evaluate as module
from hpctrain.train import inference_engine
from hpctrain.train.evaluate import EvaluationData, evaluate
from hpctrain.train.run import run_deck
from tests.data.preparing import prepare
from tests.generate.test_text_model import MIXTURE, make_checkpoint
from tests.train.test_evaluation import write_deck

KEYS = ("run.steps=2", "run.evaluate_every=0", "model.layers=2", "checkpoint.every=0")
LAYOUTS = {
    "as it was": (),
    "tensor": ("layout.tensor=2", "layout.pipeline=1", "layout.zero=0"),
    "pipeline": ("layout.pipeline=2", "layout.zero=0"),
    "context": ("layout.context=2", "layout.zero=0"),
    "zero 3": ("layout.zero=3",),
}


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its token files, made on all ranks."""
    folder: Path = world.everyone.broadcast_object(tmp_path_factory.mktemp("evaluate"))
    layout = ["layout.zero=3"] if world.size == 2 else []
    run_deck(world, write_deck(world, folder), [f"run.dir={folder / 'run'}", *KEYS, *layout])
    return folder / "run"


def told(world: World, run: Path, files: list[Path], *overrides: str, sequences: int | None = 3) -> Any:
    """What JSON tells, on all ranks."""
    shown: list[str] = []
    evaluate(world, run, EvaluationData(files, sequences), overrides, True, shown.append, lambda _: None)
    return world.everyone.broadcast_object(json.loads(shown[0]) if shown else None)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_finds_what_the_run_found(world: World, run: Path, layout: str) -> None:
    row = read_metrics(run / "metrics.jsonl")[-1]
    found = told(world, run, [run.parent / "b.h5"], *(LAYOUTS[layout] if world.size == 2 else ()))
    [figures] = found["evaluations"]
    assert (found["step"], found["ranks"], figures["sequences"], figures["predicted"]) == (
        2,
        world.size,
        3,
        96,
    )
    assert figures["loss"] == pytest.approx(row["evaluation/other"], abs=1e-6)
    assert figures["perplexity"] == pytest.approx(row["evaluation/other/perplexity"], rel=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(row["evaluation/other/bits_per_byte"], abs=1e-6)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_in_parts_it_finds_the_same(
    world: World, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [run.parent / "a.h5", run.parent / "b.h5"]
    whole = told(world, run, files, sequences=None)["evaluations"]
    monkeypatch.setattr(module, "MICRO_BATCHES", 2)
    parts = told(world, run, files, sequences=None)["evaluations"]
    for one, other in zip(whole, parts, strict=True):
        assert one["sequences"] == other["sequences"] > 10
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-7)
    shown: list[str] = []
    evaluate(
        world,
        run / "checkpoints" / "latest",
        EvaluationData(files, 5),
        (),
        False,
        shown.append,
        lambda _: None,
    )
    if world.rank == 0:
        head, first, second, _, where = shown[0].splitlines()
        assert " ".join(head.split()) == "token file sequences target tokens loss perplexity bits/byte"
        assert first.split()[1:3] == second.split()[1:3] == ["5", "160"]
        assert where.startswith(f"{run / 'checkpoints' / 'latest'}, step 2, on pipeline 1 x ")


@pytest.mark.mpi(max_size=1)
def test_an_imported_model_has_no_step(world: World, run: Path, mpi_tmp_path: Path) -> None:
    checkpoint, folder, imported = run / "checkpoints" / "latest", mpi_tmp_path / "hf", mpi_tmp_path / "m.h5"
    export_model(world, checkpoint, folder, None, 1 << 30)
    import_model(world, folder, imported)
    shown: list[str] = []
    data = EvaluationData([run.parent / "b.h5"], 3)
    evaluate(world, imported, data, (), False, shown.append, lambda _: None)
    assert shown[0].splitlines()[-1].startswith(f"{imported}, on pipeline 1 x ")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_layout_that_does_not_fit_makes_data_ranks(world: World, run: Path) -> None:
    state = read_state(run / "checkpoints" / "step-00000002.h5")
    path = Path("x.h5")
    deck = module.evaluation_deck(
        state | {"deck": state["deck"].replace("\ntensor = 1\n", "\ntensor = 2\n")}, path, (), 3
    )
    assert deck.layout.tensor == 1
    with pytest.raises(HpctrainError, match="must divide the number of ranks, 3"):
        module.evaluation_deck(state, path, ["layout.tensor=2"], 3)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_it_refuses(world: World, run: Path) -> None:
    folder = run.parent
    if world.rank == 0:
        (folder / "short.txt").write_text("too short")
    world.everyone.barrier()
    prepare(world, folder / "short.h5", [str(folder / "short.txt")])
    prepare(world, folder / "bpe.h5", [str(folder / "a.txt")], train_bpe=270)
    wrong: list[tuple[list[Path], int | None, tuple[str, ...], str]] = [
        ([folder / "short.h5", folder / "bpe.h5"], None, (), "has 10 tokens, but requires at least 33"),
        ([folder / "bpe.h5"], None, (), "its tokenizer differs from that of the training data"),
        ([folder / "none.h5"], None, (), "no such file"),
        ([folder / "a.h5"], 0, (), "--sequences 0: must be at least 1"),
        ([folder / "a.h5"] * 2, None, (), "a file is named twice"),
        ([folder / "a.h5"], None, ("layout.tensor=5",), "layout.tensor=5: must"),
        ([folder / "a.h5"], None, ("layout.tensr=2",), "unknown key"),
    ]
    for files, sequences, overrides, sentence in wrong:
        with pytest.raises(HpctrainError) as caught:
            evaluate(world, run, EvaluationData(files, sequences), overrides, True, print, print)
        assert any(sentence in problem for problem in caught.value.problems), caught.value.problems
    with pytest.raises(HpctrainError, match="no such run folder or checkpoint"):
        evaluate(world, folder / "nowhere", EvaluationData([folder / "a.h5"]), (), True, print, print)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "layout",
    [
        (*MIXTURE, "layout.expert=2"),
        (*MIXTURE, "layout.expert=2", "layout.zero=3"),
        ("layout.tensor=2",),
        ("layout.zero=3",),
    ],
)
def test_ranks_ask_for_as_much_memory_as_they_hold(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[str, ...]
) -> None:
    """Experts, too, of which each rank has some."""
    asked: list[int] = []
    monkeypatch.setattr(inference_engine, "resident_bytes", lambda: 0)
    monkeypatch.setattr(inference_engine, "require_memory", lambda *given: asked.append(given[3]))
    make_checkpoint(world, mpi_tmp_path / "a.h5", *layout)
    deck = stored_deck(read_state(mpi_tmp_path / "a.h5"), mpi_tmp_path / "a.h5")
    engine = inference_engine.load_inference_engine(mpi_tmp_path / "a.h5", deck, world)
    held = sum(bucket.owned_values.nbytes for bucket in engine.stage.buckets)
    assert asked == [pytest.approx(held, rel=0.1)]


def test_the_verb_wants_tokens() -> None:
    result = CliRunner().invoke(command, ["x.h5"])
    assert result.exit_code == 2
    assert "exactly one of --tokens FILE and --task FILE is required" in result.output
