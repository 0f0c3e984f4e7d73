"""Text from a checkpoint: the model alone is loaded, and continues a prompt token by token.

Every token takes one forward pass over what the model sees of the text so far, at most `batch.sequence`
tokens: nothing is cached between tokens, so that the window may slide over learned positions too. The
samples of a batch share the pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.read import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.comm.group import Group
from hpctrain.comm.host_memory import resident_bytes
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.check import check_deck
from hpctrain.deck.schema import Deck, Machine
from hpctrain.engine.sizes import expert_sizes
from hpctrain.engine.stage import build_stage, load_parameters, make_groups
from hpctrain.errors import HpctrainError
from hpctrain.generate.prompts import Prompt, PromptSource
from hpctrain.generate.stopping import Continuation
from hpctrain.model.build import build_model
from hpctrain.model.count import count
from hpctrain.model.part import Part, logits_of
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.plan.room import demand_room
from hpctrain.sharding.replication import Replications
from hpctrain.watch.newest import find_checkpoint

SAMPLES_AT_A_TIME = 8  # share a forward pass, which bounds the memory of activations

NextLogits = Callable[[Tensor], Tensor]
"""Tokens [b, s] int64 on the CPU -> fp32 logits [b, V] of the token behind them."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and where a text ends.

    First logits of tokens that the text has are lowered: positive ones divided by `repetition_penalty`,
    negative ones multiplied with it (CTRL, arXiv 1909.05858). `temperature` 0 takes the likeliest token.
    Then, in this order, only the `top_k` likeliest tokens are drawn, of these only the fewest whose
    probability reaches `top_p` (nucleus sampling, arXiv 1904.09751), and of these those that are at least
    `min_p` times as likely as the likeliest (arXiv 2407.01082). `seed` None is another one each time. A text
    ends before any of `stops`.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    samples: int = 1
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stops: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise HpctrainError with every option that is out of range."""
        problems = []
        if self.tokens < 1:
            problems.append(f"--tokens {self.tokens}: must be at least 1")
        if not 0 <= self.temperature < inf:
            asked = "must be a number from 0 (the likeliest token) up"
            problems.append(f"--temperature {self.temperature:g}: {asked}")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"--top-k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p:g}: must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            problems.append(f"--min-p {self.min_p:g}: must be from 0 (any token) to 1 (the likeliest)")
        if not 0 < self.repetition_penalty < inf:
            asked = "must be a number above 0: 1 changes nothing, 1.2 lowers what the text has"
            problems.append(f"--repetition-penalty {self.repetition_penalty:g}: {asked}")
        if not all(self.stops):
            problems.append("--stop: is empty, and would end every text at once (leave it out)")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            problems.append(f"--seed {self.seed}: must be from 0 to 2^63 - 1")
        if self.samples < 1:
            problems.append(f"--samples {self.samples}: must be at least 1")
        if self.samples > 1 and (self.temperature == 0 or self.top_k == 1):
            why = "--temperature 0" if self.temperature == 0 else "--top-k 1"
            problems.append(f"--samples {self.samples}: {why} gives the same text each time; leave one out")
        if problems:
            raise HpctrainError(problems)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities [b, V] fp64, zero for what may not be drawn, of finite logits [b, V]."""
        # Stable, so that of equal logits the first counts as the larger one, as in argmax.
        values, order = logits.double().sort(dim=-1, descending=True, stable=True)
        count = 1 if self.temperature == 0 else self.top_k or values.shape[-1]
        values[:, count:] = -inf
        chances = ((values - values[:, :1]) / (self.temperature or 1.0)).softmax(-1)
        if self.top_p is not None:
            before = chances.cumsum(-1) - chances
            chances[before >= self.top_p] = 0.0
            chances /= chances.sum(-1, keepdim=True)
        if self.min_p is not None:
            chances[chances < self.min_p * chances[:, :1]] = 0.0
            chances /= chances.sum(-1, keepdim=True)
        return torch.zeros_like(chances).scatter_(-1, order, chances)

    def generators(self) -> list[torch.Generator]:
        """One generator a sample; the first ones are the same whatever the number of samples."""
        source = torch.Generator()
        if self.seed is None:
            source.seed()
        else:
            source.manual_seed(self.seed)
        seeds = torch.randint(2**63 - 1, (self.samples,), generator=source)
        return [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]


