"""Machines: what files may say of them, and what follows for products, elements, collectives and messages.

Tests of plan/time/machine_rates.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.parallel.vocabulary import chunk_rows
from hpctrain.plan.time.machine_rates import (
    GroupPlacement,
    MachineRates,
    collective_seconds,
    gather_seconds,
    message_seconds,
    parse_machine,
    preset_names,
    read_machine,
)

FILE = """
[machine]
name = "ours"
source = "made up"
ranks_per_node = 4
memory = 1e9
memory_bandwidth = 1e10
attention = { forward = 1e11, backward = 8e10 }
inside = { bandwidth = 1e10, latency = 1e-6 }
between = { bandwidth = 1e9, latency = 1e-5 }
[machine.products.fp32]
peak = 1e11
efficiency = 0.8
saturation = 100.0
"""


def test_published_machines_are_whole() -> None:
    assert {"selene-2021", "megascale-2024", "megatron-deepspeed-a100", "h100-eos"} <= set(preset_names())
    for name in preset_names():
        machine = read_machine(name)
        assert machine.name == name
        assert machine.source


def test_h100_has_all_formats_and_homes() -> None:
    machine = read_machine("h100-eos")
    assert (
        machine.products_of("fp8").peak > machine.products_of("bf16").peak == machine.products_of("fp16").peak
    )
    assert (
        machine.offload_bandwidth("host", "memory.optimizer")
        > machine.offload_bandwidth("disk", "memory.optimizer")
        > 0
    )


def test_large_products_reach_the_peak_s_share_and_small_ones_lose() -> None:
    rates = parse_machine(FILE, "ours.toml").products_of("fp32")
    large, small = 2.0**45 / 0.8e11, rates.seconds(64, 64, 64)
    assert rates.seconds(2**14, 2**15, 2**15) == pytest.approx(large, rel=0.02)
    assert small == pytest.approx(2 * 64**3 / 0.8e11 * (1 + 100 * 3 / 64))


@pytest.mark.parametrize(
    ("size", "stride", "per_node", "together"),
    [(8, 1, 4, 4), (8, 4, 4, 1), (8, 2, 4, 2), (3, 1, 8, 3), (6, 1, 4, 3), (1, 8, 4, 1)],
)
def test_ranks_of_a_group_share_nodes(size: int, stride: int, per_node: int, together: int) -> None:
    placement = GroupPlacement.of(size, stride, per_node)
    assert (placement.size, placement.ranks_per_node, placement.nodes) == (size, together, size // together)


def test_twice_the_bandwidth_takes_half() -> None:
    machine = parse_machine(FILE.replace("1e-6", "0.0").replace("1e-5", "0.0"), "ours.toml")
    faster = parse_machine(
        FILE.replace("1e-6", "0.0").replace("1e-5", "0.0").replace("bandwidth = 1e9", "bandwidth = 2e9"), ""
    )
    across = GroupPlacement.of(8, 4, 4)
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        once = collective_seconds(machine, operation, 1e9, across)
        assert collective_seconds(faster, operation, 1e9, across) == pytest.approx(once / 2)
    assert message_seconds(faster, 1e9, True) == pytest.approx(message_seconds(machine, 1e9, True) / 2)


def test_ranks_that_lie_together_have_their_links_together() -> None:
    machine = parse_machine(FILE.replace("1e-5", "0.0"), "ours.toml")
    alone, pairs = (collective_seconds(machine, "all_reduce", 1e9, GroupPlacement(8, k)) for k in (1, 2))
    assert alone == pytest.approx(2 * 7 / 8)  # 2 S (N-1)/N over 1 GB/s
    assert pairs == pytest.approx(alone / 2)


def test_what_was_measured_goes_before_what_is_computed() -> None:
    measured = "[machine.collectives.all_reduce]\nranks = 2\nbytes = [1e3, 1e6]\nseconds = [1e-5, 2e-4]\n"
    machine = parse_machine(FILE + measured, "ours.toml")
    two = GroupPlacement(2, 2)
    assert collective_seconds(machine, "all_reduce", 10, two) == 1e-5
    assert collective_seconds(machine, "all_reduce", 1e6, two) == pytest.approx(2e-4)
    assert collective_seconds(machine, "all_reduce", 1e7, two) == pytest.approx(2e-3)
    assert 1e-5 < collective_seconds(machine, "all_reduce", 5e5, two) < 2e-4
    assert collective_seconds(machine, "all_reduce", 1e6, GroupPlacement(4, 4)) == pytest.approx(2e-4 * 1.5)


@pytest.mark.parametrize(
    ("wrong", "right", "sentence"),
    [
        ("memory = 1e9\n", "", "ours.toml:2: machine.memory: is missing"),
        ("peak = 1e11\n", "", "ours.toml:11: machine.products.fp32.peak: is missing"),
        (
            "memory = 1e9",
            "memory = -1.0",
            "ours.toml:6: machine.memory: input should be greater than or equal to 1",
        ),
        ("memory = 1e9", "speed = 1", "ours.toml:6: machine.speed: unknown key"),
        (
            "forward = 1e11, ",
            "",
            "ours.toml:8: machine.attention: requires forward, the FLOP/s of attention (`hpctrain "
            "calibrate` measures",
        ),
        (", backward = 8e10", "", "ours.toml:8: machine.attention: requires backward, "),
        (
            "forward = 1e11, backward = 8e10",
            "features = [1e-9, 1e-9]",
            "ours.toml:8: machine.attention: requires forward and backward, ",
        ),
        (
            "memory = 1e9",
            "memory = 1e9\nformats.bf16.attention.forward = 1e11",
            "ours.toml:7: machine.formats.bf16.attention: requires backward, ",
        ),
        ("= 4", "= = 4", "ours.toml:5: "),
        ("memory = 1e9", "collectives.all_sum.ranks = 2", "ours.toml:6: machine.collectives.all_sum"),
        (
            "memory = 1e9",
            "collectives.all_gather = { ranks = 2, bytes = [1.0, 2.0], seconds = [1.0] }",
            "ours.toml:6: machine.collectives.all_gather: must have the same number of bytes and seconds",
        ),
        (
            "memory = 1e9",
            "collectives.all_gather = { ranks = 2, bytes = [2.0, 1.0], seconds = [1.0, 2.0] }",
            "ours.toml:6: machine.collectives.all_gather: must have bytes in ascending order",
        ),
    ],
)
def test_files_that_are_wrong(wrong: str, right: str, sentence: str) -> None:
    assert wrong in FILE
    with pytest.raises(HpctrainError) as raised:
        parse_machine(FILE.replace(wrong, right, 1), "ours.toml")
    assert any(problem.startswith(sentence) for problem in raised.value.problems), raised.value.problems


def test_names_that_are_none() -> None:
    with pytest.raises(HpctrainError, match=r"ours\.toml: requires a table \[machine\]"):
        parse_machine("[rank]\nmemory = 1", "ours.toml")
    with pytest.raises(InputOutputError, match='did you mean "selene-2021"'):
        read_machine("selene-2023")
    with pytest.raises(HpctrainError, match=r'^"": is not a machine \(use a file of '):
        read_machine("")
    with pytest.raises(HpctrainError, match=r"machine\.products\.fp32 is missing"):
        read_machine("selene-2021").products_of("fp32")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    assert isinstance(read_machine(str(path)), MachineRates)


def test_passes_of_a_matrix_have_rates_of_their_own() -> None:
    own = "\n[machine.products.fp32.passes.weight_gradient]\nefficiency = 0.4\nsaturation = 0.0\n"
    rates = parse_machine(FILE + own, "").products_of("fp32")
    assert rates.seconds(64, 64, 64, "weight_gradient") == pytest.approx(2 * 64**3 / 0.4e11)
    assert rates.seconds(64, 64, 64, "logits") == rates.seconds(64, 64, 64)


def test_formats_have_figures_of_their_own() -> None:
    own = (
        "\n[machine.elementwise]\nnorm = [1e-9, 2e-9]\n[machine.formats.bf16]\noptimizer = 5e8\n"
        "attention = { forward = 2e11, backward = 1e11 }\nelementwise = { norm = [3e-9, 4e-9] }\n"
    )
    machine = parse_machine(FILE.replace("memory = 1e9", "memory = 1e9\noptimizer = 1e9") + own, "")
    assert (machine.optimizer_of("fp32"), machine.optimizer_of("bf16")) == (1e9, 5e8)
    assert (machine.attention_of("fp32").forward, machine.attention_of("bf16").forward) == (1e11, 2e11)
    assert machine.elementwise_seconds("norm", "backward", 1e6, 4, "fp32") == pytest.approx(2e-3)
    assert machine.elementwise_seconds("norm", "backward", 1e6, 2, "bf16") == pytest.approx(4e-3)
    assert machine.elementwise_seconds("add", "forward", 1e6, 2, "bf16") == pytest.approx(3 * 2e6 / 1e10)


def test_logits_are_computed_some_at_a_time() -> None:
    """As the head does: of 50,257 logits each 128 tokens of 512 at once, on CPUs."""
    at_once = parse_machine(FILE.replace("memory = 1e9", "memory = 1e9\nlogits = 6.5e6"), "")
    assert at_once.logits_at_once(512, 50257) == chunk_rows(512, 50257, gpu=False) == 128
    assert parse_machine(FILE, "").logits_at_once(512, 50257) == 512


def test_what_was_measured_between_nodes_counts_there() -> None:
    rows = "".join(
        f"[[machine.crossing.all_reduce]]\nranks = {2 * together}\ntogether = {together}\n"
        f"bytes = [1e3, 1e6]\nseconds = [1e-5, {seconds}]\n"
        for together, seconds in ((1, 4e-3), (2, 2e-3))
    )
    machine = parse_machine(FILE + rows, "")
    assert collective_seconds(machine, "all_reduce", 1e6, GroupPlacement(2, 1)) == pytest.approx(4e-3)
    assert collective_seconds(machine, "all_reduce", 1e6, GroupPlacement(4, 2)) == pytest.approx(2e-3)
    more = collective_seconds(machine, "all_reduce", 1e6, GroupPlacement(8, 4))  # those of the next fewer
    assert more == pytest.approx(2e-3 * (7 / 8) / (3 / 4))
    assert collective_seconds(machine, "all_gather", 1e6, GroupPlacement(2, 1)) == pytest.approx(
        0.5e6 / 1e9 + 1e-5
    )


def test_parameters_that_a_node_has_once_are_not_moved() -> None:
    apart = parse_machine(FILE, "")
    shared = apart.model_copy(update={"shared_memory": True})
    two, across = GroupPlacement(2, 2), GroupPlacement(2, 1)
    assert gather_seconds(apart, 1e9, two) == pytest.approx(0.05, rel=1e-3)
    assert gather_seconds(shared, 1e9, two) < 1e-5
    assert gather_seconds(shared, 1e9, across) == gather_seconds(apart, 1e9, across) > 0.4


@pytest.mark.parametrize(("link", "crosses"), [("inside", False), ("between", True)])
def test_links_that_were_not_measured(link: str, crosses: bool) -> None:
    lines = [line for line in FILE.splitlines() if not line.startswith(link)]
    machine = parse_machine("\n".join(lines), "")
    with pytest.raises(
        HpctrainError, match=rf"ours: machine\.{link} is missing.*`hpctrain calibrate`"
    ) as caught:
        message_seconds(machine, 1.0, crosses)
    assert ("if more share a node, use --ranks-per-node R" in str(caught.value)) == crosses
    assert message_seconds(machine, 1.0, not crosses) > 0
