"""PPO and GRPO beside an implementation of their own in plain torch, in double precision, written from the
papers (arXiv 1707.06347, 1506.02438, 2402.03300; the divergence in the reward: arXiv 2203.02155): what a
rollout is worth, and all steps on it, of policy and critic, on any layout.

Tests of post/policy_trainer.py, post/rollout_builder.py, post/critic_loss.py and objective/policy.py by the
steps of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.bench.peers.torch_model import TorchModel
from hpctrain.comm.world import World
from hpctrain.data.order import SampleOrder
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.policy import steps_per_rollout
from hpctrain.deck.sections.rank_partition import CRITIC
from hpctrain.engine.built_engine import Engine
from hpctrain.post.policy_trainer import PolicyTrainer
from hpctrain.post.rollout import Answer
from tests.engines import by_rank_0
from tests.post.rough_policies import (
    REWARDS,
    EveryGradient,
    engines,
    first_engine,
    folder,
    judged,
    pieces,
    policy_deck,
    policy_trainer,
    whole,
)

__all__ = ["folder"]

GPT2 = ("model.family=gpt2", "model.key_value_heads=8", "model.mlp=64")
CASES = {
    "ppo": ("policy.gamma=0.97", "policy.gae_lambda=0.9", 'policy.critic=["learning_rate.peak=2e-2"]'),
    "ppo-k3": (*GPT2, "policy.kl=k3", "policy.mean=constant", "policy.whiten=false", "policy.gamma=0.97"),
    "ppo-free": ("objective.beta=0", "policy.mean=answers"),
    "grpo": ("objective.kind=grpo", "policy.samples=3"),
    "grpo-k1": (*GPT2, "objective.kind=grpo", "policy.kl=k1", "policy.mean=tokens", "policy.scale=false"),
    "grpo-wide": ("objective.kind=grpo", "model.vocabulary=300"),
    "ppo-warm": ("policy.temperature=1.5", "policy.kl=k3"),
    "grpo-constant": ("objective.kind=grpo", "policy.mean=constant", "policy.samples=4"),
}
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one": ("batch.micro_size=1",), "many": ("batch.micro_size=6", "memory.recompute=full")},
    2: {
        "data": (),
        "tensor": ("layout.tensor=2",),
        "sequence": ("layout.tensor=2", "layout.sequence_parallel=true", "batch.micro_size=6"),
        "context": ("layout.context=2",),
        "pipeline": ("layout.pipeline=2", "batch.micro_size=1"),
        "zero": ("layout.zero=3", "batch.micro_size=1"),
    },
}
TOKENS = 257
"""That can be drawn: bytes, and the end of a document. A model may have more."""
VALUE_CLIP, RATE, DECAY = 0.2, 1e-2, 0.1


def plain(engine: Engine) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The model in plain torch with the weights of a run on one rank, and its parameters by our names."""
    shape, weights = engine.shape, whole(pieces(engine))
    model = TorchModel(shape)
    names = {"embedding.weight": "embedding.tokens.weight", "positions.weight": "embedding.positions.weight"}
    if shape.head == "scalar":
        model.head, names["head.weight"] = nn.Linear(shape.hidden, 1, bias=False), "score.weight"
    model.double()
    parameters = {names.get(name, name): each for name, each in model.named_parameters()}
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name].view(parameter.shape))
    return model, parameters


