"""Which files are taken, which are left out, and what is said of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.data.input_files import ROW_ENDINGS, find_sources, matches_glob
from hpctrain.errors import HpctrainError, InputOutputError


def write(path: Path, data: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data)
    return path


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("*.txt", {"a.txt", "x/a.txt", "x/y/a.txt"}),
        ("/*.txt", {"a.txt"}),
        ("x/**/*.txt", {"x/a.txt", "x/y/a.txt"}),
        ("**/y/*", {"x/y/a.txt", "x/y/b.PY"}),
        ("./x/*.{txt,md}", {"x/a.txt"}),
        ("{x,y}/?.{txt,[pP]*}", {"x/a.txt", "x/y/a.txt", "x/y/b.PY"}),
        ("*.py", set()),
    ],
)
def test_patterns_match_as_in_a_shell(pattern: str, matching: set[str]) -> None:
    paths = {"a.txt", "x/a.txt", "x/y/a.txt", "x/y/b.PY", "x/y"}
    assert {path for path in paths if matches_glob(path, pattern)} == matching


def test_endings_count_in_any_case(tmp_path: Path) -> None:
    for name in ("A.TXT", "b.Jsonl.GZ", "c.NDJSON", "d.PARQUET", "e.json"):
        write(tmp_path / name, "x")
    text, _ = find_sources([str(tmp_path)], [])
    rows, _ = find_sources([str(tmp_path)], [], endings=ROW_ENDINGS)
    assert [Path(source.path).name for source in text] == ["A.TXT", "b.Jsonl.GZ", "c.NDJSON", "d.PARQUET"]
    assert [Path(source.path).name for source in rows] == ["b.Jsonl.GZ", "c.NDJSON", "d.PARQUET", "e.json"]
    assert [source.lines for source in text] == [False, True, True, False]


def test_folders_are_sorted_and_chosen(tmp_path: Path) -> None:
    for name in [
        "b/z.txt",
        "b/a.txt.gz",
        "a.md",
        "c.py",
        "c.bin",
        ".hidden/x.txt",
        "b/.x.txt",
        "b.txt",
        "b/l.jsonl",
    ]:
        write(tmp_path / name, "x")
    write(tmp_path / "empty.txt", "")

    def names(paths: list[str], *globs: str) -> list[str]:
        sources, _ = find_sources([str(tmp_path / path) for path in paths], globs)
        return [str(Path(source.path).relative_to(tmp_path)) for source in sources]

    everything = ["a.md", "b/a.txt.gz", "b/l.jsonl", "b/z.txt", "b.txt", "c.py"]
    assert names(["."]) == everything
    assert names([".", "b"]) == everything
    assert names(["c.bin", "b"]) == ["c.bin", "b/a.txt.gz", "b/l.jsonl", "b/z.txt"]
    assert names(["."], "*.bin", "b/*.txt") == ["b/z.txt", "c.bin"]
    (tmp_path / "loop").symlink_to(tmp_path)
    assert names(["."]) == everything


def test_paths_that_give_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(HpctrainError) as caught:
        find_sources([str(tmp_path / "folder"), str(tmp_path / "none.txt")], [])
    assert isinstance(caught.value, InputOutputError)
    assert "no file in this folder matches" in caught.value.problems[0]
    assert "none.txt: no such file or folder" in caught.value.problems[1]
    with pytest.raises(HpctrainError, match=r"matches \*\.x; see --glob"):
        find_sources([str(tmp_path / "folder")], ["*.x"])
    with pytest.raises(HpctrainError, match="pattern is empty"):
        find_sources([str(tmp_path / "folder")], [""])


def test_what_is_left_out_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.log", "d/c.bin", "d/e.bin", ".git/x.txt", "d/.y.txt", "bad\n\x1b[1m.bin"):
        write(tmp_path / name, "x")
    write(tmp_path / "empty.md", "")
    write(tmp_path / "out.h5", "x")
    (tmp_path / "lost.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    sources, left = find_sources(["."], [], without=[Path("out.h5")])
    assert [source.path for source in sources] == ["a.txt"]
    assert left.lines() == [
        "left out by name: 4 files (b.log, bad??[1m.bin ...); --glob selects others",
        "left out as hidden: 2 files (.git, d/.y.txt)",
        "left out as not regular: 2 files (lost.txt, pipe.txt)",
        "left out as empty: 1 file (empty.md)",
    ]
    # What is named is not left out, wherever it was seen before.
    sources, left = find_sources([".", "d/c.bin", "d"], ["*.txt", "*.bin", "*.none", "x/*"])
    assert [(source.path, source.named) for source in sources][-2:] == [("d/c.bin", True), ("d/e.bin", False)]
    assert left.lines()[-2:] == ["--glob *.none: no file matches", "--glob x/*: no file matches"]
    assert find_sources(["a.txt"], ["*.none"])[1].lines() == []
    with pytest.raises(HpctrainError, match=r"pipe.txt: is not a regular file"):
        find_sources(["pipe.txt"], [])
