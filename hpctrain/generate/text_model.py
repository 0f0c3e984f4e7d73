"""A model with its tokenizer, by which the ranks of a world continue prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from hpctrain.comm.world import World
from hpctrain.costs.cache_plan import CachePlan
from hpctrain.data.chat_rows import Conversation
from hpctrain.data.chat_tokens import ChatTokenizer
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.sections.machine import Machine
from hpctrain.errors import HpctrainError
from hpctrain.generate.batch_invariance import min_invariant_rows
from hpctrain.generate.cached_passes import CachedPasses, can_cache
from hpctrain.generate.continuation import Continuation
from hpctrain.generate.continuous_batching import (
    WINDOWS_PER_PASS,
    ForwardPasses,
    GeneratedText,
    continue_texts,
)
from hpctrain.generate.free_memory import fitting_slot_count, free_bytes_per_rank
from hpctrain.generate.module_passes import ModulePasses
from hpctrain.generate.prompts import Prompt
from hpctrain.generate.sampling import KeyedSampler, Sampling
from hpctrain.host.memory import resident_bytes
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.part import ModelPart
from hpctrain.model.transformer import Transformer
from hpctrain.plan.memory_demand import require_memory

MAX_CONCURRENT_TEXTS = 32
"""Largest number of texts with a slot in the cache; more of them hardly raise the tokens per second."""

SampleFormatter = Callable[[Prompt, int, Continuation], str]
"""Returns a text about a finished sample, from its prompt, its number (from 1) and the sample."""


class TextModel:
    """Model of a checkpoint with its tokenizer, on all ranks of a world.

    The ranks that share a replica of the model continue prompts together. Each replica has its own prompts.

    Args:
        world: All ranks.
        path: The checkpoint, for messages.
        part: The model, or this rank's part of it.
        tokenizer: Tokenizer of the model.
        chat: Tokenizer of conversations. If there is one, each prompt is the message of a user, and the texts
            are answers without their prompts.

    Attributes:
        replica_count: Number of replicas of the model.
        replica: Number of this rank's replica.
    """

    def __init__(
        self,
        world: World,
        path: Path,
        part: ModelPart,
        tokenizer: Tokenizer,
        chat: ChatTokenizer | None = None,
    ) -> None:
        assert isinstance(part, Transformer | ModulePart)
        self.world, self.path, self.part, self.tokenizer, self.chat = world, path, part, tokenizer, chat
        layer_context = part.layer_context
        self.replica_count = world.size // (layer_context.pipeline.size * layer_context.tensor.size)
        self.replica = world.rank // layer_context.tensor.size % self.replica_count
        self._is_first_of_replica = layer_context.pipeline.rank == layer_context.tensor.rank == 0

    @cached_property
    def min_rows(self) -> int:
        """Result of `min_invariant_rows`. Collective over the ranks of a replica when it is first used."""
        assert isinstance(self.part, Transformer)
        return min_invariant_rows(self.part)

    def format_samples(
        self, prompts: Sequence[Prompt], sampling: Sampling, formatter: SampleFormatter
    ) -> Iterator[str]:
        """Generate samples on all replicas, and yield a text about each of them on all ranks.

        Collective over all ranks.

        Args:
            prompts: All prompts, the same on all ranks, which are divided among the replicas.
            sampling: Sampling options.
            formatter: Function that returns the text about a sample, called on the ranks of its replica.

        Yields:
            Texts in the order of the prompts, and of the samples of each.

        Raises:
            HpctrainError: A replica failed. Raised on all ranks.
        """
        local_prompts = prompts[self.replica :: self.replica_count]
        texts = (
            formatter(local_prompts[number // sampling.samples], number % sampling.samples + 1, sample)
            for number, sample in enumerate(
                self.generate_samples([prompt.text for prompt in local_prompts], sampling)
            )
        )
        if self.replica_count == 1:
            yield from texts
            return
        local_texts, problem = list[str](), None
        try:
            local_texts.extend(texts)
        except HpctrainError as error:
            problem = error
        with self.world.agreement():
            if problem is not None:
                raise problem
        sent = self.replica, local_texts if self._is_first_of_replica else []
        gathered = self.world.everyone.all_gather_object(sent)
        texts_of_replicas = [
            [text for replica, texts_of_rank in gathered if replica == number for text in texts_of_rank]
            for number in range(self.replica_count)
        ]
        for prompt in range(len(prompts)):
            replica, first = prompt % self.replica_count, prompt // self.replica_count * sampling.samples
            yield from texts_of_replicas[replica][first : first + sampling.samples]

    def generate_samples(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        on_progress: Callable[[Continuation], None] = lambda _: None,
    ) -> Iterator[Continuation]:
        """Generate the samples of each prompt, and yield each when it and those before it are finished.

        Collective over all ranks. Replicas may have different prompts.

        Args:
            prompts: Texts to continue, the same on all ranks of a replica. An empty one begins a document.
            sampling: Sampling options.
            on_progress: Called with a sample before its first token, after each token, and at its end.

        Raises:
            HpctrainError: The tokenizer refuses a prompt, the ranks do not have the memory, or logits are not
                finite.
        """
        sampling = sampling.with_seed(self.world.everyone)
        end = self.tokenizer.end_of_document
        with self.world.agreement():  # a tokenizer may refuse a text
            ids_of_prompts = [self._encode_prompt(prompt) or [end] for prompt in prompts]
        passes = self._make_passes(ids_of_prompts, sampling)
        sampler = KeyedSampler(
            sampling, self.tokenizer.vocabulary, str(self.path), self.part.layer_context.tensor
        )
        samples: dict[GeneratedText, Continuation] = {}

        def texts() -> Iterator[GeneratedText]:
            for ids in ids_of_prompts:
                for number in range(sampling.samples):
                    # Every prompt has the number 0: its samples do not depend on the other prompts.
                    text = GeneratedText(list(ids), sampling.tokens, 0, number)
                    samples[text] = Continuation(self.tokenizer, ids, sampling.stops)
                    if self.chat is not None:
                        samples[text].prompt_text = ""
                    on_progress(samples[text])
                    yield text

        for step in continue_texts(passes, texts(), sampler, lambda text, token: samples[text].add(token)):
            for text in step:
                on_progress(samples[text])
                if text.is_finished:
                    samples[text].finish()
                    on_progress(samples[text])
            while samples and (first := next(iter(samples))).is_finished:
                yield samples.pop(first)

    def _encode_prompt(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt; with `chat`, of a conversation with it as a message."""
        if self.chat is None:
            return self.tokenizer.encode(prompt)
        ids: list[int] = self.chat.prompt(Conversation([{"role": "user", "content": prompt}])).ids.tolist()
        return ids

    def _make_passes(self, ids_of_prompts: Sequence[Sequence[int]], sampling: Sampling) -> ForwardPasses:
        """Return forward passes with a cache for these texts. Collective over all ranks.

        Raises:
            HpctrainError: The ranks do not have the memory of the cache. Raised on all ranks.
        """
        if isinstance(self.part, ModulePart):
            return ModulePasses(self.part, WINDOWS_PER_PASS)
        part = self.part
        longest = max(map(len, ids_of_prompts), default=0) + sampling.tokens
        count = min(MAX_CONCURRENT_TEXTS, max(1, len(ids_of_prompts) * sampling.samples))
        if not can_cache(part):
            longest, count = 1, 1
        free_bytes = free_bytes_per_rank(self.world)
        count = fitting_slot_count(count, lambda count: CachePlan.of(part, count, longest).bytes, free_bytes)
        # Stages may have different numbers of layers.
        count = min(part.layer_context.pipeline.all_gather_object(count))
        plan = CachePlan.of(part, count, longest)
        advice = "reduce --tokens for a smaller key and value cache"
        require_memory(self.world, Machine(), str(self.path), resident_bytes() + plan.bytes, lambda _: advice)
        return CachedPasses(part, plan, self.min_rows)
