"""The same model on data ranks that each have all of it, by torch over gloo: DistributedDataParallel.

In 16 bits by torch's autocast, with weights, gradients and their sums in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from hpctrain.bench.peers.torch_training import PeerRank, PeerStep, TorchTraining, TorchUpdate, clip_gradients
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck


def peer(name: str, deck: Deck, place: PeerRank, split: Sequence[int]) -> PeerStep:  # noqa: ARG001
    """One optimizer step of the deck's global batch, over gloo.

    "ddp": with gradients as views of its buckets. "ddp-alone": without it, each rank by itself. "zero1":
    optimizer state cut by ZeroRedundancyOptimizer. "ddp-onednn": linear layers through oneDNN, see
    OneDnnLinear. "ddp-kept" differs by the environment of its process alone.
    """
    training = TorchTraining(deck, place.rank, place.size)
    model = training.full_model()
    if name == "ddp-onednn":
        use_onednn(model)
    if name != "ddp-alone":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    update = _cut_update(training, model) if name == "zero1" else TorchUpdate(training, [model])
    once = isinstance(model, DistributedDataParallel) and deck.memory.accumulate == "whole"
    halved = torch.autocast("cpu", training.storage, enabled=training.storage.itemsize < 4)

    def backward(micro: MicroBatch, last: bool) -> Tensor:
        with model.no_sync() if once and not last else nullcontext():  # type: ignore[operator]
            with halved:
                loss = training.loss_share(model, micro)
            loss.backward()
        return loss

    return training.step(backward, update)


def _cut_update(training: TorchTraining, model: nn.Module) -> Any:
    """What updates, on each rank, the parameters that torch gives it, and fetches the others."""
    parameters = list(model.parameters())
    groups = training.groups(parameters)
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **training.settings)

    def update() -> None:
        clip_gradients(parameters, training.deck.optimizer.clip)
        training.begin_update(optimizer.param_groups)
        optimizer.step()
        optimizer.zero_grad()

    return update


class OneDnnLinear(torch.autograd.Function):
    """A linear layer in fp32 whose three products oneDNN computes.

    Torch gives fp32 products to MKL, which uses AVX-512 on Intel's processors alone. What asked it not to
    look whose processor it is (MKL_DEBUG_CPU_TYPE) is gone since MKL 2020.1, but torch's products for
    compiled models go through oneDNN, which looks at what the processor can do.
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
        # The product is x^T g, whose transpose is the gradient: measured faster than g^T x.
        of_weight = _product(x.flatten(0, -2).t(), rows.t(), None).t()
        return _product(output, weight.t(), None), of_weight, rows.sum(0) if ctx.biased else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., k], [n, k] -> [..., n], as functional.linear."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        result: Tensor = OneDnnLinear.apply(input, self.weight, self.bias)
        return result


def use_onednn(model: nn.Module) -> None:
    """Have all linear layers compute through oneDNN; their parameters stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear
