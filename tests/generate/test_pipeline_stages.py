"""Texts by a model whose layers lie on the stages of a pipeline: those of one rank, bit for bit.

Tests of generate/pipeline_stages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.transports.nccl import NcclTransport
from hpctrain.comm.world import World
from hpctrain.costs.cache_plan import CachePlan
from hpctrain.engine.build import build_engine
from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.engine.generation import generation_stage
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.weight_transfer import WeightTransfer
from hpctrain.errors import HpctrainError
from hpctrain.generate.batch_invariance import min_invariant_rows
from hpctrain.generate.cached_passes import CachedPasses
from hpctrain.generate.continuous_batching import GeneratedText, continue_texts
from hpctrain.generate.generate_command import GenerateOptions, generate
from hpctrain.generate.model_loading import load_model
from hpctrain.generate.prompts import PromptOptions
from hpctrain.generate.sampling import KeyedSampler, Sampling
from hpctrain.generate.text_model import TextModel
from hpctrain.host.c_libraries import open_library
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import LayerFunctions
from tests.comm.transports.gloo_as_nccl import use_nccl_rules
from tests.engines import LLAMA, small_deck
from tests.generate.test_text_model import make_checkpoint

VOCABULARY = 61
LAYERS = ("model.layers=3", "model.initial_std=0.3", "batch.sequence=64", "batch.global_size=24")
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=16")
MODELS = {
    "gpt2": (),
    "llama": (*LLAMA, "model.tied=true"),
    "untied": ("model.tied=false", "precision.compute=bf16"),
    "llama untied": (*LLAMA, "precision.compute=bf16", "model.tied=false"),
}
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 9, 40, 3, 70, 2, 60, 64, 33, 9)
]
LATE = [7, 0, 4, 2, 9, 1, 8, 3, 6, 5]
Seen = dict[tuple[int, int], Tensor]


@pytest.fixture(scope="module")
def compiled() -> LayerFunctions:
    return CompiledFunctions(open_library(compile_functions()))


def of_layouts(
    world: World, functions: LayerFunctions, keys: Sequence[str], *layouts: tuple[int, int]
) -> list[Transformer]:
    """A model with rough weights, moved into stages of these (tensor, pipeline) sizes."""
    deck = small_deck(*LAYERS, "machine.products=library", "machine.compile=true", *keys)
    deck = deck.with_runtime_choices(replace(deck.runtime_choices, functions=functions))
    engine = build_engine(deck, world, make_mesh(deck, world), noise_std=0.2)
    models = []
    for tensor, pipeline in layouts:
        model, stage = generation_stage(deck, world, tensor, pipeline)
        WeightTransfer(world, engine.stage, stage).move()
        models.append(model)
    return models


def grown_by(
    model: Transformer,
    places: int = 4,
    rows: int = 24,
    order: Sequence[int] = range(len(PROMPTS)),
    stop_after: int | None = None,
    temperature: float = 1.0,
) -> tuple[dict[int, list[int]], Seen]:
    """All texts by number, and the logits by which each token was drawn, where these are."""
    plan = CachePlan.of(model, places, 64)
    passes = CachedPasses(model, plan, min_invariant_rows(model), rows)
    assert passes.cache.bytes == plan.bytes
    draws = KeyedSampler(
        Sampling(temperature=temperature, seed=1), VOCABULARY, "", model.layer_context.tensor
    )
    seen: Seen = {}

    def draw(texts: Sequence[GeneratedText], logits: Tensor) -> Sequence[int]:
        assert model.span.has_head
        for text, row in zip(texts, logits, strict=True):
            seen[text.prompt_number, len(text.tokens)] = row
        return draws(texts, logits)

    texts = [GeneratedText(list(PROMPTS[number]), 8 + number, number) for number in order]
    for step, _ in enumerate(continue_texts(passes, texts, draw, lambda text, token: token == 0)):
        if step == stop_after:
            break
    else:
        assert passes.cache.free_pages == plan.pages
        assert all(text.is_finished for text in texts)
    return {text.prompt_number: text.tokens for text in texts}, seen


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_stages_give_the_bits_of_one_rank(
    world: World, compiled: LayerFunctions, keys: tuple[str, ...]
) -> None:
    whole, part = of_layouts(world, compiled, keys, (1, 1), (1, world.size))
    assert part.span.blocks < 3
    expected, right = grown_by(whole)
    ways = ((4, range(10)), (1, LATE), (10, LATE))
    for texts, seen in [grown_by(part, places, 30, order) for places, order in ways]:
        assert texts == expected
        assert seen.keys() == (right.keys() if part.span.has_head else set())
        assert all(torch.equal(seen[key], right[key]) for key in seen)
    assert len({token for tokens in expected.values() for token in tokens}) > 30


@pytest.mark.mpi(min_size=2, max_size=3)
def test_stages_whose_messages_have_no_tags(
    world: World, compiled: LayerFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over channels as on GPUs, each of which runs its messages in the order in which they are started."""
    use_nccl_rules(monkeypatch, "shared")
    whole, part = of_layouts(world, compiled, (), (1, 1), (1, world.size))
    assert isinstance(part.layer_context.pipeline.host, NcclTransport)
    assert grown_by(part)[0] == grown_by(whole)[0]


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("keys", [(), MIXTURE], ids=["gpt2", "mixture"])
def test_stages_of_tensor_ranks(world: World, compiled: LayerFunctions, keys: tuple[str, ...]) -> None:
    both, tensor = of_layouts(world, compiled, keys, (2, 2), (2, 1))
    assert grown_by(both, temperature=0.0)[0] == grown_by(tensor, temperature=0.0)[0]


