"""What a policy wrote, in samples.jsonl, of which a disk that is full may have a part alone.

Tests of post/samples_file.py.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.data.tokenizer import Tokenizer
from hpctrain.errors import InputOutputError
from hpctrain.post.rollout import Answer
from hpctrain.post.samples_file import SamplesFile

BYTES = Tokenizer("bytes")


def write(file: SamplesFile, step: int, answers: int = 3) -> None:
    """Some answers of one step."""
    some = [Answer(number, 0, (*b"ask: so",), 2, "so", "length") for number in range(answers)]
    file.write(step, "rollout", some, {"reward": [0.5] * answers}, BYTES)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """The system writes so many bytes of a file, as where a disk is full, and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_and_a_run_goes_on_from_what_is_whole(tmp_path: Path) -> None:
    file = SamplesFile(tmp_path, 0, 2, writes=True)
    write(file, 1)
    assert steps(file.path) == [1, 1]
    whole = file.path.stat().st_size
    with no_file_beyond(whole + 30), pytest.raises(InputOutputError) as raised:
        write(file, 2)
    assert str(raised.value).startswith(f"{file.path}: cannot be written: ")
    assert raised.value.exit_code == 3
    assert file.path.stat().st_size == whole + 30
    # One that goes on from the state after step 1 forgets the rest, if there is room to do so.
    again = SamplesFile(tmp_path, 1, 2, writes=True)
    with no_file_beyond(30), pytest.raises(InputOutputError):
        write(again, 2)
    assert file.path.stat().st_size == whole + 30
    write(again, 2)
    write(again, 3)
    assert steps(file.path) == [1, 1, 2, 2, 3, 3]
