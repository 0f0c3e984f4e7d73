"""Modules of multi-token prediction in files of `transformers`, as those of DeepSeek-V3 have them.

The module of depth k is layer `layers + k - 1`. It has copies of the embedding and of the output layer, which
native models share.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpctrain.checkpoint.exchange.hugging_face.architectures import MTP_LAYERS, HuggingFaceArchitecture
from hpctrain.checkpoint.exchange.hugging_face.tensor_names import Counterpart, TensorPart
from hpctrain.checkpoint.tensor_ranges import Index, TensorRange
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape

_COPIES = ("embed_tokens", "shared_head.head")
_OF_MODULE = re.compile(r"model\.layers\.(\d+)\.(?:enorm|hnorm|eh_proj|shared_head\.norm)\.weight")
_MOST_NAMED = 4
"""Number of layers that a message names."""


def with_stored_modules(
    shape: ModelShape,
    config: Mapping[str, Any],
    architecture: HuggingFaceArchitecture,
    names: Collection[str],
    where: str,
) -> ModelShape:
    """Return the shape of a folder with the modules whose tensors it has.

    Args:
        shape: Shape of the model without modules.
        config: The folder's config.json.
        architecture: Architecture that it names.
        names: Names of the tensors in the folder.
        where: Name of the config.json in messages.

    Raises:
        HpctrainError: The config.json names another number of modules. Without that number, modules which
            `transformers` ignores are ignored.
    """
    if not architecture.has_mtp or architecture.head != "vocabulary":
        return shape
    number = config.get(MTP_LAYERS)
    of_modules = {name: int(found[1]) for name in names if (found := _OF_MODULE.fullmatch(name))}
    ignores_all = all(re.fullmatch(architecture.files.buffers, name) for name in of_modules)
    if not of_modules or (number in (None, 0) and ignores_all):
        return shape
    layers = sorted(set(of_modules.values()))
    if type(number) is int and layers == list(range(shape.layers, shape.layers + number)):
        return replace(shape, mtp_layers=number)
    named = ", ".join(f"model.layers.{layer}" for layer in layers[:_MOST_NAMED])
    files = f"the modules of multi-token prediction in these files are {named}"
    raise HpctrainError(
        f"{where}: {MTP_LAYERS} = {number!r}: contradicts the files with num_hidden_layers = {shape.layers}, "
        f"since {files}"
    )


def copied_tensors(shape: ModelShape, shapes: Mapping[str, Index]) -> Iterator[Counterpart]:
    """Yield the copies of the embedding and of the output layer in files with modules.

    Args:
        shape: Shape of the model.
        shapes: Global shapes of the native tensors by dataset.
    """
    embedding = "/model/embedding.tokens.weight"
    for block in _blocks(shape):
        for name, dataset in zip(
            _COPIES, (embedding, embedding if shape.tied else "/model/head.weight"), strict=True
        ):
            part = TensorPart(dataset, shapes[dataset])
            yield Counterpart(f"model.layers.{block}.{name}.weight", shapes[dataset], False, (part,))


def is_copy(name: str, shape: ModelShape) -> bool:
    """Return True if a tensor of a folder is a copy of the embedding or of the output layer."""
    return any(name == f"model.layers.{block}.{each}.weight" for block in _blocks(shape) for each in _COPIES)


def without_modules(entries: Sequence[TensorRange], shape: ModelShape) -> list[TensorRange]:
    """Return the entries without those of modules that a model of this shape does not have."""
    return [entry for entry in entries if _block_of(entry.dataset) < shape.layers + shape.mtp_layers]


def has_entries_of_modules(entries: Sequence[TensorRange], shape: ModelShape) -> bool:
    """Return True if entries of a model are of modules, which follow the layers of `shape`."""
    return any(_block_of(entry.dataset) >= shape.layers for entry in entries)


def _block_of(dataset: str) -> int:
    """Return the number of the block that a tensor belongs to; 0 if it belongs to none."""
    found = re.search(r"/blocks\.(\d+)\.", dataset)
    return int(found[1]) if found else 0


def _blocks(shape: ModelShape) -> range:
    """Return the numbers of the blocks of modules."""
    return range(shape.layers, shape.layers + shape.mtp_layers)
