"""What a worker does: it pulls parameters, computes gradients of shares of the samples, and pushes them."""

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
"""Elements that are squared in fp64 at a time: few enough for the cache."""


class ShareStep(Step):
    """The run's own step, of one share of the samples, which were read before; without its update."""

    def __init__(self, engine: Engine, batches: Batches, deck: Deck, workers: int) -> None:
        super().__init__(engine, batches, deck.batch.micro_size, deck.optimizer.clip, deck.run.seed)
        self.workers, self.in_step = workers, distance(deck) is not None
        self._share = engine.mesh.coordinate("data"), workers
        self._read = ReadBatches([], 0, 0)

    @property
    @override
    def share(self) -> tuple[int, int]:
        return self._share

    def take(self, first: int, batch: int, number: int) -> tuple[list[MicroBatch], int]:
        """Read share `number` of the step whose samples begin at `first`; it and its tokens to be predicted.

        The loss is divided by those of the update that is to be made: of all shares where these go in step,
        which a worker counts by itself, else of this one.
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

    def read_share(self, state: TrainState, batch: int) -> ReadBatches:  # noqa: ARG002
        """Return the share that was read before."""
        return self._read


class Worker:
    """One worker: a whole model, the letters to and from servers, and the pieces of each of these."""

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
        self.whole = [WireFormat(of_server) for of_server in pieces]
        self.wires = [WireFormat(piece for piece in of_server if piece.trained) for of_server in pieces]
        self._parameters = {p.shard.name: p for model in engine.stage.models for p in parameter_list(model)}
        self._begun = False
        self.problem: HpctrainError | None = None
        """What is to be raised when all ranks meet."""

    def work(
        self,
        state: TrainState,
        asked: Callable[[], bool],
        around: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        """Compute shares until the head says to pause. `state` is that of the beginning; `around` is what
        surrounds the computing of a share of a step.
        """
        self._asked, self._around = asked, around
        self.mailbox.send(HEAD, [MessageKind.ASK, asked()])
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
        """What the head gives out next."""
        letter = self.mailbox.wait_for_header()
        kind, pause, step, number = letter.numbers
        if (letter.sender, kind) != (HEAD, MessageKind.SHARE):
            raise RuntimeError(f"the worker expected a share of the head, got {letter}")
        return None if pause else SampleShare(int(step), int(number))

    def _compute(self, state: TrainState, share: SampleShare) -> None:
        batch, done = self.deck.batch, samples_of(self.deck.batch, state.step)
        at = TrainState(share.step, state.samples + samples_of(batch, share.step) - done)
        size = batch_at(batch, share.step)
        micro_batches, tokens = self.step.take(at.samples, size, share.number)
        touched = torch.cat([micro.tokens.flatten() for micro in micro_batches]).unique()
        self.pull(share.step, touched)
        began = time.perf_counter()
        with self._around(share.step + 1):
            sums, _ = self.step.accumulate(at, size)
        metrics = tuple(sums.tolist())
        self._push(share.step, metrics, tokens, touched, time.perf_counter() - began)

    def pull(self, step: int, touched: Tensor | None = None) -> None:
        """Bring the parameters here, of tables the `touched` rows; all without these, and the first time."""
        self.engine.world.ledger.phase = "step"
        whole = touched is None or not self._begun
        wires = self.whole if whole else self.wires
        wanted = [self._rows(wire, touched) if touched is not None and not whole else None for wire in wires]
        for server, rows in enumerate(wanted):
            numbers = [] if rows is None else [torch.cat(rows).to(ROW_NUMBERS)] if rows else []
            counts = [] if rows is None else list(map(len, rows))
            self.mailbox.send(server, [MessageKind.PULL, step, whole, *counts], *numbers)
        dtype, device = self.engine.stage.buckets[0].dtype, self.engine.world.device
        for server, (wire, rows) in enumerate(zip(wires, wanted, strict=True)):
            length = wire.length(None if rows is None else list(map(len, rows)))
            values = self.mailbox.receive_tensor(server, torch.empty(length, dtype=dtype, device=device))
            own = [self._parameters[p.name].detach().view(-1)[p.start : p.stop] for p in wire.pieces]
            wire.unpack(values, own, rows)
        self._begun = True

    def _rows(self, wire: WireFormat, touched: Tensor) -> list[Tensor]:
        """The touched rows of each table's piece."""
        return wire.rows({piece.name: touched for piece in wire.tables})

    def _push(
        self, step: int, metrics: tuple[float, ...], tokens: int, touched: Tensor, seconds: float
    ) -> None:
        """Send the gradients to all servers; at most one push to each is under way, as the next share is
        computed with what they answer behind it.
        """
        self.engine.world.ledger.phase = "synchronize"
        finite, norm = all(map(isfinite, metrics)), 0.0
        if not self.step.in_step:
            norm = self._norm()
            finite = finite and isfinite(norm)
        sent = self.step.in_step or finite
        asked = self._asked()
        for server, wire in enumerate(self.wires):
            rows = self._rows(wire, touched)
            counts = tuple(map(len, rows)) if sent else ()
            push = Push(step, sent, finite, norm, tokens, seconds, asked, metrics, counts)
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
        """Of this worker's gradients, as any run rounds it."""
        total = torch.zeros((), dtype=torch.float64, device=self.engine.world.device)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                for piece in self._gradient(name).split(_PIECE):
                    squares = piece.double()
                    total += torch.dot(squares, squares)
        square = float(total.item())
        return float(np.sqrt(np.float32(square))) if square >= 0 else square
