"""Export of models from checkpoints to Hugging Face folders, and import in the other direction.

Ranks share the work, and each one has a piece of one tensor in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.agree import raise_on_all_ranks, reduce_integers
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, StoredTensor, examine
from hpctrain.checkpoint.checksum import Sums
from hpctrain.checkpoint.exchange.hugging_face.export_choice import architecture_for_export
from hpctrain.checkpoint.exchange.hugging_face.tensor_names import (
    ROUTER_BIAS,
    Counterpart,
    TensorPart,
    counterparts,
)
from hpctrain.checkpoint.exchange.merge import AdapterMerge
from hpctrain.checkpoint.exchange.model_deck import model_only_deck
from hpctrain.checkpoint.exchange.model_files import model_files
from hpctrain.checkpoint.exchange.module_exchange import (
    ModuleSource,
    module_deck,
    open_module_source,
    prepare_module_export,
)
from hpctrain.checkpoint.exchange.module_source import folder_module_keys, stored_module_deck
from hpctrain.checkpoint.exchange.prediction_modules import copied_tensors
from hpctrain.checkpoint.exchange.prepared_export import (
    PreparedExport,
    convert_values,
    export_dtype,
    stored_sources,
)
from hpctrain.checkpoint.exchange.safetensors_folder import (
    INDEX,
    NAMES,
    NewTensor,
    create_tensor_file,
    shard_index,
    split_into_files,
    write_text,
)
from hpctrain.checkpoint.exchange.source import (
    ModelFolder,
    model_keys,
    open_model,
    stored_shape,
    tensor_shapes,
    training_note,
)
from hpctrain.checkpoint.exchange.tokenizer_files import (
    import_warnings,
    refuse_damaged_tokenizer,
    tokenizer_of_folder,
)
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.stored_deck import deck_state
from hpctrain.checkpoint.stored_tokenizer import stored_settings, tokenizer_of_state, tokenizer_state
from hpctrain.checkpoint.tensor_ranges import Index, TensorRange, flat_range_boxes
from hpctrain.checkpoint.tensor_source import ReadRequest, TensorSource, open_tensors
from hpctrain.checkpoint.verify_checksums import require_checksums
from hpctrain.comm.error_messages import with_final_name
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import TOKENIZER_FILE
from hpctrain.data.tokenizer_settings import MODEL_CONFIG
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.files import check_output, delete_folder, files_named, flush_to_disk
from hpctrain.memory.scratch import Flat, ScratchSlice
from hpctrain.model.count import count
from hpctrain.model.precision import DTYPES
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.shards import Shard
from hpctrain.text import control_problem, counted, escaped
from hpctrain.units import format_bytes, format_count

PIECE_BYTES = 16 << 20
"""Largest piece of a tensor, in bytes, that is in memory at a time."""

_OWN_FILE = files_named(
    r"(generation_)?config\.json|tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.jinja"
    r"|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)

MODEL_ONLY = "model_only"
"""Key of the state that is true in a checkpoint without training state."""


def export_model(world: World, checkpoint: Path, folder: Path, dtype: str | None, max_file_bytes: int) -> str:
    """Write the model of a checkpoint as a Hugging Face folder, completely or not at all. Collective.

    Ranks write whole files in turn. Checksums of the checkpoint are compared.

    Args:
        world: The ranks.
        checkpoint: The checkpoint.
        folder: The new folder.
        dtype: "fp32", "bf16" or "fp16"; None for that of the checkpoint.
        max_file_bytes: Largest size of the tensors of a file, unless a single tensor is larger.

    Returns:
        Message for the user about what was written, after a line about what was left out.

    Raises:
        HpctrainError: `transformers` has no such model, or the folder has files.
        InputOutputError: A file cannot be read or written.
    """
    group = world.everyone
    world.ledger.activity = "examining the checkpoint"
    structure = examine(checkpoint, group)
    world.ledger.activity = "writing the exported model"
    with raise_on_all_ranks(group):
        require_new(folder)
        deck = stored_module_deck(structure)
        prepare = _prepare_export if deck is None else partial(prepare_module_export, deck)
        export = prepare(structure, dtype)
    texts = export.texts
    files = split_into_files(export.tensors, max_file_bytes)
    sums = np.zeros(len(structure.sums), np.uint64)
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        with with_final_name(temporary, folder):
            with raise_on_all_ranks(group):
                if group.rank == 0:
                    _delete_temporary(temporary)
                    temporary.mkdir(parents=True)
            with raise_on_all_ranks(group), open_tensors(structure.path) as source:
                for name, tensors in list(files.items())[group.rank :: group.size]:
                    for tensor, view in create_tensor_file(temporary / name, tensors):
                        export.copy(source, tensor, view, sums)
            totals = reduce_integers(group, sums).view(np.uint64)
            with raise_on_all_ranks(group):
                _compare(structure, export.sources.values(), totals)
                if group.rank == 0:
                    if len(files) > 1:
                        texts[INDEX] = json.dumps(shard_index(files), indent=2) + "\n"
                    for name, content in texts.items():
                        write_text(temporary / name, content)
                    flush_to_disk(temporary)
                    temporary.replace(folder)
                    flush_to_disk(folder.absolute().parent)
    finally:
        if group.rank == 0:
            with suppress(HpctrainError, OSError):
                _delete_temporary(temporary)
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    tokenizer = "with its tokenizer" if TOKENIZER_FILE in texts else "without a tokenizer (it has none)"
    name = next(name for name, each in DTYPES.items() if each == export.dtype)
    note = f"{folder}: {export.note}\n" if export.note else ""
    return (
        f"{note}{folder}: {export.description}, {name}, "
        f"{format_bytes(size)} in {len(files)} file{'s' * (len(files) > 1)}, {tokenizer}"
    )


def _prepare_export(structure: CheckpointIndex, dtype: str | None) -> PreparedExport:
    """Return the export of a model that hpctrain has itself; see `export_model` for the errors."""
    shape = stored_shape(structure)
    merge = AdapterMerge(structure, shape.adapters)
    shape = replace(shape, adapters=None)
    settings = stored_settings(structure.state)
    architecture = architecture_for_export(shape, settings.file(MODEL_CONFIG))
    note = ""
    if shape.mtp_layers and not architecture.has_mtp:
        modules = counted(shape.mtp_layers, "module")
        note = f"leaves out {modules} of multi-token prediction, which {architecture.name} does not have"
        shape = replace(shape, mtp_layers=0)
    weight_dtype = export_dtype(structure, dtype)
    tokenizer = tokenizer_of_state(structure.state, structure.path)
    dtype_name = str(weight_dtype).removeprefix("torch.")
    texts = model_files(shape, dtype_name, settings, tokenizer)
    shapes = tensor_shapes(shape)
    folded = _folded_factors(shape, shapes)
    exact = {*folded, *filter(merge.has_adapter, shapes)}
    sources = stored_sources(structure, shapes, weight_dtype, exact)
    tensors_to_write = counterparts(architecture.rules, shapes, architecture.head_order(shape))
    copies = {each.name: each for each in copied_tensors(shape, shapes)}
    tensors_to_write += [*copies.values(), *architecture.empty_tensors(shape)]
    by_name = {each.name: each for each in tensors_to_write}
    exported = _ExportedTensors(merge, sources, weight_dtype, folded)

    def copy(source: TensorSource, name: str, view: NDArray[Any], sums: Sums) -> None:
        if name in copies:
            sums = np.zeros_like(sums)  # the dataset is read twice and added to its checksums once
        exported.copy(source, by_name[name], view, sums)

    tensors = [
        NewTensor(each.name, NAMES[_tensor_dtype(each, weight_dtype)], each.shape)
        for each in tensors_to_write
    ]
    return PreparedExport(tensors, texts, sources, copy, _describe(shape), weight_dtype, note)


def require_new(folder: Path) -> None:
    """Raise HpctrainError if a path cannot become a new folder."""
    problem = control_problem(str(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "is not empty; name a new folder, or empty this one"
    elif folder.name in {"", ".."}:
        problem = "does not name a new folder; give the name of a new one"
    if problem:
        raise HpctrainError(f"{escaped(str(folder))}: {problem}")


def import_model(world: World, folder: Path, out: Path, replace: bool = False) -> str:
    """Write the model of a Hugging Face folder as a checkpoint of a model alone. Collective.

    Args:
        world: The ranks.
        folder: The Hugging Face folder.
        out: The checkpoint.
        replace: True if the checkpoint may replace a file.

    Returns:
        Lines for the user: notes about special tokens and keys that are ignored, then what was written.

    Raises:
        HpctrainError: The folder has no model or a damaged tokenizer, or the file exists and may not be
            replaced. Among others as in `open_model` and `checkpoint.save.save`.
        InputOutputError: A file cannot be read or written.
    """
    group = world.everyone
    world.ledger.activity = "importing the model"
    with raise_on_all_ranks(group):
        check_output(out, replace)
        keys = folder_module_keys(folder)
        model = open_module_source(folder, keys, group.rank, group.size) if keys else open_model(folder)
        if isinstance(model, ModuleSource):
            deck, description = module_deck(keys, out, folder), model.description
            note = f"{folder}: {model.note}" if model.note else ""
        else:
            model.require_equal_copies(group.rank, group.size)
            deck, description = _native_deck(model.shape, out, folder), _describe(model.shape)
            note = training_note(folder)
        text, settings, missing = tokenizer_of_folder(folder, deck.model.vocabulary)
        if text is None:
            refuse_damaged_tokenizer(folder)
        warnings = [] if text is None else import_warnings(text, settings, folder)
        warnings += [note] if note else []
        state = {
            MODEL_ONLY: True,
            "imported_from": str(folder),
            **deck_state(deck),
            **tokenizer_state(text, settings),
        }
    entries = [
        TensorRange(
            dataset,
            Shard.replicated(dataset.rpartition("/")[2], size),
            cast("Flat", FolderTensor(model, dataset, size, 0, prod(size), model.dtype(dataset))),
            copy=group.rank,
            copies=group.size,
        )
        for dataset, size in model.shapes.items()
    ]
    save(out, group, entries, state, PIECE_BYTES)
    tokenizer = "with its tokenizer" if text is not None else f"without a tokenizer ({missing})"
    sentence = (
        f"{out}: {description}, "
        f'{format_bytes(out.stat().st_size)}, {tokenizer}; to train it, set [model] from = "{out}"'
    )
    return "\n".join([*warnings, sentence])


@dataclass(frozen=True)
class FolderTensor(ScratchSlice):
    """Range of a flattened native tensor, which is read from a Hugging Face folder on demand.

    Attributes:
        model: The folder.
        dataset: Dataset of the tensor.
        shape: Shape of the tensor.
        first: First element.
        length: Number of elements.
        dtype: dtype of the values that are read.
    """

    model: ModelFolder | ModuleSource
    dataset: str
    shape: Index
    first: int
    length: int
    dtype: torch.dtype

    def __getitem__(self, part: slice) -> FolderTensor:
        start, last, step = part.indices(self.length)
        assert step == 1
        return replace(self, first=self.first + start, length=max(0, last - start))

    def load(self) -> Tensor:
        """Return the elements, read into new memory."""
        cut = flat_range_boxes(self.shape, self.first, self.first + self.length)
        return torch.cat([self.model.read(self.dataset, start, shape).reshape(-1) for start, shape in cut])


def _describe(shape: ModelShape) -> str:
    """Return family and number of parameters of a model in words."""
    counts = count(shape)
    text = f"{shape.family}, {format_count(counts.parameters)} parameters"
    return f"{text} ({format_count(counts.active_parameters)} active per token)" if shape.experts else text


def _delete_temporary(temporary: Path) -> None:
    """Delete what an interrupted export has written. Raise HpctrainError if there are other files."""
    if temporary.exists():
        others = delete_folder(temporary, _OWN_FILE)
        if others:
            raise HpctrainError(
                f"{temporary}: is the temporary folder of the export, but contains {others[0]}, which no "
                "export wrote; move it elsewhere, or give another folder"
            )


def _tensor_dtype(counterpart: Counterpart, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an exported tensor. Biases for choosing experts are fp32, as in `transformers`."""
    is_bias = any(part.dataset.startswith(f"/{ROUTER_BIAS}/") for part in counterpart.parts)
    return torch.float32 if is_bias else weight_dtype


