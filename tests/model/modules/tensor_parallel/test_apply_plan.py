"""Modules that are split over tensor ranks take the steps of a plain loop on one process.

Also model/modules/module_layers.py, losses of split logits in objective/module_loss.py, and
model/modules/tensor_parallel/parallel_layers.py, model/modules/tensor_parallel/activation_collectives.py,
model/modules/tensor_parallel/expert_styles.py and model/modules/tensor_parallel/transformers_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.deck.code import NamedCode
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.instantiate import build_module
from hpctrain.model.modules.module_call import find_logits
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.traffic_plan import plan_traffic
from tests.engines import Trainer, by_rank_0, reference, trainer
from tests.model.modules import models
from tests.model.modules.module_decks import DECK, GPT2, LLAMA, MODELS, STEPS, loss_of, plain_loop
from tests.plan.test_traffic_plan import sent

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NEOX = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    **TOKENS,
}
OPT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "init_std": 0.1,
    "dropout": 0.0,
    **TOKENS,
}
OWN_PLAN = "its own"

GPT_PLAN = {
    "embed": "vocabulary",
    "head": "vocabulary",
    "layers.*.attention": "gather",
    "layers.*.attention.qkv": {"split": "column", "parts": 3, "unit": 8},
    "layers.*.attention.out": "row",
    "layers.*.attention.heads": "divided",
    "layers.*.mlp.0": "column",
    "layers.*.mlp.2": "row",
    # With pieces of sequences:
    "layers.0": "cut",
    "layers.*.norm?": "sequence",
    "norm": "sequence",
    "scale": "sequence",
}
LLAMA_PLAN = {
    "model.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "model.layers.0": "cut",
    "model.layers.*.self_attn": "gather",
    "model.layers.*.self_attn.[qkv]_proj": {"split": "column", "unit": 8},
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp": "gather",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.*_layernorm": "sequence",
    "model.norm": "sequence",
}
GPT2_PLAN = {
    "transformer.wte": "vocabulary",
    "lm_head": "vocabulary",
    "transformer.h.0": "cut",
    "transformer.h.*.attn": "gather",
    "transformer.h.*.attn.c_attn": {"split": "column", "parts": 3, "unit": 8},
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.attn.split_size": "divided",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
    "transformer.h.*.ln_?": "sequence",
    "transformer.ln_f": "join",
}
PHI3_PLAN = {
    "model.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "model.layers.0": "cut",
    "model.layers.*.self_attn.qkv_proj": {"split": "column", "parts": [32, 16, 16], "unit": 8},
    "model.layers.*.self_attn": "gather",
    "model.layers.*.self_attn.num_key_value_heads": "divided",
    "model.layers.*.self_attn.config.num_attention_heads": "divided",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_up_proj": {"split": "column", "parts": 2},
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.*_layernorm": "sequence",
    "model.norm": "sequence",
}
QWEN3_PLAN = LLAMA_PLAN | {"model.layers.*.self_attn.?_norm": "partial"}
NEOX_PLAN = {
    "gpt_neox.embed_in": "vocabulary",
    "lm_head": "vocabulary",
    "gpt_neox.layers.0": "cut",
    "gpt_neox.layers.*.attention.query_key_value": {"split": "column", "unit": 24},
    "gpt_neox.layers.*.attention.dense": "row",
    "gpt_neox.layers.*.attention": "gather",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "column",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "row",
    "gpt_neox.layers.*.*_layernorm": "sequence",
    "gpt_neox.final_layer_norm": "sequence",
}
OPT_PLAN = {
    "model.decoder.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "model.decoder.layers.*.self_attn": "gather",
    "model.decoder.layers.*.self_attn.[qkv]_proj": {"split": "column", "unit": 8},
    "model.decoder.layers.*.self_attn.num_heads": "divided",
    "model.decoder.layers.*.self_attn.out_proj": "row",
    "model.decoder.layers.*.fc1": "column",
    "model.decoder.layers.*.fc2": "row",
}
TWICE_PLAN = {
    "embed": "vocabulary",
    "head": "vocabulary",
    "norm": "sequence",
    "last": "sequence",
    "up": "column",
    "down": "row",
    "level": "partial",
    "mix": "gathered column",
    "back": "row of whole input",
}
LATENT_PLAN = {
    "embed": "vocabulary",
    "head": "vocabulary",
    "attention.queries": {"split": "column", "unit": 8},
    "attention.compressed": {"split": "partial features", "features": 4},
    "attention.expanded": {"split": "column", "unit": 12},
    "attention.decays": "row with split output",
    "attention.sinks": "split parameter",
    "attention.out": "row",
    "experts": "sorted expert",
    "shared": "sum",
    "shared.up": {"split": "split parameter", "dim": 1},
    "shared.down": {"split": "split parameter", "dim": 2},
    "shared.slope": "partial",
    "chosen": "expert with identities",
}

KINDS: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "gpt": (f"{MODELS}:gpt", "layers.*", {"layers": 2}, GPT_PLAN),
    "llama": ("transformers:LlamaForCausalLM", "model.layers.*", LLAMA, LLAMA_PLAN),
    "gpt2": ("transformers:GPT2LMHeadModel", "transformer.h.*", GPT2, GPT2_PLAN),
    "mistral": (
        "transformers:MistralForCausalLM",
        "model.layers.*",
        LLAMA | {"sliding_window": 8},
        LLAMA_PLAN,
    ),
    "qwen2": ("transformers:Qwen2ForCausalLM", "model.layers.*", LLAMA, LLAMA_PLAN),
    "qwen3": ("transformers:Qwen3ForCausalLM", "model.layers.*", LLAMA | {"head_dim": 8}, QWEN3_PLAN),
    "phi3": ("transformers:Phi3ForCausalLM", "model.layers.*", LLAMA | TOKENS, PHI3_PLAN),
    "neox": ("transformers:GPTNeoXForCausalLM", "gpt_neox.layers.*", NEOX, NEOX_PLAN),
    "opt": ("transformers:OPTForCausalLM", "model.decoder.layers.*", OPT, OPT_PLAN),
    "tied": (
        "transformers:LlamaForCausalLM",
        "model.layers.*",
        LLAMA | {"tie_word_embeddings": True},
        LLAMA_PLAN,
    ),
    "experts": (
        "transformers:Qwen3MoeForCausalLM",
        "model.layers.*",
        LLAMA
        | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"experts_implementation": "eager"},  # the other one is not for fp64
        OWN_PLAN,
    ),
    "twice": (f"{MODELS}:twice", "up", {"hidden": 16}, TWICE_PLAN),
    "latent": (f"{MODELS}:latent", "attention", {"hidden": 16}, LATENT_PLAN),
    "gemma2": (
        "transformers:Gemma2ForCausalLM",
        "model.layers.*",
        LLAMA | {"head_dim": 8, "sliding_window": 8} | TOKENS,
        OWN_PLAN,
    ),
    "gemma3": (
        "transformers:Gemma3ForCausalLM",
        "model.layers.*",
        LLAMA | {"head_dim": 8, "sliding_window": 8} | TOKENS,
        OWN_PLAN,
    ),
}
TENSOR = ("layout.tensor=2",)
PIECES = (*TENSOR, "layout.sequence_parallel=true")
NO_PIECES = OWN_PLAN, OPT_PLAN, LATENT_PLAN


def deck_of(kind: str, *overrides: str, plan: Any = None) -> Deck:
    target, blocks, arguments, own = KINDS[kind]
    rows = "\n".join(f"{name} = {toml_value(value)}" for name, value in arguments.items())
    more = f"plan = {toml_value(plan or own)}"
    text = DECK.format(module=target, blocks=blocks, more=more, arguments=rows)
    return parse_deck(text, overrides)


def whole_parameters(training: Trainer, world: World) -> dict[str, Tensor]:
    """All parameters, put together of all ranks' pieces. Collective."""
    whole: dict[str, Tensor] = {}
    pieces = [
        (
            segment.parameter.shard,
            segment.view(bucket.gather_owned(bucket.owned_values)).detach().float().clone(),
        )
        for bucket in training.engine.stage.buckets
        for segment in bucket.segments
    ]
    covered: dict[str, Tensor] = {}
    for shard, piece in (each for of_rank in world.everyone.all_gather_object(pieces) for each in of_rank):
        target = whole.setdefault(shard.name, torch.zeros(shard.shape))
        own = piece[tuple(slice(0, size) for size in shard.extent)]
        known = covered.setdefault(shard.name, torch.zeros(shard.shape, dtype=torch.bool))
        assert torch.equal(target[shard.slices][known[shard.slices]], own[known[shard.slices]]), shard.name
        target[shard.slices], known[shard.slices] = own, True
    assert all(bool(each.all()) for each in covered.values())
    return whole