@dataclass
class Learner:
    """A model, its optimizer, and the largest norm of its gradients."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    rate: float

    def __post_init__(self) -> None:
        every = list(self.parameters.values())
        groups = [
            {"params": [each for each in every if each.dim() > 1], "weight_decay": DECAY},
            {"params": [each for each in every if each.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), eps=1e-3)

    def update(self, loss: Tensor) -> tuple[dict[str, Tensor], float]:
        """The gradients of a loss, by which it is updated, and their norm."""
        self.optimizer.zero_grad()
        loss.backward()
        gradients = {
            name: each.grad.clone() for name, each in self.parameters.items() if each.grad is not None
        }
        assert gradients.keys() == self.parameters.keys()
        norm = float(nn.utils.clip_grad_norm_(list(self.parameters.values()), 0.5))
        self.optimizer.step()
        return gradients, norm

    def weights(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.parameters.items()}


@dataclass
class Known:
    """Of one answer, a number for each of its tokens, in their order."""

    answer: Answer
    score: float
    old: list[float]
    reference: list[float]
    values: list[float]
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> int:
        return len(self.answer.ids) - self.answer.length


def of_tokens(model: nn.Module, answer: Answer) -> Tensor:
    """What the model gives where a token of the answer is to be predicted."""
    given = model(torch.tensor([answer.ids[:-1]]))[0]
    return given[len(answer.ids) - answer.length - 1 :]


def log_probabilities(deck: Deck, model: nn.Module, answer: Answer) -> Tensor:
    """Of the answer's tokens, one after another."""
    written = torch.tensor(answer.ids[len(answer.ids) - answer.length :])
    logits = of_tokens(model, answer)[:, :TOKENS] / deck.policy.temperature
    return torch.log(torch.softmax(logits, -1))[torch.arange(len(written)), written]


def k1(log_probability: float, reference: float) -> float:
    return log_probability - reference


def k3(log_probability: float, reference: float) -> float:
    ratio = np.exp(reference - log_probability)
    return float(ratio - 1 - np.log(ratio))


def look(
    deck: Deck, answers: Sequence[Answer], policy: nn.Module, reference: nn.Module, critic: nn.Module | None
) -> list[Known]:
    """All that is known of a rollout before the first step."""
    known = []
    with torch.no_grad():
        for answer in answers:
            score = sum(weight * judged(name, answer.text, answer.length) for name, weight in REWARDS.items())
            old, other = (log_probabilities(deck, each, answer).tolist() for each in (policy, reference))
            values = [] if critic is None else of_tokens(critic, answer)[:, 0].tolist()
            known.append(Known(answer, score, old, other, values))
    if critic is None:
        grouped(deck, known)
    else:
        ahead(deck, known)
    return known


def grouped(deck: Deck, known: Sequence[Known]) -> None:
    """Each answer's score beside those of the same prompt (GRPO)."""
    for each in known:
        scores = [other.score for other in known if other.answer.prompt_number == each.answer.prompt_number]
        assert len(scores) == deck.policy.samples
        advantage = each.score - float(np.mean(scores))
        if deck.policy.scale:
            advantage /= float(np.std(scores, ddof=1)) + 1e-6
        each.advantages = [advantage] * each.answer.length


def ahead(deck: Deck, known: Sequence[Known]) -> None:
    """Generalized advantages, each written out as a sum over what comes (equation 16 of the paper)."""
    gamma, gae_lambda, beta = deck.policy.gamma, deck.policy.gae_lambda, deck.objective.beta
    estimate = k1 if deck.policy.kl == "k1" else k3
    for each in known:
        rewards = [-beta * estimate(*pair) for pair in zip(each.old, each.reference, strict=True)]
        rewards[-1] += each.score
        later = [*each.values[1:], 0.0]
        wrong = [
            reward + gamma * next_value - value
            for reward, next_value, value in zip(rewards, later, each.values, strict=True)
        ]
        each.advantages = [
            sum((gamma * gae_lambda) ** (k - place) * wrong[k] for k in range(place, len(wrong)))
            for place in range(len(wrong))
        ]
        each.returns = [a + value for a, value in zip(each.advantages, each.values, strict=True)]
    if deck.policy.whiten:
        every = [a for each in known for a in each.advantages]
        mean, deviation = float(np.mean(every)), float(np.std(every, ddof=1))
        for each in known:
            each.advantages = [(a - mean) / (deviation + 1e-6) for a in each.advantages]