class Seen:
    """Which tokens each of some samples has, its prompt's too."""

    def __init__(self, prompt: Sequence[int], samples: int) -> None:
        self._tokens = [set(prompt) for _ in range(samples)]

    def add(self, sample: int, token: int) -> None:
        """A sample has one more."""
        self._tokens[sample].add(token)

    def penalized(self, logits: Tensor, sample: int, sampling: Sampling) -> Tensor:
        """The logits [V] of a sample's next token, lower where it has that already."""
        if sampling.repetition_penalty == 1:
            return logits
        tokens = torch.tensor(sorted(self._tokens[sample]))
        tokens = tokens[tokens < logits.shape[0]]
        had, penalty = logits[tokens], sampling.repetition_penalty
        return logits.index_put((tokens,), torch.where(had < 0, had * penalty, had / penalty))


def generate(
    world: World,
    target: Path,
    source: PromptSource,
    sampling: Sampling,
    show: Callable[[str], None],
    live: bool,
) -> None:
    """`hpctrain generate`: continue prompts and show the texts, from rank 0.

    Collective. Those of lines of JSON are shown as such, others with their prompt. With `live`, a single
    sample is shown while it grows. An empty prompt begins a document, and where the model ends one the sample
    ends, or before one of `sampling.stops`. HpctrainError or InputOutputError, on all ranks, where an option
    or the checkpoint will not do, or something cannot be shown.
    """
    with world.agreement():
        sampling.check()
        prompts = source.read() if world.rank == 0 else []
    prompts = world.everyone.broadcast_object(prompts)
    path = find_checkpoint(world, target)
    writer = TextModel(world, path, *load_model(world, path))

    def show_agreed(text: str) -> None:
        with world.agreement():
            if world.rank == 0 and text:
                show(text)

    shown = 0

    def show_more(sample: Continuation) -> None:
        nonlocal shown
        show_agreed(sample.whole[shown:])
        shown = len(sample.whole)

    several = sampling.samples > 1
    for prompt in prompts:
        if live and not several and source.json_lines is None:
            shown = 0
            for _ in writer.samples_of(prompt.text, sampling, show_more):
                show_agreed("\n")
            continue
        for number, sample in enumerate(writer.samples_of(prompt.text, sampling), 1):
            if source.json_lines is not None:
                show_agreed(json_line(prompt, sample, number if several else None))
                continue
            heading = f"--- sample {number} of {sampling.samples} ---\n" if several else ""
            show_agreed(f"{heading}{sample.whole}\n")


class TextModel:
    """A model of a checkpoint and its tokenizer, by which all ranks of a world continue prompts together."""

    def __init__(self, world: World, path: Path, part: Part, tokenizer: Tokenizer) -> None:
        self.world, self.path, self.part, self.tokenizer = world, path, part, tokenizer

    def samples_of(
        self, prompt: str, sampling: Sampling, grown: Callable[[Continuation], None] = lambda _: None
    ) -> Iterator[Continuation]:
        """The samples of a prompt, each when it is whole; an empty one begins a document. Collective.

        `grown` is called with each of them before its first token, behind every one, and at its end.
        """
        ids = self.tokenizer.encode(prompt) or [self.tokenizer.end_of_document]
        generators = sampling.generators()
        for first in range(0, sampling.samples, SAMPLES_AT_A_TIME):
            yield from self._grow(ids, sampling, generators[first : first + SAMPLES_AT_A_TIME], grown)

    def _grow(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        generators: Sequence[torch.Generator],
        grown: Callable[[Continuation], None],
    ) -> list[Continuation]:
        """Samples that share forward passes, one a generator."""
        samples = [Continuation(self.tokenizer, ids, sampling.stops) for _ in generators]
        drawn = continue_tokens(
            self._next_logits,
            ids,
            self.part.hidden_shape(1)[0],
            self.tokenizer.end_of_document,
            sampling,
            generators,
            self.world.everyone,
            lambda number, token: samples[number].add(token),
        )
        for sample in samples:
            grown(sample)
        for _ in drawn:
            for sample in samples:
                grown(sample)
        for sample in samples:
            sample.finish()
            grown(sample)
        return samples

    def _next_logits(self, tokens: Tensor) -> Tensor:
        """As NextLogits; HpctrainError where they are not finite."""
        logits = logits_of(self.part, tokens.to(self.world.device), 1)
        logits = logits[:, 0, : self.tokenizer.vocabulary].float().cpu()
        if not bool(logits.isfinite().all()):
            sentence = "the model's logits are not finite, so that nothing can be drawn"
            raise HpctrainError(f"{self.path}: {sentence}")
        return logits


def json_line(prompt: Prompt, sample: Continuation, number: int | None) -> str:
    """What is told of a sample of a prompt that came as a line of JSON, whose other keys go with it."""
    told = {"prompt": prompt.text, "text": sample.text, "tokens": sample.tokens, "ended": sample.why}
    return json.dumps(prompt.others | told | ({} if number is None else {"sample": number})) + "\n"


