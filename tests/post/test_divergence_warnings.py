"""Warnings of policies that go astray: what is a sign, when it is told, and when again.

Tests of post/divergence_warnings.py.
"""

from __future__ import annotations

import logging
from math import inf, nan
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.post.divergence_warnings import WINDOW, DivergenceWarnings
from hpctrain.post.policy_trainer import make_trainer
from hpctrain.train.hook import StepDone
from hpctrain.train.run import run_deck
from hpctrain.train.step import StepResult, TrainState
from tests.post.policies import policy, write_deck, write_prompts
from tests.post.rough_policies import policy_deck

DECK = policy_deck(Path("none"), "none", "model.vocabulary=257")
USUAL = {"loss": 0.1, "reward": 0.4, "reward_deviation": 0.5, "moved": 0.01, "kl": 0.2}
CRITIC = {"critic_loss": 0.3, "critic_grad_norm": 2.0}


class Watched:
    """A watcher, and the sentences that it says of a step; figures that are not given are as usual."""

    def __init__(self, caplog: pytest.LogCaptureFixture, rank: int = 0) -> None:
        self.hook, self.caplog, self.step = DivergenceWarnings(DECK, rank), caplog, 0

    def __call__(self, skipped: bool = False, **figures: float) -> list[str]:
        self.step += 1
        result = StepResult(USUAL | CRITIC | figures, 1.0, 1e-3, 8, 256, skipped)
        self.hook.after_step(StepDone(result, TrainState(self.step), 0.1, 0.1))
        found = [record.getMessage() for record in self.caplog.records if record.levelno == logging.WARNING]
        self.caplog.clear()
        return found


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    return Watched(caplog)


SIGNS = {
    "moved": ({"moved": 0.6}, "the policy differs by 0.6 nats per token from the policy that wrote"),
    "inf": ({"moved": inf}, "the policy differs by inf nats per token from the policy that wrote"),
    # More than half of what one of 257 tokens is worth.
    "kl": ({"kl": 2.9}, "the policy differs by 2.9 nats per token from its reference (kl), which"),
    "critic": (
        {"critic_loss": nan},
        "the critic's loss nan or gradient norm 2 is not finite, and its update",
    ),
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_is_told_and_told_again_ever_more_rarely(watched: Watched, name: str) -> None:
    figures, begins = SIGNS[name]
    assert watched() == []
    told = [step for step in range(10 * WINDOW) if watched(**figures)]
    assert told == [0, WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW]
    # It is gone for a while, as in the first step of every rollout, and then it is gone.
    assert all(watched(**(figures if step % 3 else {})) == [] for step in range(3 * WINDOW))
    assert all(watched() == [] for _ in range(WINDOW + 1))
    (sentence,) = watched(**figures)
    assert sentence.startswith(f"step {watched.step}: {begins}")


def test_what_is_usual_is_no_sign(watched: Watched) -> None:
    """A reward that rises to what all answers have, or that wavers by less than answers do, either."""
    for step in range(5 * WINDOW):
        share = step / (5 * WINDOW)
        wavers = 0.1 * (-1) ** step
        figures = {"reward": share + wavers * (1 - share), "reward_deviation": 0.5 * (1 - share)}
        assert watched(**figures, skipped=step % 3 == 0, moved=0.1 * share, kl=share) == []
    for step in range(5 * WINDOW):
        assert watched(reward=1 - 0.01 * (step % 2), reward_deviation=0.07 * (step % 2)) == []


def test_rewards_that_tell_nothing(watched: Watched) -> None:
    told = [watched(reward=0.0, reward_deviation=0.0) for _ in range(WINDOW)]
    assert told[:-1] == [[]] * (WINDOW - 1)
    (sentence,) = told[-1]
    assert sentence.startswith(
        f"step {WINDOW}: all answers of {WINDOW} steps have the reward 0, so there is nothing"
    )
    assert watched(reward=0.1, reward_deviation=0.2) == []


def test_a_reward_that_has_fallen(watched: Watched) -> None:
    assert all(watched(reward=0.9, reward_deviation=0.3) == [] for _ in range(WINDOW + 3))
    sentences = [sentence for _ in range(WINDOW) for sentence in watched(reward=0.2, reward_deviation=0.4)]
    assert len(sentences) == 1
    assert f"the mean reward of {WINDOW} steps has fallen to 0.515" in sentences[0]
    assert f", from 0.9 at step {WINDOW + 3}: " in sentences[0]


def test_updates_that_are_skipped(watched: Watched) -> None:
    assert all(watched(skipped=True) == [] for _ in range(WINDOW - 1))
    (sentence,) = watched(skipped=True)
    assert sentence.startswith(
        f"step {WINDOW}: the policy has not been updated for {WINDOW} steps: try a lower "
    )


def test_other_ranks_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    other = Watched(caplog, rank=1)
    assert other(moved=9.0) == []


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_tells_what_its_log_has(world: World, mpi_tmp_path: Path) -> None:
    """Steps of a hundred times the usual size: the policy moves far within its first rollout."""
    write_prompts(world, mpi_tmp_path, 60)
    deck = write_deck(
        world, mpi_tmp_path, "far", policy("ppo", more="epochs = 4\n"), size=16, rate="0.5", steps=8
    )
    assert run_deck(world, deck, ["learning_rate.warmup=0"], trainer_factory=make_trainer) == 0
    if world.rank == 0:
        log = (mpi_tmp_path / "far/log.txt").read_text()
        assert log.count("from the policy that wrote its samples (moved)") == 1
