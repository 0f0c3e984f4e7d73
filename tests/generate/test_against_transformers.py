"""Greedy text of imported models beside that of `transformers`, with and without its cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.entries import model_entries
from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.checkpoint.exchange.source import source_shape
from hpctrain.checkpoint.read import load
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.engine.functions import compiled_functions
from hpctrain.generate.cache import CachePlan
from hpctrain.generate.continuing import Text, continue_texts
from hpctrain.generate.passes import CachedPasses, least_rows
from hpctrain.generate.sampling import KeyedDraws, Sampling
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.functions import TORCH, CompiledFunctions
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.library import open_library
from hpctrain.sharding.replication import Replications
from tests.engines import make_buckets

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

TOKENS, VOCABULARY = 16, 61
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 7, 20, 3, 13)
]


def of_transformers(family: str) -> torch.nn.Module:
    """A model with random weights, biases and norms too."""
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(7)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, n_positions=40, tie_word_embeddings=False, **sizes
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=40,
            **sizes,
        )
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    found: torch.nn.Module = model.eval()
    return found


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("by", ["torch", "compiled"])
def test_greedy_text_is_that_of_transformers(world: World, mpi_tmp_path: Path, family: str, by: str) -> None:
    theirs = of_transformers(family)
    if world.rank == 0:
        theirs.save_pretrained(mpi_tmp_path / "theirs")
        import_model(world.alone(), mpi_tmp_path / "theirs", mpi_tmp_path / "model.h5")
    world.everyone.barrier()
    mesh = Mesh(world, {"tensor": world.size})
    functions = TORCH if by == "torch" else CompiledFunctions(open_library(compiled_functions()))
    groups = LayerGroups(mesh.group("tensor"), mesh.group("context"), functions=functions)
    model = Transformer(source_shape(mpi_tmp_path / "model.h5"), groups)
    buckets = make_buckets(model.units(), Replications.uncut(mesh), torch.float32, 10_000, trained=False)
    load(mpi_tmp_path / "model.h5", world.everyone, model_entries(buckets))

    passes = CachedPasses(model, CachePlan.of(model, 3, 40), least_rows(model), rows=24)
    draw = KeyedDraws(Sampling(temperature=0.0, seed=0), VOCABULARY, "", groups.tensor)
    texts = [Text(list(prompt), TOKENS) for prompt in PROMPTS]
    for _ in continue_texts(passes, texts, draw, lambda *_: False):
        pass
    for text, prompt in zip(texts, PROMPTS, strict=True):
        for cached in (True, False):
            expected = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=TOKENS,
                do_sample=False,
                use_cache=cached,
            )
            assert text.tokens == expected[0].tolist()
    assert len({token for text in texts for token in text.tokens[text.given :]}) > 10
