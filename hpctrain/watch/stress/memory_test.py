"""Test of memory: write patterns, read them back, compare and time them."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hpctrain.host.device import on_host
from hpctrain.host.device_memory import free_gpu_bytes
from hpctrain.host.memory import is_out_of_memory, obtainable_bytes
from hpctrain.units import format_bytes
from hpctrain.watch.stress.difference import difference
from hpctrain.watch.stress.random_words import key, random_words
from hpctrain.watch.stress.record import ResultHook, StressRank, StressRecord, TestTime, clock_of, one_thread

TEST = "memory"
PATTERNS = ("address", "inverted address", "walking one", "walking zero", "random", "inverted random")

SHARE = 0.5
"""Share of the free memory of the node or GPU that all ranks on it may use together."""

LEAST = 16 << 20
"""Bytes below which a rank does not test memory."""

_HOST_WORDS, _GPU_WORDS = 1 << 17, 1 << 23
"""Words of a block on a CPU and on a GPU. On a CPU, the expected words stay in the cache of a core."""

_PASSES = 3
"""Number of patterns for which one call of `run` has time."""


class MemoryTest:
    """Test of memory.

    Args:
        this_rank: This rank.
        most: Largest number of bytes to test; None for no limit.
        on_result: Function that is called with each block before it is compared.
    """

    def __init__(self, this_rank: StressRank, most: int | None, on_result: ResultHook) -> None:
        self.this_rank, self.most, self.on_result = this_rank, most, on_result
        self._words = _HOST_WORDS if on_host(this_rank.device) else _GPU_WORDS
        self._scratch = torch.empty(self._words, dtype=torch.int64, device=this_rank.device)
        self._passes = 0

    def run(self, record: StressRecord, test_time: TestTime, number: int) -> None:  # noqa: ARG002
        """Write patterns one after the other over as much memory as there is time for, and read them back."""
        size = self._available_bytes()
        if size < LEAST:
            record.notes.append((TEST, f"not tested: only {format_bytes(size)} per rank is free"))
            return
        try:
            memory = torch.empty(
                size // 8 // self._words * self._words, dtype=torch.int64, device=self.this_rank.device
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            record.notes.append(
                (TEST, f"not tested: {format_bytes(size)} were free, but could not be allocated")
            )
            return
        read, seconds = 0, 0.0
        with one_thread():
            for each in range(_PASSES):
                some, took = self._pass(memory, record, test_time.part(1 / (_PASSES - each)))
                read, seconds = read + some, seconds + took
                if test_time.over:
                    break
        if read:
            record.rates[TEST] = read / seconds

    def _available_bytes(self) -> int:
        """Return the bytes that this rank may test."""
        if on_host(self.this_rank.device):
            free = obtainable_bytes(os.environ)
        else:
            free = free_gpu_bytes(self.this_rank.device)
        available = int(SHARE * (0 if free is None else free)) // self.this_rank.sharers
        return available if self.most is None else min(available, self.most)

    def _pass(self, memory: Tensor, record: StressRecord, test_time: TestTime) -> tuple[int, float]:
        """Write a pattern for nearly half of the time. Return the bytes read back and the seconds of this."""
        name = PATTERNS[self._passes % len(PATTERNS)]
        pattern = Pattern(name, self._words, self._passes // len(PATTERNS), self.this_rank.device)
        self._passes += 1
        blocks = memory.split(self._words)
        writing = test_time.part(0.45)
        written = 0
        for block in blocks:
            pattern.fill(block, written)
            written += 1
            if writing.over:
                break
        now = clock_of(self.this_rank.device)
        start, read = now(), 0
        for index, block in enumerate(blocks[:written]):
            self.on_result(TEST, block)
            pattern.fill(self._scratch, index)
            if not torch.equal(block, self._scratch):
                self._locate(block, index, name, record)
            read += block.nbytes
            if test_time.stopped():
                break
        return read, now() - start

    def _locate(self, block: Tensor, index: int, name: str, record: StressRecord) -> None:
        wrong_bits = difference(block, self._scratch)
        if wrong_bits is None:
            text = "a word that was correct when read again"
            position = 0
        else:
            text, position = str(wrong_bits), 8 * wrong_bits.position
        offset = index * block.nbytes + position
        where = "" if on_host(self.this_rank.device) else f", {self.this_rank.device}"
        sentence = f"{self.this_rank.name}{where}: pattern {name} at byte {offset} of its memory reads {text}"
        record.add_wrong(TEST, sentence, self.this_rank.hosts[self.this_rank.rank])


class Pattern:
    """Words of a block, which differ from block to block.

    Args:
        name: One of `PATTERNS`.
        words: Number of words of a block.
        shift: Number by which a walking bit moves, or seed of random words.
        device: Device of the memory.
    """

    def __init__(self, name: str, words: int, shift: int, device: torch.device) -> None:
        self.name, self._bytes, self._shift = name, 8 * words, shift
        numbers = torch.arange(words, dtype=torch.int64)
        if name.endswith("address"):
            block = 8 * numbers
        elif name.startswith("walking"):
            block = torch.ones(words, dtype=torch.int64) << (numbers + shift) % 64
        else:
            block = random_words(words, shift)
        self._block = (~block if name.startswith("inverted") or name == "walking zero" else block).to(device)

    def fill(self, memory: Tensor, index: int) -> None:
        """Write the pattern of the block with this index to memory."""
        if self.name.startswith("walking"):
            memory.copy_(self._block)
        else:
            other = index * self._bytes if self.name.endswith("address") else key(self._shift, index)
            torch.bitwise_xor(self._block, other, out=memory)
