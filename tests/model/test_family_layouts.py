"""Choices of families on every layout: the model of one rank, and memory as planned.

Tests of model/norm.py, model/transformer.py, model/attention/latent_attention.py,
parallel/replicated_linear.py, parallel/operations.py, costs/layer_bytes/latent_bytes.py and
parallel/kernels/normalization.py beside model/part.py.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.model.mixtures.router import Router
from hpctrain.parallel.kernels.normalization import normalize
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.train.layout_verification import compare
from hpctrain.train.scaled_down_deck import scale_down_family, with_fp8_products
from tests.engines import LLAMA, small_deck, trainer
from tests.plan.test_mixture import choose_in_turn

MULTIPLIERS = (
    "model.embedding_multiplier=3",
    "model.residual_multiplier=0.4",
    "model.attention_scale=0.5",
    "model.logit_multiplier=0.7",
    "model.logit_cap=2",
)
LATENT = (
    *("model.family=llama", "model.mlp=48", "model.head_size=12"),
    *("model.latent.key_value_rank=10", "model.latent.rotary_size=4"),
)
CHOICES: dict[str, tuple[str, ...]] = {
    "gemma": (*LLAMA, "model.family=gemma", "model.head_size=6"),
    "olmo": (*LLAMA, "model.family=olmo"),
    "olmo2": (*LLAMA, "model.family=olmo2"),
    "multiplied": (*LLAMA, *MULTIPLIERS, "model.mlp_bias=true", "model.attention_bias=all"),
    "both": (*LLAMA, "model.norm_placement=both", "model.norm_weight=one_plus", "model.query_key_norm=head"),
    "no-bias": ("model.norm_bias=false", "model.activation=gelu"),
    "one-norm": ("model.norm_bias=false", "model.parallel_residual=one_norm", "model.dropout=0.1"),
    "two-norms": (*LLAMA, "model.parallel_residual=two_norms", "model.norm=layer", "model.norm_bias=true"),
    "neox": ("model.family=neox", "model.head_size=8", "model.dropout=0.1"),
    "glm4": (*LLAMA, "model.family=glm4", "model.head_size=8"),
    "smollm3": (
        *LLAMA,
        "model.rotation_pattern=[true, false]",
        "model.rotary_fraction=0.5",
        "model.head_size=8",
    ),
    "gemma3": (
        *LLAMA,
        "model.family=gemma3",
        "model.windows=[4, 0]",
        "model.head_size=6",
        "model.rope_local_base=300",
    ),
    "windows": (*LLAMA, "model.windows=[5, 0]", "model.head_size=6", "model.query_key_norm=head"),
    "packed-window": (
        *LLAMA,
        "model.windows=[3, 0]",
        "model.attention_sinks=true",
        "data.document_mask=true",
    ),
    "one-window": (*LLAMA, "model.windows=[7]", "model.rope_local_base=300"),
    "capped": (*LLAMA, "model.windows=[0, 3]", "model.attention_cap=0.5", "model.rope_local_base=300"),
    "clipped": (*LLAMA, "model.query_key_value_clip=0.1"),
    "clipped-norm": (
        *LLAMA,
        "model.query_key_value_clip=0.1",
        "model.query_key_norm=head",
        "model.head_size=6",
    ),
    "sinks": (*LLAMA, "model.attention_sinks=true"),
    "window-sinks": (
        *LLAMA,
        "model.attention_sinks=true",
        "model.windows=[3, 0]",
        "model.attention_bias=all",
    ),
    "gpt-oss": (
        *LLAMA,
        "model.family=gpt-oss",
        "model.windows=[5, 0]",
        "model.experts.count=4",
        "model.experts.mlp=24",
    ),
    "unordered": (*LLAMA, "model.positions=none"),
    "latent": (*LATENT, "model.latent.query_rank=14", "model.latent.value_size=6"),
    "latent-keys": LATENT,
    "latent-window": (*LATENT, "model.windows=[5, 0]", "model.attention_cap=2"),
}
"""Keys of a deck, by name."""
LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    1: [()],
    2: [
        ("layout.tensor=2",),
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.context=2",),
        ("layout.context=2", "layout.context_form=all_to_all"),
        ("layout.zero=3", "memory.recompute=full"),
        ("layout.pipeline=2", "layout.schedule=zb-v", "model.layers=4"),
        ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2", "model.layers=4"),
    ],
    4: [
        ("layout.tensor=4", "layout.sequence_parallel=true", "memory.recompute=selective"),
        ("layout.tensor=2", "layout.context=2", "layout.sequence_parallel=true"),
        ("layout.tensor=2", "layout.pipeline=2", "layout.schedule=zb-h1"),
        ("layout.tensor=2", "layout.zero=3"),
    ],
}


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("parts", ["plain", "offset", "weight-bias", "none"])
def test_gradients_are_those_of_autograd(centered: bool, parts: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64, requires_grad=True) if parts != "none" else None
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True) if parts == "weight-bias" else None
    offset = 1.0 if parts == "offset" else 0.0
    factor = None if weight is None else weight + offset
    if centered:
        expected = functional.layer_norm(x, (7,), factor, bias, 0.1)
    else:
        expected = functional.rms_norm(x, (7,), factor, 0.1)
        expected = expected if bias is None else expected + bias
    found = normalize(x, weight, bias, centered, 0.1, offset)
    torch.testing.assert_close(found, expected)
    leaves, direction = [each for each in (x, weight, bias) if each is not None], torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, direction), torch.autograd.grad(expected, leaves, direction)
    )


@pytest.mark.sampled(3)
@pytest.mark.mpi(max_size=4)
@pytest.mark.parametrize("name", CHOICES)
def test_first_steps_are_those_of_one_rank(world: World, name: str) -> None:
    for layout in LAYOUTS.get(world.size, []):
        if world.size == 1:
            continue
        deck = small_deck(*CHOICES[name], "batch.global_size=4", *layout)
        for difference in compare(scale_down_family(deck), world, make_mesh(deck, world)):
            bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
            assert difference.error <= bound, (layout, difference)


DEEPSEEK = (
    *(*LATENT, "model.family=deepseek-v3", "model.latent.value_size=6", "model.experts.count=4"),
    *("model.experts.shared=1", "model.experts.mlp=16", "model.experts.dense_first=1"),
    *("model.experts.router_groups=2", "model.experts.router_groups_per_token=1"),
)
FURTHER: dict[str, tuple[str, ...]] = {
    "experts": ("layout.expert=2", "layout.zero=3", "memory.recompute=selective"),
    "experts-tensor": ("layout.tensor=2", "layout.expert_tensor=2", "layout.sequence_parallel=true"),
    "compiled": ("layout.tensor=2", "layout.sequence_parallel=true", "machine.compile=true"),
    "documents-ring": ("layout.context=2", "data.document_mask=true"),
    "documents": ("layout.context=2", "layout.context_form=all_to_all", "data.document_mask=true"),
    "fp8": ("layout.tensor=2", "layout.sequence_parallel=true", "precision.compute=fp8", "precision.fp8=row"),
    "split": ("layout.pipeline=2", "layout.schedule=zb-v", "model.layers=4"),
}
"""Layouts of a model with latent attention, groups of experts and shared experts, by name."""


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", FURTHER)
def test_first_steps_of_deepseek_are_those_of_one_rank(world: World, name: str) -> None:
    deck = small_deck(*DEEPSEEK, "batch.global_size=4", *FURTHER[name])
    small = scale_down_family(deck)
    small = with_fp8_products(deck, small) if name == "fp8" else small
    for difference in compare(small, world, make_mesh(deck, world)):
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference


@pytest.mark.sampled(3)
@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("name", [*CHOICES, "deepseek"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_activations_are_those_that_are_kept(
    world: World, name: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "choose", choose_in_turn)
    model = DEEPSEEK if name == "deepseek" else CHOICES[name]
    layouts = [layout for layout in LAYOUTS.get(world.size, []) if "layout.zero=3" not in layout]
    for layout in layouts:
        for compute in ("fp32",) if recompute == "full" else ("fp32", "bf16"):
            more = (f"memory.recompute={recompute}", f"precision.compute={compute}", "batch.global_size=16")
            # Each expert has half a unit of 16-bit rows, whose padding is the mean that the plan assumes.
            rows = 4 if {"layout.tensor=2", "layout.context=2"} & {*layout} else 2
            deck = small_deck(*model, *layout, *more, f"batch.micro_size={rows}")
            training = trainer(world, deck)
            planned = plan_memory(deck, world.size, 61, schedule=training.engine.schedule)
            training.train(1)
            here = planned.stages[training.engine.mesh.coordinate("pipeline")].memory
            training.engine.close()
            assert training.activations.bytes == pytest.approx(here.activation, rel=0.01), (layout, compute)
