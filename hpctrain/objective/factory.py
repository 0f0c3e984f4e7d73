"""Choice of the objective by the deck."""

from __future__ import annotations

from hpctrain.data.dataset import dataset_of
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.user_code import import_function
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_call import TARGET_FIELDS
from hpctrain.objective.dpo import DirectPreference
from hpctrain.objective.module_loss import ModuleClassification, ModuleNextToken, UserLoss
from hpctrain.objective.multi_token import MultiToken
from hpctrain.objective.next_token import NextToken
from hpctrain.objective.objective import Objective
from hpctrain.objective.policy import PolicyOptimization
from hpctrain.objective.reward import PairwiseReward
from hpctrain.objective.token_sampling import TokenSampling


def make_objective(deck: Deck) -> Objective:
    """Return the deck's objective.

    Raises:
        HpctrainError: The deck names a function that cannot be imported, or a dataset without targets.
    """
    if deck.model.loss is not None:
        try:
            function = import_function(deck.code(deck.model.loss))
            return UserLoss(function, of_samples=deck.data.dataset is not None)
        except HpctrainError as error:
            first, *frames = error.problems
            raise HpctrainError([deck.problem("model.loss", first), *frames]) from error
    if deck.data.dataset is not None:
        return _classification_objective(deck)
    if deck.model.module is not None:
        return ModuleNextToken(deck.stability.z_loss)
    if deck.objective.kind == "dpo":
        return DirectPreference(deck.objective.beta, deck.objective.loss, deck.objective.smoothing)
    if deck.objective.kind == "reward":
        return PairwiseReward(deck.objective.margin, deck.objective.centering)
    if deck.objective.kind in POLICY_KINDS:
        return _policy_objective(deck)
    if deck.model.mtp_layers:
        return MultiToken(deck.stability.z_loss, deck.model.mtp_layers, deck.objective.mtp_weight)
    return NextToken(deck.stability.z_loss)


def _policy_objective(deck: Deck) -> Objective:
    """Return the objective of PPO or GRPO. PPO has the divergence in its rewards, GRPO in its loss."""
    keys, divergence_in_loss = deck.policy, deck.objective.kind == "grpo"
    return PolicyOptimization(
        keys.clip_low,
        keys.clip_low if keys.clip_high is None else keys.clip_high,
        keys.mean or "tokens",
        keys.tokens,
        deck.objective.beta if divergence_in_loss else 0.0,
        keys.kl or "k3",
        has_reference=deck.objective.beta > 0,
        sampling=make_token_sampling(deck),
    )


def make_token_sampling(deck: Deck) -> TokenSampling:
    """Return the distribution from which the deck's policy samples; its reference uses the same one."""
    return TokenSampling(deck.runtime_choices.tokenizer_tokens, deck.policy.temperature)


def _classification_objective(deck: Deck) -> Objective:
    """Return the cross-entropy of the classes that a dataset names as targets.

    Raises:
        HpctrainError: The dataset has no classes.
    """
    fields = dataset_of(deck).field_specs
    name = next((name for name in TARGET_FIELDS if name in fields), None)
    names, remedy = ", ".join(fields), "add one, or set model.loss"
    if name is None:
        sentence = f"has no entry {' or '.join(TARGET_FIELDS)} in its batches ({names}) ({remedy})"
        raise HpctrainError(deck.problem("data.dataset", sentence))
    spec = fields[name]
    if spec.dtype.is_floating_point or spec.dtype.is_complex or len(spec.shape) > 1:
        sentence = (
            f"has {name} of {spec}, expected whole numbers for each sample or token (or set model.loss)"
        )
        raise HpctrainError(deck.problem("data.dataset", sentence))
    return ModuleClassification(name, deck.stability.z_loss)
