"""The choice of kernels: the same on all ranks, kept, stored, taken over; what it computes. Also of
`engine/choices/deck_kernels.py` and `host/processor.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import value_bytes
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.runtime_choices import RuntimeChoices
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.choices import kernel_choice as module
from hpctrain.engine.choices.kernel_choice import choose_kernels, with_cached_kernels
from hpctrain.engine.layout.engine_spec import make_engine_spec
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.host.processor import processor_identity, processor_name
from hpctrain.model.part import converted_bytes
from hpctrain.parallel.kernels.choice_cache import cache_file, read_cache, write_cache
from hpctrain.parallel.kernels.matmul_kernels import KERNELS, KernelTable, OneDnn
from hpctrain.parallel.kernels.timing import MEASUREMENT, MatmulPass
from hpctrain.plan.engine import build_within_memory
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.server_plan import build_role_within_memory
from hpctrain.train.run import resume
from hpctrain.train.scaled_down_deck import scale_down_family
from hpctrain.train.stored_choices import with_stored_choices
from tests.engine.choices.text_runs import TextRuns
from tests.engines import LLAMA, Trainer, small_deck, trainer

QUICK_FORWARD = {"forward": {"library": 1.0, "onednn": 0.5}}


class Measuring:
    """Stands in for measurements: seconds by pass and kernel, else a second each; and what was asked for."""

    def __init__(self, seconds: dict[str, dict[str, float]]) -> None:
        self.seconds, self.asked = seconds, list[MatmulPass]()

    def __call__(
        self, wanted: Sequence[MatmulPass], storage: torch.dtype, gradient: torch.dtype, together: Callable
    ) -> list[dict[str, float]]:
        together(1.0)
        self.asked += wanted
        names = [kernel.name for kernel in KERNELS.values() if kernel.is_available(storage)]
        return [{name: self.seconds.get(each.kind, {}).get(name, 1.0) for name in names} for each in wanted]


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path) -> Measuring:
    """Products of any size are chosen for, by seconds that a test gives; nothing is kept yet."""
    monkeypatch.setattr("hpctrain.engine.choices.measured_products.LEAST_FLOPS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(mpi_tmp_path / "cache"))
    found = Measuring(QUICK_FORWARD)
    monkeypatch.setattr(module, "measure", found)
    return found


def chosen(world: World, *overrides: str, before: object = None) -> KernelTable:
    deck = small_deck(*overrides)
    deck, mesh = with_stored_choices(deck, deck, {"products": before}, Path()), make_mesh(deck, world)
    return make_engine_spec(choose_kernels(deck, world, mesh), world, mesh).layer_context.products.kernels


@pytest.mark.mpi(max_size=1)
def test_small_products_gpus_and_8_bits_are_left_as_they_are(
    world: World, monkeypatch: pytest.MonkeyPatch, measuring: Measuring
) -> None:
    assert not chosen(world, "precision.compute=fp8").chosen
    assert not chosen(world, "machine.products=library").chosen
    monkeypatch.undo()
    assert not chosen(world).chosen
    assert not measuring.asked


@pytest.mark.mpi(max_size=1)
def test_every_product_of_a_micro_batch_is_chosen_for(world: World, measuring: Measuring) -> None:
    kernels = chosen(world, *LLAMA, "batch.micro_size=4")
    # Query, key and value are one matrix, as are gate and up.
    linear = {(32 + 2 * 8, 32), (32, 32), (96, 32), (32, 48)}
    passes = ("forward", "input_gradient", "weight_gradient")
    assert {each[1:] for each in measuring.asked if each.kind == "forward"} == {(128, *s) for s in linear}
    head = {(kind, 61, 32) for kind in ("logits", "input_gradient", "weight_gradient")}
    assert set(kernels.chosen) == head | {(kind, *size) for kind in passes for size in linear}
    assert {kernel.name for (kind, *_), kernel in kernels.chosen.items() if kind == "forward"} == {"onednn"}
    assert {kernel.name for (kind, *_), kernel in kernels.chosen.items() if kind != "forward"} == {"library"}
    assert kernels.stored_choices["forward, fp32, 128 x 32 x 48"] == "onednn"


@pytest.mark.mpi(min_size=2, max_size=2)
def test_ranks_choose_together(world: World, measuring: Measuring, mpi_tmp_path: Path) -> None:
    seconds = [{"library": 1.0, "onednn": 0.5}, {"library": 1.0, "onednn": 3.0}][world.rank]
    measuring.seconds = {"forward": seconds, "logits": {"library": 4.0 - 3 * world.rank, "onednn": 1.0}}
    kernels = chosen(world)
    here = sorted((key, kernel.name) for key, kernel in kernels.chosen.items())
    assert world.everyone.all_gather_object(here) == [here] * 2
    # Of forward the slow rank loses more than the other one gains, of logits it does not.
    assert {name for (kind, *_), name in here if kind == "forward"} == {"library"}
    assert {name for (kind, *_), name in here if kind == "logits"} == {"onednn"}
    assert json.loads((mpi_tmp_path / "cache/hpctrain/products.json").read_text())
    measuring.asked.clear()
    assert sorted((key, kernel.name) for key, kernel in chosen(world).chosen.items()) == here
    assert not measuring.asked


@pytest.mark.mpi(min_size=2, max_size=2)
def test_pieces_of_matrices_are_chosen_for(world: World, measuring: Measuring) -> None:
    chosen(world, "layout.tensor=2", "model.mlp=128")
    assert {each[1:] for each in measuring.asked if each.kind == "forward"} == {
        (64, 48, 32),
        (64, 32, 16),
        (64, 64, 32),
        (64, 32, 64),
    }
    chosen(world, "layout.context=2")
    assert {each.rows for each in measuring.asked[-3:]} == {32}


@pytest.mark.mpi(min_size=2, max_size=2)
def test_servers_store_what_workers_compute_with(
    world: World, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_cache", lambda *_: None)  # either role might read the other's
    measuring.seconds = QUICK_FORWARD if world.rank else {}
    engine, _ = build_role_within_memory(small_deck("communication.server.mode=sync"), world, lambda: None)
    kernels = engine.stage.layer_context.products.kernels
    assert {name for key, name in kernels.stored_choices.items() if key.startswith("forward")} == {"onednn"}
    assert {kernel.name for (kind, *_), kernel in kernels.chosen.items() if kind == "forward"} == {"onednn"}
    engine.close()


@pytest.mark.mpi(max_size=1)
def test_what_was_measured_is_kept_for_such_processors(
    world: World, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = chosen(world)
    assert "measured" in first.note
    assert list(read_cache()) == [processor_identity()]
    measuring.seconds = {}
    again = chosen(world)
    assert (again.stored_choices, again.note) == (first.stored_choices, f"from {cache_file()}")
    # What is missing is measured, and what another processor has does not count.
    more = chosen(world, "model.mlp=80")
    assert more.note == f"from {cache_file()} and {more.note.split(' and ')[1]}"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    other = chosen(world)
    assert set(other.stored_choices.values()) == {"library"} != set(first.stored_choices.values())
    assert len(read_cache()) == 2


@pytest.mark.mpi(max_size=1)
def test_what_was_measured_in_another_way_is_measured_again(
    world: World, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = chosen(world)
    # As before there was a word of the way.
    written = json.loads(cache_file().read_text())
    cache_file().write_text(json.dumps({processor_identity(): next(iter(written.values()))}))
    assert read_cache() == {}
    measuring.seconds = {}
    again = chosen(world)
    assert "measured" in again.note
    assert set(again.stored_choices.values()) == {"library"} != set(first.stored_choices.values())
    with monkeypatch.context() as other:
        other.setattr("hpctrain.parallel.kernels.choice_cache.MEASUREMENT", "measured otherwise")
        measuring.seconds = QUICK_FORWARD
        assert chosen(world).stored_choices == first.stored_choices
    # Each keeps its own.
    assert chosen(world).stored_choices == again.stored_choices
    assert len(json.loads(cache_file().read_text())) == 3


@pytest.mark.mpi(max_size=1)
def test_plans_count_what_such_processors_multiply_by(
    world: World, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring.seconds = {"forward": {"fp32": 0.1}, "weight_gradient": {"fp32-onednn": 0.1}}
    bf16 = "precision.compute=bf16"
    deck, one = small_deck(bf16), world.single_rank_world()
    unknown = with_cached_kernels(deck, 1)
    assert (unknown.runtime_choices.kernels, unknown.runtime_choices.kernels_note.split(" until")[0]) == (
        {},
        "assumed to use the library",
    )
    engine, plan = build_within_memory(deck, one, make_mesh(deck, one))
    kept = with_cached_kernels(deck, 1)
    assert kept.runtime_choices.kernels == engine.stage.layer_context.products.kernels.stored_choices
    assert kept.runtime_choices.kernels_note == f"from {cache_file()}"
    planned, held = plan_memory(kept, 1, 61).largest.memory, plan.largest.memory
    by_library = plan_memory(deck, 1, 61).largest.memory
    assert replace(planned, other=held.other) == held
    # The library prepares products in bf16, and oneDNN prepares weight gradients in fp32 as well. What the
    # four forward products do not need is saved, but for temporary copies in fp32.
    saved = by_library.other - planned.other
    assert 3 * deck.machine.prepared_product < saved < 4 * deck.machine.prepared_product
    uncounted = small_deck(bf16, "machine.prepared_product=0")
    planned, by_library = (
        plan_memory(each, 1, 61).largest.memory for each in (with_cached_kernels(uncounted, 1), uncounted)
    )
    assert planned.other > by_library.other
    training = Trainer(deck, engine, Batches(SyntheticSource(32, 61), 1))
    training.train_step()
    copies = converted_bytes(engine.model.layers)
    assert copies > 0
    assert planned.parameter == value_bytes(engine.stage.buckets) + copies
    # Those of another number of rows stand in, others of other formats or matrices do not.
    fewer = with_cached_kernels(small_deck(bf16, "batch.micro_size=1"), 1)
    assert plan_memory(fewer, 1, 61).largest.memory.parameter == planned.parameter
    wider = with_cached_kernels(small_deck(bf16, "model.mlp=80"), 1)
    assert (
        wider.runtime_choices.kernels_note
        == f"from {cache_file()}; others {unknown.runtime_choices.kernels_note}"
    )
    assert set(wider.runtime_choices.kernels) < set(kept.runtime_choices.kernels)
    for other in ("precision.gradients=compute", "precision.compute=fp32", "machine.products=library"):
        assert not with_cached_kernels(small_deck(bf16, other), 1).runtime_choices.kernels
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not with_cached_kernels(deck, 1).runtime_choices.kernels


@pytest.mark.mpi(max_size=1)
def test_what_was_found_goes_with_a_deck() -> None:
    found = RuntimeChoices((1, 1), {"name": "fp32"}, "why")
    deck = small_deck().with_runtime_choices(found)
    changed = deck.with_keys(run={"steps": 3})
    assert changed.runtime_choices is found
    assert deck == small_deck()
    assert deck_text(deck) == deck_text(small_deck())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "content",
    ["", "[1]", '{"x": 3}', "{" * 100_000, " " * (2 << 20), "null", '{"HERE": {"NAME": "magic"}}', "\0\xff"],
)
@pytest.mark.mpi(max_size=1)
def test_what_cannot_have_been_kept_is_measured(world: World, measuring: Measuring, content: str) -> None:
    first = chosen(world)
    name = next(iter(first.stored_choices))
    here = f"{processor_identity()}; {MEASUREMENT}"
    text = content.replace("HERE", here).replace("NAME", name)
    cache_file().write_text(text, encoding="latin-1")
    measuring.asked.clear()
    assert chosen(world).stored_choices == first.stored_choices
    assert len(measuring.asked) == len(first.stored_choices)


@pytest.mark.mpi(max_size=1)
def test_little_is_kept_and_nothing_is_needed(
    world: World, measuring: Measuring, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path
) -> None:
    for number in range(30):
        write_cache(f"processor {number}", {f"product {i}": "library" for i in range(20 * number)})
    kept = read_cache()
    assert list(kept) == [f"processor {number}" for number in range(10, 30)]
    assert list(kept["processor 29"]) == [f"product {i}" for i in range(80, 580)]
    assert sorted(path.name for path in cache_file().parent.iterdir()) == ["products.json"]
    (mpi_tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(mpi_tmp_path / "file"))
    assert chosen(world).stored_choices
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")
    monkeypatch.chdir(mpi_tmp_path)
    assert chosen(world).stored_choices
    assert not (mpi_tmp_path / ".cache").exists()


@pytest.mark.mpi(max_size=1)
def test_a_checkpoint_s_choice_comes_first(world: World, measuring: Measuring) -> None:
    first = chosen(world)
    stored = dict.fromkeys(first.stored_choices, "library")
    again = chosen(world, before=stored)
    assert (again.stored_choices, again.note) == (stored, "as before")
    name = next(iter(stored))
    for wrong in ("magic", ["onednn"], "fp32"):
        assert chosen(world, before=stored | {name: wrong}).stored_choices == stored | {
            name: first.stored_choices[name]
        }
    assert chosen(world, before=["x"]).stored_choices == first.stored_choices


@pytest.mark.mpi(max_size=1)
def test_named_kernels_have_to_be_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    deck = small_deck("machine.products=onednn")
    assert chosen(world, "machine.products=onednn").default is KERNELS["onednn"]
    monkeypatch.setattr(type(KERNELS["onednn"]), "is_available", lambda *_: False)
    sentence = 'machine.products=onednn: is not available on all ranks for fp32 (available: "library")'
    with pytest.raises(HpctrainError) as found:
        choose_kernels(deck, world, make_mesh(deck, world))
    assert sentence in str(found.value)


@pytest.mark.sampled(1)
@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("named", ["fp32", "fp32-onednn", "onednn"])
def test_training_is_the_same_to_rounding(world: World, named: str) -> None:
    form = "fp32" if named == "onednn" else "bf16"
    losses = {}
    for name, compute in (("library", "fp32"), ("library", form), (named, form)):
        training = trainer(
            world.single_rank_world(), small_deck(f"machine.products={name}", f"precision.compute={compute}")
        )
        assert training.engine.stage.layer_context.products.kernels.kernel_for("forward", 32, 32).name == name
        losses[name, compute] = [step.loss for step in training.train(3)]
    exact, own = losses["library", "fp32"], losses[named, form]
    assert form == "fp32" or own != losses["library", form]
    assert own == pytest.approx(exact, rel=1e-6 if form == "fp32" else 5e-3)


@pytest.mark.mpi(max_size=1)
def test_a_miniature_multiplies_in_fp32() -> None:
    for named, stands in (("fp32-onednn", "onednn"), ("fp32", "library"), ("auto", "library")):
        compute = "fp32" if named == "auto" else "bf16"
        deck = small_deck(f"machine.products={named}", f"precision.compute={compute}")
        assert scale_down_family(deck).machine.products == stands


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_goes_on_with_its_products_bit_for_bit(
    world: World,
    measuring: Measuring,
    monkeypatch: pytest.MonkeyPatch,
    mpi_tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # So small products may well have the same bits.
    monkeypatch.setattr(OneDnn, "forward", lambda _, *operands: functional.linear(*operands) * 1.001)
    runs = TextRuns(world, mpi_tmp_path)
    run, losses = runs.run, runs.losses
    run("whole", "run.steps=4")
    assert "matrix products use: forward onednn; logits library" in capfd.readouterr().out or world.rank
    run("parts", "run.steps=2", "learning_rate.decay_steps=4")
    # Elsewhere, where other kernels would be quicker.
    world.everyone.barrier()
    if world.rank == 0:
        cache_file().unlink()
    world.everyone.barrier()
    measuring.seconds, measuring.asked = {}, []
    assert resume(world, mpi_tmp_path / "parts", ["run.steps=4"]) == 0
    assert not measuring.asked
    assert losses("parts") == losses("whole")
    run("other", "run.steps=4")
    assert losses("other") != losses("whole")
    newest = mpi_tmp_path / "parts" / "checkpoints" / "step-00000004.h5"
    assert "onednn" in read_state(newest, world.everyone)["products"].values()


@pytest.mark.parametrize("split", [[2, 2], [1, 0, 1], [2, 1], [1]])
def test_a_stored_split_that_does_not_fit_the_deck_names_its_file(split: list[int]) -> None:
    deck, path = small_deck("layout.pipeline=2", "model.layers=2"), Path("step-00000004.h5")
    assert with_stored_choices(deck, deck, {"split": [0, 2]}, path).runtime_choices.split == (0, 2)
    with pytest.raises(InputOutputError, match=r"step-00000004\.h5: its state has an invalid split"):
        with_stored_choices(deck, deck, {"split": split}, path)


@pytest.mark.mpi(max_size=1)
def test_runs_from_before_there_was_a_choice_go_on_by_the_library() -> None:
    old, given = small_deck(), small_deck("machine.products=auto")
    assert with_stored_choices(old, old, {"step": 1}, Path()).machine.products == "library"
    assert with_stored_choices(old, old, {"products": {}}, Path()).machine.products == "auto"
    assert with_stored_choices(given, old, {"step": 1}, Path()).machine.products == "auto"


@pytest.mark.mpi(max_size=1)
def test_a_processor_is_told_by_more_than_its_name() -> None:
    assert processor_name()
    assert "\n" not in processor_identity()
    assert processor_identity().startswith(processor_name())
    assert f"torch {torch.__version__}" in processor_identity()
