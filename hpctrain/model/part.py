"""Interfaces of model parts and their layers, for all code that runs, plans, times or freezes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.model.inputs import ModelInputs
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.operations import AttentionSize, ElementwiseSize, MatrixSize
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import MatmulLayer, SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead

Computed = TypeVar("Computed")

Unit = list[list[Parameter]]
"""Parameters that ZeRO-3 gathers together: a list for each submodule that has some."""


@dataclass(frozen=True)
class LayerRange:
    """Range of blocks, `first` to `last` (exclusive), that a part of the model has.

    The first part has the embedding, and the last part the output layer.

    Attributes:
        first: First block.
        last: Block after the last one.
        has_embedding: True for the first part.
        has_head: True for the last part.
        tied_stage: Index of this stage among those that hold the table of the embedding, if the last layer
            uses it too.
        tied_stages: Number of these stages.
    """

    first: int
    last: int
    has_embedding: bool
    has_head: bool
    tied_stage: int = 0
    tied_stages: int = 1

    @staticmethod
    def all_of(layers: int) -> LayerRange:
        """Return the range of a model with so many blocks in one part."""
        return LayerRange(0, layers, True, True)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.last - self.first


@dataclass(frozen=True)
class LayerKind:
    """Kind of a layer. Layers of one kind take the same time and save the same bytes. Its text is printed.

    Attributes:
        name: "embedding", "block", "mixture" (a block with a mixture of experts) or "head". For a user's
            module the class of a block, or the name of what is outside of the blocks.
        window: Keys that a query of the block sees, with its own; 0 for all earlier ones.
        unrotated: True for a block that does not rotate queries and keys, in a model that rotates others.
    """

    name: str
    window: int = 0
    unrotated: bool = False

    @override
    def __str__(self) -> str:
        window = f"window {self.window} " if self.window else ""
        return f"{window}{'unrotated ' if self.unrotated else ''}{self.name}"


class Layer(nn.Module):
    """Layer of a part. All facts about a part are derived from its layers.

    Attributes:
        kind: Kind of the layer.
        is_block: True for layers between the first and the last one, which backward may recompute.
        keeps_gathered: True if gathered parameters of the layer stay gathered until the end of a step.
        core: Sizes of the layer's attention; None if it has none.
        auxiliary_loss_names: Names of the auxiliary losses of the layer.
    """

    kind: LayerKind
    is_block: bool = False
    keeps_gathered: bool = False
    core: AttentionSize | None = None
    auxiliary_loss_names: tuple[str, ...] = ()

    def units(self) -> Iterator[Unit]:
        """Yield the units of the layer in the order in which the forward pass needs them; by default one."""
        yield list(parameters_by_module(self))

    @cached_property
    def gather_keys(self) -> list[Parameter]:
        """Parameters that identify the layer's units for ParameterResidency, in the forward pass's order.

        The unit of the first one of a block is gathered throughout its forward and backward pass.
        """
        return [unit[0][0] for unit in self.units()]

    @cached_property
    def all_parameters(self) -> list[Parameter]:
        """Parameters of the layer."""
        return parameters_in(self)

    @property
    def added_in_forward(self) -> list[Parameter]:
        """Parameters to whose gradients the forward pass adds."""
        return []

    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        """Yield the parameters whose gradients the backward pass completes, in its order, with a gather key.

        The key is the first parameter of a unit that is gathered until these gradients are complete. It is
        None if that is only the first unit of a block, or none.
        """
        yield None if self.is_block else self.gather_keys[0], self.all_parameters[::-1]

    @property
    def deferred_parameters(self) -> set[Parameter]:
        """Parameters whose gradients may be computed after the rest of the backward pass."""
        return {
            p for layer in self.modules() if isinstance(layer, MatmulLayer) for p in layer.deferred_parameters
        }

    @property
    def product_layers(self) -> list[SplitLinear | VocabularyHead]:
        """Sublayers that have one matrix product each."""
        return [each for each in self.modules() if isinstance(each, SplitLinear | VocabularyHead)]

    @property
    def matrices(self) -> list[MatrixSize]:
        """Sizes of the matrices that activations are multiplied with, not divided by tensor ranks."""
        multiplying = (layer for layer in self.modules() if isinstance(layer, MatmulLayer))
        return [matrix for layer in multiplying for matrix in layer.matrices]

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations of the forward pass."""
        return []


class ModelPart(Protocol):
    """Part of a model that one chunk of a pipeline stage holds: a Transformer or a ModulePart.

    Attributes:
        span: Blocks of the part.
        residency: Gathers parameters that ZeRO-3 splits. The engine replaces it after building the part.
    """

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

    def predict(self, last: Any, compute: Callable[..., Computed]) -> Computed:
        """Return the result of `compute` for the output of the last part, with its parameters gathered.

        A Transformer passes its head and the last hidden states to `compute`.
        """

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""

    def units(self) -> Iterator[Unit]:
        """Yield the units of all layers in the order of the forward pass. No parameter is in two of them."""


@torch.no_grad()
def logits_of(model: ModelPart, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of tokens [b, s] by a Transformer in one part.

    Args:
        model: The model, without sequence parallelism.
        tokens: Token ids.
    """
    hidden = model(ModelInputs.of_texts(tokens))
    logits: Tensor = model.predict(hidden, VocabularyHead.logits)
    return logits.transpose(0, 1)


def blocks_of(part: ModelPart) -> list[Layer]:
    """Return the layers between the first and the last one, in order."""
    return [layer for layer in part.layers if layer.is_block]


def parameter_list(part: ModelPart) -> list[Parameter]:
    """Return all parameters, each once, in the order of the forward pass."""
    return [parameter for unit in part.units() for leaf in unit for parameter in leaf]


def parameters_in(module: nn.Module) -> list[Parameter]:
    """Return the Parameters of a module."""
    return [p for p in module.parameters() if isinstance(p, Parameter)]


def parameters_by_module(module: nn.Module) -> Iterable[list[Parameter]]:
    """Yield the parameters of each submodule that has any."""
    for layer in module.modules():
        parameters = [p for p in layer.parameters(recurse=False) if isinstance(p, Parameter)]
        if parameters:
            yield parameters


def matmuls_of(layers: Iterable[Layer]) -> Iterator[Matmul]:
    """Yield the products of some layers."""
    return (each.product for layer in layers for each in layer.product_layers)


def converted_bytes(layers: Iterable[Layer]) -> int:
    """Return the bytes of the converted weights of some layers that exist now."""
    return sum(product.converted_bytes for product in matmuls_of(layers))
