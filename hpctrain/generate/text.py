"""Text from a checkpoint: the model alone is loaded, and continues prompts token by token.

Keys and values of a text are kept from token to token for as long as the model sees all of it, that is at
most `batch.sequence` tokens. Beyond that each token takes a pass over the last ones, whose positions change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.read import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.checkpoint.stored_tokenizer import tokenizer_of_state
from hpctrain.comm.world import World
from hpctrain.costs.cache_plan import CachePlan
from hpctrain.data.chat_rows import Conversation
from hpctrain.data.chat_template import ChatTemplate
from hpctrain.data.chat_tokens import ChatTokenizer
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.deck.generation_deck import generation_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.machine import Machine
from hpctrain.deck.sections.objective import SCORE_KINDS
from hpctrain.engine.generation import generation_stage, module_generation_stage
from hpctrain.engine.stage_values import load_parameters
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.generate.continuing import WINDOWS, ForwardPasses, GeneratedText, continue_texts
from hpctrain.generate.module_passes import ModulePasses
from hpctrain.generate.passes import CachedPasses, can_cache, least_rows
from hpctrain.generate.prompts import Prompt, PromptOptions
from hpctrain.generate.sampling import KeyedSampler, Sampling
from hpctrain.generate.stopping import Continuation
from hpctrain.host.device import on_host
from hpctrain.host.memory import available_bytes, resident_bytes
from hpctrain.model.construction import bare_model
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.part import ModelPart
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.pipeline.split import even_split, split_layers
from hpctrain.plan.room import demand_room
from hpctrain.text import counted
from hpctrain.watch.newest import find_checkpoint

TEXTS_AT_A_TIME = 32
"""That have places in the cache at the most: as many as share a pass over the matrices with profit."""

PROMPTS_AT_A_TIME = 64
"""Of each copy of the model, where there are several: so many are continued before their texts are shown."""


def generate(
    world: World,
    target: Path,
    source: PromptOptions,
    sampling: Sampling,
    show: Callable[[str], None],
    live: bool,
    tensor: int | None = None,
    pipeline: int = 1,
    chat: bool = False,
) -> None:
    """`hpctrain generate`: continue prompts and show the texts, from rank 0.

    Collective. Those of lines of JSON are shown as such, others with their prompt. With `live`, a single
    sample is shown while it grows. An empty prompt begins a document, and where the model ends one, or its
    turn, the sample ends, or before one of `sampling.stops`. Each `pipeline` x `tensor` ranks share a copy of
    the model, and copies the prompts; None is what suits. With `chat` a prompt is what a user says: the chat
    template of the checkpoint makes a conversation of it, and the answer alone is shown. HpctrainError or
    InputOutputError, on all ranks, where an option or the checkpoint will not do, or something cannot be
    shown.
    """
    world.ledger.activity = "reading the prompts"
    with world.agreement(), world.hang.allow_silence():  # stdin may come at any time
        sampling.check()
        prompts = source.read() if world.rank == 0 else []
    prompts = world.everyone.broadcast_object(prompts)
    sampling = sampling.settled(world.everyone)
    path, several = find_checkpoint(world, target), sampling.samples > 1
    world.ledger.activity = "loading the model"
    loaded = load_model(world, path, tensor, len(prompts) * sampling.samples, pipeline)
    world.ledger.activity = "generating text"
    writer = TextModel(world, path, *loaded)
    if chat:
        now = world.everyone.broadcast_object(datetime.now().isoformat(timespec="seconds"))
        with world.agreement():
            writer.chat = chat_of(loaded[1], path, now)

    def show_agreed(text: str) -> None:
        with world.agreement(), world.hang.allow_silence():  # whoever reads the text may take any time
            if world.rank == 0 and text:
                show(text)

    def told(prompt: Prompt, number: int, sample: Continuation) -> str:
        if source.json_lines is not None:
            return json_line(prompt, sample, number if several else None)
        heading = f"--- sample {number} of {sampling.samples} ---\n" if several else ""
        return f"{heading}{sample.whole}\n"

    shown = 0

    def show_more(sample: Continuation) -> None:
        nonlocal shown
        show_agreed(sample.whole[shown:])
        shown = len(sample.whole)

    if live and not several and source.json_lines is None:
        for _ in writer.samples_of([prompt.text for prompt in prompts], sampling, show_more):
            show_agreed("\n")
        return
    for first in range(0, len(prompts), PROMPTS_AT_A_TIME * writer.copies):
        some = prompts[first : first + PROMPTS_AT_A_TIME * writer.copies]
        for text in writer.told_by_all(some, sampling, told):
            show_agreed(text)


class TextModel:
    """A model of a checkpoint and its tokenizer, by which the ranks of a world continue prompts: those that
    share a copy of the model together, and each copy other prompts.
    """

    def __init__(self, world: World, path: Path, part: ModelPart, tokenizer: Tokenizer) -> None:
        assert isinstance(part, Transformer | ModulePart)
        self.world, self.path, self.part, self.tokenizer = world, path, part, tokenizer
        layer_context = part.layer_context
        self.copies = world.size // (layer_context.pipeline.size * layer_context.tensor.size)
        self.copy = world.rank // layer_context.tensor.size % self.copies
        self._speaks = layer_context.pipeline.rank == layer_context.tensor.rank == 0
        self.chat: ChatTokenizer | None = None

    @cached_property
    def least_rows(self) -> int:
        """See the function of this name. Collective at first."""
        assert isinstance(self.part, Transformer)
        return least_rows(self.part)

    def told_by_all(
        self, prompts: Sequence[Prompt], sampling: Sampling, told: Callable[[Prompt, int, Continuation], str]
    ) -> Iterator[str]:
        """What is told of each sample of each prompt, in their order, whichever copy continues it.

        Collective; an error of a copy is that of all.
        """
        own, found = prompts[self.copy :: self.copies], list[str]()
        samples = self.samples_of([prompt.text for prompt in own], sampling)
        if self.copies == 1:
            for number, sample in enumerate(samples):
                prompt, which = divmod(number, sampling.samples)
                yield told(own[prompt], which + 1, sample)
            return
        problem: HpctrainError | None = None
        try:
            for number, sample in enumerate(samples):
                prompt, which = divmod(number, sampling.samples)
                found.append(told(own[prompt], which + 1, sample))
        except HpctrainError as error:
            problem = error
        with self.world.agreement():
            if problem is not None:
                raise problem
        every = self.world.everyone.all_gather_object((self.copy, found if self._speaks else []))
        of_copies = [
            [text for copy, told in every if copy == number for text in told] for number in range(self.copies)
        ]
        for prompt in range(len(prompts)):
            copy, first = prompt % self.copies, prompt // self.copies * sampling.samples
            yield from of_copies[copy][first : first + sampling.samples]

    def samples_of(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        grown: Callable[[Continuation], None] = lambda _: None,
    ) -> Iterator[Continuation]:
        """The samples of each prompt, in their order, each when it is whole and those before it are; an empty
        prompt begins a document. Collective: on other copies of the model there may be other prompts.

        `grown` is called with each of them before its first token, behind every one, and at its end.
        """
        sampling = sampling.settled(self.world.everyone)
        end = self.tokenizer.end_of_document
        with self.world.agreement():  # a tokenizer may refuse a text
            given = [self._ids_of(prompt) or [end] for prompt in prompts]
        passes = self._passes(given, sampling)
        draw = KeyedSampler(
            sampling, self.tokenizer.vocabulary, str(self.path), self.part.layer_context.tensor
        )
        samples: dict[GeneratedText, Continuation] = {}

        def texts() -> Iterator[GeneratedText]:
            for ids in given:
                for number in range(sampling.samples):
                    # Every prompt has the number 0: what is drawn for it does not depend on the others.
                    text = GeneratedText(list(ids), sampling.tokens, 0, number)
                    samples[text] = Continuation(self.tokenizer, ids, sampling.stops)
                    if self.chat is not None:
                        samples[text].beginning = ""
                    grown(samples[text])
                    yield text

        for step in continue_texts(passes, texts(), draw, lambda text, token: samples[text].add(token)):
            for text in step:
                grown(samples[text])
                if text.ended:
                    samples[text].finish()
                    grown(samples[text])
            while samples and (first := next(iter(samples))).ended:
                yield samples.pop(first)

    def _ids_of(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt; with --chat, of a conversation with the prompt as user message."""
        if self.chat is None:
            return self.tokenizer.encode(prompt)
        ids: list[int] = self.chat.prompt(Conversation([{"role": "user", "content": prompt}])).ids.tolist()
        return ids

    def _passes(self, given: Sequence[Sequence[int]], sampling: Sampling) -> ForwardPasses:
        """Those for texts that begin so, their memory demanded first. Collective."""
        if isinstance(self.part, ModulePart):
            return ModulePasses(self.part, WINDOWS)
        longest = max(map(len, given), default=0) + sampling.tokens
        count = min(TEXTS_AT_A_TIME, max(1, len(given) * sampling.samples))
        if not can_cache(self.part):
            longest, count = 1, 1
        room = share_of_memory(self.world)
        while count > 1 and room is not None and CachePlan.of(self.part, count, longest).bytes > room // 2:
            count //= 2
        # Stages have more or fewer layers.
        count = min(self.part.layer_context.pipeline.all_gather_object(count))
        plan = CachePlan.of(self.part, count, longest)
        advice = "reduce --tokens for a smaller key and value cache"
        demand_room(self.world, Machine(), str(self.path), resident_bytes() + plan.bytes, lambda _: advice)
        return CachedPasses(self.part, plan, self.least_rows)


