"""Seconds of the passes of a layer over one micro-batch on one rank, by cause.

Causes are `products` with matrices, the core of `attention`, `elementwise` operations, `recompute` of these,
and waiting for ranks of the `tensor`, `context` and `expert` axes. They follow from sizes that layers report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite, prod

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, total
from hpctrain.costs.layer_bytes.byte_functions import saved_storages
from hpctrain.deck.head_split import HeadSplit
from hpctrain.errors import HpctrainError
from hpctrain.model.construction import bare_model
from hpctrain.model.parameters.frozen import blocks_without_backward, freeze_parameters
from hpctrain.model.part import Layer, LayerKind
from hpctrain.model.shape import ModelShape, Recomputed
from hpctrain.model.transformer import Predictor
from hpctrain.parallel.experts.expert_layer import EXPERT_AXES
from hpctrain.parallel.operations import AttentionSize, ElementwiseSize, MatrixSize
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import Direction, MachineRates, ProductPass, collective_seconds

Causes = Mapping[str, float]
"""Seconds by cause."""

_TOKENS = 1 << 12
_PASSES: tuple[ProductPass, ...] = ("forward", "input_gradient", "weight_gradient")
_LOGITS: tuple[ProductPass, ...] = ("logits", "logits_input_gradient", "logits_weight_gradient")


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer from which its seconds and bytes follow.

    Attributes:
        kind: Kind of the layer.
        is_block: True for a transformer block.
        hidden: Features of the hidden states.
        matrices: Matrices with which it multiplies, without those of `modules`.
        core: Size of the core of attention; None if it has none.
        elementwise: Elementwise operations, without those of `modules`.
        split_elements: Number of parameters that tensor ranks split.
        expert_elements: Number of parameters of experts.
        replicated_elements: Number of parameters that all ranks have.
        shapes: For each matrix, True if it belongs to experts, and its global shape.
        trained: Share of its matrices that have gradients.
        has_no_gradient: True if no gradient reaches the layer.
        saved: Bytes that autograd saves of a token, as `_saved` returns them, by itemsize and recomputation.
        tied_elements: Number of parameters of a table that the embedding and the output layer share.
        tied_uses: Number of times that the output layer uses this table.
        adapter_elements: Numbers of trained parameters that tensor ranks split, and that all ranks have, if
            only adapters are trained; otherwise None.
        needs_no_input_gradient: True if nothing before the layer is trained.
        modules: Modules of multi-token prediction. The elements and bytes of the output layer include theirs.
    """

    kind: LayerKind
    is_block: bool
    hidden: int
    matrices: tuple[MatrixSize, ...]
    core: AttentionSize | None
    elementwise: tuple[ElementwiseSize, ...]
    split_elements: int
    expert_elements: int
    replicated_elements: int
    shapes: tuple[tuple[bool, tuple[int, ...]], ...]
    trained: float
    has_no_gradient: bool
    saved: tuple[tuple[float, float], ...]
    tied_elements: int
    tied_uses: int
    adapter_elements: tuple[int, int] | None = None
    needs_no_input_gradient: bool = False
    modules: tuple[LayerSizes, ...] = ()

    @property
    def is_first(self) -> bool:
        """True for the embedding."""
        return not self.is_block and not self.matrices

    @property
    def is_last(self) -> bool:
        """True for the output layer."""
        return not self.is_block and bool(self.matrices)

    def elements(self, at: LayoutSizes) -> tuple[float, float]:
        """Return the numbers of parameters on a rank: those of experts, and all others."""
        of_experts = self.expert_elements / (at.expert * at.expert_tensor)
        return of_experts, self.split_elements / at.tensor + self.replicated_elements

    def trained_elements(self, at: LayoutSizes) -> tuple[float, float]:
        """Return those of `elements` that are trained."""
        if self.adapter_elements is None:
            return self.elements(at)
        split, whole = self.adapter_elements
        return 0.0, split / at.tensor + whole

    def elements_to_reduce(self, at: LayoutSizes) -> int:
        """Return the number of parameters whose gradients tensor ranks must add.

        These are replicated parameters with sequence parallelism, and always those of adapters.
        """
        whole = self.replicated_elements if at.sequence_parallel else 0
        return whole if self.adapter_elements is None else self.adapter_elements[1]


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a micro-batch in a layer, by cause. A complete backward pass computes both gradients.

    Attributes:
        forward: Seconds of the forward pass.
        input_gradient: Seconds of the input gradients.
        weight_gradient: Seconds of the weight gradients.
    """

    forward: Causes
    input_gradient: Causes
    weight_gradient: Causes

    @property
    def total(self) -> float:
        """Seconds of all passes."""
        return sum(sum(each.values()) for each in (self.forward, self.input_gradient, self.weight_gradient))


@lru_cache(maxsize=16)
def layer_sizes(shape: ModelShape, frozen: tuple[str, ...] = ()) -> tuple[LayerSizes, ...]:
    """Return the sizes of the layers of a model, in their order. Equal layers are the same object."""
    model = bare_model(shape)
    freeze_parameters([model], frozen)
    last_without_gradient = blocks_without_backward(model)
    unique: dict[LayerSizes, LayerSizes] = {}
    needs_no_input_gradient = {0, last_without_gradient + 1} if shape.adapters is not None else set[int]()
    sizes = (
        _sizes(layer, shape, number <= last_without_gradient, number in needs_no_input_gradient)
        for number, layer in enumerate(model.layers)
    )
    return tuple(unique.setdefault(each, each) for each in sizes)


def _sizes(
    layer: Layer, shape: ModelShape, has_no_gradient: bool, needs_no_input_gradient: bool
) -> LayerSizes:
    modules = layer.prediction_modules if isinstance(layer, Predictor) else []
    axis_elements = {"tensor": 0, "expert": 0, "none": 0}
    shapes = []
    for parameter in layer.all_parameters:
        axes = parameter.shard.split
        axis = "expert" if axes & EXPERT_AXES else "tensor" if axes else "none"
        axis_elements[axis] += prod(parameter.shard.shape)
        if len(parameter.shard.shape) > 1:
            shapes.append((axis == "expert", tuple(parameter.shard.shape)))
    weights = [p for p in {*layer.all_parameters, *layer.added_in_forward} if p.dim() > 1]
    trained = sum(prod(p.shard.shape) for p in weights if p.requires_grad)
    return LayerSizes(
        layer.kind,
        layer.is_block,
        shape.hidden,
        tuple(layer.matrices[sum(len(each.matrices) for each in modules) :]),
        None if modules else layer.core,
        tuple(layer.elementwise[sum(len(each.elementwise) for each in modules) :]),
        axis_elements["tensor"],
        axis_elements["expert"],
        axis_elements["none"],
        tuple(shapes),
        trained / max(1, sum(prod(p.shard.shape) for p in weights)),
        layer.is_block and has_no_gradient,
        tuple(_saved(layer, itemsize, selective) for itemsize in (2, 4) for selective in (False, True)),
        shape.vocabulary * shape.hidden if shape.table_uses_at_end and not layer.is_block else 0,
        shape.table_uses_at_end,
        None if shape.adapters is None else _adapter_elements(layer),
        needs_no_input_gradient,
        tuple(_sizes(each, shape, False, False) for each in modules),
    )


def _adapter_elements(layer: Layer) -> tuple[int, int]:
    trained = [parameter.shard for parameter in layer.all_parameters if parameter.requires_grad]
    split, whole = (
        sum(prod(each.shape) for each in trained if bool(each.split) == cut) for cut in (True, False)
    )
    return split, whole


def _saved(layer: Layer, itemsize: int, selective: bool) -> tuple[float, float]:
    """Return the bytes that autograd saves of a token.

    Returns:
        Bytes of features that tensor ranks split, and of those that they split only with sequence
        parallelism.
    """
    features, rows = (
        ActivationSizes(tokens, _TOKENS - tokens, 1, itemsize, itemsize, True, selective)
        for tokens in (_TOKENS, 0)
    )
    return total(saved_storages(layer, features)) / _TOKENS, total(saved_storages(layer, rows)) / _TOKENS


@lru_cache
def largest_share(heads: int, key_value_heads: int, ranks: int) -> float:
    """Return the heads that each rank computes, with padding, as a multiple of an even share."""
    split = HeadSplit.of(heads, key_value_heads, ranks)
    return 1.0 if split.is_even else split.padded_heads[0] * ranks / heads


MOST_PASSES = 1e12
"""Upper bound of the number of passes over a layer in a step."""


def layer_seconds(layer: LayerSizes, at: LayoutSizes, machine: MachineRates) -> LayerSeconds:
    """Return the seconds of a layer on a machine.

    Raises:
        HpctrainError: The rates of the machine predict infinite times.
    """
    layer_times = _LayerTimes(layer, at, machine)
    forward = layer_times.forward()
    _require_finite(machine, forward)
    if layer.has_no_gradient:
        return LayerSeconds(forward, {}, {})
    gradient, weight = layer_times.input_gradient(), layer_times.weight_gradient()
    _require_finite(machine, gradient | weight)
    if layer.is_last:  # the head's gradients are computed with its losses
        recompute: Recomputed = "selective" if at.recompute == "selective" else "none"
        last_layout = replace(at, recompute=recompute, activations_location="device")
        passes = [layer_seconds(each, last_layout, machine) for each in layer.modules]
        return LayerSeconds(
            sum_by_cause(forward, gradient, weight, *(each.forward for each in passes)),
            sum_by_cause(*(each.input_gradient for each in passes)),
            sum_by_cause(*(each.weight_gradient for each in passes)),
        )
    if layer.is_block and at.recompute != "none":
        recomputed = (
            layer_times.attention_seconds("forward")
            if at.recompute == "selective"
            else _sum(forward, layer_times.COMPUTED)
        )
        messages = {} if at.recompute == "selective" else _without(forward, layer_times.COMPUTED)
        gradient = sum_by_cause(gradient, {"recompute": recomputed}, messages)
    if layer.is_block and at.activations_location != "device":
        transfer = layer_times.saved_bytes() / machine.offload_bandwidth(
            at.activations_location, "memory.activations"
        )
        exposed = max(0.0, transfer - sum(gradient.values()) - sum(weight.values()))
        gradient = sum_by_cause(gradient, {"offload": exposed})
        forward["offload"] = max(0.0, transfer - sum(forward.values()))
    return LayerSeconds(forward, gradient, weight)


def _require_finite(machine: MachineRates, causes: Mapping[str, float]) -> None:
    for cause, seconds in causes.items():
        if not isfinite(seconds * MOST_PASSES):
            sentence = f"{machine.name}: its rates predict {seconds:.3g} s for {cause} of a single layer"
            raise HpctrainError(f"{sentence} (correct the rates)")


class _LayerTimes:
    """Seconds of a layer, by pass.

    Args:
        layer: Sizes of the layer.
        at: Sizes of the layout.
        machine: Rates of the machine.
    """

    COMPUTED = ("products", "attention", "elementwise")

    def __init__(self, layer: LayerSizes, at: LayoutSizes, machine: MachineRates) -> None:
        self.layer, self.at, self.machine = layer, at, machine
        self.rates = machine.products_of(at.form)
        core = layer.core
        self.largest = 1.0 if core is None else largest_share(core.heads, core.key_value_heads, at.tensor)

    def forward(self) -> dict[str, float]:
        """Return the seconds of the forward pass."""
        return self._pass(
            "forward",
            self._products(0),
            self.attention_seconds("forward"),
            self._tensor_seconds("forward", 0.0),
        )

    def input_gradient(self) -> dict[str, float]:
        """Return the seconds of the input gradients."""
        products = self._products(1)
        reductions = self._tensor_seconds("backward", self._products(2))
        return self._pass("backward", products, self.attention_seconds("backward"), reductions)

    def weight_gradient(self) -> dict[str, float]:
        """Return the seconds of the weight gradients."""
        if self.layer.adapter_elements is not None:
            return {"products": self._products(2, [each for each in self.layer.matrices if each.adapter])}
        return {"products": self.layer.trained * self._products(2)}

    def _pass(
        self, direction: Direction, products: float, core: float, reductions: float
    ) -> dict[str, float]:
        elementwise, at = self._elementwise(direction), self.at
        later = self._products(2) if direction == "backward" else 0.0
        waits = self.machine.waits * (products + core + elementwise + later)
        waits_in_ring = at.context > 1 and self.layer.core is not None and at.tensor == 1
        return {
            "products": products,
            "attention": core,
            "elementwise": elementwise,
            "tensor": reductions + waits * (at.tensor > 1),
            "context": self._context(direction, core) + waits * waits_in_ring,
            "expert": self._experts(),
        }

    def _products(self, pass_number: int, matrices: Sequence[MatrixSize] | None = None) -> float:
        """Return the seconds of a pass over all matrices, or over the given ones.

        Args:
            pass_number: 0 for the forward pass, 1 for input gradients, 2 for weight gradients.
            matrices: Matrices; None for all.
        """
        total, kind = 0.0, (_LOGITS if self.layer.is_last else _PASSES)[pass_number]
        for matrix in self.layer.matrices if matrices is None else matrices:
            m, n, k, count = self._shape(matrix)
            sizes = ((m, n, k), (m, k, n), (n, k, m))[pass_number]
            total += count * (self.rates.seconds(*sizes, kind) + self.machine.launch)
        return total

    def _shape(self, matrix: MatrixSize) -> tuple[float, float, float, float]:
        """Return rows, outputs and inputs of a product on one rank, and the number of such products."""
        at, ranks = self.at, self.at.tensor
        rows: float = at.tokens
        count = 1.0
        if matrix.experts > 1:
            ranks = at.expert_tensor
            count = matrix.experts / at.expert
            rows = at.tokens / at.tensor * matrix.experts_per_token * at.expert_tensor / count
        elif matrix.split == "whole" and not matrix.adapter:
            rows = at.tokens / at.tensor  # a router multiplies the rows that a rank sends to experts
        elif matrix.split == "replicated":
            rows = at.rows
        largest = self.largest if matrix.by_heads else 1.0
        n = matrix.outputs * largest / ranks if matrix.split == "outputs" else matrix.outputs
        k = matrix.inputs * largest / ranks if matrix.split == "inputs" else matrix.inputs
        if self.layer.is_last:  # logits of some rows at a time
            count, rows = rows / self.machine.logits_at_once(rows, n), self.machine.logits_at_once(rows, n)
        return rows, n, k, count

    def attention_seconds(self, direction: Direction) -> float:
        """Return the seconds of the products of queries, keys and values."""
        core, at, machine = self.layer.core, self.at, self.machine
        if core is None:
            return 0.0
        flops = core.kernel_flops * self.largest / at.tensor * at.tokens
        backward = direction == "backward"
        attention = machine.attention_of(at.form)
        rate = attention.backward if backward else attention.forward
        if rate is not None:
            features = core.heads * core.head_size * self.largest / at.tensor * at.tokens
            features *= attention.features[backward]
            return machine.launch + flops * (2.0 if backward else 1.0) / rate + features
        heads = core.heads * self.largest / at.tensor * at.micro_size
        queries = core.sequence / at.context
        product_seconds = self.rates.seconds(queries, core.keys, core.head_size)
        scores = heads * queries * core.keys * at.itemsize
        passes = attention.passes or (1.0, 1.0)
        products = (4 if backward else 2) * heads * product_seconds
        return products + passes[backward] * scores / machine.memory_bandwidth + 4 * machine.launch

    def saved_bytes(self) -> float:
        """Return the bytes that the layer saves for its backward pass: only its input if it is recomputed."""
        layer, at = self.layer, self.at
        if at.recompute not in {"none", "selective"}:
            blocks = at.recompute if isinstance(at.recompute, int) else 1
            return at.rows * layer.hidden * at.itemsize / blocks
        split, whole = layer.saved[2 * (at.itemsize == 4) + (at.recompute == "selective")]
        return at.tokens * split / at.tensor + at.rows * whole

    def _elementwise(self, direction: Direction) -> float:
        at, total = self.at, 0.0
        for each in self.layer.elementwise:
            elements = at.tokens * each.features / at.tensor if each.split else at.rows * each.features
            itemsize = 4 if each.kind == "loss" else at.itemsize
            total += self.machine.elementwise_seconds(each.kind, direction, elements, itemsize, at.form)
        return total

    def _tensor_seconds(self, direction: Direction, hiding: float) -> float:
        """Return the seconds for which tensor ranks wait for reductions and gathers.

        With sequence parallelism, they gather before matrices that are split by outputs, and reduce-scatter
        after those that are split by inputs. Without, they reduce after the latter. The backward pass is the
        reverse.

        Args:
            direction: Direction of the pass.
            hiding: Seconds of products that may overlap.
        """
        at, machine = self.at, self.machine
        if at.tensor == 1 or (
            self.layer.is_first and self.layer.needs_no_input_gradient and direction == "backward"
        ):
            return 0.0
        hidden = at.tokens * self.layer.hidden * at.itemsize
        gathering = collective_seconds(machine, "all_gather", hidden, at.tensor_ranks)
        scattering = collective_seconds(machine, "reduce_scatter", hidden, at.tensor_ranks)
        summing = collective_seconds(machine, "all_reduce", hidden, at.tensor_ranks)
        dense = [matrix for matrix in self.layer.matrices if matrix.experts == 1 and not matrix.adapter]
        # Latents are shorter than the hidden states that the other layers gather and sum.
        inputs_gathered = sum(
            matrix.inputs / self.layer.hidden for matrix in dense if matrix.split == "outputs"
        )
        outputs_reduced = sum(matrix.split == "inputs" for matrix in dense) + float(self.layer.is_first)
        if any(matrix.experts > 1 for matrix in self.layer.matrices) and not at.sequence_parallel:
            outputs_reduced += 0.5  # the rows of the ranks are gathered again
        needs_input = at.zero == 3 or at.recompute not in {"none", "selective"}
        needs_no_input_gradient = (
            self.layer.needs_no_input_gradient and direction == "backward" and not needs_input
        )
        if at.sequence_parallel:
            first, second = (gathering, scattering) if direction == "forward" else (scattering, gathering)
            keeps_input = direction == "forward" or self.layer.is_last
            gathering_again = 0.0 if keeps_input else gathering  # no rank keeps complete inputs
            return (
                (inputs_gathered - needs_no_input_gradient) * first
                + outputs_reduced * second
                + self._exposed(inputs_gathered * gathering_again, hiding)
            )
        if direction == "forward":
            return outputs_reduced * summing
        return self._exposed((inputs_gathered - needs_no_input_gradient) * summing, hiding)

    def _exposed(self, seconds: float, hiding: float) -> float:
        """Return the seconds of a communication that products of `hiding` seconds do not hide."""
        return max(seconds - self.machine.layer_overlap * hiding, (1 - self.machine.layer_overlap) * seconds)

    def _context(self, direction: Direction, core: float) -> float:
        """Return the seconds of context parallelism.

        Ranks pass keys and values around a ring, or exchange heads for parts of sequences.
        """
        layer, at, machine = self.layer, self.at, self.machine
        if at.context == 1 or layer.core is None:
            return 0.0
        features = 2 * layer.core.key_value_heads * layer.core.head_size * self.largest / at.tensor
        if at.context_form == "ring":
            size = at.tokens * features * at.itemsize * at.context * (2 if direction == "backward" else 1)
            return self._exposed(collective_seconds(machine, "all_gather", size, at.context_ranks), core)
        queries = 2 * layer.core.heads * layer.core.head_size * self.largest / at.tensor
        size = at.tokens * (features + queries) * at.itemsize
        return collective_seconds(machine, "all_to_all", size, at.context_ranks)

    def _experts(self) -> float:
        """Return the seconds of the exchange with experts."""
        at = self.at
        experts_per_token = max(
            (matrix.experts_per_token for matrix in self.layer.matrices if matrix.experts > 1), default=0
        )
        if not experts_per_token:
            return 0.0
        rows = at.tokens / at.tensor * experts_per_token * self.layer.hidden * at.itemsize
        exchange = 2 * collective_seconds(self.machine, "all_to_all", rows, at.expert_ranks)
        size = rows * at.expert_tensor
        gathered = collective_seconds(self.machine, "all_gather", size, at.expert_tensor_ranks)
        reduced = collective_seconds(self.machine, "reduce_scatter", size, at.expert_tensor_ranks)
        return exchange + gathered + reduced


def sum_by_cause(*causes: Causes) -> dict[str, float]:
    """Return the sums by cause."""
    total: dict[str, float] = {}
    for each in causes:
        for cause, seconds in each.items():
            total[cause] = total.get(cause, 0.0) + seconds
    return total


def scale_causes(causes: Causes, factor: float) -> dict[str, float]:
    """Return the seconds multiplied by a factor."""
    return {cause: seconds * factor for cause, seconds in causes.items()}


def _sum(causes: Causes, names: Iterable[str]) -> float:
    return sum(causes.get(name, 0.0) for name in names)


def _without(causes: Causes, names: Iterable[str]) -> dict[str, float]:
    dropped = set(names)
    return {cause: seconds for cause, seconds in causes.items() if cause not in dropped}
