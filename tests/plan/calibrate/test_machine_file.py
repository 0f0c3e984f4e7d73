"""A machine's file is read back the same.

Tests of plan/calibrate/machine_file.py.
"""

from __future__ import annotations

import pytest

from hpctrain.plan.calibrate.machine_file import machine_text, rounded
from hpctrain.plan.time.machine_rates import parse_machine, preset_names, read_machine
from tests.plan.time.test_machine_rates import FILE

MEASURED = (
    FILE.replace(
        'name = "ours"',
        'name = "with \\" and \\\\"\nshared_memory = true\nfixed = 1e-3\nlogits = 6.5e6\n'
        'date = "2026-01-01"\nranks = 4\noptimizer = 1e9',
    )
    + """
[machine.products.fp32.passes.weight_gradient]
efficiency = 0.7
saturation = 0.123456789
[machine.elementwise]
norm = [1e-10, 2e-10]
[machine.collectives.all_reduce]
ranks = 2
bytes = [1024.0, 4096.0]
seconds = [1e-6, 2e-6]
[[machine.crossing.all_gather]]
ranks = 2
together = 1
bytes = [1024.0]
seconds = [1e-5]
[[machine.crossing.all_gather]]
ranks = 4
together = 2
bytes = [1024.0]
seconds = [3e-5]
[machine.formats.bf16]
optimizer = 5e8
attention = { forward = 2e11, backward = 1e11 }
elementwise = { norm = [3e-10, 4e-10] }
[machine.spread]
products = [0.9, 1.1]
"""
)


@pytest.mark.parametrize("name", ["measured", *preset_names()])
def test_what_is_written_is_read_back_the_same(name: str) -> None:
    machine = parse_machine(MEASURED, "") if name == "measured" else read_machine(name)
    text = machine_text(machine)
    assert parse_machine(text, "") == machine
    assert machine_text(parse_machine(text, "")) == text


def test_units_stand_beside_figures() -> None:
    text = machine_text(parse_machine(MEASURED, ""))
    assert "memory_bandwidth = 10000000000.0  # bytes/s that a rank reads and writes in memory" in text
    assert "# seconds per element, forward and backward\n[machine.elementwise]" in text


def test_figures_have_no_more_digits_than_were_measured() -> None:
    machine = rounded(parse_machine(MEASURED, ""))
    assert machine.products["fp32"].passes["weight_gradient"].saturation == 0.1235
    assert machine.memory == 1e9
    assert machine.crossing["all_gather"][1].together == 2
    assert parse_machine(machine_text(machine), "") == machine