def share_of_memory(world: World) -> int | None:
    """Bytes that are free for each rank where that is least, of memory on nodes; None where nobody knows, or
    for ranks on GPUs. Collective.
    """
    free = available_bytes() if on_host(world.device) else None
    every = world.everyone.all_gather_object((world.node, free))
    nodes = [node for node, _ in every]
    shares = [size // nodes.count(node) for node, size in every if size is not None]
    return min(shares) if len(shares) == len(every) else None


def json_line(prompt: Prompt, sample: Continuation, number: int | None) -> str:
    """What is told of a sample of a prompt that came as a line of JSON, whose other keys go with it."""
    told = {"prompt": prompt.text, "text": sample.text, "tokens": sample.tokens, "ended": sample.why}
    return json.dumps(prompt.others | told | ({} if number is None else {"sample": number})) + "\n"


def load_model(
    world: World, path: Path, tensor: int | None = None, texts: int = 1, pipeline: int = 1
) -> tuple[ModelPart, Tokenizer]:
    """The model of a checkpoint, or this rank's part of it, and its tokenizer: each `pipeline` x `tensor`
    ranks of the world share one. Collective.

    None splits it over all ranks, unless there are as many `texts` or more and each stage's ranks have room
    for all of it. No gradients and no optimizer: the memory is that of the parameters. HpctrainError if the
    checkpoint has no deck or tokenizer, or the ranks cannot split the model; else errors as in
    checkpoint.read.load.
    """
    state = read_state(path, world.everyone)
    if (module_deck := module_deck_of(state, path)) is not None:
        return _load_module_model(world, path, state, module_deck, (tensor or 1) * pipeline)
    room = share_of_memory(world) if tensor is None and texts >= world.size > 1 else None
    with world.agreement():
        for option, count in (("--pipeline", pipeline), ("--tensor", tensor)):
            if count is not None and (count < 1 or world.size % count):
                ranks = counted(world.size, "rank")
                raise HpctrainError(
                    f"{option} {count}: must divide the {ranks} (each copy of the model uses as many)"
                )
        most = world.size // pipeline
        if tensor is not None and most % tensor:
            takes = f"--pipeline {pipeline} x --tensor {tensor} = {pipeline * tensor}"
            raise HpctrainError(
                f"{takes}: must divide the {world.size} ranks (each copy of the model uses as many)"
            )
        if room is not None and parameter_bytes(split_deck(state, path, 1, pipeline)) <= room // 2:
            tensor = 1
        deck = split_deck(state, path, most if tensor is None else tensor, pipeline)
        assert deck.model.vocabulary is not None
        tokenizer = stored_tokenizer(state, path, deck.model.vocabulary)
    torch.set_num_threads(deck.run.threads)
    return load_part(world, path, deck), tokenizer


def module_deck_of(state: dict[str, Any], path: Path) -> Deck | None:
    """Return the deck of a checkpoint whose model is one of `transformers`; None for other models."""
    deck = stored_deck(state, path)
    return deck if deck.model.module == CAUSAL_MODEL else None


def load_module_part(world: World, path: Path, deck: Deck) -> ModulePart:
    """Return a module of `transformers` with the weights of a checkpoint, all of it on each rank. Collective.

    Args:
        world: The ranks.
        path: The checkpoint.
        deck: Its deck.

    Raises:
        HpctrainError: The ranks do not have the memory; else errors as in `checkpoint.read.load`.
    """
    with world.agreement():
        elements = sum(each.numel() for each in ModuleArchitecture.of(deck).copy_on_meta().parameters())
    needed = resident_bytes() + elements * Precision.of(deck).storage.itemsize
    demand_room(world, Machine(), str(path), needed, lambda _: "use fewer ranks on each node")
    model, stage = module_generation_stage(deck, world)
    load_parameters(path, stage, world.everyone)
    return model


def _load_module_model(
    world: World, path: Path, state: dict[str, Any], deck: Deck, ranks: int
) -> tuple[ModelPart, Tokenizer]:
    """Return the module of a checkpoint and its tokenizer; see `load_model`."""
    with world.agreement():
        if ranks > 1:
            raise HpctrainError(
                f"{path}: its model runs as a module of transformers, which is not split for generation; "
                "leave out --tensor and --pipeline"
            )
        tokenizer = stored_tokenizer(state, path, deck.model.vocabulary or sys.maxsize)
    torch.set_num_threads(deck.run.threads)
    return load_module_part(world, path, deck), tokenizer


def parameter_bytes(deck: Deck) -> int:
    """Of all parameters of a deck's model, as stored; of its stage that has most, where there are several."""
    assert deck.model.vocabulary is not None
    shape = ModelShape.of(deck, deck.model.vocabulary)
    stages = split_layers(bare_model(shape).layers, even_split(shape.layers, deck.layout.pipeline))
    of_stages = ({parameter for layer in stage for parameter in layer.all_parameters} for stage in stages)
    most = max(sum(parameter.shard.elements for parameter in own) for own in of_stages)
    return most * Precision.of(deck).storage.itemsize


def load_part(world: World, path: Path, deck: Deck) -> ModelPart:
    """The model of a checkpoint whose `split_deck` this is, as of `load_model`. Collective."""
    tensor, pipeline = deck.layout.tensor, deck.layout.pipeline
    needed = resident_bytes() + parameter_bytes(deck) // tensor
    advice = "use more nodes, which share the model"
    demand_room(world, Machine(), str(path), needed, lambda _: advice)
    model, stage = generation_stage(deck, world, tensor, pipeline)
    load_parameters(path, stage, world.everyone)
    return model


def require_logits(deck: Deck, path: Path) -> None:
    """HpctrainError where a checkpoint with this deck is of a model that predicts no tokens."""
    if deck.objective.kind in SCORE_KINDS:
        raise HpctrainError(
            f"{path}: is a reward model, which computes scores and generates no text (`hpctrain evaluate` "
            "measures its accuracy)"
        )


def split_deck(state: dict[str, Any], path: Path, tensor: int, pipeline: int = 1) -> Deck:
    """The checkpoint's deck with a copy of the model over so many ranks; errors as of `load_model`."""
    deck = stored_deck(state, path)
    require_logits(deck, path)
    return generation_deck(deck, tensor, pipeline, f"the model of {path}")


def chat_of(tokenizer: Tokenizer, path: Path, now: str) -> ChatTokenizer:
    """Return the tokenizer of conversations that uses the chat template in a checkpoint.

    Args:
        tokenizer: tokenizer of the checkpoint, with its settings.
        path: the checkpoint, for messages.
        now: time that `strftime_now` in the template formats, in ISO 8601.

    Raises:
        HpctrainError: the checkpoint has no chat template, or one that cannot be parsed.
    """
    text = tokenizer.settings.chat_template
    if text is None:
        problem = "has no chat template; train on conversations, or start from a model that has one"
        raise HpctrainError(f"--chat: {path}: {problem}")
    tokens = {"eos_token": tokenizer.end_name} | tokenizer.settings.special_tokens
    template = ChatTemplate(text, tokens, f"{path}: its chat template", now)
    template.process.start()  # raises an error if the template is invalid
    return ChatTokenizer(tokenizer, template)


def stored_tokenizer(state: dict[str, Any], path: Path, vocabulary: int) -> Tokenizer:
    """Return the tokenizer in a checkpoint whose model has so many tokens.

    Raises:
        HpctrainError: The checkpoint has no tokenizer.
        InputOutputError: The tokenizer has more tokens than the model.
    """
    tokenizer = tokenizer_of_state(state, path)
    if tokenizer is None:
        raise HpctrainError(
            f"{path}: contains no tokenizer, so no text can be generated; train on a token file from "
            "`hpctrain prepare`, which contains one"
        )
    if tokenizer.vocabulary > vocabulary:
        raise InputOutputError(
            f"{path}: its tokenizer has {tokenizer.vocabulary} tokens, but its model only {vocabulary}"
        )
    return tokenizer
