"""Import and export of models of `transformers` that hpctrain does not implement, by their own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.checkpoint.agree import first_difference
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, StoredTensor
from hpctrain.checkpoint.checksum import Sums
from hpctrain.checkpoint.exchange.assembled_tensor import SourceBox
from hpctrain.checkpoint.exchange.by_name import find_name, ignored_note, mismatch, require_equal_copies
from hpctrain.checkpoint.exchange.model_deck import model_only_deck
from hpctrain.checkpoint.exchange.model_files import module_files
from hpctrain.checkpoint.exchange.module_tensors import (
    ModuleFolder,
    file_tensors,
    integer_types,
    parameter_names,
    state_shapes,
)
from hpctrain.checkpoint.exchange.prepared_export import (
    PreparedExport,
    convert_values,
    export_dtype,
    stored_sources,
)
from hpctrain.checkpoint.exchange.safetensors_folder import (
    CONFIG,
    NewTensor,
    TensorFolder,
    open_folder,
    type_name,
)
from hpctrain.checkpoint.stored_tokenizer import stored_settings, tokenizer_of_state
from hpctrain.checkpoint.tensor_ranges import Index, TensorRange
from hpctrain.checkpoint.tensor_source import ReadRequest, TensorSource
from hpctrain.deck.schema import Deck
from hpctrain.model.modules.causal_model import build_causal_model, model_title, stored_config
from hpctrain.model.modules.forward_check import require_forward
from hpctrain.parallel.shards import Shard
from hpctrain.units import format_count

UNLIMITED_SEQUENCE = 2048
"""Value of `batch.sequence` in the checkpoint of an imported model without a longest sequence."""

_PIECE_BYTES = 16 << 20
"""Largest piece of a tensor that is in memory at a time."""


@dataclass(frozen=True)
class ModuleSource:
    """Model of a folder, as the datasets of a checkpoint, which are in fp32 or integers.

    Attributes:
        folder: Tensors of the folder by the names of the module.
        shapes: Shape of each dataset.
        names: Name of each dataset's tensor in `folder`.
        integers: dtype of each dataset that holds integers.
        title: Name of the model.
        note: Note on tensors of the folder that the model ignores, and on a missing longest sequence; "" for
            none.
    """

    folder: TensorFolder
    shapes: Mapping[str, Index]
    names: Mapping[str, str]
    integers: Mapping[str, torch.dtype]
    title: str
    note: str

    def read(self, dataset: str, start: Index, shape: Index) -> Tensor:
        """Return a box of a dataset."""
        name = self.names[dataset]
        is_weight = dataset.startswith("/model/")
        read = self.folder.read_finite if is_weight else self.folder.read
        box = (start, shape) if self.folder.tensors[name].shape else ((), ())
        return read(name, *box).to(self.dtype(dataset)).reshape(shape)

    def dtype(self, dataset: str) -> torch.dtype:
        """Return the dtype of a dataset."""
        return self.integers.get(dataset, torch.float32)

    @property
    def description(self) -> str:
        """Name and number of parameters of the model, for messages."""
        return _describe(self.title, self.shapes)


def open_module_source(path: Path, keys: Mapping[str, Any], rank: int, ranks: int) -> ModuleSource:
    """Open the folder of a model. Local.

    Args:
        path: The folder.
        keys: Keys of a deck with this model, as `causal_model_keys` returns them.
        rank: Rank that calls this; `require_equal_copies` divides its work among ranks.
        ranks: Number of ranks.

    Raises:
        HpctrainError: Tensors are missing, unknown, have other shapes or several values, or the model cannot
            compute; further errors as in `open_folder`.
    """
    arguments = keys["model.arguments"]
    with torch.device("meta"):
        module = build_causal_model(arguments)
    folder = ModuleFolder(open_folder(path), module)
    shapes = state_shapes(module)
    aliases = parameter_names(module)
    names: dict[str, str] = {}
    problems: list[str] = []
    for dataset, shape in shapes.items():
        first_name = dataset.split("/", 2)[2]
        name = find_name(aliases.get(first_name, [first_name]), folder)
        problem = mismatch(dataset, shape, name, folder)
        if problem is not None:
            problems.append(problem)
        names[dataset] = name or first_name
    unknown, ignored = folder.unknown_tensors()
    problems += unknown
    if problems:
        raise first_difference(problems)
    require_equal_copies(folder, aliases, rank, ranks)
    integers = integer_types(module)
    require_forward(
        module,
        keys.get("model.blocks"),
        keys.get("batch.sequence"),
        stored_config(arguments),
        str(path / CONFIG),
    )
    return ModuleSource(
        folder,
        {dataset: shape or (1,) for dataset, shape in shapes.items()},
        names,
        integers,
        model_title(arguments),
        "; ".join(filter(None, (ignored_note(ignored), _sequence_note(keys)))),
    )


def _sequence_note(keys: Mapping[str, Any]) -> str:
    """Return a note about a model without a longest sequence; "" for other models."""
    if "batch.sequence" in keys:
        return ""
    return f"config.json has no maximum length, so that of the checkpoint is {UNLIMITED_SEQUENCE} tokens"


def module_deck(keys: Mapping[str, Any], out: Path, folder: Path) -> Deck:
    """Return the deck for the checkpoint `out` of a model in a folder, whose keys are given by full name."""
    model = {key.removeprefix("model."): value for key, value in keys.items() if key.startswith("model.")}
    return model_only_deck(model, keys.get("batch.sequence", UNLIMITED_SEQUENCE), out, folder)


def prepare_module_export(deck: Deck, structure: CheckpointIndex, dtype: str | None) -> PreparedExport:
    """Return the export of a checkpoint whose model is one of `transformers`.

    Args:
        deck: Deck of the checkpoint.
        structure: The checkpoint.
        dtype: dtype of the weights, such as "bf16"; None for that of the checkpoint.

    Raises:
        HpctrainError: Datasets are missing, or have other shapes than the module.
    """
    arguments = deck.model.arguments or {}
    with torch.device("meta"):
        module = build_causal_model(arguments)
    shapes = state_shapes(module)
    weight_dtype = export_dtype(structure, dtype)
    sources = stored_sources(structure, shapes, weight_dtype)
    tensors = file_tensors(module, shapes)
    exact = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    kinds = {
        name: torch.float32
        if any(each in name.split(".") or each in name for each in exact)
        else weight_dtype
        for name in tensors
    }
    integers = integer_types(module)
    for name, tensor in tensors.items():
        if (source := tensor.boxes[0].source) in integers:
            kinds[name] = integers[source]

    def copy(source: TensorSource, name: str, view: NDArray[Any], sums: Sums) -> None:
        for box in tensors[name].boxes:
            _copy_box(source, sources[box.source], box, view, kinds[name], sums)

    tokenizer = tokenizer_of_state(structure.state, structure.path)
    texts = module_files(
        stored_config(arguments),
        str(weight_dtype).removeprefix("torch."),
        stored_settings(structure.state),
        tokenizer,
        deck.batch.sequence,
    )
    new_tensors = [NewTensor(name, type_name(kinds[name]), each.shape) for name, each in tensors.items()]
    return PreparedExport(
        new_tensors, texts, sources, copy, _describe(model_title(arguments), shapes), weight_dtype
    )


def _describe(title: str, shapes: Mapping[str, Index]) -> str:
    """Return name and number of parameters of a model in words."""
    parameters = sum(prod(shape) for dataset, shape in shapes.items() if dataset.startswith("/model/"))
    return f"{title}, {format_count(parameters)} parameters"


def _copy_box(
    source: TensorSource,
    stored: StoredTensor,
    box: SourceBox,
    view: NDArray[Any],
    dtype: torch.dtype,
    sums: Sums,
) -> None:
    """Fill a box of a file's tensor from a dataset, piece by piece."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for part in _pieces(box, stored.item_bytes):
        values = torch.empty(prod(part.source_shape), dtype=getattr(torch, stored.kind))
        shard = Shard(
            stored.dataset.split("/", 2)[2],
            stored.shape,
            part.source_start or (0,),
            part.source_shape or (1,),
        )
        source.fill([ReadRequest(TensorRange(stored.dataset, shard, values), stored, sums[stored.pieces])])
        converted = convert_values(part.arrange(values.view(part.source_shape)), dtype, stored.dataset)
        view[part.slices((0,) * view.ndim)] = converted.contiguous().view(bits).numpy().view(view.dtype)


def _pieces(box: SourceBox, item_bytes: int) -> Iterator[SourceBox]:
    """Yield pieces of a box with some rows of the file's tensor each."""
    if not box.shape:
        yield box
        return
    rows, *width = box.shape
    step = max(1, _PIECE_BYTES // (max(1, prod(width)) * item_bytes))
    for row in range(0, rows, step):
        yield box.part(0, row, min(step, rows - row))
