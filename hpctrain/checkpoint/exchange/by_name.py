"""Loading of the weights of a user's module from safetensors or a checkpoint with the same names."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from hpctrain.checkpoint.agree import first_difference, raise_on_all_ranks
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, examine
from hpctrain.checkpoint.exchange.module_tensors import ModuleFolder
from hpctrain.checkpoint.exchange.safetensors_folder import (
    CONFIG,
    INDEX,
    PICKLES,
    SINGLE,
    TYPES,
    TensorFolder,
    open_folder,
)
from hpctrain.checkpoint.finite import require_finite
from hpctrain.checkpoint.load import in_types, load
from hpctrain.checkpoint.tensor_ranges import TensorRange, boxes_of
from hpctrain.checkpoint.tensor_source import BUFFER_BYTES
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.sharding.state import MODEL
from hpctrain.text import counted, either, nearest

_WEIGHT_TYPES = (*TYPES, "F64")
"""Types of weights in files. Integers and 8-bit numbers are quantized weights, whose scales are unknown."""

_MOST_PROBLEMS = 8
"""Largest number of problems that an error lists."""


def load_by_name(
    path: Path,
    world: World,
    entries: Sequence[TensorRange],
    names: Mapping[str, Sequence[str]],
    view: Callable[[TensorFolder], TensorFolder] | None = None,
) -> str:
    """Read this rank's pieces of the parameters and buffers of a user's module. Collective.

    Args:
        path: Folder of safetensors, or checkpoint (.h5).
        world: The ranks.
        entries: Datasets `/model/<name>` and `/buffer/<name>` to fill.
        names: All names of each parameter of the module, by the first one; equal on all ranks. A folder may
            have a parameter under any of them.
        view: Function that turns the folder into one with the module's own tensors; None if it has these.

    Returns:
        A note on tensors of the folder that the module does not have; "" if there are none.

    Raises:
        HpctrainError: Tensors are missing, have other shapes, or are unknown to a model of `transformers`, or
            one parameter has several values. Among others as in `open_values` and `checkpoint.load.load`.
            All ranks raise the same error.
    """
    if path.suffix == ".h5":
        structure = examine(path, world.everyone)
        has_master = any(name.startswith("/master/") for name in structure.datasets)
        kind = "/master/" if has_master else "/model/"
        stored = [replace(each, dataset=each.dataset.replace("/model/", kind, 1)) for each in entries]
        with in_types(stored, partial(_stored_kind, structure)) as read_entries:
            load(structure, world.everyone, read_entries, zero_padding=False)
        remedy = "start from an earlier checkpoint, or from another model"
        require_finite(world.everyone, path, stored, remedy)
        return ""
    with raise_on_all_ranks(world.everyone):
        folder = open_values(path)
        folder = folder if view is None else view(folder)
        folder_names = {each.dataset: find_name(_names(each, names), folder) for each in entries}
        problems = list(dict.fromkeys(_problems(entries, folder_names, folder)))
        if isinstance(folder, ModuleFolder):
            unknown, ignored = folder.unknown_tensors()
            problems += unknown
        if problems and view is not None:  # one value of a config.json can change all shapes
            raise first_difference(problems)
        if problems:
            more = len(problems) - _MOST_PROBLEMS
            raise HpctrainError(
                problems[:_MOST_PROBLEMS] + [f"{path}: and {counted(more, 'more problem')}"] * (more > 0)
            )
        require_equal_copies(folder, names, world.rank, world.size)
        for entry in entries:
            _fill(entry, folder_names[entry.dataset] or "", folder)
    if isinstance(folder, ModuleFolder):
        return ignored_note(ignored)
    local_names = {name for entry in entries for name in _names(entry, names)}
    return ignored_note(
        sorted(set(folder.tensors) - set().union(*world.everyone.all_gather_object(local_names)))
    )


def ignored_note(names: Sequence[str]) -> str:
    """Return a note about tensors of a folder that a module does not have; "" if there are none."""
    listed = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return f"{counted(len(names), 'tensor')} without a counterpart ignored ({listed})" if names else ""


def open_values(path: Path) -> TensorFolder:
    """Open a folder of safetensors that a user has written.

    Raises:
        HpctrainError: The path is a file, or has weights only in a pickle; the message has a command that
            converts them. Among others as in `open_folder`.
    """
    if path.is_file() and path.suffix == ".safetensors":
        raise HpctrainError(
            f"{path}: is a file; give its folder {path.parent}, in which it must have the name {SINGLE}"
        )
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    pickles = [file for file in files if file.suffix in PICKLES]
    if pickles and not any(file.name in {SINGLE, INDEX} for file in files):
        old, new = (json.dumps(str(each)) for each in (pickles[0], pickles[0].with_name(SINGLE)))
        program = (
            "import torch; from safetensors.torch import save_file; "
            f"save_file({{name: each.clone() for name, each in torch.load({old}).items()}}, {new})"
        )
        raise HpctrainError(
            f"{pickles[0]}: weights in a pickle can run code and are not read; convert them where you "
            f"trust them: {shlex.join(['python', '-c', program])}"
            + f" (then set model.from to the folder {path.parent})"
            * path.is_file()
        )
    return open_folder(path)


def _stored_kind(structure: CheckpointIndex, entry: TensorRange) -> str:
    """Return the dtype in which an entry is read: that of a checkpoint if both are floating-point."""
    stored = structure.datasets.get(entry.dataset)
    kinds = (entry.kind, entry.kind if stored is None else stored.kind)
    return kinds[all(getattr(torch, kind).is_floating_point for kind in kinds)]


def _names(entry: TensorRange, names: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Return all names of an entry's parameter."""
    return names.get(entry.shard.name, [entry.shard.name])


