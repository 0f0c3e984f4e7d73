"""`hpctrain.load`: the model of a checkpoint in one process, for scripts and notebooks."""

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

from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.comm.verb import single_world
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.files import path_of
from hpctrain.generate.model_loading import (
    load_module,
    load_transformer,
    stored_generation_deck,
    stored_tokenizer,
)
from hpctrain.generate.module_passes import module_logits
from hpctrain.generate.sampling import Sampling
from hpctrain.generate.text_model import TextModel
from hpctrain.host.device import on_host
from hpctrain.host.memory import obtainable_bytes
from hpctrain.host.mpi_library import require_unfinalized
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.part import ModelPart, logits_of
from hpctrain.text import kind_of, nearest, text_problem
from hpctrain.units import format_bytes
from hpctrain.watch.checkpoint_target import find_checkpoint

Tokens = Sequence[int] | Sequence[Sequence[int]] | Tensor | NDArray[np.integer[Any]]
"""Token ids [s] or [b, s]."""

_SMALL_BYTES = 64 << 20
"""Size of logits up to which the free memory is not checked."""


def load(path: str | os.PathLike[str], *, device: str = "auto") -> GenerationModel:
    """Load the model of a checkpoint into this process, with any layout of its run. Local.

    Args:
        path: A checkpoint, or a run folder, of which the newest valid checkpoint is loaded.
        device: "auto" (a GPU if torch finds one), "cpu", "cuda", "cuda:N", "xpu" or "xpu:N".

    Raises:
        HpctrainError: The file has no model that generates text, or there is not enough memory.
        InputOutputError: The checkpoint is missing or damaged.
    """
    target = path_of(path, "path", "a checkpoint or a run's folder")
    world = single_world(device)
    checkpoint = find_checkpoint(world, target)
    state = read_state(checkpoint)
    deck = stored_deck(state, checkpoint)
    module = deck.model.module
    if module == CAUSAL_MODEL:
        return GenerationModel(world, checkpoint, state, deck, load_module(world, checkpoint, deck))
    if module is not None:
        raise HpctrainError(
            f"{checkpoint}: its model is a user module (model.module = {module}), which `load` does not "
            "support; read its tensors with hpctrain.open_checkpoint"
        )
    deck = stored_generation_deck(state, checkpoint, 1)
    return GenerationModel(world, checkpoint, state, deck, load_transformer(world, checkpoint, deck))


class SamplingOptions(TypedDict, total=False):
    """Options of `GenerationModel.generate`, with the meanings and defaults of `hpctrain generate`.

    Attributes:
        tokens: Largest number of tokens to generate; by default 200.
        temperature: Divisor of the logits, by default 0.8; 0 for greedy decoding.
        top_k: Sample from this number of most likely tokens.
        top_p: Sample from the smallest set of most likely tokens whose total probability reaches this value.
        min_p: Sample from tokens at least this many times as likely as the most likely one.
        repetition_penalty: Divisor of positive logits, and factor of negative ones, of tokens in the text.
        stop: Text or texts before which the generated text ends.
        seed: Seed of the random numbers; the same seed gives the same text. By default another one each time.
    """

    tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: str | Sequence[str]
    seed: int | None


_INTEGER_OPTIONS = {"tokens", "top_k", "seed"}
_OPTIONS_WITH_NONE = {"top_k", "top_p", "min_p", "seed"}


