"""Initial weights, batches, learning rates and clipping with which peers train the model as hpctrain does.

The losses of a peer thus equal those of hpctrain in every step, except for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.bench.peers.torch_model import TorchModel, mean_loss
from hpctrain.bench.peers.torch_module import TorchModule
from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.optimizer import AdamWTable
from hpctrain.model.construction import architecture_of
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.parameters.initialize import deviation, fill_normal
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.optim.schedule import LearningRate
from hpctrain.parallel.shards import Initial, Shard

PeerStep = Callable[[], float | None]
"""Function that takes one optimizer step. It returns the mean loss of the tokens for which this rank computes
it, None if there are none."""

Backward = Callable[[MicroBatch, bool], Tensor]
"""Function that adds the gradients of a micro-batch, and returns its share of the loss. The second argument
is True for the last micro-batch of a step."""

SumSquares = Callable[[Tensor], Tensor]
"""Function that adds up the squared norms of the gradients of all ranks."""

_RENAMES = {"embedding.weight": "embedding.tokens.weight", "positions.weight": "embedding.positions.weight"}
_TABLES = ("embedding.", "head.")
_RESIDUAL = ("attention.output.weight", "feed_forward.down.weight")


class PeerRank(Protocol):
    """Rank of a process and number of processes."""

    @property
    def rank(self) -> int:
        """Rank, from 0."""

    @property
    def size(self) -> int:
        """Number of processes."""


class TorchTraining:
    """Model and batches of a deck.

    Args:
        deck: Deck to train.
        rank: Rank among those that divide the samples of a step.
        ranks: Number of these ranks.
    """

    def __init__(self, deck: Deck, rank: int = 0, ranks: int = 1) -> None:
        assert deck.model.vocabulary is not None
        self.deck, self.share, self.steps = deck, (rank, ranks), 0
        self.architecture = architecture_of(deck, deck.model.vocabulary)
        self.storage = Precision.of(deck).storage
        source = SyntheticSource(deck.batch.sequence, deck.model.vocabulary, seed=deck.run.seed)
        self._batches = Batches(source, deck.run.seed)
        self._rates = LearningRate(**deck.learning_rate.model_dump())

    @property
    def shape(self) -> ModelShape:
        """Sizes of a model that is not a user's module."""
        assert isinstance(self.architecture, ModelShape)
        return self.architecture

    def full_model(self) -> nn.Module:
        """Return the complete model in plain torch with the initial weights of a run.

        It computes logits [batch, seq, vocabulary] of tokens [batch, seq].
        """
        if isinstance(self.architecture, ModuleArchitecture):
            return TorchModule(self.architecture, self.deck.run.seed)
        return self.initialize(TorchModel(self.shape))

    @property
    def count(self) -> int:
        """Number of micro-batches in a step on each rank."""
        return self.deck.batch.global_size // (self.deck.batch.micro_size * self.share[1])

    @property
    def rate(self) -> float:
        """Learning rate of the current step."""
        return self._rates.at(self.steps, self.deck.batch.global_size)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Return the micro-batches of this rank in the current step."""
        batch = self.deck.batch
        first = self.steps * batch.global_size
        return self._batches.step(first, batch.global_size, *self.share, batch.micro_size)

    def loss_share(self, model: Callable[..., Tensor], micro: MicroBatch) -> Tensor:
        """Return the mean loss of a micro-batch divided by the number of micro-batches of this rank."""
        return mean_loss(model(micro.tokens), micro.targets) / self.count

    def step(self, backward: Backward, update: Callable[[], None]) -> PeerStep:
        """Return a function that calls `backward` for each micro-batch of this rank, and then `update`."""

        def step() -> float:
            total = torch.zeros(())
            for index, micro in enumerate(self.micro_batches()):
                total += backward(micro, index == self.count - 1).detach()
            update()
            return float(total)

        return step

    def initialize(self, model: TorchModel) -> TorchModel:
        """Give a model the initial weights of a run in fp32, and return it."""
        for name, parameter in model.named_parameters():
            initialize_parameter(
                parameter.data, self._hpctrain_name(name, model.first), self.deck.run.seed, self.shape
            )
        return model

    def _hpctrain_name(self, name: str, first_block: int) -> str:
        """Return the name in hpctrain of a parameter of a TorchModel whose first block is `first_block`."""
        if name == "head.weight" and self.shape.tied:
            return "embedding.tokens.weight"
        kind, _, rest = name.partition(".")
        if kind != "blocks":
            return _RENAMES.get(name, name)
        index, _, rest = rest.partition(".")
        return f"blocks.{first_block + int(index)}.{rest}"

    def groups(self, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer of torch, with and without weight decay.

        Plain tensors and DTensors are in different groups, since the optimizers do not support both in one.
        """
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.dim() > 1, isinstance(parameter, DTensor)), []).append(parameter)
        decay = self.deck.optimizer.weight_decay
        return [
            {"params": group, "weight_decay": decay if decays else 0.0}
            for (decays, _), group in groups.items()
        ]

    @property
    def adamw_settings(self) -> dict[str, Any]:
        """Keyword arguments of torch.optim.AdamW."""
        rule = self.deck.optimizer.rule
        assert isinstance(rule, AdamWTable)
        return {"lr": self.rate, "betas": (rule.beta1, rule.beta2), "eps": rule.epsilon, "fused": True}

    def begin_update(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set the learning rate of the current step in an optimizer, and advance to the next step."""
        for group in groups:
            group["lr"] = self.rate
        self.steps += 1


class TorchUpdate:
    """Update of modules by AdamW in fp32 after clipping.

    Args:
        training: Training of the deck.
        modules: Modules in fp32.
        keep_masters: True if modules of a deck with 16-bit weights are converted to that format here, with
            master weights in fp32. Otherwise the modules stay in fp32.
        counted: Parameters whose gradients this rank contributes to the norm; None for all.
        sum_squares: Adds up squared norms over the ranks; None if this rank holds all gradients.
    """

    def __init__(
        self,
        training: TorchTraining,
        modules: Iterable[nn.Module],
        keep_masters: bool = False,
        counted: Iterable[Tensor] | None = None,
        sum_squares: SumSquares | None = None,
    ) -> None:
        modules = list(modules)
        self.training, self.sum_squares = training, sum_squares
        self.masters = _parameters(modules)
        self.parameters = self.masters
        counted_ids = set(map(id, self.masters if counted is None else counted))
        counted_indices = [index for index, master in enumerate(self.masters) if id(master) in counted_ids]
        if keep_masters and training.storage.itemsize < 4:
            self.masters = [p.detach().clone().requires_grad_() for p in self.parameters]
            for module in modules:
                module.to(training.storage)
            self.parameters = _parameters(modules)
        self.counted = [self.masters[index] for index in counted_indices]
        self.optimizer = torch.optim.AdamW(training.groups(self.masters), **training.adamw_settings)

    def __call__(self) -> None:
        """Update the parameters with their gradients, and remove the gradients."""
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        clip_gradients(self.masters, self.training.deck.optimizer.clip, self.counted, self.sum_squares)
        self.training.begin_update(self.optimizer.param_groups)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.parameters:
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters, strict=True):
                    parameter.copy_(master)


def _parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters of modules without duplicates."""
    return list(dict.fromkeys(p for module in modules for p in module.parameters()))


def clip_gradients(
    parameters: Sequence[Tensor],
    limit: float,
    counted: Sequence[Tensor] | None = None,
    sum_squares: SumSquares | None = None,
) -> None:
    """Clip gradients by their global norm as hpctrain does, with functions of torch.

    Plain tensors and DTensors are passed separately, since these functions do not support both in one call.

    Args:
        parameters: Parameters whose gradients are clipped.
        limit: Largest norm; 0 for no clipping.
        counted: Parameters whose gradients this rank contributes to the norm; None for all.
        sum_squares: Adds up squared norms over the ranks; None if this rank holds all gradients.
    """
    if not limit:
        return
    total = torch.zeros(())
    for group in _group_by_type(parameters if counted is None else counted):
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        total = total + (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    norm = (total if sum_squares is None else sum_squares(total)).sqrt()
    for group in _group_by_type(parameters):
        nn.utils.clip_grads_with_norm_(group, limit, norm)


def _group_by_type(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the parameters with gradients in two groups: gradients as DTensors, and as plain tensors."""
    groups: dict[bool, list[Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            groups.setdefault(isinstance(each.grad, DTensor), []).append(each)
    return list(groups.values())


def initialize_parameter(target: Tensor, name: str, seed: int, shape: ModelShape) -> None:
    """Write the initial values of hpctrain's parameter of this name into an fp32 tensor."""
    initial = _initial(name, target.dim())
    if initial in ("ones", "zeros"):
        target.fill_(float(initial == "ones"))
    else:
        shard = Shard.replicated(name, tuple(target.shape))
        fill_normal(target.view(-1), 0, shard, seed, deviation(shape, initial))


def _initial(name: str, dims: int) -> Initial:
    """Return the kind of initial values of a parameter of a model without experts."""
    if dims == 1:
        return "ones" if name.endswith("norm.weight") else "zeros"
    if name.endswith(_RESIDUAL):
        return "residual"
    return "table" if name.startswith(_TABLES) else "normal"
