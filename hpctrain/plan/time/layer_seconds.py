"""Seconds of a layer's passes over one micro-batch on one rank, by cause, from the sizes that layers tell.

Causes: `products` with the layer's matrices, the core of `attention`, what is done by `elementwise`,
`recompute` of any of these, and what ranks of the `tensor`, `context` and `expert` axes wait for each other.
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
    """What a layer of a model tells: its kind, whether it is a block, and what it computes. `elements` of its
    parameters that tensor ranks split, that experts' ranks split, and that all ranks have whole, and `shapes`
    of these matrices, experts' or not; `trained` is the share of its matrices that has gradients, and no
    gradient comes to one that is `silent`. `saved` are bytes that autograd saves of a token, see `_saved`;
    `tied_elements` are those of the table that the first and the last layer have in common, which the last
    one uses `tied_uses` times. Where adapters are trained alone, they have `adapting` elements that tensor
    ranks split, and so many that all ranks have; of the first block and what embeds no gradient of the input
    is asked for, which is `unasked`. What the last one computes is without its `modules` of multi-token
    prediction, its elements and bytes are with them.
    """

    kind: LayerKind
    is_block: bool
    hidden: int
    matrices: tuple[MatrixSize, ...]
    core: AttentionSize | None
    elementwise: tuple[ElementwiseSize, ...]
    split_elements: int
    expert_elements: int
    whole_elements: int
    shapes: tuple[tuple[bool, tuple[int, ...]], ...]
    trained: float
    silent: bool
    saved: tuple[tuple[float, float], ...]
    tied_elements: int
    tied_uses: int
    adapting: tuple[int, int] | None = None
    unasked: bool = False
    modules: tuple[LayerSizes, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether it embeds."""
        return not self.is_block and not self.matrices

    @property
    def is_last(self) -> bool:
        """Whether it predicts."""
        return not self.is_block and bool(self.matrices)

    def elements(self, at: LayoutSizes) -> tuple[float, float]:
        """Elements of its parameters on a rank: of experts, and of all else."""
        of_experts = self.expert_elements / (at.expert * at.expert_tensor)
        return of_experts, self.split_elements / at.tensor + self.whole_elements

    def updated(self, at: LayoutSizes) -> tuple[float, float]:
        """Those of them whose gradients are summed, and that are updated."""
        if self.adapting is None:
            return self.elements(at)
        split, whole = self.adapting
        return 0.0, split / at.tensor + whole

    def partial(self, at: LayoutSizes) -> int:
        """Those of them whose gradients tensor ranks have in parts: under sequence parallelism of what each
        has whole, and of adapters ever.
        """
        whole = self.whole_elements if at.sequence_parallel else 0
        return whole if self.adapting is None else self.adapting[1]


@dataclass(frozen=True)
class LayerSeconds:
    """Of one micro-batch in a layer, by cause; a whole backward takes both gradients."""

    forward: Causes
    input_gradient: Causes
    weight_gradient: Causes

    @property
    def total(self) -> float:
        """Of all three."""
        return sum(sum(each.values()) for each in (self.forward, self.input_gradient, self.weight_gradient))


@lru_cache(maxsize=16)
def layer_sizes(shape: ModelShape, frozen: tuple[str, ...] = ()) -> tuple[LayerSizes, ...]:
    """Those of a model's layers, in their order; blocks that are alike are one object."""
    model = bare_model(shape)
    freeze_parameters([model], frozen)
    silent = blocks_without_backward(model)
    found: dict[LayerSizes, LayerSizes] = {}
    unasked = {0, silent + 1} if shape.adapters is not None else set[int]()
    sizes = (
        _sizes(layer, shape, number <= silent, number in unasked) for number, layer in enumerate(model.layers)
    )
    return tuple(found.setdefault(each, each) for each in sizes)


