"""The stress test of nodes: planted faults are found and located, and nothing else is; what it leaves behind.

Tests of watch/stress/stress.py, watch/stress/record.py, watch/stress/products.py,
watch/stress/memory_test.py, watch/stress/disk.py and watch/stress/collectives.py.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.watch.stress import stress as module
from hpctrain.watch.stress.collectives import Collectives, partner
from hpctrain.watch.stress.disk import remove_leftovers
from hpctrain.watch.stress.memory_test import LEAST
from hpctrain.watch.stress.products import FORMATS, KINDS, Case, ProductTest, StressShape, vectors
from hpctrain.watch.stress.record import ResultHook, StressRank, StressRecord, TestTime
from hpctrain.watch.stress.stored_rates import read_rates
from hpctrain.watch.stress.stress import StressResult, StressSizes, stress
from hpctrain.watch.stress.stress_options import StressOptions

pytestmark = pytest.mark.mpi

SIZES = StressSizes(
    shapes=(StressShape(8, 24, 40), StressShape(70, 130, 65)), memory=LEAST, words=2048, file=2 << 20
)
HOST = socket.gethostname()


class Flip:
    """On one rank flips a bit of one element of the n-th result of a test, or of each from then on."""

    def __init__(self, test: str, element: int, bit: int, n: int = 2, lasting: bool = False) -> None:
        self.test, self.element, self.bit, self.n, self.lasting = test, element, bit, n, lasting
        self.seen = 0

    def __call__(self, test: str, result: Tensor) -> None:
        self.seen += test == self.test
        if test == self.test and (self.seen == self.n or (self.lasting and self.seen > self.n)):
            words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[result.itemsize]
            flat = result.view(words).flatten()
            bit = 1 << self.bit
            if self.bit == 8 * result.itemsize - 1 and words != torch.uint8:
                bit = -bit
            flat[self.element] ^= bit


def run(
    world: World,
    folder: Path,
    look: ResultHook | None = None,
    seconds: float = 0.3,
    sizes: StressSizes = SIZES,
) -> StressResult:
    wish = StressOptions(seconds, folder, folder / "rates.jsonl")
    lines: list[str] = []
    result = stress(world, wish, lines.append, look or (lambda *_: None), sizes)
    assert [path.name for path in folder.iterdir() if path.name != "rates.jsonl"] == []
    return result


def wrong(result: StressResult) -> list[str]:
    return [finding.statement for finding in result.findings if finding.fatal]


def planted(world: World, folder: Path, flip: Flip, rank: int, sizes: StressSizes = SIZES) -> list[str]:
    """What is told of a fault on that rank."""
    result = run(world, folder, flip if world.rank == rank else None, sizes=sizes)
    assert result.code == 1
    located = [each for each in result.findings if each.fatal and each.statement.startswith("rank ")]
    assert all(HOST in each.remedy or "; a sum does not show " in each.statement for each in located)
    sentences = wrong(result)
    assert world.communicator.allgather(sentences) == [sentences] * world.size
    return sentences


def test_nothing_is_wrong_with_sound_nodes(world: World, mpi_tmp_path: Path) -> None:
    result = run(world, mpi_tmp_path, seconds=1.0)
    assert (result.code, wrong(result)) == (0, [])
    assert "all results are correct" in result.sentence
    names = {"memory", "disk write", "disk read"}
    assert set(result.rows[0]) >= names | ({"inside the node"} if world.size > 1 else set())
    assert result.rows[1][0] == HOST


@pytest.mark.parametrize("place", [0, -1])
def test_a_wrong_product_is_found_on_its_rank_and_core(world: World, mpi_tmp_path: Path, place: int) -> None:
    rank = world.size + place if place else 0
    sentences = planted(world, mpi_tmp_path, Flip("products", 77, 12, n=1), rank)
    assert len(sentences) == 1
    assert sentences[0].startswith(f"rank {rank} on {HOST}, core ")
    assert "(bit 12 of" in sentences[0]
    assert "at [3, 5], correct when repeated" in sentences[0]
    core = int(re.search(r"core (\d+)", sentences[0])[1])
    assert core in os.sched_getaffinity(0)


def test_memory_that_does_not_keep_a_bit_is_found(world: World, mpi_tmp_path: Path) -> None:
    rank = world.size - 1
    sentences = planted(world, mpi_tmp_path, Flip("memory", 1000, 63, n=1), rank)
    assert len(sentences) == 1
    assert sentences[0].startswith(
        f"rank {rank} on {HOST}: pattern address at byte 8000 of its memory reads 0x8"
    )
    assert "(bit 63 of 64 is wrong)" in sentences[0]


def test_what_is_wrong_often_is_counted(world: World, mpi_tmp_path: Path) -> None:
    sizes = SIZES._replace(file=8 << 20)
    sentences = planted(world, mpi_tmp_path, Flip("disk", 0, 5, n=1, lasting=True), 0, sizes)
    assert 4 <= len(sentences) <= 21
    assert re.fullmatch("\\d+ more results? wrong", sentences[-1])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("operation", "how"), [("all_gather", "all_gather over ranks"), ("all_to_all", "all_to_all over ranks")]
)
def test_a_piece_that_changes_on_its_way_is_told_with_both_ends(
    world: World, mpi_tmp_path: Path, operation: str, how: str
) -> None:
    receiver = world.size - 1
    sentences = planted(world, mpi_tmp_path, Flip(operation, 256 * 0 + 9, 17, n=1), receiver)
    start = f"rank {receiver} on {HOST} received word 9 of 256 from rank 0 on {HOST} by {how}"
    assert len(sentences) == 1
    assert sentences[0].startswith(start)
    assert "(bit 17 of 64 is wrong)" in sentences[0]


@pytest.mark.mpi(min_size=2)
def test_the_piece_of_another_rank_is_wrong(world: World, mpi_tmp_path: Path) -> None:
    def swap(test: str, result: Tensor) -> None:
        if test == "all_gather" and world.rank == 0:
            result[256:512] = result[:256].clone()

    sentences = wrong(run(world, mpi_tmp_path, swap))
    start = f"rank 0 on {HOST} received word 0 of 256 from rank 1 on {HOST} by all_gather"
    assert sentences[0].startswith(start)


@pytest.mark.mpi(min_size=2)
def test_a_message_is_told_with_its_sender(world: World, mpi_tmp_path: Path) -> None:
    sentences = planted(world, mpi_tmp_path, Flip("message", 4, 0), 0)
    assert len(sentences) == 1
    assert sentences[0].startswith(
        f"rank 0 on {HOST} received word 4 of 2048 from rank {world.size - 1} on {HOST} by a message as"
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_a_wrong_sum_is_told_by_who_has_it(world: World, mpi_tmp_path: Path, operation: str) -> None:
    sentences = planted(world, mpi_tmp_path, Flip(operation, 8, 20), 1)
    assert len(sentences) == 1
    assert sentences[0].startswith(
        f"rank 1 on {HOST}: element 8 of {operation} over ranks 0-{world.size - 1} is "
    )
    assert "(bit 20 of 32 is wrong)" in sentences[0]


def test_a_disk_that_gives_back_another_byte_is_found(world: World, mpi_tmp_path: Path) -> None:
    rank = world.size - 1
    sentences = planted(world, mpi_tmp_path, Flip("disk", 12, 3), rank)
    assert len(sentences) == 1
    place = (1 << 20) + 8 * 12
    assert sentences[0].startswith(
        f"rank {rank} on {HOST}: {mpi_tmp_path} returned byte {place} of a file as 0x"
    )
    assert "(bit 3 of 8 is wrong)" in sentences[0]


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ENOSPC, 0)])
def test_a_disk_that_fails_is_wrong_and_a_full_one_is_not(
    world: World, mpi_tmp_path: Path, number: int, code: int
) -> None:
    def fail(test: str, _: Tensor) -> None:
        if test == "disk" and world.rank == 0:
            raise OSError(number, os.strerror(number))

    result = run(world, mpi_tmp_path, fail)
    assert result.code == code
    told = [finding.statement for finding in result.findings if finding.topic == "disk"]
    if code:
        assert (
            told[0] == f"rank 0 on {HOST}: {mpi_tmp_path} cannot be written or read back: Input/output error"
        )
    else:
        assert told == [f"not tested: {mpi_tmp_path} is full"]


def test_an_interrupt_ends_it_with_what_was_found(world: World, mpi_tmp_path: Path) -> None:
    flip = Flip("products", 0, 1, n=1)

    def interrupt(test: str, result: Tensor) -> None:
        flip(test, result)
        if test == "memory" and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGINT)

    result = run(world, mpi_tmp_path, interrupt, seconds=8.0)
    assert "was stopped after" in result.sentence
    assert result.code == 1
    assert len(wrong(result)) == world.size
    quiet = run(world, mpi_tmp_path, lambda *_: os.kill(os.getpid(), signal.SIGINT), seconds=20.0)
    assert quiet.code == 130


def test_rates_are_kept_and_a_node_that_became_slow_shows(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_STORED_SECONDS", 0.0)
    first = run(world, mpi_tmp_path, seconds=2.0)
    file = mpi_tmp_path / "rates.jsonl"
    world.everyone.barrier()
    kept = read_rates(file)
    assert [(each.name, each.ranks) for each in kept] == [(HOST, world.size)]
    assert first.code == 0
    world.everyone.barrier()
    if world.rank == 0:
        row = file.read_text().splitlines()[0]
        faster = re.sub(r'"memory": [0-9.e+]+', '"memory": 9.2e13', row)
        file.write_text(re.sub(r'"day": "[-0-9]+"', '"day": "2026-11-02"', faster) + "\n")
    world.everyone.barrier()
    second = run(world, mpi_tmp_path, seconds=2.0)
    if world.rank == 0:
        slow = [finding.statement for finding in second.findings if finding.topic == "slow"]
        told = next(each for each in slow if "less than on 2026-11-02 (92 TB/s)" in each)
        assert told.startswith(f"node {HOST} reads its memory at ")
        assert second.code == 0
        assert len(read_rates(file)) == 2


def test_bad_wishes_are_refused_by_all_ranks(world: World, mpi_tmp_path: Path) -> None:
    none = mpi_tmp_path / "none"
    if world.rank == 0:
        (mpi_tmp_path / "file").write_text("no rates\n")
    world.everyone.barrier()
    for wish, sentence in (
        (StressOptions(1.0, none), f"--stress-dir {none}: does not exist on {HOST}"),
        (
            StressOptions(1.0, mpi_tmp_path / "file"),
            f"--stress-dir {mpi_tmp_path / 'file'}: is not a folder on {HOST}",
        ),
        (StressOptions(1.0, mpi_tmp_path, none / "rates"), f"--rates {none / 'rates'}: cannot be written"),
        (StressOptions(1.0, mpi_tmp_path, mpi_tmp_path / "file"), "is not a file of rates; name another one"),
    ):
        with pytest.raises(HpctrainError, match=re.escape(sentence)) as caught:
            stress(world, wish, print, sizes=SIZES)
        assert caught.value.exit_code == 2


@pytest.mark.mpi(max_size=1)
def test_known_results_of_products_are_those_of_integers(world: World) -> None:
    for form, storage in FORMATS.items():
        for kind in KINDS:
            case = Case(kind, StressShape(65, 130, 70), form, torch.device("cpu"), seed=3)
            one, other = case.left.long(), case.right.long()
            left = one.T if kind == "weight_gradient" else one
            exact = left @ (other.T if kind == "forward" else other)
            assert torch.equal(case.possible_results[-1].long(), exact.float().to(storage).long())
            assert int((left.abs() @ (other.T if kind == "forward" else other).abs()).max()) <= 1 << 24
            assert torch.equal(case.left.long().float(), case.left.float())
            assert not (one == 0).any()
    for length in (1, 100, 1041, 3000, 12288):  # in the worst case, in any order
        assert length * int(vectors(length, seed=1).abs().max()) ** 2 <= 1 << 24


@pytest.mark.mpi(max_size=1)
def test_products_have_a_rate_once_every_kernel_was_timed(world: World) -> None:
    cores = tuple(os.sched_getaffinity(0))
    test = ProductTest(
        StressRank(0, (HOST,), torch.device("cpu")), cores, SIZES.shapes or (), lambda *_: None
    )
    record = StressRecord()
    for _ in range(500):
        test.run(record, TestTime(0.0), 0)
        if len(record.rates) == len(FORMATS):
            break
    assert set(record.rates) == {"fp32 products", "bf16 products"}
    assert tuple(os.sched_getaffinity(0)) == cores
    assert (record.number, record.notes) == (0, [])


@pytest.mark.mpi(max_size=1)
def test_another_rounding_is_told_from_a_fault(world: World) -> None:
    case = Case("forward", StressShape(65, 130, 70), "bf16", torch.device("cpu"), seed=3)
    known = case.possible_results[0]
    other = (known.view(torch.int16) + (torch.arange(known.numel()).view(known.shape) % 50 == 0)).view(
        known.dtype
    )
    assert case.rounds_otherwise(other, known)
    once = known.clone()
    once.view(torch.int16)[3, 4] += 1
    assert not case.rounds_otherwise(once, known)
    assert not case.rounds_otherwise(other + 1000 * (other == other[0, 0]), known)


@pytest.mark.mpi(max_size=1)
def test_files_of_killed_tests_are_removed_and_no_others(world: World, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = {
        f"hpctrain-stress-{HOST}-{ended.pid}-rank0.tmp": False,
        f"hpctrain-stress-{HOST}-{os.getpid()}-rank0.tmp": True,
        f"hpctrain-stress-other{HOST}-{ended.pid}-rank0.tmp": True,
        f"hpctrain-stress-{HOST}-{ended.pid}-rank0.tmp.mine": True,
    }
    for name in names:
        (tmp_path / name).touch()
    assert len(remove_leftovers(tmp_path)) == 1
    assert {name: (tmp_path / name).exists() for name in names} == names


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("nodes", [2, 4, 6, 10])
def test_each_node_meets_all_others(world: World, nodes: int) -> None:
    for meeting in range(nodes - 1):
        partners = [partner(node, meeting, nodes) for node in range(nodes)]
        assert [partners[other] for other in partners] == list(range(nodes))
        assert all(node != other for node, other in enumerate(partners))
    for node in range(nodes):
        assert len({partner(node, meeting, nodes) for meeting in range(nodes - 1)}) == nodes - 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nodes", [2, 3])
def test_ranks_of_two_nodes_check_what_they_send_each_other(
    world: World, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Nodes by the ranks' numbers; of three the last has fewer ranks, or none."""
    size = -(-world.size // nodes)
    node, local_rank = divmod(world.rank, size)
    monkeypatch.setattr(world, "nodes", -(-world.size // size))
    monkeypatch.setattr(world, "node", node)
    monkeypatch.setattr(world, "local_rank", local_rank)
    hosts = tuple(f"n{rank // size}" for rank in range(world.size))
    place = StressRank(world.rank, hosts, world.device)
    for flip in (None, Flip("message", 3, 7, n=2 if size == 1 else 3)):
        planted_here = flip is not None and world.rank == 0
        test = Collectives(world, place, 512, flip if planted_here and flip else lambda *_: None)
        record = StressRecord()
        test.run(record, TestTime(0.0), 0)
        assert "all ranks" in record.rates
        assert ("between nodes" in record.rates) == (node > 0 or local_rank + size < world.size)
        assert record.number == planted_here
        if planted_here:
            assert re.match(r"rank 0 on n0 received word \d+ of \d+ from rank", record.wrong[0][1])
            assert " by a message as " in record.wrong[0][1]
