"""What `inspect` tells of files whose contents are known.

Tests of report/contents.py and report/differences.py beside report/inspect.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.provenance import Provenance
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.parallel.shards import Shard
from hpctrain.report.contents import UNVERIFIED
from hpctrain.report.inspect import InspectOptions, inspect
from tests.checkpoint.conftest import flip  # noqa: F401  (a fixture)
from tests.engines import LLAMA, small_deck

FOLDERS = ("/model", "/optimizer/exp_avg")


def write(group: Group, path: Path, *overrides: str, step: int = 7, grown: float = 0.0, **state: Any) -> None:
    """Write a checkpoint of two tensors a folder; the first one, of two million elements, can be grown.

    Its deck has no vocabulary, so that `inspect` does not compare these tensors with the deck's model.
    """
    provenance = Provenance("small", "runs/small", {"data": 2, "tensor": 4, "zero": 1}, 8)
    for number in range(1, step + 1):
        provenance.record(number, 4 / number, 2.0)
    tensors = {"large": torch.arange(2_000_000.0) % 1000, "norm": torch.ones(16)}
    tensors["large"][1_500_000] += grown
    entries = [
        TensorRange(
            f"{folder}/{name}", Shard.replicated(name, tuple(values.shape)), values, 0, group.rank, group.size
        )
        for folder in FOLDERS
        for name, values in tensors.items()
    ]
    deck = deck_text(small_deck("run.title=small", "model.vocabulary=", *overrides))
    known = {"step": step, "samples": 16 * step, "tokens": 512 * step, "skipped": 0, "ranks": 8, "deck": deck}
    save(path, group, entries, {**known, **provenance.stored(step), **state})


def told(group: Group, target: Path, **wish: Any) -> tuple[int, str]:
    """Exit code and all that is shown."""
    shown: list[str] = []
    code = inspect(group, target, InspectOptions(**wish), shown.append)
    return code, "\n".join(shown)


def as_json(group: Group, target: Path, **wish: Any) -> tuple[int, dict[str, Any]]:
    code, text = told(group, target, as_json=True, **wish)
    return code, json.loads(text)


@pytest.fixture
def group(world: World) -> Group:
    return world.single_rank_world().everyone


def test_what_a_file_holds(group: Group, tmp_path: Path) -> None:
    path = tmp_path / "step-00000007.h5"
    write(group, path)
    code, found = as_json(group, path, tensors=True, verify=True)
    assert code == 0
    assert (found["step"], found["tokens"], found["title"], found["ranks"]) == (7, 3584, "small", 8)
    assert found["parameters"] == 2_000_016
    assert (found["model"]["layers"], found["precision"], found["verified"]) == (2, "fp32", True)
    assert [(row["folder"], row["tensors"], row["bytes"]) for row in found["folders"]] == [
        (folder, 2, 4 * 2_000_016) for folder in FOLDERS
    ]
    assert found["tensors"][1] == {"name": "/model/norm", "shape": [16], "type": "float32", "bytes": 64}
    assert [row["loss"] for row in found["losses"]] == [4 / step for step in range(1, 8)]
    code, text = told(group, path, tensors=True)
    assert "small, step 7 of 20, 3.58K tokens" in text
    assert "8 ranks (data 2 x tensor 4, zero 1)" in text
    assert "/optimizer/exp_avg/large  2000000  float32   8 MB" in text
    assert "0.5714" in text
    assert max(map(len, text.removeprefix(str(path)).splitlines())) <= 100


def test_one_of_a_thing_is_told_as_one(group: Group, tmp_path: Path) -> None:
    path = tmp_path / "step-00000007.h5"
    write(group, path, "model.layers=1", "model.heads=1")
    text = " ".join(told(group, path)[1].split())
    assert ": 1 layer, hidden " in text and ", 1 head " in text


def test_mixtures_are_told_of(group: Group, tmp_path: Path) -> None:
    path = tmp_path / "step-00000007.h5"
    write(group, path)
    assert "experts" not in told(group, path)[1]
    keys = ("model.experts.count=8", "model.experts.mlp=16", "model.experts.per_token=3", "model.layers=5")
    write(group, path, *LLAMA, *keys)
    assert "mixtures of 8 experts of 16, 3 a token, in every block; softmax, balanced by a loss" in " ".join(
        told(group, path)[1].split()
    )
    more = (
        "model.experts.shared=1",
        "model.experts.every=2",
        "model.experts.dense_first=1",
        "model.experts.balance=bias",
    )
    write(group, path, *LLAMA, *keys, *more, "model.experts.router=sigmoid", "model.experts.capacity=1.5")
    assert (
        "mixtures of 8 experts of 16, 3 a token, 1 shared by all, in one of 2 blocks after the first 1; "
        "sigmoid, balanced by a bias, capacity 1.5"
    ) in " ".join(told(group, path)[1].split())
    assert as_json(group, path)[1]["model"]["experts"]["shared"] == 1


def test_the_deck_alone_can_go_into_a_file(group: Group, tmp_path: Path) -> None:
    write(group, tmp_path / "a.h5")
    code, text = told(group, tmp_path / "a.h5", deck=True)
    assert (code, text + "\n") == (0, deck_text(small_deck("run.title=small", "model.vocabulary=")))


def test_a_checkpoint_without_a_deck_or_with_one_of_another_time(group: Group, tmp_path: Path) -> None:
    write(group, tmp_path / "a.h5", deck=deck_text(small_deck()) + "[warp]\n", history=None, losses=3)
    code, text = told(group, tmp_path / "a.h5")
    assert code == 0
    assert ": [warp]: unknown section" in text
    write(group, tmp_path / "b.h5", deck="")
    assert "contains no deck" in told(group, tmp_path / "b.h5")[1]
    with pytest.raises(HpctrainError, match="contains no deck"):
        told(group, tmp_path / "b.h5", deck=True)


def test_verification_compares_parameters_with_the_deck(group: Group, tmp_path: Path) -> None:
    write(group, tmp_path / "a.h5", "model.vocabulary=61")
    assert told(group, tmp_path / "a.h5")[0] == 0
    with pytest.raises(InputOutputError, match=r"its deck describes another model: blocks\.0\."):
        told(group, tmp_path / "a.h5", verify=True)


def test_damage_is_named_by_tensor_and_elements(
    group: Group,
    tmp_path: Path,
    flip: Callable[[Path, int], None],  # noqa: F811
) -> None:
    path = tmp_path / "step-00000007.h5"
    write(group, path)
    stored = examine(path).datasets["/optimizer/exp_avg/large"]
    flip(path, stored.offset + 4 * 1_500_000)
    with pytest.raises(InputOutputError) as caught:
        told(group, path, verify=True)
    assert caught.value.exit_code == 3
    assert caught.value.problems == (
        f"{path}: /optimizer/exp_avg/large is damaged: elements 1048576 to 1999999 differ from their "
        "checksum",
    )
    assert told(group, path)[0] == 0


def test_a_folder_lists_its_checkpoints(
    group: Group,
    tmp_path: Path,
    flip: Callable[[Path, int], None],  # noqa: F811
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    with pytest.raises(InputOutputError, match=r"has no checkpoint .*h5\)$"):
        told(group, tmp_path / "run")
    (tmp_path / "config.json").touch()
    with pytest.raises(InputOutputError, match=r"has no checkpoint .*; `hpctrain import` makes"):
        told(group, tmp_path)
    for step in (5, 10, 15):
        write(group, folder / f"step-{step:08d}.h5", step=step)
    newest = folder / "step-00000015.h5"
    flip(newest, examine(newest).datasets["/model/norm"].offset)
    assert as_json(group, tmp_path / "run")[1]["newest"] == "step-00000015.h5"  # data is not looked at
    code, found = as_json(group, tmp_path / "run", verify=True)
    assert (code, found["newest"]) == (3, "step-00000010.h5")
    code, text = told(group, tmp_path / "run")  # nothing says that the damaged file is good
    assert code == 0 and text.endswith("\n\n" + UNVERIFIED) and "good" not in text
    code, text = told(group, tmp_path / "run", verify=True)
    assert code == 3 and UNVERIFIED not in text and text.count("good") == 2
    assert told(group, newest)[1].endswith("\n\n" + UNVERIFIED)
    assert UNVERIFIED not in told(group, newest.with_name("step-00000010.h5"), verify=True)[1]
    assert [(row["step"], len(row["problems"])) for row in found["checkpoints"]] == [(15, 1), (10, 0), (5, 0)]
    with newest.open("r+b") as stream:
        stream.truncate(100_000)
    code, text = told(group, folder)
    assert code == 3
    assert text.count("damaged\n") == 1
    assert "0.4000  readable, newest" in text
    assert "step-00000015.h5: damaged or truncated" in text
    newest.unlink()
    newest.symlink_to("gone.h5")
    code, text = told(group, folder)
    assert (code, text.count("damaged\n")) == (3, 1)
    assert "0.4000  readable, newest" in text
    assert "step-00000015.h5: no such checkpoint" in text
    with pytest.raises(HpctrainError, match="need one checkpoint file"):
        told(group, tmp_path / "run", deck=True)


def test_the_best_checkpoint_is_marked(group: Group, tmp_path: Path) -> None:
    """As the link leads to it, with the loss that it tells of an evaluation."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    record = {"of": "books", "step": 5, "loss": 1.25, "waited": 0, "kept": 5, "kept_loss": 1.25}
    for step in (5, 10):
        write(group, folder / f"step-{step:08d}.h5", step=step, best=record)
    assert as_json(group, folder)[1]["best"] is None
    assert "best" not in told(group, folder)[1].replace(str(folder), "")
    (folder / "best").symlink_to("step-00000005.h5")
    code, text = told(group, tmp_path / "run")
    rows = [line.split(None, 7)[-1] for line in text.splitlines() if line.startswith("step-")]
    assert (code, rows) == (0, ["readable, newest", "readable, best (books 1.2500)"])
    found = as_json(group, folder)[1]
    assert (found["best"], found["newest"]) == ("step-00000005.h5", "step-00000010.h5")
    assert [row.get("evaluated") for row in found["checkpoints"]] == [None, {"of": "books", "loss": 1.25}]
    code, text = told(group, folder / "best", verify=True)
    assert code == 0 and f"{folder / 'best'} (step-00000005.h5): checkpoint" in " ".join(text.split())
    assert told(group, folder / "best", other=folder / "step-00000005.h5")[0] == 0
    assert as_json(group, folder / "best")[1]["leads_to"] == "step-00000005.h5"
    for wrong in ({**record, "kept": 3}, {**record, "kept_loss": None}, {**record, "of": 3}, 7):
        write(group, folder / "step-00000005.h5", step=5, best=wrong)
        assert "readable, best" in told(group, folder)[1] and "best (" not in told(group, folder)[1]
    (folder / "step-00000005.h5").unlink()
    assert told(group, folder)[1].endswith("\nbest: is a link to step-00000005.h5, which does not exist")
    with pytest.raises(InputOutputError, match="best: is a link to step-00000005"):
        told(group, folder / "best")


