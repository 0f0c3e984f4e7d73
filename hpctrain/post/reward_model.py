"""Reward model from a checkpoint that scores answers of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.checkpoint.evaluation_deck import evaluation_deck
from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_difference import tokenizer_difference
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.post.rollout import Answer, AnswerRows
from hpctrain.train.evaluate import known_tokenizer
from hpctrain.train.inference_engine import load_inference_engine
from hpctrain.train.step import Step
from hpctrain.train.token_scores import values_of
from hpctrain.watch.checkpoint_target import find_checkpoint


@dataclass
class RewardModel:
    """Reward model on the ranks that hold it. The score of an answer is the model's value at its last token.

    Attributes:
        step: Step of the model's engine, which runs its forward passes.
        length: Largest number of tokens of a prompt with its answer.
    """

    step: Step
    length: int

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        """Return the score of each answer. Collective over the ranks of the model."""
        values = torch.cat(list(values_of(self.step, Batches(AnswerRows(answers, self.length), 0))))
        last = torch.tensor([len(each.ids) - 1 for each in answers])
        scores: list[float] = values[torch.arange(len(answers)), last].tolist()
        return scores


def open_reward_model(
    world: World, name: str, tokenizer: Tokenizer, max_length: int, where: str
) -> RewardModel:
    """Load a reward model, in the layout that it was trained with if that fits the ranks. Collective.

    Args:
        world: Ranks that hold the model.
        name: Path of a checkpoint, or of the folder of a run.
        tokenizer: Tokenizer of the policy.
        max_length: Largest number of tokens of a prompt with its answer.
        where: Place of the name in the deck, with which messages begin.

    Raises:
        HpctrainError: On all ranks if it is not a reward model, has another tokenizer, or does not support
            sequences of `max_length` tokens.
    """
    try:
        path = find_checkpoint(world, Path(name))
    except InputOutputError as error:
        raise InputOutputError([f"{where}: {each}" for each in error.problems]) from None
    state = read_state(path, world.everyone)
    with world.agreement():
        deck = evaluation_deck(state, path, [], world.size)
        if deck.objective.kind != "reward":
            raise HpctrainError(
                f'{where}: {path} is not a reward model (objective.kind = "reward" trains one)'
            )
        model_tokenizer = known_tokenizer(state, path)
        texts = model_tokenizer.text, tokenizer.text
        if difference := tokenizer_difference(*texts, "its tokenizer", "the run's"):
            raise HpctrainError(f"{where}: {path} has another tokenizer: {difference}")
        if deck.batch.sequence < max_length:
            limit = f"supports {deck.batch.sequence} tokens, but prompts with answers may have {max_length}"
            raise HpctrainError(f"{where}: {path} {limit} (use a smaller batch.sequence)")
    engine = load_inference_engine(path, deck, world)
    batches = Batches(AnswerRows([], deck.batch.sequence), 0)
    return RewardModel(Step(engine, batches, deck.batch.micro_size, 0.0, deck.run.seed), deck.batch.sequence)
