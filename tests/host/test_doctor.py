"""Timer of the examination of a machine, and GPUs. The rest of host/doctor.py: tests/cli/test_doctor.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpctrain.cli.doctor import gpu
from hpctrain.host import device, doctor
from hpctrain.host.device import VisibleGpus
from hpctrain.host.doctor import RankPlacement


def test_a_failed_examination_stops_its_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    timer = SimpleNamespace(
        dump_traceback_later=lambda *_, **__: calls.append("start"),
        cancel_dump_traceback_later=lambda: calls.append("stop"),
    )
    monkeypatch.setattr(doctor, "faulthandler", timer)
    broken = SimpleNamespace(COMM_WORLD=None, COMM_TYPE_SHARED=0)
    monkeypatch.setattr(doctor, "_mpi", lambda: (broken, doctor.DoctorFinding("MPI", "broken")))
    with pytest.raises(AttributeError, match="Split_type"), doctor.examine_machine():
        pass
    assert calls == ["start", "stop"]


def placements(*gpus: tuple[str, ...]) -> list[RankPlacement]:
    """Return the ranks of one node, with the GPUs that each one sees."""
    return [RankPlacement(rank, "n", 0, rank, (), each) for rank, each in enumerate(gpus)]


@pytest.mark.parametrize(
    ("ranks", "statements"),
    [
        (placements(("a-1",), ("b-2",)), []),
        (placements(("a-1", "b-2"), ("a-1", "b-2")), []),
        (placements(("a-1", "b-2"), ("c-3", "d-4")), []),
        (placements(("a-1",), ("a-1",)), ["2 ranks on 1 GPU of n"]),
        (placements(("b-2",), ("a-1", "b-2")), ["2 ranks on 1 GPU of n"]),
        (placements(("a-1",), (), ()), ["ranks without a GPU: 1-2 of 3"]),
        (placements((), ()), []),
    ],
)
def test_ranks_that_share_a_gpu_or_have_none(ranks: list[RankPlacement], statements: list[str]) -> None:
    findings = doctor._binding(ranks)
    assert [finding.statement for finding in findings] == statements
    assert all(finding.remedy for finding in findings)


def test_gpus_of_ranks_that_see_one_each_are_told_apart() -> None:
    ranks = placements(("8a3f02c1-9b",), ("11112222-3c", "5555aaaa-3d"), ())
    assert [gpu(rank) for rank in ranks] == ["0 of 1 (8a3f02c1)", "1 of 2 (5555aaaa)", "none"]


def test_gpus_that_torch_cannot_use_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "visible_gpus", lambda: VisibleGpus("", 0))
    monkeypatch.setattr(device, "unusable_gpus", lambda: "the driver is too old; update it")
    finding = doctor._gpus(torch)[0]
    assert (finding.statement, finding.remedy) == ("the driver is too old", "update it")


@pytest.mark.parametrize(
    ("kind", "library", "remedy"), [("xpu", "is_xccl_available", ""), ("cuda", "", "NCCL (XCCL")]
)
def test_gpus_and_their_library_are_named(
    kind: str, library: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"{kind}:0": "Card B", f"{kind}:1": "Card A"}
    monkeypatch.setattr(device, "visible_gpus", lambda: VisibleGpus(kind, 2))
    monkeypatch.setattr(device, "gpu_name", lambda device: names[str(device)])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    if library:
        monkeypatch.setattr(torch.distributed, library, lambda: True)
    gpus, nccl = doctor._gpus(torch)
    assert gpus.statement == "rank 0 sees 2: Card A, Card B"
    assert remedy in nccl.remedy and bool(remedy) == bool(nccl.remedy)


@pytest.mark.parametrize(
    ("variable", "value", "statement", "remedy"),
    [
        (
            "CXX",
            "nonexistent-compiler",
            "no C++ compiler: nonexistent-compiler not found",
            "install g++ or clang++",
        ),
        ("MALLOC_ARENA_MAX", "8", "$MALLOC_ARENA_MAX is set", ""),
    ],
)
def test_a_machine_on_which_malloc_allocates_tensors_is_named(
    variable: str, value: str, statement: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_visible_gpus", lambda _: ())
    monkeypatch.setenv(variable, value)
    (finding,) = doctor._tensor_heap(torch)
    assert finding.statement.endswith(statement) and not finding.fatal
    assert finding.remedy.startswith(remedy) and bool(finding.remedy) == bool(remedy)
