"""Every mistake of a user: one clear sentence from rank 0, the right exit code on all ranks, no traceback."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError

Launch = Callable[..., subprocess.CompletedProcess[str]]

DECK = """\
[run]
title = "small"
steps = 4
[model]
family = "gpt2"
layers = 1
hidden = 16
heads = 2
[data]
tokens = "tokens.h5"
validation = 0.2
[batch]
global_size = 4
micro_size = 1
sequence = 16
[checkpoint]
every = 2
[machine]
peak_flops = 1e10
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a token file and a deck."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "text.txt").write_text("hello world, " * 300)
    (folder / "deck.toml").write_text(DECK)
    return folder


@pytest.fixture
def hpctrain(work: Path, launch: Launch) -> Launch:
    """`hpctrain(ranks, *arguments)` in the work folder, which has its token file."""

    def run(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        return launch(ranks, "-m", "hpctrain", *arguments, cwd=work)

    if not (work / "tokens.h5").exists():
        assert run(0, "prepare", "tokens.h5", "text.txt").returncode == 0
    return run


def complaint(done: subprocess.CompletedProcess[str], code: int, count: int = 1) -> str:
    """What the job said on stderr, checked for form: `count` sentences, no traceback, the exit code."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: error: ")]
    assert len(said) == count, done.stderr
    return "\n".join(said)


def refusal(deck: Path, *overrides: str) -> tuple[str, ...]:
    """The sentences of a deck that two ranks refuse, read as `hpctrain run` reads it.

    That all ranks end with these, which are told once, other tests show.
    """
    with pytest.raises(HpctrainError) as caught:
        read_deck(deck, overrides, 2)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_mistakes_in_a_deck_are_told_together(hpctrain: Launch, work: Path) -> None:
    (work / "wrong.toml").write_text(
        DECK.replace("layers = 1", "layer = 1\nlayers = 'two'").replace("micro_size = 1", "micro_size = 0")
    )
    said = complaint(hpctrain(2, "run", "wrong.toml"), 2, 3)
    assert "wrong.toml:6: model.layer" in said
    assert "did you mean model.layers?" in said
    assert "wrong.toml:7: model.layers" in said
    assert "batch.micro_size = 0: must be a whole number of at least 1" in said


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["layout.tensor=3"], "layout.tensor"),
        (["batch.global_size=3"], "must be a multiple of"),
        (["layout.data=3", "batch.global_size=6"], "layout.data"),
        (["model.heads=3"], "must divide model.hidden = 16"),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide(work: Path, overrides: list[str], sentence: str) -> None:
    assert any(sentence in problem for problem in refusal(work / "deck.toml", *overrides))


def test_sizes_that_ranks_do_not_divide(hpctrain: Launch) -> None:
    said = complaint(hpctrain(2, "run", "deck.toml", "--set", "layout.tensor=3"), 2, 3)
    assert "layout.tensor" in said


def test_token_files_that_cannot_be_used(hpctrain: Launch, work: Path) -> None:
    said = complaint(hpctrain(2, "run", "deck.toml", "--set", "data.tokens=missing.h5"), 3)
    assert "missing.h5" in said
    assert "hpctrain prepare" in said
    complaint(hpctrain(2, "run", "deck.toml", "--set", "data.tokens=text.txt"), 3)
    whole = (work / "tokens.h5").read_bytes()
    (work / "cut.h5").write_bytes(whole[: len(whole) - 1000])
    complaint(hpctrain(2, "run", "deck.toml", "--set", "data.tokens=cut.h5"), 3)
    with h5py.File(work / "other.h5", "w") as other:
        other["x"] = 1
    said = complaint(hpctrain(2, "run", "deck.toml", "--set", "data.tokens=other.h5"), 3)
    assert "other.h5" in said
    said = complaint(hpctrain(2, "run", "deck.toml", "--set", "model.vocabulary=100"), 2)
    assert "model.vocabulary" in said
    assert "257" in said


def test_a_changed_token_ends_a_run_on_all_ranks(hpctrain: Launch, work: Path) -> None:
    whole = bytearray((work / "tokens.h5").read_bytes())
    with h5py.File(work / "tokens.h5") as file:
        tokens = file["tokens"]
        place, count = tokens.id.get_offset(), len(tokens)
    whole[place + 40] ^= 1
    (work / "changed.h5").write_bytes(whole)
    said = complaint(hpctrain(2, "run", "deck.toml", "--set", "data.tokens=changed.h5"), 3)
    assert f"changed.h5: piece 1 of 1, tokens 0 to {count - 1}, is damaged" in said


def test_checkpoints_and_folders_that_cannot_be_used(hpctrain: Launch, launch: Launch, work: Path) -> None:
    done = hpctrain(2, "run", "deck.toml")
    assert done.returncode == 0, done.stderr
    said = complaint(hpctrain(2, "run", "deck.toml"), 2)
    assert "holds another run already" in said
    good = work / "runs" / "small" / "checkpoints" / "step-00000004.h5"
    whole = good.read_bytes()
    with h5py.File(good, "r") as file:
        place = file["model/blocks.0.feed_forward.up.weight"].id.get_offset()
    flipped = bytearray(whole)
    flipped[place + 100] ^= 4
    for name, content in (
        ("cut.h5", whole[:-2000]),
        ("flipped.h5", bytes(flipped)),
        ("text.h5", b"no checkpoint"),
    ):
        (good.parent / name).write_bytes(content)
        done = hpctrain(2, "resume", str(good.parent / name), "--set", "run.steps=6")
        assert done.returncode in {2, 3}, done.stderr
        assert name in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("hpctrain: error: ") == 1
    assert good.read_bytes() == whole
    virtual, name = good.parent / "virtual.h5", "model/blocks.0.feed_forward.up.weight"
    virtual.write_bytes(whole)
    with h5py.File(virtual, "r+") as file:
        layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
        layout[:] = h5py.VirtualSource("gone.h5", "x", file[name].shape)
        del file[name]
        file.create_virtual_dataset(name, layout)
    done = launch(0, "-m", "hpctrain", "inspect", virtual, cwd=work, own_end=True)
    assert done.returncode == 3, done.stderr  # HDF5 used to crash at the end of the process
    assert f"/{name} is not one contiguous range of the file" in done.stderr
    virtual.unlink()
    done = hpctrain(1, "resume", str(good), "--set", "run.steps=5")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(work / "runs")


def test_help_and_mistakes_on_the_command_line(hpctrain: Launch) -> None:
    done = hpctrain(0, "--help")
    assert done.returncode == 0
    assert "resume" in done.stdout
    done = hpctrain(0, "rnu")
    assert done.returncode == 2
    assert 'did you mean "run"?' in done.stderr


PIPELINE = """
[layout]
pipeline = 2
"""
GOOD = "F0 B0 F1 B1 F2 B2 F3 B3"


def pipelined(work: Path, keys: str, layers: int = 4) -> None:
    """A deck pipeline.toml of two stages, with further keys of the layout from line 15 on."""
    deck = DECK.replace("layers = 1", f"layers = {layers}").replace(
        "[batch]", f"{PIPELINE.strip()}\n{keys}\n[batch]"
    )
    (work / "pipeline.toml").write_text(deck)


@pytest.mark.parametrize(
    ("layers", "keys", "sentence"),
    [
        (
            1,
            'schedule = "zb-v"',
            "pipeline.toml:13: layout.pipeline = 2: layout.pipeline x layout.chunks = 2 x 2 requires 2 "
            "layers or more, but model.layers is 1",
        ),
        (
            4,
            'schedule = "interleaved"\nchunks = 4',
            "pipeline.toml:13: layout.pipeline = 2: layout.pipeline x layout.chunks = 2 x 4 requires 6 "
            "layers or more, but model.layers is 4 (use layout.chunks = 3)",
        ),
        (
            4,
            'schedule = "zb-v"\nchunks = 1',
            'pipeline.toml:15: layout.chunks = 1: must be 2 with layout.schedule = "zb-v"',
        ),
        (
            4,
            'schedule = "interleaved"\nchunks = 1',
            'pipeline.toml:15: layout.chunks = 1: must be 2 or more with layout.schedule = "interleaved"',
        ),
        (
            4,
            'schedule = "1f1b"\nchunks = 2',
            'pipeline.toml:15: layout.chunks = 2: must be 1 with layout.schedule = "1f1b" (use '
            '"interleaved" for more)',
        ),
        (
            4,
            "split = [1, 1]",
            "pipeline.toml:14: layout.split = [1, 1]: must add up to model.layers = 4, not 2",
        ),
        (
            4,
            "split = [1, 1, 2]",
            "pipeline.toml:14: layout.split = [1, 1, 2]: must give 1 layer or more to each of the 2 "
            "parts of layout.pipeline x layout.chunks = 2 x 1, or 0 for the first (embedding) and the "
            "last",
        ),
        (
            4,
            'split = [1, 0, 2, 1]\nschedule = "interleaved"',
            "pipeline.toml:14: layout.split = [1, 0, 2, 1]: must give 1 layer or more to each of the 4 "
            "parts of layout.pipeline x layout.chunks = 2 x 2, or 0 for the first (embedding) and the "
            "last (output layer)",
        ),
        (
            4,
            "split = [-1, 5]",
            "pipeline.toml:14: layout.split = [-1, 5]: must give 1 layer or more to "
            "each of the 2 parts of layout.pipeline x layout.chunks = 2 x 1, or 0 for the first "
            "(embedding) and the last",
        ),
    ],
    ids=str,
)
def test_pipelines_that_cannot_be(work: Path, layers: int, keys: str, sentence: str) -> None:
    pipelined(work, keys, layers)
    (problem,) = refusal(work / "pipeline.toml")
    assert sentence in problem


def test_a_schedule_that_is_not_there(hpctrain: Launch, work: Path) -> None:
    pipelined(work, 'schedule = "1f2b"')
    said = complaint(hpctrain(2, "run", "pipeline.toml"), 2)
    assert 'pipeline.toml:14: layout.schedule = "1f2b": must be naive, gpipe, 1f1b,' in said
    assert not (work / "runs").exists()


def test_a_schedule_that_needs_more_micro_batches(hpctrain: Launch, work: Path) -> None:
    pipelined(work, 'schedule = "interleaved"')
    said = complaint(hpctrain(2, "run", "pipeline.toml", "--set", "batch.global_size=3"), 2)
    assert (
        'pipeline.toml:14: layout.schedule = "interleaved": micro-batches = 3: must be a multiple of '
        "the 2 stages (use 2 or 4"
    ) in said
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("second", "sentences", "on_ranks"),
    [
        ("F0 B0 F1 B1 F2 B2 F3 X3", ["orders.txt:2: 'X3': is not an action (write F, B, I or W"], True),
        ("F0 B0 F1 B1 F2 B2 F3", ["orders.txt:2: stage 1, B3: is missing"], False),
        ("F0 B0 F1 B1 F2 B2 F3 B3 B3", ["orders.txt:2: stage 1, B3 (action 9): is a duplicate"], False),
        ("F0 B0 F1 B1 F2 B2 B3 F3", ["orders.txt:2: stage 1, B3 (action 7): requires F3"], False),
        (
            "F0 F1 B0 B1 F2 B2 F3 B3",
            [
                "orders.txt:1: stage 0, B0 (action 2): deadlock",
                "orders.txt:2: stage 1, F1 (action 2): deadlock",
            ],
            True,
        ),
    ],
    ids=["unknown", "missing", "doubled", "order", "deadlock"],
)
def test_schedule_files_that_cannot_run(
    hpctrain: Launch, work: Path, second: str, sentences: list[str], on_ranks: bool
) -> None:
    """One sentence for each stage that has a mistake, and the same ones from a run: of what cannot be read,
    and of what cannot run.
    """
    pipelined(work, 'schedule = "orders.txt"')
    (work / "orders.txt").write_text(f"{GOOD}\n{second}\n")
    said = complaint(hpctrain(0, "schedule", "orders.txt"), 2, len(sentences))
    assert all(sentence in said for sentence in sentences), said
    if on_ranks:
        assert complaint(hpctrain(2, "run", "pipeline.toml"), 2, len(sentences)) == said
        assert not (work / "runs").exists()
