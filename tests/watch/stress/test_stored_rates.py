"""The file of nodes' rates: what is kept comes back, whoever else writes there, and it stays short."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.watch.stress import stored_rates as module
from hpctrain.watch.stress.nodes import Node
from hpctrain.watch.stress.stored_rates import add_rates, check_file, default_rates_file, read_rates


def node(name: str, rate: float = 61e9) -> Node:
    return Node(name, "EPYC", (0, 1), {"memory": {0: rate, 1: rate}, "all ranks": {0: 5.0, 1: 5.0}})


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rates.jsonl"
    assert read_rates(path) == []
    assert add_rates(path, [node("n0"), node("n1", 5e9), Node("n2", "EPYC", (2,), {})], "2026-11-02") == ""
    first, second = read_rates(path)
    assert (first.name, first.device, first.ranks, first.day) == ("n0", "EPYC", 2, "2026-11-02")
    assert dict(second.rates) == {"memory": 5e9}  # what all ranks do together is no node's


def test_torn_and_foreign_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    add_rates(path, [node("n0")], "2026-11-02")
    row = path.read_text()
    foreign = ["[]", "{}", "nonsense", row[:50], '{"node": 3}', "[" * 100_000, '"\\ud800"']
    foreign += [row.strip().replace('"2026-11-02"', '"today"'), row.strip().replace("n0", "n\\u0007")]
    wrong = row.strip().replace("61000000000.0", "NaN").replace('"n0"', '"n9"')
    path.write_bytes(b"\xff\xfe\n" + "\n".join([*foreign, wrong, row.strip(), row[:40]]).encode())
    assert [each.name for each in read_rates(path)] == ["n9", "n0"]
    assert dict(read_rates(path)[0].rates) == {}
    add_rates(path, [node("n1")], "2026-11-03")  # behind the torn line
    assert [each.name for each in read_rates(path)] == ["n9", "n0", "n1"]


def test_those_who_write_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 100)
    path = tmp_path / "rates.jsonl"

    def write(number: int) -> None:
        for each in range(12):
            assert add_rates(path, [node(f"n{number}-{each}")], "2026-11-02") == ""

    threads = [Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.name for each in read_rates(path)}) == 96


def test_the_newest_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 20)
    path = tmp_path / "rates.jsonl"
    for number in range(100):
        add_rates(path, [node(f"n{number}")], "2026-11-02")
    names = [each.name for each in read_rates(path)]
    assert 20 <= len(names) <= 22
    assert names == [f"n{number}" for number in range(100 - len(names), 100)]
    assert [each.name for each in tmp_path.iterdir()] == ["rates.jsonl"]


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert add_rates(tmp_path / "file" / "rates", [node("n0")], "2026-11-02") == "File exists"


def test_a_file_that_is_none_of_rates_is_refused_and_stays(tmp_path: Path) -> None:
    deck = tmp_path / "deck.toml"
    deck.write_text("[model]\n")
    for path, words in (
        (deck, "is not a file of rates"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "rates", "cannot be written"),
    ):
        with pytest.raises(HpctrainError, match=words) as caught:
            check_file(path)
        assert caught.value.exit_code == 2
        assert str(caught.value).startswith(f"--rates {path}")
    assert deck.read_text() == "[model]\n"
    check_file(tmp_path / "new")
    add_rates(tmp_path / "new", [node("n0")], "2026-11-02")
    check_file(tmp_path / "new")


def test_the_default_rates_file_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_rates_file() == tmp_path / "hpctrain" / "node-rates.jsonl"
