"""Zstandard and Parquet files against the texts that they were made of, and such that are damaged."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.world import World
from hpctrain.data.packed import DamagedError, open_packed, plain_name, table_texts
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError, InputOutputError
from tests.data.preparing import prepare

TEXTS = [f"document {n} é\n" * (n % 7) for n in range(600)]


def tokens_of(texts: list[str]) -> list[int]:
    return [token for text in texts if text for token in (*text.encode(), 256)]


def prepared(world: World, folder: Path, *names: str, **options: Any) -> list[int]:
    out = folder / "out.h5"
    prepare(world.single_rank_world(), out, [str(folder / name) for name in names], replace=True, **options)
    file = TokenFile(out)
    return [int(token) for token in file.read(0, file.tokens)]


def test_names() -> None:
    assert [plain_name(name) for name in ("a.jsonl.zst", "a.txt.gz", "a.py")] == ["a.jsonl", "a.txt", "a.py"]


def test_zstandard(world: World, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    compress = zstandard.ZstdCompressor().compress
    rows = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(compress(rows[:9000]) + compress(rows[9000:]))  # two frames
    (tmp_path / "b.txt.zst").write_bytes(compress(b"plain\ntext"))
    found = prepared(world, tmp_path, ".", text_key="body", piece_bytes=1000)
    assert found == [*tokens_of(TEXTS), *b"plain\ntext", 256]
    noise = random.Random(1).randbytes(300_000)
    (tmp_path / "c.zst").write_bytes(compress(noise))
    with open_packed(str(tmp_path / "c.zst")) as file:
        assert file.read() == noise


@pytest.mark.parametrize("length", [0.3, 0.9, 0.999])
def test_what_is_cut_short_is_never_whole(world: World, tmp_path: Path, length: float) -> None:
    zstandard = pytest.importorskip("zstandard")
    whole = zstandard.ZstdCompressor().compress(random.Random(1).randbytes(20_000).hex().encode())
    (tmp_path / "a.txt.zst").write_bytes(whole[: int(length * len(whole))])
    with pytest.raises(
        InputOutputError, match=r"a.txt.zst: is damaged or truncated \(it ends within a frame\)"
    ):
        prepared(world, tmp_path, "a.txt.zst")
    (tmp_path / "a.txt.zst").write_bytes(b"no such format")
    with pytest.raises(InputOutputError, match=r"a.txt.zst: is damaged or truncated"):
        prepared(world, tmp_path, "a.txt.zst")


def test_parquet(world: World, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"body": [*TEXTS, None], "number": list(range(len(TEXTS) + 1))}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=77)
    (tmp_path / "b.txt").write_text("after")
    found = prepared(world, tmp_path, ".", text_key="body")
    assert found == [*tokens_of(TEXTS), *b"after", 256]
    path = str(tmp_path / "a.parquet")
    with pytest.raises(
        HpctrainError, match=r"a.parquet: has no column 'bodi' \(did you mean body\?\); see --field"
    ):
        list(table_texts(path, "bodi"))
    with pytest.raises(HpctrainError, match=r"column 'number' has type int64, expected text; see --field"):
        prepared(world, tmp_path, "a.parquet", text_key="number")
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:-20])
    with pytest.raises(DamagedError):
        list(table_texts(path, "body"))
    with pytest.raises(InputOutputError, match=r"a.parquet: is damaged or truncated"):
        prepared(world, tmp_path, "a.parquet", text_key="body")


def test_packages_that_are_missing_are_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(HpctrainError, match=f"{name}: reading .* needs the package {package}"):
            prepared(world, tmp_path, name)
