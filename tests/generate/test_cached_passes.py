"""The cache beside passes over whole texts: bits of logits, memory, pages; nothing beside a text counts.

Tests of generate/cached_passes.py, generate/key_value_cache.py and generate/batch_invariance.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.costs.cache_plan import CachePlan
from hpctrain.engine.build import build_engine
from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.generate.batch_invariance import min_invariant_rows, rounding_test_rows
from hpctrain.generate.cached_passes import CachedPasses, can_cache
from hpctrain.generate.continuous_batching import GeneratedText, PassTokens, continue_texts
from hpctrain.generate.sampling import KeyedSampler, Sampling
from hpctrain.host.c_libraries import open_library
from hpctrain.model.part import logits_of
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.kernels.matmul_kernels import Fp32Kernel
from hpctrain.parallel.kernels.small_batch import SmallBatchKernel
from tests.engines import LLAMA, small_deck

VOCABULARY = 61
NORMED = (*LLAMA, "model.query_key_norm=head", "model.head_size=8", "model.mlp=40")
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=16")
ROUGH = ("model.initial_std=0.3", "batch.sequence=64")

PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 9, 40, 3, 60, 2, 17, 64, 33)
]


@pytest.fixture(scope="module")
def compiled() -> LayerFunctions:
    return CompiledFunctions(open_library(compile_functions()))


def model_of(world: World, *overrides: str, functions: LayerFunctions = TORCH) -> Transformer:
    """A model with rough weights, as a run builds it."""
    compiling = f"machine.compile={str(functions.compiled).lower()}"
    deck = small_deck(*ROUGH, "machine.products=library", compiling, *overrides)
    deck = deck.with_runtime_choices(replace(deck.runtime_choices, functions=functions))
    model = build_engine(deck, world, make_mesh(deck, world), noise_std=0.2).model
    assert isinstance(model, Transformer)
    assert model.layer_context.functions is functions
    return model


def grown_by(
    model: Transformer,
    places: int,
    rows: int,
    order: Sequence[int] = range(len(PROMPTS)),
    tokens: int = 20,
    temperature: float = 1.0,
) -> tuple[dict[int, list[int]], dict[tuple[int, int], Tensor]]:
    """All texts by number, and the logits by which each token was drawn, by number and place in the text."""
    plan = CachePlan.of(model, places, 64)
    passes = CachedPasses(model, plan, min_invariant_rows(model), rows)
    assert passes.cache.bytes == plan.bytes
    draws = KeyedSampler(
        Sampling(temperature=temperature, seed=1), VOCABULARY, "", model.layer_context.tensor
    )
    seen: dict[tuple[int, int], Tensor] = {}

    def draw(texts: Sequence[GeneratedText], logits: Tensor) -> Sequence[int]:
        for text, row in zip(texts, logits, strict=True):
            seen[text.prompt_number, len(text.tokens)] = row
        return draws(texts, logits)

    texts = [GeneratedText(list(PROMPTS[number]), tokens, number) for number in order]

    def ends(text: GeneratedText, token: int) -> bool:
        return token == 0 and text.prompt_number % 2 == 0

    for _ in continue_texts(passes, texts, draw, ends):
        pass
    assert passes.cache.free_pages == plan.pages
    assert all(text.is_finished for text in texts)
    return {text.prompt_number: text.tokens for text in texts}, seen


def beside_expected(
    model: Transformer, texts: Mapping[int, Sequence[int]], seen: Mapping[tuple[int, int], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits by which tokens were drawn, and those of passes over all that the model sees of the texts."""
    window = model.shape.sequence
    for number, tokens in texts.items():
        # The text as it was in the end, filled up: what is behind is not seen, and rows are many.
        whole = [*tokens[:window], *[0] * (window - len(tokens))]
        within = logits_of(model, torch.tensor([whole]))[0]
        for place in range(len(PROMPTS[number]), len(tokens)):
            if place <= window:
                yield seen[number, place], within[place - 1]
            elif place % 4 == 0:
                yield (
                    seen[number, place],
                    logits_of(model, torch.tensor([tokens[place - window : place]]))[0, -1],
                )


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("family", [(), LLAMA, NORMED], ids=["gpt2", "llama", "normed"])
def test_logits_have_the_bits_of_whole_texts(
    world: World, compiled: LayerFunctions, compute: str, family: tuple[str, ...]
) -> None:
    keys = *family, f"precision.compute={compute}", f"layout.tensor={world.size}"
    model = model_of(world, *keys, functions=compiled)
    texts, seen = grown_by(model, places=4, rows=24)
    assert len(seen) > 100
    assert sum(place > 64 for _, place in seen) > 20
    for logits, expected in beside_expected(model, texts, seen):
        assert torch.equal(logits, expected)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("family", [(), NORMED, MIXTURE], ids=["gpt2", "normed", "mixture"])
