"""Patterns written to memory and read back: bits that do not keep what they are given, and the speed."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hpctrain.host.device import on_host
from hpctrain.host.device_memory import free_gpu_bytes
from hpctrain.host.memory import is_out_of_memory, obtainable_bytes
from hpctrain.units import format_bytes
from hpctrain.watch.stress.difference import difference
from hpctrain.watch.stress.record import Look, StressRank, StressRecord, TestTime, clock_of, one_thread
from hpctrain.watch.stress.words import key, random_words

TEST = "memory"
PATTERNS = ("address", "inverted address", "walking one", "walking zero", "random", "inverted random")

SHARE = 0.5
"""Of what is free on the node, or on the GPU, for all ranks that share it."""

LEAST = 16 << 20
"""Bytes below which a rank leaves its node's memory alone."""

_HOST_WORDS, _GPU_WORDS = 1 << 17, 1 << 23  # of a block: what is compared with it stays in a core's cache
_PASSES = 3  # patterns that a turn has time for


class MemoryTest:
    """The test; of at most `most` bytes, where there is such a bound."""

    def __init__(self, place: StressRank, most: int | None, look: Look) -> None:
        self.place, self.most, self.look = place, most, look
        self._words = _HOST_WORDS if on_host(place.device) else _GPU_WORDS
        self._scratch = torch.empty(self._words, dtype=torch.int64, device=place.device)
        self._passes = 0

    def run(self, record: StressRecord, turn: TestTime, number: int) -> None:  # noqa: ARG002
        """Write one pattern after the other over as much as there is time for, and read each back."""
        size = self._room()
        if size < LEAST:
            record.notes.append((TEST, f"not tested: only {format_bytes(size)} per rank is free"))
            return
        try:
            memory = torch.empty(
                size // 8 // self._words * self._words, dtype=torch.int64, device=self.place.device
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
                some, took = self._pass(memory, record, turn.part(1 / (_PASSES - each)))
                read, seconds = read + some, seconds + took
                if turn.over:
                    break
        if read:
            record.rates[TEST] = read / seconds

    def _room(self) -> int:
        """Bytes for this rank."""
        if on_host(self.place.device):
            free, share = obtainable_bytes(os.environ), SHARE
        else:
            free, share = free_gpu_bytes(self.place.device), SHARE
        room = int(share * (0 if free is None else free)) // self.place.sharers
        return room if self.most is None else min(room, self.most)

    def _pass(self, memory: Tensor, record: StressRecord, turn: TestTime) -> tuple[int, float]:
        """Write a pattern for nearly half of the time and read it back: bytes that were read, in seconds."""
        name = PATTERNS[self._passes % len(PATTERNS)]
        pattern = Pattern(name, self._words, self._passes // len(PATTERNS), self.place.device)
        self._passes += 1
        blocks = memory.split(self._words)
        writing = turn.part(0.45)
        written = 0
        for block in blocks:
            pattern.fill(block, written)
            written += 1
            if writing.over:
                break
        now = clock_of(self.place.device)
        began, read = now(), 0
        for index, block in enumerate(blocks[:written]):
            self.look(TEST, block)
            pattern.fill(self._scratch, index)
            if not torch.equal(block, self._scratch):
                self._locate(block, index, name, record)
            read += block.nbytes
            if turn.stopped():
                break
        return read, now() - began

    def _locate(self, block: Tensor, index: int, name: str, record: StressRecord) -> None:
        apart = difference(block, self._scratch)
        if apart is None:
            told = "a word that was correct when read again"
            position = 0
        else:
            told, position = str(apart), 8 * apart.position
        offset = index * block.nbytes + position
        where = "" if on_host(self.place.device) else f", {self.place.device}"
        sentence = f"{self.place.name}{where}: pattern {name} at byte {offset} of its memory reads {told}"
        record.add_wrong(TEST, sentence, self.place.hosts[self.place.rank])


class Pattern:
    """What the words of a block are, and of each block others: `shift` moves a walking bit, or takes other
    random words.
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
        """Write what the block of this index is to hold."""
        if self.name.startswith("walking"):
            memory.copy_(self._block)
        else:
            other = index * self._bytes if self.name.endswith("address") else key(self._shift, index)
            torch.bitwise_xor(self._block, other, out=memory)
