"""What answers are drawn by is what they are trained by: log-probabilities of their tokens, made of the very
logits that a draw saw with a cache, beside those that training begins from, to the bit.

Tests of post/writer.py and post/rollout_builder.py, with generate/cached_passes.py,
objective/log_probabilities.py and objective/token_sampling.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.generate.continuous_batching import GeneratedText
from hpctrain.generate.sampling import KeyedSampler
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.objective.policy import OLD, PolicyOptimization
from hpctrain.objective.token_sampling import TokenSampling
from hpctrain.parallel.kernels.logits import SplitLogits
from hpctrain.parallel.vocabulary import VocabularyHead
from hpctrain.post import writer
from hpctrain.post.policy_trainer import PolicyTrainer
from hpctrain.train.layout_verification import verify_layout
from tests.post.rough_policies import folder, policy_deck, policy_trainer, settled

__all__ = ["folder"]

Drawn = dict[tuple[int, int, int], tuple[Tensor, Tensor]]
"""Logits [V], and chances of those that may be drawn, by a text's number, its sample, and the place of the
token that was drawn by them.
"""

KEYS = ("policy.rollout=24", "policy.tokens=14", "batch.global_size=24", "policy.epochs=1", "run.steps=4")
GPT2 = ("model.family=gpt2", "model.key_value_heads=8")
NORMED = ("model.query_key_norm=head", "model.mlp=40")
EXACT: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one": ("memory.recompute=full",), "short": ("batch.micro_size=1",)},
    2: {"data": ("layout.zero=2",), "tensor": ("layout.tensor=2",)},
}
OTHERS = {
    "sequence": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "context": ("layout.context=2",),
    "pipeline": ("layout.pipeline=2",),
    "zero": ("layout.zero=3",),
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What this rank draws by from now on."""
    found: Drawn = {}

    class Watched(KeyedSampler):
        def __call__(self, texts: Sequence[GeneratedText], logits: Tensor) -> list[int]:
            chances = self.sampling.probabilities(logits[:, : self.vocabulary].float())
            for text, *rows in zip(texts, logits.clone(), chances, strict=True):
                found[text.prompt_number, text.sample_number, len(text.tokens)] = rows[0], rows[1]
            return super().__call__(texts, logits)

    monkeypatch.setattr(writer, "KeyedSampler", Watched)
    return found


def of_draws(head: VocabularyHead, logits: Tensor, tokens: Tensor, drawing: TokenSampling) -> Tensor:
    """Log-probabilities of tokens [n] by whole logits [n, V], as training computes them of this rank's."""
    shard = head.table.shard
    first, columns = shard.start[0], head.rows
    own = logits[:, first : first + columns]
    products = functional.pad(own, (0, shard.local[0] - columns)).contiguous()
    entropy = CrossEntropy(tokens, torch.zeros(()), sampling=drawing)
    every = slice(0, len(tokens))
    losses, _ = entropy.chunk_losses(head, SplitLogits(products, columns), every, needs_gradient=False)
    return -losses


