"""Exchange of the rows of a mixture with the ranks of their experts, and back.

On its own rank the row of a token is copied once for each of its experts, ordered by expert. One all-to-all
over the `expert` axis brings the copies to the ranks of their experts. An all-gather over the `expert_tensor`
axis gives them to all ranks that hold some of an expert's features, where they are ordered by expert again.
The results return the same way. With 2 expert ranks, 2 experts and 1 choice per token:

    rank 0: tokens a b c, chosen experts 1 0 1   sends b to rank 0, a and c to rank 1
    rank 1: tokens d e, chosen experts 0 1       sends d to rank 0, e to rank 1
    rank 0 computes expert 0 of b d, rank 1 computes expert 1 of a c e

Both exchanges overlap with other work: the code between `send` and `receive`, the backward pass of this code,
and weight gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.parallel.backward.autograd import as_features, exchange
from hpctrain.parallel.backward.weight_gradients import DeferredGradient, compute_all
from hpctrain.parallel.experts.grouped_products import Segments, count_numbers


class Dispatch:
    """Plan of the exchanges of one rank's rows in one pass. Collective over `expert` and `expert_tensor`.

    It waits for the device once if there are several ranks or a capacity, since the host must know the
    number of copies.

    Args:
        choices: Experts of each row, int64 [n, k].
        accepted_choices: True for choices within the capacity of the expert, bool [n, k]. None for all.
        expert_count: Number of experts.
        expert: Ranks that split the experts.
        expert_tensor: Ranks that split the features of each expert.
        unit: Multiple to which the rows of an expert are padded (`Segments`).

    A copy is the row of a token for one of its experts. Copies that leave this rank are ordered by expert.

    Attributes:
        shape: Rows n, and choices k of each.
        local: True if all experts are on this rank, so that nothing is exchanged.
        segments: Rows that arrive for this rank's experts.
        copy_count: Number of copies that leave this rank.
        order: Index r k + c of each copy, of row r and its choice c, int64 [copy_count].
        copy_of_choice: Copy of each choice, int64 [n k]; any one for a choice that is not accepted.
        positions: Place of each arriving copy in `segments`, int64; None if they arrive in that order.
        deferred_work: Weight gradients that the backward pass computes while it waits for an exchange.
    """

    def __init__(
        self,
        choices: Tensor,
        accepted_choices: Tensor | None,
        expert_count: int,
        expert: Group,
        expert_tensor: Group,
        unit: int,
    ) -> None:
        self.expert, self.expert_tensor = expert, expert_tensor
        self.deferred_work: list[DeferredGradient] = []
        self._work: Work[Tensor] | None = None
        self.shape = tuple(choices.shape)
        numbers = (
            choices if accepted_choices is None else choices.masked_fill(~accepted_choices, expert_count)
        ).flatten()
        order = numbers.argsort(stable=True)
        counts = count_numbers(numbers, expert_count + 1)[:expert_count]
        self.accepted_choices = accepted_choices
        self.local = expert.size == expert_tensor.size == 1
        if self.local:
            # Without a capacity all copies are accepted, and nothing waits for the device.
            self.copy_count = order.numel() if accepted_choices is None else int(counts.sum())
            self.segments = Segments(counts, unit)
            self.positions = self.segments.positions if unit > 1 else None
        else:
            self._exchange_counts(counts.view(expert.size, -1), unit)
        self.order = order[: self.copy_count]
        # Copies that are not accepted read the first one, and are masked afterwards.
        self.copy_of_choice = torch.zeros_like(numbers).index_copy_(
            0, self.order, torch.arange(self.copy_count, device=order.device)
        )

    def _exchange_counts(self, counts: Tensor, unit: int) -> None:
        """Exchange the numbers of rows; `counts` [expert ranks, local experts] are those that leave."""
        arriving = self.expert.all_to_all(counts.contiguous())
        table = self.expert_tensor.all_gather(arriving.unsqueeze(0)).flatten(0, 1)  # [sources, local experts]
        # The only wait for the device in a pass: the host has to know how many rows travel.
        sizes: list[int] = torch.cat((counts.sum(1), table.sum(1))).tolist()
        ranks = self.expert.size
        self.send_sizes, *sources = (sizes[first : first + ranks] for first in range(0, len(sizes), ranks))
        self.receive_sizes = sources[self.expert_tensor.rank]
        self.gather_sizes = [sum(each) for each in sources]
        self.copy_count, arriving_rows = sum(self.send_sizes), sum(self.gather_sizes)
        self.segments = Segments(table.sum(0), unit)
        local = torch.arange(table.shape[1], device=table.device).repeat(len(table))
        experts = local.repeat_interleave(table.flatten(), output_size=arriving_rows)
        order = experts.argsort(stable=True)
        positions = self.segments.positions if unit > 1 else torch.arange(len(order), device=order.device)
        self.positions = torch.empty_like(order).index_copy_(0, order, positions)

    def send(self, rows: Tensor) -> Tensor:
        """Start to send copies of rows [n, h] to their experts, and return an argument for `receive`."""
        return exchange(rows, self._start_copies, self._sum_row_gradients)

    def receive(self, arriving: Tensor) -> Tensor:
        """Return the rows [m, h] of this rank's experts, ordered as `segments` says.

        Args:
            arriving: Result of `send`.
        """
        count = len(arriving)

        def backward(gradient: Tensor) -> Tensor:
            return self.placeholder(self._return_rows(gradient), count)

        return exchange(arriving, self._receive_rows, backward)

    def send_back(self, results: Tensor) -> Tensor:
        """Sum the experts' results over `expert_tensor`, and start to return them to the ranks of the tokens.

        Args:
            results: This rank's terms [m, h] of the results for the rows of `receive`.

        Returns:
            Argument for `combine`.
        """
        return exchange(results, self._return_rows, self._receive_rows)

    def combine(self, arriving: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [n, h] of the results of each row.

        Args:
            arriving: Result of `send_back`.
            weights: Weight of each choice, [n, k]. The sum is in fp32, in the order of the choices.
        """
        result: Tensor = _Combine.apply(arriving, weights, self)
        return result

    # Exchanges of tensors without a graph, for the autograd functions

    def _start_copies(self, rows: Tensor) -> Tensor:
        """Start to send the copies of rows [n, h] that leave this rank."""
        return self.start_to_experts(rows.index_select(0, self.source))

    def _sum_row_gradients(self, gradient: Tensor) -> Tensor:
        """Wait for the gradients of the copies, and return the sum [n, h] of those of each row.

        This is the last step of the backward pass. Deferred weight gradients are computed before the wait.
        """
        deferred, self.deferred_work = self.deferred_work, []
        compute_all(deferred)
        gradient = self.wait(gradient)
        total = self.copies_of_choice(gradient, 0)
        for choice in range(1, self.shape[1]):
            total.add_(self.copies_of_choice(gradient, choice))
        return total.to(gradient.dtype)

    def _receive_rows(self, arriving: Tensor) -> Tensor:
        """Wait for copies, and return the rows [m, h] of this rank's experts, ordered as `segments` says.

        Copies of all ranks of `expert_tensor` are among them.
        """
        rows = self.wait(arriving)
        if not self.local:
            rows = self.expert_tensor.all_gather(rows, sizes=self.gather_sizes)
        if self.positions is None:
            return rows
        if self.segments.unit == 1:
            ordered = torch.empty_like(rows)
        else:
            ordered = rows.new_zeros(int(self.segments.ends[-1]), rows.shape[1])  # padded with zeros
        return ordered.index_copy_(0, self.positions, rows)

    def _return_rows(self, results: Tensor) -> Tensor:
        """Sum results [m, h] over `expert_tensor`, and start to return them to the ranks of the tokens."""
        rows = results if self.positions is None else results.index_select(0, self.positions)
        if self.local:
            return rows
        rows = self.expert_tensor.reduce_scatter(rows, sizes=self.gather_sizes)
        return self._start(rows, self.receive_sizes, self.send_sizes)

    @property
    def source(self) -> Tensor:
        """Row of each copy, int64 [copy_count]."""
        return self.order // self.shape[1]

    def copies_of_choice(self, copies: Tensor, choice: int) -> Tensor:
        """Return the copy of each row for choice `choice`, fp32 [n, h], zero if it was not accepted."""
        n, k = self.shape
        if not self.copy_count:
            return copies.new_zeros((n, copies.shape[1]), dtype=torch.float32)
        chosen = copies.index_select(0, self.copy_of_choice.view(n, k)[:, choice]).float()
        if self.accepted_choices is not None:
            chosen.masked_fill_(~self.accepted_choices[:, choice].unsqueeze(1), 0.0)
        return chosen

    def start_to_experts(self, copies: Tensor) -> Tensor:
        """Start the exchange of copies [copy_count, h] to the experts' ranks. Collective over `expert`.

        Returns:
            Memory that receives the copies of this rank's experts; the copies themselves if nothing is
            exchanged.
        """
        return copies if self.local else self._start(copies, self.send_sizes, self.receive_sizes)

    def _start(self, copies: Tensor, sent: list[int], received: list[int]) -> Tensor:
        assert self._work is None, "one exchange at a time"
        output = copies.new_empty(sum(received), copies.shape[1])
        self._work = self.expert.start_all_to_all(copies, output, sent, received)
        return output

    def wait(self, arriving: Tensor) -> Tensor:
        """Wait for the exchange that was started, and return what arrived, ordered by sender.

        Args:
            arriving: Result of `start_to_experts` or `_return_rows`, or its `placeholder`. It is returned
                if nothing is exchanged.
        """
        if self.local:
            return arriving
        work, self._work = self._work, None
        assert work is not None
        return work.wait()

    def placeholder(self, arriving: Tensor, rows: int) -> Tensor:
        """Return a tensor without memory, for autograd to pass on while the gradient of so many rows travels.

        If nothing is exchanged, return the gradient itself.
        """
        return arriving if self.local else arriving.new_zeros(()).expand(rows, arriving.shape[1])


