"""The trace of a module finds what a run saves and computes.

Also costs/layer_bytes/meta_device.py, costs/live_activations.py, memory/recompute.py and sharding/gather.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.meta_device import HostDeviceMode, MetaMode, meta_kernels
from hpctrain.costs.layer_flops import model_flops
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.model.construction import architecture_of
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.plan.memory_plan import plan_memory
from tests.engines import trainer
from tests.model.modules import models

MODELS, HERE = Path(models.__file__), Path(__file__)
VOCABULARY = 61
DECK = """
[run]
steps = 20
[model]
module = "{module}"
vocabulary = 61
{keys}
[model.arguments]
{arguments}
[data]
tokens = "none"
[batch]
global_size = 8
micro_size = 2
sequence = 64
"""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
EAGER = {"head_dim": 16, "attn_implementation": "eager", "pad_token_id": 0, "sliding_window": 32}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt": (f"{MODELS}:gpt", 'blocks = "layers.*"', {"sequence": 64, "hidden": 64}),
    "gpt dropout": (f"{MODELS}:gpt", 'blocks = "layers.*"', {"sequence": 64, "hidden": 64, "dropout": 0.1}),
    "gpt in one": (f"{MODELS}:gpt", "", {"sequence": 64, "hidden": 64}),
    "gpt frozen": (
        f"{MODELS}:gpt",
        'blocks = "layers.*"\nfrozen = ["embed.*", "positions", "scale", "layers.0.*"]',
        {"sequence": 64, "hidden": 64},
    ),
    "gpt, loss": (
        f"{MODELS}:gpt",
        f'blocks = "layers.*"\nloss = "{MODELS}:every_second"',
        {"sequence": 64, "hidden": 64},
    ),
    "odd": (f"{MODELS}:odd", 'blocks = "blocks.*"\nbuffers = "average"', {"hidden": 64}),
    "encoder": (f"{HERE}:encoder", 'blocks = "layers.*"', {}),
    "between": (f"{HERE}:between", 'blocks = "layers.*"', {}),
    "llama": ("transformers:LlamaForCausalLM", 'blocks = "model.layers.*"', GROUPED),
    "gpt2": ("transformers:GPT2LMHeadModel", 'blocks = "transformer.h.*"', GPT2),
    "gemma2": ("transformers:Gemma2ForCausalLM", 'blocks = "model.layers.*"', GROUPED | EAGER),
    "bert": ("transformers:BertForMaskedLM", 'blocks = "bert.encoder.layer.*"', SIZES),
}


class Encoder(nn.Module):
    """Torch's own layers, with a mask, which drop some of what they attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        row = (nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(row)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = torch.full((tokens.shape[1], tokens.shape[1]), -torch.inf, device=x.device).triu(1)
        with torch.autocast(device_type=x.device.type, enabled=False):
            for layer in self.layers:
                x = layer(x, src_mask=mask.to(x.dtype))
        return self.last(x)


def encoder() -> nn.Module:
    return Encoder()