@pytest.mark.mpi(min_size=2, max_size=3)
def test_who_stops_early_leaves_nothing_behind(world: World, compiled: LayerFunctions) -> None:
    whole, part = of_layouts(world, compiled, (), (1, 1), (1, world.size))
    expected, _ = grown_by(whole)
    again = []
    for stop in (0, 1, 5, 6):
        grown_by(part, stop_after=stop)
        again.append(grown_by(part)[0])
    assert again == [expected] * 4


@pytest.mark.mpi(min_size=2, max_size=3)
def test_an_error_of_the_last_stage_is_that_of_all(world: World, compiled: LayerFunctions) -> None:
    whole, part = of_layouts(world, compiled, (), (1, 1), (1, world.size))
    expected, _ = grown_by(whole)
    kept = [parameter.clone() for parameter in part.parameters()]
    for parameter in part.parameters():
        parameter.data.mul_(1e30)
    with pytest.raises(HpctrainError, match="logits are not finite, so no token can be sampled"):
        grown_by(part)
    for parameter, values in zip(part.parameters(), kept, strict=True):
        parameter.data.copy_(values)
    assert grown_by(part)[0] == expected


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_the_verb_shows_the_texts_of_one_rank(
    world: World, mpi_tmp_path: Path, family: tuple[str, ...]
) -> None:
    path, lines = mpi_tmp_path / "a.h5", mpi_tmp_path / "prompts.jsonl"
    layers = max(2, world.size - 1)
    make_checkpoint(
        world, path, *family, f"model.layers={layers}", "model.tied=false", "batch.global_size=24"
    )
    if world.rank == 0:
        lines.write_text("\n".join(f'{{"prompt": "{"ab" * (1 + n % 5)}", "n": {n}}}' for n in range(7)))
    world.everyone.barrier()
    source, sampling = PromptOptions(json_lines=str(lines)), Sampling(tokens=9, samples=2, seed=3)
    single = world.single_rank_world()
    layouts = [(None, 1), (1, world.size)] if world.size < 4 else [(2, 2), (1, 2), (None, 4)]
    expected: list[str] = []
    generate(single, path, GenerateOptions(source, sampling), expected.append, live=False)
    assert len(expected) == len(set(expected)) == 14
    for tensor, pipeline in layouts:
        shown: list[str] = []
        options = GenerateOptions(source, sampling, tensor, pipeline)
        generate(world, path, options, shown.append, live=False)
        assert shown == (expected if world.rank == 0 else [])
    live: list[str] = []
    one_text = PromptOptions("ab"), Sampling(tokens=50, seed=3)
    generate(world, path, GenerateOptions(*one_text, 1, world.size), live.append, live=True)
    alone: list[str] = []
    generate(single, path, GenerateOptions(*one_text), alone.append, live=True)
    assert live == (alone if world.rank == 0 else [])
    model, tokenizer = load_model(world, path, 1, 1, pipeline=3 if world.size == 3 else 2)
    writer = TextModel(world, path, model, tokenizer)
    copies = world.everyone.all_gather_object(writer.replica)
    assert copies == {2: [0, 0], 3: [0, 0, 0], 4: [0, 1, 0, 1]}[world.size]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_ranks_cannot_share_is_told(world: World, mpi_tmp_path: Path) -> None:
    path = mpi_tmp_path / "a.h5"
    make_checkpoint(world, path, "model.layers=1")
    for tensor, pipeline, sentence in (
        (None, 3, "--pipeline 3: must divide the 2 ranks"),
        (2, 2, "--pipeline 2 x --tensor 2 = 4: must divide the 2 ranks"),
    ):
        with pytest.raises(HpctrainError, match=sentence):
            load_model(world, path, tensor, 1, pipeline)
