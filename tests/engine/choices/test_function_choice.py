"""Whether functions are compiled: agreed, the same on all layouts, kept in checkpoints, planned, refused.

Tests of engine/choices/function_choice.py, train/stored_choices.py and deck/sections/machine.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.deck.runtime_choices import RuntimeChoices
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.machine import Machine
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.choices import function_choice as module
from hpctrain.engine.choices.function_choice import (
    choose_functions,
    compile_functions,
    functions_of,
    with_planned_functions,
)
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.host import c_libraries as compiler
from hpctrain.host.c_libraries import CompilerError
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import TORCH
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.train.layout_verification import verify_layout
from hpctrain.train.replay import replay
from hpctrain.train.run import resume, run_deck
from hpctrain.train.stored_choices import describe_functions, with_stored_choices
from tests.engine.choices.text_runs import TextRuns
from tests.engines import LLAMA, reference, small_deck, trainer
from tests.parallel.kernels.functions.test_layer_functions import trapping
from tests.plan.test_memory_plan import expect_activations
from tests.rope_scalings import YARN_KEYS
from tests.train.test_run import write_deck

COMPILE, AUTO = "machine.compile=true", "machine.compile=auto"
LEFT = "the resumed run used compiled ones: from here on losses may differ in their last bits"
CPU = torch.device("cpu")
FAMILIES = {
    "gpt2": (),
    "llama": LLAMA,
    "normed": (*LLAMA, "model.query_key_norm=head", "model.attention_bias=all", *YARN_KEYS),
    "gemma": (*LLAMA, "model.family=gemma", "model.query_key_norm=head"),
    "mixture": (*LLAMA, "model.experts.count=4", "model.experts.per_token=2", "model.experts.shared=1"),
}


@pytest.fixture(scope="module")
def library() -> bytes:
    return compile_functions()


@pytest.fixture(autouse=True)
def once(library: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is so once for all tests, where none says otherwise."""
    monkeypatch.setattr(module, "compile_functions", lambda: library)


def compiled(deck: Deck, world: World) -> Deck:
    deck = choose_functions(deck, world)
    assert isinstance(deck.runtime_choices.functions, CompiledFunctions)
    return deck


@pytest.mark.sampled(2)
@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_that_of_torch_to_rounding(world: World, family: str) -> None:
    one = world.single_rank_world()
    for form, bound in (("fp32", 2e-5), ("bf16", 3e-2)):
        keys = (*FAMILIES[family], f"precision.compute={form}", "machine.products=library")
        own, other = (trainer(one, small_deck(*keys, *more)) for more in ((COMPILE,), ()))
        losses = [[step.loss for step in each.train(3)] for each in (own, other)]
        assert losses[0] == pytest.approx(losses[1], rel=bound / 10)
        gradients, expected = own.gradients(), other.gradients()
        assert any(not torch.equal(gradients[name], expected[name]) for name in expected)
        largest = max(float(each.norm()) for each in expected.values())
        for name, gradient in gradients.items():
            apart = float((gradient - expected[name]).norm())
            assert apart <= 10 * bound * max(float(expected[name].norm()), 0.01 * largest), name


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_layout_trains_the_same_model(world: World, family: str) -> None:
    keys = (*FAMILIES[family], COMPILE)
    ranks = world.size
    layouts = [
        (f"layout.tensor={min(2, ranks)}", "layout.sequence_parallel=true", "layout.zero=1"),
        ("layout.pipeline=2", "memory.recompute=full"),
        ("layout.context=2", "layout.context_form=all_to_all"),
        ("layout.zero=3", "memory.recompute=selective"),
        ("layout.context=2",),
    ]
    expected = [step.loss for step in reference(world, small_deck(*keys)).train(2)]
    for layout in layouts:
        training = trainer(world, small_deck(*keys, *layout))
        assert training.engine.stage.layer_context.functions.compiled
        losses = [step.loss for step in training.train(2)]
        assert losses == pytest.approx(expected, rel=2e-6), layout
        assert world.everyone.all_gather_object(losses) == [losses] * ranks
    for layout in layouts[:2]:
        deck = compiled(small_deck(*keys, *layout), world)
        assert "layout check passed" in verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.sampled(3)
