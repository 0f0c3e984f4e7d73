"""The products of a layer's matrix in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.parallel.fp8.formats import E4M3, E5M2, Fp8Format, agreed_maximum
from hpctrain.parallel.fp8.gather import gathered, start_gather
from hpctrain.parallel.fp8.history import HISTORY_KIND, History
from hpctrain.parallel.fp8.multiply import multiply_quantized
from hpctrain.parallel.fp8.quantization_loss import operand_name, record_counts, record_loss
from hpctrain.parallel.fp8.quantize import QuantizedTensor, ScaleBlocks, Scaling, block_maxima
from hpctrain.parallel.fp8.recipes import ScalingRecipe
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul, Operand, QuantizedRows
from hpctrain.parallel.product_audit.matmul_audit import INPUT_GRADIENT
from hpctrain.parallel.shards import Parameter, Shard

Kind = Literal["inputs", "weights", "gradients"]
"""What is quantized; gradients are those of the output."""

KINDS: tuple[Kind, ...] = ("inputs", "weights", "gradients")

Dims = tuple[Literal["tokens", "inputs", "outputs"], Literal["tokens", "inputs", "outputs"]]
"""Of what a matrix has its rows, and its columns: tokens m, input features k or output features n."""

_INPUTS: Dims = ("tokens", "inputs")
_GRADIENTS: Dims = ("tokens", "outputs")

WEIGHTS: Dims = ("outputs", "inputs")
TURNED_WEIGHTS: Dims = ("inputs", "outputs")
"""How the weights lie for the output, and for the gradient of the input."""


class PrequantizedWeights(NamedTuple):
    """Weights [n, k] that came in 8 bits, with one scale; in steps that are watched also what those that this
    rank owns of them have lost, see `lost`.
    """

    found: QuantizedTensor
    counts: Tensor | None


class QuantizedMatmul(Matmul):
    """All three products are of matrices in 8 bits, scaled by a `recipe`, each made of high precision.

    What is kept of inputs for backward is in 8 bits, as the product for the weight's gradient takes it. With
    `messages` pieces of tokens travel in 8 bits where these are what is multiplied: inputs in forward, and
    gradients of the output where both of their products have the same numbers.
    Inputs and weights are in E4M3, gradients of the output in `gradient_form`. Where a scale is of what
    several ranks have parts of, it follows from the maximum over these, in each product (collective): context
    ranks have tokens of their own, tensor ranks features. It is not for a head: logits stay as stored.
    """

    def __init__(
        self,
        weights: Sequence[Parameter],
        groups: LayerContext,
        recipe: ScalingRecipe,
        gradient_form: Fp8Format = E5M2,
        messages: bool = False,
    ) -> None:
        super().__init__(weights, groups)
        self.recipe, self.gradient_form, self.messages = recipe, gradient_form, messages
        self._known_weights: dict[Dims, Tensor] = {}
        self._given: PrequantizedWeights | None = None

    @override
    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._forward(self._quantized("inputs", _rows(inputs), _INPUTS), inputs, bias)

    def forward_and_save(
        self, inputs: Tensor, bias: Tensor | None, pieces: Group | None, compact: bool
    ) -> tuple[Tensor, Operand]:
        """See Matmul: in 8 bits is kept what the weight's gradient multiplies.

        Where one scale is that of both products, these are the values that were multiplied, or else others,
        which are made of the inputs here instead of in backward.
        """
        rows, dims = _rows(inputs), _INPUTS
        if self.messages and pieces is not None:
            own = self._quantized("inputs", rows, dims, in_pieces=True)
            whole = gathered(own, pieces)
        else:
            together = rows if pieces is None else pieces.all_gather(rows)
            own = whole = self._quantized("inputs", together, dims)
            if pieces is not None and self.one_scale:
                own = replace(whole, values=whole.values.chunk(pieces.size)[pieces.rank].clone())
        output = self._forward(whole, inputs, bias)
        if not compact or not self._is_exact(len(rows), pieces):
            return output, inputs
        if not self.one_scale:
            own = self._quantized("inputs", rows, dims, pieces is not None, transposed=True)
        return output, QuantizedRows(own.values, own.scales)

    @override
    def kept(self, rows: int, at: ActivationSizes, pieces: Group | None) -> list[SavedStorage]:
        if not self._is_exact(rows, pieces):
            return super().kept(rows, at, pieces)
        features = self.weights[0].shard.local[1]
        scaling = self.recipe.tokens.transposed
        below, beside = scaling.blocks.counts((rows, features))
        size = 1 if scaling.as_bytes else 4
        return [SavedStorage(rows * features, 1, False), SavedStorage(below * beside * size, size, False)]

    @override
    def start_gather_saved(
        self, kept: Operand, pieces: Group, blocking: bool = False
    ) -> Callable[[], Operand]:
        if isinstance(kept, Tensor):
            return super().start_gather_saved(kept, pieces, blocking)
        finish = start_gather(self._kept_rows(kept), pieces, blocking)

        def coming() -> QuantizedRows:
            whole = finish()
            return QuantizedRows(whole.values, whole.scales)

        return coming

    def gather_gradient(self, output_gradient: Tensor, pieces: Group | None) -> Operand:
        """See Matmul: in 8 bits, where one scale is that of both products."""
        if not self.one_scale:
            return super().gather_gradient(output_gradient, pieces)
        rows, dims = _rows(output_gradient), _GRADIENTS
        if self.messages and pieces is not None:
            whole = gathered(self._quantized("gradients", rows, dims, in_pieces=True), pieces)
        else:
            rows = rows if pieces is None else pieces.all_gather(rows)
            whole = self._quantized("gradients", rows, dims)
        return QuantizedRows(whole.values, whole.scales)

    @override
    def gradient_bytes(self, rows: int, at: ActivationSizes) -> int:
        whole = super().gradient_bytes(rows, at)
        return whole // at.itemsize + 4 if self.one_scale else whole

    def passing(self, rows: int, at: ActivationSizes) -> int:
        """See Matmul: both operands in 8 bits, and expanded, unless the device multiplies them as they are;
        and the gradient of the weight, which is added whole.
        """
        outputs, features = sum(w.shard.local[0] for w in self.weights), self.weights[0].shard.local[1]
        native = at.gpu and self.recipe.tokens.blocks.columns is None
        sizes = rows * features, rows * outputs, outputs * features
        inputs, gradients, weights = sizes
        of_sum = 0 if native else min(4, at.gradient_itemsize)
        as_stored = 0 if native else at.itemsize
        added = (1 + of_sum) * (inputs + gradients) + at.gradient_itemsize * weights
        return max(added, (1 + as_stored) * (max(inputs, gradients) + weights))

    @override
    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        left = self._quantized("gradients", _rows(output_gradient), _GRADIENTS)
        gradient = self._input_gradient(left, output_gradient.dtype).view(*output_gradient.shape[:-1], -1)
        return gradient if out is None else out.copy_(gradient)

    @override
    def input_gradient_of(self, output_gradient: Operand) -> Tensor:
        if isinstance(output_gradient, Tensor):
            return self.input_gradient(output_gradient)
        return self._input_gradient(QuantizedTensor(*output_gradient, ScaleBlocks()), self.weights[0].dtype)

    @override
    def add_weight_gradient(self, output_gradient: Tensor, inputs: Tensor) -> None:
        left = self._quantized("gradients", _rows(output_gradient), _GRADIENTS, transposed=True)
        right = self._quantized("inputs", _rows(inputs), _INPUTS, transposed=True)
        self._add(left, right)

    @override
    def add_weight_gradient_of(self, output_gradient: Operand, kept: Operand) -> None:
        if isinstance(output_gradient, Tensor):
            left = self._quantized("gradients", _rows(output_gradient), _GRADIENTS, transposed=True)
        else:
            left = QuantizedTensor(*output_gradient, ScaleBlocks())
        if isinstance(kept, Tensor):
            right = self._quantized("inputs", _rows(kept), _INPUTS, transposed=True)
        else:
            right = self._kept_rows(kept)
        self._add(left, right)

    @property
    def one_scale(self) -> bool:
        """Whether rows of tokens have one scale, so that transposed ones are the same numbers."""
        return self.recipe.tokens.blocks == ScaleBlocks()

    def _forward(self, left: QuantizedTensor, inputs: Tensor, bias: Tensor | None) -> Tensor:
        right = self._weights(WEIGHTS)
        output = multiply_quantized(left, right, inputs.dtype)
        self._audit(left, right, output, "product")
        output = output.view(-1, *inputs.shape[1:-1], len(right.values))
        return output if bias is None else output.add_(bias)

    def _input_gradient(self, left: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        right = self._weights(TURNED_WEIGHTS)
        output = multiply_quantized(left, right, dtype)
        self._audit(left, right, output, INPUT_GRADIENT)
        return output

    def _audit(self, left: QuantizedTensor, right: QuantizedTensor, output: Tensor, what: str) -> None:
        """Check a product of rows with weights as they are multiplied, where it is to be."""
        audit, key = self.groups.audit, (self.weights[0], what)
        if audit is not None and audit.active:
            matrix = right.values if audit.knows(key) else right.dequantized()
            audit.product(self.weights, key, left.dequantized(), matrix, output, what=what)

    def _weights(self, dims: Dims) -> QuantizedTensor:
        """The weights that lie so."""
        if self._given is None:
            matrix = self.weight()
            return self._quantized("weights", matrix if dims == WEIGHTS else matrix.t(), dims)
        (found, counts), maxima = self._given, self.weight_maxima
        assert maxima is not None
        if counts is not None:
            name = operand_name(self.weights[0].shard.name, "weights", " ".join(dims))
            record_counts(self.groups.statistics, name, counts, maxima, found)
        return found if dims == WEIGHTS else found.transposed()

    def _add(self, left: QuantizedTensor, right: QuantizedTensor) -> None:
        """Gradient [m, n] and inputs [m, k], by blocks of tokens."""
        gradient, first = self.gradient()
        audit, key = self.groups.audit, self.weights[0]
        audit = audit if audit is not None and audit.active else None
        if audit is not None:
            # What GPUs add up of 8 bits has few more than 16.
            rounded = None if gradient.is_cpu else torch.bfloat16
            operands = left.dequantized(), right.dequantized()
            audit.adding(self.weights, key, *operands, gradient, first, rounded)
        product = multiply_quantized(left.transposed(), right.transposed(), gradient.dtype)
        if first:
            gradient.copy_(product)
        else:
            gradient.add_(product)
        if audit is not None:
            audit.added(key)

    def _is_exact(self, rows: int, pieces: Group | None) -> bool:
        """Whether no block of what is kept of so many rows lies in two pieces."""
        below = self.recipe.tokens.transposed.blocks.rows
        return pieces is None or below is None or rows % below == 0

    def _kept_rows(self, kept: QuantizedRows) -> QuantizedTensor:
        return QuantizedTensor(*kept, self.recipe.tokens.transposed.blocks)

    @property
    def weight_dims(self) -> tuple[Dims, ...]:
        """How weights lie whose maxima are worth knowing before: one is of both, or ranks share them."""
        scaling, group = self.recipe.weights, self.groups.tensor
        if self.one_scale:
            return (WEIGHTS,)
        lying = (WEIGHTS, TURNED_WEIGHTS)
        return tuple(dims for dims in lying if group.size > 1 and self._holders(scaling, dims, False))

    @property
    def gathered(self) -> bool:
        """Whether weights that ranks have slices of are gathered in 8 bits."""
        return self.groups.fp8 is not None and self.groups.fp8.gather

    @property
    def weight_maxima(self) -> Tensor | None:
        """The largest magnitude of weights that have one scale, [1, 1], where it is known without them."""
        if self.weights[0].is_meta:  # a plan, in which nothing is known, and everything would be
            return self.weights[0].new_empty((1, 1), dtype=torch.float32)
        return self._known_weights.get(WEIGHTS)

    def set_prequantized(self, given: PrequantizedWeights | None) -> None:
        """Multiply these in 8 bits, as if made here, as long as there are no others; None: there are."""
        self._given = given

    def record_weight_maximum(self, largest: Tensor) -> None:
        """Note, where steps to come need it, the largest magnitude [1] of those that this rank owns."""

    def local_weight_maxima(self, dims: Dims) -> Tensor:
        """The maxima of this rank's part of the weights, which are there."""
        return self.recipe.weights.maxima(self.weight() if dims == WEIGHTS else self.weight().t())

    def set_weight_maxima(self, dims: Dims, maxima: Tensor) -> None:
        """Take the maxima of all ranks for those of the weights that lie so, until they are forgotten."""
        self._known_weights[dims] = maxima
        if self.one_scale:
            self._known_weights[TURNED_WEIGHTS] = maxima

    def clear_weight_maxima(self) -> None:
        """The weights may change."""
        self._known_weights.clear()

    def _quantized(
        self, kind: Kind, matrix: Tensor, dims: Dims, in_pieces: bool = False, transposed: bool = False
    ) -> QuantizedTensor:
        """Quantize a matrix for the product along its columns, or, `transposed`, for that along its rows.

        `in_pieces` says that the matrix is a piece of the tokens on the tensor axis. Inputs are zero where
        tokens are padding, so that no scale of real tokens depends on what fills rows up.
        """
        padding = None if kind == "weights" else self._padding(len(matrix))
        if padding is not None and kind == "inputs":
            matrix = matrix.masked_fill(padding, 0.0)
        scaling = self.recipe.weights if kind == "weights" else self.recipe.tokens
        scaling = scaling.transposed if transposed else scaling
        form = self.gradient_form if kind == "gradients" else E4M3
        maxima = self._maxima(kind, scaling, matrix, dims, in_pieces)
        found = scaling.quantized(matrix, form, maxima)
        use = " ".join(dims[::-1] if transposed else dims)
        name = operand_name(self.weights[0].shard.name, kind, use)
        record_loss(self.groups.statistics, name, matrix, maxima, found, padding)
        return found

    def _padding(self, rows: int) -> Tensor | None:
        """Return which rows of tokens are padding, bool [rows, 1], or None if there is none.

        `rows` are those of all tokens of the rank's micro-batch, or of this rank's piece on the tensor axis.
        """
        padding = self.groups.statistics.padding
        if padding is None:
            return None
        flat, tensor = padding.flatten(), self.groups.tensor
        if len(flat) != rows:
            flat = flat.chunk(tensor.size)[tensor.rank]
        assert len(flat) == rows, (padding.shape, rows)
        return flat.unsqueeze(1)

    def _maxima(
        self,
        kind: Kind,
        scaling: Scaling,
        matrix: Tensor,
        dims: Dims,
        in_pieces: bool,
    ) -> Tensor:
        """The maxima of all that shares a scale."""
        if kind == "weights" and dims in self._known_weights:
            return self._known_weights[dims]
        maxima = agreed_maximum(scaling.maxima(matrix))
        holders = self._holders(scaling, dims, in_pieces)
        return maxima if holders is None or holders.size == 1 else holders.all_reduce(maxima, "max")

    def _holders(self, scaling: Scaling, dims: Dims, in_pieces: bool) -> Group | None:
        """The ranks that have parts of what shares a scale: of dims that a block has whole, a rank not."""
        whole = {dim for dim, size in zip(dims, scaling.blocks, strict=True) if size is None}
        split = {
            dim
            for dim, number in (("outputs", 0), ("inputs", 1))
            if any(weight.shard.local[number] != weight.shard.shape[number] for weight in self.weights)
        }
        if "tokens" in whole:
            return self.groups.micro_batch if whole & split or in_pieces else self.groups.context
        return self.groups.tensor if whole & split else None


