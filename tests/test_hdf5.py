"""Tests that only contiguous datasets and simple attributes of untrusted HDF5 files are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.hdf5 import DAMAGE, SIGNATURE, format_of, open_checked, open_for_writing

Change = Callable[[h5py.File], object]
VALUES = np.arange(5, dtype="<u4")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """File with the dataset /values and two attributes."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["values"] = VALUES
        file.attrs["format"], file.attrs["number"] = np.bytes_("test"), 7
    return tmp_path / "a.h5"


def replace_values(change: Change) -> Change:
    """Return a function that deletes /values and then applies a change."""

    def apply(file: h5py.File) -> None:
        del file["values"]
        change(file)

    return apply


def map_itself(file: h5py.File) -> None:
    """Create a virtual dataset that maps itself. HDF5 ends the process if it is read."""
    layout = h5py.VirtualLayout(VALUES.shape, VALUES.dtype)
    layout[:] = h5py.VirtualSource(".", "values", VALUES.shape)
    file.create_virtual_dataset("values", layout)


def test_contents_of_a_file(path: Path) -> None:
    with open_checked(path) as file:
        dataset = file.dataset("/values")
        assert (dataset.shape, dataset.dtype, dataset.elements) == ((5,), VALUES.dtype, 5)
        assert dataset.read(100).tolist() == VALUES.tolist()
        assert path.read_bytes()[dataset.offset : dataset.offset + 20] == VALUES.tobytes()
        assert (file.integer("number"), file.text("format"), file.datasets) == (7, "test", {"/values"})
        with pytest.raises(ValueError, match="/values has type uint32"):
            dataset.read(19)
    assert format_of(path) == "test"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.__setitem__("other", h5py.SoftLink("/values")), "/other is a soft link"),
        (
            lambda file: file.__setitem__("other", h5py.ExternalLink("b.h5", "/x")),
            "/other is an external link",
        ),
        (replace_values(map_itself), "/values is not one contiguous range"),
        (
            replace_values(lambda file: file.create_dataset("values", data=VALUES, chunks=(2,))),
            "/values is not one contiguous range",
        ),
        (
            replace_values(
                lambda file: file.create_dataset(
                    "values", (5,), "u1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
                )
            ),
            "/values is not one contiguous range",
        ),
        (
            replace_values(lambda file: file.create_dataset("values", data=h5py.Empty("u4"))),
            "/values is not one contiguous range|/values is empty",
        ),
        (replace_values(lambda file: file.create_group("values")), "it has no dataset /values"),
        (
            replace_values(lambda file: file.__setitem__("values", np.dtype("u4"))),
            "it has no dataset /values",
        ),
        (replace_values(lambda _: None), "it has no dataset /values"),
    ],
)
def test_other_datasets_are_refused(path: Path, change: Change, message: str) -> None:
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(DAMAGE, match=message), open_checked(path) as checked:
        checked.dataset("/values")


@pytest.mark.parametrize(
    "value", [2.5, [1, 2], "any length", np.bytes_("text"), h5py.Empty("i8"), float("inf")]
)
def test_attributes_of_other_types_are_refused(path: Path, value: object) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["number"] = value
    with (
        open_checked(path) as checked,
        pytest.raises(ValueError, match="the attribute number is not an integer"),
    ):
        checked.integer("number")
    with open_checked(path) as checked, pytest.raises(KeyError, match="it has no attribute other"):
        checked.text("other")


def test_other_files_have_no_format(path: Path, tmp_path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = "any length"
    (tmp_path / "cut.h5").write_bytes(SIGNATURE + b"cut")
    assert [format_of(each) for each in (path, tmp_path, tmp_path / "none", tmp_path / "cut.h5")] == [
        None
    ] * 4


def test_pages_in_memory_are_written_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new.h5"
    with open_for_writing(path, "w") as file:
        file["values"] = np.arange(100_000)
        assert path.stat().st_size == 0
    with open_for_writing(path, "r+") as file:
        file["values"][70_000:70_010] = -1
        file.attrs["complete"] = 1
    with h5py.File(path) as file:
        expected = np.arange(100_000)
        expected[70_000:70_010] = -1
        assert (file["values"][()] == expected).all()
        assert file.attrs["complete"] == 1


def test_a_failed_block_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "old.h5"
    with open_for_writing(path, "w") as file:
        file["values"] = np.arange(100_000)
    content = path.read_bytes()

    def fail() -> None:
        with open_for_writing(path, "w") as file:
            file["others"] = VALUES
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fail()
    assert path.read_bytes() == content
    with open_for_writing(path, "w") as file:
        file["others"] = VALUES
    with h5py.File(path) as file:
        assert list(file) == ["others"]
        assert (file["others"][()] == VALUES).all()
    assert path.stat().st_size < len(content)


def test_failed_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "new.h5"
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="Input/output error") as raised, open_for_writing(path, "w") as file:
        file["values"] = VALUES
    assert raised.value.filename == str(path)
