"""`hpctrain check`: right layouts pass, wrong ones are told by tensor; alone it starts ranks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hpctrain.cli.check import command
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.host.commands import restart_on_ranks
from hpctrain.host.launcher import LAUNCHERS
from hpctrain.parallel.tensor import ColumnLinear, RowLinear
from hpctrain.train.layout_check import check

DECK = """
[run]
title = "small"
steps = 3
[model]
family = "gpt2"
layers = 3
hidden = 32
heads = 4
[data]
tokens = "nowhere.h5"
[batch]
global_size = 8
sequence = 16
[layout]
tensor = 2
"""


@pytest.fixture
def deck(world: World, mpi_tmp_path: Path) -> Path:
    path = mpi_tmp_path / "deck.toml"
    if world.rank == 0:
        path.write_text(DECK)
    world.everyone.barrier()
    return path


def told(world: World, deck: Path, *overrides: str) -> tuple[int, str]:
    """The exit code, and what rank 0 shows."""
    shown = list[str]()
    code = check(world, deck, overrides, shown.append)
    assert len(shown) == (world.rank == 0)
    text: str = world.everyone.broadcast_object(shown[0] if shown else None)
    return code, text


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", [(), ("layout.tensor=1", "layout.pipeline=2"), ("layout.tensor=1",)])
def test_a_right_layout_passes(world: World, deck: Path, layout: tuple[str, ...]) -> None:
    code, text = told(world, deck, *layout)
    assert code == 0
    kinds = (
        "initial parameters",
        "losses and metrics",
        "gradients",
        "gradient norms",
        "parameters after both steps",
        "state after both steps",
    )
    counts = [re.search(rf"\n{kind} +(\d+) +\d\.\de[+-]\d\d  ", text) for kind in kinds]
    assert f"All {sum(int(count[1]) for count in counts if count)} are within 1e-05" in text
    assert all(counts)
    assert "this layout computes the same model" in text


@pytest.mark.mpi(min_size=2, max_size=2)
def test_models_on_ranks_of_their_own_are_refused(world: World, deck: Path) -> None:
    policy = "objective.kind=ppo", 'policy.reward=["exact-match"]', "policy.tokens=4"
    with pytest.raises(
        HpctrainError, match=r"critic_ranks=1: is supported by `hpctrain run` and `hpctrain resume` only"
    ):
        check(world, deck, [*policy, "policy.critic_ranks=1", "layout.tensor=1"], lambda _: None)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_all_that_differs_is_told(world: World, deck: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = RowLinear._add_bias_gradients

    def each_rank(self: RowLinear, output_gradient: torch.Tensor) -> None:
        add(self, output_gradient * self.layer_context.tensor.size)

    monkeypatch.setattr(RowLinear, "_add_bias_gradients", each_rank)
    code, text = told(world, deck)
    assert code == 1
    for block in range(2):
        for name in ("attention.output", "feed_forward.down"):
            assert (
                f"gradient of blocks.{block}.{name}.bias differs from the one-rank run by 1.0e+00 of its "
                "largest element (allowed: 1e-05); split over no axis; it is 2 times the expected value: a "
                "reduction over the tensor axis (2 ranks) is likely duplicated"
            ) in text.replace("\n", " ")
    assert "this layout computes a different model" in text


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_factor_of_all_of_a_tensor_is_named(
    world: World, deck: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ColumnLinear._add_bias_gradients

    def more(self: ColumnLinear, output_gradient: torch.Tensor) -> None:
        # Of the layout alone: what it is compared with has no tensor ranks.
        add(self, output_gradient * (1.5 if self.layer_context.tensor.size > 1 else 1.0))

    monkeypatch.setattr(ColumnLinear, "_add_bias_gradients", more)
    code, text = told(world, deck)
    assert code == 1
    plain = text.replace("\n", " ")
    assert "feed_forward.up.bias differs" in plain
    assert "split over tensor; it is 1.5 times the expected value" in plain


def test_it_starts_ranks_of_its_own(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "deck.toml").write_text(DECK)
    done = launch(0, "-m", "hpctrain", "check", "deck.toml", "--ranks", "2", cold=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("small: 2 ranks (pipeline 1 x data 1 x context 1 x tensor 2)")
    assert done.stdout.count("the same model") == 1


def test_ranks_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    restart_on_ranks(None, {})
    restart_on_ranks(1, {})
    with pytest.raises(HpctrainError, match=r"--ranks 2: there is neither mpirun nor \$MPIRUN here"):
        restart_on_ranks(2, {"MPIRUN": "no-such-program -v", "PATH": ""})
    started = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    restart_on_ranks(2, started)
    with pytest.raises(HpctrainError, match="--ranks 4: the launcher started 2"):
        restart_on_ranks(4, started)
    assert CliRunner().invoke(command, ["x.toml", "--ranks", "0"]).exit_code == 2
