"""What a piece of a model is to those who run, freeze, place, plan and time it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hpctrain.model.inputs import ModelInputs
from hpctrain.parallel.activation_sizes import ActivationSizes, DeferredBytes, SavedStorage
from hpctrain.parallel.operations import AttentionSize, ElementwiseSize, MatrixSize
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import MatmulLayer, SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead

Computed = TypeVar("Computed")


@dataclass(frozen=True)
class LayerRange:
    """Which piece of the model a pipeline stage's chunk is: blocks `first` to `last` (exclusive).

    The first part embeds, the last one predicts. `tied_stage` numbers this stage among those that hold
    tied embeddings, of which there are `tied_stages`.
    """

    first: int
    last: int
    embeds: bool
    predicts: bool
    tied_stage: int = 0
    tied_stages: int = 1

    @staticmethod
    def all_of(layers: int) -> LayerRange:
        """A model of so many blocks in one piece."""
        return LayerRange(0, layers, True, True)

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.last - self.first


class Layer(nn.Module, ABC):
    """A layer of a part, from which everything about the part is told.

    `kind` names what it is: layers of one kind of a model take as long, and save as much. `is_block` says
    that it is one of those between the first and the last, which backward may compute again, `lasting` that
    its parameters, where they are gathered, stay so until a step ends; `core` is its attention, if it has
    any; `terms` names what it adds to the losses, see Terms.
    """

    kind: str
    is_block: ClassVar[bool] = False
    lasting: ClassVar[bool] = False
    core: AttentionSize | None = None
    terms: tuple[str, ...] = ()

    def units(self) -> Iterator[list[list[Parameter]]]:
        """What computes together, in the order of the forward pass: of each unit its modules' parameters."""
        yield list(leaves(self))

    @cached_property
    def held(self) -> list[Parameter]:
        """The parameters that stand for what the forward pass has there, in its order; see
        ParameterResidency.

        The first one of a block is there throughout, in forward and backward.
        """
        return [unit[0][0] for unit in self.units()]

    @cached_property
    def own(self) -> list[Parameter]:
        """Its parameters."""
        return own_parameters(self)

    @property
    def added_in_forward(self) -> list[Parameter]:
        """Those to whose gradients the forward pass adds."""
        return []

    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        """What backward tells to be added, in its order, with the parameter that is held meanwhile, besides
        what is there throughout.
        """
        yield None if self.is_block else self.held[0], self.own[::-1]

    @property
    def late(self) -> set[Parameter]:
        """Those whose gradients may be computed later than the rest of backward."""
        return {p for layer in self.modules() if isinstance(layer, MatmulLayer) for p in layer.late}

    @property
    def multipliers(self) -> list[SplitLinear | VocabularyHead]:
        """What of it has one Product each."""
        return [each for each in self.modules() if isinstance(each, SplitLinear | VocabularyHead)]

    def rows(self, multiplier: SplitLinear | VocabularyHead, tokens: int) -> int:  # noqa: ARG002
        """How many rows one of these multiplies of a micro-batch of so many tokens."""
        return tokens

    @property
    def matrices(self) -> list[MatrixSize]:
        """The whole matrices that activations are multiplied with."""
        multiplying = (layer for layer in self.modules() if isinstance(layer, MatmulLayer))
        return [matrix for layer in multiplying for matrix in layer.matrices]

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """What its forward pass does besides."""
        return []

    @property
    def core_flops(self) -> int:
        """FLOPs of a token's forward pass that are not products with its matrices."""
        return 0 if self.core is None else self.core.flops

    @property
    def matrix_elements(self) -> int:
        """Elements of the whole matrices that activations are multiplied with."""
        return sum(matrix.elements for matrix in self.matrices)

    @property
    def idle_elements(self) -> int:
        """Elements of its whole parameters that a token does not meet: of experts that it does not go to."""
        return sum(matrix.idle_elements for matrix in self.matrices)

    def exchanged(self, at: ActivationSizes) -> int:  # noqa: ARG002
        """Bytes that one exchange of a micro-batch's rows with their experts takes from this rank to others,
        where all experts have as many: one of those there and back, of forward and of backward.
        """
        return 0

    @abstractmethod
    def saved(self, at: ActivationSizes) -> list[SavedStorage]:
        """What autograd saves of it, in the order of the forward pass, each storage once."""

    def unseen(self, at: ActivationSizes) -> list[SavedStorage]:  # noqa: ARG002
        """What of that, from its beginning on, is not saved where no gradient is asked of its input."""
        return []

    def unknown(self, at: ActivationSizes) -> str | None:  # noqa: ARG002
        """Why nobody knows what autograd saves of it, where nobody does."""
        return None

    def computed_again(self, at: ActivationSizes) -> tuple[list[SavedStorage], int] | None:  # noqa: ARG002
        """Of a block that is computed again by itself: what is kept of it, and the bytes that are there
        besides meanwhile. None: hidden states, and what it saves.
        """
        return None

    def waiting(self, at: ActivationSizes) -> DeferredBytes:
        """What its weight gradients need where they are computed later."""
        linear = (layer for layer in self.modules() if isinstance(layer, MatmulLayer))
        return DeferredBytes(sum(layer.waiting(at) for layer in linear), 0)

    def workspace(self, at: ActivationSizes) -> int:  # noqa: ARG002
        """Bytes that its backward pass, or its loss, needs in passing."""
        return 0

    def holes(self, at: ActivationSizes) -> int:  # noqa: ARG002
        """Bytes of freed memory that the C library keeps between what is in use, by the largest layer."""
        return 0