class _Combine(torch.autograd.Function):
    """Last step: wait for the experts' results, and return their sum for each token, weighted by the router.

    The backward pass runs first: it starts to send the gradients of the results to the experts, and returns
    the gradient of the weights.
    """

    @staticmethod
    @override
    def forward(ctx: Any, arriving: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        arriving = dispatch.wait(arriving)
        ctx.dispatch = dispatch
        ctx.save_for_backward(as_features(arriving), weights)
        total = dispatch.copies_of_choice(arriving, 0).mul_(weights[:, :1])
        for choice in range(1, weights.shape[1]):
            total.addcmul_(dispatch.copies_of_choice(arriving, choice), weights[:, choice : choice + 1])
        return total.to(arriving.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dispatch: Dispatch = ctx.dispatch
        features, weights = ctx.saved_tensors
        arriving = features[0, 0]
        k = dispatch.shape[1]
        row_gradient = gradient.float()
        weights_gradient = torch.stack(
            [(dispatch.copies_of_choice(arriving, choice) * row_gradient).sum(1) for choice in range(k)],
            dim=1,
        )
        factors = weights.flatten().index_select(0, dispatch.order)
        copies = row_gradient.index_select(0, dispatch.source).mul_(factors.unsqueeze(1)).to(arriving.dtype)
        copies = dispatch.placeholder(dispatch.start_to_experts(copies), dispatch.copy_count)
        return copies, weights_gradient, None
