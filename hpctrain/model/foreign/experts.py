"""Experts of transformers, whose matrices are one tensor [experts, ...] each, spread over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.model.foreign.across import both_entered, summed
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import RowPartition, rows_shard

_COUNT, _SPREAD = "num_experts", "_is_expert_parallel"


def experts_in(module: nn.Module) -> int | None:
    """How many experts a module has that can be spread; None where it is no such module.

    One of transformers' that is told to be spread leaves tokens alone whose expert has a number one above.
    """
    count, own = getattr(module, _COUNT, None), list(module.parameters())
    if (
        not hasattr(module, _SPREAD)
        or not isinstance(count, int)
        or not all(each.shape[0] == count for each in own)
    ):
        return None
    return count


def spread_experts(
    module: nn.Module, names: Mapping[nn.Parameter, str], groups: LayerContext, tensor: Group
) -> None:
    """Have a rank of `tensor` keep its experts alone, in place; what all give is summed over it, and
    gradients of what they take over the tensor ranks of `groups`.
    """
    count = experts_in(module)
    assert count is not None
    rows = RowPartition.split(count, tensor)
    for attribute, theirs in list(module.named_parameters(recurse=False)):
        own = Parameter(rows_shard(names[theirs], rows, tuple(theirs.shape[1:])), decayed=theirs.dim() > 1)
        own.requires_grad_(theirs.requires_grad)
        setattr(module, attribute, own)
    setattr(module, _COUNT, rows.local)
    setattr(module, _SPREAD, True)
    # Who looks for its forward method finds this one first.
    vars(module)["forward"] = partial(_of_own, module, module.forward, rows, groups, tensor)


def _of_own(
    module: nn.Module,
    forward: Callable[..., Tensor],
    rows: RowPartition,
    groups: LayerContext,
    tensor: Group,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What all experts give for tokens [n, h], of each of which the experts [n, k] have such weights."""
    hidden, weights = both_entered(groups, hidden_states, top_k_weights)
    own = top_k_index - rows.start
    others = (own < 0) | (own >= rows.local)
    result = forward(hidden, own.masked_fill(others, rows.local), weights.masked_fill(others, 0.0))
    # Ranks without a token come to all this in backward, too, so that sums are in one order on all.
    return summed(tensor, result, hidden, weights, *module.parameters())
