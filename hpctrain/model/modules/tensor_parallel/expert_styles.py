"""Styles of experts, and of other submodules whose results the tensor ranks put together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import override

from hpctrain.model.modules.module_call import set_forward
from hpctrain.model.modules.nested_tensors import map_leaves, tensors_of
from hpctrain.model.modules.tensor_parallel.activation_collectives import (
    enter_split_all,
    gather_rows,
    scatter_rows,
    sum_results,
)
from hpctrain.model.modules.tensor_parallel.style_base import SplitStyle
from hpctrain.parallel.shards import Partition, split_shard

if TYPE_CHECKING:
    from hpctrain.model.modules.tensor_parallel.apply_plan import ModuleSplit


class ExpertStyle(SplitStyle):
    """Style of experts in tensors [experts, ...], with some experts on each rank."""

    covers_parameters = splits_parameters = needs_whole_sequences = True

    @staticmethod
    @abstractmethod
    def expert_count(part: nn.Module) -> int | None:
        """Return the number of experts of a submodule, or None if the style does not support it."""

    @override
    def _module_problems(self, part: nn.Module, name: str, ranks: int) -> Iterator[str]:
        count = self.expert_count(part)
        if count is None:
            kind, remedy = type(part).__name__, 'use "column" and "row" for experts that are separate layers'
            yield (
                f'{name} has the class {kind}, for which "{self.name}" is unsupported (it supports '
                f"experts of `transformers` in one tensor; {remedy})"
            )
        elif count % ranks:
            yield f"{name} has {count} experts, which must be a multiple of layout.tensor = {ranks}"

    def _split_parameters(self, split: ModuleSplit, name: str) -> Partition:
        """Replace the parameters of experts by those of this rank's experts, and return which these are.

        If a parameter has further rows, which no expert uses, the last rank holds them. On other ranks they
        are padding.
        """
        part, tensor = split.module.get_submodule(name), split.layer_context.tensor
        count = self.expert_count(part)
        assert count is not None
        rows = Partition.split(count, tensor)
        for attribute, original in list(part.named_parameters(recurse=False)):
            piece, further = rows, original.shape[0] - count
            if further:
                local = rows.local + further
                unpadded = local if tensor.rank == tensor.size - 1 else rows.local
                piece = Partition(count + further, rows.start, local, unpadded_local=unpadded)
            shard = split_shard(f"{name}.{attribute}", piece, *original.shape[1:])
            split.replace_parameter(f"{name}.{attribute}", shard)
        return rows


class RoutedExpertStyle(ExpertStyle):
    """Style of experts that take all tokens, and the experts and weights of each token.

    Each rank computes its experts' terms of the result for all tokens. The ranks sum them.
    """

    def _sum_results(self, split: ModuleSplit, name: str, first: int, local_count: int, skipped: int) -> None:
        """Let calls of experts return the sum of the results of all ranks.

        Args:
            split: State of splitting the module.
            name: Name of the experts.
            first: First expert of this rank.
            local_count: Number of experts of this rank.
            skipped: Local expert index for tokens of other ranks' experts. With a weight of 0, the call adds
                nothing for it.
        """
        part = split.module.get_submodule(name)
        layer_context, tensor, forward = split.context_of(name), split.layer_context.tensor, part.forward

        def sum_of_experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            """Return the sum of all ranks' experts for tokens [n, h], with experts and weights [n, k]."""
            hidden, weights = enter_split_all(layer_context, hidden_states, top_k_weights)
            local = top_k_index - first
            remote = (local < 0) | (local >= local_count)
            result = forward(hidden, local.masked_fill(remote, skipped), weights.masked_fill(remote, 0.0))
            # Backward must reach all of these even on ranks whose experts get no token. Otherwise ranks would
            # call the collectives of the gradients in different orders.
            return sum_results(tensor, result, hidden, weights, *part.parameters())

        set_forward(part, sum_of_experts)


