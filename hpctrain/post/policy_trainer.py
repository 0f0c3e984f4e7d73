"""The trainer of a policy: a run's trainer whose samples are what the model itself writes, rollout by
rollout.

The policy is the run's engine, with all that watches it. A critic is an engine of its own beside it, whose
state is in the run's checkpoints; a reference and reward models are only looked at. A rollout is made when
the one before it is used up, so that between rollouts the run's state is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.conversations import PromptSequences
from hpctrain.data.order import SampleOrder
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.auxiliary_decks import concurrent_texts, critic_deck, generates_itself, is_checkpoint
from hpctrain.deck.code import NamedCode
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sections.policy import reward_weights
from hpctrain.deck.sections.rank_partition import CRITIC, POLICY, REWARD
from hpctrain.engine.build import build_engine
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.generation import generation_stage
from hpctrain.engine.layout.layer_placement import with_split
from hpctrain.engine.layout.model_placement import ModelPlacement
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.engine.stages.stage import Stage
from hpctrain.engine.weight_transfer import WeightTransfer
from hpctrain.model.transformer import Transformer
from hpctrain.objective.factory import make_token_sampling
from hpctrain.post.critic_loss import ClippedValue
from hpctrain.post.divergence_warnings import DivergenceWarnings
from hpctrain.post.experience import Experience, figures_of
from hpctrain.post.policy_reference import open_reference
from hpctrain.post.reward_model import RewardModel, open_reward_model
from hpctrain.post.rewards.rewards import Rewards, open_rewards
from hpctrain.post.rollout import RolloutSource
from hpctrain.post.samples_file import SamplesFile
from hpctrain.post.writer import AnswerWriter
from hpctrain.train import trainer as training
from hpctrain.train.memory_ledger import OtherMemory
from hpctrain.train.reference_scores import KNOWN
from hpctrain.train.scored import log_probabilities_of, values_of
from hpctrain.train.start import start_from_source
from hpctrain.train.step import Step, StepResult, TrainState
from hpctrain.train.trainer import Trainer, TrainerParts, step_of


def make_trainer(beginning: TrainerParts) -> Trainer:
    """What trains a run of any deck. Collective; HpctrainError on all ranks where something that it needs, as
    a reward, is not to be had.
    """
    if beginning.deck.objective.kind not in POLICY_KINDS:
        return training.make_trainer(beginning)
    return PolicyTrainer(beginning)


class PolicyTrainer(Trainer):
    """See above."""

    def __init__(self, beginning: TrainerParts) -> None:
        deck, engine, corpus = beginning.deck, beginning.engine, beginning.corpus
        self.seat = seat = beginning.seat
        world, prompts = seat.run_world, corpus.train.source
        assert isinstance(prompts, PromptSequences) and corpus.file is not None
        self.tokenizer = corpus.file.tokenizer
        rewards, models = self._rewards(deck)
        if rewards is not None:
            with world.agreement():
                held_out = [] if corpus.validation is None else [corpus.validation.source]
                for source in (prompts, *held_out):
                    assert isinstance(source, PromptSequences)
                    for index in range(source.count):
                        row = f"{corpus.file.where}: the row of prompt {source.number(index)}"
                        rewards.check(source.other_keys(index), row)
                rewards.start()
        self.closing = [] if rewards is None else [rewards.close]
        if deck.objective.kind == "ppo":
            engine.auxiliary_engines |= _critic(deck, seat, fresh=beginning.checkpoint is None)
        state = beginning.fill()
        rollout = deck.policy.rollout or deck.batch.global_size
        self.answers = RolloutSource(rollout)
        self.experience: Experience | None = None
        order, repeats = SampleOrder(rollout, deck.run.seed), corpus.train.repeats * prompts.count / rollout
        super().__init__(deck, engine, Batches(self.answers, 0, order, repeats), state)
        reference = open_reference(deck, seat, self.step, self.state, beginning.checkpoint)
        self._known = {} if reference is None else {KNOWN: reference.identity}
        self.writer: AnswerWriter | None = None
        self.shown: list[Stage] = []
        with seat.agreement():
            if not seat.idle:
                self.writer, self.shown = make_writer(seat.deck, engine, self.tokenizer)
        looked_at = [model.step.engine for model, _ in models.values() if model is not None]
        if reference is not None and reference.engine is not None:
            looked_at.append(reference.engine)
        self.shown += [each.stage for each in looked_at]
        self.closing += [each.close for each in looked_at]
        critic = None if (own := self._step.critic) is None else partial(values_of, own)
        self.experience = Experience(
            deck,
            seat,
            self.tokenizer,
            prompts,
            self.writer,
            rewards,
            models,
            old=None
            if seat.idle
            else partial(log_probabilities_of, self.step, sampling=make_token_sampling(deck)),
            reference=None if reference is None else reference.scored,
            values=critic,
        )
        self.hooks.append(DivergenceWarnings(deck, world.rank))
        self.samples = SamplesFile(Path(deck.run.dir), self.state.step, deck.policy.shown, world.rank == 0)

    @override
    def make_step(self, batches: Batches) -> Step:
        self._step = PolicyStep(self.deck, self.engine, batches, self._gather, self.seat)
        return self._step

    @property
    @override
    def world(self) -> World:
        return self.seat.run_world

    @property
    def computing(self) -> int:
        """See Trainer: those that have the policy."""
        return len(self.seat.partition.policy)

    @property
    @override
    def ranks(self) -> str:
        return self.seat.description

    @property
    @override
    def stage(self) -> int:
        return self.seat.stage

    @override
    def beside(self) -> OtherMemory:
        return OtherMemory(self.shown, 0 if self.writer is None else self.writer.cache)

    @property
    def settled(self) -> bool:
        """Between rollouts."""
        return self.state.samples % self._per_rollout == 0

    def used_up(self, samples: int) -> int:
        """See Trainer: whole rollouts. What is left of one was written by the policy that is given up, and
        whoever goes on from the state that is taken up has none of it.
        """
        return -(-samples // self._per_rollout) * self._per_rollout

    @property
    def known(self) -> Mapping[str, object]:
        """See Trainer: which reference it has."""
        return self._known

    @property
    def evaluated(self) -> tuple[str, ...]:
        """See Trainer; the loss is the reward with its sign turned, so that the lowest is the best."""
        return "loss", "reward", "reward_deviation", "length", "ended"

    @property
    def _per_rollout(self) -> int:
        return self.answers.count * self.deck.policy.epochs

    def _gather(self, state: TrainState) -> dict[str, float]:
        """Have the rollout that a step learns from; its figures."""
        assert self.experience is not None
        number, begun = divmod(state.samples, self._per_rollout)
        if not begun or self.answers.rollout is None:
            self.answers.rollout = rollout = self.experience.gather(number)
            with self.world.agreement():
                self.samples.write(
                    state.step + 1, "rollout", rollout.answers, rollout.rewards, self.tokenizer
                )
        return dict(self.answers.rollout.figures)

    def evaluate(self, batches: Batches, sequences: int) -> dict[str, float]:
        """Of an answer to each of the first held-out prompts, drawn alike each time. Collective."""
        prompts = batches.source
        assert isinstance(prompts, PromptSequences) and self.experience is not None
        indices = range(min(sequences, prompts.count))
        answers, scores = self.experience.judged(prompts, indices, [-1 - index for index in indices])
        with self.world.agreement():
            self.samples.write(self.state.step, "evaluation", answers, scores.parts, self.tokenizer)
        figures = figures_of(answers, scores)
        return {"loss": -figures["reward"], **figures}

    @override
    def close(self) -> None:
        for each in self.closing:
            each()

    def _rewards(self, deck: Deck) -> tuple[Rewards | None, dict[str, tuple[RewardModel | None, float]]]:
        """What judges answers by their texts, and what does by their tokens, with their weights; the models
        where they are.
        """
        keys, functions = deck.policy, dict[NamedCode, float]()
        models: dict[str, tuple[RewardModel | None, float]] = {}
        where = deck.problem("policy.reward", "").rstrip(": ")
        world = self.seat.world_of(REWARD)
        with self.seat.agreement():
            for name, weight in zip(keys.reward, reward_weights(keys), strict=True):
                if not is_checkpoint(name):
                    functions[deck.code(name)] = weight
                    continue
                model: RewardModel | None = None
                if world is not None:
                    model = open_reward_model(world, name, self.tokenizer, deck.batch.sequence, where)
                models[f"model_{len(models) + 1}" if models else "model"] = model, weight
        if not functions:
            return None, models
        with self.seat.run_world.agreement():
            rewards = open_rewards(
                functions, where, keys.answer, keys.seconds, keys.processes, taken=list(models)
            )
        return rewards, models


class PolicyStep(Step):
    """A step on answers of the present rollout, which `gather` has made where it is due; then, or on other
    ranks at once, one of the critic, if there is one, on the same.
    """

    def __init__(
        self,
        deck: Deck,
        engine: Engine,
        batches: Batches,
        gather: Callable[[TrainState], dict[str, float]],
        seat: ModelPlacement,
    ) -> None:
        super().__init__(engine, batches, deck.batch.micro_size, deck.optimizer.clip, deck.run.seed)
        self.gather, self.seat = gather, seat
        self.critic: Step | None = None
        if (critic := engine.auxiliary_engines.get(CRITIC)) is not None:
            own = critic_deck(deck, seat.run_world.size)
            assert own is not None
            self.critic = step_of(own, critic, batches)

    @property
    def has_samples(self) -> bool:
        """See Step; a run that goes on has none before its first rollout."""
        source = self.batches.source
        return isinstance(source, RolloutSource) and source.rollout is not None

    def __call__(
        self, state: TrainState, batch: int, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        """See Step; the critic's figures and norm have its name before theirs."""
        figures = self.gather(state)
        before = TrainState(**asdict(state))
        result, of_critic = None, None
        with self.seat.agreement():
            if not self.seat.idle:
                result = super().__call__(state, batch, before_update)
            if self.critic is not None:
                of_critic = self.critic(before, batch, before_update)
        result, reached = self.seat.broadcast_from(POLICY, (result, state))
        assert result is not None
        vars(state).update(vars(reached))
        figures |= result.figures
        if (of_critic := self.seat.broadcast_from(CRITIC, of_critic)) is not None:
            figures |= {f"{CRITIC}_{name}": value for name, value in of_critic.figures.items()}
            figures[f"{CRITIC}_grad_norm"] = of_critic.grad_norm
        return replace(result, figures=figures)