def _sizes(layer: Layer, shape: ModelShape, silent: bool, unasked: bool) -> LayerSizes:
    modules = layer.prediction_modules if isinstance(layer, Predictor) else []
    of_axes = {"tensor": 0, "expert": 0, "none": 0}
    shapes = []
    for parameter in layer.all_parameters:
        axes = parameter.shard.split
        where = "expert" if axes & EXPERT_AXES else "tensor" if axes else "none"
        of_axes[where] += prod(parameter.shard.shape)
        if len(parameter.shard.shape) > 1:
            shapes.append((where == "expert", tuple(parameter.shard.shape)))
    weights = [p for p in {*layer.all_parameters, *layer.added_in_forward} if p.dim() > 1]
    trained = sum(prod(p.shard.shape) for p in weights if p.requires_grad)
    return LayerSizes(
        layer.kind,
        layer.is_block,
        shape.hidden,
        tuple(layer.matrices[sum(len(each.matrices) for each in modules) :]),
        None if modules else layer.core,
        tuple(layer.elementwise[sum(len(each.elementwise) for each in modules) :]),
        of_axes["tensor"],
        of_axes["expert"],
        of_axes["none"],
        tuple(shapes),
        trained / max(1, sum(prod(p.shard.shape) for p in weights)),
        layer.is_block and silent,
        tuple(_saved(layer, itemsize, selective) for itemsize in (2, 4) for selective in (False, True)),
        shape.vocabulary * shape.hidden if shape.table_uses_at_end and not layer.is_block else 0,
        shape.table_uses_at_end,
        None if shape.adapters is None else _adapting(layer),
        unasked,
        tuple(_sizes(each, shape, False, False) for each in modules),
    )


def _adapting(layer: Layer) -> tuple[int, int]:
    trained = [parameter.shard for parameter in layer.all_parameters if parameter.requires_grad]
    split, whole = (
        sum(prod(each.shape) for each in trained if bool(each.split) == cut) for cut in (True, False)
    )
    return split, whole


