"""What a server does: it owns slices of parameters and optimizer state, which workers pull and push to."""

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

SECONDS_PER_LOOK = 0.1
"""Between two looks at whether anything was asked of this rank."""


@dataclass(frozen=True)
class ReceivedPush:
    """A push with its gradients, flat, of this server's trained pieces; None where none were sent. Where
    that is made up for, also the weights that they were computed with.
    """

    push: Push
    gradients: Tensor | None
    pulled: Tensor | None = None


class Server:
    """One server of a run: an engine whose buckets are cut over the servers, and the letters of its workers.

    `pieces` are its own elements, as the workers know them. Servers of a run that goes in step agree on the
    norm of a sum by a collective; each applies the pushes of one that does not as they come to it.
    """

    def __init__(
        self, deck: Deck, engine: Engine, mailbox: Mailbox, roles: ServerRoles, pieces: Sequence[ServedRange]
    ) -> None:
        self.deck, self.engine, self.mailbox, self.roles = deck, engine, mailbox, roles
        self.distance, keys = distance(deck), deck.communication.server
        assert keys is not None
        self.scales = keys.correction == "scale"
        self.compensation = keys.compensation if keys.correction == "compensate" else 0.0
        self.most_kept = 0
        """Pushes kept at once, at the most so far."""
        trained = [piece.trained for piece in pieces]
        self.whole, self.wire = WireFormat(pieces), WireFormat(piece for piece in pieces if piece.trained)
        self._values = _views(engine.stage.buckets, [bucket.owned_values for bucket in engine.stage.buckets])
        self._trained = [view for view, is_trained in zip(self._values, trained, strict=True) if is_trained]
        gradients = _views(engine.stage.buckets, [bucket.owned_gradients for bucket in engine.stage.buckets])
        self._gradients = [view for view, is_trained in zip(gradients, trained, strict=True) if is_trained]
        masters = _views(engine.stage.buckets, engine.stage.optimizer.masters)
        self._masters = [view for view, is_trained in zip(masters, trained, strict=True) if is_trained]
        self._backups: list[Tensor | None] = [None] * roles.workers
        self._packed: Tensor | None = None
        self._weights: Tensor | None = None
        self._wanted: dict[int, tuple[bool, list[Tensor]]] = {}
        self._looked = 0.0

    # A stretch of steps

    def serve(self, state: TrainState, end: int, asked: Callable[[], bool], book: UpdateLog | None) -> None:
        """Serve until all workers pause: after step `end`, or earlier where anything is `asked` of a rank.

        The head has a `book` of what was done; others have None.
        """
        self._packed = None
        self._first = state.step
        self._intake: PushQueue[ReceivedPush] = PushQueue(
            self.roles.workers, self.distance, 0 if self.distance is None else state.step
        )
        self._pushes = 0
        self._asked, self._book = asked, book
        self._turns = ShareAssignment(self.roles.workers, self.distance, state.step, end)
        self._quiet = False
        paused = done = 0
        others = self.roles.servers - 1
        while not (self._turns.over and done == others) if book else paused < self.roles.workers:
            letter = self.mailbox.wait_for_header(self._look)
            kind = MessageKind(int(letter.numbers[0]))
            paused += kind is MessageKind.PAUSED
            done += kind is MessageKind.DONE
            self._handle(kind, letter)
        if book is None:
            self.mailbox.send(HEAD, [MessageKind.DONE])
        self.mailbox.wait_for_sends()

    def _handle(self, kind: MessageKind, letter: MailboxHeader) -> None:
        worker = letter.sender - self.roles.servers
        if kind is MessageKind.ASK:
            self._turns.ask(worker, pushed=False)
            self._interrupt(bool(letter.numbers[1]))
        elif kind is MessageKind.PULL:
            self._heed(letter)
            self._intake.pull(worker, int(letter.numbers[1]))
        elif kind is MessageKind.PUSH:
            self._push(letter.sender, Push.of(letter.numbers))
        elif kind is MessageKind.ASKED:
            self._interrupt(True)
        elif kind is MessageKind.FAILED:
            self.break_off()
            self._turns.ask(worker, pushed=False)
        self._answer()

    def _answer(self) -> None:
        """Give out what shares, and send what parameters, may go now."""
        if self._book is not None:
            for worker, share in self._turns.answers():
                where = (0, 0) if share is None else (share.step, share.number)
                self.mailbox.send(self.roles.servers + worker, [MessageKind.SHARE, share is None, *where])
        for worker in self._intake.answers():
            self._send(worker)

    def _look(self) -> None:
        """See now and then whether anything was asked of this rank."""
        now = time.monotonic()
        if self._quiet or now - self._looked < SECONDS_PER_LOOK:
            return
        self._looked = now
        if self._asked():
            self._interrupt(True)
            self._answer()

    def _interrupt(self, wanted: bool) -> None:
        """Have all workers pause, so that all ranks can agree on what was asked."""
        if not wanted or self._quiet:
            return
        self._quiet = True
        if self._book is not None:
            self._turns.pause()
        else:
            self.mailbox.send(HEAD, [MessageKind.ASKED])

    def break_off(self) -> None:
        """Give out no more shares: there is an error to tell when all meet."""
        self._turns.break_off()

    # Pulls

    def serve_all(self) -> None:
        """Send all parameters once to every worker."""
        self._packed = None
        for _ in range(self.roles.workers):
            letter = self.mailbox.wait_for_header()
            if letter.numbers[0] != MessageKind.PULL:
                raise RuntimeError(f"the server expected a pull of parameters, got {letter}")
            self._heed(letter)
            self._send(letter.sender - self.roles.servers)
        self.mailbox.wait_for_sends()

    def _heed(self, letter: MailboxHeader) -> None:
        """Take the rows that a pull names."""
        _, _, all_wanted, *counts = letter.numbers
        numbers = self.mailbox.receive_tensor(letter.sender, torch.empty(int(sum(counts)), dtype=ROW_NUMBERS))
        rows = list(numbers.long().split([int(count) for count in counts]))
        self._wanted[letter.sender - self.roles.servers] = bool(all_wanted), rows

    def _send(self, worker: int) -> None:
        """Send the parameters that a worker has asked for, as they are now."""
        receiver, (all_wanted, rows) = self.roles.servers + worker, self._wanted.pop(worker)
        if all_wanted:
            values = self.whole.pack(self._values, None)
        elif self.wire.tables:
            values = self.wire.pack(self._trained, rows)
        else:  # the same for all who pull before the next update
            values = self._packed = (
                self.wire.pack(self._trained, None) if self._packed is None else self._packed
            )
        if self.compensation:
            # The same for all who pull before the next update.
            self._weights = torch.cat(self._masters) if self._weights is None else self._weights
            self._backups[worker] = self._weights
        self.mailbox.send_tensors(receiver, values)

    # Pushes

    def _push(self, sender: int, push: Push) -> None:
        """Take a worker's push, and apply what can be."""
        worker, gradients = sender - self.roles.servers, None
        if push.sent:
            gradients = self._receive(sender, push)
        if self._book is not None:
            self._turns.ask(worker, pushed=True)
            self._interrupt(push.asked)
            self._answer()  # the next share can be read while this one is applied
        pulled, self._backups[worker] = self._backups[worker], None
        for pushed in self._intake.push(worker, push.step, ReceivedPush(push, gradients, pulled)):
            self.most_kept = max(self.most_kept, self._intake.kept + len(pushed))
            self._apply(pushed)

    def _receive(self, sender: int, push: Push) -> Tensor:
        """The gradients of all trained pieces, flat; rows of tables that were not sent are zero."""
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
        """Make one update of the pushes of a step, or of one push; and enter it in the book."""
        ledger = self.engine.world.ledger
        ledger.phase = "step"
        pushes = [each.payload.push for each in pushed]
        step, share = pushes[0].step, 1
        if self.distance is None:  # by what is applied, not by what its share is of
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
            self._intake.applied()
        ledger.phase = "other"
        if self._book is not None:
            senders, stale = [each.worker for each in pushed], [each.staleness for each in pushed]
            self._book.enter(senders, pushes, stale, norm, rate, finite, batch)

    def _add(self, pushed: Sequence[QueuedPush[ReceivedPush]], factors: Sequence[float]) -> None:
        """Put the sum of gradients, each times its factor, where the optimizer looks for it."""
        total: Tensor | None = None
        tokens = sum(each.payload.push.tokens for each in pushed)
        for each, factor in zip(pushed, factors, strict=True):
            assert each.payload.gradients is not None
            gradients = each.payload.gradients.float()
            pulled = each.payload.pulled
            if pulled is not None and each.staleness:
                # Delay-compensated (arXiv 1609.08326): g + lambda g g (w_now - w_pulled), with g the mean
                # over a share; a push of several has that times its part of all tokens.
                drift = torch.cat(self._masters).sub_(pulled)
                weight = self.compensation * tokens / max(1, each.payload.push.tokens)
                corrected = torch.addcmul(gradients, gradients.square(), drift, value=weight)
                # What has no finite square stays as it was pushed: servers skip together or not at all.
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
        """That of the gradients of all servers, as any run rounds it."""
        squares = local_square_norm(self.engine.stage.buckets).reshape(1)
        total = float(self.engine.world.everyone.all_reduce(squares).item())
        return float(np.sqrt(np.float32(total))) if total >= 0 else total


def _views(buckets: Sequence[Bucket], flats: Sequence[Flat]) -> list[Tensor]:
    """Of each bucket's flat own elements those of each parameter, in the order of `own_pieces`."""
    return [
        elements
        for bucket, flat in zip(buckets, flats, strict=True)
        for _, elements, _ in bucket.owned_segments(flat)
        if elements.numel() and isinstance(elements, Tensor)
    ]
