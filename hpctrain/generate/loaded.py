"""A model of a checkpoint in one process, for a script or a notebook: logits and text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypedDict, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Unpack

from hpctrain.checkpoint.read import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.comm.verb import require_running, single_world
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.files import path_of
from hpctrain.generate.module_passes import module_logits
from hpctrain.generate.sampling import Sampling
from hpctrain.generate.text import TextModel, load_module_part, load_part, split_deck, stored_tokenizer
from hpctrain.host.device import on_host
from hpctrain.host.memory import obtainable_bytes
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.part import ModelPart, logits_of
from hpctrain.text import kind_of, nearest, text_problem
from hpctrain.units import format_bytes
from hpctrain.watch.newest import find_checkpoint

Tokens = Sequence[int] | Sequence[Sequence[int]] | Tensor | NDArray[np.integer[Any]]
_SMALL_BYTES = 64 << 20  # for which nobody asks how much memory is free


def load(path: str | os.PathLike[str], *, device: str = "auto") -> GenerationModel:
    """The model of a checkpoint, or of the newest good one in a run's folder, whole in this process, whatever
    layout wrote it; see GenerationModel. `device` is "auto" (a GPU where there is one), "cpu", "cuda",
    "cuda:N", "xpu" or "xpu:N".

    HpctrainError for what is no checkpoint of a transformer, or has no room in memory; InputOutputError for
    one that is missing or damaged.
    """
    target = path_of(path, "path", "a checkpoint or a run's folder")
    world = single_world(device)
    found = find_checkpoint(world, target)
    state = read_state(found)
    module = stored_deck(state, found).model.module
    if module == CAUSAL_MODEL:
        deck = stored_deck(state, found)
        return GenerationModel(world, found, state, deck, load_module_part(world, found, deck))
    if module is not None:
        raise HpctrainError(
            f"{found}: its model is a user module (model.module = {module}), which `load` does not support; "
            "read its tensors with hpctrain.open_checkpoint"
        )
    deck = split_deck(state, found, 1)
    return GenerationModel(world, found, state, deck, load_part(world, found, deck))


class Drawn(TypedDict, total=False):
    """How text is drawn, with the meanings and defaults of `hpctrain generate`.

    At most 200 `tokens`, of `temperature` 0.8 (0 takes the likeliest); only the `top_k` likeliest, of these
    the fewest whose probability reaches `top_p`, and of these those at least `min_p` times as likely as the
    likeliest. Logits of what the text has are divided by `repetition_penalty` (negative ones multiplied). A
    text ends before a `stop`. The same `seed` gives the same text.
    """

    tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: str | Sequence[str]
    seed: int | None


_WHOLE = {"tokens", "top_k", "seed"}
_NONE = {"top_k", "top_p", "min_p", "seed"}


class GenerationModel:
    """A model that is not trained: its parameters, and nothing for backward.

        model = hpctrain.load("runs/quickstart")
        model.logits(model.tokenizer.encode("def f"))[-1].argmax()
        print(model.generate("def ", tokens=50, seed=1))

    `deck` is the deck of its run, on one rank; `part` the torch module; `step` how many steps it was trained;
    `window` how many tokens it sees, and `vocabulary` how many there are.
    """

    def __init__(self, world: World, path: Path, state: dict[str, Any], deck: Deck, part: ModelPart) -> None:
        assert deck.model.vocabulary is not None
        self.path, self.deck, self.part = path, deck, part
        self.step = int(state.get("step", 0))
        self.window, self.vocabulary = deck.batch.sequence, deck.model.vocabulary
        self._world = world
        self._tokenizer: Tokenizer | None = None
        if isinstance(state.get("tokenizer"), str):
            self._tokenizer = stored_tokenizer(state, path, self.vocabulary)

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes tokens of text. HpctrainError where the checkpoint has none."""
        if self._tokenizer is None:
            return stored_tokenizer({}, self.path, self.vocabulary)  # which says so
        return self._tokenizer

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return self._world.device

    def __repr__(self) -> str:
        count = sum(parameter.numel() for layer in self.part.layers for parameter in layer.all_parameters)
        return f"<{self.path}: step {self.step}, {count} parameters on {self.device}>"

    def logits(self, tokens: Tokens) -> Tensor:
        """Logits [s, V] in fp32 of tokens [s], or [b, s, V] of [b, s]: of the token behind each of them, of
        all V that the model has, more than the tokenizer's where the deck says so.

        HpctrainError for what are no tokens of the model's, or more than its window, or than have room.
        """
        require_running()
        given = self._given(tokens)
        size = prod(given.shape) * self.vocabulary * 4
        free = obtainable_bytes(os.environ) if size > _SMALL_BYTES and on_host(self.device) else None
        if free is not None and size > free:
            raise HpctrainError(
                f"tokens: the logits of {list(given.shape)} need {format_bytes(size)}, but "
                f"{format_bytes(free)} of memory are free; give fewer rows"
            )
        batch = given if given.dim() == 2 else given.unsqueeze(0)
        batch, part = batch.to(self.device), self.part
        computed = module_logits(part, batch) if isinstance(part, ModulePart) else logits_of(part, batch)
        logits = computed.float()
        return logits if given.dim() == 2 else logits[0]

    @overload
    def generate(self, prompt: str = "", **options: Unpack[Drawn]) -> str: ...

    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **options: Unpack[Drawn]) -> list[str]: ...

    def generate(
        self, prompt: str | list[str] | tuple[str, ...] = "", **options: Unpack[Drawn]
    ) -> str | list[str]:
        """The prompt and what the model continues it with, as `hpctrain generate` draws it; of several
        prompts, each of theirs, which does not depend on the others. See Drawn for the options.

        HpctrainError where one is out of range, or the checkpoint has no tokenizer.
        """
        require_running()
        prompts = _texts("prompt", prompt)
        sampling = _sampling(options)
        writer = TextModel(self._world, self.path, self.part, self.tokenizer)
        texts = [sample.whole for sample in writer.samples_of(prompts, sampling)]
        return texts[0] if isinstance(prompt, str) else texts

    def _given(self, tokens: Tokens) -> Tensor:
        """The tokens [s] or [b, s], int64."""
        try:
            given = torch.as_tensor(tokens)
        except (TypeError, ValueError, RuntimeError):
            raise HpctrainError(
                f"tokens: expected whole numbers in rows of the same length, but got {kind_of(tokens)}"
            ) from None
        if not given.numel():
            raise HpctrainError("tokens: must not be empty")
        if given.dtype.is_floating_point or given.dtype == torch.bool or given.dtype.is_complex:
            raise HpctrainError(f"tokens: expected whole numbers, but got {str(given.dtype)[6:]}")
        if given.dim() not in (1, 2):
            raise HpctrainError(f"tokens: expected shape [s] or [b, s], but got {list(given.shape)}")
        if given.shape[-1] > self.window:
            raise HpctrainError(
                f"tokens: a row has {given.shape[-1]}, but the window of the model (batch.sequence) has "
                f"{self.window}"
            )
        given = given.long()
        least, most = int(given.min()), int(given.max())
        if least < 0 or most >= self.vocabulary:
            wrong = least if least < 0 else most
            raise HpctrainError(f"tokens: token id {wrong} is out of range [0, {self.vocabulary})")
        return given


