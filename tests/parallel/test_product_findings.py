"""What doctor says of matrix products: the fastest kernels, and products in 8 bits by what a device has."""

from __future__ import annotations

import pytest
import torch

from hpctrain.parallel.fp8 import multiply
from hpctrain.parallel.product_findings import check_fp8_products, check_kernels


def of_a_device(monkeypatch: pytest.MonkeyPatch, *products: tuple[bool, torch.dtype]) -> str:
    """What is said of one that has products in 8 bits (by row or not) with results in these types."""
    monkeypatch.setattr(multiply, "has_native", lambda _, by_row, dtype: (by_row, dtype) in products)
    return check_fp8_products(torch.device("cpu")).statement


def test_what_no_device_has_is_emulated() -> None:
    assert check_fp8_products(torch.device("cpu")).statement.startswith(
        "emulated in 16 or 32 bits, slower than bf16: tensor, delayed, row, block, mx"
    )
    assert not check_fp8_products(torch.device("cpu")).remedy


def test_recipes_are_told_by_what_the_device_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    by_matrix = [(False, torch.bfloat16), (False, torch.float32)]
    whole = of_a_device(monkeypatch, *by_matrix)
    assert whole.startswith(
        "in 8 bits: tensor, delayed; emulated in 16 or 32 bits, slower than bf16: row, block, mx"
    )
    both = of_a_device(monkeypatch, *by_matrix, (True, torch.bfloat16), (True, torch.float32))
    assert both.startswith(
        "in 8 bits: tensor, delayed, row; emulated in 16 or 32 bits, slower than bf16: block, mx"
    )
    stored = of_a_device(monkeypatch, *by_matrix, (True, torch.bfloat16))
    assert (
        "; in 8 bits except for weight gradients: row; emulated in 16 or 32 bits, slower than bf16: block, mx"
        in stored
    )


def test_doctor_tells_the_quickest_of_each_pass() -> None:
    threads = torch.get_num_threads()
    told = check_kernels(torch.device("cpu"))
    assert not told.remedy
    assert told.statement.startswith("fp32: forward ")
    assert "; bf16: forward " in told.statement
    assert told.statement.count("weight gradients") == 2
    assert torch.get_num_threads() == threads