def test_by_torch_they_agree(world: World, family: tuple[str, ...]) -> None:
    experts = (f"layout.expert={world.size}",) if family == MIXTURE else ()
    model = model_of(world, *family, f"layout.tensor={world.size}", *experts)
    texts, seen = grown_by(model, places=4, rows=24)
    for logits, expected in beside_expected(model, texts, seen):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_by_torch_in_16_bits_they_are_as_exact_as_whole_texts(world: World, compute: str) -> None:
    alone = world.single_rank_world()
    model, exact = (model_of(alone, *LLAMA, f"precision.compute={each}") for each in (compute, "fp32"))
    for parameter, rounded in zip(exact.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(rounded)
    texts, seen = grown_by(model, places=4, rows=24)
    errors = torch.zeros(2, dtype=torch.float64)
    own, right = beside_expected(model, texts, seen), beside_expected(exact, texts, seen)
    for (cached, whole), (_, expected) in zip(own, right, strict=True):
        for n, found in enumerate((cached, whole)):
            errors[n] += (found - expected).norm() / expected.norm()
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("by", ["compiled", "torch"])
def test_neither_batch_nor_order_nor_layout_changes_a_text(
    world: World, compiled: LayerFunctions, by: str
) -> None:
    alone, functions = world.single_rank_world(), compiled if by == "compiled" else TORCH
    one = model_of(alone, *LLAMA, functions=functions)
    expected, _ = grown_by(one, places=3, rows=200)
    for places, rows, order in ((1, 7, range(9)), (9, 33, (4, 0, 8, 2, 6, 1, 3, 7, 5))):
        assert grown_by(one, places, rows, order)[0] == expected
    both = model_of(world, *LLAMA, f"layout.tensor={world.size}", functions=functions)
    assert grown_by(both, places=4, rows=50)[0] == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 30


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_samples_that_share_their_prompt_are_as_without(
    world: World, compiled: LayerFunctions, compute: str, family: tuple[str, ...]
) -> None:
    keys = *family, f"precision.compute={compute}", f"layout.tensor={world.size}"
    model = model_of(world, *keys, functions=compiled)
    expected, logits, rows, _ = sampled(model, places=1)
    found, shared, fewer, most = sampled(model, places=6)
    assert found == expected
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)
    assert shared.keys() == logits.keys()
    assert all(torch.equal(shared[key], logits[key]) for key in logits)
    assert fewer == rows - sum(3 * (len(PROMPTS[number]) - 1) for number in SAMPLED)
    # Places that grow beside each other would have all pages: the two full ones of 64 are had once.
    assert most <= 6 * 2 - 2


SAMPLED = (2, 4, 7)
"""Prompts of 40, 60 and 64 tokens."""


def sampled(
    model: Transformer, places: int
) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int, int], Tensor], int, int]:
    """Four samples of each: tokens, logits by which they were drawn, rows computed, and pages had at most."""
    plan = CachePlan.of(model, places, 64)
    passes = CachedPasses(model, plan, min_invariant_rows(model))
    draws = KeyedSampler(Sampling(temperature=1.0, seed=1), VOCABULARY, "", model.layer_context.tensor)
    seen: dict[tuple[int, int, int], Tensor] = {}
    compute, rows, most = passes.run_cached, 0, 0

    def cached(pieces: Sequence[PassTokens]) -> Tensor:
        nonlocal rows, most
        rows += sum(len(piece.tokens) for piece in pieces)
        found = compute(pieces)
        most = max(most, plan.pages - passes.cache.free_pages)
        return found

    def draw(texts: Sequence[GeneratedText], logits: Tensor) -> Sequence[int]:
        for text, row in zip(texts, logits, strict=True):
            seen[text.prompt_number, text.sample_number, len(text.tokens)] = row
        return draws(texts, logits)

    passes.run_cached = cached  # type: ignore[method-assign]
    texts = [
        GeneratedText(list(PROMPTS[number]), 4, number, sample) for number in SAMPLED for sample in range(4)
    ]
    for _ in continue_texts(passes, texts, draw, lambda *_: False):
        pass
    assert passes.cache.free_pages == plan.pages
    return {(text.prompt_number, text.sample_number): text.tokens for text in texts}, seen, rows, most


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_some_rows_are_multiplied_as_many_are(world: World, compute: str) -> None:
    model = model_of(world.single_rank_world(), f"precision.compute={compute}")
    least = min_invariant_rows(model)
    assert least in {1, 2, 4, 8, 16, 32, 64}
    with torch.no_grad():
        for layer in model.layers:
            for product in (product_layer.product for product_layer in layer.product_layers):
                rows = rounding_test_rows(product.weight(), 100)
                whole = product.forward(rows)
                for count in range(least, 100):
                    for start in (0, 100 - count):
                        some = slice(start, start + count)
                        assert torch.equal(product.forward(rows[some].clone()), whole[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "features"), [(61, 32), (48, 100), (200, 384)])
