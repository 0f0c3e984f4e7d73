"""Trainer of a policy: its samples are the answers that the policy itself writes, rollout by rollout.

The engine of the run is the policy. A critic is a further engine that is trained, with its state in the run's
checkpoints. Reference and reward models only run forward passes. A new rollout is made when the last one is
used up. Between rollouts, the state of the run is complete without the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.conversations import PromptSequences
from hpctrain.data.corpus import Corpus
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
from hpctrain.post.policy_reference import open_reference
from hpctrain.post.reward_model import RewardModel, open_reward_model
from hpctrain.post.rewards.rewards import Rewards, open_rewards
from hpctrain.post.rollout import RolloutSource
from hpctrain.post.rollout_builder import RolloutBuilder, answer_metrics
from hpctrain.post.samples_file import SamplesFile
from hpctrain.post.writer import AnswerWriter
from hpctrain.train import trainer as training
from hpctrain.train.memory_ledger import OtherMemory
from hpctrain.train.reference_scores import REFERENCE_CHECKSUM
from hpctrain.train.start import start_from_source
from hpctrain.train.step import Step, StepResult, TrainState
from hpctrain.train.token_scores import log_probabilities_of, values_of
from hpctrain.train.trainer import Trainer, TrainerParts, step_of


def make_trainer(parts: TrainerParts) -> Trainer:
    """Return the trainer of a run of any objective. Collective.

    Raises:
        HpctrainError: On all ranks if, for example, a reward cannot be loaded.
    """
    if parts.deck.objective.kind not in POLICY_KINDS:
        return training.make_trainer(parts)
    return PolicyTrainer(parts)


class PolicyTrainer(Trainer):
    """Trainer of a policy with PPO or GRPO.

    Attributes:
        placement: Models that this rank holds.
        tokenizer: Tokenizer of the prompts.
        rollouts: Source of samples that has the current rollout.
        rollout_builder: Builder of rollouts; None until all models exist.
        writer: Writer of answers; None on ranks without the policy.
        inference_stages: Stages of this rank's models that are not trained, for accounts of memory.
        closing: Functions that `close` calls.
        samples: File of samples for people to read.
    """

    def __init__(self, parts: TrainerParts) -> None:
        deck, engine, corpus = parts.deck, parts.engine, parts.corpus
        self.placement = placement = parts.placement
        prompts = corpus.train.source
        assert isinstance(prompts, PromptSequences) and corpus.file is not None
        self.tokenizer = corpus.file.tokenizer
        rewards = _open_rewards(deck, placement, self.tokenizer)
        self.closing: list[Callable[[], None]] = []
        if rewards.functions is not None:
            with placement.run_world.agreement():
                _check_rows(rewards.functions, corpus)
                rewards.functions.start()
            self.closing.append(rewards.functions.close)
        if deck.objective.kind == "ppo":
            engine.auxiliary_engines |= _build_critic(deck, placement, is_new_run=parts.checkpoint is None)
        state = parts.load_state()
        rollout_size = deck.policy.rollout or deck.batch.global_size
        self.rollouts = RolloutSource(rollout_size)
        self.rollout_builder: RolloutBuilder | None = None
        order = SampleOrder(rollout_size, deck.run.seed)
        repeats = corpus.train.repeats * prompts.count / rollout_size
        super().__init__(deck, engine, Batches(self.rollouts, 0, order, repeats), state)
        reference = open_reference(deck, placement, self.step, self.state, parts.checkpoint)
        self._extra_state = {} if reference is None else {REFERENCE_CHECKSUM: reference.identity}
        self.writer: AnswerWriter | None = None
        self.inference_stages: list[Stage] = []
        with placement.agreement():
            if not placement.idle:
                self.writer, self.inference_stages = make_writer(placement.deck, engine, self.tokenizer)
        inference_engines = [model.step.engine for model, _ in rewards.models.values() if model is not None]
        if reference is not None and reference.engine is not None:
            inference_engines.append(reference.engine)
        self.inference_stages += [each.stage for each in inference_engines]
        self.closing += [each.close for each in inference_engines]
        policy = partial(log_probabilities_of, self.step, sampling=make_token_sampling(deck))
        critic_step = self._policy_step.critic_step
        self.rollout_builder = RolloutBuilder(
            deck,
            placement,
            self.tokenizer,
            prompts,
            self.writer,
            rewards.functions,
            rewards.models,
            policy=None if placement.idle else policy,
            reference=None if reference is None else reference.log_probabilities,
            critic=None if critic_step is None else partial(values_of, critic_step),
        )
        rank = placement.run_world.rank
        self.hooks.append(DivergenceWarnings(deck, rank))
        self.samples = SamplesFile(Path(deck.run.dir), self.state.step, deck.policy.shown, rank == 0)

    @override
    def make_step(self, batches: Batches) -> Step:
        self._policy_step = PolicyStep(self.deck, self.engine, batches, self._prepare_rollout, self.placement)
        return self._policy_step

    @property
    @override
    def world(self) -> World:
        return self.placement.run_world

    @property
    @override
    def computing_ranks(self) -> int:
        return len(self.placement.partition.policy)

    @property
    @override
    def rank_description(self) -> str:
        return self.placement.description

    @property
    @override
    def stage(self) -> int:
        return self.placement.stage

    @override
    def other_memory(self) -> OtherMemory:
        return OtherMemory(self.inference_stages, 0 if self.writer is None else self.writer.max_cache_bytes)

    @property
    @override
    def can_stop(self) -> bool:
        return self.state.samples % self._per_rollout == 0

    @override
    def next_unused_sample(self, samples: int) -> int:
        # The rest of a rollout was written by the policy that the run abandons.
        return -(-samples // self._per_rollout) * self._per_rollout

    @property
    @override
    def extra_state(self) -> Mapping[str, object]:
        return self._extra_state

    @property
    @override
    def evaluation_metrics(self) -> tuple[str, ...]:
        # The loss is minus the reward, so that the lowest loss is the best.
        return "loss", "reward", "reward_deviation", "length", "ended"

    @property
    def _per_rollout(self) -> int:
        return self.rollouts.count * self.deck.policy.epochs

    def _prepare_rollout(self, state: TrainState) -> dict[str, float]:
        """Build a rollout if the last one is used up. Return metrics of the current one. Collective."""
        assert self.rollout_builder is not None
        number, used_samples = divmod(state.samples, self._per_rollout)
        if not used_samples or self.rollouts.rollout is None:
            self.rollouts.rollout = rollout = self.rollout_builder.build(number)
            answers, rewards = rollout.answers, rollout.rewards
            with self.world.agreement():
                self.samples.write(state.step + 1, "rollout", answers, rewards, self.tokenizer)
        return dict(self.rollouts.rollout.metrics)

    @override
    def evaluate(self, batches: Batches, sequences: int) -> dict[str, float]:
        # Each evaluation samples with the same random numbers, which no rollout uses.
        prompts = batches.source
        assert isinstance(prompts, PromptSequences) and self.rollout_builder is not None
        indices = range(min(sequences, prompts.count))
        numbers = [-1 - index for index in indices]
        answers, scores = self.rollout_builder.answer_once(prompts, indices, numbers)
        with self.world.agreement():
            self.samples.write(self.state.step, "evaluation", answers, scores.parts, self.tokenizer)
        metrics = answer_metrics(answers, scores)
        return {"loss": -metrics["reward"], **metrics}

    @override
    def close(self) -> None:
        for close in self.closing:
            close()


@dataclass(frozen=True)
class _OpenedRewards:
    """Rewards of a run.

    Attributes:
        functions: Rewards that score texts; None if there are none.
        models: Reward models with their weights, by their names in metrics. A model is None on ranks that do
            not hold it.
    """

    functions: Rewards | None
    models: dict[str, tuple[RewardModel | None, float]]


def _open_rewards(deck: Deck, placement: ModelPlacement, tokenizer: Tokenizer) -> _OpenedRewards:
    """Open the rewards of a deck. Collective."""
    keys, functions = deck.policy, dict[NamedCode, float]()
    models: dict[str, tuple[RewardModel | None, float]] = {}
    where = deck.problem("policy.reward", "").rstrip(": ")
    world = placement.world_of(REWARD)
    with placement.agreement():
        for name, weight in zip(keys.reward, reward_weights(keys), strict=True):
            if not is_checkpoint(name):
                functions[deck.code(name)] = weight
                continue
            model: RewardModel | None = None
            if world is not None:
                model = open_reward_model(world, name, tokenizer, deck.batch.sequence, where)
            models[f"model_{len(models) + 1}" if models else "model"] = model, weight
    if not functions:
        return _OpenedRewards(None, models)
    with placement.run_world.agreement():
        rewards = open_rewards(functions, where, keys.answer, keys.seconds, keys.processes, list(models))
    return _OpenedRewards(rewards, models)


def _check_rows(rewards: Rewards, corpus: Corpus) -> None:
    """Check that all rows of prompts have the fields that the rewards need."""
    assert corpus.file is not None
    for split in (corpus.train, corpus.validation):
        if split is None:
            continue
        assert isinstance(split.source, PromptSequences)
        for index in range(split.source.count):
            row = f"{corpus.file.where}: the row of prompt {split.source.number(index)}"
            rewards.check(split.source.other_keys(index), row)


class PolicyStep(Step):
    """Step of the policy, and of the critic if there is one, on the same answers.

    Attributes:
        prepare_rollout: Builds a rollout if the last one is used up, and returns its metrics. Collective.
        placement: Models that this rank holds.
        critic_step: Step of the critic; None on ranks without it.
    """

    def __init__(
        self,
        deck: Deck,
        engine: Engine,
        batches: Batches,
        prepare_rollout: Callable[[TrainState], dict[str, float]],
        placement: ModelPlacement,
    ) -> None:
        super().__init__(engine, batches, deck.batch.micro_size, deck.optimizer.clip, deck.run.seed)
        self.prepare_rollout, self.placement = prepare_rollout, placement
        self.critic_step: Step | None = None
        if (critic := engine.auxiliary_engines.get(CRITIC)) is not None:
            deck_of_critic = critic_deck(deck, placement.run_world.size)
            assert deck_of_critic is not None
            self.critic_step = step_of(deck_of_critic, critic, batches)

    @property
    @override
    def has_samples(self) -> bool:
        # A resumed run has none before its first rollout.
        source = self.batches.source
        return isinstance(source, RolloutSource) and source.rollout is not None

    @override
    def __call__(
        self, state: TrainState, batch: int, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        metrics = self.prepare_rollout(state)
        state_before = TrainState(**asdict(state))
        result, critic_result = None, None
        with self.placement.agreement():
            if not self.placement.idle:
                result = super().__call__(state, batch, before_update)
            if self.critic_step is not None:
                critic_result = self.critic_step(state_before, batch, before_update)
        result, new_state = self.placement.broadcast_from(POLICY, (result, state))
        assert result is not None
        vars(state).update(vars(new_state))
        metrics |= result.metrics
        if (critic_result := self.placement.broadcast_from(CRITIC, critic_result)) is not None:
            metrics |= {f"{CRITIC}_{name}": value for name, value in critic_result.metrics.items()}
            metrics[f"{CRITIC}_grad_norm"] = critic_result.grad_norm
        return replace(result, metrics=metrics)


def _build_critic(deck: Deck, placement: ModelPlacement, is_new_run: bool) -> dict[str, Engine]:
    """Build the engine of the critic. Collective over all ranks of the run.

    Args:
        deck: Deck of the run.
        placement: Models that this rank holds.
        is_new_run: True to load the weights that the critic starts from.

    Returns:
        The engine under the name `CRITIC`; empty on ranks without the critic.
    """
    with placement.run_world.agreement():
        deck_of_critic = critic_deck(deck, placement.run_world.size)
        assert deck_of_critic is not None
    world = placement.world_of(CRITIC)
    with placement.agreement():
        if world is None:
            return {}
        sizes = axis_sizes(deck_of_critic, world.size)
        has_mesh_of_policy = world is placement.world and sizes == axis_sizes(placement.deck, world.size)
        mesh = placement.mesh if has_mesh_of_policy else Mesh(world, sizes, placement.mesh.transport)
        critic = build_engine(with_split(deck_of_critic, deck_of_critic.runtime_choices.split), world, mesh)
        critic.objective = ClippedValue(deck.policy.value_clip)
        if is_new_run and deck_of_critic.model.source is not None:
            start_from_source(deck_of_critic, critic)
    return {CRITIC: critic}


def make_writer(deck: Deck, engine: Engine, tokenizer: Tokenizer) -> tuple[AnswerWriter, list[Stage]]:
    """Return the writer of answers by the model of an engine. Collective.

    If each tensor group of the engine holds the whole model, the model itself writes. Otherwise a copy of the
    model, in a layout of tensor ranks only, receives the current weights before each rollout.

    Returns:
        The writer, and the stages of the copy, if there is one.
    """
    world, mesh, name = engine.world, engine.mesh, deck.run.title
    if generates_itself(deck):
        model = engine.stage.models[0]
        assert isinstance(model, Transformer)
        replicas, replica = mesh.size("data"), mesh.coordinate("data")
        max_texts = concurrent_texts(deck, replicas)
        context = partial(engine.stage.pass_context, "generate")
        return AnswerWriter(world, model, tokenizer, replicas, replica, name, context, max_texts), []
    model, stage = generation_stage(deck, world, deck.layout.tensor)
    transfer = WeightTransfer(world, engine.stage, stage)

    @contextmanager
    def with_current_weights() -> Iterator[None]:
        transfer.move()
        yield

    tensor = model.layer_context.tensor
    replicas, replica = world.size // tensor.size, world.rank // tensor.size
    max_texts = concurrent_texts(deck, replicas)
    writer = AnswerWriter(world, model, tokenizer, replicas, replica, name, with_current_weights, max_texts)
    return writer, [stage]
