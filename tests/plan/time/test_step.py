"""Planned steps: symmetries, what grows with what, and that causes are the whole.

Tests of plan/time/step.py, plan/time/layers.py, plan/time/arrangement.py and plan/time/words.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.plan.deck import plan_deck
from hpctrain.plan.time.layers import layer_sizes
from hpctrain.plan.time.machine import Machine, parse_machine, read_machine
from hpctrain.plan.time.step import CAUSES, plan_step
from hpctrain.plan.time.words import WHAT, time_lines
from tests.engines import LLAMA, small_deck
from tests.plan.time.test_machine import FILE

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

MIXTURE = (*LLAMA, "model.experts=4", "model.experts_per_token=2", "model.shared_experts=1")
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


def planned(machine: Machine, ranks: int, *keys: str) -> Mapping[str, float]:
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


@pytest.mark.parametrize("keys", [(), LLAMA, MIXTURE], ids=["gpt2", "llama", "mixture"])
def test_layers_tell_all_parameters_and_products(keys: tuple[str, ...]) -> None:
    deck = small_deck(*keys)
    assert deck.model.vocabulary
    shape = ModelShape.of(deck, deck.model.vocabulary)
    layers, counted = layer_sizes(shape), count(shape)
    told = sum(each.split_elements + each.expert_elements + each.whole_elements for each in layers)
    assert told == counted.parameters
    flops = sum(2 * matrix.elements for each in layers for matrix in each.matrices)
    flops += sum(each.core.flops for each in layers if each.core is not None)
    assert 3 * flops == counted.flops_per_token


def test_people_are_told() -> None:
    deck: Deck = small_deck("layout.pipeline=2")
    machine = parse_machine(SLOW, "")
    assert deck.model.vocabulary
    step = plan_step(deck, 2, deck.model.vocabulary, machine)
    lines = time_lines(step, machine, 1000)
    assert "on ours" in lines[0]
    assert "TFLOP/s a rank" in lines[0]
    assert any(WHAT["products"] in line for line in lines)
    assert set(WHAT) == set(CAUSES)


def test_a_machine_has_what_the_deck_does_not_say() -> None:
    alone = parse_machine(FILE, "")
    together = alone.model_copy(update={"shared_memory": True, "gradients": "compute"})
    deck = alone.of_deck(small_deck("layout.zero=1"))
    assert (deck.machine.ranks_per_node, deck.machine.memory) == (4, 4_000_000_000)
    assert (deck.communication.transport, deck.precision.gradients) == ("mpi", "fp32")
    deck = together.of_deck(small_deck("layout.zero=1"))
    assert (deck.communication.transport, deck.precision.gradients) == ("auto", "compute")
    said = together.of_deck(small_deck("machine.ranks_per_node=2", "precision.gradients=fp32"))
    assert (said.machine.ranks_per_node, said.precision.gradients) == (2, "fp32")


def test_what_is_not_in_the_seconds_is_said() -> None:
    machine = parse_machine(FILE, "")
    deck = small_deck("communication.compress=int8", "optimizer.name=lion")
    assert deck.model.vocabulary
    step = plan_step(deck, 2, deck.model.vocabulary, machine)
    assert step.untold == ("communication.compress = int8", "optimizer.name = lion")
    assert "communication.compress = int8, optimizer.name = lion" in time_lines(step, machine, 10)[-1]
    assert plan_step(small_deck(), 2, deck.model.vocabulary, machine).untold == ()
    served = small_deck("communication.server=sync")
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
    row = plan_deck(tmp_path / "deck.toml", ranks, advised=False, rates=read_machine("selene-2021")).row()
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
    assert row["node"]["ranks"] == 8
    assert 0 < row["bytes_between_nodes_by_axis"]["data x context"] < row["bytes_by_axis"]["data x context"]
    assert "tensor" not in {axis for axis, sent in row["bytes_between_nodes_by_axis"].items() if sent}
    wrong = launch(0, *verb, "selen", cwd=tmp_path)
    assert wrong.returncode == 3
    assert "Traceback" not in wrong.stderr