class ModelPart(Protocol):
    """Part of a model that one chunk of a pipeline stage holds. Modules of users implement it, too."""

    span: LayerRange
    residency: ParameterResidency

    @property
    def layers(self) -> Sequence[Layer]:
        """Layers of the part, in the order of the forward pass."""

    def __call__(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Any:
        """Return the hidden states [s or s/t, b, h] after this part.

        The first part computes them from the tokens, and other parts from `hidden`, the result of the part
        before. The last part returns what its `predict` takes.
        """

    def run_layer(self, layer: Layer, inputs: ModelInputs, x: Tensor) -> Tensor:
        """Return the output of one layer for the input `x`. The parameters of the layer must be gathered."""

    def predict(self, last: Any, compute: Callable[..., Computed]) -> Computed:
        """Return the result of `compute` for the output of the last part, with its parameters gathered.

        `compute` gets what the part hands over. This is the head and the last hidden states for a
        Transformer.
        """

    def shared_bytes(self, at: ActivationSizes) -> int:
        """Return the number of bytes that autograd saves once for all blocks."""

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""

    def units(self) -> Iterator[list[list[Parameter]]]:
        """Yield the parameters of each layer in units that are gathered together, each parameter once."""


@torch.no_grad()
def logits_of(model: ModelPart, tokens: Tensor, last: int = 0) -> Tensor:
    """Logits [b, s, V] of tokens [b, s] by a whole Transformer, or of the `last` ones alone; without sequence
    parallelism.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    hidden = model(ModelInputs.of_tokens(tokens.t().contiguous(), positions))
    logits: Tensor = model.predict(hidden[-last:], VocabularyHead.logits)
    return logits.transpose(0, 1)


def blocks_of(part: ModelPart) -> list[Layer]:
    """The layers between the first and the last, in their order."""
    return [layer for layer in part.layers if layer.is_block]


def parameter_list(part: ModelPart) -> list[Parameter]:
    """All parameters, each once, in the order of the forward pass."""
    return [parameter for unit in part.units() for leaf in unit for parameter in leaf]


def own_parameters(module: nn.Module) -> list[Parameter]:
    """A module's parameters."""
    return [p for p in module.parameters() if isinstance(p, Parameter)]


def leaves(module: nn.Module) -> Iterable[list[Parameter]]:
    """The parameters of each of a module's modules; those of one stay together."""
    for layer in module.modules():
        parameters = [p for p in layer.parameters(recurse=False) if isinstance(p, Parameter)]
        if parameters:
            yield parameters
