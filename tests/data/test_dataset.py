"""Datasets that users bring: the same samples whoever loads them, and what is wrong told in a sentence.

Tests of data/dataset.py, data/items.py, data/loader.py, data/worker_pool.py, data/item_worker.py,
data/mapped.py and data/seeded.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.data.dataset import DatasetSpec, UserDataset
from hpctrain.data.items import item_tensors
from hpctrain.data.loader import DatasetSource
from hpctrain.data.mapped import from_memory, to_memory
from hpctrain.data.order import SampleOrder
from hpctrain.data.worker_pool import WorkerLostError, WorkerPool
from hpctrain.deck.code import NamedCode
from hpctrain.errors import EXIT_INTERNAL, HpctrainError

SETS = Path(__file__).with_name("sets.py")


def name_of(
    made_by: str = "Drawn", collate: str | None = None, seed: int = 3, **arguments: object
) -> DatasetSpec:
    named = None if collate is None else NamedCode(f"{SETS}:{collate}")
    return DatasetSpec(NamedCode(f"{SETS}:{made_by}"), json.dumps(arguments), named, seed)


@pytest.fixture
def started() -> Iterator[list[WorkerPool]]:
    """Worker pools that are ended after the test."""
    made: list[WorkerPool] = []
    yield made
    for each in made:
        each.close()


def batches_of(
    name: DatasetSpec, workers: WorkerPool | None, fraction: float = 0.1, split: str = "train"
) -> Batches:
    return Batches(DatasetSource(UserDataset(name), fraction, split, workers), 5)


def same(one: MicroBatch, other: MicroBatch) -> bool:
    assert one.fields.keys() == other.fields.keys()
    return one.samples == other.samples and all(
        torch.equal(field, other.fields[name]) and field.dtype == other.fields[name].dtype
        for name, field in one.fields.items()
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("collate", [None, "padded"])
def test_samples_are_the_same_whoever_loads_them(started: list[WorkerPool], collate: str | None) -> None:
    name = name_of(collate=collate)
    counts = [1, 3] if collate is None else [2]
    made = [None, *(WorkerPool(name, count) for count in counts)]
    started += [each for each in made if each is not None]
    random_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    steps: list[list[MicroBatch]] = []
    for workers in made:
        batches = batches_of(name, workers)
        read: list[MicroBatch] = []
        for first, size in ((0, 8), (8, 8), (16, 8), (24, 4), (28, 8)):  # one is not as expected, over epochs
            for rank in range(2):
                read += batches.step(first, size, rank, 2, 2)
            read += batches_of(name, workers, split="validation").evaluation(2, 0, 1, 2)
        steps.append(read)
    for others in steps[1:]:
        assert len(others) == len(steps[0]) == 18 + 5
        assert all(map(same, steps[0], others))
    assert torch.equal(torch.get_rng_state(), random_before[0])
    assert (np.random.get_state()[1] == random_before[1]).all()  # noqa: NPY002


def test_a_sample_draws_by_seed_epoch_and_number() -> None:
    order, batches = SampleOrder(21, 5), batches_of(name_of(), None)
    drawn = {}
    for micro_size, ranks in ((2, 2), (4, 1), (1, 4)):
        for rank in range(ranks):
            for k, micro in enumerate(batches.step(20, 4, rank, ranks, micro_size)):
                for row in range(micro_size):
                    place = 20 + (k * ranks + rank) * micro_size + row
                    assert micro.fields["index"][row] == order.at(np.array([place]))[0]
                    expected = drawn.setdefault(place, micro.fields["x"][row])
                    assert torch.equal(micro.fields["x"][row], expected)
    whole = torch.cat([micro.fields["x"] for micro in batches.step(0, 42, 0, 1, 6)])
    index = torch.cat([micro.fields["index"] for micro in batches.step(0, 42, 0, 1, 6)])
    noise = whole - index[:, None]
    assert len(noise.flatten().unique()) > 120  # of 126: another one of each kind, item and epoch
    other = next(batches_of(name_of(seed=4), None).step(0, 6, 0, 1, 6))
    assert not torch.equal(other.fields["x"], whole[:6])


def test_the_last_samples_make_fewer_rows_and_one_that_does_not_count() -> None:
    batches = batches_of(name_of(count=30), None, 0.5, "validation")
    read = [list(batches.evaluation(7, rank, 2, 3)) for rank in range(2)]
    assert [[(micro.rows, micro.samples) for micro in rank] for rank in read] == [
        [(3, 3), (1, 1)],
        [(3, 3), (1, 0)],
    ]
    indices = [micro.fields["index"].tolist() for rank in read for micro in rank]
    assert indices == [[15, 16, 17], [21], [18, 19, 20], [21]]
    assert [micro.present for rank in read for micro in rank] == [3, 1, 3, 0]


def test_arrays_become_tensors_of_their_format() -> None:
    item = {
        "flag": True, "number": 3, "share": 0.5, "list": [1.0, 2.0], "whole": np.arange(3, dtype=np.uint8),
        "turned": np.arange(6.0).reshape(2, 3).T, "other": np.arange(2, dtype=">i4"),
        "scalar": np.float64(2), "half": torch.ones(2, dtype=torch.bfloat16),
        "fixed": np.broadcast_to(np.float32(1), 2),
    }  # fmt: skip
    made = item_tensors(item, "item 0")
    assert {name: str(value.dtype).removeprefix("torch.") for name, value in made.items()} == {
        "flag": "bool", "number": "int64", "share": "float32", "list": "float32", "whole": "uint8",
        "turned": "float64", "other": "int32", "scalar": "float64", "half": "bfloat16", "fixed": "float32",
    }  # fmt: skip
    assert made["turned"].tolist() == [[0, 3], [1, 4], [2, 5]] and made["other"].tolist() == [0, 1]
    passed, problems = from_memory(to_memory(made | {"none": torch.empty(0, 3)}))
    assert not problems and passed["none"].shape == (0, 3)
    assert all(
        torch.equal(passed[name], value) and passed[name].dtype == value.dtype for name, value in made.items()
    )
    assert from_memory(to_memory({}, ["one", "two"])) == ({}, ("one", "two"))


WRONG = {
    "shape": "item 4 has x of float32 [2, 3], expected float32 [3] as in item 0",
    "type": "item 4 has x of float64 [3], expected float32 [3] as in item 0",
    "keys": "item 4 has the keys index, on, share, x, y, but item 0 has index, on, share, x",
    "list": "item 4 is a list, not a dict of arrays",
    "text": "item 4 has x of type str, expected an array of numbers",
    "fails": "item 4 fails: ValueError: no such picture",
}


@pytest.mark.parametrize(("kind", "count"), [*((kind, 0) for kind in WRONG), ("shape", 1), ("fails", 2)])
def test_a_wrong_item_is_told(started: list[WorkerPool], kind: str, count: int) -> None:
    name = name_of(count=8, at=4, kind=kind)
    workers = WorkerPool(name, count) if count else None
    started += [workers] if workers else []
    with pytest.raises(HpctrainError) as caught:
        list(batches_of(name, workers, 0.0).step(0, 8, 0, 1, 2))
    first, *lines = caught.value.problems
    assert first.startswith(f"sets.py:Drawn: {WRONG[kind]}")
    if kind == "fails":
        assert [line.split(", line ")[0] for line in lines] == [f"  {SETS}"] * 2
        assert lines[1].endswith('in wrong: raise ValueError("no such picture")')


@pytest.mark.parametrize(
    ("made_by", "told"),
    [
        ("Empty", "sets.py:Empty returns an empty dataset"),
        ("NoItems", "sets.py:NoItems returns a NoItems, which does not support indexing (__getitem__)"),
        ("number", "sets.py:number returns an int, which does not support len() (__len__)"),
        ("Nothing", "sets.py has no Nothing"),
        ("half", "sets.py:half: len() fails: TypeError: 'float' object cannot be interpreted"),
        ("negative", "sets.py:negative: len() fails: ValueError: __len__() should return >= 0"),
        ("unknown", "sets.py:unknown: len() fails: RuntimeError: not yet"),
        ("Unasked", "sets.py:Unasked: item 0 fails: TypeError: "),
    ],
)
def test_what_is_no_dataset_is_told(made_by: str, told: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        assert UserDataset(name_of(made_by)).first_item_specs
    assert told in caught.value.problems[0]
    with pytest.raises(HpctrainError, match=r"\[data.arguments\] does not fit: .*'size'"):
        UserDataset(name_of("Place", size=3))


@pytest.mark.parametrize(
    ("collate", "told"),
    [
        ("short", r"data.collate: sets.py:short returns x of shape \[2\] for 1 items, expected one row"),
        ("broken", r"data.collate: sets.py:broken fails with items 0: KeyError: 'nothing'"),
        ("lonely", r"data.collate: sets.py:lonely fails with items 0: TypeError: lonely\(\) takes 0"),
    ],
)
def test_what_is_no_batch_is_told(collate: str, told: str) -> None:
    with pytest.raises(HpctrainError, match=told):
        assert UserDataset(name_of(collate=collate)).field_specs


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "told"),
    [("killed", "was killed (signal 9)"), ("leaves", "ended by itself, with exit code 7")],
)
def test_a_process_that_is_gone_is_told(started: list[WorkerPool], kind: str, told: str) -> None:
    name = name_of(count=8, at=4, kind=kind)
    started.append(WorkerPool(name, 2))
    with pytest.raises(WorkerLostError) as caught:
        list(batches_of(name, started[0], 0.0).step(0, 8, 0, 1, 2))
    (sentence,) = caught.value.problems
    assert sentence.startswith("sets.py:Drawn: a process that loads items (") and told in sentence
    assert caught.value.exit_code == EXIT_INTERNAL


def test_processes_are_no_ranks_and_heed_no_signals(
    started: list[WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(variable, "1")
    started.append(WorkerPool(name_of("Place"), 2))
    (first,) = batches_of(name_of("Place"), started[0], 0.0).step(0, 2, 0, 1, 2)
    assert first.fields["variables"].tolist() == [0, 0] and not first.fields["started"].any()
    assert not first.fields["main"].any()
    process = int(first.fields["process"][0])
    assert process != os.getpid()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(process, each)
    (second,) = batches_of(name_of("Place"), started[0], 0.0).step(2, 2, 0, 1, 2)
    assert second.fields["process"].tolist() != []
    started[0].close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_what_a_dataset_forks_can_be_ended(started: list[WorkerPool]) -> None:
    started.append(WorkerPool(name_of("Forks"), 1))
    (found,) = batches_of(name_of("Forks"), started[0], 0.0).step(0, 4, 0, 1, 4)
    assert found.fields["code"].tolist() == [-signal.SIGTERM] * 4


def test_a_process_ends_with_its_rank(tmp_path: Path) -> None:
    """Even where the rank is killed, and the process is within a user's endless loop, after it has started
    a process with a session of its own.
    """
    started = tmp_path / "started"
    arguments = json.dumps({"at": 1, "kind": "starts", "file": str(started)})
    code = (
        "from hpctrain.data.worker_pool import WorkerPool; from hpctrain.data.dataset import *\n"
        f"workers = WorkerPool(DatasetSpec(NamedCode('{SETS}:Drawn'), '{arguments}', None, 3), 1)\n"
        "workers.take(workers.ask([0], [0])); workers.ask([1], [0])\n"
        "print(workers._workers[0].process.pid, flush=True)\n"
        "import time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        process = int(rank.stdout.readline())
        os.kill(process, 0)
        for _ in range(6000):
            if started.exists() and started.read_text():
                break
            time.sleep(0.01)
        rank.kill()
    deadline = time.monotonic() + 10
    for each in (process, int(started.read_text())):
        while time.monotonic() < deadline and Path(f"/proc/{each}/cmdline").exists():
            if not Path(f"/proc/{each}/cmdline").read_bytes():
                break  # ended, and nobody has asked how
            time.sleep(0.05)
    assert time.monotonic() < deadline


def test_a_dataset_is_known_by_length_and_items() -> None:
    known = UserDataset(name_of()).description()
    assert known["samples"] == 23 and known["dataset"].endswith("sets.py:Drawn") and known["arguments"] == {}
    assert UserDataset(name_of(seed=9)).description() == known  # whatever the run's seed
    assert UserDataset(name_of(count=22)).description()["fingerprint"] != known["fingerprint"]
