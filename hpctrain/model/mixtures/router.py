"""Routers of mixtures of experts: which experts a token is sent to, with what weight, and load balancing.

Probabilities are a softmax over the experts (Mixtral, arXiv 2401.04088) or a sigmoid of each one
(DeepSeek-V3, arXiv 2412.19437), in fp32. Of equal probabilities the expert with the lower index is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.model.inputs import ModelInputs
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.backward.autograd import as_features
from hpctrain.parallel.experts.grouped_products import count_numbers
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter, Shard, gradient_of

_SUM_EPSILON = 1e-20
"""Term that keeps a sum of sigmoids from being zero."""

BALANCE_LOSS, Z_LOSS = "balance_loss", "router_z_loss"


@dataclass(frozen=True)
class RoutedTokens:
    """Real tokens among the rows of hidden states of a rank: padding is neither routed nor counted.

    Attributes:
        samples: Row of the micro-batch that each token is of, int64 [n].
        positions: Position of each token in its sequence, int64 [n].
        rows: Number of rows of hidden states that the rank has, with padding.
        places: Index of each token among these rows, int64 [n]. None if all rows are real tokens.
    """

    samples: Tensor
    positions: Tensor
    rows: int
    places: Tensor | None

    @staticmethod
    def of(inputs: ModelInputs, rows: slice) -> RoutedTokens:
        """Return the real tokens among `rows` of the flat [s, b] tokens of the inputs."""
        batch, places = inputs.tokens.shape[1], inputs.real_rows(rows)
        if places is None:
            index = torch.arange(rows.start, rows.stop, device=inputs.positions.device)
        else:
            index = places + rows.start
        return RoutedTokens(index % batch, inputs.positions[index // batch], rows.stop - rows.start, places)

    def select(self, values: Tensor) -> Tensor:
        """Return those of the rank's `values` [rows, ...] that belong to these tokens: [n, ...]."""
        return values if self.places is None else values.index_select(0, self.places)

    def expand(self, values: Tensor, padding: float = 0.0) -> Tensor:
        """Return `values` [n, ...] of these tokens at their places among the rank's rows: [rows, ...].

        Rows of padding have the value `padding`.
        """
        if self.places is None:
            return values
        all_rows = values.new_full((self.rows, *values.shape[1:]), padding)
        return all_rows.index_copy(0, self.places, values)


class Routing(NamedTuple):
    """Routing of n tokens.

    Attributes:
        experts: Experts of each token, int64 [n, k].
        weights: Weights of their results, fp32 [n, k].
        accepted_choices: True where the expert has capacity, bool [n, k]; None if all have.
    """

    experts: Tensor
    weights: Tensor
    accepted_choices: Tensor | None