def _folded_factors(shape: ModelShape, datasets: Iterable[str]) -> dict[str, float]:
    """Return the factors of weights that replace the multipliers of muP, by dataset.

    They belong to the final norm, whose results give the logits, and to the queries or their norm.

    Raises:
        HpctrainError: A norm has no weight that its results are proportional to.
    """
    scaling, factors = shape.width_scaling, {"final_norm": shape.width_scaling.of_logits}
    factors["query" if shape.query_key_norm == "none" else "query_norm"] = scaling.of_scores
    changes_norms = scaling.of_logits != 1 or ("query_norm" in factors and scaling.of_scores != 1)
    if changes_norms and shape.norm_weight != "plain":
        raise HpctrainError(
            'model.parametrization = "mup": cannot be exported with model.norm_weight = '
            f'"{shape.norm_weight}": the factor of the logits needs the weight of a "plain" norm'
        )
    layers = {dataset: dataset.split("/")[-1].split(".")[-2] for dataset in datasets}
    return {dataset: factors[layer] for dataset, layer in layers.items() if factors.get(layer, 1.0) != 1}


@dataclass(frozen=True)
class _ExportedTensors:
    """Tensors of an export, which are computed from those of a checkpoint.

    Attributes:
        merge: The checkpoint, with adapters that are merged into weights.
        sources: Dataset that is read for each native tensor.
        dtype: dtype of exported weights.
        factors: Factors of weights by dataset, as `_folded_factors` returns them.
    """

    merge: AdapterMerge
    sources: Mapping[str, StoredTensor]
    dtype: torch.dtype
    factors: Mapping[str, float]

    def copy(self, source: TensorSource, counterpart: Counterpart, view: NDArray[Any], sums: Sums) -> None:
        """Fill the bits of one tensor of a file, and update checksums with the data that was read."""
        dtype, structure = _tensor_dtype(counterpart, self.dtype), self.merge.structure
        target = view.T if counterpart.transposed else view.reshape(-1) if counterpart.flattened else view
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        for part in counterpart.parts:
            if part.expert_order is not None:
                target = part.expert_order.in_our_order(view)
            stored = self.sources[part.dataset]
            adapter = self.merge.factors(source, part.dataset)
            for piece, first in _pieces(part, stored):
                values = torch.empty(piece.elements, dtype=getattr(torch, stored.kind))
                source.fill(
                    [ReadRequest(TensorRange(stored.dataset, piece, values), stored, sums[stored.pieces])]
                )
                if part.dataset in self.factors:
                    values = values.float() * self.factors[part.dataset]
                if adapter is not None:
                    values = self.merge.add_update(values, first - part.first, adapter)
                converted = convert_values(values, dtype, f"{structure.path}: {stored.dataset}")
                shape = piece.local[len(part.index) :]
                words = converted.view(bits).numpy().view(view.dtype).reshape(shape)
                target[part.rows(first - part.first, shape[0])] = words


