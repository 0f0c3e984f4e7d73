"""A folder of safetensors files, one or several with an index: read in slices, written in pieces.

What its JSON files say is distrusted: sizes are looked at before memory is taken, and names before a file
is opened. Weights in pickles, which can run code, are never read.
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

# Name in the file -> type, and back.
TYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TYPES.items()}

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
    """A tensor of the folder: its type in the file, its shape, its file."""

    kind: str
    shape: Index
    file: str


class TensorFolder:
    """The tensors of a folder, none of them in memory; made by `open_folder`."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.path, self.tensors = path, tensors
        self._name, self._file = "", cast(Any, None)

    def read(self, name: str, start: Index, shape: Index) -> Tensor:
        """The box `shape` at `start` of a tensor, in the file's type."""
        described = self.tensors[name]
        if name != self._name:
            # A file is mapped into memory: what has been read of it goes when it is opened anew.
            self._name, self._file = name, None
            self._file = _open(self.path / described.file)
        index = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
        try:
            box: Tensor = self._file.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise InputOutputError(f"{self.path / described.file}: {name} cannot be read: {error}") from None
        return box

    def read_finite(self, name: str, start: Index, shape: Index) -> Tensor:
        """Return a box as `read` does.

        Raises:
            InputOutputError: An element of it is not a finite number.
        """
        box = self.read(name, start, shape)
        bad = nonfinite_element(box)
        if bad is not None:
            index = tuple(begin + own for begin, own in zip(start, bad[0], strict=True))
            weight = NonFiniteWeight(name, index, bad[1])
            remedy = "download or save the model again, or use another one"
            raise InputOutputError(nonfinite_sentence(self.path / self.tensors[name].file, weight, remedy))
        return box


def open_folder(path: Path) -> TensorFolder:
    """Open every file of a folder and read what it says it holds.

    HpctrainError for a folder without safetensors, or whose files and index do not fit each other;
    InputOutputError for files that are missing, truncated or damaged.
    """
    mapped = _weight_map(path)
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for name in sorted(set(mapped.values())) if mapped is not None else [SINGLE]:
        file = _open(path / name)
        for tensor in file.keys():  # noqa: SIM118 - it is no mapping
            described = file.get_slice(tensor)
            kind, shape = described.get_dtype(), tuple(described.get_shape())
            if mapped is not None and mapped.get(tensor) != name:
                problems.append(
                    f"{path / name}: contains {tensor}, which {INDEX} does not list for this file"
                )
            tensors[tensor] = TensorInfo(kind, shape, name)
    problems += [
        f"{path / name}: does not contain {tensor}, which {INDEX} lists for this file"
        for tensor, name in (mapped or {}).items()
        if tensor not in tensors
    ]
    if problems:
        raise HpctrainError(problems[:8])
    return TensorFolder(path, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; InputOutputError where it is none."""
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
    """Raise for a file of weights that are a pickle, by its name."""
    if path.suffix in PICKLES:
        raise HpctrainError(_pickled(path, path.parent))


def _pickled(file: Path, folder: Path) -> str:
    names = (json.dumps(name, ensure_ascii=False) for name in (str(folder), f"{folder}-safetensors"))
    program = "from transformers import AutoModelForCausalLM as M; M.from_pretrained({}).save_pretrained({})"
    return (
        f"{file}: weights in a pickle can run code and are not read; convert them where you trust them: "
        f"{shlex.join(['python', '-c', program.format(*names)])}"
    )


def _weight_map(path: Path) -> dict[str, str] | None:
    """The index, tensor to file; None where one file holds all."""
    if (path / SINGLE).exists():
        return None
    if not (path / INDEX).exists():
        files = sorted(path.iterdir())
        shards = [file.name for file in files if _SHARD.fullmatch(file.name)]
        if shards:
            tells = f"it says which tensors are in {shards[0]} and the other files"
            raise InputOutputError(f"{path / INDEX}: no such file; {tells} (download the folder again)")
        pickles = [file for file in files if file.suffix in PICKLES]
        if pickles:
            raise HpctrainError(_pickled(pickles[0], path))
        raise HpctrainError(f"{path}: contains no weights: neither {SINGLE} nor {INDEX}")
    mapped = read_json(path / INDEX).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise InputOutputError(f"{path / INDEX}: damaged: it has no weight_map")
    for tensor, file in mapped.items():
        safe = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not safe or Path(file).name != file:
            asked = "must be a .safetensors file in this folder"
            raise HpctrainError(f"{path / INDEX}: {tensor} in {file!r}: {asked}")
    return mapped


def _open(file: Path) -> Any:
    """The library's view of a file, which has checked its header."""
    try:
        open_regular(file).close()
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise InputOutputError(f"{file}: no such file, though {INDEX} names it") from None
    except (SafetensorError, OSError) as error:
        raise InputOutputError(f"{file}: damaged or truncated safetensors: {error}") from None


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: its type's name in the file and its shape."""

    name: str
    kind: str
    shape: Index

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * _EVERY_TYPE[self.kind].itemsize


def type_name(dtype: torch.dtype) -> str:
    """Return the name that a dtype of weights or of integers has in files."""
    return next(name for name, each in _EVERY_TYPE.items() if each == dtype)


def split_into_files(tensors: Sequence[NewTensor], most: int) -> dict[str, list[NewTensor]]:
    """Files by name, each with tensors of at most `most` bytes together, or with a single larger one."""
    files: list[list[NewTensor]] = []
    room = 0
    for tensor in tensors:
        if tensor.nbytes > room or not files:
            files.append([])
            room = most
        files[-1].append(tensor)
        room -= tensor.nbytes
    if len(files) <= 1:
        return {SINGLE: list(tensors)}
    count = len(files)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": file for number, file in enumerate(files, 1)}


def shard_index(files: Mapping[str, Sequence[NewTensor]]) -> dict[str, Any]:
    """What the index says of several files."""
    size = sum(tensor.nbytes for file in files.values() for tensor in file)
    mapped = sorted((tensor.name, name) for name, file in files.items() for tensor in file)
    return {"metadata": {"total_size": size}, "weight_map": dict(mapped)}


def create_tensor_file(path: Path, tensors: Sequence[NewTensor]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Make a safetensors file, giving name and pages of one tensor after another, to be overwritten.

    Elements are given as their bits, unsigned integers; tensors without elements are left out. The space is
    taken first, so that a full disk shows as an OSError. After the last tensor the file is on the disk, and
    the library has read it.
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
    """A new text file, on the disk when this returns."""
    path.write_text(text, encoding="utf-8")
    flush_to_disk(path)