def sum_of_losses(outputs: Any, targets: Tensor) -> Tensor:
    """As of a plain loop."""
    return loss_of((find_logits(outputs),), targets)


def assert_equal_steps(
    world: World, deck: Deck, steps: int = STEPS, loss: Callable[[Any, Tensor], Tensor] = sum_of_losses
) -> None:
    """A run of a layout takes the steps of the plain loop."""
    training = trainer(world, deck)
    weights = whole_parameters(training, world)
    target, arguments = str(deck.model.module), deck.model.arguments or {}

    def alone() -> tuple[list[list[float]], dict[str, Tensor]]:
        own = getattr(models, target.rpartition(":")[2], None)
        model = build_module(NamedCode(target), arguments) if own is None else own(**arguments)
        figures, model = plain_loop(training, model, weights, steps, deck.batch.micro_size, loss)
        return figures, {name: value.detach() for name, value in model.named_parameters()}

    figures, expected = by_rank_0(world, alone)
    found = [[result.loss, result.grad_norm] for result in training.train(steps)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    here = whole_parameters(training, world)
    assert here.keys() == expected.keys()
    for name, value in here.items():
        assert (value - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
        frozen = any(fnmatchcase(name, pattern) for pattern in deck.model.frozen)
        assert torch.equal(value, weights[name]) == frozen, name


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "kind", ["gpt", "tied", "experts", "twice", "gemma3", "latent"]
)  # others: test_stock.py
def test_tensor_ranks_take_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, *TENSOR))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", [name for name, (*_, plan) in KINDS.items() if plan not in NO_PIECES])
def test_pieces_of_sequences_take_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, *PIECES))


