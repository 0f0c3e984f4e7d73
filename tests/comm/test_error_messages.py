from __future__ import annotations

import errno
from pathlib import Path

import h5py
import pytest

from hpctrain.comm.error_messages import describe_os_error, error_reason, with_final_name
from hpctrain.errors import HpctrainError, InputOutputError


def failure(path: Path, mode: str = "r") -> OSError:
    with pytest.raises(OSError, match="nable to") as caught:
        h5py.File(path, mode)
    return caught.value


def test_errors_of_hdf5_are_told_in_our_words(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no such thing" * 100)
    assert error_reason(failure(tmp_path / "text")) == "it is not an HDF5 file"
    assert error_reason(failure(tmp_path / "none")) == "No such file or directory"
    assert error_reason(failure(tmp_path / "none" / "new", "w")) == "No such file or directory"
    with h5py.File(tmp_path / "whole", "w") as file:
        file["values"] = range(1000)
        with pytest.raises(KeyError) as caught:
            file["other"]
    assert error_reason(caught.value) == "it has no other"
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-100])
    assert error_reason(failure(tmp_path / "cut")) == "it is truncated"
    assert (
        error_reason(RuntimeError("Unable to frobnicate (addr overflow)")) == "HDF5 cannot read or write it"
    )


def test_other_errors_are_told_as_they_are() -> None:
    assert error_reason(OSError(errno.ENOSPC, "No space left on device", "a")) == "No space left on device"
    assert error_reason(ValueError("its header has a wrong checksum")) == "its header has a wrong checksum"
    assert error_reason(KeyError("version")) == "version"
    assert describe_os_error(OSError(errno.EIO, "Input/output error", "a.h5")) == "a.h5: Input/output error"


def test_a_temporary_name_is_not_told() -> None:
    temporary, path = Path("d/.a.h5.tmp"), Path("d/a.h5")
    with pytest.raises(InputOutputError) as caught, with_final_name(temporary, path):
        raise OSError(errno.ENOSPC, "No space left on device", str(temporary))
    assert caught.value.problems == ("d/a.h5: No space left on device",)
    with pytest.raises(HpctrainError) as told, with_final_name(temporary, path):
        raise HpctrainError(["d/.a.h5.tmp: is wrong", "so is b"])
    assert told.value.problems == ("d/a.h5: is wrong", "so is b")
