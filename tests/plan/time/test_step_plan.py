"""Planned steps: symmetries, what grows with what, and that causes are the whole.

Tests of plan/time/step_plan.py, plan/time/layer_seconds.py, plan/time/layout_sizes.py and
plan/time/time_text.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpctrain.costs.layer_flops import model_flops
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.time.layer_seconds import layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates, parse_machine, read_machine
from hpctrain.plan.time.step_plan import CAUSES, plan_step, step_seconds
from hpctrain.plan.time.time_text import WHAT, time_lines
from tests.engines import LLAMA, small_deck
from tests.plan.time.test_machine_rates import FILE

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.per_token=2", "model.experts.shared=1")
LAYOUTS = {
    "alone": (1, ()),
    "data": (2, ()),
    "zero": (4, ("layout.zero=3",)),
    "tensor": (2, ("layout.tensor=2",)),
    "sequence": (2, ("layout.tensor=2", "layout.sequence_parallel=true")),
    "ring": (2, ("layout.context=2",)),
    "all_to_all": (2, ("layout.context=2", "layout.context_form=all_to_all")),
    "pipeline": (2, ("layout.pipeline=2",)),
    "zb-v": (2, ("layout.pipeline=2", "layout.schedule=zb-v", "model.layers=4")),
    "recompute": (1, ("memory.recompute=full",)),
    "experts": (2, (*MIXTURE, "layout.expert=2")),
}
EXPECTED = {
    "data": "gradients",
    "zero": "parameters",
    "tensor": "tensor",
    "sequence": "tensor",
    "ring": "context",
    "all_to_all": "context",
    "pipeline": "bubble",
    "zb-v": "messages",
    "recompute": "recompute",
    "experts": "expert",
}
SLOW = FILE.replace('name = "ours"', 'name = "ours"\nmessages = "blocking"')


def shape_of(deck: Deck) -> ModelShape:
    assert deck.model.vocabulary
    return ModelShape.of(deck, deck.model.vocabulary)


def planned(machine: MachineRates, ranks: int, *keys: str) -> Mapping[str, float]:
    deck = small_deck(*keys)
    assert deck.model.vocabulary
    return plan_step(deck, ranks, deck.model.vocabulary, machine).seconds_by_cause


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_costs_what_it_does(layout: str) -> None:
    ranks, keys = LAYOUTS[layout]
    causes = planned(parse_machine(SLOW, ""), ranks, *keys)
    assert tuple(causes) == CAUSES
    assert all(seconds >= 0 for seconds in causes.values())
    assert causes["products"] > 0 < causes["attention"]
    here = {cause for cause in set(EXPECTED.values()) if causes[cause] > 0}
    assert EXPECTED.get(layout, "products") in {*here, "products"}
    alone = {cause for cause in ("tensor", "context", "expert", "messages", "bubble") if causes[cause] > 0}
    assert layout not in {"alone", "data", "zero", "recompute"} or not alone


def test_twice_the_speed_takes_half_of_each_cause() -> None:
    deck = "layout.tensor=2", "layout.pipeline=2"
    slow = planned(parse_machine(SLOW, ""), 8, *deck)
    fast = planned(parse_machine(SLOW.replace("peak = 1e11", "peak = 2e11"), ""), 8, *deck)
    assert fast["products"] == pytest.approx(slow["products"] / 2)
    wide = SLOW.replace("1e-6", "0.0").replace("1e-5", "0.0")
    link = "inside = { bandwidth = 1e10"
    before = planned(parse_machine(wide, ""), 8, *deck)
    after = planned(parse_machine(wide.replace(link, "inside = { bandwidth = 2e10"), ""), 8, *deck)
    assert after["tensor"] == pytest.approx(before["tensor"] / 2)
    assert after["messages"] <= before["messages"]


def test_ranks_that_meet_wait_by_their_share() -> None:
    """Of what they compute, where their layers meet; all else stays."""
    calm = parse_machine(SLOW, "")
    busy = calm.model_copy(update={"waits": 0.1})
    for cause, keys in (
        ("tensor", "layout.tensor=2"),
        ("context", "layout.context=2"),
        ("", "layout.zero=1"),
    ):
        before, after = (planned(machine, 2, keys) for machine in (calm, busy))
        computed = sum(before[each] for each in ("products", "attention", "elementwise"))
        for each, seconds in before.items():
            if each == cause:
                assert 0.05 * computed < after[each] - seconds <= 0.1 * computed * (1 + 1e-9)
            else:
                assert after[each] == seconds


def test_more_ranks_take_less_of_products_and_more_of_sums() -> None:
    machine = parse_machine(FILE, "")
    few, many = (planned(machine, ranks, "batch.global_size=16") for ranks in (2, 4))
    assert many["products"] == pytest.approx(few["products"] / 2)
    assert many["gradients"] > few["gradients"]
    assert planned(machine, 4, "batch.global_size=16", "layout.zero=1")["optimizer"] == pytest.approx(
        many["optimizer"] / 4
    )


CLEAN = SLOW.replace("latency = 1e-6", "latency = 0.0").replace("latency = 1e-5", "latency = 0.0")


def test_a_ring_sends_what_its_closed_form_says() -> None:
    """An all-reduce of Phi elements: 2 Phi (N-1)/N of each rank, twice as fast where links are."""
    for ranks in (2, 4):
        elements = sum(
            layer.split_elements + layer.replicated_elements for layer in layer_sizes(shape_of(small_deck()))
        )
        seconds = planned(parse_machine(CLEAN, ""), ranks)["gradients"]
        assert seconds == pytest.approx(2 * 4 * elements * (ranks - 1) / ranks / 1e10)
        faster = CLEAN.replace("inside = { bandwidth = 1e10", "inside = { bandwidth = 2e10")
        assert planned(parse_machine(faster, ""), ranks)["gradients"] == pytest.approx(seconds / 2)


@pytest.mark.parametrize(
    ("stages", "chunks", "passes"), [(2, 1, 8), (4, 1, 8), (4, 1, 32), (4, 2, 8), (2, 4, 8)]
)
def test_bubbles_are_their_closed_forms(stages: int, chunks: int, passes: int) -> None:
    """(p-1)/m of what equal stages compute, (p-1)/(m v) in v chunks, where messages take no time."""
    block = layer_sizes(shape_of(small_deck()))[1]
    nothing = replace(block, matrices=(), core=None, elementwise=(), tied_elements=0, is_block=False)
    machine = parse_machine(CLEAN.replace('messages = "blocking"', ""), "")
    machine = machine.model_copy(update={"inside": machine.inside.model_copy(update={"bandwidth": 1e30})})
    at = replace(
        LayoutSizes.of(small_deck(), 1, 1000), pipeline=stages, micro_batches=passes, ranks_per_node=1000
    )
    schedule = generate_schedule("interleaved" if chunks > 1 else "1f1b", stages, passes, chunks)
    layers = (nothing, *[block] * stages * chunks, nothing)
    causes = step_seconds(layers, at, schedule, [1] * stages * chunks, machine)
    computed = sum(causes[cause] for cause in ("products", "attention", "elementwise", "recompute"))
    assert computed > 0
    assert causes["bubble"] / computed == pytest.approx((stages - 1) / (passes * chunks), rel=1e-6)


def test_more_micro_batches_take_as_much_more_of_what_each_takes() -> None:
    keys = ("layout.pipeline=2", "layout.tensor=2", "batch.micro_size=2")
    once, thrice = (planned(parse_machine(SLOW, ""), 8, *keys, f"batch.global_size={n}") for n in (16, 48))
    for cause in ("products", "attention", "elementwise", "tensor", "messages"):
        assert thrice[cause] == pytest.approx(3 * once[cause])
    for cause in ("gradients", "optimizer", "fixed", "bubble"):
        assert thrice[cause] == pytest.approx(once[cause])


_ARRANGED = some.builds(
    dict,
    tensor=some.sampled_from([1, 2, 4]),
    context=some.sampled_from([1, 2]),
    data=some.sampled_from([1, 2, 8]),
    micro_size=some.integers(1, 4),
    micro_batches=some.integers(1, 8),
    zero=some.integers(0, 3),
    recompute=some.sampled_from(["none", "selective", "full"]),
    sequence_parallel=some.booleans(),
    context_form=some.sampled_from(["ring", "all_to_all"]),
    ranks_per_node=some.sampled_from([1, 2, 4, 8]),
)


@settings(max_examples=60, deadline=None)
@given(_ARRANGED, some.floats(0, 1))
def test_faster_machines_are_never_slower(arranged: dict[str, Any], overlap: float) -> None:
    """In any cause, whatever is arranged; nor is what overlaps, but for latencies, or is computed once."""
    at = replace(LayoutSizes.of(small_deck(), 1, 8), **arranged)
    layers, schedule = layer_sizes(shape_of(small_deck())), generate_schedule("1f1b", 1, at.micro_batches, 1)
    machine = parse_machine(CLEAN, "")

    def seconds(machine: MachineRates, at: LayoutSizes) -> Mapping[str, float]:
        return step_seconds(layers, at, schedule, [len(layers) - 2], machine)

    before = seconds(machine, at)
    assert all(each >= 0 for each in before.values())
    link = machine.between.model_copy(update={"bandwidth": 3e9})
    faster = {
        "memory_bandwidth": 3e10,
        "between": link,
        "inside": machine.inside.model_copy(update={"bandwidth": 3e10}),
        "products": {
            form: rates.model_copy(update={"peak": 2 * rates.peak})
            for form, rates in machine.products.items()
        },
        "overlap": overlap,
    }
    for name, rate in faster.items():
        after = seconds(machine.model_copy(update={name: rate}), at)
        assert all(after[cause] <= before[cause] * (1 + 1e-9) for cause in CAUSES), name
    once = seconds(machine, replace(at, recompute="none"))
    assert sum(once.values()) <= sum(before.values()) * (1 + 1e-9)


def test_mfu_counts_nothing_twice() -> None:
    machine = parse_machine(FILE, "")
    once, twice = (plan_step(small_deck(*keys), 1, 61, machine) for keys in ((), ("memory.recompute=full",)))
    assert once.mfu == pytest.approx(once.flops_per_rank / 1e11)
    assert twice.mfu == pytest.approx(twice.flops / twice.seconds / 1e11)
    assert twice.mfu < twice.flops_per_rank / 1e11
    row = twice.row()
    assert row["mfu"] == twice.mfu
    assert row["run_seconds"] == pytest.approx(small_deck().run.steps * twice.seconds)
    assert "MFU" in time_lines(twice, machine)[0]
    assert "days" not in time_lines(twice, machine)[-1]


@pytest.mark.parametrize(
    ("seconds", "time", "hours"),
    [
        (0.0031, "takes 3.1 ms, less than 0.01 rank-hours.", 0.0031 / 3600),
        (7200.0, "takes 2 h 00 min, 2 rank-hours.", 2.0),
        (86400 * 2.5, "takes 2 d 12 h (2.5 days), 60 rank-hours.", 60.0),
    ],
)
def test_time_of_a_run_has_readable_units(seconds: float, time: str, hours: float) -> None:
    machine = parse_machine(FILE, "")
    step = plan_step(small_deck(), 1, 61, machine)
    step = replace(step, seconds_by_cause={"fixed": seconds / step.steps})
    assert step.run_seconds == pytest.approx(seconds) and step.rank_hours == pytest.approx(hours)
    assert any(line.endswith(time) for line in time_lines(step, machine))


@pytest.mark.parametrize("keys", [(), LLAMA, MIXTURE], ids=["gpt2", "llama", "mixture"])
def test_layers_tell_all_parameters_and_products(keys: tuple[str, ...]) -> None:
    deck = small_deck(*keys)
    assert deck.model.vocabulary
    shape = ModelShape.of(deck, deck.model.vocabulary)
    layers, counted = layer_sizes(shape), count(shape)
    told = sum(each.split_elements + each.expert_elements + each.replicated_elements for each in layers)
    assert told == counted.parameters
    flops = sum(2 * matrix.elements for each in layers for matrix in each.matrices)
    flops += sum(each.core.flops for each in layers if each.core is not None)
    assert 3 * flops == model_flops(shape).flops_per_token


def test_people_are_told() -> None:
    deck: Deck = small_deck("layout.pipeline=2")
    machine = parse_machine(SLOW, "")
    assert deck.model.vocabulary
    step = plan_step(deck, 2, deck.model.vocabulary, machine)
    lines = time_lines(step, machine)
    assert "on ours" in lines[0]
    assert "TFLOP/s per rank" in lines[0]
    assert any(WHAT["products"] in line for line in lines)
    assert set(WHAT) == set(CAUSES)


@pytest.mark.parametrize(("stages", "crossing"), [(2, 1), (4, 1), (8, 1)])
def test_messages_cross_nodes_where_the_next_stage_is_on_another(stages: int, crossing: int) -> None:
    """Eight ranks on two nodes: of all boundaries one lies between these, as both of its sides wait."""
    machine = parse_machine(SLOW.replace("latency = 1e-5", "latency = 1.0"), "")
    at = replace(LayoutSizes.of(small_deck(), 1, 4), pipeline=stages, data=8 // stages, micro_batches=16)
    assert sum(at.crosses(stage, stage + 1) for stage in range(stages - 1)) == crossing
    assert at.crosses(stages - 1, 0) and not at.crosses(0, 0)
    keys = (f"layout.pipeline={stages}", "model.layers=8", "batch.global_size=32", "batch.micro_size=1")
    messages = planned(machine, 8, *keys)
    # A micro-batch's way there and back over the slow link, of which either side waits for half.
    assert sum(messages.values()) >= 2 * 32 / (8 // stages) * 0.5


def test_nodes_of_six_ranks_are_met_by_stages_of_four() -> None:
    at = replace(LayoutSizes.of(small_deck(), 1, 6), pipeline=3, data=4)
    assert [at.crosses(stage, stage + 1) for stage in range(2)] == [True, True]
    at = replace(at, pipeline=6, data=2)
    assert [at.crosses(stage, stage + 1) for stage in range(5)] == [False, False, True, False, False]


def test_a_machine_has_what_the_deck_does_not_say() -> None:
    alone = parse_machine(FILE, "")
    together = alone.model_copy(update={"shared_memory": True, "gradients": "compute"})
    deck = alone.fill_deck(small_deck("layout.zero=1"))
    assert (deck.machine.ranks_per_node, deck.machine.memory) == (4, 4_000_000_000)
    assert (deck.communication.transport, deck.precision.gradients) == ("mpi", "fp32")
    deck = together.fill_deck(small_deck("layout.zero=1"))
    assert (deck.communication.transport, deck.precision.gradients) == ("auto", "compute")
    said = together.fill_deck(small_deck("machine.ranks_per_node=2", "precision.gradients=fp32"))
    assert (said.machine.ranks_per_node, said.precision.gradients) == (2, "fp32")
    assert deck.machine.prepared_product == small_deck().machine.prepared_product
    measured = alone.model_copy(update={"prepared_product": 300_000.0})
    assert measured.fill_deck(small_deck()).machine.prepared_product == 300_000
    assert measured.fill_deck(small_deck("machine.prepared_product=7")).machine.prepared_product == 7


def test_what_is_not_in_the_seconds_is_said() -> None:
    machine = parse_machine(FILE, "")
    deck = small_deck("communication.compress=int8", "memory.activation_format=bf16")
    assert deck.model.vocabulary
    step = plan_step(deck, 2, deck.model.vocabulary, machine)
    assert step.ignored_keys == ("communication.compress = int8", "memory.activation_format = bf16")
    assert "communication.compress = int8, memory.activation_format = bf16" in time_lines(step, machine)[-1]
    assert plan_step(small_deck(), 2, deck.model.vocabulary, machine).ignored_keys == ()
    served = small_deck("communication.server.mode=sync")
    with pytest.raises(HpctrainError, match=r"communication\.server.*leave --machine out"):
        plan_step(served, 2, deck.model.vocabulary, machine)


@pytest.mark.parametrize(("ranks", "sent"), [(2, 3535), (8, 6186)])
def test_a_rank_sends_what_rings_do(tmp_path: Path, ranks: int, sent: int) -> None:
    """Of 3,535 MB of gradients in half precision, by 2 and by 8 data ranks (Megatron-LM)."""
    (tmp_path / "deck.toml").write_text(
        '[run]\ntitle = "t"\nsteps = 10\n[model]\nfamily = "gpt2"\nlayers = 24\nhidden = 2048\nheads = 16\n'
        'vocabulary = 271600\n[data]\ntokens = "none.h5"\n[batch]\nglobal_size = 8\nsequence = 1024\n'
        '[precision]\ncompute = "fp16"\n[optimizer]\nclip = 0\n'
    )
    row = plan_deck(
        tmp_path / "deck.toml",
        ranks,
        options=PlanOptions(with_savings=False, rates=read_machine("selene-2021")),
    ).row()
    assert row["parameters_total"] == pytest.approx(3535e6 / 2, rel=2e-3)
    by_axis = row["bytes_by_axis"]
    assert isinstance(by_axis, dict)
    assert by_axis["data x context"] / 1e6 == pytest.approx(sent, rel=2e-3)


def test_the_verb_tells_seconds_by_cause(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(
        '[run]\ntitle = "t"\nsteps = 10\n[model]\nfamily = "gpt2"\nlayers = 4\nhidden = 64\nheads = 4\n'
        'vocabulary = 100\n[data]\ntokens = "none.h5"\n[layout]\ntensor = 2\n[batch]\nglobal_size = 16\n'
        'sequence = 32\n[precision]\ncompute = "bf16"\n'
    )
    verb = ("-m", "hpctrain", "plan", "deck.toml", "--ranks", 16, "--machine")
    done = launch(0, *verb, "selene-2021", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["seconds"] == pytest.approx(sum(row["seconds_by_cause"].values()))
    assert row["tflops_per_rank"] > 0
    assert row["total_bytes"] > 0
    assert row["bytes_by_axis"]["tensor"] > 0
    assert row["node"] == row["node"] | {"ranks": 1, "memory_bytes": 80_000_000_000}  # of a GPU
    assert 0 < row["bytes_between_nodes_by_axis"]["data x context"] < row["bytes_by_axis"]["data x context"]
    assert "tensor" not in {axis for axis, sent in row["bytes_between_nodes_by_axis"].items() if sent}
    wrong = launch(0, *verb, "selen", cwd=tmp_path)
    assert wrong.returncode == 3
    assert "Traceback" not in wrong.stderr
