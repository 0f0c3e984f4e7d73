"""Forward passes of a model over any rows of texts in its cache, with the bits of those over whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from hpctrain.costs.cache_plan import CachePlan
from hpctrain.generate.cache import KeyValueCache
from hpctrain.generate.continuing import Draw, Drawn, GeneratedText, PassTokens
from hpctrain.generate.stages import Stages
from hpctrain.model.attention.rotary import RotaryFrequencies
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.matmul_kernels import Fp32Kernel, Pass, PassShape
from hpctrain.parallel.kernels.small_batch import SmallBatchKernel, find_block_size
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.vocabulary import VocabularyHead

ROWS = 256
"""Of a pass at the most, most of them of prompts: texts that grow wait for it."""

PASS_OF_HEAD: Mapping[bool, Pass] = MappingProxyType({False: "forward", True: "logits"})
"""What of a layer's product generation takes, of one that is a head and of others."""

_TRIED, _MANY = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33), 128
_FEW = 4  # of these and fewer rows several are tried: each has one output that tells
_CANCELLING = 5


def least_rows(model: Transformer) -> int:
    """Rows from which on a product's rows are those of a large product, bit for bit. Collective over the
    tensor axis, and over the stages that have parts of the model.

    Libraries multiply a few rows in another order than many, and slowly: where a compiled function has the
    bits of many, it multiplies few from now on. By each matrix some numbers of random rows are
    multiplied: where none is enough, it is 64, and bits may differ.
    """
    tried: dict[object, int] = {}
    for layer in model.layers:
        for product_layer in layer.product_layers:
            product, head = product_layer.product, isinstance(product_layer, VocabularyHead)
            of = type(product), product.shape, head
            if of not in tried:
                _multiply_few(model, product, head)
                multiply: Callable[[Tensor], Tensor] = product.logits if head else product.forward
                tried[of] = _least(multiply, product.weight(), model.dtype, model.layer_context.tensor.device)
    found: list[int] = model.layer_context.tensor.all_gather_object(max(tried.values(), default=1))
    of_stages: list[int] = model.layer_context.pipeline.all_gather_object(max(found))
    return max(of_stages)


def _multiply_few(model: Transformer, product: Matmul, head: bool) -> None:
    """Have few rows multiplied by a compiled function where it has the bits of many, in fp32."""
    functions, kernels, kind = (
        model.layer_context.functions,
        model.layer_context.products.kernels,
        PASS_OF_HEAD[head],
    )
    kernel = kernels.kernel_for(kind, *product.shape)
    through = isinstance(kernel, Fp32Kernel)
    by = kernel.inner if isinstance(kernel, Fp32Kernel) else kernel
    fitting = type(product) is Matmul and (through or model.dtype == torch.float32)
    # It computes by one thread: libraries by all.
    if not fitting or isinstance(by, SmallBatchKernel) or torch.get_num_threads() > 1:
        return
    if not isinstance(functions, CompiledFunctions):
        return
    block = find_block_size(by, functions, *product.shape, head)
    if block is not None:
        few = SmallBatchKernel(by, functions, block)
        key: PassShape = (kind, *product.shape)
        kernels.chosen[key] = Fp32Kernel(kernel.name, few) if through else few


@torch.no_grad()
def _least(
    multiply: Callable[[Tensor], Tensor], weight: Tensor, dtype: torch.dtype, device: torch.device
) -> int:
    rows = telling_rows(weight, _MANY).to(device, dtype)
    many = multiply(rows)

    def alike(count: int) -> bool:
        starts = range(0, count * (_FEW if count <= _FEW else 1), count)
        return all(
            torch.equal(multiply(rows[start:][:count].clone()), many[start:][:count]) for start in starts
        )

    wrong = [count for count in _TRIED if not alike(count)]
    return 1 << max(wrong, default=0).bit_length()


