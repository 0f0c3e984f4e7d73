"""What peers train with, to train the deck's model as a run does: first weights, batches, rates, clipping.

A peer's losses are then those of a run but for rounding, from the first step to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.bench.peers.torch_model import TorchModel, loss_of
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
"""One optimizer step; the mean loss of the tokens of which this rank computed it, None where of none."""

Backward = Callable[[MicroBatch, bool], Tensor]
"""Adds to the gradients what a micro-batch brings, told whether it is the step's last one; its part of the
loss.
"""

Squares = Callable[[Tensor], Tensor]

_RENAMED = {"embedding.weight": "embedding.tokens.weight", "positions.weight": "embedding.positions.weight"}
_TABLES = ("embedding.", "head.")
_RESIDUAL = ("attention.output.weight", "feed_forward.down.weight")


class PeerRank(Protocol):
    """Which rank of how many."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def size(self) -> int:
        """How many there are."""


class TorchTraining:
    """The deck's training, of which this rank reads share `rank` of `ranks` of each step's samples."""

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
        """Of one of our own families."""
        assert isinstance(self.architecture, ModelShape)
        return self.architecture

    def full_model(self) -> nn.Module:
        """All of the deck's model in plain torch, of tokens [b, s] logits [b, s, V], with the weights that a
        run begins with.
        """
        if isinstance(self.architecture, ModuleArchitecture):
            return TorchModule(self.architecture, self.deck.run.seed)
        return self.filled(TorchModel(self.shape))

    @property
    def count(self) -> int:
        """Micro-batches of a step, on each rank."""
        return self.deck.batch.global_size // (self.deck.batch.micro_size * self.share[1])

    @property
    def rate(self) -> float:
        """The learning rate of the step that is being made."""
        return self._rates.at(self.steps, self.deck.batch.global_size)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's of the step that is being made."""
        batch = self.deck.batch
        first = self.steps * batch.global_size
        return self._batches.step(first, batch.global_size, *self.share, batch.micro_size)

    def loss_share(self, model: Callable[..., Tensor], micro: MicroBatch) -> Tensor:
        """What a micro-batch adds to the mean loss of this rank's share of a step."""
        return loss_of(model(micro.tokens), micro.targets) / self.count

    def step(self, backward: Backward, update: Callable[[], None]) -> PeerStep:
        """What makes a step: `backward` of each of this rank's micro-batches, then `update`."""

        def step() -> float:
            total = torch.zeros(())
            for index, micro in enumerate(self.micro_batches()):
                total += backward(micro, index == self.count - 1).detach()
            update()
            return float(total)

        return step

    def filled(self, model: TorchModel) -> TorchModel:
        """The model with the weights, in fp32, that a run of the deck begins with."""
        for name, parameter in model.named_parameters():
            fill(parameter.data, self._own_name(name, model.first), self.deck.run.seed, self.shape)
        return model

    def _own_name(self, name: str, first_block: int) -> str:
        """Our name of a parameter of a TorchModel whose blocks begin with `first_block`."""
        if name == "head.weight" and self.shape.tied:
            return "embedding.tokens.weight"
        kind, _, rest = name.partition(".")
        if kind != "blocks":
            return _RENAMED.get(name, name)
        index, _, rest = rest.partition(".")
        return f"blocks.{first_block + int(index)}.{rest}"

    def groups(self, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
        """Parameters for an optimizer of torch's: what decays, and what does not; split and whole ones apart,
        of which torch's optimizers take no mixture.
        """
        found: dict[tuple[bool, bool], list[Tensor]] = {}
        for parameter in parameters:
            found.setdefault((parameter.dim() > 1, isinstance(parameter, DTensor)), []).append(parameter)
        decay = self.deck.optimizer.weight_decay
        return [
            {"params": alike, "weight_decay": decay if decayed else 0.0}
            for (decayed, _), alike in found.items()
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """What else torch's AdamW is to be given."""
        rule = self.deck.optimizer.rule
        assert isinstance(rule, AdamWTable)
        return {"lr": self.rate, "betas": (rule.beta1, rule.beta2), "eps": rule.epsilon, "fused": True}

    def begin_update(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give an optimizer's groups the rate of this step, which is over then."""
        for group in groups:
            group["lr"] = self.rate
        self.steps += 1


class TorchUpdate:
    """AdamW in fp32, after clipping, of modules in fp32. What is `stored` in 16 bits is converted to that
    format here, and has masters in fp32 from then on.

    `squares` brings the sum of squares of this rank's gradients to that of the whole model, for which those
    of `counted` parameters count (default: of all).
    """

    def __init__(
        self,
        training: TorchTraining,
        modules: Iterable[nn.Module],
        stored: bool = False,
        counted: Iterable[Tensor] | None = None,
        squares: Squares | None = None,
    ) -> None:
        modules = list(modules)
        self.training, self.squares = training, squares
        self.masters = _parameters(modules)
        self.parameters = self.masters
        counts = set(map(id, self.masters if counted is None else counted))
        places = [index for index, master in enumerate(self.masters) if id(master) in counts]
        if stored and training.storage.itemsize < 4:
            self.masters = [p.detach().clone().requires_grad_() for p in self.parameters]
            for module in modules:
                module.to(training.storage)
            self.parameters = _parameters(modules)
        self.counted = [self.masters[index] for index in places]
        self.optimizer = torch.optim.AdamW(training.groups(self.masters), **training.settings)

    def __call__(self) -> None:
        """Update with the gradients that are there, which are gone then."""
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        clip_gradients(self.masters, self.training.deck.optimizer.clip, self.counted, self.squares)
        self.training.begin_update(self.optimizer.param_groups)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.parameters:
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters, strict=True):
                    parameter.copy_(master)


def _parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Each once."""
    return list(dict.fromkeys(p for module in modules for p in module.parameters()))


def clip_gradients(
    parameters: Sequence[Tensor],
    limit: float,
    counted: Sequence[Tensor] | None = None,
    squares: Squares | None = None,
) -> None:
    """Clip as a run does, by the norm of what is `counted` (default: of all), by torch's functions; 0: never.

    Split and whole gradients are taken apart, of which these functions take no mixture. See TorchUpdate for
    `squares`.
    """
    if not limit:
        return
    total = torch.zeros(())
    for alike in _apart(parameters if counted is None else counted):
        norm = nn.utils.get_total_norm([p.grad for p in alike if p.grad is not None])
        total = total + (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    norm = (total if squares is None else squares(total)).sqrt()
    for alike in _apart(parameters):
        nn.utils.clip_grads_with_norm_(alike, limit, norm)


def _apart(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those with split gradients and those with whole ones, where there are any."""
    kinds: dict[bool, list[Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            kinds.setdefault(isinstance(each.grad, DTensor), []).append(each)
    return list(kinds.values())


def fill(target: Tensor, name: str, seed: int, shape: ModelShape) -> None:
    """Give a parameter in plain torch, fp32, the first values of ours of the same name."""
    initial = _initial(name, target.dim())
    if initial in ("ones", "zeros"):
        target.fill_(float(initial == "ones"))
    else:
        shard = Shard.replicated(name, tuple(target.shape))
        fill_normal(target.view(-1), 0, shard, seed, deviation(shape, initial))


def _initial(name: str, dims: int) -> Initial:
    """The role of a parameter of ours without experts."""
    if dims == 1:
        return "ones" if name.endswith("norm.weight") else "zeros"
    if name.endswith(_RESIDUAL):
        return "residual"
    return "table" if name.startswith(_TABLES) else "normal"
