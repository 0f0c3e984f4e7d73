"""Rates of operations other than matrix products: the core of attention, and elementwise operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.mesh import AXES
from hpctrain.comm.planned import PlannedMesh
from hpctrain.deck.activations import ACTIVATIONS, Activation
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.choices.function_choice import choose_functions, functions_of
from hpctrain.model.attention.rotary import Rotary, RotaryFrequencies
from hpctrain.model.construction import build_parts
from hpctrain.model.part import LayerRange
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs, rotate
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.layer_functions import LayerFunctions
from hpctrain.parallel.kernels.logits import SplitLogits
from hpctrain.parallel.operations import ElementwiseKind
from hpctrain.parallel.vocabulary import VocabularyHead, chunk_rows
from hpctrain.plan.calibrate.calibration_decks import variants
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.calibrate.operand_pool import OperandPool
from hpctrain.plan.calibrate.rate_fit import fit_attention
from hpctrain.plan.time.machine_rates import AttentionRates

_SHORT = 64
"""Tokens of the shortest sequence that is also measured in quarters."""

_ELEMENTS = 4 << 20
"""Elements of operands that are used in turn."""


def measure_attention(decks: Sequence[Deck], clock: Clock) -> AttentionRates:
    """Return the rates of attention in the format of the decks. Collective.

    Their sequences and shorter ones are measured.
    """
    times = []
    device = clock.world.device
    for deck in decks:
        functions = functions_of(choose_functions(deck, clock.world), device)
        for variant, tokens, tensor in variants(deck, clock.world.size):
            shape = ModelShape.of(variant, variant.model.vocabulary or 1)
            heads = shape.heads // tensor
            features = tokens * heads * shape.head_size
            queries = OperandPool(Precision.of(deck).product, device, 3 * features)
            for sequence in _lengths(variant.batch.sequence):
                sizes = sequence, tokens // sequence, heads, shape.head_size
                run = partial(_attend, functions, queries, sizes, clock)
                forward, backward = clock.mean_seconds("attention", run)
                times.append((4.0 * features * sequence, float(features), forward, backward))
    return fit_attention(times)


def _lengths(sequence: int) -> list[int]:
    """Return the lengths of sequences to measure: the given one, and a quarter of it."""
    return [sequence, sequence // 4] if sequence % 4 == 0 and sequence >= _SHORT else [sequence]


def _attend(
    functions: LayerFunctions, operands: OperandPool, sizes: tuple[int, int, int, int], clock: Clock
) -> tuple[float, float]:
    sequence, batch, heads, size = sizes
    inner = operands.take(sequence, batch, 3 * heads * size).detach().requires_grad_()
    parts = [part.unflatten(-1, (heads, size)) for part in inner.split(heads * size, dim=-1)]
    gradient = operands.take(*sizes)
    inputs, rule = AttentionInputs(*parts), AttentionRule(size**-0.5)
    return _both(lambda: functions.attend(inputs, rule), gradient, clock)


def measure_elementwise(decks: Sequence[Deck], clock: Clock) -> dict[ElementwiseKind, tuple[float, float]]:
    """Return the seconds per output element of each operation, forward and backward. Collective."""
    seconds_by_kind: dict[ElementwiseKind, list[Sequence[float]]] = {}
    for deck in decks:
        rows = deck.batch.micro_size * deck.batch.sequence
        operations = _ElementwiseOperations(choose_functions(deck, clock.world), rows, clock)
        for kind, (elements, run) in operations.all().items():
            seconds = clock.mean_seconds("elementwise", run)
            seconds_by_kind.setdefault(kind, []).append([each / elements for each in seconds])
    return {
        kind: (fmean(each[0] for each in rows), fmean(each[1] for each in rows))
        for kind, rows in seconds_by_kind.items()
    }


class _ElementwiseOperations:
    """Elementwise operations of a deck, on a number of rows of tokens.

    Each method returns seconds, forward and backward.
    """

    def __init__(self, deck: Deck, rows: int, clock: Clock) -> None:
        assert deck.model.vocabulary is not None
        self.deck, self.rows, self.clock = deck, rows, clock
        self.shape = ModelShape.of(deck, deck.model.vocabulary)
        self.device, self.dtype = clock.world.device, Precision.of(deck).storage
        self.functions = functions_of(deck, self.device)
        widest = rows * max(2 * self.shape.mlp, self.shape.hidden)
        self.operands = OperandPool(self.dtype, self.device, max(widest, _ELEMENTS))

    def all(self) -> Mapping[ElementwiseKind, tuple[int, Callable[[], tuple[float, float]]]]:
        """Return the number of output elements and the measurement of each operation."""
        hidden, mlp = self.rows * self.shape.hidden, self.rows * self.shape.mlp
        return {
            "norm": (hidden, self.norm),
            "add": (hidden, self.add),
            "activation": (mlp, self.activation),
            "gate": (mlp, self.gate),
            "rotation": (hidden, self.rotation),
            "loss": (self._chunk * self.shape.vocabulary, self.loss()),
            "lookup": (hidden, self.lookup),
        }

    def norm(self) -> tuple[float, float]:
        """Measure LayerNorm or RMSNorm."""
        size = (self.shape.hidden,)
        weight, x = (self.operands.take(*each).detach().requires_grad_() for each in (size, self._hidden))
        if self.shape.norm == "layer":
            bias = self.operands.take(*size).detach().requires_grad_()
            normed: Callable[[], Tensor] = lambda: functional.layer_norm(x, size, weight, bias)  # noqa: E731
        else:
            normed = lambda: self.functions.rms_norm(x, weight, 1e-5)  # noqa: E731
        return _both(normed, self.operands.take(*self._hidden), self.clock)

    def add(self) -> tuple[float, float]:
        """Measure the sum of a residual connection, and the sum of two gradients."""
        x, y, gradient = (self.operands.take(*self._hidden) for _ in range(3))
        start = self.clock.now()
        total = x + y
        middle = self.clock.now()
        gradient.add_(total, alpha=0.0)
        return middle - start, self.clock.now() - middle

    def activation(self) -> tuple[float, float]:
        """Measure the activation of the model, or GELU if it is gated."""
        return self._activated(self._activation_or("gelu-tanh"))

    def gate(self) -> tuple[float, float]:
        """Measure the gated activation of the model, or SwiGLU if it is not gated."""
        return self._activated(self._activation_or("swiglu"))

    def _activation_or(self, default_name: str) -> Activation:
        """Return the activation of the model if it is gated like a default one, or else the default one."""
        activation, other = ACTIVATIONS[self.shape.activation], ACTIVATIONS[default_name]
        return activation if activation.gated == other.gated else other

    def _activated(self, activation: Activation) -> tuple[float, float]:
        sizes = [self.shape.mlp] * activation.input_projections
        x = self.operands.take(self.rows, sum(sizes)).detach().requires_grad_()
        gradient = self.operands.take(self.rows, self.shape.mlp)
        return _both(lambda: self.functions.activate(x, activation, sizes), gradient, self.clock)

    def rotation(self) -> tuple[float, float]:
        """Measure rotary position embeddings."""
        size = self.shape.head_size
        sizes = self.rows, 1, self.shape.hidden // size, size
        x = self.operands.take(*sizes).detach().requires_grad_()
        positions = torch.arange(self.rows, device=self.device)
        tables = Rotary(positions, RotaryFrequencies.of(self.shape), self.dtype).tables
        return _both(lambda: rotate(x, *tables), self.operands.take(*sizes), self.clock)

    def lookup(self) -> tuple[float, float]:
        """Measure the lookup of rows in a table, whose gradients are added in fp32."""
        hidden = self.shape.hidden
        table = self.operands.take(min(self.shape.vocabulary, _ELEMENTS // hidden), hidden)
        sums = torch.zeros(table.shape, dtype=torch.float32, device=self.device)
        indices = torch.randint(len(table), (self.rows,), device=self.device)
        start = self.clock.now()
        rows = functional.embedding(indices, table)
        middle = self.clock.now()
        sums.index_add_(0, indices, rows.float())
        return middle - start, self.clock.now() - middle

    def loss(self) -> Callable[[], tuple[float, float]]:
        """Return the measurement of the cross-entropy of a chunk of logits with its gradient.

        All of it counts as forward.
        """
        rows, vocabulary = self._chunk, self.shape.vocabulary
        head = self._head()
        targets = torch.randint(vocabulary, (rows,), device=self.device)
        objective = CrossEntropy(targets, torch.tensor(1.0, device=self.device))
        generator = torch.Generator(self.device).manual_seed(0)
        random = torch.randn(rows, vocabulary, generator=generator, device=self.device).to(self.dtype)

        def run() -> tuple[float, float]:
            stored = random.clone()
            start = self.clock.now()
            with torch.no_grad():
                objective.chunk_losses(head, SplitLogits(stored, vocabulary), slice(0, rows), True)
            return self.clock.now() - start, 0.0

        return run

    def _head(self) -> VocabularyHead:
        """Return an output layer, which knows where its rows of the table are."""
        one_rank_deck = self.deck.with_keys(
            layout={"tensor": 1, "context": 1, "pipeline": 1, "expert": 1, "sequence_parallel": False}
        )
        mesh = PlannedMesh(dict.fromkeys(AXES, 1), 0, 1)
        layer_context = make_layer_context(one_rank_deck, mesh, SavedPolicy(), self.device)
        (part,) = build_parts(self.shape, layer_context, [LayerRange(0, 0, False, True)])
        modules = (module for layer in part.layers for module in layer.modules())
        return next(module for module in modules if isinstance(module, VocabularyHead))

    @property
    def _chunk(self) -> int:
        return chunk_rows(self.rows, self.shape.vocabulary, self.device.type != "cpu")

    @property
    def _hidden(self) -> tuple[int, int]:
        return self.rows, self.shape.hidden


def _both(forward: Callable[[], Tensor], gradient: Tensor, clock: Clock) -> tuple[float, float]:
    """Return the seconds of a computation and of its gradients."""
    start = clock.now()
    result = forward()
    middle = clock.now()
    result.backward(gradient.view(result.shape))
    return middle - start, clock.now() - middle
