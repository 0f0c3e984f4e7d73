"""Files of routers' choices: what is written is read, and nothing that is damaged or does not fit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.train.routing_file import RoutingFile
from tests.model.mixtures.test_expert_load import SHAPE


def example() -> RoutingFile:
    """Of two samples of four tokens, two experts of four, in blocks 1 and 3."""
    random = np.random.default_rng(1)
    choices = random.permuted(np.tile(np.arange(4, dtype=np.int32), (2, 2, 4, 1)), axis=3)[..., :2]
    return RoutingFile(4, np.array([1, 3], np.int32), np.array([5, 0]), choices)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, written = tmp_path / "routing.h5", example()
    written.write(path)
    found = RoutingFile.read(path)
    for name in ("blocks", "samples", "choices"):
        assert np.array_equal(getattr(found, name), getattr(written, name))
    found.require_fit(path, SHAPE)
    again = tmp_path / "again.h5"
    found.write(again)
    assert again.read_bytes() == path.read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {"routing.h5", "again.h5"}


def test_no_damage_is_overlooked(tmp_path: Path) -> None:
    """A bit of any choice, or of the numbers; and any byte of the file makes no other error than ours."""
    path = tmp_path / "routing.h5"
    example().write(path)
    content = path.read_bytes()
    with h5py.File(path, "r") as file:
        places = [file[name].id.get_offset() for name in ("blocks", "samples", "choices")]
    for place in [*places, places[-1] + 100]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(InputOutputError, match="is damaged: its checksum differs"):
            RoutingFile.read(path)
    for length in (0, 10, len(content) // 2):
        path.write_bytes(content[:length])
        with pytest.raises(InputOutputError, match="is damaged, or not an HDF5 file"):
            RoutingFile.read(path)


def test_a_damaged_file_does_not_crash_the_process_at_its_end(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "routing.h5").write_text("nothing")
    program = """
from pathlib import Path
from hpctrain.errors import InputOutputError
from hpctrain.train.routing_file import RoutingFile
try:
    RoutingFile.read(Path("routing.h5"))
except InputOutputError as error:
    print(error)
"""
    done = launch(0, "-c", program, cold=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("routing.h5: is damaged, or not an HDF5 file")


def test_another_file_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file["tokens"] = np.arange(3)
    with pytest.raises(InputOutputError, match="is not a routing file"):
        RoutingFile.read(path)
    example().write(path)
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 2
    with pytest.raises(InputOutputError, match=r"unsupported version 2 \(expected 1\)"):
        RoutingFile.read(path)
    with pytest.raises(InputOutputError, match="cannot be read"):
        RoutingFile.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"experts": 8}, "model.experts.count = 8, but 4 in this run"),
        ({"blocks": np.array([0, 3], np.int32)}, r"choices of the blocks = \[0, 3\], but \[1, 3\]"),
        ({"choices": np.zeros((2, 2, 4, 2), np.int32)}, "expected 2 different experts"),
        ({"choices": example().choices + 1}, "different experts of 4 for each token"),
        ({"choices": example().choices[..., :1]}, "model.experts.per_token = 1, but 2 in"),
        ({"choices": example().choices[:, :, :3]}, "batch.sequence = 3, but 4 in"),
        ({"samples": np.array([5, 5])}, "and each sample once"),
        ({"samples": np.array([5])}, "and each sample once"),
        ({"choices": example().choices[:1]}, "does not fit"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HpctrainError, match=sentence) as raised:
        replace(example(), **change).require_fit(Path("routing.h5"), SHAPE)
    assert len(raised.value.problems) == 1


def test_padding_has_no_experts() -> None:
    """Of a token all or none are named."""
    choices = example().choices.copy()
    choices[:, :, 3] = choices[:, 1] = -1
    replace(example(), choices=choices).require_fit(Path("routing.h5"), SHAPE)
    choices[0, 0, 0, 1] = -1
    with pytest.raises(HpctrainError, match="expected 2 different experts"):
        replace(example(), choices=choices).require_fit(Path("routing.h5"), SHAPE)


def test_joining_keeps_each_sample_once() -> None:
    one = example()
    other = replace(one, samples=np.array([0, 7]), choices=one.choices[:, ::-1])
    joined = one.joined(other)
    assert joined.samples.tolist() == [5, 0, 7]
    assert np.array_equal(joined.choices[:, 2], other.choices[:, 1])
    assert one.before(5).samples.tolist() == [0]
    assert np.array_equal(one.before(5).choices, one.choices[:, 1:])