@pytest.mark.mpi(min_size=2, max_size=2)
def test_pieces_of_sequences_are_not_flattened(world: World) -> None:
    with pytest.raises(
        HpctrainError,
        match=r"expected activations of shape \[batch, sequence, features\], got",
    ):
        trainer(world, deck_of("opt", *PIECES)).train(1)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", ["gpt", "gpt2", "qwen3", "twice"])
def test_a_run_sends_what_was_planned(world: World, kind: str) -> None:
    for layout in (TENSOR, (*PIECES, "memory.recompute=full")):
        deck = deck_of(kind, *layout)
        planned = plan_traffic(deck, world.size, 61)
        assert planned.complete
        assert planned.stages[0].payload() == sent(world, deck), layout


def test_what_a_module_sends_is_unknown_where_it_asks_for_values() -> None:
    assert not plan_traffic(deck_of("experts", *TENSOR), 2, 61).complete


MORE: dict[str, tuple[str, ...]] = {
    "zero 3": (*TENSOR, "layout.zero=3"),
    "zero 3, recomputed": (*PIECES, "layout.zero=3", "memory.recompute=full", "communication.transport=mpi"),
    "zero 1": (*PIECES, "layout.zero=1", "communication.bucket_bytes=100"),
}


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("gpt", layout) for layout in MORE),
        *(("llama", "zero 3"), ("phi3", "zero 1")),
        *((kind, "zero 3, recomputed") for kind in ("gpt2", "twice")),
    ],
)
def test_data_and_tensor_ranks_take_the_steps_of_a_plain_loop(world: World, kind: str, layout: str) -> None:
    assert_equal_steps(world, deck_of(kind, *MORE[layout]))


@pytest.mark.mpi(min_size=4, max_size=4)
def test_ranks_that_share_heads_take_the_steps_of_a_plain_loop(world: World) -> None:
    """Two heads of keys and values on four ranks."""
    groups = {"model.layers.*.self_attn.num_key_value_groups": {"split": "divided", "units": 2}}
    deck = deck_of("llama", "layout.tensor=4", plan=LLAMA_PLAN | groups)
    assert_equal_steps(world, deck)
    assert_equal_steps(world, deck_of("llama", "layout.tensor=4", plan=OWN_PLAN), steps=2)
    pieces = "layout.tensor=4", "layout.sequence_parallel=true"
    assert_equal_steps(world, deck_of("llama", *pieces, plan=LLAMA_PLAN | groups))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", ["gpt", "gpt2", "phi3", "twice"])
def test_blocks_are_computed_again(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, *PIECES, "memory.recompute=full", "layout.zero=2"))


