"""The section [policy]: reinforcement learning from rewards of generated answers, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from hpctrain.deck.code import is_file_target, is_target, resolve_target
from hpctrain.deck.key import Duration, PathText, Section, key
from hpctrain.deck.problem import DeckProblem, multiples
from hpctrain.deck.relations import Above, Relation, Relations, Requires
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sections.rank_partition import (
    CRITIC,
    POLICY,
    RANK_KEYS,
    REFERENCE,
    REWARD,
    RankPartition,
    RankRange,
    dedicated_ranks,
)
from hpctrain.deck.sources import toml_value
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

CALLS_AT_ONCE = 4
"""Number of calls of a reward function by a process after which its rank reports progress."""


PATTERN = "regular-expression:"
"""Prefix of a reward that is a regular expression."""


Texts = Annotated[tuple[PathText, ...], Field(strict=False)]


Numbers = Annotated[tuple[float, ...], Field(strict=False)]


class PolicySection(Section):
    """Answers to prompts, their rewards, and the policy gradient (ppo, grpo)."""

    reward: Texts = key(
        "Rewards: exact-match, regular-expression:PATTERN, FILE.py:function, or the checkpoint of a "
        "reward model.",
        (),
    )
    weights: Numbers = key("Weight of each reward in the sum of rewards.", (), derived="all 1")
    answer: str = key(
        "Key of a data row that holds the correct answer, or a list of correct answers.",
        "answer",
        min_length=1,
    )
    seconds: Duration = key(
        "Time limit of one call of a reward function.", 30.0, unit="seconds", gt=0, le=86400
    )
    processes: int = key("Processes of each rank that call reward functions.", 1, ge=1, le=256)
    tokens: int = key(
        "Maximum number of tokens of an answer; prompts have at most the rest of batch.sequence.", 128, ge=1
    )
    stops: Texts = key(
        "Stop strings: an answer ends before the first one, or at the end-of-document token.", ()
    )
    temperature: float = key(
        "Sampling temperature; logits are divided by it in generation and in training.", 1.0, ge=0.01, le=100
    )
    samples: int | None = key(
        "Number of answers to each prompt (group size).", None, derived="8 for grpo, 1 for ppo", ge=1
    )
    rollout: int | None = key(
        "Number of answers of a rollout, which are generated together and then trained on.",
        None,
        unit="sequences",
        derived="batch.global_size",
        ge=1,
    )
    epochs: int = key("Number of training passes over the answers of a rollout.", 1, ge=1, le=1000)
    clip_low: float = key(
        "Lower clip range: the probability ratio of a token is clipped at 1 - clip_low.", 0.2, gt=0, lt=1
    )
    clip_high: float | None = key(
        "Upper clip range: the probability ratio of a token is clipped at 1 + clip_high.",
        None,
        derived="policy.clip_low",
        gt=0,
        le=100,
    )
    kl: Literal["k1", "k3"] | None = key(
        "Estimator of the KL divergence from the reference; k1: log ratio; k3: never negative, less "
        "variance.",
        None,
        derived="k1 (in the reward) for ppo, k3 (in the loss) for grpo",
    )
    mean: Literal["tokens", "answers", "constant"] | None = key(
        "Mean of the loss: over all tokens, of each answer's mean, or of each answer's sum / policy.tokens.",
        None,
        derived="tokens for ppo, answers for grpo",
    )
    scale: bool = key("Whether a group's rewards are divided by their standard deviation (grpo).", True)
    whiten: bool = key(
        "Whether advantages of a rollout are normalized to mean 0 and standard deviation 1 (ppo).", True
    )
    gamma: float = key("Discount factor of rewards for each token (ppo).", 1.0, gt=0, le=1)
    gae_lambda: float = key(
        "Lambda of generalized advantage estimation: 0 looks one token ahead, 1 to the end (ppo).",
        0.95,
        ge=0,
        le=1,
    )
    value_clip: float = key("Clip range of the critic's values in a rollout (ppo).", 0.2, gt=0, le=1000)
    critic: Texts = key(
        "Keys of the critic that differ from the policy's, written as for --set: "
        "learning_rate.peak=1e-5 (ppo).",
        (),
    )
    reference: Texts = key(
        "Keys of the reference that differ from the policy's, written as for --set: layout.tensor=2.", ()
    )
    critic_ranks: RankRange = key(
        'Separate ranks of the critic, such as "4-7"; "policy": the ranks of the policy (ppo).',
        "policy",
        unit="ranks",
    )
    reference_ranks: RankRange = key(
        'Separate ranks of the reference; "policy": the ranks of the policy.', "policy", unit="ranks"
    )
    reward_ranks: RankRange = key(
        'Separate ranks of the reward models; "policy": the ranks of the policy.', "policy", unit="ranks"
    )
    shown: int = key(
        "Number of answers of each rollout and evaluation that are written to samples.jsonl.",
        4,
        ge=0,
        le=10000,
    )


_KIND = "objective.kind"

_FURTHER_RELATIONS: Mapping[str, Relation] = {
    **{
        f"policy.{name}": Requires(f"policy.{name}", _KIND, ("ppo",))
        for name in ("whiten", "gamma", "gae_lambda", "value_clip", "critic")
    },
    "policy.scale": Requires("policy.scale", _KIND, ("grpo",)),
    "policy.reference": Requires("policy.reference", "objective.beta", Above(0)),
}
"""Relations of keys that hold in addition if the objective trains a policy."""

RELATIONS: Relations = tuple(
    (
        Requires(name, _KIND, POLICY_KINDS),
        *((_FURTHER_RELATIONS[name],) if name in _FURTHER_RELATIONS else ()),
    )
    for name in (f"policy.{each}" for each in PolicySection.model_fields)
)


def fill_rewards(policy: dict[str, Any], deck_name: str) -> None:
    """Make paths of files with reward functions absolute, in place. Other rewards stay as they are.

    Args:
        policy: Table [policy] of a deck. A reward of a wrong type is left to the validation.
        deck_name: Path of the deck, to whose folder the files are relative.
    """
    given = policy.get("reward")
    if isinstance(given, list | tuple) and all(isinstance(each, str) for each in given):
        policy["reward"] = [resolve_target(each, deck_name) if _is_in_file(each) else each for each in given]


def _is_in_file(reward: str) -> bool:
    """Return True if a reward is a function in a file; a pattern may look like one."""
    return not reward.startswith(PATTERN) and is_target(reward) and is_file_target(reward)


def _reads_texts(reward: str) -> bool:
    """Return True if a reward is computed from texts, not by a reward model."""
    return reward == "exact-match" or reward.startswith(PATTERN) or is_target(reward)


def fill_policy(tables: dict[str, dict[str, Any]], default: Callable[[str, str, object], None]) -> None:
    """Set the defaults of [policy] that depend on other keys. Do nothing if the deck does not train a policy.

    It trains one if objective.kind is among POLICY_KINDS. A missing kind counts as another one, as its
    default does.

    Args:
        tables: All sections of the deck, which are changed only by `default`. [objective], [policy] and
            [batch] must be there even if they are empty; a missing one is a KeyError.
        default: Function that takes the full name of a table ("policy"), the name of a key in it and a value,
            and sets the key if it is missing.
    """
    kind = tables["objective"].get("kind")
    if kind not in POLICY_KINDS:
        return
    grpo, batch = kind == "grpo", tables["batch"].get("global_size")
    default("policy", "samples", 8 if grpo else 1)
    default("policy", "kl", "k3" if grpo else "k1")
    default("policy", "mean", "answers" if grpo else "tokens")
    default("policy", "clip_high", tables["policy"].get("clip_low", 0.2))
    if isinstance(batch, int):
        default("policy", "rollout", batch)


def steps_per_rollout(deck: Deck) -> int:
    """Return the number of optimizer steps on one rollout, in all of its epochs together.

    It is rounded down; in a valid deck nothing remains. For a deck that does not train a policy, the number
    has no meaning, and no error is raised.
    """
    rollout = deck.policy.rollout or deck.batch.global_size
    return rollout * deck.policy.epochs // deck.batch.global_size


def max_sample_tokens(deck: Deck) -> int:
    """Return the largest number of tokens in a sample of the data, at least 1.

    A sample of a deck that trains a policy is a prompt, which must leave space for an answer.
    """
    answer_tokens = deck.policy.tokens if deck.objective.kind in POLICY_KINDS else 0
    return max(1, deck.batch.sequence - answer_tokens)


def sequences_per_sample(deck: Deck) -> int:
    """Return the number of sequences that a run trains on for each sample of the data.

    It is policy.samples x policy.epochs, and 1 if the deck does not train a policy.
    """
    return (deck.policy.samples or 1) * deck.policy.epochs if deck.objective.kind in POLICY_KINDS else 1


def policy_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of [policy]: rewards, sizes of rollouts and dedicated ranks.

    There are none if the deck does not train a policy. What depends on the number of ranks is left to
    `dedicated_rank_world_problems`.
    """
    keys = deck.policy
    if deck.objective.kind not in POLICY_KINDS:
        return
    if not keys.reward:
        yield DeckProblem("policy.reward", 'must name a reward function or model (such as "exact-match")')
    if len(set(keys.reward)) < len(keys.reward):
        yield DeckProblem(
            "policy.reward", "contains a reward twice (use policy.weights to change its weight)"
        )
    if keys.weights and len(keys.weights) != len(keys.reward):
        sentence = (
            f"must have one weight for each of the {len(keys.reward)} rewards (leave it out for weights of 1)"
        )
        yield DeckProblem("policy.weights", sentence, ("policy.reward",))
    if keys.tokens >= deck.batch.sequence:
        sentence = f"must be below batch.sequence = {deck.batch.sequence}, which includes the prompt"
        yield DeckProblem("policy.tokens", sentence, ("batch.sequence",))
    hang = deck.stability.hang_seconds
    if hang and CALLS_AT_ONCE * keys.seconds > hang:
        sentence = (
            f"must be at most 1/{CALLS_AT_ONCE} of stability.hang_seconds = {hang:g}, since a rank may "
            f"wait for {CALLS_AT_ONCE} calls (use {hang / CALLS_AT_ONCE:g})"
        )
        yield DeckProblem("policy.seconds", sentence, ("stability.hang_seconds",))
    if not all(keys.stops):
        yield DeckProblem(
            "policy.stops", "contains an empty text, which ends every answer immediately (remove it)"
        )
    yield from _sizes(deck)
    has_reward_models = not all(map(_reads_texts, keys.reward))
    yield from dedicated_rank_problems(deck, has_reward_models, has_reference=deck.objective.beta > 0)


