"""Writer of answers by a model that is being trained. Each replica of the model writes a share of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from hpctrain.comm.world import World
from hpctrain.costs.cache_plan import CachePlan
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.auxiliary_decks import MOST_CONCURRENT_TEXTS
from hpctrain.deck.sections.machine import Machine
from hpctrain.errors import HpctrainError
from hpctrain.generate.batch_invariance import min_invariant_rows
from hpctrain.generate.cached_passes import CachedPasses
from hpctrain.generate.continuation import Continuation
from hpctrain.generate.continuous_batching import GeneratedText, continue_texts
from hpctrain.generate.free_memory import fitting_slot_count, free_bytes_per_rank
from hpctrain.generate.sampling import KeyedSampler, Sampling
from hpctrain.host.memory import resident_bytes
from hpctrain.model.transformer import Transformer
from hpctrain.plan.memory_demand import require_memory
from hpctrain.post.rollout import Answer


class NumberedPrompt(NamedTuple):
    """Prompt of a rollout.

    Attributes:
        number: Number of the prompt. With the seed, it selects the random numbers.
        ids: Its token ids.
    """

    number: int
    ids: tuple[int, ...]


@dataclass
class AnswerWriter:
    """Replicas of the policy that write answers. Each has the ranks of one tensor axis.

    Attributes:
        world: All ranks of the policy.
        model: The model, or this rank's part of its layers.
        tokenizer: Tokenizer of the model.
        replicas: Number of replicas.
        replica: Number of this rank's replica.
        name: Title of the run, for messages.
        generation_context: Returns the context of the forward passes. Entering it copies the current weights
            of the policy to the replicas, if they do not share them.
        max_texts: Largest number of texts that a replica writes at the same time.
        max_cache_bytes: Largest size of the cache of keys and values so far.
    """

    world: World
    model: Transformer
    tokenizer: Tokenizer
    replicas: int
    replica: int
    name: str
    generation_context: Callable[[], AbstractContextManager[object]] = nullcontext
    max_texts: int = MOST_CONCURRENT_TEXTS
    max_cache_bytes: int = 0

    @cached_property
    def min_rows(self) -> int:
        """Result of `min_invariant_rows`. The first use is collective over the ranks of a replica."""
        return min_invariant_rows(self.model)

    def write(self, prompts: Sequence[NumberedPrompt], sampling: Sampling) -> list[Answer]:
        """Return `sampling.samples` answers to each prompt, in the order of the prompts. Collective.

        Raises:
            HpctrainError: On all ranks if logits are not finite, or if there is not enough memory for the
                keys and values of one text.
        """
        assert sampling.seed is not None
        local_prompts, answers = prompts[self.replica :: self.replicas], list[Answer]()
        problem: HpctrainError | None = None
        with self.generation_context():
            passes = self._make_passes(prompts, sampling)
            try:
                answers = self._write_local(passes, local_prompts, sampling)
            except HpctrainError as error:
                problem = error
        self.world.ledger.phase = "other"
        with self.world.agreement():
            if problem is not None:
                raise problem
        sent = answers if self.model.layer_context.tensor.rank == 0 else []
        received = [each for some in self.world.everyone.all_gather_object(sent) for each in some]
        by_number = {(each.prompt_number, each.sample_number): each for each in received}
        return [by_number[each.number, sample] for each in prompts for sample in range(sampling.samples)]

    def _write_local(
        self, passes: CachedPasses, prompts: Sequence[NumberedPrompt], sampling: Sampling
    ) -> list[Answer]:
        where = f"{self.name}: the policy has diverged"
        sampler = KeyedSampler(sampling, self.tokenizer.vocabulary, where, self.model.layer_context.tensor)
        continuations: dict[GeneratedText, Continuation] = {}
        for each in prompts:
            for sample in range(sampling.samples):
                text = GeneratedText(list(each.ids), sampling.tokens, each.number, sample)
                continuations[text] = Continuation(self.tokenizer, each.ids, sampling.stops)

        def add_token(text: GeneratedText, token: int) -> bool:
            return continuations[text].add(token)

        for _ in continue_texts(passes, continuations, sampler, add_token):
            self.world.ledger.phase = "evaluation"  # tells the watchdog that ranks make progress
        answers = []
        for text, continuation in continuations.items():
            numbers, length = (text.prompt_number, text.sample_number), len(text.tokens) - text.prompt_length
            answer_text = continuation.finish()  # sets the reason
            reason = continuation.finish_reason
            answers.append(Answer(*numbers, tuple(text.tokens), length, answer_text, reason))
        return answers

    def _make_passes(self, prompts: Sequence[NumberedPrompt], sampling: Sampling) -> CachedPasses:
        """Return passes whose cache fits the longest text, for as many texts as memory allows. Collective."""
        longest = max(len(each.ids) for each in prompts) + sampling.tokens
        text_count = -(-len(prompts) // self.replicas) * sampling.samples
        free_bytes = free_bytes_per_rank(self.world)
        # Rotary frequencies can depend on the length of the sequence. Answers must be sampled with those of
        # the training passes.
        plan_of = partial(CachePlan.of, self.model, tokens=longest, as_in_training=True)
        count = min(self.max_texts, max(1, text_count))
        count = fitting_slot_count(count, lambda count: plan_of(sequences=count).bytes, free_bytes)
        plan = plan_of(sequences=count)
        advice = "a smaller policy.tokens needs a smaller key and value cache"
        require_memory(self.world, Machine(), self.name, resident_bytes() + plan.bytes, lambda _: advice)
        self.max_cache_bytes = max(self.max_cache_bytes, plan.bytes)
        return CachedPasses(self.model, plan, self.min_rows)