class DelayedMatmul(QuantizedMatmul):
    """As QuantizedMatmul, by scales that follow from the largest of the maxima of `steps` steps before.

    All ranks agree on a step's maxima once, after it, so that what it does with micro-batches, in whatever
    order or again, is done with the same scales. As long as nothing is known of what a pass multiplies, be
    it that all of it was zero, that pass is as stored: forward needs inputs and weights, backward all three.
    """

    def __init__(
        self,
        weights: Sequence[Parameter],
        groups: LayerContext,
        recipe: ScalingRecipe,
        steps: int,
        gradient_form: Fp8Format = E5M2,
        messages: bool = False,
    ) -> None:
        super().__init__(weights, groups, recipe, gradient_form, messages)
        self.histories = {
            kind: History(groups.tensor.empty((steps,), torch.float32).zero_()) for kind in KINDS
        }
        self._known: dict[Kind, tuple[int, bool]] = {}  # as of a version of its maxima

    @property
    def known(self) -> bool:
        """Whether there are scales for all three products."""
        return self._knows(*KINDS)

    def _knows(self, *kinds: Kind) -> bool:
        """Whether there are scales of these. Waits for the device, once a step, as long as there are none."""
        for kind in kinds:
            maxima = self.histories[kind].maxima
            if self._known.get(kind, (-1, False))[0] != maxima._version:
                self._known[kind] = maxima._version, maxima.is_meta or bool(maxima.any())
            if not self._known[kind][1]:
                return False
        return True

    @override
    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        self._note("inputs", inputs)
        self._note_whole_weights()
        if not self._knows("inputs", "weights"):
            return Matmul.forward(self, inputs, bias)
        return super().forward(inputs, bias)

    @override
    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        self._note("gradients", output_gradient)
        if not self.known:
            return Matmul.input_gradient(self, output_gradient, out)
        return super().input_gradient(output_gradient, out)

    @override
    def add_weight_gradient(self, output_gradient: Tensor, inputs: Tensor) -> None:
        self._note("gradients", output_gradient)  # again, unless nothing asks for the input's gradient
        if not self.known:
            Matmul.add_weight_gradient(self, output_gradient, inputs)
        else:
            super().add_weight_gradient(output_gradient, inputs)

    def forward_and_save(
        self, inputs: Tensor, bias: Tensor | None, pieces: Group | None, compact: bool
    ) -> tuple[Tensor, Operand]:
        """See Matmul: in 8 bits is kept what backward has all scales for, or has no use for."""
        trained = self.weights[0].requires_grad
        if not (self.known if trained else self._knows("inputs", "weights")):
            return Matmul.forward_and_save(self, inputs, bias, pieces, compact)
        self._note("inputs", inputs)
        self._note_whole_weights()
        return super().forward_and_save(inputs, bias, pieces, compact)

    @override
    def gather_gradient(self, output_gradient: Tensor, pieces: Group | None) -> Operand:
        if not self.known:
            return Matmul.gather_gradient(self, output_gradient, pieces)
        self._note("gradients", output_gradient)
        return super().gather_gradient(output_gradient, pieces)

    @override
    def add_weight_gradient_of(self, output_gradient: Operand, kept: Operand) -> None:
        if not self.known:
            Matmul.add_weight_gradient_of(self, output_gradient, kept)
        else:
            super().add_weight_gradient_of(output_gradient, kept)

    def kept(self, rows: int, at: ActivationSizes, pieces: Group | None) -> list[SavedStorage]:
        """See Matmul: most in the steps in which nothing is known."""
        return Matmul.kept(self, rows, at, pieces)

    def gradient_bytes(self, rows: int, at: ActivationSizes) -> int:
        """Return the bytes of the saved operands in the step in which they need most memory."""
        return Matmul.gradient_bytes(self, rows, at)

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """See KeepsState: the maxima of each kind, the newest first."""
        for kind, history in self.histories.items():
            shard = Shard.whole(self.weights[0].shard.name, (len(history.maxima),))
            yield f"{HISTORY_KIND}/{kind}", shard, history.maxima

    def after_update(self, statistics: Mapping[str, Tensor]) -> None:
        """Use the statistics that all ranks have recorded in a step, fp64. Not called for skipped steps."""
        for kind, history in self.histories.items():
            maximum = statistics.get(
                self._noted_name(kind)
            )  # none of gradients where nothing before is trained
            if maximum is not None:
                history.remember(maximum[0])
        # What is known once stays so, and is not to be asked for again.
        known = [kind for kind, (_, is_known) in self._known.items() if is_known]
        self._known = {kind: (self.histories[kind].maxima._version, True) for kind in known}

    @property
    def weight_maxima(self) -> Tensor | None:
        """See QuantizedMatmul: no pass may need others than come in 8 bits."""
        return self.histories["weights"].largest if self.known else None

    @override
    def record_weight_maximum(self, largest: Tensor) -> None:
        self.groups.statistics.record_max(self._noted_name("weights"), agreed_maximum(largest))

    def _maxima(self, kind: Kind, *_: object) -> Tensor:
        return self.histories[kind].largest

    def _note_whole_weights(self) -> None:
        """Unless they came in 8 bits: then their owners have noted them."""
        if self._given is None:
            self._note("weights", self.weight())

    def _note(self, kind: Kind, values: Tensor) -> None:
        rows = _rows(values)
        padding = self._padding(len(rows)) if kind == "inputs" else None
        largest = block_maxima(rows if padding is None else rows.masked_fill(padding, 0.0), ScaleBlocks())
        self.groups.statistics.record_max(self._noted_name(kind), agreed_maximum(largest.reshape(1)))

    def _noted_name(self, kind: Kind) -> str:
        return f"{HISTORY_KIND}/{self.weights[0].shard.name}/{kind}"


def _rows(values: Tensor) -> Tensor:
    """[..., features] as a matrix."""
    return values.reshape(-1, values.shape[-1])
