"""Tests of comm/transports/choose.py, and of the choice of a process group in comm/transports/nccl.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.comm.transports.choose import TRANSPORTS
from hpctrain.comm.transports.nccl import CHANNEL_BLOCKS, connect_nccl


def test_nccl_is_for_ranks_with_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    suits, obstacles = TRANSPORTS["nccl"].suits, TRANSPORTS["nccl"].obstacles
    assert suits(["a", "b"]) and suits(["a", "a"]) and suits(["a", None])
    assert not suits(["a"]) and not suits([None, None])
    assert obstacles([None, None]) == ['no rank has a GPU; use "shared", "mpi" or "auto"']
    assert "not every rank has a GPU" in obstacles(["a", None])[0]
    shared = obstacles(["n1 a", "n1 b", "n1 a", "n1 a"])[0]
    assert shared.startswith("ranks 0,2-3 share one GPU (n1 a); start one rank per GPU")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert not any("share" in obstacle for obstacle in obstacles(["a", "a"]))


@pytest.mark.parametrize(
    ("kind", "name", "call"),
    [("cuda", "ProcessGroupNCCL", "connect cuda:1"), ("xpu", "ProcessGroupXCCL", "all-reduce")],
)
def test_the_process_group_is_that_of_the_type_of_gpu(
    kind: str, name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    class ProcessGroup:
        @staticmethod
        def Options() -> SimpleNamespace:
            return SimpleNamespace(config=SimpleNamespace())

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            assert options._timeout
            assert options.group_name == "pipeline"
            assert vars(options.config) == ({"max_ctas": CHANNEL_BLOCKS} if kind == "cuda" else {})
            # On NVIDIA GPUs, process groups leave the streams of normal priority to copies and computing.
            assert getattr(options, "is_high_priority_stream", False) == (kind == "cuda")
            calls.append((store, rank, size))

        def eager_connect_single_device(self, device: torch.device) -> None:
            calls.append(f"connect {device}")

        def allreduce(self, tensors: list[Any]) -> Any:
            assert tensors == [torch.device(kind, 1)]
            return SimpleNamespace(wait=lambda: calls.append("all-reduce"))

    monkeypatch.setattr(torch.distributed, name, ProcessGroup, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda _, device: device)
    store: Any = "store"
    assert isinstance(connect_nccl(store, 1, 2, "pipeline", torch.device(kind, 1), True), ProcessGroup)
    assert calls == [("store", 1, 2), call]