@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *((family, "none") for family in FAMILIES),
        ("llama", "full"),
        ("llama", "selective"),
        ("normed", "selective"),
    ],
)
def test_what_is_saved_is_what_is_planned(world: World, family: str, recompute: str) -> None:
    keys = (*FAMILIES[family], COMPILE, f"memory.recompute={recompute}")
    deck = small_deck(*keys)
    expect_activations(world, deck)
    planned = plan_memory(deck, 1, 61).largest.memory
    without = plan_memory(small_deck(*keys[:-2], keys[-1]), 1, 61).largest.memory
    assert (planned.activation < without.activation) == (family != "gpt2")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_all_fall_back_where_one_cannot(
    world: World, library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck = small_deck(COMPILE)

    def nothing() -> bytes:
        raise CompilerError("no C compiler: cc, gcc, clang not found")

    monkeypatch.setattr(module, "compile_functions", nothing)
    found = choose_functions(deck, world)
    why = "no C compiler: cc, gcc, clang not found"
    sentence = f"machine.compile = true, but block functions are torch's: {why}"
    assert describe_functions(deck, functions_of(found, CPU)) == [sentence]
    monkeypatch.setattr(module, "compile_functions", lambda: library)
    # A library of another processor, on the last rank.
    monkey = pytest.MonkeyPatch()
    if world.rank == world.size - 1:
        monkey.setattr(module, "open_library", lambda _: (_ for _ in ()).throw(OSError("wrong")))
    found = choose_functions(deck, world)
    monkey.undo()
    assert not functions_of(found, CPU).compiled
    assert "the compiled library cannot be loaded" in describe_functions(deck, functions_of(found, CPU))[0]
    assert functions_of(choose_functions(deck, world), CPU).compiled
    assert describe_functions(small_deck(), TORCH) == []


@pytest.mark.parametrize(
    ("keys", "others"),
    [
        ((), ""),
        ((*LLAMA, "model.family=gemma"), ""),
        ((*LLAMA, "model.family=gpt-oss"), 'activations (model.activation = "swiglu-clamped")'),
        (
            (*LLAMA, "model.experts.count=4", "model.query_key_norm=all"),
            'activations of experts (model.activation = "swiglu"), norms of queries and keys '
            '(model.query_key_norm = "all")',
        ),
        ((*LLAMA, "model.family=olmo"), 'norms (model.norm_weight = "none")'),
        ((*LLAMA, "model.family=cohere"), "norms (model.norm_bias = false)"),
        ((*LLAMA, "model.logit_cap=30"), "the loss (model.logit_cap = 30.0)"),
    ],
)
def test_a_run_says_what_torch_computes(keys: tuple[str, ...], others: str) -> None:
    (line,) = describe_functions(small_deck("machine.compile=true", *keys), CompiledFunctions())
    first = "block functions are compiled for this processor"
    assert line == (f"{first}; torch computes {others}" if others else first)


@pytest.mark.mpi(max_size=1)
def test_functions_are_compiled_by_default_where_they_can_be(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Machine().compile == "auto"
    deck = small_deck(AUTO)
    assert functions_of(compiled(deck, world), CPU).compiled
    assert functions_of(with_planned_functions(deck), CPU).compiled
    threads = "run.threads = 2, and compiled functions have one thread"
    for without, why in (
        (small_deck(AUTO, "run.threads=2"), threads),
        (small_deck(AUTO, "precision.compute=fp16"), "compiled functions compute in fp32 or bf16"),
        (deck.with_keys(model={"module": "m:f"}), "compiled functions support built-in models only"),
    ):
        assert with_planned_functions(without) is without
        found = choose_functions(without, world)
        assert describe_functions(found, functions_of(found, CPU)) == [f"block functions are torch's: {why}"]
    gpu = world.single_rank_world()
    gpu.device = torch.device("cuda")
    assert choose_functions(deck, gpu) is deck
    assert describe_functions(deck, functions_of(deck, gpu.device)) == []
    # A resumed run keeps torch's without a compiler in the first run, and says so if it loses compiled ones.
    stored = {"compiled": "", "products": {}}
    resumed = choose_functions(with_stored_choices(deck, deck, stored, Path()), world)
    (said,) = describe_functions(resumed, functions_of(resumed, CPU))
    assert said.startswith("block functions are torch's: the resumed run did not compile them")
    required = with_stored_choices(small_deck(COMPILE), deck, stored, Path())
    assert functions_of(choose_functions(required, world), CPU).compiled
    lost = with_stored_choices(small_deck(AUTO, "run.threads=2"), deck, {"compiled": "89abcdef"}, Path())
    lost = choose_functions(lost, world)
    (said,) = describe_functions(lost, functions_of(lost, CPU))
    assert said == f"block functions are torch's: {threads}; {LEFT}"


def test_plans_assume_a_compiler_only_if_a_deck_requires_compiled_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "compile_functions", fail_to_compile)
    module.can_compile_functions.cache_clear()
    assert functions_of(with_planned_functions(small_deck(AUTO)), CPU) is TORCH
    assert functions_of(with_planned_functions(small_deck(COMPILE)), CPU).compiled
    module.can_compile_functions.cache_clear()


def fail_to_compile() -> bytes:
    raise CompilerError("no C compiler")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_would_end_the_job_is_not_called(
    world: World, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path
) -> None:
    deck, wrong = small_deck(COMPILE), trapping("attend")
    monkeypatch.setattr(module, "compile_functions", compile_functions)
    monkeypatch.setattr(compiler, "compile_library", lambda *_: wrong)
    monkeypatch.setattr(compiler, "user_cache", lambda: mpi_tmp_path)
    found = functions_of(choose_functions(deck, world), CPU)
    assert not found.compiled
    assert "the compiled library does not run on this processor: SIG" in describe_functions(deck, found)[0]


@pytest.mark.mpi(max_size=1)
def test_wrong_results_are_not_used(
    world: World, library: bytes, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path
) -> None:
    activate, deck = CompiledFunctions.activate, small_deck(AUTO)
    monkeypatch.setattr(module, "compile_functions", compile_functions)
    monkeypatch.setattr(compiler, "compile_library", lambda *_: library)
    monkeypatch.setattr(compiler, "user_cache", lambda: mpi_tmp_path)
    with monkeypatch.context() as wrong:
        wrong.setattr(CompiledFunctions, "activate", lambda *x, **named: activate(*x, **named) * 1.1)
        for _ in range(2):  # Nothing is cached.
            found = functions_of(choose_functions(deck, world), CPU)
            why = "the compiled library does not agree with torch"
            assert describe_functions(deck, found) == [f"block functions are torch's: {why}"]
    assert functions_of(choose_functions(deck, world), CPU).compiled


@pytest.mark.mpi(max_size=1)
def test_a_run_that_goes_on_computes_as_before(world: World) -> None:
    old, deck = small_deck(), small_deck(COMPILE)
    assert deck.runtime_choices.compiled_record is None
    assert with_stored_choices(deck, old, {}, Path()).runtime_choices.compiled_record == ""
    assert (
        with_stored_choices(deck, deck, {"compiled": "89abcdef"}, Path()).runtime_choices.compiled_record
        == "89abcdef"
    )
    assert (
        with_stored_choices(deck, deck, {"compiled": True}, Path()).runtime_choices.compiled_record
        == "an earlier version's"
    )
    assert with_stored_choices(deck, deck, {"compiled": 3}, Path()).runtime_choices.compiled_record == ""
    fallen = with_stored_choices(
        parse_deck(deck_text(deck)), deck, {"compiled": False, "products": {}}, Path()
    )
    found = choose_functions(fallen, world)
    assert not functions_of(found, CPU).compiled
    assert not functions_of(fallen, CPU).compiled
    said = describe_functions(deck, functions_of(found, CPU))
    assert "the resumed run did not compile them (--set machine.compile=true" in said[0]
    # What is wished anew is had, and said to have other bits.
    again = parse_deck(deck_text(deck), [COMPILE])
    for before in (deck, old):
        anew = choose_functions(
            with_stored_choices(again, before, {"compiled": "", "products": {}}, Path()), world
        )
        assert functions_of(anew, CPU).compiled
        (said,) = describe_functions(anew, functions_of(anew, CPU))
        assert said.endswith("the resumed run used torch: from here on losses may differ in their last bits)")
    (said,) = describe_functions(with_stored_choices(old, deck, {"compiled": "89abcdef"}, Path()), TORCH)
    assert said.endswith(LEFT)
    assert describe_functions(with_stored_choices(old, old, {}, Path()), TORCH) == []
    assert functions_of(with_planned_functions(deck), CPU).compiled
    assert functions_of(with_planned_functions(deck), torch.device("cuda")) is TORCH
    assert functions_of(with_planned_functions(old), CPU) is TORCH
    assert with_planned_functions(fallen) is fallen
    # Where nothing compiles, as where text is generated, torch computes.
    assert functions_of(deck, CPU) is TORCH
    assert choose_functions(old, world) is old
    again = compiled(deck, world)
    assert choose_functions(again, world) is again
    assert replace(RuntimeChoices(), compiled_record="89abcdef") == RuntimeChoices()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_resumed_runs_have_the_same_bits(
    world: World, mpi_tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    activate = CompiledFunctions.activate
    # So small a model may well have the same losses otherwise.
    monkeypatch.setattr(CompiledFunctions, "activate", lambda *x, **named: activate(*x, **named) * 1.001)
    runs = TextRuns(world, mpi_tmp_path)
    run, losses = runs.run, runs.losses
    run("whole", "run.steps=4", COMPILE)
    assert "block functions are compiled for this processor" in capfd.readouterr().out or world.rank
    run("parts", "run.steps=2", "learning_rate.decay_steps=4", COMPILE)
    newest = mpi_tmp_path / "parts" / "checkpoints" / "step-00000002.h5"
    assert read_state(newest, world.everyone)["compiled"] == f"{crc32(compile_functions()):08x}"
    assert resume(world, mpi_tmp_path / "parts", ["run.steps=4"]) == 0
    assert losses("parts") == losses("whole")
    assert "may differ in their last bits" not in capfd.readouterr().out
    # Begun where there was no compiler, it stays with torch where there is one.
    with monkeypatch.context() as without:
        without.setattr(module, "compile_functions", compile_functions)
        without.setenv("CC", "magic-cc")
        run("torch", "run.steps=2", "learning_rate.decay_steps=4", COMPILE)
    assert "no C compiler: magic-cc not found" in capfd.readouterr().out or world.rank
    assert resume(world, mpi_tmp_path / "torch", ["run.steps=4"]) == 0
    run("plain", "run.steps=4", "machine.compile=false")
    assert losses("torch") == losses("plain") != losses("whole")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_leaves_the_bits_says_so(
    world: World, mpi_tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    activate = CompiledFunctions.activate
    monkeypatch.setattr(CompiledFunctions, "activate", lambda *x, **named: activate(*x, **named) * 1.0001)
    deck, folder, shown = write_deck(world, mpi_tmp_path), mpi_tmp_path / "run", list[str]()
    keys = [f"run.dir={folder}", "checkpoint.every=2", "checkpoint.keep=9", COMPILE, "learning_rate.warmup=0"]
    assert run_deck(world, deck, [*keys, "run.steps=4"]) == 0
    assert "other bits" not in capfd.readouterr().out

    def replayed(step: int, *overrides: str) -> str:
        path = folder / "checkpoints" / f"step-{step:08d}.h5"
        assert replay(world, path, None, overrides, None, shown.append) == 0
        told: str = world.everyone.broadcast_object(shown[-1] if shown else None)
        return told

    with monkeypatch.context() as without:
        without.setattr(module, "compile_functions", compile_functions)
        without.setenv("CC", "magic-cc")
        assert resume(world, folder, ["run.steps=8"]) == 0
        why = "block functions are torch's: no C compiler: magic-cc not found; the resumed run used compiled"
        assert why in capfd.readouterr().out or world.rank
        assert replayed(2, "run.steps=8").endswith("with functions that something else computes.")
    other = compile_functions() + bytes(1)
    with monkeypatch.context() as changed:
        changed.setattr(module, "compile_functions", lambda: other)
        assert replayed(2, "run.steps=8").endswith("with functions that something else computes.")
        # What follows was torch's.
        assert resume(world, folder / "checkpoints" / "step-00000004.h5", [f"run.dir={folder}2"]) == 0
        why = "functions of another version of hpctrain, compiler or processor"
        assert why in capfd.readouterr().out or world.rank
    later = "as expected with functions that something else computed from step 5 on."
    assert replayed(2).endswith(later)
    # Its later steps were torch's, and the checkpoint before them tells of compiled ones.
    assert replayed(4).endswith("as expected with functions that something else computes.")
    assert replayed(6).endswith("bit for bit.")


@pytest.mark.mpi(max_size=1)
def test_gpus_and_other_decks_are_refused(world: World) -> None:
    for keys, sentence in (
        (("precision.compute=fp16",), "compiled functions compute in fp32 or bf16"),
        (("run.threads=2",), "compiled functions have one thread for each rank"),
        (("run.device=cuda",), "compiled functions run on CPUs only"),
    ):
        with pytest.raises(HpctrainError, match=sentence):
            small_deck(COMPILE, *keys)
    deck, one = small_deck(COMPILE), world.single_rank_world()
    one.device = torch.device("cuda")
    with pytest.raises(HpctrainError, match=r"machine\.compile=true: is supported on CPUs only"):
        choose_functions(deck, one)


def test_nothing_of_it_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Tensor:
        raise AssertionError

    for name in ("activate", "rms_norm", "attend"):
        monkeypatch.setattr(CompiledFunctions, name, never)
    assert functions_of(small_deck(), CPU) is TORCH
