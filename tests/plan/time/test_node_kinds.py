"""Machines of several kinds of node: what files say of them, and what is wrong with those.

Tests of plan/time/node_kinds.py.
"""

from __future__ import annotations

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.plan.time.machine_rates import parse_machine
from tests.engines import small_deck
from tests.plan.time.test_machine_rates import FILE

FIRST = FILE.replace('name = "ours"', 'name = "ours"\nnodes = 2')
FAST = """
[[machine.others]]
name = "fast"
nodes = 3
memory = 2e9
[machine.others.products.fp32]
peak = 2e11
"""
TWO = FIRST + FAST


def test_a_kind_has_what_it_says_and_else_what_the_first_one_has() -> None:
    machine = parse_machine(TWO, "")
    first, fast = machine.kinds
    assert (first.nodes, fast.nodes) == (2, 3)
    assert (fast.name, fast.memory, fast.products["fp32"].peak) == ("fast", 2e9, 2e11)
    assert fast.products["fp32"].efficiency == first.products["fp32"].efficiency
    same = fast.model_dump(exclude={"name", "nodes", "memory", "products"})
    assert same == first.model_dump(exclude={"name", "nodes", "memory", "products", "others"}) | {
        "others": ()
    }
    assert machine.memories == (("ours", 2, 1e9), ("fast", 3, 2e9))
    assert parse_machine(FILE, "").kinds == (parse_machine(FILE, ""),)
    assert parse_machine(FILE, "").memories == ()


def test_what_was_measured_over_a_link_goes_with_it() -> None:
    measured = "[machine.collectives.all_reduce]\nranks = 2\nbytes = [1e3]\nseconds = [1e-5]\n"
    link = FAST.replace("nodes = 3", "nodes = 3\ninside = { bandwidth = 2e10, latency = 0.0 }")
    assert parse_machine(FIRST + measured + FAST, "").others[0].collectives
    assert not parse_machine(FIRST + measured + link, "").others[0].collectives


def test_a_deck_is_planned_on_the_largest_memory() -> None:
    deck = parse_machine(TWO, "").fill_deck(small_deck())
    assert deck.machine.memory == 4 * 2_000_000_000


@pytest.mark.parametrize(
    ("wrong", "right", "sentence"),
    [
        ("\nnodes = 2", "", "ours.toml:2: machine.nodes: is missing: the number of nodes of the first kind"),
        (
            "\nnodes = 3",
            "",
            "ours.toml:17: machine.others.0.nodes: is missing: the number of nodes of this kind",
        ),
        ("nodes = 3", "nodes = 0", "ours.toml:19: machine.others.0.nodes: input should be greater than"),
        ('name = "fast"\n', "", "ours.toml:17: machine.others.0.name: is missing"),
        (
            '"fast"',
            '"ours"',
            'ours.toml:18: machine.others.0.name: "ours" is already the name of another kind',
        ),
        ("memory = 2e9", "speed = 1", "ours.toml:20: machine.others.0.speed: unknown key"),
        ("memory = 2e9", "ranks_per_node = 8", "must be that of the first kind, 4"),
        ("memory = 2e9", 'messages = "blocking"', "applies to all kinds (use machine.messages)"),
        (
            "memory = 2e9",
            "others = []",
            "ours.toml:20: machine.others.0.others: is unsupported within a kind of node",
        ),
        ("memory = 2e9", "memory = -1.0", "ours.toml:20: machine.others.0.memory: input should be"),
        (FAST, "others = 3", "machine.others: input should be a valid tuple"),
        (FAST, "others = [3]", "machine.others.0: input should be a valid dictionary"),
    ],
)
def test_files_that_are_wrong(wrong: str, right: str, sentence: str) -> None:
    assert wrong in TWO
    text = TWO.replace(wrong, right, 1)
    if wrong == FAST:
        text = FIRST.replace("nodes = 2", f"nodes = 2\n{right}")
    with pytest.raises(HpctrainError) as raised:
        parse_machine(text, "ours.toml")
    assert any(sentence in problem for problem in raised.value.problems), raised.value.problems


def test_what_the_first_kind_lacks_is_said_once() -> None:
    with pytest.raises(HpctrainError) as raised:
        parse_machine(TWO.replace("memory_bandwidth = 1e10\n", ""), "ours.toml")
    assert [problem.split(":")[2] for problem in raised.value.problems] == [" machine.memory_bandwidth"]
