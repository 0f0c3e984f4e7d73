"""The benchmark of the blocks of families: their models, their share of a product's speed, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench.block_speed import FAMILIES, BlocksResult, bench_blocks, result_lines
from hpctrain.comm.world import World

SMALL = ("model.hidden=32", "model.mlp=48", "model.layers=2", "model.heads=2", "batch.sequence=16")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_every_family_is_compared_with_a_matrix(
    world: World, mpi_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = mpi_tmp_path / "figures.json"
    bench_blocks(world, (), SMALL, 2, output)
    world.everyone.barrier()
    figures = {each["family"]: each for each in json.loads(output.read_text())}
    assert list(figures) == list(FAMILIES)
    # Two blocks of 4 * 32 * 32 in attention, 3 * 32 * 48 in the feed-forward part, and norms.
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    norms = {"llama": 2, "qwen2": 2, "qwen3": 3, "gemma": 2, "gemma2": 4, "gemma3": 5}
    biases = {"qwen2": 3}
    for family, each in figures.items():
        vectors = 2 * 32 * (norms[family] + biases.get(family, 0))
        assert each["parameters"] == matrices + vectors
        assert len(each["seconds"]) == len(each["share"]) == 2 and min(each["share"]) > 0
        assert each["relative"] == pytest.approx(
            [own / first for own, first in zip(each["share"], figures["llama"]["share"], strict=True)]
        )
    if world.rank == 0:
        assert capsys.readouterr().out.splitlines()[0].startswith("Blocks, 64 tokens, fp32, ")


def test_all_models_have_about_17_million_parameters(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks have 16.1M, and the table of 512 tokens another 0.3M."""
    shown: dict[str, int] = {}

    def record(_: World, decks: dict[str, object], rounds: int) -> list[BlocksResult]:
        from hpctrain.model.count import count
        from hpctrain.model.shape import ModelShape

        shown.update((name, count(ModelShape.of(deck, 512)).parameters) for name, deck in decks.items())
        return [BlocksResult("llama", 1, [1.0], [1.0], [1.0])]

    monkeypatch.setattr("hpctrain.bench.block_speed.measure_blocks", record)
    bench_blocks(world, ("qwen3", "gemma3"), (), 1, None)
    assert list(shown) == ["qwen3", "gemma3"]
    assert all(16.2e6 < parameters < 17e6 for parameters in shown.values())


def test_shares_are_shown_as_medians_with_extremes() -> None:
    figures = [
        BlocksResult("llama", 16_000_000, [0.5, 0.6, 0.7], [0.9, 0.91, 0.95], [1.0, 1.0, 1.0]),
        BlocksResult("gemma3", 16_000_000, [0.5, 0.6, 0.7], [0.85, 0.86, 0.9], [0.99, 0.98, 1.01]),
    ]
    assert result_lines(figures, "fp32, CPU")[3].split()[1:] == [
        "16M",
        "600",
        "ms",
        "86.0%",
        "0.990",
        "0.980",
        "1.010",
    ]
