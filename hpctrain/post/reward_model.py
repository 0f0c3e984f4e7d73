"""A reward model of a checkpoint as what judges answers, on all ranks."""

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
from hpctrain.train.inference_engine import shown_engine
from hpctrain.train.scored import values_of
from hpctrain.train.step import Step
from hpctrain.watch.newest import find_checkpoint


@dataclass
class RewardModel:
    """Gives an answer the value of its last token."""

    step: Step
    length: int

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        """A number for each answer. Collective."""
        values = torch.cat(list(values_of(self.step, Batches(AnswerRows(answers, self.length), 0))))
        last = torch.tensor([len(each.ids) - 1 for each in answers])
        found: list[float] = values[torch.arange(len(answers)), last].tolist()
        return found


def open_reward_model(world: World, name: str, tokenizer: Tokenizer, longest: int, where: str) -> RewardModel:
    """The reward model of a checkpoint, or of a run's folder, in the layout that trained it where that fits.
    Collective.

    HpctrainError, beginning with `where`, on all ranks where it is none, knows other tokens, or sees fewer
    than the `longest` answer has with its prompt.
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
        own = known_tokenizer(state, path)
        if difference := tokenizer_difference(own.text, tokenizer.text, "its tokenizer", "the run's"):
            raise HpctrainError(f"{where}: {path} has another tokenizer: {difference}")
        if deck.batch.sequence < longest:
            sees = f"supports {deck.batch.sequence} tokens, but prompts with answers may have {longest}"
            raise HpctrainError(f"{where}: {path} {sees} (use a smaller batch.sequence)")
    engine = shown_engine(path, deck, world)
    batches = Batches(AnswerRows([], deck.batch.sequence), 0)
    return RewardModel(Step(engine, batches, deck.batch.micro_size, 0.0, deck.run.seed), deck.batch.sequence)
