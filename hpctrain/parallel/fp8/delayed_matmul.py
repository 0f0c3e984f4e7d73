"""Matrix products in 8 bits with delayed scales, from the maxima of earlier steps (Transformer Engine).

With delayed scales no product waits for a maximum of its own operands. Each product records the largest
magnitude of its operands; after a step all ranks reduce these maxima at once, with the other statistics of
the step, and append them to a history of some steps. The scales of the next step follow from the largest
maximum in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.parallel.fp8.formats import reducible_maximum
from hpctrain.parallel.fp8.quantize import ScaleBlocks, block_maxima
from hpctrain.parallel.fp8.quantized_matmul import KINDS, Kind, QuantizedMatmul
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul, Operand
from hpctrain.parallel.shards import Parameter, Shard

HISTORY_KIND = "fp8"
"""Beginning of the kinds of state that are histories, "fp8/...".

A run may ignore histories that it does not need, such as those of layers that it multiplies in another
format, and uses as many maxima as its own histories have room for.
"""


class MaximaHistory:
    """Largest magnitudes of a tensor in the last steps in which it was not zero, over all ranks.

    They change once a step, so all micro-batches of a step, and what is recomputed or deferred, use the same
    scale.

    Attributes:
        maxima: fp32 [steps], the newest first, zero for steps that are missing.
    """

    def __init__(self, maxima: Tensor) -> None:
        self.maxima = maxima

    @property
    def largest(self) -> Tensor:
        """Largest maximum, [1, 1]. It is zero as long as none is known; then there is no scale."""
        return self.maxima.amax().reshape(1, 1)

    def append(self, maximum: Tensor) -> None:
        """Add the maximum of a step and drop the oldest one.

        A maximum of zero is not added: zeros need no scale and tell nothing about later steps.

        Args:
            maximum: Finite number, the same on all ranks.
        """
        newest = maximum.to(self.maxima).reshape(1)
        self.maxima.copy_(torch.where(newest > 0, torch.cat((newest, self.maxima[:-1])), self.maxima))


class DelayedMatmul(QuantizedMatmul):
    """Products in 8 bits by scales of the maxima of earlier steps.

    All passes of a step use the same scales, in whatever order micro-batches run and are recomputed. As long
    as no maximum is known for an operand, or all of it was zero, a pass multiplies the operands in bf16,
    without quantization. Forward needs maxima of inputs and weights, backward of all three operands.

    Args:
        weights: Weights [n_i, k], as for Matmul.
        layer_context: Context of the layer, with settings of products in 8 bits.
    """

    def __init__(self, weights: Sequence[Parameter], layer_context: LayerContext) -> None:
        super().__init__(weights, layer_context)
        shape = (self.settings.history_steps,)
        self.histories = {
            kind: MaximaHistory(layer_context.tensor.empty(shape, torch.float32).zero_()) for kind in KINDS
        }
        # Version of the maxima, and whether there was a scale in this version.
        self._scales_exist: dict[Kind, tuple[int, bool]] = {}

    @property
    def has_all_scales(self) -> bool:
        """True if there are scales for all three products."""
        return self._has_scales(*KINDS)

    def _has_scales(self, *kinds: Kind) -> bool:
        """Return True if there are scales for these operands.

        While there are none, it waits for the device once per step.
        """
        for kind in kinds:
            maxima = self.histories[kind].maxima
            if self._scales_exist.get(kind, (-1, False))[0] != maxima._version:
                self._scales_exist[kind] = maxima._version, maxima.is_meta or bool(maxima.any())
            if not self._scales_exist[kind][1]:
                return False
        return True

    def _class_for(self, *kinds: Kind) -> type[Matmul]:
        """Return the class that multiplies these operands: in 8 bits only if all have scales."""
        return QuantizedMatmul if self._has_scales(*kinds) else Matmul

    @override
    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        self._record_forward(inputs)
        return self._class_for("inputs", "weights").forward(self, inputs, bias)

    @override
    def input_gradient(self, output_gradient: Operand, out: Tensor | None = None) -> Tensor:
        if isinstance(output_gradient, Tensor):
            self._record("gradients", output_gradient)
        return self._class_for(*KINDS).input_gradient(self, output_gradient, out)

    @override
    def add_weight_gradient(self, output_gradient: Operand, inputs: Operand) -> None:
        if isinstance(output_gradient, Tensor):  # `input_gradient` has recorded it already, if it was called
            self._record("gradients", output_gradient)
        self._class_for(*KINDS).add_weight_gradient(self, output_gradient, inputs)

    @override
    def forward_and_save(
        self, inputs: Tensor, bias: Tensor | None, sequence_group: Group | None, compact: bool
    ) -> tuple[Tensor, Operand]:
        # Inputs are saved in 8 bits only if backward has all scales, or does not need them.
        kinds: tuple[Kind, ...] = KINDS if self.weights[0].requires_grad else ("inputs", "weights")
        matmul_class = self._class_for(*kinds)
        if matmul_class is QuantizedMatmul:  # Matmul calls `forward`, which records them
            self._record_forward(inputs)
        return matmul_class.forward_and_save(self, inputs, bias, sequence_group, compact)

    @override
    def gather_gradient(self, output_gradient: Tensor, sequence_group: Group | None) -> Operand:
        matmul_class = self._class_for(*KINDS)
        if matmul_class is QuantizedMatmul:  # otherwise `input_gradient` and `add_weight_gradient` record it
            self._record("gradients", output_gradient)
        return matmul_class.gather_gradient(self, output_gradient, sequence_group)

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield the kind, shard and values of each history, for checkpoints (`KeepsState`)."""
        for kind, history in self.histories.items():
            shard = Shard.replicated(self.weights[0].shard.name, (len(history.maxima),))
            yield f"{HISTORY_KIND}/{kind}", shard, history.maxima

    def after_update(self, statistics: Mapping[str, Tensor]) -> None:
        """Append the maxima of a completed step. Not called for steps that are skipped."""
        for kind, history in self.histories.items():
            # There is no maximum of gradients if no layer before this one is trained.
            maximum = statistics.get(self._statistic_name(kind))
            if maximum is not None:
                history.append(maximum[0])
        # Operands that had a scale still have one. Recording this avoids another wait for the device.
        kinds = [kind for kind, (_, exists) in self._scales_exist.items() if exists]
        self._scales_exist = {kind: (self.histories[kind].maxima._version, True) for kind in kinds}

    @property
    @override
    def weight_maxima(self) -> Tensor | None:
        # Without all scales, some pass needs weights that are not in 8 bits.
        return self.histories["weights"].largest if self.has_all_scales else None

    @override
    def record_weight_maximum(self, largest: Tensor) -> None:
        self.layer_context.statistics.record_max(self._statistic_name("weights"), reducible_maximum(largest))

    def _maxima(self, kind: Kind, *_: object) -> Tensor:
        return self.histories[kind].largest

    def _record_forward(self, inputs: Tensor) -> None:
        """Record the maxima of the inputs, and of the weights unless owners of gathered slices did so."""
        self._record("inputs", inputs)
        if self._prequantized is None:
            self._record("weights", self.weight())

    def _record(self, kind: Kind, values: Tensor) -> None:
        rows = values.reshape(-1, values.shape[-1])
        padding = self._padding(len(rows)) if kind == "inputs" else None
        largest = block_maxima(rows if padding is None else rows.masked_fill(padding, 0.0), ScaleBlocks())
        self.layer_context.statistics.record_max(
            self._statistic_name(kind), reducible_maximum(largest.reshape(1))
        )

    def _statistic_name(self, kind: Kind) -> str:
        return f"{HISTORY_KIND}/{self.weights[0].shard.name}/{kind}"
