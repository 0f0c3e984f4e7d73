"""Bytes of mixtures of experts. All experts are assumed to get equally many tokens."""

from __future__ import annotations

from math import ceil, prod

from hpctrain.costs.layer_bytes import feed_forward_bytes
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.costs.layer_bytes.byte_functions import saved_storages, workspace_bytes
from hpctrain.costs.layer_bytes.linear_bytes import deferred_operands
from hpctrain.costs.layer_bytes.matmul_bytes import gradient_workspace
from hpctrain.model.mixtures.mixture import Mixture
from hpctrain.model.mixtures.router import Router
from hpctrain.parallel.experts.expert_layer import Experts
from hpctrain.parallel.experts.grouped_products import ROW_UNIT
from hpctrain.parallel.layer_context import LayerContext

_LARGEST_LOAD = 4
"""Load that experts reach in the first steps, in units of an even load.

Measured with 8 to 64 experts without a capacity, on 2,048 tokens. In models of at least 64 features and 8
layers, almost every row count up to this load occurred within 15 steps. Only smaller models remain balanced.
"""


@saved_storages.register
def _saved_by_router(router: Router, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what is saved beside the input: scores, choices and weights, and what losses need."""
    settings, rows = router.settings, _local_rows(router.layer_context, sizes)
    counts = [settings.count, 2 * settings.per_token, settings.per_token]
    if settings.router_normalize:
        counts += [settings.per_token, 1, 1]
    if settings.balance_loss and settings.router == "sigmoid":
        counts.append(1)
    if settings.router_z_loss:
        counts += [settings.count, 1]
    shares = rows if settings.balance_over == "sequence" else 1
    features = [4 * rows * count for count in counts]
    features += [4 * shares * settings.count] if settings.balance_loss else []
    return [SavedStorage(each, 4, features=False) for each in features]


@saved_storages.register
def _saved_by_experts(experts: Experts, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return the rows, and the results of the first product."""
    widths, rows = (experts.hidden, _expanded_features(experts)), _padded_rows(experts, sizes)
    return [SavedStorage(rows * width * sizes.itemsize, sizes.itemsize) for width in widths]


@saved_storages.register
def _saved_by_mixture(mixture: Mixture, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what router, shared experts and experts save, and the results."""
    shared = saved_storages(mixture.shared, sizes) if mixture.shared is not None else []
    if mixture.shared_gate is not None:
        shared += [
            sizes.row_features(mixture.experts.hidden),
            SavedStorage(4 * sizes.rows, 4, features=False),
        ]
    inner = saved_storages(mixture.experts, sizes)
    return [*saved_storages(mixture.router, sizes), *shared, *inner, result_storage(mixture, sizes)]


@workspace_bytes.register
def _mixture_workspace(mixture: Mixture, sizes: ActivationSizes) -> int:
    """Return the temporary bytes of the backward pass: gradients of rows, and what products need."""
    experts = mixture.experts
    rows = _padded_rows(experts, sizes) * sizes.itemsize
    inner = rows * 2 * (_expanded_features(experts) + experts.hidden)
    shared = workspace_bytes(mixture.shared, sizes) if mixture.shared is not None else 0
    _, of_expert, *dims = experts.gate_up.shape
    product = gradient_workspace(of_expert * prod(dims), sizes)
    return max(inner + product, shared)


@deferred_operands.register
def _operands_of_experts(experts: Experts, sizes: ActivationSizes) -> int:
    return total(saved_storages(experts, sizes)) + _allocated_operands(experts, sizes)


def _allocated_operands(experts: Experts, sizes: ActivationSizes) -> int:
    """Return the bytes of the operands of weight gradients that the backward pass allocates.

    These are the gradient of the results, and the activation. The gradient of the first product takes the
    memory of that product, or, without a gate, as much memory.
    """
    return _padded_rows(experts, sizes) * (experts.hidden + experts.inner) * sizes.itemsize


def result_storage(mixture: Mixture, sizes: ActivationSizes) -> SavedStorage:
    """Return the storage of the results that the ranks of the experts send back."""
    experts = mixture.experts
    return SavedStorage(_dispatched_rows(experts, sizes) * experts.hidden * sizes.itemsize, sizes.itemsize)


def padded_row_counts(experts: Experts, sizes: ActivationSizes) -> int:
    """Return about how many different padded row counts the experts of a rank have in a run."""
    context = experts.layer_context
    most = _local_rows(context, sizes) * context.expert.size * context.expert_tensor.size
    even = most * experts.experts_per_token / (experts.local * context.expert.size)
    largest = _LARGEST_LOAD if experts.capacity is None else min(_LARGEST_LOAD, experts.capacity)
    return -(-min(most, ceil(largest * even)) // ROW_UNIT)


def transient_bytes(mixture: Mixture, sizes: ActivationSizes) -> tuple[int, int]:
    """Return the bytes beside what is saved if weight gradients are deferred.

    The first number is the peak during the backward pass of the mixture, the second one what remains
    after it.
    """
    settings, results = mixture.settings, result_storage(mixture, sizes).bytes
    allocated = _allocated_operands(mixture.experts, sizes) - results
    weights = 4 * _local_rows(mixture.layer_context, sizes) * settings.per_token
    most = allocated - (weights if settings.router_normalize else 0)
    remaining = allocated - total(saved_storages(mixture.router, sizes))
    if mixture.shared is None:
        return most, remaining - sizes.row_features(mixture.hidden).bytes
    shared = feed_forward_bytes.transient_bytes(mixture.shared, sizes)
    return most + shared[0], remaining + shared[1]


def _local_rows(layer_context: LayerContext, sizes: ActivationSizes) -> int:
    """Return the number of tokens that this rank routes."""
    return layer_context.row_sizes(sizes.tokens)[layer_context.tensor.rank]


def _dispatched_rows(experts: Experts, sizes: ActivationSizes) -> int:
    """Return the number of rows that leave this rank for experts."""
    accepted = 1.0 if experts.capacity is None else min(1.0, experts.capacity)
    return int(_local_rows(experts.layer_context, sizes) * experts.experts_per_token * accepted)


def _padded_rows(experts: Experts, sizes: ActivationSizes) -> int:
    """Return the number of rows of this rank's experts, with half a unit of padding for each expert.

    That is the mean of the padding if loads differ, as they do after some steps.
    """
    rows = _dispatched_rows(experts, sizes) * experts.layer_context.expert_tensor.size
    is_padded = sizes.itemsize == 2 and not sizes.gpu
    return rows + experts.local * ROW_UNIT // 2 if is_padded else rows


def _expanded_features(experts: Experts) -> int:
    """Return the local features of a row between the two products."""
    return experts.activation.input_projections * experts.inner
