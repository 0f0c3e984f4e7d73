"""Calls of torch's process groups, as torch's flight recorder knows them.

On GPUs the host does not wait in calls, so that a rank whose GPU waits is in no call of its own. The flight
recorder of torch knows which calls of process groups are complete.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import torch


class RecordedCall(NamedTuple):
    """Call of a process group.

    Attributes:
        group: Name of the process group.
        operation: Name of the operation, such as "nccl:all_reduce".
        number: Number of the call in the process group, from 1.
        inputs: Shapes and types of the tensors that it reads, such as "[4] of Float".
        seconds: Seconds since it was started.
        is_complete: True if it is complete.
    """

    group: str
    operation: str
    number: int
    inputs: str
    seconds: float
    is_complete: bool

    def __str__(self) -> str:
        """Return the call in words, such as "nccl:all_reduce 57 of data ([4] of Float)"."""
        return f"{self.operation} {self.number} of {self.group} ({self.inputs})"


def recorded_calls() -> list[RecordedCall]:
    """Return the last calls of this process's process groups, oldest first. Local.

    The result is empty if torch records none, as with TORCH_FR_BUFFER_SIZE=0.
    """
    if not torch.distributed.is_available():
        return []
    from torch._C import _distributed_c10d

    dump = _distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined, unused-ignore]
    recorded = json.loads(dump(True, False))
    now, calls = time.time_ns(), []
    for entry in recorded.get("entries", []):
        shapes = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        calls.append(
            RecordedCall(
                entry["process_group"][0].rpartition(" ")[0],
                entry["profiling_name"],
                entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
                ", ".join(f"{shape} of {dtype}" for shape, dtype in shapes),
                (now - entry["time_created_ns"]) / 1e9,
                entry["retired"] or entry["state"] == "completed",
            )
        )
    return calls