def averaged(deck: Deck, losses: Sequence[Tensor]) -> Tensor:
    """Of each answer's tokens."""
    if deck.policy.mean == "tokens":
        return torch.cat(list(losses)).mean()
    if deck.policy.mean == "answers":
        return torch.stack([each.mean() for each in losses]).mean()
    return torch.stack([each.sum() for each in losses]).mean() / deck.policy.tokens


def policy_loss(deck: Deck, policy: nn.Module, known: Sequence[Known]) -> tuple[Tensor, dict[str, float]]:
    """Of some answers, token by token."""
    low, high = deck.policy.clip_low, deck.policy.clip_high
    grpo, beta = deck.objective.kind == "grpo", deck.objective.beta
    losses: list[Tensor] = []
    told: dict[str, list[float]] = {"clip_share": [], "moved": [], "entropy": [], "kl": []}
    for each in known:
        own, terms = log_probabilities(deck, policy, each.answer), []
        for place, advantage in enumerate(each.advantages):
            ratio = torch.exp(own[place] - each.old[place])
            now, number = float(own[place].detach()), float(ratio.detach())
            rising = advantage > 0 and number > 1 + (high or 0)
            falling = advantage < 0 and number < 1 - low
            bound = 1 + (high or 0) if rising else 1 - low
            loss = own[place] * 0 - bound * advantage if rising or falling else -ratio * advantage
            if grpo and beta and deck.policy.kl == "k1":
                loss = loss + beta * (own[place] - each.reference[place])
            elif grpo and beta:
                there = torch.exp(each.reference[place] - own[place])
                loss = loss + beta * (there - torch.log(there) - 1)
            terms.append(loss)
            told["clip_share"].append(rising or falling)
            told["moved"].append(number - 1 - np.log(number))
            told["entropy"].append(-now)
            estimate = k1 if deck.policy.kl == "k1" else k3
            told["kl"].append(estimate(now, each.reference[place]))
        losses.append(torch.stack(terms))
    loss = averaged(deck, losses)
    figures = {name: float(np.mean(each)) for name, each in told.items() if beta or name != "kl"}
    return loss, {**figures, "loss": float(loss.detach())}


def critic_loss(critic: nn.Module, known: Sequence[Known]) -> tuple[Tensor, dict[str, float]]:
    """Of some answers: the larger error of what the critic says and of what it may say."""
    losses: list[Tensor] = []
    said, clipped = [], []
    for each in known:
        values = of_tokens(critic, each.answer)[:, 0]
        for value, old, back in zip(values, each.values, each.returns, strict=True):
            held = min(max(float(value.detach()), old - VALUE_CLIP), old + VALUE_CLIP)
            stands = held != float(value.detach()) and abs(held - back) > abs(float(value.detach()) - back)
            losses.append(value * 0 + (held - back) ** 2 / 2 if stands else (value - back) ** 2 / 2)
            said.append(float(value.detach()))
            clipped.append(stands)
    loss = torch.stack(losses).mean()
    figures = {
        "loss": float(loss.detach()),
        "value": float(np.mean(said)),
        "clip_share": float(np.mean(clipped)),
    }
    return loss, {f"{CRITIC}_{name}": figure for name, figure in figures.items()}


@dataclass
class Expected:
    """Of a rollout and its steps: answers; fields [n, s]; of each step figures and gradients; weights at the
    end; gradients and weights by model, then by tensor.
    """

    answers: list[tuple[int, ...]]
    fields: dict[str, Tensor]
    steps: list[tuple[dict[str, float], dict[str, dict[str, Tensor]]]]
    weights: dict[str, dict[str, Tensor]]


