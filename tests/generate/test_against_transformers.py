"""Greedy text of imported models beside that of `transformers`, with and without its cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.checkpoint.exchange.source import source_shape
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.state_entries import model_entries
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.costs.cache_plan import CachePlan
from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.generate.batch_invariance import min_invariant_rows
from hpctrain.generate.cached_passes import CachedPasses
from hpctrain.generate.continuous_batching import GeneratedText, continue_texts
from hpctrain.generate.sampling import KeyedSampler, Sampling
from hpctrain.host.c_libraries import open_library
from hpctrain.model.part import LayerRange, logits_of
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.replication import Replications
from tests.checkpoint.exchange.test_families import CASES, copy_router_biases, reference
from tests.engines import make_buckets
from tests.rope_scalings import SCALINGS, hf_rope_parameters

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

TOKENS, VOCABULARY = 20, 61
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 7, 20, 3, 13)
]


def of_transformers(family: str, tied: bool = False) -> torch.nn.Module:
    """A model with random weights, biases and norms too."""
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes["tie_word_embeddings"] = tied
    torch.manual_seed(7)
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=40, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        kind = "Qwen2" if family == "qwen2-yarn" else "Llama"
        scaling = {"qwen2-yarn": "yarn", "llama-dynamic": "dynamic"}.get(family)
        config = getattr(transformers, f"{kind}Config")(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=12 if scaling == "dynamic" else 40,
            rope_parameters=hf_rope_parameters(SCALINGS[scaling] if scaling else None, 10000.0),
            **sizes,
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    found: torch.nn.Module = model.eval()
    return found


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2-yarn"])
@pytest.mark.parametrize("by", ["torch", "compiled"])
def test_greedy_text_is_that_of_transformers(world: World, mpi_tmp_path: Path, family: str, by: str) -> None:
    functions = TORCH if by == "torch" else CompiledFunctions(open_library(compile_functions()))
    compare(world, mpi_tmp_path, of_transformers(family), functions, {"tensor": world.size})


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("family", sorted(CASES))
@pytest.mark.parametrize("by", ["torch", "compiled"])
def test_greedy_text_of_families_is_that_of_transformers(
    world: World, mpi_tmp_path: Path, family: str, by: str
) -> None:
    functions = TORCH if by == "torch" else CompiledFunctions(open_library(compile_functions()))
    # Norms of outputs keep the prompt's last token in what is predicted by tied embeddings.
    untied = {"tie_word_embeddings": False} if family.startswith(("gemma2", "gemma3")) else {}
    model = reference(family, max_position_embeddings=40, **untied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    compare(world, mpi_tmp_path, model, functions, {"tensor": world.size})


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("by", ["torch", "compiled"])
def test_dynamic_frequencies_follow_each_text(world: World, mpi_tmp_path: Path, by: str) -> None:
    functions = TORCH if by == "torch" else CompiledFunctions(open_library(compile_functions()))
    theirs = of_transformers("llama-dynamic")
    # With a cache, keys of a prompt keep the frequencies of the prompt's length.
    compare(world, mpi_tmp_path, theirs, functions, {"tensor": 1}, uses_cache=(True,), sequence=40)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_text_of_stages_is_that_of_transformers(
    world: World, mpi_tmp_path: Path, family: str, tied: bool
) -> None:
    compare(world, mpi_tmp_path, of_transformers(family, tied), TORCH, {"pipeline": world.size})


def compare(
    world: World,
    path: Path,
    theirs: Any,
    functions: LayerFunctions,
    sizes: dict[str, int],
    uses_cache: tuple[bool, ...] = (True, False),
    sequence: int | None = None,
) -> None:
    """Compare greedy text of a model on a mesh of these sizes with that of `transformers`.

    Args:
        world: World of this test.
        path: Folder for files, the same on all ranks.
        theirs: Model of `transformers`.
        functions: Functions that compute attention and norms.
        sizes: Sizes of the mesh.
        uses_cache: Settings of `use_cache` that are compared with.
        sequence: Longest sequence of the model if it is not that of the folder.
    """
    if world.rank == 0:
        theirs.save_pretrained(path / "theirs")
        import_model(world.single_rank_world(), path / "theirs", path / "model.h5")
    world.everyone.barrier()
    mesh = Mesh(world, {**sizes, "expert": 1})
    pipeline, tensor = mesh.group("pipeline"), mesh.group("tensor")
    layer_context = LayerContext(tensor, mesh.group("context"), functions=functions, pipeline=pipeline)
    shape, stage, stages = source_shape(path / "model.h5"), pipeline.rank, pipeline.size
    shape = replace(shape, sequence=sequence or shape.sequence)
    ends = shape.layers * stage // stages, shape.layers * (stage + 1) // stages
    tied = int(stage > 0), min(2, stages)
    model = Transformer(shape, layer_context, LayerRange(*ends, stage == 0, stage == stages - 1, *tied))
    buckets = make_buckets(model.units(), Replications.unsharded(mesh), torch.float32, 10_000, trained=False)
    load(path / "model.h5", world.everyone, model_entries(buckets))
    copy_router_biases(theirs, model)

    passes = CachedPasses(
        model, CachePlan.of(model, 3, 40), min_invariant_rows(model), max_tokens_per_pass=24
    )
    draw = KeyedSampler(Sampling(temperature=0.0, seed=0), VOCABULARY, "", layer_context.tensor)
    texts = [GeneratedText(list(prompt), TOKENS) for prompt in PROMPTS]
    for _ in continue_texts(passes, texts, draw, lambda *_: False):
        pass
    for text, prompt in zip(texts, PROMPTS, strict=True):
        with torch.no_grad():
            theirs(torch.tensor([[1]]))  # a short text resets the frequencies of "dynamic"
            expected_logits = theirs(torch.tensor([prompt])).logits
            if stages == 1:
                logits = logits_of(model, torch.tensor([prompt]))
                torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
        for cached in uses_cache:
            expected = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=TOKENS,
                do_sample=False,
                use_cache=cached,
            )
            assert text.tokens == expected[0].tolist()
    assert len({token for text in texts for token in text.tokens[text.prompt_length :]}) > 6
