"""Styles of experts, and of other submodules whose results the tensor ranks put together."""

from __future__ import annotations

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

    covers_parameters = splits_parameters = has_whole_sequences = True

    @override
    def _module_problems(self, part: nn.Module, name: str, ranks: int) -> Iterator[str]:
        count = getattr(part, "num_experts", None)
        if (
            not self.supports_call(part)
            or not isinstance(count, int)
            or not all(parameter.shape[0] == count for parameter in part.parameters())
        ):
            kind, remedy = type(part).__name__, 'use "column" and "row" for experts that are separate layers'
            yield (
                f'{name} has the class {kind}, for which "{self.name}" is unsupported (it supports '
                f"experts of `transformers` in one tensor; {remedy})"
            )
        elif count % ranks:
            yield f"{name} has {count} experts, which must be a multiple of layout.tensor = {ranks}"

    @staticmethod
    def supports_call(part: nn.Module) -> bool:
        """Return True if the experts take the arguments that the style expects."""
        raise NotImplementedError

    def _split_parameters(self, split: ModuleSplit, name: str) -> Partition:
        """Replace the parameters of experts by those of this rank's experts, and return which these are."""
        part: Any = split.module.get_submodule(name)
        rows = Partition.split(part.num_experts, split.layer_context.tensor)
        for attribute, original in list(part.named_parameters(recurse=False)):
            shard = split_shard(split.names[original], rows, *original.shape[1:])
            split.replace_parameter(f"{name}.{attribute}", shard)
        part.num_experts = rows.local
        return rows


class SplitExperts(ExpertStyle):
    """Experts of `transformers` that take all tokens, and the experts and weights of each token.

    Each rank computes its experts' terms of the result for all tokens. The ranks sum them. With
    `_is_expert_parallel`, a module of `transformers` skips tokens whose expert has an index above its own.
    """

    name = "expert"

    @override
    @staticmethod
    def supports_call(part: nn.Module) -> bool:
        return hasattr(part, "_is_expert_parallel")

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        part: Any = split.module.get_submodule(name)
        layer_context, tensor = split.context_of(name), split.layer_context.tensor
        rows, forward = self._split_parameters(split, name), part.forward
        part._is_expert_parallel = True

        def sum_of_experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            """Return the sum of all ranks' experts for tokens [n, h], with experts and weights [n, k]."""
            hidden, weights = enter_split_all(layer_context, hidden_states, top_k_weights)
            local = top_k_index - rows.start
            remote = (local < 0) | (local >= rows.local)
            result = forward(hidden, local.masked_fill(remote, rows.local), weights.masked_fill(remote, 0.0))
            # Backward reaches all of these on ranks without a token, too, so that all sum in one order.
            return sum_results(tensor, result, hidden, weights, *part.parameters())

        set_forward(part, sum_of_experts)


class SplitSortedExperts(ExpertStyle):
    """Experts that take equally many rows each, [experts * n, h] in the order of experts, as in Llama 4.

    Each rank computes the rows of its experts. The ranks gather the results.
    """

    name = "sorted expert"

    @override
    @staticmethod
    def supports_call(part: nn.Module) -> bool:
        return len(signature(part.forward).parameters) == 1

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        part, tensor = split.module.get_submodule(name), split.layer_context.tensor
        self._split_parameters(split, name)
        forward = part.forward

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
    has_whole_sequences = True

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        part = split.module.get_submodule(name)
        layer_context, tensor, forward = split.context_of(name), split.layer_context.tensor, part.forward

        def sum_of_ranks(*arguments: Any, **named: Any) -> Any:
            """Return the sum of all ranks' results, which may be several tensors."""
            inputs = [each for each in tensors_of((arguments, named)) if each.requires_grad]
            entered = enter_split_all(layer_context, *inputs) if inputs else ()
            by_input = dict(zip(map(id, inputs), entered, strict=True))
            arguments, named = map_leaves((arguments, named), lambda leaf: by_input.get(id(leaf), leaf))
            result = forward(*arguments, **named)
            return map_leaves(result, lambda leaf: sum_results(tensor, leaf, *entered, *part.parameters()))

        set_forward(part, sum_of_ranks)