def _sizes(deck: Deck) -> Iterator[DeckProblem]:
    keys, batch = deck.policy, deck.batch.global_size
    samples, rollout = keys.samples or 1, keys.rollout or batch
    if samples == 1 and deck.objective.kind == "grpo":
        sentence = 'must be 2 or more with objective.kind = "grpo", which compares the answers to a prompt'
        yield DeckProblem("policy.samples", sentence, ("objective.kind",))
    if rollout % samples:
        sentence = f"must be a multiple of policy.samples = {samples} (use {multiples(rollout, samples)})"
        yield DeckProblem("policy.rollout", sentence, ("policy.samples",))
    if rollout % batch:
        sentence = f"must be a multiple of batch.global_size = {batch} (use {multiples(rollout, batch)})"
        yield DeckProblem("policy.rollout", sentence, ("batch.global_size",))
        return
    steps = steps_per_rollout(deck)
    every = {
        "run.steps": deck.run.steps,
        "checkpoint.every": deck.checkpoint.every,
        "checkpoint.memory_every": deck.checkpoint.memory_every,
        "run.evaluate_every": deck.run.evaluate_every,
    }
    for name, value in every.items():
        if value % steps:
            sentence = (
                f"must be a multiple of policy.rollout x policy.epochs / batch.global_size = {steps} steps "
                f"(use {multiples(value, steps)})"
            )
            yield DeckProblem(name, sentence, ("policy.rollout", "policy.epochs", "batch.global_size"))


