"""Start of a run from the weights of another model (`model.from`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.exchange.by_name import load_by_name
from hpctrain.checkpoint.exchange.convert import MODEL_ONLY
from hpctrain.checkpoint.exchange.hugging_face.tensor_names import ROUTER_BIAS
from hpctrain.checkpoint.exchange.module_tensors import ModuleFolder, parameter_names
from hpctrain.checkpoint.exchange.safetensors_folder import TensorFolder
from hpctrain.checkpoint.exchange.source import load_source, training_note
from hpctrain.checkpoint.state_entries import master_entries, training_entries
from hpctrain.comm.world import World
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.errors import HpctrainError
from hpctrain.fault_checks.replica_check import check_replicas
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_buffers import BUFFER_KIND as BUFFER
from hpctrain.model.shape import ModelShape
from hpctrain.text import counted


def start_from_source(deck: Deck, engine: Engine) -> str:
    """Load the weights that `model.from` names into a new engine. Collective.

    Optimizer state keeps its initial values, as do new rows of a larger vocabulary. Errors are those of
    `checkpoint.exchange.source.load_source`, on all ranks.

    Returns:
        A sentence about the loaded weights.
    """
    assert deck.model.source is not None
    path = Path(deck.model.source)
    if deck.model.module is not None:
        return _start_module(path, engine)
    optimizer, shape = engine.stage.optimizer, engine.shape
    biases = training_entries(tensor for tensor in engine.stage.state() if tensor.kind == ROUTER_BIAS)
    entries = [*master_entries(engine.stage.state()), *biases]
    source = load_source(path, engine.world, entries, shape.head, deck.model.adapters)
    optimizer.copy_to_parameters()
    engine.stage.replica_sync.begin(optimizer)
    if deck.stability.check_parameters:
        # Nodes may have different files of the same name.
        check_replicas(engine.stage.buckets, engine.world.everyone)
    sentence = f"initialized from the weights of {path}"
    if shape.vocabulary > source.vocabulary:
        sentence += f", {shape.vocabulary - source.vocabulary} tokens added to its {source.vocabulary}"
    if shape.experts is not None and source.experts is None:
        sentence += f", its feed-forward layers copied to {shape.experts.count} experts, with new routers"
    if shape.head != source.head:
        sentence += ", with a new head for scores"
    sentence += _modules_note(shape, source)
    if shape.adapters is not None:
        sentence += ", with its adapters" if source.adapters is not None else ", with new adapters"
    if shape.positions == "learned" and shape.sequence < source.sequence:
        sentence += f", the first {shape.sequence} of its {source.sequence} positions"
    return sentence


def source_notes(world: World, deck: Deck) -> list[str]:
    """Return notes about what training ignores of the model that `model.from` names. Collective.

    Returns:
        The notes on rank 0; nothing on other ranks.
    """
    if deck.model.source is None or deck.model.module is not None:
        return []
    note = ""
    with world.agreement():
        if world.rank == 0:
            note = training_note(Path(deck.model.source), deck.model.dropout)
    return [note] if note else []


def _modules_note(shape: ModelShape, source: ModelShape) -> str:
    """Return what the message about the initial weights says of modules of multi-token prediction."""
    number = source.mtp_layers
    if shape.mtp_layers > number:
        return f", with {counted(shape.mtp_layers - number, 'new module')} of multi-token prediction"
    if shape.mtp_layers == number:
        return ""
    omitted = counted(number - shape.mtp_layers, "module")
    hint = f" (model.mtp_layers = {number} trains {'it' if number == 1 else 'them'})"
    return f", without {omitted} of multi-token prediction{hint if shape.head == 'vocabulary' else ''}"


def _start_module(path: Path, engine: Engine) -> str:
    """Load parameters and buffers of a user's module by their names. Return a sentence about them."""
    buffers = training_entries(tensor for tensor in engine.stage.state() if tensor.kind == BUFFER)
    assert isinstance(engine.architecture, ModuleArchitecture)
    names = parameter_names(engine.architecture.shared_on_meta())
    entries = [*master_entries(engine.stage.state()), *buffers]
    left = load_by_name(path, engine.world, entries, names, _folder_view(engine))
    engine.stage.optimizer.copy_to_parameters()
    engine.stage.replica_sync.begin(engine.stage.optimizer)
    return f"initialized from the weights of {path}" + (f"; {left}" if left else "")


def _folder_view(engine: Engine) -> Callable[[TensorFolder], TensorFolder] | None:
    """Return the view of a folder with the tensors of the engine's module; None if it has their names."""
    architecture = engine.architecture
    assert isinstance(architecture, ModuleArchitecture)
    if architecture.code.target != CAUSAL_MODEL:
        return None
    return partial(ModuleFolder, module=architecture.copy_on_meta())


def require_training_state(path: Path, state: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise HpctrainError if a checkpoint has no training state, or `overrides` set `model.from`."""
    if state.get(MODEL_ONLY):
        raise HpctrainError(
            f"{path}: holds only a model, no training state to resume; start a run from it with "
            f'[model] from = "{path}" in a deck'
        )
    for override in overrides:
        name, _, value = override.partition("=")
        if name.strip() == "model.from" and value.strip():
            raise HpctrainError(
                f"--set {override}: conflicts with resuming, which uses the weights of the checkpoint; "
                "`hpctrain run` starts from others"
            )


def dropped_bias_note(deck: Deck, before: Deck, path: Path) -> str:
    """Return a sentence if a resumed run drops the router biases of its checkpoint; "" otherwise."""
    old, new = before.model.experts, deck.model.experts
    if old is None or new is None or old.balance != "bias" or new.balance == "bias":
        return ""
    keep = 'model.experts.balance = "bias" keeps it'
    return f"{path}: its router/bias is dropped: experts are chosen without it ({keep})"