class SplitExperts(RoutedExpertStyle):
    """Experts of `transformers` in tensors whose first dim has the experts.

    If `_is_expert_parallel` is true, a module of `transformers` skips the tokens whose expert index is
    `num_experts` or more.
    """

    name = "expert"

    @override
    @staticmethod
    def expert_count(part: nn.Module) -> int | None:
        return _experts_of_first_dim(part) if hasattr(part, "_is_expert_parallel") else None

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        part: Any = split.module.get_submodule(name)
        rows = self._split_parameters(split, name)
        part.num_experts, part._is_expert_parallel = rows.local, True
        self._sum_results(split, name, rows.start, rows.local, rows.local)


class SplitExpertsWithIdentities(RoutedExpertStyle):
    """Experts of which the last ones are identities, which return their input, as in LongCat-Flash.

    Identities have no parameters. The last rank computes them.
    """

    name = "expert with identities"

    @override
    @staticmethod
    def expert_count(part: nn.Module) -> int | None:
        if not hasattr(part, "identity_expert"):
            return None
        count, total = (getattr(part, name, None) for name in ("num_routed_experts", "total_experts"))
        fits = all(parameter.shape[0] in {count, total} for parameter in part.parameters())
        return count if isinstance(count, int) and isinstance(total, int) and fits else None

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        part: Any = split.module.get_submodule(name)
        tensor, identities = split.layer_context.tensor, part.total_experts - part.num_routed_experts
        rows = self._split_parameters(split, name)
        local_count = rows.local + (identities if tensor.rank == tensor.size - 1 else 0)
        # Tokens of other ranks' experts go to one more identity, with a weight of 0.
        part.num_routed_experts, part.total_experts = rows.local, rows.local + identities + 1
        self._sum_results(split, name, rows.start, local_count, rows.local + identities)


class SplitSortedExperts(ExpertStyle):
    """Experts that take equally many rows each, [experts * n, h] in the order of experts, as in Llama 4.

    Each rank computes the rows of its experts. The ranks gather the results.
    """

    name = "sorted expert"

    @override
    @staticmethod
    def expert_count(part: nn.Module) -> int | None:
        return _experts_of_first_dim(part) if len(signature(part.forward).parameters) == 1 else None

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        part: Any = split.module.get_submodule(name)
        part.num_experts = self._split_parameters(split, name).local
        forward, tensor = part.forward, split.layer_context.tensor

        def gathered_experts(hidden_states: Tensor) -> Tensor:
            """Return the results of all ranks' experts for rows [experts * n, h] in the order of experts."""
            return gather_rows(tensor, forward(scatter_rows(tensor, hidden_states)))

        set_forward(part, gathered_experts)


class SummedResult(SplitStyle):
    """Submodule that computes with split parameters of its own. The ranks sum its results.

    The gradients of its inputs are summed, too. Its parameters must have the style "split parameter" or
    "partial".
    """

    name = "sum"
    needs_whole_sequences = True

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        part = split.module.get_submodule(name)
        layer_context, tensor, forward = split.context_of(name), split.layer_context.tensor, part.forward

        def sum_of_ranks(*arguments: Any, **named: Any) -> Any:
            """Return the sum of all ranks' results, which may be several tensors."""
            inputs = [each for each in tensors_of((arguments, named)) if each.requires_grad]
            rank_inputs = enter_split_all(layer_context, *inputs) if inputs else ()
            by_input = dict(zip(map(id, inputs), rank_inputs, strict=True))
            arguments, named = map_leaves((arguments, named), lambda leaf: by_input.get(id(leaf), leaf))
            result = forward(*arguments, **named)
            return map_leaves(
                result, lambda leaf: sum_results(tensor, leaf, *rank_inputs, *part.parameters())
            )

        set_forward(part, sum_of_ranks)


def _experts_of_first_dim(part: nn.Module) -> int | None:
    """Return the number of experts of a submodule if it is the first dim of all its parameters."""
    count = getattr(part, "num_experts", None)
    fits = all(parameter.shape[0] == count for parameter in part.parameters())
    return count if isinstance(count, int) and fits else None