def _texts(name: str, given: object) -> list[str]:
    """One text, or several; HpctrainError where it is neither."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple):
        raise HpctrainError(f"{name}: expected a text or a list of texts, but got {kind_of(given)}")
    wrong = next((each for each in texts if not isinstance(each, str)), None)
    if wrong is not None or None in texts:
        raise HpctrainError(f"{name}: expected texts, but got {kind_of(wrong)}")
    if problem := next(filter(None, map(text_problem, texts)), ""):
        raise HpctrainError(f"{name}: {problem}")
    return list(texts)


def _sampling(options: Drawn) -> Sampling:
    """How these options have tokens drawn; HpctrainError with all that is wrong with them."""
    names = Drawn.__annotations__
    if unknown := sorted(options.keys() - names.keys()):
        near = nearest(unknown[0], names)
        hint = f"did you mean {near}?" if near else f"expected {', '.join(names)}"
        raise HpctrainError(f"{', '.join(unknown)}: unknown ({hint})")
    given: dict[str, Any] = dict(options)
    stops = _texts("stop", given.pop("stop", ()))
    for name, value in given.items():
        whole = name in _WHOLE
        if value is None and name in _NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
            kind = "a whole number" if whole else "a number"
            raise HpctrainError(f"{name}: expected {kind}, but got {kind_of(value)}")
    sampling = Sampling(stops=tuple(stops), **given)
    try:
        sampling.check()
    except HpctrainError as error:  # tells options of the command, which are names here
        raise HpctrainError([_named(each) for each in error.problems]) from None
    return sampling


def _named(problem: str) -> str:
    """A problem of an option, with the name that it has in Python."""
    option, _, rest = problem.partition(" ")
    name = option.removeprefix("--").replace("-", "_")
    return f"{name} {rest}" if name.endswith(":") else f"{name} = {rest}"
