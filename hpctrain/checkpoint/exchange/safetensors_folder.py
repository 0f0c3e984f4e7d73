"""Folders with one safetensors file, or several ones and an index: reading and writing box by box.

The content of JSON files is validated: sizes before memory is allocated, and names before a file is opened.
Weights in pickles, which can run code, are never read.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpctrain.checkpoint.finite import NonFiniteWeight, nonfinite_element, nonfinite_sentence
from hpctrain.comm.error_messages import describe_os_error
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import JSON_BYTES, flush_to_disk, open_regular, parse_json, read_text

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
Index = tuple[int, ...]

TYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""dtype of each type of weights in files."""

NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TYPES.items()}
"""Type in files of each dtype of weights."""

_INTEGER_TYPES: Mapping[str, torch.dtype] = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""dtype of each type of tensors of integers in files; weights never have them."""

_EVERY_TYPE = {**TYPES, **_INTEGER_TYPES}


@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor in a folder.

    Attributes:
        kind: Type in the file, such as "BF16".
        shape: Shape of the tensor.
        file: Name of the file.
    """

    kind: str
    shape: Index
    file: str


class TensorFolder:
    """Tensors in safetensors files of a folder, read on demand. `open_folder` returns one.

    Args:
        path: The folder.
        tensors: Its tensors by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.path, self.tensors = path, tensors
        self._name, self._file = "", cast(Any, None)

    def read(self, name: str, start: Index, shape: Index) -> Tensor:
        """Return the box `shape` at `start` of a tensor, in the type of the file.

        Raises:
            InputOutputError: The file cannot be read.
        """
        info = self.tensors[name]
        if name != self._name:
            # Files are mapped into memory. Closing one releases the pages that were read.
            self._name, self._file = name, None
            self._file = _open(self.path / info.file)
        index = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
        try:
            box: Tensor = self._file.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise InputOutputError(f"{self.path / info.file}: {name} cannot be read: {error}") from None
        return box

    def read_finite(self, name: str, start: Index, shape: Index) -> Tensor:
        """Return a box as `read` does.

        Raises:
            InputOutputError: An element of it is not a finite number.
        """
        box = self.read(name, start, shape)
        bad = nonfinite_element(box)
        if bad is not None:
            index = tuple(first + within for first, within in zip(start, bad[0], strict=True))
            weight = NonFiniteWeight(name, index, bad[1])
            remedy = "download or save the model again, or use another one"
            raise InputOutputError(nonfinite_sentence(self.path / self.tensors[name].file, weight, remedy))
        return box


def open_folder(path: Path) -> TensorFolder:
    """Open all safetensors files of a folder, and read the descriptions of their tensors.

    Raises:
        HpctrainError: The folder has no safetensors, or its files contradict its index.
        InputOutputError: Files are missing, truncated or damaged.
    """
    weight_map = _weight_map(path)
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for name in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]:
        file = _open(path / name)
        for tensor in file.keys():  # noqa: SIM118 - it is no mapping
            view = file.get_slice(tensor)
            kind, shape = view.get_dtype(), tuple(view.get_shape())
            if weight_map is not None and weight_map.get(tensor) != name:
                problems.append(
                    f"{path / name}: contains {tensor}, which {INDEX} does not list for this file"
                )
            tensors[tensor] = TensorInfo(kind, shape, name)
    problems += [
        f"{path / name}: does not contain {tensor}, which {INDEX} lists for this file"
        for tensor, name in (weight_map or {}).items()
        if tensor not in tensors
    ]
    if problems:
        raise HpctrainError(problems[:8])
    return TensorFolder(path, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        InputOutputError: The file cannot be read, is too large, or is not a JSON object.
    """
    try:
        content = parse_json(read_text(path, JSON_BYTES))
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be read: {describe_os_error(error)}") from None
    except ValueError:
        raise InputOutputError(f"{path}: damaged or truncated: it is not JSON") from None
    if not isinstance(content, dict):
        raise InputOutputError(f"{path}: damaged: it is not a JSON object")
    return content


def refuse_pickle(path: Path) -> None:
    """Raise HpctrainError if the name of a file is that of a pickle."""
    if path.suffix in PICKLES:
        raise HpctrainError(_pickle_message(path, path.parent))


def _pickle_message(file: Path, folder: Path) -> str:
    """Return the message about weights in a pickle, with a command that converts the folder."""
    names = (json.dumps(name, ensure_ascii=False) for name in (str(folder), f"{folder}-safetensors"))
    program = "from transformers import AutoModelForCausalLM as M; M.from_pretrained({}).save_pretrained({})"
    return (
        f"{file}: weights in a pickle can run code and are not read; convert them where you trust them: "
        f"{shlex.join(['python', '-c', program.format(*names)])}"
    )


