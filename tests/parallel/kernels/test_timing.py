"""What is measured, and what is made of it."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

from hpctrain.parallel.kernels import timing as module
from hpctrain.parallel.kernels.matmul_kernels import KERNELS, PASSES, MatmulKernel
from hpctrain.parallel.kernels.timing import MatmulPass, Operands, measure, quickest


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
def test_all_kernels_agree_with_the_library(storage: torch.dtype) -> None:
    wanted = [MatmulPass(kind, 24, 16, 40) for kind in PASSES]
    rows = measure(wanted, storage, torch.float32)
    assert [list(row) for row in rows] == [[k.name for k in KERNELS.values() if k.is_available(storage)]] * 4
    assert all(0 < seconds < inf for row in rows for seconds in row.values())


def test_a_kernel_that_is_wrong_here_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(MatmulKernel):
        name = "onednn"

        def input_gradient(
            self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None
        ) -> Tensor:
            return super().input_gradient(output_gradient, weight, out) * 1.01

        def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
            raise RuntimeError("could not create a primitive")

        def add_weight_gradient(
            self, into: Tensor, output_gradient: Tensor, inputs: Tensor, overwrite: bool
        ) -> None:
            into.fill_(torch.nan)

    monkeypatch.setattr(module, "KERNELS", {"library": KERNELS["library"], "onednn": Wrong()})
    rows = measure([MatmulPass(kind, 24, 16, 40) for kind in PASSES], torch.float32, torch.float32)
    seconds = {kind: row["onednn"] for kind, row in zip(PASSES, rows, strict=True)}
    assert [kind for kind in PASSES if seconds[kind] == inf] == [
        "logits",
        "input_gradient",
        "weight_gradient",
    ]
    assert quickest({"library": 1.0, "onednn": inf}) == "library"


def test_another_kernel_has_to_be_clearly_quicker() -> None:
    assert quickest({"library": 1.0, "onednn": 0.985}) == "library"
    assert quickest({"library": 1.0, "onednn": 0.97}) == "onednn"
    assert quickest({"fp32-onednn": 0.495, "fp32": 0.5, "library": 1.0}) == "fp32"
    assert quickest({"library": inf, "onednn": inf}) == "library"


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_measured_is_bounded(threads: int) -> None:
    most = module.MAX_FLOPS_PER_THREAD * threads
    small = MatmulPass("forward", 512, 256, 512)
    assert small.shortened(most) == small
    assert MatmulPass("weight_gradient", 1024, 1536, 512).shortened(1 << 28) == (
        "weight_gradient",
        512,
        384,
        512,
    )
    for shape in ((4096, 50257, 12288), (64, 1 << 20, 4096), (8, 4096, 1 << 20), (1 << 20, 4096, 64)):
        for kind in PASSES:
            cut = MatmulPass(kind, *shape).shortened(most)
            assert all(mine <= whole for mine, whole in zip(cut[1:], shape, strict=True))
            assert all(mine >= min(whole, 256) for mine, whole in zip(cut[1:], shape, strict=True))
            assert cut.flops <= most * (1 if kind != "logits" else 2)
    assert MatmulPass("logits", 129, 50257, 768).shortened(1 << 28)[1:] == (129, 4096, 256)


def test_rounds_are_those_that_all_can_make(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compute = Operands.compute

    def counted(self: Operands, kernel: MatmulKernel, overwrite: bool = False) -> Tensor:
        calls.append(kernel.name)
        return compute(self, kernel, overwrite)

    monkeypatch.setattr(Operands, "compute", counted)
    found = []
    for longest in (1e9, 1e-9):
        calls.clear()
        measure([MatmulPass("forward", 8, 8, 8)], torch.float32, torch.float32, lambda _, s=longest: s)
        found.append(calls.count("onednn"))
    # Once to compare, once in the first round, and in the others.
    assert found == [3, 2 + module._ROUNDS]
