from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.files import (
    descriptor_of,
    distinct,
    is_unfit,
    open_regular,
    parse_json,
    read_bytes,
    read_text,
    require_writable,
    write_atomically,
)


def test_text_has_newlines_whatever_its_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffé\r\nb\rc\n".encode())  # with a byte order mark
    assert read_text(tmp_path / "a", 100) == "é\nb\nc\n"


def test_no_more_than_asked_for_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert read_bytes(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(OSError, match="more than 9 bytes") as caught:
        read_bytes(tmp_path / "a", 9)
    assert is_unfit(caught.value)


def test_only_regular_files_are_opened_and_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(OSError, match="not a regular file") as caught:
            open_regular(path)
        assert is_unfit(caught.value)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError) as missing:
        open_regular(tmp_path / "none")
    assert not is_unfit(missing.value)


def test_files_that_could_be_written_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_text("before")
    for path in (tmp_path / "there", tmp_path / "new", Path("/dev/null"), Path("new")):
        require_writable(path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "before"
    bad = {
        tmp_path: "is a folder",
        tmp_path / "no/a": "No such file",
        tmp_path / "there/a": "Not a directory",
    }
    for path, sentence in bad.items():
        with pytest.raises(HpctrainError, match=sentence):
            require_writable(path)
    monkeypatch.setattr("os.access", lambda *_: False)
    for path in (tmp_path / "there", tmp_path / "new"):
        with pytest.raises(HpctrainError, match=f"{path}: cannot be written: Permission denied"):
            require_writable(path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(OSError, match="name") as caught:
        open_regular(name)
    assert is_unfit(caught.value)


def test_each_file_is_taken_once_by_its_first_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    gone, other, link = tmp_path / "gone", tmp_path / "other", tmp_path / "link"
    assert distinct([other, link, gone, tmp_path / "a", gone, other]) == [other, link, gone]


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "{", ""])
def test_json_that_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - one class for all
        parse_json(text)
    assert "sys." not in str(caught.value)


def test_created_files_are_not_executable(tmp_path: Path) -> None:
    with descriptor_of(tmp_path / "new", os.O_RDWR | os.O_CREAT):
        pass
    assert not os.access(tmp_path / "new", os.X_OK)


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "first")
    assert path.read_text() == "first"

    def fails(self: Path, target: Path) -> Path:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
