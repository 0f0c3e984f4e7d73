"""Ranks whose devices do not fit together. Tests of comm/rank_devices.py."""

from __future__ import annotations

from hpctrain.comm.rank_devices import RankDevice, device_problems


def test_ranks_with_the_same_type_of_device() -> None:
    assert device_problems("auto", [RankDevice("n1", "cuda", ""), RankDevice("n2", "cuda", "")]) == []


def test_ranks_with_different_types_of_devices() -> None:
    devices = [RankDevice(f"n{rank // 2}", "cpu" if rank == 2 else "cuda", "") for rank in range(6)]
    (problem,) = device_problems("auto", devices)
    assert '"cuda" on ranks 0-1,3-5 (n0, n1, n2), "cpu" on rank 2 (n1)' in problem


def test_a_problem_of_some_ranks_names_them() -> None:
    devices = [RankDevice(f"n{rank // 2}", "cuda", "no GPU here" if rank > 1 else "") for rank in range(6)]
    assert device_problems("cuda", devices) == ["ranks 2-5 (n1, n2): no GPU here"]
    assert device_problems("cuda", devices[2:]) == ["no GPU here"]
