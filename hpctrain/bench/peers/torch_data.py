"""Peers that train the model with data parallelism of torch: DistributedDataParallel with gloo.

16-bit formats use torch.autocast. Weights, gradients and their sums are in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from hpctrain.bench.peers.torch_training import PeerRank, PeerStep, TorchTraining, TorchUpdate, clip_gradients
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck


def peer(name: str, deck: Deck, peer_rank: PeerRank, split: Sequence[int]) -> PeerStep:  # noqa: ARG001
    """Return a function that trains one step.

    Args:
        name: "ddp" for DistributedDataParallel with gradients as views of its buckets; "ddp-kept" for the
            same, with another environment; "ddp-onednn" for linear layers by oneDNN, see OneDnnLinear;
            "ddp-alone" for ranks that train alone; "zero1" for ZeroRedundancyOptimizer.
        deck: Deck to train.
        peer_rank: Rank of this process.
        split: Not used.
    """
    training = TorchTraining(deck, peer_rank.rank, peer_rank.size)
    model = training.full_model()
    if name == "ddp-onednn":
        use_onednn(model)
    if name != "ddp-alone":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    update = _zero1_update(training, model) if name == "zero1" else TorchUpdate(training, [model])
    reduce_once = isinstance(model, DistributedDataParallel) and deck.memory.accumulate == "whole"
    autocast = torch.autocast("cpu", training.storage, enabled=training.storage.itemsize < 4)

    def backward(micro: MicroBatch, last: bool) -> Tensor:
        with model.no_sync() if reduce_once and not last else nullcontext():  # type: ignore[operator]
            with autocast:
                loss = training.loss_share(model, micro)
            loss.backward()
        return loss

    return training.step(backward, update)


def _zero1_update(training: TorchTraining, model: nn.Module) -> Callable[[], None]:
    """Return a function that updates this rank's share of the parameters, and gathers the other shares."""
    parameters = list(model.parameters())
    groups = training.groups(parameters)
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **training.adamw_settings)

    def update() -> None:
        clip_gradients(parameters, training.deck.optimizer.clip)
        training.begin_update(optimizer.param_groups)
        optimizer.step()
        optimizer.zero_grad()

    return update


class OneDnnLinear(torch.autograd.Function):
    """Linear layer in fp32 whose three products oneDNN computes.

    Torch computes fp32 products by MKL, which uses AVX-512 only on processors of Intel. The variable
    MKL_DEBUG_CPU_TYPE, which changed that, has had no effect since MKL 2020.1. The products that torch uses
    in compiled models are those of oneDNN, which uses whatever the processor supports.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: D102
        x, weight = ctx.saved_tensors
        output = gradients[0]
        rows = output.flatten(0, -2)
        # The transpose of x^T g is the gradient, and was measured to be faster than g^T x.
        weight_gradient = _product(x.flatten(0, -2).t(), rows.t(), None).t()
        return _product(output, weight.t(), None), weight_gradient, rows.sum(0) if ctx.biased else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `functional.linear` of x [..., k] and weight [n, k] by oneDNN, which gives [..., n]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        result: Tensor = OneDnnLinear.apply(input, self.weight, self.bias)
        return result


def use_onednn(model: nn.Module) -> None:
    """Make all linear layers of a model compute by oneDNN, with the same parameters."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear
