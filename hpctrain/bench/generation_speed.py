"""`hpctrain bench generate`: tokens/s of greedy decoding with and without a key and value cache.

Without a cache, prompts are continued one after the other, and each token needs a pass over the complete
text. The same model of transformers continues all prompts as one batch with its cache, in one process with as
many threads as all ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hpctrain.bench.measurement import publish, time_by_turns, wait_asleep, with_vocabulary
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.costs.cache_plan import CachePlan
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import SCORE_KINDS
from hpctrain.engine.build import build_engine
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.generate.batch_invariance import min_invariant_rows
from hpctrain.generate.cached_passes import CachedPasses, can_cache
from hpctrain.generate.continuous_batching import ForwardPasses, GeneratedText, continue_texts
from hpctrain.generate.sampling import KeyedSampler, Sampling
from hpctrain.generate.text_model import MAX_CONCURRENT_TEXTS
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.text import counted, table

UNCACHED_PROMPTS = 2
"""Number of prompts that are continued without a cache. All of them would take minutes."""


def bench_generate(
    world: World,
    path: Path,
    overrides: Sequence[str],
    prompts: int,
    tokens: int,
    rounds: int,
    output: Path | None,
) -> None:
    """Measure the continuation of random prompts, and print a table. Collective.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        prompts: Number of prompts.
        tokens: Tokens to generate for each prompt. A prompt has a quarter as many, and one.
        rounds: Number of rounds.
        output: File for the results; None for no file.

    Raises:
        HpctrainError: The model is unsupported, generates no text, or has too short sequences.
    """
    with world.agreement():
        deck = with_vocabulary(read_deck(path, overrides, world.size, read_source_keys))
        if deck.model.module is not None or deck.model.experts:
            raise HpctrainError(f"{path}: unsupported model (supported: GPT-2 and Llama without experts)")
        if deck.objective.kind in SCORE_KINDS:
            problem = 'is unsupported: the model generates no text (use "next-token")'
            raise HpctrainError(deck.problem("objective.kind", problem))
        longest = tokens + tokens // 4 + 1
        if longest > deck.batch.sequence:
            problem = f"must be at least {longest} for a prompt and --tokens {tokens}"
            raise HpctrainError(deck.problem("batch.sequence", problem))
    torch.set_num_threads(deck.run.threads)
    generator = torch.Generator().manual_seed(0)
    assert deck.model.vocabulary is not None
    texts = torch.randint(deck.model.vocabulary, (prompts, tokens // 4 + 1), generator=generator)
    methods = _hpctrain_methods(world, deck, texts, tokens)
    methods["transformers, with cache"] = _transformers_method(world, deck, texts, tokens), prompts * tokens
    seconds = time_by_turns(world, {name: run for name, (run, _) in methods.items()}, rounds)
    rates = {name: methods[name][1] / median(each) for name, each in seconds.items()}
    heading = f"Generation: {prompts} prompts, {tokens} tokens each, {counted(world.size, 'rank')}"
    results = {"tokens_per_s": rates, "seconds": seconds}
    publish(world, [heading, *_rate_table(rates)], results, output)


def _rate_table(rates: dict[str, float]) -> list[str]:
    first = next(iter(rates.values()))
    rows = [["method", "tokens/s", "of the first"]]
    rows += [[name, f"{rate:.0f}", f"{rate / first:.2f}"] for name, rate in rates.items()]
    return table(rows)


def _hpctrain_methods(
    world: World, deck: Deck, prompts: Tensor, tokens: int
) -> dict[str, tuple[Callable[[], None], int]]:
    """Return functions that continue prompts, and the tokens that all ranks generate. Collective."""
    one_rank = on_one_rank(deck).with_keys(run={"noise_scale_steps": 0})
    split_model = _build_model(world, one_rank.with_keys(layout={"tensor": world.size}))
    replica = _build_model(world, one_rank)
    all_ranks, this_rank = split_model.layer_context.tensor, replica.layer_context.tensor
    local_prompts = prompts[world.rank :: world.size]
    uncached, cached = _UncachedPasses(split_model), _cached_passes(split_model, prompts, tokens)
    replica_cached = _cached_passes(replica, local_prompts, tokens)

    def one_at_a_time() -> None:
        for prompt in prompts[:UNCACHED_PROMPTS].split(1):
            _continue(uncached, prompt, tokens, all_ranks)

    count = len(prompts) * tokens
    return {
        "without cache, one prompt at a time": (one_at_a_time, min(UNCACHED_PROMPTS, len(prompts)) * tokens),
        "with cache, model split over all ranks": (
            lambda: _continue(cached, prompts, tokens, all_ranks),
            count,
        ),
        "with cache, one copy on each rank": (
            lambda: _continue(replica_cached, local_prompts, tokens, this_rank),
            count,
        ),
    }


def _build_model(world: World, deck: Deck) -> Transformer:
    deck = choose_functions(deck, world)
    model = build_engine(deck, world, make_mesh(deck, world)).model
    assert isinstance(model, Transformer) and can_cache(model)
    return model


def _cached_passes(model: Transformer, prompts: Tensor, tokens: int) -> CachedPasses:
    concurrent_texts = max(1, min(MAX_CONCURRENT_TEXTS, len(prompts)))
    plan = CachePlan.of(model, concurrent_texts, prompts.shape[1] + tokens)
    return CachedPasses(model, plan, min_invariant_rows(model))


class _UncachedPasses(CachedPasses):
    """Forward passes of one text without the cache."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model, CachePlan.of(model, 1, 1), 1)
        self.max_cached_length = 0


def _continue(passes: ForwardPasses, prompts: Tensor, tokens: int, group: Group) -> None:
    """Generate `tokens` tokens for each prompt [prompts, tokens]. Collective over the group."""
    texts = [GeneratedText(prompt, tokens, number) for number, prompt in enumerate(prompts.tolist())]
    sampler = KeyedSampler(Sampling(temperature=0.0, seed=0), 2**31, "the model", group)
    for _ in continue_texts(passes, texts, sampler, lambda *_: False):
        pass
    assert all(len(text.tokens) == prompts.shape[1] + tokens for text in texts)


def _transformers_method(world: World, deck: Deck, prompts: Tensor, tokens: int) -> Callable[[], None]:
    """Return a function that continues all prompts by transformers. Collective, as is the function.

    Rank 0 uses the threads of all ranks, while the other ranks sleep.
    """
    model = None
    with world.agreement():
        if world.rank == 0:
            model = _transformers_model(ModelShape.of(deck, deck.model.vocabulary or 0))

    def generate() -> None:
        if model is not None:
            torch.set_num_threads(world.size * deck.run.threads)
            texts = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
            )
            torch.set_num_threads(deck.run.threads)
            assert texts.shape[1] == prompts.shape[1] + tokens
        wait_asleep(world)

    return generate


def _transformers_model(shape: ModelShape) -> Any:
    """Return a model of transformers with random weights.

    Raises:
        HpctrainError: The library transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise HpctrainError(f"bench generate: requires transformers ({error})") from None
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**config_of(shape, "float32"), **ids})
    return transformers.AutoModelForCausalLM.from_config(config).eval()
