"""Damage to a checkpoint file, by number, and the process that tries to read what it left.

    python -m tests.checkpoint.damage FOLDER FIRST LAST

tries the numbers of FOLDER/good.h5 in a process of its own, since a damaged file might end it, and prints one
JSON object a number, before it and after it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

Damage = Callable[[random.Random, bytearray, dict[str, list[range]]], None]


def regions(path: Path) -> dict[str, list[range]]:
    """Where in a good file what lies, by the names of what is aimed at."""
    content = path.read_bytes()
    found: dict[str, list[range]] = {"superblock": [range(96)], "tensors": []}
    with h5py.File(path, "r") as file:

        def place(name: str) -> range:
            dataset = file[name].id
            return range(dataset.get_offset(), dataset.get_offset() + dataset.get_storage_size())

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and "/" in name:
                found["tensors"].append(place(name))

        file.visititems(visit)
        found["checksums"] = [place("checksums")]
        found["texts"] = [place("state"), place("deck")]
    found["headers"] = [range(at, at + 128) for at in _every(content, b"OHDR")]
    found["attributes"] = [
        range(max(0, at - 24), at + 40) for word in (b"crc32", b"dtype", b"versions", b"complete", b"piece")
        for at in _every(content, word)
    ]  # fmt: skip
    return found


def damaged(path: Path, number: int) -> tuple[str, bytes]:
    """Damage `number` done to a good file: its name, and the whole content. The same for ever."""
    draw = random.Random(number)
    content, known = bytearray(path.read_bytes()), regions(path)
    name = list(DAMAGES)[number % len(DAMAGES)]
    DAMAGES[name](draw, content, known)
    return name, bytes(content)


def _every(content: bytes, word: bytes) -> list[int]:
    places, at = [], content.find(word)
    while at >= 0:
        places.append(at)
        at = content.find(word, at + 1)
    return places


def _flip(draw: random.Random, content: bytearray, within: range) -> None:
    content[draw.choice(within)] ^= 1 << draw.randrange(8)


def _anywhere(draw: random.Random, content: bytearray, _: object) -> None:
    for _ in range(draw.choice((1, 1, 2, 30))):
        _flip(draw, content, range(len(content)))


def _part(draw: random.Random, content: bytearray) -> slice:
    length = min(len(content), draw.choice((1, 8, 64, 512, 4096, 20_000)))
    first = draw.randrange(len(content) - length + 1)
    return slice(first, first + length)


def _zeros(draw: random.Random, content: bytearray, _: object) -> None:
    part = _part(draw, content)
    content[part] = bytes(part.stop - part.start)


def _noise(draw: random.Random, content: bytearray, _: object) -> None:
    part = _part(draw, content)
    content[part] = draw.randbytes(part.stop - part.start)


def _truncate(draw: random.Random, content: bytearray, _: object) -> None:
    del content[draw.choice((draw.randrange(len(content)), len(content) - draw.randrange(1, 600))) :]


def _extend(draw: random.Random, content: bytearray, _: object) -> None:
    more = draw.randrange(1, 9000)
    content += draw.choice((bytes(more), draw.randbytes(more), bytes(content[:more])))


def _swap(draw: random.Random, content: bytearray, _: object) -> None:
    size = draw.choice((64, 512, 4096))
    one, other = draw.sample(range(len(content) // size), 2)
    first, second = slice(one * size, (one + 1) * size), slice(other * size, (other + 1) * size)
    content[first], content[second] = content[second], content[first]


def _shift(draw: random.Random, content: bytearray, _: object) -> None:
    at = draw.randrange(len(content))
    if draw.random() < 0.5:
        del content[at : at + draw.choice((1, 8, 512))]
    else:
        content[at:at] = draw.randbytes(draw.choice((1, 8, 512)))


def _aimed(region: str) -> Damage:
    def damage(draw: random.Random, content: bytearray, known: dict[str, list[range]]) -> None:
        within = draw.choice(known[region])
        within = range(within.start, min(within.stop, len(content)))
        match draw.randrange(4):
            case 0:
                at = draw.choice(within)
                end = min(at + draw.choice((1, 4, 8)), within.stop)
                content[at:end] = draw.choice((b"\x00", b"\xff", draw.randbytes(1))) * (end - at)
            case 1:
                for _ in range(4):
                    _flip(draw, content, within)
            case _:
                _flip(draw, content, within)

    return damage


DAMAGES: dict[str, Damage] = {
    "bits": _anywhere,
    "zeros": _zeros,
    "noise": _noise,
    "truncated": _truncate,
    "extended": _extend,
    "swapped": _swap,
    "shifted": _shift,
    **{region: _aimed(region) for region in ("superblock", "headers", "attributes", "tensors")},
    **{region: _aimed(region) for region in ("checksums", "texts")},
}


def main(folder: Path, first: int, last: int) -> None:
    """Try the damages of these numbers: what a run goes on from, and whether that is what was written."""
    import logging

    import torch

    from hpctrain.checkpoint.checkpoint_index import examine
    from hpctrain.checkpoint.load import load
    from hpctrain.checkpoint.tensor_ranges import STORED_AS, TensorRange
    from hpctrain.comm.world import World
    from hpctrain.errors import HpctrainError
    from hpctrain.parallel.shards import Shard
    from hpctrain.watch.checkpoint_target import find_checkpoint

    world = World.start("cpu")
    good = folder / "good.h5"
    run = folder / "run"
    newest = run / "checkpoints" / "step-00000002.h5"
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hpctrain").addHandler(handler)

    def values(path: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
        # Asks for what the good file holds, as an engine does.
        entries = []
        for stored in examine(good).datasets.values():
            shard = Shard.replicated(stored.dataset, stored.shape)
            kind = "float32" if stored.kind == "float32" else STORED_AS[stored.kind]
            dtype = torch.bfloat16 if stored.kind == "bfloat16" else getattr(torch, str(kind))
            entries.append(
                TensorRange(stored.dataset, shard, torch.full((stored.elements,), 77, dtype=dtype), 0, 0, 1)
            )
        state = load(path, world.everyone, entries)
        return {e.dataset: e.values.view(torch.uint8).numpy().tobytes() for e in entries}, state

    expected = values(good)
    for number in range(first, last):
        name, content = damaged(good, number)
        newest.write_bytes(content)
        print(json.dumps({"number": number, "damage": name}), flush=True)
        said.clear()
        row: dict[str, Any] = {"number": number, "damage": name, "same_bytes": content == good.read_bytes()}
        taken = find_checkpoint(world, run)
        row |= {"taken": taken.name, "said": list(said)}
        for what, call in (
            ("strict", lambda: find_checkpoint(world, run, strict=True)),
            ("load", lambda: values(newest)),
        ):
            try:
                found = call()
                row[what] = "equal" if what == "strict" or found == expected else "other values"
            except HpctrainError as error:
                row[what] = [error.exit_code, list(error.problems)]
        print(json.dumps(row), flush=True)
    sys.exit(world.finish(0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