def reward_weights(keys: PolicySection) -> tuple[float, ...]:
    """Return the weight of each reward, in the order of policy.reward; 1 for all if the deck gives none."""
    return keys.weights or (1.0,) * len(keys.reward)


def dedicated_rank_world_problems(deck: Deck, ranks: int) -> Iterator[DeckProblem]:
    """Yield problems of dedicated ranks in a run of `ranks` ranks: missing ones, or none for the policy.

    Args:
        deck: The deck; there are none if it has no dedicated ranks.
        ranks: Number of ranks of the run, dedicated ones included.
    """
    for model, own in dedicated_ranks(deck).items():
        if own[-1] >= ranks:
            here = f"the run has {counted(ranks, 'rank')}, numbered from 0"
            sentence = f'contains rank {own[-1]}, but {here} (use "{POLICY}" for the ranks of the policy)'
            yield DeckProblem(f"policy.{RANK_KEYS[model]}", sentence)
    if dedicated_ranks(deck) and not RankPartition.of(deck, ranks).policy:
        first, *further = (f"policy.{RANK_KEYS[model]}" for model in dedicated_ranks(deck))
        yield DeckProblem(
            first,
            f"leaves no rank of {counted(ranks, 'rank')} for the policy (start more ranks)",
            tuple(further),
        )


