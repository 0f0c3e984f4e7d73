"""`hpctrain bench generate`: tokens/s of greedy text by a deck's model, with a cache and without, in turns.

Without a cache each prompt is continued alone, every token by a pass over all of the text: what the cache and
texts beside each other are for. the same model of transformers continues all prompts as one
batch, with its cache, in one process with as many threads as there are ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hpctrain.bench.measurement import slowest, with_vocabulary, write_json
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

ALONE = 2
"""Prompts that are continued without a cache: of all of them it would take minutes."""

_NAP = 0.02


def bench_generate(
    world: World,
    path: Path,
    overrides: Sequence[str],
    prompts: int,
    tokens: int,
    rounds: int,
    output: Path | None,
) -> int:
    """Time `tokens` for each of so many random prompts, a quarter as long; the exit code. Collective."""
    with world.agreement():
        deck = with_vocabulary(read_deck(path, overrides, world.size, read_source_keys))
        if deck.model.module is not None or deck.model.experts:
            raise HpctrainError(f"{path}: unsupported model (supported: GPT-2 and Llama without experts)")
        if deck.objective.kind in SCORE_KINDS:
            asked = 'is unsupported: the model generates no text (use "next-token")'
            raise HpctrainError(deck.problem("objective.kind", asked))
        longest = tokens + tokens // 4 + 1
        if longest > deck.batch.sequence:
            asked = f"must be at least {longest} for a prompt and --tokens {tokens}"
            raise HpctrainError(deck.problem("batch.sequence", asked))
    torch.set_num_threads(deck.run.threads)
    random = torch.Generator().manual_seed(0)
    assert deck.model.vocabulary is not None
    given = torch.randint(deck.model.vocabulary, (prompts, tokens // 4 + 1), generator=random)
    ours = _ours(world, deck, given, tokens)
    timed: dict[str, tuple[Callable[[], None], int]] = ours | {
        "transformers, with cache": (_theirs(world, deck, given, tokens), prompts * tokens)
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(rounds + 1):
        for name in timed if turn % 2 else reversed(timed):
            world.everyone.barrier()
            began = time.perf_counter()
            timed[name][0]()
            taken = slowest(world, time.perf_counter() - began)
            if turn:
                seconds[name].append(taken)
    rates = {name: timed[name][1] / median(each) for name, each in seconds.items()}
    if world.rank == 0:
        _show(world, rates, prompts, tokens)
        if output is not None:
            write_json(output, {"tokens_per_s": rates, "seconds": seconds})
    return 0


def _show(world: World, rates: dict[str, float], prompts: int, tokens: int) -> None:
    first = next(iter(rates.values()))
    rows = [["method", "tokens/s", "of the first"]]
    rows += [[name, f"{rate:.0f}", f"{rate / first:.2f}"] for name, rate in rates.items()]
    print(f"Generation: {prompts} prompts, {tokens} tokens each, {counted(world.size, 'rank')}")
    print("\n".join(table(rows)))


def _ours(world: World, deck: Deck, given: Tensor, tokens: int) -> dict[str, tuple[Callable[[], None], int]]:
    """What is timed of ours by name, and how many tokens all ranks have of it."""
    alone = on_one_rank(deck).with_keys(run={"noise_scale_steps": 0})
    layouts = {"shared": alone.with_keys(layout={"tensor": world.size}), "copies": alone}
    models: dict[str, Transformer] = {}
    for name, each in layouts.items():
        own = choose_functions(each, world)
        engine = build_engine(own, world, make_mesh(own, world))
        assert isinstance(engine.model, Transformer) and can_cache(engine.model)
        models[name] = engine.model
    shared, copies, whole = models["shared"], models["copies"], len(given) * tokens
    together, single = shared.layer_context.tensor, copies.layer_context.tensor
    without, cached, part = _Alone(shared), _passes(shared, given, tokens), given[world.rank :: world.size]
    by_copies = _passes(copies, part, tokens)

    def each_alone() -> None:
        for prompt in given[:ALONE].split(1):
            _continue(without, prompt, tokens, together)

    return {
        "without cache, one prompt at a time": (each_alone, min(ALONE, len(given)) * tokens),
        "with cache, model split over all ranks": (lambda: _continue(cached, given, tokens, together), whole),
        "with cache, one copy on each rank": (lambda: _continue(by_copies, part, tokens, single), whole),
    }


def _passes(model: Transformer, given: Tensor, tokens: int) -> CachedPasses:
    places = max(1, min(MAX_CONCURRENT_TEXTS, len(given)))
    plan = CachePlan.of(model, places, given.shape[1] + tokens)
    return CachedPasses(model, plan, min_invariant_rows(model))


class _Alone(CachedPasses):
    """Passes without the cache."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model, CachePlan.of(model, 1, 1), 1)
        self.max_cached_length = 0


def _continue(passes: ForwardPasses, given: Tensor, tokens: int, group: Group) -> None:
    texts = [GeneratedText(prompt, tokens, number) for number, prompt in enumerate(given.tolist())]
    draw = KeyedSampler(Sampling(temperature=0.0, seed=0), 2**31, "the model", group)
    for _ in continue_texts(passes, texts, draw, lambda *_: False):
        pass
    assert all(len(text.tokens) == given.shape[1] + tokens for text in texts)


def _theirs(world: World, deck: Deck, given: Tensor, tokens: int) -> Callable[[], None]:
    """All prompts by transformers on rank 0, with the threads of all; the other ranks sleep. Collective."""
    model = None
    with world.agreement():
        if world.rank == 0:
            model = _model(ModelShape.of(deck, deck.model.vocabulary or 0))

    def generate() -> None:
        if model is not None:
            torch.set_num_threads(world.size * deck.run.threads)
            found = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
            )
            torch.set_num_threads(deck.run.threads)
            assert found.shape[1] == given.shape[1] + tokens
        work = world.everyone.start_all_reduce(torch.zeros(1))
        while not work.test():
            time.sleep(_NAP)
        work.wait()

    return generate


def _model(shape: ModelShape) -> Any:
    """Of these sizes, with random weights; HpctrainError where there is no such library."""
    try:
        import transformers
    except ImportError as error:
        raise HpctrainError(f"bench generate: requires transformers ({error})") from None
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**config_of(shape, "float32"), **ids})
    return transformers.AutoModelForCausalLM.from_config(config).eval()