def expected(world: World, deck: Deck) -> Expected:
    """By plain torch, of answers that a run on one rank writes, which makes no step."""
    deck = on_one_rank(deck).with_keys(machine={"compile": False})
    trainer = policy_trainer(world.single_rank_world(), deck)
    assert trainer.rollout_builder is not None
    answers = trainer.rollout_builder.build(0).answers
    models = {name: plain(each) for name, each in engines(trainer).items()}
    reference = plain(first_engine(world.single_rank_world(), trainer.deck))[0]
    rates = {"policy": RATE, CRITIC: 2 * RATE if deck.policy.critic else RATE}
    learners = {name: Learner(*each, rates[name]) for name, each in models.items()}
    policy, critic = learners["policy"].model, learners[CRITIC].model if CRITIC in learners else None
    known = look(deck, answers, policy, reference, critic)
    order = SampleOrder(len(known), deck.run.seed)
    batch, taken, steps = deck.batch.global_size, list[int](), []
    for first in range(0, steps_per_rollout(deck) * batch, batch):
        rows = order.at(np.arange(first, first + batch)).tolist()
        taken += rows
        some = [known[row] for row in rows]
        loss, figures = policy_loss(deck, policy, some)
        gradients = {}
        gradients["policy"], figures["grad_norm"] = learners["policy"].update(loss)
        if critic is not None:
            loss, of_critic = critic_loss(critic, some)
            figures |= of_critic
            gradients[CRITIC], figures[f"{CRITIC}_grad_norm"] = learners[CRITIC].update(loss)
        figures["reward"] = float(np.mean([each.score for each in known]))
        steps.append((figures, gradients))
    assert sorted(taken) == sorted([*range(len(known))] * deck.policy.epochs)
    trainer.engine.close()
    weights = {name: each.weights() for name, each in learners.items()}
    return Expected([each.ids for each in answers], laid_out(deck, known), steps, weights)


def laid_out(deck: Deck, known: Sequence[Known]) -> dict[str, Tensor]:
    """Each number where its token is predicted, beside zeros."""
    fields = {}
    names = ["old", "advantages", *(["reference"] if deck.objective.beta else [])]
    names += ["values", "returns"] if deck.objective.kind == "ppo" else []
    for name in names:
        fields[name] = torch.zeros(len(known), deck.batch.sequence, dtype=torch.float64)
        for row, each in zip(fields[name], known, strict=True):
            row[each.prompt - 1 : len(each.answer.ids) - 1] = torch.tensor(getattr(each, name))
    return fields


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_does_what_plain_torch_does(world: World, folder: Path, case: str) -> None:
    right = by_rank_0(world, lambda: expected(world, policy_deck(folder, "alone", *CASES[case])))
    kind = "grpo" if case.startswith("grpo") else "ppo"
    # There is something to see: answers of other lengths, and chances and values that are clipped.
    assert len({len(ids) for ids in right.answers}) > 4
    assert any(0.02 < figures["clip_share"] < 0.9 for figures, _ in right.steps)
    assert kind == "grpo" or any(figures["critic_clip_share"] > 0.02 for figures, _ in right.steps)
    for name, layout in LAYOUTS[world.size].items():
        trainer = policy_trainer(world, policy_deck(folder, name, *CASES[case], *layout))
        assert_alike(trainer, right, name)
        trainer.engine.close()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_critic_and_reference_have_layouts_of_their_own(world: World, folder: Path) -> None:
    right = by_rank_0(world, lambda: expected(world, policy_deck(folder, "alone", *CASES["ppo"])))
    keys = '"learning_rate.peak=2e-2", "layout.zero=0", "layout.tensor=2", "layout.sequence_parallel=true"'
    apart = (
        "machine.compile=true",
        f"policy.critic=[{keys}]",
        'policy.reference=["layout.zero=0", "layout.pipeline=2"]',
    )
    trainer = policy_trainer(world, policy_deck(folder, "apart", *CASES["ppo"], "layout.zero=3", *apart))
    critic = engines(trainer)[CRITIC]
    assert critic.mesh.size("tensor") == 2
    assert critic.stage.layer_context.functions is trainer.engine.stage.layer_context.functions
    assert critic.stage.layer_context.functions.compiled
    assert_alike(trainer, right, "apart")
    trainer.engine.close()