def find_name(names: Sequence[str], folder: TensorFolder) -> str | None:
    """Return the first of a tensor's names under which a folder has it; None if there is none."""
    return next((name for name in names if name in folder.tensors), None)


def require_equal_copies(
    folder: TensorFolder, names: Mapping[str, Sequence[str]], rank: int, ranks: int
) -> None:
    """Compare the tensors that a folder has under several names of one parameter. Local.

    Args:
        folder: The folder.
        names: All names of each parameter of the module, by the first one.
        rank: Rank that calls this, which compares every `ranks`-th piece.
        ranks: Number of ranks that share the pieces.

    Raises:
        HpctrainError: They differ.
    """
    for aliases in names.values():
        first, *copies = [name for name in aliases if name in folder.tensors] or [""]
        for name in copies:
            if not _are_equal(folder, first, name, rank, ranks):
                remedy = "remove one of the two tensors"
                if isinstance(folder, ModuleFolder) and folder.ties_embeddings:
                    remedy = f"set tie_word_embeddings to false in {CONFIG}, or remove the tensor"
                raise HpctrainError(
                    f"{folder.path / folder.tensors[name].file}: {name}: differs from {first}, with which it "
                    f"is one parameter of the model; {remedy}"
                )


def _are_equal(folder: TensorFolder, name: str, copy: str, rank: int, ranks: int) -> bool:
    """Return True if two tensors of a folder are equal in every `ranks`-th piece."""
    shape = folder.tensors[name].shape
    if folder.tensors[copy].shape != shape:
        return False
    rows, *width = shape or (1,)
    step = max(1, BUFFER_BYTES // 4 // max(1, prod(width)))
    for row in range(rank * step, rows, ranks * step):
        start, extent = (row, *(0 for _ in width)), (min(step, rows - row), *width)
        box = (start, extent) if shape else ((), ())
        if not torch.equal(*(folder.read_finite(each, *box).float() for each in (name, copy))):
            return False
    return True


def mismatch(dataset: str, shape: tuple[int, ...], name: str | None, folder: TensorFolder) -> str | None:
    """Return what is wrong with a tensor of a folder, as a message; None if it is what a module requires.

    Args:
        dataset: Dataset of the tensor, which ends with its name in the module.
        shape: Its shape there.
        name: Name of the tensor in the folder; None if there is none.
        folder: The folder.
    """
    _, kind, tensor = dataset.split("/", 2)
    if name is None:
        near = nearest(tensor, list(folder.tensors))
        hint = f" (did you mean {near}?)" if near else ""
        cause = folder.likely_cause(tensor, shape) if isinstance(folder, ModuleFolder) else ""
        return f"{folder.path}: has no {tensor}, which the module requires{cause or hint}"
    described = folder.tensors[name]
    if kind == MODEL and described.kind not in _WEIGHT_TYPES:
        expected = either(_WEIGHT_TYPES)
        return f"{folder.path / described.file}: {name}: has type {described.kind}, expected {expected}"
    if described.shape == shape:
        return None
    shapes = f"{list(described.shape)}, but the module requires {list(shape)}"
    cause = folder.likely_cause(name, shape) if isinstance(folder, ModuleFolder) else ""
    return f"{folder.path / described.file}: {name} has shape {shapes}{cause}"


def _problems(
    entries: Sequence[TensorRange], folder_names: Mapping[str, str | None], folder: TensorFolder
) -> Iterator[str]:
    """Yield messages about entries that a folder lacks or has in another form."""
    for entry in entries:
        problem = mismatch(entry.dataset, entry.shard.shape, folder_names[entry.dataset], folder)
        if problem is not None:
            yield problem


def _fill(entry: TensorRange, name: str, folder: TensorFolder) -> None:
    """Read an entry's values from a tensor of a folder, without changing padding."""
    kind = entry.values.dtype
    for box in boxes_of(entry):
        for chunk in box.cut(BUFFER_BYTES // kind.itemsize):
            with chunk.filling(entry.values) as bits:
                scalar = not entry.shard.shape
                start, shape = ((), ()) if scalar else (chunk.start, chunk.shape)
                # A buffer may hold infinite numbers, as masks of attention do.
                is_weight = entry.dataset.startswith(f"/{MODEL}/")
                read = (folder.read_finite if is_weight else folder.read)(name, start, shape)
                bits.view(kind).copy_(read.reshape(chunk.shape))
