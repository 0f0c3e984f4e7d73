"""Loop of a worker, which pulls parameters, computes gradients of a share of the samples, and pushes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.error_messages import to_hpctrain_error
from hpctrain.comm.mailbox import Mailbox
from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.server_roles import ServerRoles
from hpctrain.errors import HpctrainError
from hpctrain.model.part import parameter_list
from hpctrain.train.batch_size import batch_at, samples_of
from hpctrain.train.server.server_messages import HEAD, MessageKind, Push, distance
from hpctrain.train.server.share_assignment import SampleShare
from hpctrain.train.server.wire_format import ROW_NUMBERS, ServedRange, WireFormat
from hpctrain.train.step import ReadBatches, Step, TrainState

_PIECE = 1 << 16
"""Number of elements that are squared in fp64 at a time, so that they fit into the cache."""


class ShareStep(Step):
    """Step of a run for one share of the samples, which is read before, without an update."""

    def __init__(self, engine: Engine, batches: Batches, deck: Deck, workers: int) -> None:
        super().__init__(engine, batches, deck.batch.micro_size, deck.optimizer.clip, deck.run.seed)
        self.workers, self.in_step = workers, distance(deck) is not None
        self._share = engine.mesh.coordinate("data"), workers
        self._read = ReadBatches([], 0, 0)

    @property
    @override
    def share(self) -> tuple[int, int]:
        return self._share

    def read_and_count(self, first: int, batch: int, number: int) -> tuple[list[MicroBatch], int]:
        """Read a share of a step.

        The loss is divided by the number of predicted tokens of the update. With a distance, that is the
        number in all shares, so the worker reads all of them to count.

        Args:
            first: First sample of the step.
            batch: Number of sequences of the step.
            number: Number of the share.

        Returns:
            The micro-batches of the share, and the number of its predicted tokens.
        """
        self._share = number, self.workers
        shares = range(self.workers) if self.in_step else (number,)
        read = {
            each: list(self.batches.step(first, batch, each, self.workers, self.micro_size))
            for each in shares
        }
        counts = {each: sum(map(self.engine.objective.count, read[each])) for each in shares}
        real = sum(micro.real_tokens for of_share in read.values() for micro in of_share)
        self._read = ReadBatches(read[number], sum(counts.values()), real)
        return read[number], counts[number]

    @override
    def read_share(self, state: TrainState, batch: int) -> ReadBatches:
        return self._read


class Worker:
    """One worker: it has the whole model and exchanges messages with all servers.

    Args:
        deck: The deck.
        engine: Engine of the whole model, without optimizer state.
        step: Computes gradients of a share.
        mailbox: Messages to and from servers.
        roles: Ranks that are servers or workers.
        pieces: Ranges that each server owns.
    """

    def __init__(
        self,
        deck: Deck,
        engine: Engine,
        step: ShareStep,
        mailbox: Mailbox,
        roles: ServerRoles,
        pieces: Sequence[Sequence[ServedRange]],
    ) -> None:
        self.deck, self.engine, self.step, self.mailbox, self.roles = deck, engine, step, mailbox, roles
        self.wires_all = [WireFormat(of_server) for of_server in pieces]
        self.wires = [WireFormat(piece for piece in of_server if piece.trained) for of_server in pieces]
        self._parameters = {p.shard.name: p for model in engine.stage.models for p in parameter_list(model)}
        self._has_pulled = False
        self.problem: HpctrainError | None = None
        """Error to raise at the next synchronization, if any."""

    def work(
        self,
        state: TrainState,
        is_requested: Callable[[], bool],
        around: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        """Compute shares until the head lets this worker pause.

        Args:
            state: Counters at the start.
            is_requested: Tells whether this rank has a request.
            around: Returns the context in which a share of a step is computed.
        """
        self._is_requested, self._around = is_requested, around
        self.mailbox.send(HEAD, [MessageKind.ASK, is_requested()])
        while (share := self._next()) is not None:
            try:
                self._compute(state, share)
            except (HpctrainError, OSError) as error:
                self.problem = to_hpctrain_error(error)
                self.mailbox.send(HEAD, [MessageKind.FAILED])
        for server in range(1, self.roles.servers):
            self.mailbox.send(server, [MessageKind.PAUSED])
        self.mailbox.wait_for_sends()

    def _next(self) -> SampleShare | None:
        """Return the next share that the head assigns; None to pause."""
        header = self.mailbox.wait_for_header()
        kind, pause, step, number = header.numbers
        if (header.sender, kind) != (HEAD, MessageKind.SHARE):
            raise RuntimeError(f"the worker expected a share of the head, got {header}")
        return None if pause else SampleShare(int(step), int(number))

    def _compute(self, state: TrainState, share: SampleShare) -> None:
        batch, done = self.deck.batch, samples_of(self.deck.batch, state.step)
        at = TrainState(share.step, state.samples + samples_of(batch, share.step) - done)
        size = batch_at(batch, share.step)
        micro_batches, tokens = self.step.read_and_count(at.samples, size, share.number)
        touched = torch.cat([micro.tokens.flatten() for micro in micro_batches]).unique()
        self.pull(share.step, touched)
        start = time.perf_counter()
        with self._around(share.step + 1):
            sums, _ = self.step.accumulate(at, size)
        metrics = tuple(sums.tolist())
        self._push(share.step, metrics, tokens, touched, time.perf_counter() - start)

    def pull(self, step: int, touched: Tensor | None = None) -> None:
        """Receive the parameters: of tables the `touched` rows, or all if None or in the first pull."""
        self.engine.world.ledger.phase = "step"
        pulls_all = touched is None or not self._has_pulled
        wires = self.wires_all if pulls_all else self.wires
        requested = [
            self._rows(wire, touched) if touched is not None and not pulls_all else None for wire in wires
        ]
        for server, rows in enumerate(requested):
            numbers = [] if rows is None else [torch.cat(rows).to(ROW_NUMBERS)] if rows else []
            counts = [] if rows is None else list(map(len, rows))
            self.mailbox.send(server, [MessageKind.PULL, step, pulls_all, *counts], *numbers)
        dtype, device = self.engine.stage.buckets[0].dtype, self.engine.world.device
        for server, (wire, rows) in enumerate(zip(wires, requested, strict=True)):
            length = wire.length(None if rows is None else list(map(len, rows)))
            values = self.mailbox.receive_tensor(server, torch.empty(length, dtype=dtype, device=device))
            views = [self._parameters[p.name].detach().view(-1)[p.start : p.stop] for p in wire.pieces]
            wire.unpack(values, views, rows)
        self._has_pulled = True

    def _rows(self, wire: WireFormat, touched: Tensor) -> list[Tensor]:
        """Return the touched rows of each range of a table."""
        return wire.rows({piece.name: touched for piece in wire.tables})

    def _push(
        self, step: int, metrics: tuple[float, ...], tokens: int, touched: Tensor, seconds: float
    ) -> None:
        """Send the gradients to all servers.

        At most one push to each server is in flight, since the next share needs the answer of the server.
        """
        self.engine.world.ledger.phase = "synchronize"
        finite, norm = all(map(isfinite, metrics)), 0.0
        if not self.step.in_step:
            norm = self._norm()
            finite = finite and isfinite(norm)
        sent = self.step.in_step or finite
        has_request = self._is_requested()
        for server, wire in enumerate(self.wires):
            rows = self._rows(wire, touched)
            counts = tuple(map(len, rows)) if sent else ()
            push = Push(step, sent, finite, norm, tokens, seconds, has_request, metrics, counts)
            tensors: list[Tensor] = []
            if sent:
                gradients = [self._gradient(p.name)[p.start : p.stop] for p in wire.pieces]
                tensors = [torch.cat(rows).to(ROW_NUMBERS)] if rows else []
                tensors.append(wire.pack(gradients, rows if wire.tables else None))
            self.mailbox.send(server, push.numbers(), *tensors)
        self.engine.world.ledger.phase = "other"

    def _gradient(self, name: str) -> Tensor:
        gradient = self._parameters[name].gradient
        assert gradient is not None
        return gradient.view(-1)

    def _norm(self) -> float:
        """Return the norm of this worker's gradients, rounded as in any run."""
        total = torch.zeros((), dtype=torch.float64, device=self.engine.world.device)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                for piece in self._gradient(name).split(_PIECE):
                    squares = piece.double()
                    total += torch.dot(squares, squares)
        square = float(total.item())
        return float(np.sqrt(np.float32(square))) if square >= 0 else square