class Router(nn.Module):
    """Router that chooses the experts of the real tokens among rows [rows, h] of hidden states.

    It records a statistic [E + 2] of each step under `statistic_name`: tokens per expert before any is
    dropped, the number of dropped choices, and the sum of the entropies of the probabilities, in nats.

    Attributes:
        settings: Keys of [model.experts].
        weight: Matrix [E, h].
        logit_bias: Trained bias [E] of the logits, or None.
        bias: Numbers fp32 [E] that are added to scores in the choice alone, and that follow the load
            (`balance = "bias"`). None for other kinds of balance.
        shares: Each expert's share of the choices in the last step, fp32 [E], by which a balance loss over
            steps is computed. None if there is none.
    """

    def __init__(self, name: str, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__()
        assert shape.experts is not None
        self.name, self.settings, self.layer_context = name, shape.experts, layer_context
        settings = self.settings
        self.statistic_name = statistic_name(name)
        size, partial = (settings.count, shape.hidden), frozenset({"tensor"})
        self.weight = Parameter(Shard.replicated(f"{name}.weight", size, partial), initial="router")
        bias = Shard.replicated(f"{name}.bias", size[:1], partial)
        self.logit_bias = Parameter(bias, False, "zeros") if settings.router_bias else None
        biased = settings.balance == "bias"
        shared = bool(settings.balance_loss) and settings.balance_over == "step"
        self.bias = self._zero_per_expert() if biased else None
        self.shares = self._zero_per_expert() if shared else None
        self.auxiliary_loss_names = tuple(
            term
            for term, weight in ((BALANCE_LOSS, settings.balance_loss), (Z_LOSS, settings.router_z_loss))
            if weight
        )

    def _zero_per_expert(self) -> Tensor:
        return self.layer_context.tensor.empty((self.settings.count,), torch.float32).zero_()

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield the kind, shard and values of `bias` and `shares`, for checkpoints (`KeepsState`)."""
        shard = Shard.replicated(f"{self.name}.weight", (self.settings.count,))
        if self.bias is not None:
            yield "router/bias", shard, self.bias
        if self.shares is not None:
            yield "router/shares", shard, self.shares

    def after_update(self, statistics: Mapping[str, Tensor]) -> None:
        """Update the bias, `bias += rate * sign(mean - count)` (arXiv 2408.15664), and the shares."""
        counts = statistics[self.statistic_name][: self.settings.count]
        if self.bias is not None:
            self.bias.add_((counts.mean() - counts).sign().float(), alpha=self.settings.balance_rate)
        if self.shares is not None:
            self.shares.copy_(counts / counts.sum().clamp_min(1))

    def forward(self, rows: Tensor, tokens: RoutedTokens, inputs: ModelInputs) -> Routing:
        """Return the routing of the `tokens` among all `rows`, and add the router's auxiliary losses.

        Collective over the micro-batch's ranks if there is a capacity or a loss over the micro-batch.
        """
        settings = self.settings
        logits = tokens.select(_Logits.apply(rows, self, self.weight, self.logit_bias))
        scores = logits.softmax(1) if settings.router == "softmax" else logits.sigmoid()
        experts = self.choose(scores.detach())
        if inputs.choices is not None:
            experts = inputs.choices.override(self.name, experts, tokens.samples, tokens.positions)
        weights = scores.gather(1, experts)
        if settings.router_normalize:
            weights = weights / weights.sum(1, keepdim=True).clamp_min(_SUM_EPSILON)
        if settings.router_scale != 1:
            weights = weights * settings.router_scale
        accepted = self.within_capacity(experts, tokens, inputs)
        self._record_statistics(scores.detach(), experts, accepted)
        return Routing(
            experts, self.add_auxiliary_losses(weights, logits, scores, experts, tokens, inputs), accepted
        )

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts [n, k] with the highest biased scores [n, E], the best one first.

        With groups of experts, only the best groups are considered, by the sum of each one's best scores.
        """
        settings = self.settings
        scores = scores if self.bias is None else scores + self.bias
        groups, chosen = settings.router_groups, settings.router_groups_per_token
        if chosen < groups:
            of_group = scores.unflatten(1, (groups, -1))
            best = of_group.topk(min(settings.router_group_best, of_group.shape[2]), 2).values.sum(2)
            best_groups = _top_experts(best, chosen)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best_groups, value=True)
            scores = of_group.masked_fill(~allowed.unsqueeze(2), -torch.inf).flatten(1)
        return _top_experts(scores, settings.per_token)

    def within_capacity(self, experts: Tensor, tokens: RoutedTokens, inputs: ModelInputs) -> Tensor | None:
        """Return True for choices [n, k] within the capacity of their expert; None if all are.

        An expert takes no more than its capacity of the micro-batch's real tokens: the first ones by sample
        and position. A choice that is dropped contributes zeros to the result of its token, and the weights
        of its other choices stay as they are. Collective if there is a capacity.
        """
        settings = self.settings
        if settings.capacity is None:
            return None
        length = inputs.tokens.shape[0] * self.layer_context.context.size
        total = self._real_tokens(inputs)
        most = ceil(settings.capacity * total * settings.per_token / settings.count)
        # Padding is sent along, after all real tokens, since other ranks do not know how much there is.
        order = tokens.expand(tokens.samples * length + tokens.positions, inputs.rows * length)
        local_choices = torch.cat((order.unsqueeze(1), tokens.expand(experts)), dim=1)
        group = self.layer_context.micro_batch
        sizes = self.layer_context.row_sizes(inputs.tokens.numel()) * self.layer_context.context.size
        all_choices = group.all_gather(local_choices, sizes=sizes)
        places = torch.empty_like(all_choices[:, 0])
        places[all_choices[:, 0].argsort()] = torch.arange(len(all_choices), device=all_choices.device)
        first = sum(sizes[: group.rank])
        counts_before = experts.new_zeros(len(all_choices), settings.count).index_put_(
            (places.unsqueeze(1), all_choices[:, 1:]), experts.new_ones(())
        )
        local_places = tokens.select(places[first : first + tokens.rows])
        return counts_before.cumsum(0)[local_places].gather(1, experts) <= most

    def _real_tokens(self, inputs: ModelInputs) -> int:
        """Return how many tokens of the whole micro-batch are real."""
        if inputs.lengths is not None:
            return inputs.lengths.total
        return inputs.tokens.numel() * self.layer_context.context.size

    def add_auxiliary_losses(
        self,
        weights: Tensor,
        logits: Tensor,
        scores: Tensor,
        experts: Tensor,
        tokens: RoutedTokens,
        inputs: ModelInputs,
    ) -> Tensor:
        """Return the weights, whose backward pass also adds the gradients of the auxiliary losses.

        Collective over the micro-batch's ranks if the load is balanced over more than this rank's tokens.

        Args:
            weights: Weights of the chosen experts, fp32 [n, k].
            logits: Logits of all experts, fp32 [n, E].
            scores: Softmax or sigmoid of the logits, fp32 [n, E].
            experts: Chosen experts, int64 [n, k].
            tokens: The n tokens.
            inputs: The micro-batch, which takes the losses.
        """
        settings = self.settings
        if settings.balance_loss:
            probabilities = scores
            if settings.router == "sigmoid":
                probabilities = scores / (scores.sum(1, keepdim=True) + _SUM_EPSILON)
            shares = self._shares(experts, tokens, inputs)
            value = settings.count * (probabilities * shares).sum(1)
            weights = inputs.auxiliary_losses.add(
                weights, BALANCE_LOSS, self.name, value.sum(), weight=settings.balance_loss
            )
        if settings.router_z_loss:
            value = logits.logsumexp(1).square()
            weights = inputs.auxiliary_losses.add(
                weights, Z_LOSS, self.name, value.sum(), weight=settings.router_z_loss
            )
        return weights

    def _shares(self, experts: Tensor, tokens: RoutedTokens, inputs: ModelInputs) -> Tensor:
        """Return the fraction of choices of each expert over the set of `balance_over`.

        Returns:
            Fractions fp32 [E]; for sequences those of the sequence of each token, [n, E].
        """
        settings = self.settings
        if self.shares is not None:
            return self.shares
        by_sequence = settings.balance_over == "sequence"
        sets = inputs.tokens.shape[1] if by_sequence else 1
        place = experts + (tokens.samples.unsqueeze(1) * settings.count if by_sequence else 0)
        counts = count_numbers(place.flatten(), sets * settings.count).float()
        self.layer_context.micro_batch.all_reduce(counts)
        if not by_sequence:
            return counts / max(1, self._real_tokens(inputs) * settings.per_token)
        of_sequence: int | Tensor = inputs.tokens.shape[0] * self.layer_context.context.size
        if inputs.lengths is not None:
            of_sequence = inputs.lengths.on(counts.device).clamp_min(1).unsqueeze(1)
        return (counts.view(sets, -1) / (of_sequence * settings.per_token))[tokens.samples]

    @torch.no_grad()
    def _record_statistics(self, scores: Tensor, experts: Tensor, accepted: Tensor | None) -> None:
        if self.settings.router == "sigmoid":
            scores = scores / (scores.sum(1, keepdim=True) + _SUM_EPSILON)
        entropy = -torch.special.xlogy(scores, scores).sum(1)
        counts = count_numbers(experts.flatten(), self.settings.count).double()
        dropped = counts.new_zeros(()) if accepted is None else experts.numel() - accepted.sum()
        others = torch.stack((dropped.double(), entropy.sum().double()))
        self.layer_context.statistics.record_sum(self.statistic_name, torch.cat((counts, others)))