def _weight_map(path: Path) -> dict[str, str] | None:
    """Return the file of each tensor in the index of a folder; None if a single file has all tensors."""
    if (path / SINGLE).exists():
        return None
    if not (path / INDEX).exists():
        files = sorted(path.iterdir())
        shards = [file.name for file in files if _SHARD.fullmatch(file.name)]
        if shards:
            purpose = f"it lists the tensors in {shards[0]} and the other files"
            raise InputOutputError(f"{path / INDEX}: no such file; {purpose} (download the folder again)")
        pickles = [file for file in files if file.suffix in PICKLES]
        if pickles:
            raise HpctrainError(_pickle_message(pickles[0], path))
        raise HpctrainError(f"{path}: contains no weights: neither {SINGLE} nor {INDEX}")
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputOutputError(f"{path / INDEX}: damaged: it has no weight_map")
    for tensor, file in weight_map.items():
        safe = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not safe or Path(file).name != file:
            expected = "must be a .safetensors file in this folder"
            raise HpctrainError(f"{path / INDEX}: {tensor} in {file!r}: {expected}")
    return weight_map


def _open(file: Path) -> Any:
    """Open a file with the library of safetensors, which validates its header."""
    try:
        open_regular(file).close()
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise InputOutputError(f"{file}: no such file, though {INDEX} names it") from None
    except (SafetensorError, OSError) as error:
        raise InputOutputError(f"{file}: damaged or truncated safetensors: {error}") from None
    except RuntimeError as error:  # of torch, for example since the address space is limited
        raise InputOutputError(f"{file}: cannot be mapped into memory: {error}") from None


@dataclass(frozen=True)
class NewTensor:
    """Tensor that is to be written.

    Attributes:
        name: Name in the file.
        kind: Type in the file, such as "BF16".
        shape: Shape of the tensor.
    """

    name: str
    kind: str
    shape: Index

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return prod(self.shape) * _EVERY_TYPE[self.kind].itemsize


def type_name(dtype: torch.dtype) -> str:
    """Return the name that a dtype of weights or of integers has in files."""
    return next(name for name, each in _EVERY_TYPE.items() if each == dtype)


def split_into_files(tensors: Sequence[NewTensor], max_bytes: int) -> dict[str, list[NewTensor]]:
    """Return files by name, each with tensors of at most `max_bytes` in total, or with one larger tensor."""
    files: list[list[NewTensor]] = []
    free_bytes = 0
    for tensor in tensors:
        if tensor.nbytes > free_bytes or not files:
            files.append([])
            free_bytes = max_bytes
        files[-1].append(tensor)
        free_bytes -= tensor.nbytes
    if len(files) <= 1:
        return {SINGLE: list(tensors)}
    count = len(files)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": file for number, file in enumerate(files, 1)}


def shard_index(files: Mapping[str, Sequence[NewTensor]]) -> dict[str, Any]:
    """Return the content of the index of several files."""
    size = sum(tensor.nbytes for file in files.values() for tensor in file)
    names = sorted((tensor.name, name) for name, file in files.items() for tensor in file)
    return {"metadata": {"total_size": size}, "weight_map": dict(names)}


def create_tensor_file(path: Path, tensors: Sequence[NewTensor]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Create a safetensors file, and yield name and memory of each tensor for the caller to fill.

    The memory is mapped from the file and has the bits of the elements as unsigned integers. Tensors without
    elements are not yielded. All space is allocated first. After the last tensor, the file is synced to the
    disk and its header is validated.

    Args:
        path: The file, which must not exist.
        tensors: Its tensors.

    Raises:
        OSError: The file cannot be created, for example since the disk is full.
        InputOutputError: The header of the file differs from what was written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.flush()
        os.posix_fallocate(stream.fileno(), 0, start + end)
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        at = start + header[tensor.name]["data_offsets"][0]
        bits = np.dtype(f"<u{_EVERY_TYPE[tensor.kind].itemsize}")
        yield tensor.name, np.memmap(path, bits, "r+", at, tensor.shape)
    flush_to_disk(path)
    written = _open(path)
    for tensor in tensors:
        shape = tuple(written.get_slice(tensor.name).get_shape())
        if shape != tensor.shape:
            raise InputOutputError(
                f"{path}: {tensor.name} reads back with shape {list(shape)}, not {list(tensor.shape)}"
            )


def write_text(path: Path, text: str) -> None:
    """Write a text file and sync it to the disk."""
    path.write_text(text, encoding="utf-8")
    flush_to_disk(path)