def telling_rows(weight: Tensor, count: int) -> Tensor:
    """Rows [count, k] whose products with a matrix [n, k] differ where sums are added in another order; in
    its format, on the host, the same ones each time.

    Those of 16 bits rarely do: a sum of 32 of their products seldom loses a bit in fp32. These differ by
    powers of two, and all but cancel in one output of each row: what is left is what was rounded on the way.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, features = weight.shape
    rows = torch.randn(count, features, generator=generator, dtype=torch.float64)
    rows *= torch.exp2(torch.randint(-6, 7, rows.shape, generator=generator))
    cancelled = weight[torch.arange(count, device=weight.device) * outputs // count].double().cpu()
    rows = rows.to(weight.dtype).double()
    for place in cancelled.abs().topk(min(_CANCELLING, features // 2)).indices.unbind(1):
        at = torch.arange(count), place
        rows[at] = 0.0
        needed = -(rows * cancelled).sum(1) / cancelled[at]
        rows[at] = needed.nan_to_num(0.0, 0.0, 0.0).to(weight.dtype).double()
    return rows.to(weight.dtype)


def can_cache(model: Transformer) -> bool:
    """Whether a token's hidden states depend on those before it in its text alone: not where experts that
    have a capacity drop tokens for the sake of others.
    """
    experts = model.shape.experts
    return experts is None or experts.capacity is None


class CachedPasses:
    """Passes of a model by a cache of this plan, of `least` rows or more, see `least_rows`; see Passes. The
    model is whole, or this stage's part of it: see Stages.

    Collective over the tensor axis, and over the stages.
    """

    def __init__(self, model: Transformer, plan: CachePlan, least: int, rows: int = ROWS) -> None:
        self.model, self.least, self.rows = model, least, rows
        self.cache, self.stages = KeyValueCache(model, plan), Stages(model)
        self.turns = self.stages.count
        self.window, self.places = model.shape.sequence, plan.sequences
        self.reach = self.window if can_cache(model) else 0
        self.longest_short_text = None
        if plan.layout.rotated and not plan.rotary_tables:
            self.longest_short_text = RotaryFrequencies.of(model.shape).longest_short_text

    def open(self) -> int:
        """Reserve a place in the cache for a text, and return it."""
        return self.cache.open()

    def close(self, place: int) -> None:
        """Release the place of a text that has ended or has become too long."""
        self.cache.close(place)

    @torch.no_grad()
    def share(self, source: int, place: int, count: int) -> None:
        """Copy the first `count` tokens of the text in `source` into the empty place `place`."""
        self.cache.share(source, place, count)

    @torch.no_grad()
    def cached(self, pieces: Sequence[PassTokens]) -> Tensor:
        """Return the logits [n, V] of the pieces that predict a token, in their order."""
        runs = [(piece.place, piece.first, len(piece.tokens)) for piece in pieces]
        tokens = [token for piece in pieces for token in piece.tokens]
        idle = max(0, self.least - len(tokens))
        text_lengths = [piece.text_length for piece in pieces]
        if idle:
            runs.append((-1, 0, idle))
            text_lengths.append(1)
        attending = self.cache.begin(runs, text_lengths)
        device = self.model.layer_context.tensor.device
        given = torch.tensor([tokens + [0] * idle], device=device)
        inputs = ModelInputs({"tokens": given}, attending.places.positions, cache=attending)
        hidden = self.stages.through(inputs)
        wanted = list(_last_rows(pieces))
        if not self.model.span.has_head:
            return hidden.new_empty(len(wanted), 0)
        if not wanted:
            return hidden.new_empty(0, self.model.shape.vocabulary)
        filled = wanted + wanted[:1] * (self.least - len(wanted))
        logits: Tensor = self.model.predict(hidden[filled], VocabularyHead.logits)[: len(wanted), 0]
        return logits

    @torch.no_grad()
    def windowed(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, V] of the tokens after windows, int64 [b, s], without the cache."""
        given = tokens.to(self.model.layer_context.tensor.device)
        hidden = self.stages.through(ModelInputs.of_texts(given))
        if not self.model.span.has_head:
            return hidden.new_empty(len(given), 0)
        logits: Tensor = self.model.predict(hidden[-self.least :], VocabularyHead.logits)[-1]
        return logits

    def start_draw(self, draw: Draw, texts: Sequence[GeneratedText], logits: Tensor) -> Drawn:
        """Start to draw the next tokens of texts from their logits, which only some ranks may have."""
        return self.stages.start_draw(draw, texts, logits)


def _last_rows(pieces: Sequence[PassTokens]) -> Iterable[int]:
    """Where in the rows the last one of each piece is that predicts."""
    end = 0
    for piece in pieces:
        end += len(piece.tokens)
        if piece.predicts:
            yield end - 1