def _pieces(part: TensorPart, stored: StoredTensor) -> Iterator[tuple[Shard, int]]:
    """Yield the pieces of a dataset in a part of a Hugging Face tensor, each with its first row there.

    A piece has at most PIECE_BYTES, or one row.
    """
    rows, *width = part.shape
    step = max(1, PIECE_BYTES // (prod(width) * stored.item_bytes))
    name = part.dataset.rpartition("/")[2]
    for row in range(0, rows, step):
        local = (*(1 for _ in part.index), min(step, rows - row), *width)
        start = (*part.index, (part.start or 0) + row, *(0 for _ in width))
        yield Shard(name, stored.shape, start, local), part.first + row


def _compare(structure: CheckpointIndex, datasets: Iterable[StoredTensor], totals: Sums) -> None:
    """Raise InputOutputError if datasets, as all ranks have read them, differ from their checksums."""
    for stored in datasets:
        sums = totals[stored.pieces] + checksum.seeds(stored.dataset, stored.kind, stored.shape)
        require_checksums(structure.path, stored, sums, structure.sums[stored.pieces])


def _native_deck(shape: ModelShape, out: Path, folder: Path) -> Deck:
    """Return the deck for the checkpoint `out` of a model that hpctrain implements itself."""
    keys = model_keys(shape) | ({"mtp_layers": shape.mtp_layers} if shape.mtp_layers else {})
    return model_only_deck(keys, shape.sequence, out, folder, rewards=shape.head == "scalar")
