"""Transfer of batches from one process to another through shared memory."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence

import torch

from hpctrain.data.items import Fields

_ALIGNMENT = 64  # of tensors, in bytes
_LENGTH = struct.Struct("<Q")


def to_memory(fields: Fields, problems: Sequence[str] = ()) -> int:
    """Write tensors, and error messages, to a new file in memory, and return its descriptor."""
    places, offset = [], 0
    for name, field in fields.items():
        kind = str(field.dtype).removeprefix("torch.")
        places.append((name, kind, list(field.shape), offset))
        offset += -(-field.nbytes // _ALIGNMENT) * _ALIGNMENT
    head = json.dumps((places, list(problems))).encode()
    begin = -(-(_LENGTH.size + len(head)) // _ALIGNMENT) * _ALIGNMENT
    file = os.memfd_create("hpctrain-batch")
    os.ftruncate(file, begin + offset)
    with mmap.mmap(file, begin + offset) as memory:
        memory[: _LENGTH.size + len(head)] = _LENGTH.pack(len(head)) + head
        for (*_, place), field in zip(places, fields.values(), strict=True):
            if field.nbytes:
                content = field.contiguous().reshape(-1).view(torch.uint8).numpy()
                memory[begin + place : begin + place + field.nbytes] = content.data
    return file


def from_memory(file: int) -> tuple[Fields, tuple[str, ...]]:
    """Return the tensors and error messages that another process wrote with `to_memory`.

    The descriptor is closed. The memory is released with the last tensor in it.
    """
    try:
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    (length,) = _LENGTH.unpack(memory[: _LENGTH.size])
    places, problems = json.loads(memory[_LENGTH.size : _LENGTH.size + length])
    begin = -(-(_LENGTH.size + length) // _ALIGNMENT) * _ALIGNMENT
    fields: Fields = {}
    for name, kind, shape, place in places:
        dtype = getattr(torch, kind)
        if elements := torch.Size(shape).numel():
            flat = torch.frombuffer(memory, dtype=dtype, count=elements, offset=begin + place)
            fields[name] = flat.view(shape)
        else:
            fields[name] = torch.empty(shape, dtype=dtype)
    return fields, tuple(problems)