def _critic(deck: Deck, seat: ModelPlacement, fresh: bool) -> dict[str, Engine]:
    """The engine of a critic in its layout, by its name, on ranks that have it; with the weights that it
    starts from where the run is `fresh`. Collective.
    """
    with seat.run_world.agreement():
        own = critic_deck(deck, seat.run_world.size)
        assert own is not None
    world = seat.world_of(CRITIC)
    with seat.agreement():
        if world is None:
            return {}
        sizes = axis_sizes(own, world.size)
        same = world is seat.world and sizes == axis_sizes(seat.deck, world.size)
        mesh = seat.mesh if same else Mesh(world, sizes, seat.mesh.transport)
        critic = build_engine(with_split(own, own.runtime_choices.split), world, mesh)
        critic.objective = ClippedValue(deck.policy.value_clip)
        if fresh and own.model.source is not None:
            start_from_source(own, critic)
    return {CRITIC: critic}


def make_writer(deck: Deck, engine: Engine, tokenizer: Tokenizer) -> tuple[AnswerWriter, list[Stage]]:
    """What writes with the engine's model: its own parts, where each rank of its tensor axis has all that
    takes; else a copy in that layout, which gets the weights before it writes, and is then named, too.
    Collective.
    """
    world, mesh, name = engine.world, engine.mesh, deck.run.title
    if generates_itself(deck):
        part = engine.stage.models[0]
        assert isinstance(part, Transformer)
        copies, copy = mesh.size("data"), mesh.coordinate("data")
        places, ready = concurrent_texts(deck, copies), partial(engine.stage.pass_context, "generate")
        return AnswerWriter(world, part, tokenizer, copies, copy, name, ready, places), []
    part, stage = generation_stage(deck, world, deck.layout.tensor)
    transfer = WeightTransfer(world, engine.stage, stage)

    @contextmanager
    def moved() -> Iterator[None]:
        transfer.move()
        yield

    tensor = part.layer_context.tensor
    copies, copy = world.size // tensor.size, world.rank // tensor.size
    places = concurrent_texts(deck, copies)
    return AnswerWriter(world, part, tokenizer, copies, copy, name, moved, places), [stage]