def router_name(block: int) -> str:
    """Return the name of the router of a block that is a mixture."""
    return f"blocks.{block}.feed_forward.router"


def statistic_name(router: str) -> str:
    """Return the name under which a router records its statistics."""
    return f"router/{router}"


class _Logits(torch.autograd.Function):
    """Product of rows [n, h] and the router's transposed matrix [E, h], plus its bias: [n, E] in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, router: Router, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.router = router
        ctx.save_for_backward(as_features(rows))
        fp32 = router.settings.router_dtype == "fp32"
        product: Tensor = rows.float() @ weight.float().t() if fp32 else rows @ weight.t()
        return product.float() if bias is None else product.float() + bias.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        router: Router = ctx.router
        rows = ctx.saved_tensors[0][0, 0]
        weight = router.weight
        if weight.requires_grad:
            gradient_of(weight).add_(gradient.t() @ rows.float())
            weight.mark_gradient_added()
        if (bias := router.logit_bias) is not None and bias.requires_grad:
            gradient_of(bias).add_(gradient.sum(0))
            bias.mark_gradient_added()
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if router.settings.router_dtype == "fp32":
            return (gradient @ weight.detach().float()).to(rows.dtype), None, None, None
        return gradient.to(rows.dtype) @ weight.detach(), None, None, None


def _top_experts(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the highest scores in each row; of equal scores the lower index comes first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()
