"""Modules of multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.model.block import PassContext, TransformerBlock
from hpctrain.model.mixtures.mixture import MixtureBlock
from hpctrain.model.norm import Norm
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.replicated_linear import ReplicatedLinear
from hpctrain.parallel.tensor import LinearSpec


class PredictionModule(TransformerBlock):
    """Module of multi-token prediction of one depth k.

    It combines the hidden state of position i of the depth before with the embedding of token i + k, and its
    result predicts token i + k + 1:

        x = projection([embedding_norm(embedding), hidden_norm(hidden)])
        hidden of this depth = final_norm(block(x))

    The next depth reads the hidden states after `final_norm`, as depth 1 reads those after the final norm of
    the model. The paper leaves this open, and the published weights have one depth. Megatron-LM's
    MultiTokenPredictionLayer, MtpModel of transformers, vLLM and SGLang do the same.

    Args:
        depth: The depth, from 1 on.
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
    """

    def __init__(self, depth: int, shape: ModelShape, layer_context: LayerContext) -> None:
        index = shape.layers + depth - 1
        super().__init__(index, shape, layer_context)

        def norm(layer: str) -> Norm:
            return Norm(f"blocks.{index}.{layer}", shape, layer_context)

        self.embedding_norm, self.hidden_norm = norm("embedding_norm"), norm("hidden_norm")
        spec = LinearSpec(2 * shape.hidden, [(f"blocks.{index}.projection", shape.hidden)])
        self.projection = ReplicatedLinear(spec, layer_context)
        self.final_norm = norm("final_norm")

    @override
    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """Return the normalized hidden states of this depth, [s or s/t, b, h].

        Args:
            x: Embeddings and hidden states of the previous depth, concatenated: [2 s or 2 s/t, b, h].
            context: Inputs of the pass.
        """
        embedded, hidden = x.chunk(2)
        normed = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1)
        result: Tensor = self.final_norm(super().forward(self.projection(normed), context))
        return result


class MixturePredictionModule(PredictionModule, MixtureBlock):
    """PredictionModule with a mixture of experts."""


def prediction_modules(shape: ModelShape, layer_context: LayerContext) -> list[PredictionModule]:
    """Return the modules of a model, from depth 1 on."""
    return [
        (MixturePredictionModule if shape.is_mixture(shape.layers + depth - 1) else PredictionModule)(
            depth, shape, layer_context
        )
        for depth in range(1, shape.mtp_layers + 1)
    ]