@pytest.mark.mpi(min_size=1)
def test_two_files_beside_each_other(world: World, mpi_tmp_path: Path) -> None:
    group = world.everyone
    one, same, other = (mpi_tmp_path / name for name in ("one.h5", "same.h5", "other.h5"))
    write(group, one)
    write(group, same, "run.steps=30", step=8)
    write(group, other, grown=3.0)
    code, text = told(group, one, other=same, verify=True)
    assert code == 0
    if world.rank == 0:
        assert "All 4 tensors are equal, bit for bit." in text
        rows = [line.split() for line in text.splitlines()]
        assert ["run.steps", "20", "30"] in rows
        assert ["step", "7", "8"] in rows
    shown: list[str] = []
    assert inspect(group, one, InspectOptions(other=other, as_json=True), shown.append) == 1
    assert len(shown) == (world.rank == 0)
    code, text = told(group, one, other=other)
    assert code == 1
    if world.rank == 0:
        found = json.loads(shown[0])
        assert not found["equal"]
        assert [tensor["differing"] for tensor in found["tensors"]] == [1, 0, 1, 0]
        assert found["tensors"][0]["absolute"] == 3.0
        assert found["tensors"][0]["relative"] == 3.0 / 999.0
        assert (found["deck"], found["state"]) == ({}, {})
        assert "2 of the 4 tensors of one name, shape and type differ." in text


