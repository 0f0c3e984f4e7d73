"""`hpctrain bench` as a user starts it: every benchmark with its options; mistakes are sentences."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.bench import command
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError

Launch = Callable[..., subprocess.CompletedProcess[str]]
DECK = """
[run]
title = "bench"
steps = 1
[model]
family = "gpt2"
layers = 1
hidden = 16
heads = 2
vocabulary = 64
[data]
tokens = "none.h5"
[batch]
global_size = 4
micro_size = 1
sequence = 16
[machine]
peak_flops = 1e10
"""
ONCE = ("--rounds", "1")
BENCHMARKS = {
    "attention": ("--sequence", "64", "--heads", "2", "--head-size", "8", *ONCE),
    "blocks": (
        "--family",
        "llama",
        "--family",
        "gemma3",
        "--set",
        "model.hidden=16",
        "--set",
        "model.layers=1",
        *ONCE,
    ),
    "collectives": ("--max-bytes", "1 KiB", "--operations", "all_reduce,send_recv", "--gloo"),
    "train": (
        *("deck.toml", *ONCE, "--steps", "1", "--no-sync", "--data-parallel", "--variant", "layout.zero=1"),
        *("--set", "layout.tensor=2"),
    ),
    "fp8": ("--shape", "32x48x64", *ONCE),
    "offload": ("deck.toml", *ONCE, "--set", "memory.optimizer=disk", "--set", "model.hidden=32"),
    "checkpoint": (
        "deck.toml",
        *ONCE,
        "--set",
        "layout.zero=1",
        "--dir",
        "there",
        "--warm",
        "--against",
        "dcp",
    ),
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a deck, and one for files."""
    (tmp_path / "deck.toml").write_text(DECK)
    (tmp_path / "there").mkdir()
    return tmp_path


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_benchmark_runs_and_writes_its_figures(launch: Launch, work: Path, benchmark: str) -> None:
    done = launch(2, "-m", "hpctrain", "bench", benchmark, *BENCHMARKS[benchmark], "--json", "figures.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((work / "figures.json").read_text())
    assert len(done.stdout.splitlines()) > 3
    files = sorted(path.name for path in work.rglob("*") if path.is_file())
    assert files == ["deck.toml", "figures.json"]


def test_memory_is_that_of_each_alone(launch: Launch, work: Path) -> None:
    wide = "model.hidden=1024"
    done = launch(
        *(2, "-m", "hpctrain", "bench", "train", "deck.toml", *ONCE, "--steps", "1", "--memory"),
        *("--variant", wide, "--json", "figures.json"),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((work / "figures.json").read_text())["rows"]}
    assert list(rows) == ["data 2", wide]
    # A node's bytes count libraries by their share, of which whatever else runs here has its own.
    assert rows[wide]["peak_bytes"] < rows[wide]["node_bytes"] < 2 * rows[wide]["peak_bytes"]
    assert 30e6 < rows["data 2"]["node_bytes"] < rows[wide]["peak_bytes"]
    # 12.6M parameters, each with its gradient and two moments, on two ranks.
    assert rows[wide]["node_bytes"] - rows["data 2"]["node_bytes"] > 2 * 16 * 12e6
    assert [row["losses_agree"] for row in rows.values()] == [True, False]
    assert f"{wide}: losses differ from data 2" in done.stdout


@pytest.mark.parametrize(
    ("benchmark", "option"),
    [*((each, "--rounds") for each in ("train", "offload", "checkpoint")), ("train", "--steps")],
)
def test_counts_begin_at_one(benchmark: str, option: str) -> None:
    for count in ("0", "-1"):
        done = CliRunner().invoke(command, [benchmark, "deck.toml", option, count])
        assert done.exit_code == 2
        assert f"Invalid value for '{option}': {count} is not in the range x>=1" in done.output


ALL = (
    "attention",
    "blocks",
    "collectives",
    "train",
    "mixture",
    "offload",
    "checkpoint",
    "communication",
    "fp8",
    "generate",
    "mup",
    "plan",
    "rate",
)


def test_files_that_cannot_be_written_are_told_before_anything_is_measured(tmp_path: Path) -> None:
    """Nor is the deck read, which is not there."""
    assert {*ALL} == {*command.commands}
    for benchmark in ALL:
        deck = () if benchmark in {"attention", "blocks", "collectives", "fp8", "plan"} else ("gone.toml",)
        for option in ("--json", *(["--plot"] if benchmark in {"mup", "rate"} else [])):
            file = tmp_path / "no" / "figures"
            with pytest.MonkeyPatch.context() as patch:
                told: list[str] = []
                patch.setattr("hpctrain.comm.verb.run_verb", partial(_verb, told))
                done = CliRunner().invoke(command, [benchmark, *deck, option, str(file)])
            assert done.exit_code == 3, done.output
            assert told == [f"{file}: cannot be written: No such file or directory ({file.parent})"]


def _verb(told: list[str], verb: Callable[[World], object], device: str = "auto") -> None:
    """As run_verb, on one rank, which does not end."""
    try:
        verb(World.start("cpu"))
    except HpctrainError as error:
        told += error.problems
        raise SystemExit(error.exit_code) from None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("collectives", "--operations", "sum"), "sum"),
        (("train", "deck.toml", "--variant", "layout.zeros=1"), "did you mean layout.zero?"),
        (("train", "gone.toml"), "gone.toml: cannot be read"),
        (("train", "deck.toml", "--against", "megatron"), "--against"),
        (("train", "deck.toml", "--against", "ddp"), "--against ddp: requires two ranks or more"),
        (("train", "deck.toml", "--only", "ddp"), "--only ddp: must be deck"),
        (("checkpoint", "deck.toml", "--rounds", "0"), "--rounds"),
        (
            ("attention", "--window", "4096"),
            "--window 4096: must be at least 1 and less than --sequence 4096",
        ),
        (("attention", "--kv-heads", "3"), "--kv-heads 3: must divide --heads 8"),
        (("blocks", "--family", "bert"), "--family bert: must be llama, qwen2, "),
        (("fp8", "--shape", "32x0x64"), "--shape 32x0x64: must be TOKENSxOUTPUTSxINPUTS"),
    ],
)
def test_a_mistake_is_one_sentence(
    launch: Launch, work: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    done = launch(0, "-m", "hpctrain", "bench", *arguments)
    assert done.returncode == (3 if "gone" in sentence else 2), done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
