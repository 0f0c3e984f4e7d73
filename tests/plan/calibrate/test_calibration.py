"""Calibrating tiny shapes on one rank and on two: a whole file, which plans read; and what cannot be.

Tests of plan/calibrate/calibration.py, plan/calibrate/calibration_decks.py, plan/calibrate/clock.py,
plan/calibrate/matmul_rates.py, plan/calibrate/operation_rates.py, plan/calibrate/link_rates.py and
plan/calibrate/step_rates.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.pipeline.deck_schedule import schedule_builder
from hpctrain.plan.calibrate import memory_rates
from hpctrain.plan.calibrate.calibration import CalibrateOptions, calibrate, measure_machine
from hpctrain.plan.calibrate.calibration_decks import measured_decks, on_data_ranks, variants
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.calibrate.link_rates import in_pairs, measure_collective, measure_link
from hpctrain.plan.calibrate.matmul_rates import measure_products, shapes_of
from hpctrain.plan.calibrate.memory_rates import measure_prepared_product
from hpctrain.plan.calibrate.operation_rates import measure_elementwise
from hpctrain.plan.time.machine_rates import PASSES, MachineRates, read_machine
from hpctrain.plan.time.step_plan import plan_step
from tests.engines import DECK, LLAMA, small_deck

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def quick(*decks: Path, formats: str = "fp32,bf16") -> CalibrateOptions:
    return CalibrateOptions(decks, formats, "4 KiB", 0.0)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_memory_of_prepared_products_is_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows is counted in three passes, except the one that comes before the measurement."""
    multiplied, resident = list[Sequence[object]](), iter((5_000, 5_000 + 96 * 700))

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        multiplied.append((left.shape, left.stride(), right.shape, right.stride(), out.shape))

    monkeypatch.setattr(memory_rates, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(torch, "mm", multiply)
    assert measure_prepared_product(world, torch.bfloat16) == 700
    assert len({*multiplied}) == len(multiplied) == 3 + 96


@pytest.mark.mpi(max_size=2)
@pytest.mark.usefixtures("threads")
def test_figures_are_measured_and_read_by_plans(world: World, mpi_tmp_path: Path) -> None:
    path, out, said = mpi_tmp_path / "tiny.toml", mpi_tmp_path / "machine.toml", list[str]()
    if world.rank == 0:
        path.write_text(f'layout = "auto"\n{DECK}')  # which asks for rates, and is not asked for a layout
    world.everyone.barrier()
    calibrate(world, out, quick(path), said.append)
    world.everyone.barrier()
    machine = read_machine(str(out))
    assert (machine.name, machine.ranks, machine.ranks_per_node) == ("machine", world.size, world.size)
    assert machine.processor
    assert machine.date
    assert machine.prepared_product is not None
    assert set(machine.products) == {"fp32", "bf16"}
    assert set(machine.elementwise) == set(machine.formats["bf16"].elementwise) == set(PASSES)
    assert set(machine.products["fp32"].passes) >= {"forward", "weight_gradient", "logits"}
    assert machine.spread.keys() >= {"products", "attention", "elementwise", "optimizer", "fixed"}
    assert all(0 < low <= high for low, high in machine.spread.values())
    assert bool(said) == (world.rank == 0)
    for form in ("fp32", "bf16"):
        planned = plan_step(small_deck(f"precision.compute={form}"), world.size, 61, machine)
        assert planned.seconds > machine.fixed
    if world.size == 1:
        assert machine.inside is None
        with pytest.raises(
            HpctrainError, match=r"machine\.between is missing.*hpctrain calibrate.*two nodes"
        ):
            plan_step(small_deck("layout.pipeline=2"), 2, 61, machine)
    else:
        assert machine.inside is not None
        assert machine.collectives["all_reduce"].bytes == (1024.0, 4096.0)
        assert not machine.crossing
        assert plan_step(small_deck("layout.tensor=2"), 2, 61, machine).seconds_by_cause["tensor"] > 0
    assert world.everyone.all_gather_object(machine) == [machine] * world.size


@pytest.mark.usefixtures("threads")
def test_it_says_how_long_it_takes_and_warns_of_figures_that_differ(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.toml").write_text(DECK)
    spread = {"products": (0.5, 1.2), "attention": (0.9, 1.2), "fixed": (0.0, 1.0)}
    monkeypatch.setattr(Clock, "spread", lambda _: spread)
    said = list[str]()
    wish = quick(tmp_path / "tiny.toml", formats="fp32")
    calibrate(world.single_rank_world(), tmp_path / "machine.toml", wish, said.append)
    assert "This takes about a minute" in said[0]
    assert [each for each in said if each.startswith("warning")] == [
        "warning: products: slow measurements took 2.4 times as long as fast ones (limit: 1.5); "
        "predictions have the same uncertainty (measure again on an idle machine)"
    ]


@contextmanager
def emulated(world: World, ranks: int) -> Iterator[None]:
    world.emulate_nodes(ranks)
    yield
    world.emulate_nodes(None)


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.usefixtures("threads")
def test_links_between_nodes_are_measured(world: World) -> None:
    with emulated(world, world.size // 2):
        machine = measure_machine(world, "two", [small_deck()], ["fp32"], 4096, 0.0)
    assert machine.ranks_per_node == world.size // 2
    assert machine.between is not None
    assert (machine.inside is None) == (world.size == 2)
    together = {1: [1], 2: [1, 2]}[world.size // 2]
    for measured in machine.crossing.values():
        assert [each.together for each in measured] == together
        assert [each.ranks for each in measured] == [2 * each for each in together]
    assert set(machine.crossing) == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"}


class SlowClock(Clock):
    """On which a message takes 1 ms a KiB."""

    def group_seconds(self, kind: str, group: Group, run: Callable[[], object]) -> float:
        run()
        self.calls = [*getattr(self, "calls", []), kind]
        return 1e-3 * 4 ** (self.calls.count(kind) - 1)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_over_slow_links_no_larger_messages_are_measured(world: World) -> None:
    sizes = [1024 * 4**number for number in range(8)]
    clock = SlowClock(world, 0.0)
    found = measure_collective(world.everyone, "all_reduce", sizes, None, clock)
    assert found.bytes == tuple(map(float, sizes[:6]))  # the sixth takes 1.024 s
    assert found.seconds[-1] == pytest.approx(1.024)
    link = measure_link(world.everyone, in_pairs(2), sizes, clock)
    assert clock.calls.count("messages") == 7  # half of there and back
    assert link.bandwidth == pytest.approx(2 * 1024 / 1e-3, rel=0.01)


@pytest.mark.parametrize(
    "keys",
    [
        ("layout=auto",),
        ("layout.data=4", "layout.zero=1", "layout.zero_group=2"),
        ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2", "layout.split=[0, 1, 1, 0]"),
        ("layout.pipeline=2", "layout.schedule=none.txt"),
        ("communication.server.mode=sync",),
        ("run.noise_scale_steps=2",),
        ("batch.ramp_from=6", "batch.ramp_steps=2"),
        (*LLAMA, "model.experts.count=4", "layout.tensor=4", "layout.expert=2", "layout.expert_tensor=4"),
    ],
)
def test_decks_are_laid_out_anew(keys: tuple[str, ...]) -> None:
    """Whatever they are laid out for, on as many ranks as measure."""
    for ranks in (1, 3):
        deck = on_data_ranks(small_deck(*keys), ranks)
        assert axis_sizes(deck, ranks)["data"] == ranks
        assert schedule_builder(deck, ranks)(1).stage_count == 1
        assert deck.batch.micro_size == 2


def test_shapes_are_those_that_plans_ask_for(world: World) -> None:
    """All products of a token's forward pass, and of a deck that is split a part."""
    deck = small_deck("model.layers=1")
    rows = {(s.rows, s.outputs, s.inputs, s.head) for s in shapes_of(deck, 64, 1, True)}
    assert rows == {(64, 96, 32, False), (64, 32, 32, False), (64, 128, 32, False), (64, 32, 128, False)} | {
        (64, 61, 32, True)
    }
    split = {(s.outputs, s.inputs) for s in shapes_of(deck, 64, 2, True) if not s.head}
    assert split == {(48, 32), (32, 16), (64, 32), (32, 64)}
    told = list(variants(small_deck("batch.micro_size=4", "batch.global_size=8"), 2))
    assert [(tokens, tensor) for _, tokens, tensor in told] == [(128, 1), (64, 1), (32, 1), (128, 2)]
    times = measure_products([deck], Clock(world.single_rank_world(), 0.0))
    assert {each.kind for each in times} >= {"forward", "input_gradient", "weight_gradient", "logits"}
    assert all(each.seconds > 0 for each in times)
    for whole in (96 * 32, 32 * 32, 61 * 32):
        passes = {each.kind for each in times if each.m * each.n * each.k == 64 * whole}
        assert len(passes) >= 3


@pytest.mark.parametrize("keys", [(), LLAMA], ids=["gpt2", "llama"])
def test_every_kind_of_element_is_timed(world: World, keys: tuple[str, ...]) -> None:
    found = measure_elementwise([small_deck(*keys)], Clock(world.single_rank_world(), 0.0))
    assert set(found) == set(PASSES)
    assert all(forward > 0 for forward, _ in found.values())
    assert all(backward > 0 for kind, (_, backward) in found.items() if kind != "loss")


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        (CalibrateOptions(formats="fp32,fp7"), "--formats fp7: must be fp32, bf16 or fp16"),
        (CalibrateOptions(most="12 B"), "--max-bytes 12 B: must be at least 1 KiB"),
        (CalibrateOptions(most="twelve"), "twelve"),
    ],
)
def test_wishes_that_cannot_be(world: World, tmp_path: Path, wish: CalibrateOptions, sentence: str) -> None:
    with pytest.raises(HpctrainError, match=sentence):
        calibrate(world.single_rank_world(), tmp_path / "machine.toml", wish)
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputOutputError, match="cannot be written"):
        calibrate(world.single_rank_world(), tmp_path / "no" / "machine.toml", quick())
    with pytest.raises(InputOutputError, match=r"none\.toml"):
        calibrate(world.single_rank_world(), tmp_path / "machine.toml", quick(tmp_path / "none.toml"))
    eight = tmp_path / "eight.toml"
    eight.write_text(DECK + '[precision]\ncompute = "fp8"\n')
    with pytest.raises(HpctrainError, match=r'precision\.compute.*is unsupported \(use "bf16"\)'):
        measured_decks([eight])
    assert read_deck(eight).precision.compute == "fp8"


def test_the_verb_writes_what_plan_reads(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(DECK.replace("[run]", '[run]\ntitle = "tiny"'))
    verb = ("-m", "hpctrain", "calibrate", "--like", "tiny.toml", "--seconds", "0", "--max-bytes", "1 KiB")
    done = launch(0, *verb, "--formats", "fp32", "--out", "here.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Machine rates: here.toml" in done.stdout
    machine: MachineRates = read_machine(str(tmp_path / "here.toml"))
    plan = ("-m", "hpctrain", "plan", "tiny.toml", "--ranks", 1, "--machine")
    row = json.loads(launch(0, *plan, "here.toml", "--json", cwd=tmp_path).stdout)
    assert row["seconds"] > machine.fixed
    text = (tmp_path / "here.toml").read_text()
    (tmp_path / "less.toml").write_text(
        "\n".join(x for x in text.splitlines() if not x.startswith("memory ="))
    )
    less = launch(0, *plan, "less.toml", cwd=tmp_path)
    assert less.returncode == 2
    assert "machine.memory: is missing (`hpctrain calibrate` measures it)" in less.stderr
    unwritable = launch(0, *verb, "--out", "no/here.toml", cwd=tmp_path)
    assert unwritable.returncode == 3
    assert "cannot be written" in unwritable.stderr