def both(trainer: PolicyTrainer, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Of all tokens that this rank has drawn in a rollout: log-probabilities by the draws, and as they are
    trained by. Collective.

    The former are the logarithms of the chances that they had, but for rounding.
    """
    assert trainer.rollout_builder is not None
    rollout = trainer.rollouts.rollout
    assert rollout is not None
    (head,) = (
        each for each in trainer.rollout_builder.writer.model.modules() if isinstance(each, VocabularyHead)
    )
    logits, tokens, old, chances = [], [], [], []
    for row, answer in enumerate(rollout.answers):
        for place in range(len(answer.ids) - answer.length, len(answer.ids)):
            if (answer.prompt_number, answer.sample_number, place) in drawn:
                of_token, had = drawn[answer.prompt_number, answer.sample_number, place]
                logits.append(of_token)
                chances.append(had[answer.ids[place]])
                tokens.append(answer.ids[place])
                old.append(rollout.fields[OLD][row, place - 1])
    assert len(old) == len(drawn) > 60
    objective = trainer.engine.objective
    assert isinstance(objective, PolicyOptimization)
    by_draws = of_draws(head, torch.stack(logits), torch.tensor(tokens), objective.sampling)
    torch.testing.assert_close(by_draws.double(), torch.stack(chances).log(), rtol=1e-6, atol=1e-6)
    return by_draws, torch.stack(old)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("family", [(), GPT2, NORMED], ids=["llama", "gpt2", "normed"])
def test_the_same_bits_on_the_same_layout(
    world: World, folder: Path, drawn: Drawn, compute: str, family: tuple[str, ...]
) -> None:
    compiled = "machine.compile=true", f"precision.compute={compute}"
    for name, layout in EXACT[world.size].items():
        trainer = policy_trainer(world, policy_deck(folder, name, *KEYS, *family, *compiled, *layout))
        assert trainer.engine.stage.layer_context.functions.compiled
        assert trainer.rollout_builder is not None
        if name in {"short", "tensor"}:
            # Passes have fewer rows than products of many begin with.
            trainer.rollout_builder.writer.max_texts = 2
        drawn.clear()
        result = trainer.train_step()
        by_draws, trained = both(trainer, drawn)
        assert float((by_draws - trained).abs().max()) == 0.0, name
        # And so the pass with gradients has them.
        assert (result.metrics["moved"], result.metrics["clip_share"]) == (0.0, 0.0)
        assert result.metrics["kl"] != 0
        trainer.engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_drawn_are_some_of_the_models_tokens_at_a_temperature(
    world: World, folder: Path, drawn: Drawn, compute: str
) -> None:
    """Of 400 tokens 257 can be: on two tensor ranks the second one has 57 of these, then 143 others."""
    wide = (
        *KEYS,
        "policy.temperature=0.7",
        "model.vocabulary=400",
        "machine.compile=true",
        f"precision.compute={compute}",
    )
    trainer = policy_trainer(world, policy_deck(folder, "wide", *wide, f"layout.tensor={world.size}"))
    result = trainer.train_step()
    by_draws, trained = both(trainer, drawn)
    assert float((by_draws - trained).abs().max()) == 0.0
    assert (result.metrics["moved"], result.metrics["clip_share"]) == (0.0, 0.0)
    rows, chances = zip(*drawn.values(), strict=True)
    assert {len(each) for each in rows} == {400}
    assert {len(each) for each in chances} == {257}
    trainer.engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_by_torch_they_agree(world: World, folder: Path, drawn: Drawn) -> None:
    for name, layout in EXACT[world.size].items():
        trainer = policy_trainer(world, policy_deck(folder, name, *KEYS, "machine.compile=false", *layout))
        drawn.clear()
        trainer.train_step()
        by_draws, trained = both(trainer, drawn)
        assert float((by_draws - trained).abs().max()) <= 1e-5, name
        trainer.engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_logits_that_are_scaled_are_not_rounded_again(world: World, folder: Path, drawn: Drawn) -> None:
    """A loss has their factor, 3/4 here, within its sums."""
    scaled = "model.parametrization=mup", "model.base_width=24", "model.base_head_size=4"
    keys = *KEYS, *scaled, "machine.compile=true", "precision.compute=bf16", f"layout.tensor={world.size}"
    trainer = policy_trainer(world, policy_deck(folder, "scaled", *keys))
    trainer.train_step()
    by_draws, trained = both(trainer, drawn)
    assert float((by_draws - trained).abs().max()) <= 1e-5
    trainer.engine.close()


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", OTHERS)
def test_by_a_copy_in_another_layout_they_agree(world: World, folder: Path, drawn: Drawn, name: str) -> None:
    trainer = policy_trainer(world, policy_deck(folder, name, *KEYS, "machine.compile=true", *OTHERS[name]))
    result = trainer.train_step()
    assert result.metrics["moved"] == 0.0  # trained in the layout that told `old`
    by_draws, trained = both(trainer, drawn)
    assert float((by_draws - trained).abs().max()) <= 1e-5
    trainer.engine.close()
    # After updates the copy draws by the new weights.
    drawn.clear()
    trainer.train_step()
    by_draws, trained = both(trainer, drawn)
    assert float((by_draws - trained).abs().max()) <= 1e-5


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_layout_is_checked_with_all_tokens_of_its_miniature(world: World, folder: Path) -> None:
    """Of a tokenizer that has fewer of them its deck tells."""
    deck = settled(world, policy_deck(folder, "few", f"layout.tensor={world.size}", "policy.temperature=2"))
    deck = deck.with_runtime_choices(replace(deck.runtime_choices, tokenizer_tokens=9))
    assert verify_layout(deck, world, make_mesh(deck, world)).startswith("layout check passed")
