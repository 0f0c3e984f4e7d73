"""The benchmark of attention with a window: what it measures, in which order, and its table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from torch import Tensor

from hpctrain.bench.attention_speed import (
    AttentionBenchOptions,
    AttentionResult,
    bench_attention,
    result_lines,
)
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.layer_functions import LayerFunctions
from hpctrain.parallel.operations import AttentionSize

OPTIONS = AttentionBenchOptions(64, None, 4, 2, 8, "bf16")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_full_attention_and_a_window_take_turns(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, int]] = []
    for functions in (LayerFunctions, *LayerFunctions.__subclasses__()):
        attend = functions.attend

        def noted(
            self: LayerFunctions, inputs: AttentionInputs, rule: AttentionRule, attend=attend
        ) -> Tensor:
            calls.append(("compiled" if self.compiled else "torch", rule.window))
            assert inputs.query.shape == (64, 1, 4, 8) and inputs.key.shape == (64, 1, 2, 8)
            return attend(self, inputs, rule)

        monkeypatch.setattr(functions, "attend", noted)
    output = mpi_tmp_path / "figures.json"
    bench_attention(world, OPTIONS, 3, output)
    world.everyone.barrier()
    forms = [("compiled", 0), ("compiled", 16), ("torch", 0), ("torch", 16)]
    calls = calls[-16:]  # compiled functions are compared with torch's first
    assert calls == [*reversed(forms), *forms, *reversed(forms), *forms]
    figures = [AttentionResult(**each) for each in json.loads(output.read_text())]
    assert [(each.functions, each.window) for each in figures] == forms
    assert all(len(each.speed) == 3 and each.forward_s > 0 and each.backward_s > 0 for each in figures)
    assert figures[0].speed == figures[2].speed == [1.0] * 3
    if world.rank == 0:
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith("Attention of 64 positions, 4 heads of 8 features, bf16, ")
        assert shown[-1] == "the window leaves 43.8% of the scores: speed at most 2.29"
        assert Counter(line.split()[0] for line in shown[2:-1]) == {"compiled": 2, "torch": 2}


def test_speed_is_shown_as_median_with_extremes() -> None:
    figures = [
        AttentionResult("torch", 0, 0.1, 0.3, [1.0, 1.0, 1.0]),
        AttentionResult("torch", 16, 0.05, 0.15, [2.1, 1.9, 2.0]),
    ]
    shown = result_lines(figures, AttentionSize(4, 2, 8, 64, 16), "fp32, CPU")
    assert shown[2].split() == ["torch", "none", "100", "ms", "300", "ms", "1"]
    assert shown[3].split() == ["torch", "16", "50", "ms", "150", "ms", "2.00", "1.90", "2.10"]


def test_sequences_that_do_not_fit_into_memory_are_refused(world: World) -> None:
    options = AttentionBenchOptions(10**12, 5, 4, 2, 8, "fp32")
    with pytest.raises(HpctrainError, match=r"--sequence 1000000000000: does not fit .* shorter sequence"):
        bench_attention(world, options, 1, None)