@pytest.mark.mpi(min_size=2, max_size=2)
def test_the_partition_function_of_split_logits_has_its_gradient(world: World) -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        squares = find_logits(outputs).logsumexp(-1).square() * (targets >= 0)
        return sum_of_losses(outputs, targets) + 0.05 * squares.sum()

    training = trainer(world, deck_of("twice", *TENSOR, "stability.z_loss=0.05"))
    weights = whole_parameters(training, world)
    figures, _ = plain_loop(training, models.twice(16), weights, steps=3, loss=loss)
    found = training.train(3)
    assert [each.grad_norm for each in found] == pytest.approx([norm for _, norm in figures], rel=1e-5)
    assert all(each.loss < total - 0.1 for each, (total, _) in zip(found, figures, strict=True))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", [TENSOR, PIECES], ids=["whole", "pieces"])
def test_a_users_loss_sees_whole_logits(world: World, layout: tuple[str, ...]) -> None:
    deck = deck_of("gpt", *layout, f"model.loss={MODELS}:every_second")
    training = trainer(world, deck)
    weights = whole_parameters(training, world)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return loss_of((outputs[0][:, ::2],), targets[:, ::2])

    loop = {"steps": 3, "loss": loss, "counted": lambda targets: targets[:, ::2]}
    figures, _ = plain_loop(training, models.gpt(layers=2), weights, **loop)
    found = [[result.loss, result.grad_norm] for result in training.train(3)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "frozen", ["['layers.0.*', 'embed.*']", "['layers.1.attention.*', '*.mlp.2.weight']"]
)
def test_what_is_frozen_of_split_layers_stays(world: World, frozen: str) -> None:
    assert_equal_steps(world, deck_of("gpt", *PIECES, f"model.frozen={frozen}"), steps=3)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_half_precision_trains_as_on_one_rank(world: World) -> None:
    for kind in ("gpt", "gpt2"):
        deck = deck_of(kind, *PIECES, "precision.compute=bf16")
        alone = by_rank_0(world, lambda deck=deck: [each.loss for each in reference(world, deck).train(4)])
        found = [each.loss for each in trainer(world, deck).train(4)]
        assert found == pytest.approx(alone, rel=2e-2)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_experts_that_are_grouped_or_have_no_tokens_train_as_on_one_rank(world: World) -> None:
    few = {"num_hidden_layers": 4, "experts_implementation": "eager", "num_experts_per_tok": 1}
    kinds = {"grouped": {"experts_implementation": "grouped_mm"}, "few tokens": few}
    for kind, more in kinds.items():
        arguments = toml_value(KINDS["experts"][2] | more)
        small = ("batch.sequence=1", "batch.micro_size=1") if kind == "few tokens" else ()
        deck = deck_of("experts", *TENSOR, *small, f"model.arguments={arguments}")
        alone = by_rank_0(world, lambda deck=deck: [each.loss for each in reference(world, deck).train(4)])
        found = [each.loss for each in trainer(world, deck).train(4)]
        assert found == pytest.approx(alone, rel=1e-5), kind


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", ["gpt2", "twice", "phi3"])
def test_initial_values_and_losses_of_held_out_samples_are_those_of_one_rank(world: World, kind: str) -> None:
    deck = deck_of(kind, *PIECES)

    def alone() -> tuple[dict[str, Tensor], float]:
        training = reference(world, deck)
        loss = training.evaluate(training.step.batches, 4)["loss"]
        return {name: value.clone() for name, value in training.parameters().items()}, loss

    expected, loss = by_rank_0(world, alone)
    training = trainer(world, deck)
    found = whole_parameters(training, world)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert training.evaluate(training.step.batches, 4)["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_masks_are_equal_on_tensor_ranks(world: World) -> None:
    """What follows of it: losses are those of one rank, whose masks of whole activations are the same."""
    deck = deck_of("twice", *TENSOR, "model.arguments={hidden = 16, dropout = 0.3}")
    alone = by_rank_0(world, lambda: [each.loss for each in reference(world, deck).train(4)])
    assert [each.loss for each in trainer(world, deck).train(4)] == pytest.approx(alone, rel=1e-5)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", ["llama", "neox", "phi3"])
def test_an_own_plan_takes_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, *TENSOR, plan=OWN_PLAN))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", ["gpt", "gpt2", "phi3"])
def test_activations_are_planned_of_split_modules(world: World, kind: str) -> None:
    for layout in (TENSOR, (*PIECES, "memory.recompute=full")):
        deck = deck_of(kind, *layout)
        (stage,) = plan_memory(deck, world.size, 61).stages
        training = trainer(world, deck)
        training.train(1)
        assert stage.memory.activation == pytest.approx(training.activations.bytes or 0, rel=0.1), layout