def _saved(layer: Layer, itemsize: int, selective: bool) -> tuple[float, float]:
    """Bytes of a token that it saves of features which tensor ranks split, and of those that all have unless
    sequences are split too.
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
"""More than a layer has in a step."""


def layer_seconds(layer: LayerSizes, at: LayoutSizes, machine: MachineRates) -> LayerSeconds:
    """Of a layer that is arranged so on a machine. HpctrainError where its figures make that endless."""
    of_layer = _Times(layer, at, machine)
    forward = of_layer.forward()
    _require_finite(machine, forward)
    if layer.silent:
        return LayerSeconds(forward, {}, {})
    gradient, weight = of_layer.input_gradient(), of_layer.weight_gradient()
    _require_finite(machine, gradient | weight)
    if layer.is_last:  # the head's gradients are computed with its losses
        recompute: Recomputed = "selective" if at.recompute == "selective" else "none"
        kept = replace(at, recompute=recompute, activations_home="device")
        passes = [layer_seconds(each, kept, machine) for each in layer.modules]
        return LayerSeconds(
            added(forward, gradient, weight, *(each.forward for each in passes)),
            added(*(each.input_gradient for each in passes)),
            added(*(each.weight_gradient for each in passes)),
        )
    if layer.is_block and at.recompute != "none":
        again = of_layer.core("forward") if at.recompute == "selective" else _sum(forward, of_layer.COMPUTED)
        messages = {} if at.recompute == "selective" else _without(forward, of_layer.COMPUTED)
        gradient = added(gradient, {"recompute": again}, messages)
    if layer.is_block and at.activations_home != "device":
        moving = of_layer.saved() / machine.away(at.activations_home, "memory.activations")
        back = max(0.0, moving - sum(gradient.values()) - sum(weight.values()))
        gradient = added(gradient, {"offload": back})
        forward["offload"] = max(0.0, moving - sum(forward.values()))
    return LayerSeconds(forward, gradient, weight)


def _require_finite(machine: MachineRates, causes: Mapping[str, float]) -> None:
    for cause, seconds in causes.items():
        if not isfinite(seconds * MOST_PASSES):
            sentence = f"{machine.name}: its rates predict {seconds:.3g} s for {cause} of a single layer"
            raise HpctrainError(f"{sentence} (correct the rates)")


class _Times:
    COMPUTED = ("products", "attention", "elementwise")

    def __init__(self, layer: LayerSizes, at: LayoutSizes, machine: MachineRates) -> None:
        self.layer, self.at, self.machine = layer, at, machine
        self.rates = machine.products_of(at.form)
        core = layer.core
        self.largest = 1.0 if core is None else largest_share(core.heads, core.key_value_heads, at.tensor)

    def forward(self) -> dict[str, float]:
        """The whole pass."""
        return self._pass("forward", self._products(0), self.core("forward"), self._sums("forward", 0.0))

    def input_gradient(self) -> dict[str, float]:
        """What backward passes on."""
        products = self._products(1)
        summed = self._sums("backward", self._products(2))
        return self._pass("backward", products, self.core("backward"), summed)

    def weight_gradient(self) -> dict[str, float]:
        """What the optimizer needs."""
        if self.layer.adapting is not None:
            return {"products": self._products(2, [each for each in self.layer.matrices if each.adapter])}
        return {"products": self.layer.trained * self._products(2)}

    def _pass(self, direction: Direction, products: float, core: float, summed: float) -> dict[str, float]:
        elementwise, at = self._elementwise(direction), self.at
        later = self._products(2) if direction == "backward" else 0.0
        waits = self.machine.waits * (products + core + elementwise + later)
        rings = at.context > 1 and self.layer.core is not None and at.tensor == 1
        return {
            "products": products,
            "attention": core,
            "elementwise": elementwise,
            "tensor": summed + waits * (at.tensor > 1),
            "context": self._context(direction, core) + waits * rings,
            "expert": self._experts(),
        }

    def _products(self, turn: int, matrices: Sequence[MatrixSize] | None = None) -> float:
        """Seconds of a pass over all matrices, or these: forward (0), input (1), or weight gradients (2)."""
        total, kind = 0.0, (_LOGITS if self.layer.is_last else _PASSES)[turn]
        for matrix in self.layer.matrices if matrices is None else matrices:
            m, n, k, count = self._shape(matrix)
            sizes = ((m, n, k), (m, k, n), (n, k, m))[turn]
            total += count * (self.rates.seconds(*sizes, kind) + self.machine.launch)
        return total

    def _shape(self, matrix: MatrixSize) -> tuple[float, float, float, float]:
        """Rows, outputs and inputs of a product with a matrix on one rank, and how many such it makes."""
        at, ranks = self.at, self.at.tensor
        rows: float = at.tokens
        count = 1.0
        if matrix.experts > 1:
            ranks = at.expert_tensor
            count = matrix.experts / at.expert
            rows = at.tokens / at.tensor * matrix.experts_per_token * at.expert_tensor / count
        elif matrix.split == "whole" and not matrix.adapter:
            rows = at.tokens / at.tensor  # a router's: of the rows that a rank sends to experts
        elif matrix.split == "replicated":
            rows = at.rows
        largest = self.largest if matrix.by_heads else 1.0
        n = matrix.outputs * largest / ranks if matrix.split == "outputs" else matrix.outputs
        k = matrix.inputs * largest / ranks if matrix.split == "inputs" else matrix.inputs
        if self.layer.is_last:  # logits of some rows at a time
            count, rows = rows / self.machine.logits_at_once(rows, n), self.machine.logits_at_once(rows, n)
        return rows, n, k, count

    def core(self, direction: Direction) -> float:
        """Seconds of queries, keys and values."""
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
        of_one = self.rates.seconds(queries, core.keys, core.head_size)
        scores = heads * queries * core.keys * at.itemsize
        passes = attention.passes or (1.0, 1.0)
        products = (4 if backward else 2) * heads * of_one
        return products + passes[backward] * scores / machine.memory_bandwidth + 4 * machine.launch

    def saved(self) -> float:
        """Bytes that it keeps for backward: what autograd saves, or its input where it is computed again."""
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
            total += self.machine.elements(each.kind, direction, elements, itemsize, at.form)
        return total

    def _sums(self, direction: Direction, hiding: float) -> float:
        """Seconds that tensor ranks wait for what they sum and gather: by sequence parallelism pieces before
        what they split by outputs, sums after what they split by inputs; in backward the other way round, of
        which some may hide behind products that take so long.
        """
        at, machine = self.at, self.machine
        if at.tensor == 1 or (self.layer.is_first and self.layer.unasked and direction == "backward"):
            return 0.0
        hidden = at.tokens * self.layer.hidden * at.itemsize
        gathering = collective_seconds(machine, "all_gather", hidden, at.tensor_ranks)
        scattering = collective_seconds(machine, "reduce_scatter", hidden, at.tensor_ranks)
        summing = collective_seconds(machine, "all_reduce", hidden, at.tensor_ranks)
        dense = [matrix for matrix in self.layer.matrices if matrix.experts == 1 and not matrix.adapter]
        # Latents are shorter than the hidden states that the other layers gather and sum.
        begins = sum(matrix.inputs / self.layer.hidden for matrix in dense if matrix.split == "outputs")
        ends = sum(matrix.split == "inputs" for matrix in dense) + float(self.layer.is_first)
        if any(matrix.experts > 1 for matrix in self.layer.matrices) and not at.sequence_parallel:
            ends += 0.5  # rows that ranks had apart are gathered again
        seen = at.zero == 3 or at.recompute not in {"none", "selective"}
        unasked = self.layer.unasked and direction == "backward" and not seen
        if at.sequence_parallel:
            first, second = (gathering, scattering) if direction == "forward" else (scattering, gathering)
            kept = direction == "forward" or self.layer.is_last
            again = 0.0 if kept else gathering  # of inputs, which no rank keeps whole
            return (begins - unasked) * first + ends * second + self._left(begins * again, hiding)
        if direction == "forward":
            return ends * summing
        return self._left((begins - unasked) * summing, hiding)

    def _left(self, seconds: float, hiding: float) -> float:
        """What of a communication is waited for, beside products that take so long."""
        return max(seconds - self.machine.layer_overlap * hiding, (1 - self.machine.layer_overlap) * seconds)

    def _context(self, direction: Direction, core: float) -> float:
        """Keys and values around a ring, beside the core; or heads for parts of sequences, and back."""
        layer, at, machine = self.layer, self.at, self.machine
        if at.context == 1 or layer.core is None:
            return 0.0
        features = 2 * layer.core.key_value_heads * layer.core.head_size * self.largest / at.tensor
        if at.context_form == "ring":
            size = at.tokens * features * at.itemsize * at.context * (2 if direction == "backward" else 1)
            return self._left(collective_seconds(machine, "all_gather", size, at.context_ranks), core)
        queries = 2 * layer.core.heads * layer.core.head_size * self.largest / at.tensor
        size = at.tokens * (features + queries) * at.itemsize
        return collective_seconds(machine, "all_to_all", size, at.context_ranks)

    def _experts(self) -> float:
        """Rows to their experts and back."""
        at = self.at
        met = max(
            (matrix.experts_per_token for matrix in self.layer.matrices if matrix.experts > 1), default=0
        )
        if not met:
            return 0.0
        rows = at.tokens / at.tensor * met * self.layer.hidden * at.itemsize
        across = 2 * collective_seconds(self.machine, "all_to_all", rows, at.expert_ranks)
        size = rows * at.expert_tensor
        gathered = collective_seconds(self.machine, "all_gather", size, at.expert_tensor_ranks)
        summed = collective_seconds(self.machine, "reduce_scatter", size, at.expert_tensor_ranks)
        return across + gathered + summed


def added(*causes: Causes) -> dict[str, float]:
    """Sums by cause."""
    total: dict[str, float] = {}
    for each in causes:
        for cause, seconds in each.items():
            total[cause] = total.get(cause, 0.0) + seconds
    return total


def times(causes: Causes, factor: float) -> dict[str, float]:
    """All of them so many times."""
    return {cause: seconds * factor for cause, seconds in causes.items()}


def _sum(causes: Causes, names: Iterable[str]) -> float:
    return sum(causes.get(name, 0.0) for name in names)


def _without(causes: Causes, names: Iterable[str]) -> dict[str, float]:
    dropped = set(names)
    return {cause: seconds for cause, seconds in causes.items() if cause not in dropped}