_EXCLUDED_FEATURES: tuple[tuple[str, object, str], ...] = (
    ("checkpoint.memory_every", 0, "runs with dedicated ranks do not recover from copies in memory"),
    ("model.experts.record_routing", 0, "it records the routing of all ranks"),
    ("run.trace", False, "it records steps that all ranks make together"),
    ("stability.corruption", "off", "it compares steps that all ranks make together"),
    ("stability.verify_layout", False, "it compares a step that all ranks make together"),
)
"""Keys with the only value that dedicated ranks allow, and the reason why others are refused."""


def dedicated_rank_problems(
    deck: Deck, has_reward_models: bool, has_reference: bool
) -> Iterator[DeckProblem]:
    """Yield the problems of dedicated ranks, and of keys that exclude them, if a deck trains with rewards.

    Args:
        deck: The deck.
        has_reward_models: True if reward models compute some of the rewards.
        has_reference: True if the loss depends on a reference model.
    """
    dedicated = dedicated_ranks(deck)
    for model, ranks in dedicated.items():
        name = f"policy.{RANK_KEYS[model]}"
        if 0 in ranks:
            yield DeckProblem(name, "contains rank 0, which holds the policy (use the last ranks)")
    requirements = {
        CRITIC: (
            deck.objective.kind == "ppo",
            "objective.kind",
            'requires objective.kind = "ppo"',
        ),
        REFERENCE: (has_reference, "objective.beta", "has no effect with objective.beta = 0"),
        REWARD: (
            has_reward_models,
            "policy.reward",
            "has no effect without a reward model in policy.reward",
        ),
    }
    for model, (used, other, sentence) in requirements.items():
        if model in dedicated and not used:
            yield DeckProblem(f"policy.{RANK_KEYS[model]}", f"{sentence} (leave it out)", (other,))
    if not dedicated:
        return
    keys = tuple(f"policy.{RANK_KEYS[model]}" for model in dedicated)
    for name, value, why in _EXCLUDED_FEATURES:
        if deck.value(name) not in {None, value}:
            sentence = f"conflicts with {keys[0]}: {why} (use {toml_value(value)})"
            yield DeckProblem(name, sentence, keys)
    if deck.layout.auto:
        sentence = f"conflicts with {keys[0]}: layouts of several models are not searched (leave it out)"
        yield DeckProblem("layout.auto", sentence, keys)
    if deck.stability.spike == "rollback":
        sentence = f'conflicts with {keys[0]}: runs with dedicated ranks do not roll back (use "skip")'
        yield DeckProblem("stability.spike", sentence, keys)
    if deck.machine.rates is not None:
        sentence = (
            f"has no effect with {keys[0]}: step times of dedicated ranks are not predicted (leave it out)"
        )
        yield DeckProblem("machine.rates", sentence, keys, no_effect=True)
