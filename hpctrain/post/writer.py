"""Answers to prompts by a model that is trained meanwhile, on all ranks, each copy writing its share."""

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
    """A prompt: its number, which with the seed decides what is drawn, and its token ids."""

    number: int
    ids: tuple[int, ...]


@dataclass
class AnswerWriter:
    """Ranks that have a model to write with: `copies` of it, of which this rank's is number `copy`, each on
    the ranks of its tensor axis. `ready` brings it up to date, and is what surrounds its passes. So many
    `places` for texts its cache has at the most, and so many bytes (`cache`) it has had.
    """

    world: World
    part: Transformer
    tokenizer: Tokenizer
    copies: int
    copy: int
    name: str
    ready: Callable[[], AbstractContextManager[object]] = nullcontext
    places: int = MOST_CONCURRENT_TEXTS
    cache: int = 0

    @cached_property
    def min_rows(self) -> int:
        """Result of `min_invariant_rows`. Collective over a copy's ranks when it is first used."""
        return min_invariant_rows(self.part)

    def write(self, prompts: Sequence[NumberedPrompt], sampling: Sampling) -> list[Answer]:
        """`sampling.samples` answers to each prompt, in their order, the same on all ranks. Collective.

        HpctrainError on all ranks where logits are not finite, or there is no memory for keys and values.
        """
        assert sampling.seed is not None
        own, answers = prompts[self.copy :: self.copies], list[Answer]()
        problem: HpctrainError | None = None
        with self.ready():
            passes = self._passes(prompts, sampling)
            try:
                answers = self._write(passes, own, sampling)
            except HpctrainError as error:
                problem = error
        self.world.ledger.phase = "other"
        with self.world.agreement():
            if problem is not None:
                raise problem
        told = answers if self.part.layer_context.tensor.rank == 0 else []
        every = [each for some in self.world.everyone.all_gather_object(told) for each in some]
        found = {(each.number, each.sample): each for each in every}
        return [found[each.number, sample] for each in prompts for sample in range(sampling.samples)]

    def _write(
        self, passes: CachedPasses, prompts: Sequence[NumberedPrompt], sampling: Sampling
    ) -> list[Answer]:
        name = f"{self.name}: the policy has diverged"
        draw = KeyedSampler(sampling, self.tokenizer.vocabulary, name, self.part.layer_context.tensor)
        growing: dict[GeneratedText, Continuation] = {}
        for each in prompts:
            for sample in range(sampling.samples):
                text = GeneratedText(list(each.ids), sampling.tokens, each.number, sample)
                growing[text] = Continuation(self.tokenizer, each.ids, sampling.stops)
        for _ in continue_texts(passes, growing, draw, lambda text, token: growing[text].add(token)):
            self.world.ledger.phase = "evaluation"  # a sign of life: a rollout may take longer than a hang
        found = []
        for text, written in growing.items():
            ids, count = tuple(text.tokens), len(text.tokens) - text.prompt_length
            numbers = text.prompt_number, text.sample_number
            found.append(Answer(*numbers, ids, count, written.finish(), written.finish_reason))
        return found

    def _passes(self, prompts: Sequence[NumberedPrompt], sampling: Sampling) -> CachedPasses:
        """Those that all texts fit, of as many at a time as there is memory for. Collective."""
        longest = max(len(each.ids) for each in prompts) + sampling.tokens
        shares = -(-len(prompts) // self.copies) * sampling.samples
        free_bytes = free_bytes_per_rank(self.world)
        # The training pass over an answer rotates by the length of the sequences, and the answer has to be
        # drawn from the same policy.
        plan_of = partial(CachePlan.of, self.part, tokens=longest, as_in_training=True)
        count = min(self.places, max(1, shares))
        count = fitting_slot_count(count, lambda count: plan_of(sequences=count).bytes, free_bytes)
        plan = plan_of(sequences=count)
        advice = "a smaller policy.tokens needs a smaller key and value cache"
        require_memory(self.world, Machine(), self.name, resident_bytes() + plan.bytes, lambda _: advice)
        self.cache = max(self.cache, plan.bytes)
        return CachedPasses(self.part, plan, self.min_rows)
