"""Tests that a run can start again in its folder after its first start was killed at any file operation."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.mirror_folder import new_token, write_token
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.post.policy_trainer import make_trainer
from hpctrain.train.run import resume, run_deck
from hpctrain.watch.folder import (
    clear_folder,
    clear_other_folder,
    explain_no_checkpoint,
    refuse_other_folder,
    resume_command,
)
from hpctrain.watch.run_files import names_of_a_run
from tests.data.chats import write_rows
from tests.data.preparing import prepare, prepare_rows

DECK = """
[run]
title = "first"
steps = 1
dir = "{folder}/run"
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
[data]
tokens = "{tokens}"
validation = 0.2
[batch]
global_size = 2
micro_size = 2
sequence = 16
[machine]
peak_flops = 1e10
"""
KINDS = {
    "text": "",
    "offload": '[memory]\noptimizer = "disk"\n',
    "dpo": '[objective]\nkind = "dpo"\n',
    "grpo": """
[objective]
kind = "grpo"
beta = 0.1
[policy]
reward = ["exact-match"]
tokens = 4
samples = 2
""",
}
"""Sections of a deck for which a run writes further files before its first step."""
TOKENS = {"dpo": "preferences.h5", "grpo": "prompts.h5"}
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

listeners: list[Callable[[str, tuple[Any, ...]], None]] = []
"""Functions that are called with audit events. Python cannot remove the audit hook that calls them."""


@pytest.fixture(scope="module", autouse=True)
def audit() -> None:
    sys.addaudithook(lambda event, arguments: [each(event, arguments) for each in listeners] and None)


@contextmanager
def copy_states(folder: Path, copies: Path) -> Iterator[list[Path]]:
    """Copy a folder before each file operation in it, during the block.

    Yields:
        The copies. A state with the same names and empty files as an earlier one is not copied again.
    """
    states: list[Path] = []
    known: set[frozenset[tuple[str, bool]]] = set()

    def copy_state(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES and not (event == "open" and (arguments[2] or 0) & WRITES):
            return
        paths = [str(each) for each in arguments[:2] if isinstance(each, str | os.PathLike)]
        if any(each.startswith(str(folder)) for each in paths) and folder.is_dir():
            listeners.clear()
            names = frozenset(
                (str(path.relative_to(folder)), path.is_file() and path.stat().st_size > 0)
                for path in folder.rglob("*")
            )
            if names not in known:
                known.add(names)
                states.append(copies / str(len(states)))
                shutil.copytree(folder, states[-1], symlinks=True)
            listeners.append(copy_state)

    listeners.append(copy_state)
    try:
        yield states
    finally:
        listeners.clear()


@pytest.fixture(scope="module")
def tokens(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a token file for each objective."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    prepare(world.single_rank_world(), folder / "text.h5", [str(folder / "text.txt")])
    rows: dict[str, list[dict[str, Any]]] = {
        "preferences": [{"prompt": f"p{n}", "chosen": "yes", "rejected": "no"} for n in range(10)],
        "prompts": [{"prompt": f"p{n}", "answer": "a"} for n in range(10)],
    }
    for kind, each in rows.items():
        source = write_rows(folder / f"{kind}.jsonl", each)
        prepare_rows(world.single_rank_world(), folder / f"{kind}.h5", [source], kind=kind, template="raw")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_killed_first_start_can_be_repeated(kind: str, world: World, tokens: Path, tmp_path: Path) -> None:
    path, folder = tmp_path / "deck.toml", tmp_path / "run"
    path.write_text(DECK.format(folder=tmp_path, tokens=tokens / TOKENS.get(kind, "text.h5")) + KINDS[kind])
    deck, single = read_deck(path, (), 1), world.single_rank_world()
    with copy_states(folder, tmp_path / "states") as states:
        assert run_deck(single, path, [], trainer_factory=make_trainer) == 0
    first = [state for state in states if not any((state / "checkpoints").glob("step-*"))]
    assert len(first) > 5

    def restore(state: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(state, folder, symlinks=True)

    for state in first:
        for fresh, again in ((False, False), (True, False), (False, True)):
            restore(state)
            clear_folder(deck, fresh=fresh, resumes=again)
        restore(state)
        with pytest.raises(InputOutputError, match="no valid checkpoint") as caught:
            resume(single, folder, [])
        begins = f"start again with `hpctrain run {folder}/deck.toml`"
        assert begins in str(caught.value) or not (folder / "deck.toml").exists()
    with_reference = [state for state in first if list(state.glob("*reference*"))]
    assert bool(with_reference) == (kind in TOKENS)
    for state in (first[0], *with_reference[:2]):
        restore(state)
        assert run_deck(single, path, [], trainer_factory=make_trainer) == 0


def test_killed_resume_into_another_folder_can_be_repeated(
    world: World, tokens: Path, tmp_path: Path
) -> None:
    """A resume into another folder is killed before the first checkpoint there, and then repeated."""
    path, folder = tmp_path / "deck.toml", tmp_path / "other"
    path.write_text(DECK.format(folder=tmp_path, tokens=tokens / TOKENS["dpo"]) + KINDS["dpo"])
    single = world.single_rank_world()
    assert run_deck(single, path, []) == 0
    checkpoint, keys = tmp_path / "run/checkpoints/step-00000001.h5", [f"run.dir={folder}", "run.steps=2"]
    with copy_states(folder, tmp_path / "states") as states:
        assert resume(single, checkpoint, keys) == 0
    first = [state for state in states if not any((state / "checkpoints").glob("step-*"))]
    assert len(first) > 5
    deck = read_deck(path, keys, 1)
    for state in first:
        shutil.rmtree(folder)
        shutil.copytree(state, folder, symlinks=True)
        refuse_other_folder(deck, checkpoint)
        clear_other_folder(deck, checkpoint)
        assert names_of_a_run(folder) == []
    shutil.rmtree(folder)
    shutil.copytree(first[-1], folder, symlinks=True)
    assert resume(single, checkpoint, keys) == 0
    # A folder with a checkpoint is not overwritten.
    with pytest.raises(HpctrainError, match="holds another run already"):
        refuse_other_folder(deck, checkpoint)


def test_mirrored_run_without_a_checkpoint_keeps_its_mirror(tokens: Path, tmp_path: Path) -> None:
    """It can be resumed. It starts again only with --fresh."""
    path, folder = tmp_path / "deck.toml", tmp_path / "run"
    path.write_text(DECK.format(folder=tmp_path, tokens=tokens / "text.h5"))
    deck = read_deck(path, (), 1)
    (folder / "checkpoints").mkdir(parents=True)
    for name in (".hpctrain-run", "deck.toml", "metrics.jsonl"):
        (folder / name).write_text(path.read_text())
    assert resume_command(folder, None) == f"hpctrain run {folder}/deck.toml"
    write_token(folder, new_token())
    assert resume_command(folder, None) == f"hpctrain resume {folder}"
    assert f"; resume with `hpctrain resume {folder}`" in explain_no_checkpoint(folder)
    with pytest.raises(HpctrainError) as caught:
        clear_folder(deck, fresh=False, resumes=False)
    (problem,) = caught.value.problems
    assert problem.endswith(
        "holds a run whose state its nodes may still have in memory; resume it with "
        f"`hpctrain resume {folder}`, or replace it with `--fresh`"
    )
    assert (folder / "mirror.json").exists()
    clear_folder(deck, fresh=True, resumes=False)
    assert not (folder / "mirror.json").exists()