DIVIDED = {
    2: {
        "critic": ("policy.critic_ranks=1",),
        "both": ("policy.critic_ranks=1", "policy.reference_ranks=1"),
    },
    4: {
        "each": (
            "policy.critic_ranks=1-2",
            "policy.reference_ranks=3",
            'policy.critic=["learning_rate.peak=2e-2", "layout.tensor=2"]',
            "machine.compile=true",
        ),
        "some of both": (
            "policy.critic_ranks=2-3",
            "policy.reference_ranks=3",
            "layout.pipeline=2",
            'policy.critic=["learning_rate.peak=2e-2", "layout.pipeline=1", "layout.zero=3"]',
            'policy.reference=["layout.pipeline=1"]',
        ),
    },
}
"""Models on ranks of their own."""


@pytest.mark.mpi(min_size=2, max_size=4)
def test_models_have_ranks_of_their_own(world: World, folder: Path) -> None:
    if world.size not in DIVIDED:
        return
    right = by_rank_0(world, lambda: expected(world, policy_deck(folder, "alone", *CASES["ppo"])))
    for name, keys in DIVIDED[world.size].items():
        trainer = policy_trainer(world, policy_deck(folder, name, *CASES["ppo"], *keys))
        assert trainer.placement.idle == (world.rank in trainer.placement.partition.other_ranks)
        assert bool(trainer.engine.stage.buckets) != trainer.placement.idle
        assert_alike(trainer, right, name)
        trainer.engine.close()


def assert_alike(trainer: PolicyTrainer, right: Expected, layout: str) -> None:
    """A rollout and all steps on it."""
    found = EveryGradient(trainer)
    trainer.hooks.append(found)
    per_tokens = trainer.deck.policy.mean == "tokens"
    for number, (figures, gradients) in enumerate(right.steps):
        result = trainer.train_step()
        if number == 0:
            assert_rollout(trainer, right, layout)
        told = {**result.metrics, "grad_norm": result.grad_norm}
        assert figures.keys() <= told.keys()
        assert {name: told[name] for name in figures} == pytest.approx(figures, rel=1e-5, abs=1e-6), layout
        # Gradients of sums over answers are divided by tokens at first, which the optimizer makes good.
        larger = {"policy": 1.0 if per_tokens else trainer.deck.batch.global_size / result.tokens}
        here = found.steps[number] if engines(trainer) else {}  # a rank of the reference trains nothing
        assert list(here) == list(engines(trainer))
        for name, each in here.items():
            at_most = 1e-5 * max(float(gradient.abs().max()) for gradient in gradients[name].values())
            for shard, piece in each:
                own = piece.double().view(-1) / larger.get(name, 1.0)
                gradient = shard.take(gradients[name][shard.name].view(shard.shape)).reshape(-1)
                assert float((own - gradient).abs().max()) <= at_most, (layout, number, name, shard.name)
    everywhere = trainer.world.everyone.all_gather_object(list(engines(trainer)))
    assert {name for names in everywhere for name in names} == right.weights.keys()
    for name, engine in engines(trainer).items():
        weights = right.weights[name]
        for shard, piece in pieces(engine):
            wanted = shard.take(weights[shard.name].view(shard.shape)).reshape(-1)
            difference = float((piece.double().view(-1) - wanted).abs().max())
            assert difference <= 1e-5, (layout, name, shard.name)


def assert_rollout(trainer: PolicyTrainer, right: Expected, layout: str) -> None:
    """The same answers, and the same is known of them."""
    rollout = trainer.rollouts.rollout
    assert rollout is not None
    assert [each.ids for each in rollout.answers] == right.answers, layout
    assert rollout.fields.keys() == right.fields.keys()
    for name, values in rollout.fields.items():
        torch.testing.assert_close(
            values.double(), right.fields[name], rtol=1e-5, atol=1e-5, msg=f"{layout} {name}"
        )
