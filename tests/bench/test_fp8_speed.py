from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench import fp8_speed
from hpctrain.bench.fp8_speed import PARTS, PASSES, MatmulShape, bench_fp8
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.parallel.fp8.recipes import RECIPES


@pytest.mark.mpi(min_size=1, max_size=2)
def test_every_recipe_takes_its_turn_beside_bf16(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ratios are those of the passes' sums, of one round of its own."""
    monkeypatch.setattr(fp8_speed, "SECONDS", 0.0)
    output = mpi_tmp_path / "figures.json"
    bench_fp8(world, ["32x48x64", "16x32x40"], 1, output)
    world.everyone.barrier()
    figures = json.loads(output.read_text())
    assert [(each["shape"], each["recipe"]) for each in figures] == [
        (shape, recipe) for shape in ("32x48x64", "16x32x40") for recipe in ("bf16", *RECIPES)
    ]
    base = {each["shape"]: each for each in figures if each["recipe"] == "bf16"}
    for each in figures:
        assert list(each["passes_s"]) == list(PASSES) and min(each["passes_s"].values()) > 0
        assert list(each["parts_s"]) == ([] if each["recipe"] == "bf16" else list(PARTS))
        assert each["native"] == (None if each["recipe"] == "bf16" else "none")
        ratio = sum(each["passes_s"].values()) / sum(base[each["shape"]]["passes_s"].values())
        assert each["of_bf16"] == pytest.approx(ratio)
    if world.rank == 0:
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "Matrix products: 32 tokens, 64 inputs, 48 outputs, CPU"
        assert sum("(emulated)" in line for line in lines) == 2 * len(RECIPES)


def test_a_shape_is_three_sizes() -> None:
    assert (
        MatmulShape.of("32x48x64") == MatmulShape(32, 48, 64) and str(MatmulShape(32, 48, 64)) == "32x48x64"
    )
    for text in ("32x48", "32x48x-1", "axbxc", "32x48x0"):
        with pytest.raises(HpctrainError, match=f"--shape {text}: must be TOKENSxOUTPUTSxINPUTS"):
            MatmulShape.of(text)
    with pytest.raises(HpctrainError, match="must be TOKENSxOUTPUTSxINPUTS"):
        MatmulShape.of(f"32x48x{'9' * 5000}")


def test_what_no_node_could_hold_is_refused_before_anything_is_timed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_speed, "measure_shape", lambda *_: pytest.fail("was timed"))
    sentence = "--shape 1000000000x100000x1: does not fit into memory: .*; use a smaller shape"
    with pytest.raises(HpctrainError, match=sentence):
        bench_fp8(world, ["32x48x64", "1000000000x100000x1"], 1, None)


def test_what_a_shape_holds_at_least_is_what_its_tensors_have() -> None:
    """Of a recipe 2 (a + b + c) + 4 c bytes, and twice a + b + c quantized; bf16 has the former alone."""
    a, b, c = 32 * 64, 32 * 48, 48 * 64
    of_bf16, quantized = 2 * (a + b + c) + 4 * c, 2 * (a + b + c)
    assert MatmulShape(32, 48, 64).needed_bytes == of_bf16 + len(RECIPES) * (of_bf16 + quantized)
