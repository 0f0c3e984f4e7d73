"""The tables of the benchmark of training, and what they say of losses that differ."""

from __future__ import annotations

from hpctrain.bench.training_table import (
    COLUMNS,
    Setting,
    TrainingResult,
    quantile,
    result_lines,
    same_losses,
)
from tests.engines import small_deck

SETTING = Setting("gpt-17m", "gpt2, 16.2M parameters", "bf16", 2, 8, 256, 95e9, "AMD EPYC 9655", (0.5, 2.25))


def row(name: str, rate: float, losses: list[float], agree: bool | None = True) -> TrainingResult:
    return TrainingResult(
        name=name,
        tokens_per_s=[rate, 1.2 * rate, 0.9 * rate],
        ratios=[1000 / rate] * 3,
        step_seconds=[1.0, 1.0, 1.0, 1.5],
        mfu=0.5,
        phase_ms={"forward": 123.4, "backward": 234.5} if rate == 1000 else {},
        losses=losses,
        losses_agree=agree,
        peak_bytes=1_230_000_000,
        node_bytes=2_340_000_000,
    )


def test_lines_fit_and_say_what_differs() -> None:
    figures = [
        row("data 2", 1000, [6.25, 6.125]),
        row("no-sync", 1250, [6.3, 6.2], None),
        row("ddp", 800, [6.25, 6.125]),
        row("ddp-alone", 1000, [6.25, 6.0], None),
        row("deepspeed-3", 500, [6.25, 6.5], False),
        row("torch-interleaved", 500, [6.25, 6.5]),
    ]
    lines = result_lines(SETTING, figures)
    assert max(map(len, lines)) <= COLUMNS, max(lines, key=len)
    text = "\n".join(lines)
    assert "AMD EPYC 9655, load average 0.5 to 2.2" in text
    assert "deepspeed-3: losses differ from data 2: step 2 has 6.50000, expected 6.12500" in text
    assert text.count("losses differ from") == 1
    assert "ratio to ddp 125.0% = computation 125.0% (no-sync / ddp-alone) x communication 100.0%" in text
    assert (
        "ratio to deepspeed-3 200.0% = computation 125.0% (no-sync / ddp-alone) x communication 160.0%"
        in text
    )
    assert "of torch-interleaved:" not in text
    (speed,) = (line.split() for line in lines if line.startswith("ddp ") and "%" in line)
    assert speed == ["ddp", "800", "720", "960", "1.50", "50.0%", "125.0%", "125.0%", "125.0%"]
    (trained,) = (line.split() for line in lines if line.startswith("ddp ") and "GB" in line)
    assert trained == ["ddp", "6.25000", "6.12500", "yes", "1.23", "GB", "2.34", "GB"]
    without = result_lines(SETTING, [figures[0], figures[2]])
    assert not any("= computation" in line for line in without)


def test_losses_agree_within_rounding_of_the_format() -> None:
    fp32, bf16 = small_deck(), small_deck("precision.compute=bf16")
    own = [6.25, 6.2, 6.1]
    assert same_losses(own, [6.25001, 6.2005, 6.1005], fp32)
    assert not same_losses(own, [6.252, 6.2, 6.1], fp32)
    assert not same_losses(own, [6.25, 6.2, 6.12], fp32)
    assert same_losses(own, [6.252, 6.21, 6.12], bf16)
    assert not same_losses(own, [6.27, 6.2, 6.1], bf16)


def test_quantiles_are_values() -> None:
    values = [float(value) for value in range(20, 0, -1)]
    assert [quantile(values, share) for share in (0.0, 0.05, 0.5, 0.95, 1.0)] == [1, 1, 10, 19, 20]
    assert quantile([3.0], 0.95) == 3.0