class GenerationModel:
    """Model of a checkpoint that computes logits and generates text, without gradients.

        model = hpctrain.load("runs/quickstart")
        model.logits(model.tokenizer.encode("def f"))[-1].argmax()
        print(model.generate("def ", tokens=50, seed=1))

    Attributes:
        path: The checkpoint.
        deck: Deck of its run, with a layout for one rank.
        part: The model, a torch module.
        step: Number of steps that it was trained.
        window: Largest number of tokens that it attends to.
        vocabulary: Number of tokens that it knows.
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
        """Tokenizer of the checkpoint.

        Raises:
            HpctrainError: The checkpoint has none.
        """
        if self._tokenizer is None:
            return stored_tokenizer({}, self.path, self.vocabulary)  # raises the error
        return self._tokenizer

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._world.device

    def __repr__(self) -> str:
        count = sum(parameter.numel() for layer in self.part.layers for parameter in layer.all_parameters)
        return f"<{self.path}: step {self.step}, {count} parameters on {self.device}>"

    def logits(self, tokens: Tokens) -> Tensor:
        """Return the logits of the token after each of the given tokens.

        Args:
            tokens: Token ids [s] or [b, s], at most `window` in a row.

        Returns:
            Logits [s, V] or [b, s, V] in fp32 for all V tokens of the model, which may be more than those of
            the tokenizer.

        Raises:
            HpctrainError: The tokens are not valid, or there is not enough memory.
        """
        require_unfinalized()
        ids = self._validated_tokens(tokens)
        size = prod(ids.shape) * self.vocabulary * 4
        free = obtainable_bytes(os.environ) if size > _SMALL_BYTES and on_host(self.device) else None
        if free is not None and size > free:
            raise HpctrainError(
                f"tokens: the logits of {list(ids.shape)} need {format_bytes(size)}, but "
                f"{format_bytes(free)} of memory are free; give fewer rows"
            )
        batch = ids if ids.dim() == 2 else ids.unsqueeze(0)
        batch, part = batch.to(self.device), self.part
        computed = module_logits(part, batch) if isinstance(part, ModulePart) else logits_of(part, batch)
        logits = computed.float()
        return logits if ids.dim() == 2 else logits[0]

    @overload
    def generate(self, prompt: str = "", **options: Unpack[SamplingOptions]) -> str: ...

    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], **options: Unpack[SamplingOptions]
    ) -> list[str]: ...

    def generate(
        self, prompt: str | list[str] | tuple[str, ...] = "", **options: Unpack[SamplingOptions]
    ) -> str | list[str]:
        """Return prompts with their continuations, which are those of `hpctrain generate`.

        Args:
            prompt: Text to continue, or several. The continuation of one does not depend on the others. An
                empty prompt begins a document.
            **options: Sampling options, see `SamplingOptions`.

        Returns:
            The prompt with its continuation, or a list of these for several prompts.

        Raises:
            HpctrainError: An option is not valid, or the checkpoint has no tokenizer.
        """
        require_unfinalized()
        prompts = _validated_texts("prompt", prompt)
        sampling = _parse_options(options)
        model = TextModel(self._world, self.path, self.part, self.tokenizer)
        texts = [sample.full_text for sample in model.generate_samples(prompts, sampling)]
        return texts[0] if isinstance(prompt, str) else texts

    def _validated_tokens(self, tokens: Tokens) -> Tensor:
        """Return token ids [s] or [b, s] as int64.

        Raises:
            HpctrainError: They are not ids of the model, or a row is longer than the window.
        """
        try:
            ids = torch.as_tensor(tokens)
        except (TypeError, ValueError, RuntimeError):
            raise HpctrainError(
                f"tokens: expected whole numbers in rows of the same length, but got {kind_of(tokens)}"
            ) from None
        if not ids.numel():
            raise HpctrainError("tokens: must not be empty")
        if ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.dtype.is_complex:
            raise HpctrainError(f"tokens: expected whole numbers, but got {str(ids.dtype)[6:]}")
        if ids.dim() not in (1, 2):
            raise HpctrainError(f"tokens: expected shape [s] or [b, s], but got {list(ids.shape)}")
        if ids.shape[-1] > self.window:
            raise HpctrainError(
                f"tokens: a row has {ids.shape[-1]}, but the window of the model (batch.sequence) has "
                f"{self.window}"
            )
        ids = ids.long()
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.vocabulary:
            invalid = lowest if lowest < 0 else highest
            raise HpctrainError(f"tokens: token id {invalid} is out of range [0, {self.vocabulary})")
        return ids


def _validated_texts(name: str, value: object) -> list[str]:
    """Return one text, or several, as a list.

    Args:
        name: Name of the argument, for messages.
        value: Value of the argument.

    Raises:
        HpctrainError: The value is neither a text nor several, or a text is not valid Unicode.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise HpctrainError(f"{name}: expected a text or a list of texts, but got {kind_of(value)}")
    wrong = next((each for each in texts if not isinstance(each, str)), None)
    if wrong is not None or None in texts:
        raise HpctrainError(f"{name}: expected texts, but got {kind_of(wrong)}")
    if problem := next(filter(None, map(text_problem, texts)), ""):
        raise HpctrainError(f"{name}: {problem}")
    return list(texts)


def _parse_options(options: SamplingOptions) -> Sampling:
    """Return the sampling options of keyword arguments.

    Raises:
        HpctrainError: Some options are unknown or not valid. The error names all that are out of range.
    """
    names = SamplingOptions.__annotations__
    if unknown := sorted(options.keys() - names.keys()):
        near = nearest(unknown[0], names)
        hint = f"did you mean {near}?" if near else f"expected {', '.join(names)}"
        raise HpctrainError(f"{', '.join(unknown)}: unknown ({hint})")
    values: dict[str, Any] = dict(options)
    stops = _validated_texts("stop", values.pop("stop", ()))
    for name, value in values.items():
        is_integer = name in _INTEGER_OPTIONS
        if value is None and name in _OPTIONS_WITH_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral if is_integer else Real):
            kind = "a whole number" if is_integer else "a number"
            raise HpctrainError(f"{name}: expected {kind}, but got {kind_of(value)}")
    sampling = Sampling(stops=tuple(stops), **values)
    try:
        sampling.check()
    except HpctrainError as error:  # names options of the command line
        raise HpctrainError([_with_python_name(each) for each in error.problems]) from None
    return sampling


def _with_python_name(problem: str) -> str:
    """Return a problem of an option with the option's name in Python, such as top_k for --top-k."""
    option, _, rest = problem.partition(" ")
    name = option.removeprefix("--").replace("-", "_")
    return f"{name} {rest}" if name.endswith(":") else f"{name} = {rest}"