class Between(nn.Module):
    """Keeps what it makes between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


def between() -> nn.Module:
    return Between()


def deck_of(kind: str, *overrides: str) -> Deck:
    module, keys, given = KINDS[kind]
    arguments = "\n".join(f"{key} = {toml_value(value)}" for key, value in given.items())
    return parse_deck(DECK.format(module=module, keys=keys, arguments=arguments), overrides)


def require_what_is_kept(world: World, kind: str, *overrides: str) -> int:
    """The most that is kept in a step, which is as planned."""
    deck = deck_of(kind, *overrides)
    (stage,) = plan_memory(deck, world.size, VOCABULARY).stages
    training = trainer(world, deck)
    training.train(1)
    kept = max(world.everyone.all_gather_object(training.activations.bytes or 0))
    # In bf16 a CPU keeps statistics of norms in bf16, too.
    within = 0.01 if deck.precision.compute == "bf16" or deck.model.loss else 0.0
    assert stage.memory.activation == pytest.approx(kept, rel=within), kind
    return kept


@pytest.mark.sampled(6)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_is_kept(world: World, kind: str, compute: str) -> None:
    format_of = f"precision.compute={compute}"
    kept = require_what_is_kept(world, kind, format_of)
    if "blocks" in KINDS[kind][1]:
        less = require_what_is_kept(world, kind, format_of, "memory.recompute=full")
        assert less < 0.8 * kept or kind in {"odd", "between"}  # whose blocks save little


def test_a_penalty_of_large_logits_keeps_more(world: World) -> None:
    plain = require_what_is_kept(world, "gpt")
    penalty = require_what_is_kept(world, "gpt", "stability.z_loss=1e-3", "batch.micro_size=2")
    assert penalty > plain + 2 * 64 * VOCABULARY * 4


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["gpt dropout", "odd", "llama"])
def test_what_is_gathered_is_not_kept_but_all_else_is_counted(
    world: World, kind: str, recompute: str
) -> None:
    again = f"memory.recompute={recompute}"
    whole = require_what_is_kept(world, kind, again, "layout.zero=0")
    assert require_what_is_kept(world, kind, again, "layout.zero=3") == whole
    apart = "communication.transport=mpi"
    assert require_what_is_kept(world, kind, again, "layout.zero=3", apart) == whole


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", ["between", "llama"])
def test_stages_keep_what_is_planned(world: World, kind: str) -> None:
    deck = deck_of(kind, "layout.pipeline=2")
    training = trainer(world, deck)
    training.train(1)
    planned = plan_memory(deck, 2, VOCABULARY).stages[world.rank].memory.activation
    # What arrives is there twice for a moment.
    within = 0.0 if world.rank == 0 else 0.1
    assert planned == pytest.approx(training.activations.bytes, rel=within)


@pytest.mark.parametrize("kind", ["gpt", "llama", "gpt2", "gemma2", "bert", "encoder"])
def test_flops_are_those_of_all_products(kind: str) -> None:
    architecture = architecture_of(deck_of(kind), VOCABULARY)
    assert isinstance(architecture, ModuleArchitecture)
    module = architecture.build(torch.device("cpu"))
    tokens = torch.ones(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        made = module(tokens)
    assert made is not None
    found = model_flops(architecture)
    assert found.flops_per_token == pytest.approx(3 * counter.get_total_flops() / 64, rel=1e-6)
    # Products of queries and keys, and with values, of four heads of 16 (or three layers of gpt's).
    layers = 3 if kind == "gpt" else 2
    assert found.core_forward == pytest.approx(layers * 4 * 64 * 64, rel=0.02)


def test_what_goes_by_its_own_values_is_unknown_in_a_sentence(world: World) -> None:
    KINDS["branching"] = f"{MODELS}:Branching", "", {}
    deck = deck_of("branching")
    del KINDS["branching"]
    plan = plan_memory(deck, 1, VOCABULARY)
    assert not plan.activations_known and plan.stages[0].memory.activation == 0
    told = "models.py:Branching fails with tokens of shape [2, 64]: RuntimeError: Tensor.item()"
    reason = plan.unknown_reason
    assert reason is not None and reason.startswith(told) and "\n" not in reason
    # Products are counted all the same: with matrices that are not looked up.
    assert model_flops(architecture_of(deck, VOCABULARY)).flops_per_token == 6 * 8 * VOCABULARY
    trainer(world.single_rank_world(), deck).train(1)


def shapes_kept(compute: Callable[[], Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    kept: list[tuple[torch.Size, torch.dtype]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor.shape, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("mask", [None, torch.bool, "as queries"])
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_attention_keeps_on_meta_what_it_keeps_here(
    dtype: torch.dtype, heads: int, mask: torch.dtype | str | None, drop: float
) -> None:
    def attend(device: str) -> Tensor:
        query = torch.ones(2, 4, 16, 8, device=device, dtype=dtype, requires_grad=True)
        key = torch.ones(2, heads, 16, 8, device=device, dtype=dtype, requires_grad=True)
        added = None
        if mask is not None:
            added = torch.ones(16, 16, device=device, dtype=mask if mask == torch.bool else dtype).tril()
        return functional.scaled_dot_product_attention(
            query, key, key, added, drop, mask is None, enable_gqa=heads < 4
        )

    here = shapes_kept(lambda: attend("cpu"))
    with meta_kernels(gpu=False), HostDeviceMode(), MetaMode(lambda *_: None):
        there = shapes_kept(lambda: attend("cpu"))
    assert sorted(map(str, there)) == sorted(map(str, here))
    if drop:
        with meta_kernels(gpu=True), HostDeviceMode(), MetaMode(lambda *_: None):
            fused = shapes_kept(lambda: attend("cpu"))
        assert (torch.Size([2, 4, 16, 16]), dtype) not in fused
    assert torch.ones(2).device.type == "cpu"


def test_a_mask_of_what_is_dropped_is_a_byte_an_element_on_a_gpu() -> None:
    def drop(p: float, training: bool = True) -> Tensor:
        return functional.dropout(torch.ones(2, 3, requires_grad=True), p, training)

    here = shapes_kept(lambda: drop(0.5))
    for gpu, expected in ((False, here), (True, [(torch.Size([2, 3]), torch.bool)])):
        with meta_kernels(gpu), HostDeviceMode(), MetaMode(lambda *_: None):
            assert shapes_kept(lambda: drop(0.5)) == expected
            assert shapes_kept(lambda: drop(0.0)) == shapes_kept(lambda: drop(0.5, training=False)) == []


def test_values_that_follow_from_what_is_given_are_known_until_they_change() -> None:
    with HostDeviceMode(), MetaMode(lambda *_: None):
        tokens = torch.arange(6).view(2, 3)
        assert tokens.is_meta and tokens.device.type == "cpu"
        assert tokens[1, 2].item() == 5 and int(tokens.sum()) == 15
        assert (tokens > 2).nonzero().shape == (3, 2)
        assert torch.ones(2, 3)[tokens > 3].shape == (2,)
        row = tokens[0]
        row.add_(10)
        assert int(tokens[0, 0]) == 10
        row.copy_(torch.randint(3, (3,)))
        with pytest.raises(RuntimeError, match="meta"):
            tokens[0, 0].item()
        with pytest.raises(RuntimeError, match="meta"):
            torch.rand(3)[0].item()