def continue_tokens(
    next_logits: NextLogits,
    prompt: Sequence[int],
    window: int,
    end: int,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    group: Group,
    ends: Callable[[int, int], bool] = lambda *_: False,
) -> Iterator[list[int]]:
    """The next token of each sample, `sampling.tokens` times or until every sample has met `end`.

    One sample a generator; one that has ended goes on with `end`, and so does one of which `ends(number,
    token)` says that it ends there: the same on all ranks. The model sees the last `window` tokens.
    Collective over the group: its rank 0 draws.
    """
    context = torch.tensor([list(prompt[-window:])] * len(generators))
    ended = torch.zeros(len(generators), dtype=torch.bool)
    seen = Seen(prompt, len(generators))
    for _ in range(sampling.tokens):
        drawn = torch.full((len(generators),), end)
        logits = next_logits(context)
        if group.rank == 0:
            for row in (~ended).nonzero().flatten().tolist():
                chances = sampling.probabilities(seen.penalized(logits[row], row, sampling).unsqueeze(0))
                drawn[row] = torch.multinomial(chances, 1, generator=generators[row])[0, 0]
        group.broadcast(drawn)
        ended |= drawn == end
        for row in (~ended).nonzero().flatten().tolist():
            ended[row] = ends(row, int(drawn[row]))
            seen.add(row, int(drawn[row]))
        yield drawn.tolist()
        if bool(ended.all()):
            return
        context = torch.cat((context, drawn.unsqueeze(1)), dim=1)[:, -window:]


def load_model(world: World, path: Path) -> tuple[Part, Tokenizer]:
    """The model of a checkpoint, split over all ranks of the world, and its tokenizer. Collective.

    No gradients and no optimizer: the memory is that of the parameters. HpctrainError if the checkpoint
    has no deck or tokenizer, or the ranks cannot split the model; else errors as in checkpoint.read.load.
    """
    state = read_state(path, world.everyone)
    with world.agreement():
        deck = split_deck(state, path, world.size)
        tokenizer = stored_tokenizer(state, path)
        assert deck.model.vocabulary is not None and tokenizer.vocabulary <= deck.model.vocabulary
    torch.set_num_threads(deck.run.threads)
    return load_part(world, path, deck), tokenizer


def load_part(world: World, path: Path, deck: Deck) -> Part:
    """The model of a checkpoint whose `split_deck` this is, as of `load_model`. Collective."""
    assert deck.model.vocabulary is not None
    mesh = Mesh(world, {"tensor": world.size} | expert_sizes(deck))
    groups = make_groups(deck, mesh, SavedPolicy(), world.device)
    shape = ModelShape.of(deck, deck.model.vocabulary)
    own = count(shape).parameters // world.size * Precision.of(deck).storage.itemsize
    needed, advice = resident_bytes() + own, "more nodes would share the model"
    demand_room(world, Machine(), str(path), needed, lambda _: advice)
    model = build_model(shape, groups)
    stage = build_stage(deck, groups, [model], Replications.uncut(mesh))
    load_parameters(path, stage, world.everyone)
    return model


def split_deck(state: dict[str, Any], path: Path, ranks: int) -> Deck:
    """The checkpoint's deck with all ranks along the tensor axis; HpctrainErrors as of `load_model`."""
    deck = stored_deck(state, path)
    layout: dict[str, object] = {"data": None, "context": 1, "tensor": ranks, "sequence_parallel": False}
    # Experts lie spread over as many of the ranks as divide them.
    layout |= {"expert": gcd(ranks, deck.model.experts) if deck.model.experts else 1, "expert_tensor": 1}
    # In 8 bits a row would take longer, and its text would depend on those beside it.
    compute = "bf16" if deck.precision.compute == "fp8" else deck.precision.compute
    deck = deck.with_keys(layout=layout, precision={"compute": compute}, run={"noise_scale_steps": 0})
    problems = [problem for problem in check_deck(deck) if not (problem.for_writers or problem.idle)]
    if problems:
        begin = f"{ranks} ranks: the model of {path} is split over all of them, and their number"
        raise HpctrainError([f"{begin} {problem.sentence}" for problem in problems])
    return deck


def stored_tokenizer(state: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer in a checkpoint; HpctrainError where it has none."""
    text = state.get("tokenizer")
    if not isinstance(text, str):
        raise HpctrainError(
            f"{path}: holds no tokenizer, so that no text can be generated; train on a token file made by "
            "`hpctrain prepare`, which has one"
        )
    return Tokenizer(text, f"{path}: tokenizer")