def test_rows_tell_in_which_order_they_are_multiplied(
    dtype: torch.dtype, outputs: int, features: int
) -> None:
    """Sums from the first product on, and from the last on. Those of any rows seldom differ in 16 bits."""
    generator = torch.Generator().manual_seed(2)
    weight, any_rows = (
        torch.randn(count, features, generator=generator).to(dtype) for count in (outputs, 128)
    )
    weight[3] = 0.0

    def telling(rows: Tensor) -> float:
        products = rows.float() * weight.float()[torch.arange(128) * outputs // 128]
        sums = []
        for order in (range(features), reversed(range(features))):
            total = torch.zeros(128)
            for feature in order:
                total += products[:, feature]
            sums.append(total.to(dtype))
        return (sums[0] != sums[1]).float().mean().item()

    rows = rounding_test_rows(weight, 128)
    assert rows.dtype == dtype and rows.isfinite().all()
    assert telling(rows) > 0.75
    assert dtype == torch.float32 or telling(any_rows) < 0.05


@pytest.mark.parametrize("by", ["compiled", "torch"])
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_more_rows_are_filled_up_than_there_are_positions(
    world: World, compiled: LayerFunctions, by: str, family: tuple[str, ...]
) -> None:
    functions = compiled if by == "compiled" else TORCH
    model = model_of(world.single_rank_world(), *family, "batch.sequence=8", functions=functions)
    found = []
    for least in (64, 1):
        passes = CachedPasses(model, CachePlan.of(model, 2, 8), least)
        places = passes.allocate_slot(), passes.allocate_slot()
        tokens = [3, 7, 5], [1, 2]
        pieces = [
            PassTokens(place, 0, each, True, len(each)) for place, each in zip(places, tokens, strict=True)
        ]
        found.append(passes.run_cached(pieces))
    assert torch.allclose(*found, rtol=1e-5, atol=1e-5)
    positions = passes.cache.start_pass([(places[0], 3, 2), (-1, 0, 60)], [5, 1]).token_positions.positions
    assert positions.tolist() == [3, 4, *[0] * 60]


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_few_are_multiplied_by_a_compiled_function(
    world: World, compiled: LayerFunctions, compute: str
) -> None:
    by_fp32 = ("machine.products=fp32",) if compute == "bf16" else ()
    sizes = "model.hidden=400", "model.heads=4", "model.mlp=640", f"precision.compute={compute}", *by_fp32
    model = model_of(world, *sizes, f"layout.tensor={world.size}", functions=compiled)
    texts, seen = grown_by(model, places=5, rows=24, order=range(5), tokens=12)
    kernels = model.layer_context.products.kernels.chosen.values()
    few = [
        isinstance(each.inner if isinstance(each, Fp32Kernel) else each, SmallBatchKernel) for each in kernels
    ]
    if not any(few):
        pytest.skip("the library here adds in another order")
    assert sum(few) >= 3
    for logits, expected in beside_expected(model, texts, seen):
        assert torch.equal(logits, expected)


def test_experts_that_drop_tokens_have_no_cache(world: World) -> None:
    assert can_cache(model_of(world.single_rank_world(), *MIXTURE))
    assert not can_cache(model_of(world.single_rank_world(), *MIXTURE, "model.experts.capacity=1.0"))
