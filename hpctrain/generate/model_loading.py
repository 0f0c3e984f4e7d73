"""Loading of the model and the tokenizer of a checkpoint, without gradients and optimizer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.checkpoint.stored_tokenizer import tokenizer_of_state
from hpctrain.comm.world import World
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
from hpctrain.generate.free_memory import free_bytes_per_rank
from hpctrain.host.memory import resident_bytes
from hpctrain.model.construction import bare_model
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.part import ModelPart
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.split import even_split, split_layers
from hpctrain.plan.memory_demand import require_memory
from hpctrain.text import counted


def load_model(
    world: World, path: Path, tensor: int | None = None, text_count: int = 1, pipeline: int = 1
) -> tuple[ModelPart, Tokenizer]:
    """Load the model of a checkpoint for generation, and its tokenizer. Collective over all ranks.

    Args:
        world: All ranks. Each `pipeline` x `tensor` of them share a replica of the model.
        path: The checkpoint.
        tensor: Number of tensor ranks. None to choose: 1 if there are at least as many texts as ranks and a
            stage fits into half of each rank's free memory; else all ranks of a stage.
        text_count: Number of texts that will be generated.
        pipeline: Number of pipeline stages.

    Returns:
        The model, or this rank's part of it, and the tokenizer.

    Raises:
        HpctrainError: The checkpoint has no deck or tokenizer, the model cannot be split over these ranks, or
            they do not have the memory; else as in `checkpoint.load.load`.
    """
    state = read_state(path, world.everyone)
    if (module_deck := find_module_deck(state, path)) is not None:
        return _load_module_model(world, path, state, module_deck, (tensor or 1) * pipeline)
    free_bytes = free_bytes_per_rank(world) if tensor is None and text_count >= world.size > 1 else None
    with world.agreement():
        for option, count in (("--pipeline", pipeline), ("--tensor", tensor)):
            if count is not None and (count < 1 or world.size % count):
                ranks = counted(world.size, "rank")
                raise HpctrainError(
                    f"{option} {count}: must divide the {ranks} (each copy of the model uses as many)"
                )
        ranks_per_stage = world.size // pipeline
        if tensor is not None and ranks_per_stage % tensor:
            product = f"--pipeline {pipeline} x --tensor {tensor} = {pipeline * tensor}"
            raise HpctrainError(
                f"{product}: must divide the {world.size} ranks (each copy of the model uses as many)"
            )
        if free_bytes is not None:
            unsplit_deck = stored_generation_deck(state, path, 1, pipeline)
            if stage_parameter_bytes(unsplit_deck) <= free_bytes // 2:
                tensor = 1
        deck = stored_generation_deck(state, path, ranks_per_stage if tensor is None else tensor, pipeline)
        assert deck.model.vocabulary is not None
        tokenizer = stored_tokenizer(state, path, deck.model.vocabulary)
    torch.set_num_threads(deck.run.threads)
    return load_transformer(world, path, deck), tokenizer


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
    return load_module(world, path, deck), tokenizer


def load_transformer(world: World, path: Path, deck: Deck) -> ModelPart:
    """Load this rank's part of a transformer from a checkpoint. Collective over all ranks.

    Args:
        world: All ranks.
        path: The checkpoint.
        deck: Its deck with the layout for generation, see `stored_generation_deck`.

    Raises:
        HpctrainError: The ranks do not have the memory; else as in `checkpoint.load.load`.
    """
    tensor, pipeline = deck.layout.tensor, deck.layout.pipeline
    needed = resident_bytes() + stage_parameter_bytes(deck) // tensor
    advice = "use more nodes, which share the model"
    require_memory(world, Machine(), str(path), needed, lambda _: advice)
    model, stage = generation_stage(deck, world, tensor, pipeline)
    load_parameters(path, stage, world.everyone)
    return model


def load_module(world: World, path: Path, deck: Deck) -> ModulePart:
    """Load a module of `transformers` from a checkpoint, all of it on each rank. Collective over all ranks.

    Args:
        world: All ranks.
        path: The checkpoint.
        deck: Its deck.

    Raises:
        HpctrainError: The ranks do not have the memory; else as in `checkpoint.load.load`.
    """
    with world.agreement():
        elements = sum(each.numel() for each in ModuleArchitecture.of(deck).copy_on_meta().parameters())
    needed = resident_bytes() + elements * Precision.of(deck).storage.itemsize
    require_memory(world, Machine(), str(path), needed, lambda _: "use fewer ranks on each node")
    model, stage = module_generation_stage(deck, world)
    load_parameters(path, stage, world.everyone)
    return model


def stage_parameter_bytes(deck: Deck) -> int:
    """Return the bytes of the parameters of the largest pipeline stage, without a tensor split. Local."""
    assert deck.model.vocabulary is not None
    shape = ModelShape.of(deck, deck.model.vocabulary)
    stages = split_layers(bare_model(shape).layers, even_split(shape.layers, deck.layout.pipeline))
    of_stages = ({parameter for layer in stage for parameter in layer.all_parameters} for stage in stages)
    elements = max(sum(parameter.shard.elements for parameter in parameters) for parameters in of_stages)
    return elements * Precision.of(deck).storage.itemsize


def find_module_deck(state: dict[str, Any], path: Path) -> Deck | None:
    """Return the deck of a checkpoint if its model is a module of `transformers`; None for other models."""
    deck = stored_deck(state, path)
    return deck if deck.model.module == CAUSAL_MODEL else None


def stored_generation_deck(state: dict[str, Any], path: Path, tensor: int, pipeline: int = 1) -> Deck:
    """Return the deck of a checkpoint with a layout for generation. Local.

    Args:
        state: State of the checkpoint.
        path: The checkpoint, for messages.
        tensor: Number of tensor ranks.
        pipeline: Number of pipeline stages.

    Raises:
        HpctrainError: The checkpoint has no deck, its model predicts no tokens, or the model cannot be split
            over these ranks.
    """
    deck = stored_deck(state, path)
    require_token_model(deck, path)
    return generation_deck(deck, tensor, pipeline, f"the model of {path}")


def require_token_model(deck: Deck, path: Path) -> None:
    """Raise an error unless the model of a checkpoint predicts tokens.

    Args:
        deck: Deck of the checkpoint.
        path: The checkpoint, for messages.

    Raises:
        HpctrainError: The model is a reward model.
    """
    if deck.objective.kind in SCORE_KINDS:
        raise HpctrainError(
            f"{path}: is a reward model, which computes scores and generates no text (`hpctrain evaluate` "
            "measures its accuracy)"
        )


def stored_tokenizer(state: dict[str, Any], path: Path, vocabulary: int) -> Tokenizer:
    """Return the tokenizer in a checkpoint.

    Args:
        state: State of the checkpoint.
        path: The checkpoint, for messages.
        vocabulary: Number of tokens of the model.

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


def make_chat_tokenizer(tokenizer: Tokenizer, path: Path, now: str) -> ChatTokenizer:
    """Return the tokenizer of conversations that uses the chat template in a checkpoint.

    Args:
        tokenizer: Tokenizer of the checkpoint, with its settings.
        path: The checkpoint, for messages.
        now: Time that `strftime_now` in the template formats, in ISO 8601.

    Raises:
        HpctrainError: The checkpoint has no chat template, or one that cannot be parsed.
    """
    text = tokenizer.settings.chat_template
    if text is None:
        problem = "has no chat template; train on conversations, or start from a model that has one"
        raise HpctrainError(f"--chat: {path}: {problem}")
    tokens = {"eos_token": tokenizer.end_name} | tokenizer.settings.special_tokens
    template = ChatTemplate(text, tokens, f"{path}: its chat template", now)
    template.process.start()  # raises an error if the template is invalid
    return ChatTokenizer(tokenizer, template)
