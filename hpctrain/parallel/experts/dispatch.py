"""The way of a mixture's rows to the ranks of their experts, and back.

On its own rank a token's row is copied once for each of its experts, in their order; one exchange over the
expert axis brings the copies there, a gathering over the expert_tensor axis to all that have some of an
expert's features; there they lie behind each other by expert. The results go back the same way.

Both exchanges travel while something else is computed: what comes between `leave` and `arrive` in forward,
between their backward passes in backward, and weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.parallel.activation_sizes import as_features
from hpctrain.parallel.experts.grouped import Segments, compute_later, count_numbers


class Dispatch:
    """Where the copies of one rank's rows go in one pass.

    `choices` [n, k] int64 are the experts of each row, of `count` in all, `kept` [n, k] says which of them
    take it (None: all do). `unit` is that of the Segments. Collective over `expert` and `expert_tensor`.
    It waits for the device once where there are several ranks, or a capacity: the host must know how many
    copies there are.

    `segments` are those of the rows that come to this rank, `sent` how many copies leave it.
    """

    def __init__(
        self,
        choices: Tensor,
        kept: Tensor | None,
        count: int,
        expert: Group,
        expert_tensor: Group,
        unit: int,
    ) -> None:
        self.expert, self.expert_tensor = expert, expert_tensor
        self.later: list[Callable[[], None]] = []
        self._work: Work[Tensor] | None = None
        self.shape = tuple(choices.shape)
        wanted = choices.flatten() if kept is None else choices.masked_fill(~kept, count).flatten()
        order = wanted.argsort(stable=True)
        counts = count_numbers(wanted, count + 1)[:count]
        self.kept = kept
        self.alone = expert.size == expert_tensor.size == 1
        if self.alone:
            # Without a capacity every copy has room, and nothing waits for the device.
            self.sent = order.numel() if kept is None else int(counts.sum())
            self.segments = Segments(counts, unit)
            self.places = self.segments.places if unit > 1 else None
        else:
            self._meet(counts.view(expert.size, -1), unit)
        self.order = order[: self.sent]
        # Copies that stay away are looked up in the first one's place, and do not count.
        self.slots = torch.zeros_like(wanted).index_copy_(
            0, self.order, torch.arange(self.sent, device=order.device)
        )

    def _meet(self, counts: Tensor, unit: int) -> None:
        """Learn what comes, `counts` [expert ranks, local experts] being what goes."""
        coming = self.expert.all_to_all(counts.contiguous())
        table = self.expert_tensor.all_gather(coming.unsqueeze(0)).flatten(0, 1)  # [sources, local experts]
        # The only wait for the device in a pass: the host has to know how many rows travel.
        sizes: list[int] = torch.cat((counts.sum(1), table.sum(1))).tolist()
        ranks = self.expert.size
        self.send_sizes, *sources = (sizes[first : first + ranks] for first in range(0, len(sizes), ranks))
        self.receive_sizes = sources[self.expert_tensor.rank]
        self.gather_sizes = [sum(each) for each in sources]
        self.sent, coming_rows = sum(self.send_sizes), sum(self.gather_sizes)
        self.segments = Segments(table.sum(0), unit)
        local = torch.arange(table.shape[1], device=table.device).repeat(len(table))
        experts = local.repeat_interleave(table.flatten(), output_size=coming_rows)
        order = experts.argsort(stable=True)
        places = self.segments.places if unit > 1 else torch.arange(len(order), device=order.device)
        self.places = torch.empty_like(order).index_copy_(0, order, places)

    def send(self, rows: Tensor) -> Tensor:
        """Send copies of the `rows` [n, h] on their way; what has arrived when `arrive` has taken it."""
        result: Tensor = _Leave.apply(rows, self)
        return result

    def receive(self, coming: Tensor) -> Tensor:
        """The rows of this rank's experts, by `segments`: [m, h]."""
        result: Tensor = _Arrive.apply(coming, self)
        return result

    def send_back(self, results: Tensor) -> Tensor:
        """Send results of these rows, summed over the expert_tensor ranks, back; to be taken by `combine`."""
        result: Tensor = _LeaveBack.apply(results, self)
        return result

    def combine(self, coming: Tensor, weights: Tensor) -> Tensor:
        """Of each row the sum of its results with `weights` [n, k], in fp32, in the order of the choices:
        [n, h] in the format of the results.
        """
        result: Tensor = _Combine.apply(coming, weights, self)
        return result

    # The exchanges, of tensors without graph

    def copies(self, rows: Tensor) -> Tensor:
        """What leaves: [sent, h]."""
        return rows.index_select(0, self.source)

    @property
    def source(self) -> Tensor:
        """The row that each copy is of, int64 [sent]."""
        return self.order // self.shape[1]

    def copies_of_choice(self, copies: Tensor, slot: int) -> Tensor:
        """Of every row the copy [n, h] of one choice, zero where there is none; in fp32."""
        n, k = self.shape
        if not self.sent:
            return copies.new_zeros((n, copies.shape[1]), dtype=torch.float32)
        found = copies.index_select(0, self.slots.view(n, k)[:, slot]).float()
        return found if self.kept is None else found.masked_fill_(~self.kept[:, slot].unsqueeze(1), 0.0)

    def start_there(self, copies: Tensor) -> Tensor:
        """Start the exchange to the experts' ranks; the memory that receives."""
        return self._start(copies, self.send_sizes, self.receive_sizes)

    def start_back(self, copies: Tensor) -> Tensor:
        """Start the exchange back; the memory that receives."""
        return self._start(copies, self.receive_sizes, self.send_sizes)

    def _start(self, copies: Tensor, sent: list[int], received: list[int]) -> Tensor:
        assert self._work is None, "one exchange at a time"
        output = copies.new_empty(sum(received), copies.shape[1])
        self._work = self.expert.start_all_to_all(copies, output, sent, received)
        return output

    def wait(self) -> Tensor:
        """Complete the exchange; what has come."""
        work, self._work = self._work, None
        assert work is not None
        return work.wait()

    def gather(self, arrived: Tensor) -> Tensor:
        """What has come to this rank, or another one of its expert_tensor ranks, by segments."""
        whole = self.expert_tensor.all_gather(arrived, sizes=self.gather_sizes)
        return self.placed(whole)

    def scatter(self, results: Tensor) -> Tensor:
        """The sum over the expert_tensor ranks of what goes back from this one, in the order of coming."""
        assert self.places is not None
        return self.expert_tensor.reduce_scatter(
            results.index_select(0, self.places), sizes=self.gather_sizes
        )

    def placed(self, rows: Tensor) -> Tensor:
        """Rows in the order of the segments, filled up with zeros."""
        if self.places is None:
            return rows
        unit = self.segments.unit
        if unit == 1:
            return torch.empty_like(rows).index_copy_(0, self.places, rows)
        filled = rows.new_zeros(int(self.segments.ends[-1]), rows.shape[1])
        return filled.index_copy_(0, self.places, rows)

    def taken(self, rows: Tensor) -> Tensor:
        """The other way round."""
        return rows if self.places is None else rows.index_select(0, self.places)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        copies = dispatch.copies(rows)
        return copies if dispatch.alone else dispatch.start_there(copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        dispatch: Dispatch = ctx.dispatch
        later, dispatch.later = dispatch.later, []
        compute_later(later)
        if not dispatch.alone:
            gradient = dispatch.wait()
        total = dispatch.copies_of_choice(gradient, 0)
        for slot in range(1, dispatch.shape[1]):
            total.add_(dispatch.copies_of_choice(gradient, slot))
        return total.to(gradient.dtype), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        if dispatch.alone:
            return coming.view_as(coming) if dispatch.places is None else dispatch.placed(coming)
        dispatch.wait()
        return dispatch.gather(coming)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        dispatch: Dispatch = ctx.dispatch
        if dispatch.alone:
            return dispatch.taken(gradient), None
        coming = dispatch.start_back(dispatch.scatter(gradient))
        return _in_place_of(coming, sum(dispatch.receive_sizes)), None


class _LeaveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        if dispatch.alone:
            return results.view_as(results) if dispatch.places is None else dispatch.taken(results)
        return dispatch.start_back(dispatch.scatter(results))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        dispatch: Dispatch = ctx.dispatch
        if dispatch.alone:
            return dispatch.placed(gradient), None
        return dispatch.gather(dispatch.wait()), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        if not dispatch.alone:
            dispatch.wait()
        ctx.dispatch = dispatch
        ctx.save_for_backward(as_features(coming), weights)
        total = dispatch.copies_of_choice(coming, 0).mul_(weights[:, :1])
        for slot in range(1, weights.shape[1]):
            total.addcmul_(dispatch.copies_of_choice(coming, slot), weights[:, slot : slot + 1])
        return total.to(coming.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dispatch: Dispatch = ctx.dispatch
        features, weights = ctx.saved_tensors
        coming = features[0, 0]
        k = dispatch.shape[1]
        of_row = gradient.float()
        weights_gradient = torch.stack(
            [(dispatch.copies_of_choice(coming, slot) * of_row).sum(1) for slot in range(k)], dim=1
        )
        factors = weights.flatten().index_select(0, dispatch.order)
        copies = of_row.index_select(0, dispatch.source).mul_(factors.unsqueeze(1)).to(coming.dtype)
        if not dispatch.alone:
            copies = _in_place_of(dispatch.start_there(copies), dispatch.sent)
        return copies, weights_gradient, None


def _in_place_of(coming: Tensor, rows: int) -> Tensor:
    """What autograd passes on while a gradient travels: so many rows, as it expects, without memory."""
    return coming.new_zeros(()).expand(rows, coming.shape[1])