def test_only_the_nested_values_that_differ_are_listed(group: Group, tmp_path: Path) -> None:
    """Also where the beginnings of both values are equal."""
    template = "{% for message in messages %}{{ message role }}"
    for name, context, end in (("one.h5", 16, "!"), ("other.h5", 32, "?")):
        settings = {"files": {"config.json": {"a": 1}}, "jinja": template + end, "context": context}
        write(group, tmp_path / name, tokenizer_settings=settings)
    code, text = told(group, tmp_path / "one.h5", other=tmp_path / "other.h5")
    rows = [line.split(None, 1) for line in text.splitlines() if line.startswith("tokenizer_settings")]
    assert code == 0 and [name for name, _ in rows] == [
        "tokenizer_settings.jinja",
        "tokenizer_settings.context",
    ]
    assert '}}!"' in rows[0][1] and '}}?"' in rows[0][1]
    assert rows[1][1].split() == ["16", "32"]


def test_tensors_of_one_file_alone(group: Group, tmp_path: Path) -> None:
    def entry(name: str, values: torch.Tensor) -> TensorRange:
        return TensorRange(f"/model/{name}", Shard.replicated(name, tuple(values.shape)), values.reshape(-1))

    both = entry("both", torch.ones(4))
    save(tmp_path / "one.h5", group, [both, entry("mine", torch.ones(2)), entry("x", torch.ones(2, 3))], {})
    changed = replace(entry("x", torch.ones(3, 2)))
    save(tmp_path / "other.h5", group, [both, changed], {})
    code, found = as_json(group, tmp_path / "one.h5", other=tmp_path / "other.h5")
    assert code == 1
    assert found["only_in"] == [["/model/mine"], []]
    assert found["reshaped"] == [
        {"name": "/model/x", "shapes": [[2, 3], [3, 2]], "types": ["float32", "float32"]}
    ]
    code, text = told(group, tmp_path / "one.h5", other=tmp_path / "other.h5")
    assert "only in the first: /model/mine" in text
    assert "float32 3 x 2" in text
