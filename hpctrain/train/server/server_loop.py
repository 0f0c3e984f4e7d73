"""Loop of a server, which owns slices of the parameters and of the optimizer state.

Workers pull parameters from it, and push gradients to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.mailbox import Mailbox, MailboxHeader
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.server_roles import ServerRoles
from hpctrain.memory.scratch import Flat
from hpctrain.optim.clip import clip_coefficient, local_square_norm
from hpctrain.sharding.bucket import Bucket
from hpctrain.train.batch_size import batch_at
from hpctrain.train.server.push_queue import PushQueue, QueuedPush
from hpctrain.train.server.server_messages import HEAD, MessageKind, Push, distance
from hpctrain.train.server.share_assignment import ShareAssignment
from hpctrain.train.server.update_log import UpdateLog
from hpctrain.train.server.wire_format import ROW_NUMBERS, Rows, ServedRange, WireFormat
from hpctrain.train.step import TrainState

SECONDS_PER_CHECK = 0.1
"""Seconds between two checks for requests to this rank."""


@dataclass(frozen=True)
class ReceivedPush:
    """Push with its gradients.

    Attributes:
        push: Header of the push.
        gradients: Flat gradients of the trained ranges of this server; None if none were sent.
        pulled: Weights that they were computed with, if staleness is compensated.
    """

    push: Push
    gradients: Tensor | None
    pulled: Tensor | None = None


class Server:
    """One server of a run.

    In synchronous and stale-synchronous runs, the servers agree on the norm of a sum of gradients by a
    collective. In asynchronous runs, each applies pushes in the order in which they arrive.

    Args:
        deck: The deck.
        engine: Engine whose buckets are split over the servers.
        mailbox: Messages of the workers.
        roles: Ranks that are servers or workers.
        pieces: Ranges of parameters that this server owns.
    """

    def __init__(
        self, deck: Deck, engine: Engine, mailbox: Mailbox, roles: ServerRoles, pieces: Sequence[ServedRange]
    ) -> None:
        self.deck, self.engine, self.mailbox, self.roles = deck, engine, mailbox, roles
        self.distance, keys = distance(deck), deck.communication.server
        assert keys is not None
        self.scales = keys.correction == "scale"
        self.compensation = keys.compensation if keys.correction == "compensate" else 0.0
        self.max_queued = 0
        """Largest number of pushes that were queued at once."""
        trained = [piece.trained for piece in pieces]
        self.wire_all, self.wire = WireFormat(pieces), WireFormat(piece for piece in pieces if piece.trained)
        self._values = _owned_views(
            engine.stage.buckets, [bucket.owned_values for bucket in engine.stage.buckets]
        )
        self._trained = [view for view, is_trained in zip(self._values, trained, strict=True) if is_trained]
        gradients = _owned_views(
            engine.stage.buckets, [bucket.owned_gradients for bucket in engine.stage.buckets]
        )
        self._gradients = [view for view, is_trained in zip(gradients, trained, strict=True) if is_trained]
        masters = _owned_views(engine.stage.buckets, engine.stage.optimizer.masters)
        self._masters = [view for view, is_trained in zip(masters, trained, strict=True) if is_trained]
        self._backups: list[Tensor | None] = [None] * roles.workers
        self._packed: Tensor | None = None
        self._weights: Tensor | None = None
        self._pulls: dict[int, tuple[bool, list[Tensor]]] = {}
        self._last_check = 0.0

    # Steps up to a synchronization

    def serve(
        self, state: TrainState, end: int, is_requested: Callable[[], bool], update_log: UpdateLog | None
    ) -> None:
        """Serve until all workers pause, after step `end`, or earlier if a rank has a request.

        Args:
            state: Counters at the start.
            end: Step at which all ranks synchronize.
            is_requested: Tells whether this rank has a request.
            update_log: Log of the updates, on the head only.
        """
        self._packed = None
        self._first = state.step
        self._queue: PushQueue[ReceivedPush] = PushQueue(
            self.roles.workers, self.distance, 0 if self.distance is None else state.step
        )
        self._pushes = 0
        self._is_requested, self._update_log = is_requested, update_log
        self._shares = ShareAssignment(self.roles.workers, self.distance, state.step, end)
        self._is_interrupted = False
        paused = done = 0
        other_servers = self.roles.servers - 1
        while (
            not (self._shares.is_finished and done == other_servers)
            if update_log
            else paused < self.roles.workers
        ):
            header = self.mailbox.wait_for_header(self._check_requests)
            kind = MessageKind(int(header.numbers[0]))
            paused += kind is MessageKind.PAUSED
            done += kind is MessageKind.DONE
            self._handle(kind, header)
        if update_log is None:
            self.mailbox.send(HEAD, [MessageKind.DONE])
        self.mailbox.wait_for_sends()

    def _handle(self, kind: MessageKind, header: MailboxHeader) -> None:
        worker = header.sender - self.roles.servers
        if kind is MessageKind.ASK:
            self._shares.ask(worker, pushed=False)
            self._interrupt(bool(header.numbers[1]))
        elif kind is MessageKind.PULL:
            self._receive_rows(header)
            self._queue.pull(worker, int(header.numbers[1]))
        elif kind is MessageKind.PUSH:
            self._push(header.sender, Push.of(header.numbers))
        elif kind is MessageKind.REQUEST:
            self._interrupt(True)
        elif kind is MessageKind.FAILED:
            self.stop_giving_shares()
            self._shares.ask(worker, pushed=False)
        self._answer()

    def _answer(self) -> None:
        """Assign the shares and send the parameters that are available now."""
        if self._update_log is not None:
            for worker, share in self._shares.answers():
                where = (0, 0) if share is None else (share.step, share.number)
                self.mailbox.send(self.roles.servers + worker, [MessageKind.SHARE, share is None, *where])
        for worker in self._queue.answers():
            self._send(worker)

    def _check_requests(self) -> None:
        """Check every SECONDS_PER_CHECK whether this rank has a request."""
        now = time.monotonic()
        if self._is_interrupted or now - self._last_check < SECONDS_PER_CHECK:
            return
        self._last_check = now
        if self._is_requested():
            self._interrupt(True)
            self._answer()

    def _interrupt(self, has_request: bool) -> None:
        """Let all workers pause after a request, so that all ranks can agree on it."""
        if not has_request or self._is_interrupted:
            return
        self._is_interrupted = True
        if self._update_log is not None:
            self._shares.pause()
        else:
            self.mailbox.send(HEAD, [MessageKind.REQUEST])

    def stop_giving_shares(self) -> None:
        """Assign no more shares, since there is an error to raise at the next synchronization."""
        self._shares.stop()

    # Pulls

    def serve_all(self) -> None:
        """Send all parameters once to every worker."""
        self._packed = None
        for _ in range(self.roles.workers):
            header = self.mailbox.wait_for_header()
            if header.numbers[0] != MessageKind.PULL:
                raise RuntimeError(f"the server expected a pull of parameters, got {header}")
            self._receive_rows(header)
            self._send(header.sender - self.roles.servers)
        self.mailbox.wait_for_sends()

    def _receive_rows(self, header: MailboxHeader) -> None:
        """Receive the numbers of the rows that a pull requests."""
        _, _, needs_all, *counts = header.numbers
        numbers = self.mailbox.receive_tensor(header.sender, torch.empty(int(sum(counts)), dtype=ROW_NUMBERS))
        rows = list(numbers.long().split([int(count) for count in counts]))
        self._pulls[header.sender - self.roles.servers] = bool(needs_all), rows

    def _send(self, worker: int) -> None:
        """Send the present parameters that a worker has requested."""
        receiver, (needs_all, rows) = self.roles.servers + worker, self._pulls.pop(worker)
        if needs_all:
            values = self.wire_all.pack(self._values, None)
        elif self.wire.tables:
            values = self.wire.pack(self._trained, rows)
        else:  # the same for all workers that pull before the next update
            values = self._packed = (
                self.wire.pack(self._trained, None) if self._packed is None else self._packed
            )
        if self.compensation:
            # The same for all workers that pull before the next update.
            self._weights = torch.cat(self._masters) if self._weights is None else self._weights
            self._backups[worker] = self._weights
        self.mailbox.send_tensors(receiver, values)

    # Pushes

    def _push(self, sender: int, push: Push) -> None:
        """Receive a push, and make the updates that are possible now."""
        worker, gradients = sender - self.roles.servers, None
        if push.sent:
            gradients = self._receive(sender, push)
        if self._update_log is not None:
            self._shares.ask(worker, pushed=True)
            self._interrupt(push.has_request)
            self._answer()  # the next share can be read while this one is applied
        pulled, self._backups[worker] = self._backups[worker], None
        for pushed in self._queue.push(worker, push.step, ReceivedPush(push, gradients, pulled)):
            self.max_queued = max(self.max_queued, self._queue.size + len(pushed))
            self._apply(pushed)

    def _receive(self, sender: int, push: Push) -> Tensor:
        """Return the flat gradients of all trained ranges. Rows of tables that were not sent are zero."""
        dtype, device = self.engine.stage.buckets[0].gradient_dtype, self.engine.world.device
        counts = push.rows if self.wire.tables else None
        numbers = self.mailbox.receive_tensor(sender, torch.empty(sum(push.rows), dtype=ROW_NUMBERS))
        sent = self.mailbox.receive_tensor(
            sender, torch.empty(self.wire.length(counts), dtype=dtype, device=device)
        )
        if counts is None:
            return sent
        rows: Rows = numbers.to(device).long().split(list(counts))
        flat = sent.new_zeros(self.wire.elements)
        self.wire.unpack(sent, flat.split([piece.elements for piece in self.wire.pieces]), rows)
        return flat

    def _apply(self, pushed: Sequence[QueuedPush[ReceivedPush]]) -> None:
        """Make one update from the pushes of a step, or from one push, and record it."""
        ledger = self.engine.world.ledger
        ledger.phase = "step"
        pushes = [each.payload.push for each in pushed]
        step, share = pushes[0].step, 1
        if self.distance is None:  # the step follows from the number of applied pushes
            step, share = self._first + self._pushes // self.roles.workers, self.roles.workers
            self._pushes += 1
        batch = batch_at(self.deck.batch, step)
        factors = [1 / max(1, each.staleness) if self.scales else 1.0 for each in pushed]
        mean = sum(factors) / len(factors)
        finite, norm = all(push.finite for push in pushes), pushes[0].norm
        if all(each.payload.gradients is not None for each in pushed):
            self._add(pushed, [factor / mean for factor in factors])
            if self.distance is not None:
                norm = self._norm()
                finite = isfinite(norm) and finite
        elif self.distance is not None:
            finite, norm = False, nan
        rate = self.engine.control.learning_rate.at(step, batch // share) * mean
        if finite:
            clipped = clip_coefficient(norm, self.deck.optimizer.clip)
            self.engine.stage.optimizer.step(rate, 1.0 / clipped)
            self._packed = self._weights = None
        if finite or self.distance is not None:
            self._queue.finish_update()
        ledger.phase = "other"
        if self._update_log is not None:
            senders, stale = [each.worker for each in pushed], [each.staleness for each in pushed]
            self._update_log.record(senders, pushes, stale, norm, rate, finite, batch)

    def _add(self, pushed: Sequence[QueuedPush[ReceivedPush]], factors: Sequence[float]) -> None:
        """Write the weighted sum of the gradients into the gradient buffers of the optimizer."""
        total: Tensor | None = None
        tokens = sum(each.payload.push.tokens for each in pushed)
        for each, factor in zip(pushed, factors, strict=True):
            assert each.payload.gradients is not None
            gradients = each.payload.gradients.float()
            pulled = each.payload.pulled
            if pulled is not None and each.staleness:
                # Delay compensation (arXiv 1609.08326): g + lambda g g (w_now - w_pulled), with g the mean
                # over a share. The gradients are g times the share's part of all tokens.
                drift = torch.cat(self._masters).sub_(pulled)
                weight = self.compensation * tokens / max(1, each.payload.push.tokens)
                corrected = torch.addcmul(gradients, gradients.square(), drift, value=weight)
                # Elements without a finite square stay unchanged, so that all servers skip or none.
                gradients = torch.where(corrected.isfinite(), corrected, gradients)
            if factor != 1.0:
                gradients.mul_(factor)
            total = gradients if total is None else total.add_(gradients)
        assert total is not None
        for view, part in zip(
            self._gradients, total.split([piece.elements for piece in self.wire.pieces]), strict=True
        ):
            view.copy_(part)

    def _norm(self) -> float:
        """Return the norm of the gradients of all servers, rounded as in any run. Collective."""
        squares = local_square_norm(self.engine.stage.buckets).reshape(1)
        total = float(self.engine.world.everyone.all_reduce(squares).item())
        return float(np.sqrt(np.float32(total))) if total >= 0 else total


def _owned_views(buckets: Sequence[Bucket], flats: Sequence[Flat]) -> list[Tensor]:
    """Return the owned elements of each parameter in flat buffers, in the order of `owned_ranges`."""
    return [
        elements
        for bucket, flat in zip(buckets, flats, strict=True)
        for _, elements, _ in bucket.owned_segments(flat)
        if elements.numel() and isinstance(elements, Tensor)
    ]
