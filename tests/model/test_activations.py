"""Tests of all activations against `transformers`, on layouts, and of their gradients.

Modules: deck/activations.py, model/shape.py and the layers that use them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.costs.live_activations import LiveActivations
from hpctrain.deck.activations import ACTIVATIONS, GELU
from hpctrain.deck.families import FAMILIES
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import logits_of, parameter_list
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.parallel.backward.weight_gradients import DeferredGradient
from hpctrain.parallel.experts.expert_layer import Experts
from hpctrain.parallel.experts.grouped_products import Segments
from hpctrain.parallel.kernels.functions.layer_functions import TORCH
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.reducer import ExactReduction, Reducer
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.synchronize import GradientSynchronizer
from hpctrain.train.layout_verification import compare
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, alone, make_buckets, small_deck, trainer
from tests.model import test_against_transformers as dense

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def without_gates(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return hpctrain's names for the tensors of Arcee, which is a Llama without gates."""
    gates = {f"model.layers.{layer}.mlp.gate_proj.weight": torch.empty(0) for layer in range(3)}
    ours = dense.llama_names({**gates, **tensors})
    return {name: tensor for name, tensor in ours.items() if ".gate." not in name}


def gpt2(name: str) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=24, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, activation_function=name, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(name: str) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, hidden_act=name))


def arcee(name: str) -> torch.nn.Module:
    return transformers.ArceeForCausalLM(transformers.ArceeConfig(**SIZES, hidden_act=name))


MODELS: dict[str, tuple[Callable[[str], Any], str, str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "gpt2-relu2": (gpt2, "relu2", "relu2", dense.gpt2_names),
    "llama-geglu": (llama, "gelu_pytorch_tanh", "geglu", dense.llama_names),
    "llama-gated-relu2": (llama, "relu2", "gated-relu2", dense.llama_names),
    "arcee-relu2": (arcee, "relu2", "relu2", without_gates),
    "arcee-gelu": (arcee, "gelu_new", "gelu-tanh", without_gates),
}


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_equal_transformers(model: str, world: World) -> None:
    compare_with_transformers(model, world.single_rank_world())


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("model", ["gpt2-relu2", "llama-geglu"])
def test_two_tensor_ranks_equal_transformers(model: str, world: World) -> None:
    compare_with_transformers(model, world)


def compare_with_transformers(model: str, world: World) -> None:
    """Check that the loss and all gradients are equal to those of transformers. Collective."""
    make, hidden_act, ours, names = MODELS[model]
    torch.manual_seed(0)
    reference = make(hidden_act)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    shape = shape_of(
        reference.config.to_dict() | {"architectures": [type(reference).__name__]}, "config.json"
    )
    assert shape.activation == ours
    assert config_of(shape, "float32")[{gpt2: "activation_function"}.get(make, "hidden_act")] == (
        "gelu_pytorch_tanh" if hidden_act == "gelu_new" else hidden_act
    )
    mesh = Mesh(world, {"tensor": world.size})
    layer_context = LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context"))
    built = Transformer(shape, layer_context)
    buckets = make_buckets(built.units(), Replications.unsharded(mesh), torch.float32, 10_000)
    weights = names(dict(reference.named_parameters()))
    assert {parameter.shard.name for parameter in parameter_list(built)} == set(weights)
    with torch.no_grad():
        for parameter in parameter_list(built):
            parameter.copy_(parameter.shard.take(weights[parameter.shard.name]).view(parameter.shape))
    synchronizer = GradientSynchronizer(
        [Reducer(bucket, ExactReduction(bucket)) for bucket in buckets], SyncEveryStep()
    )

    tokens = torch.randint(0, 97, (2, 25))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = reference(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 97), targets.reshape(-1))
    loss.backward()
    if world.size == 1:
        torch.testing.assert_close(logits_of(built, inputs), logits, rtol=1e-5, atol=1e-5)
    synchronizer.start(1)
    hidden = built(ModelInputs.of_tokens(inputs.t().contiguous(), torch.arange(24)))
    total = built.predict(hidden, CrossEntropy(targets.t(), torch.tensor(1 / 48))).total
    total.backward()
    synchronizer.finish()
    torch.testing.assert_close(total.detach() / 48, loss.detach(), rtol=1e-5, atol=1e-5)
    found = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    gradients = names(found)
    for parameter in parameter_list(built):
        name = parameter.shard.name
        whole = gradients[name]
        # What softmax sees of queries and keys nearly cancels.
        scale = gradients[re.sub("query|key", "value", name)].abs().max()
        expected = parameter.shard.take(whole).view(parameter.shape)
        error = (parameter.gradient - expected).abs().max() / scale
        assert error <= 1e-5, (name, error)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_equal_autograd_and_only_the_input_is_saved(name: str) -> None:
    activation = ACTIVATIONS[name]
    torch.manual_seed(0)
    x = 4 * torch.randn(3, 5, 8 * activation.input_projections, dtype=torch.float64)
    x.requires_grad_()
    weight = torch.randn(3, 5, 8, dtype=torch.float64)
    with LiveActivations(lambda: [x]) as saved:
        result = TORCH.activate(x, activation, [8] * activation.input_projections)
    # Beside the input, which the matrices keep: of a gate its function, a factor of the product, and that of
    # the other factor.
    functions = 0 if not activation.gated else 1 if activation.up_function is None else 2
    assert saved.peak == functions * weight.nbytes
    (found,) = torch.autograd.grad(result, x, weight)
    leaf = x.detach().requires_grad_()
    gate, *up = leaf.split(8, -1)
    assert activation.up_function is None or bool((leaf.abs() > 7).any())
    plain = {
        "silu": lambda: gate * torch.sigmoid(gate),
        "gelu": lambda: 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
        "relu": lambda: gate.clamp_min(0) ** 2,
        "exact": lambda: 0.5 * gate * (1 + torch.erf(gate / 2**0.5)),
        "clam": lambda: gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)),
    }["exact" if activation.function is GELU else next(iter(activation.function.hidden_act), "clamped")[:4]]()
    factors = [part.clamp(-7, 7) + 1 for part in up] if activation.up_function is not None else up
    expected = plain * factors[0] if up else plain
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaf, weight)[0])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_experts(name: str, world: World) -> None:
    activation = ACTIVATIONS[name]
    torch.manual_seed(1)
    settings = ExpertsTable(count=3, per_token=1, mlp=8, balance_loss=0.0)
    experts = Experts("experts", settings, 6, alone(world), activation, False)
    weights = torch.randn(3, 8 * activation.input_projections, 6), torch.randn(3, 6, 8)
    for parameter, weight in zip(experts.deferred_parameters, weights, strict=True):
        parameter.data = weight.view(parameter.shape).clone()
        parameter.gradient = torch.zeros_like(parameter)
    segments, later = Segments(torch.tensor([2, 0, 4]), 1), list[DeferredGradient]()
    rows, gradient = torch.randn(6, 6).requires_grad_(), torch.randn(6, 6)
    result = experts(rows, segments, later)
    result.backward(gradient)
    with torch.no_grad():
        later.pop().compute()
    leaves = [weight.double().requires_grad_() for weight in weights]
    x = rows.detach().double().requires_grad_()
    owners = torch.arange(3).repeat_interleave(segments.counts)
    inner = torch.einsum("mk,mnk->mn", x, leaves[0][owners])
    inner = TORCH.activate(inner, activation, [8] * activation.input_projections)
    expected = torch.einsum("mk,mnk->mn", inner, leaves[1][owners])
    expected.backward(gradient.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    found = [rows.grad, *(parameter.gradient for parameter in experts.deferred_parameters)]
    for here, leaf in zip(found, (x, *leaves), strict=True):
        torch.testing.assert_close(here.double().view(leaf.shape), leaf.grad, rtol=1e-4, atol=1e-4)


SEQUENCE = "layout.sequence_parallel=true"


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "keys",
    [
        ("model.activation=relu2", SEQUENCE, "memory.recompute=full"),
        ("model.activation=geglu", "memory.recompute=selective"),
        (*LLAMA, "model.activation=geglu", SEQUENCE, "machine.compile=true"),
        (*LLAMA, "model.activation=relu2"),
        (*LLAMA, "model.activation=geglu", "model.experts.count=4", "layout.expert_tensor=2"),
        (
            *LLAMA,
            "model.activation=relu2",
            "model.experts.count=4",
            "model.experts.shared=1",
            "layout.expert=2",
        ),
    ],
    ids=lambda keys: "-".join(key.partition("=")[2] for key in keys),
)
def test_two_tensor_ranks_equal_one_rank(world: World, keys: tuple[str, ...]) -> None:
    deck = small_deck("layout.tensor=2", *keys)
    for difference in compare(scale_down_family(deck), world, make_mesh(deck, world)):
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference


@pytest.mark.parametrize(
    "name", sorted(set(ACTIVATIONS) - {FAMILIES[name].defaults.activation for name in ("gpt2", "llama")})
)
def test_fp8(world: World, name: str) -> None:
    keys = (*LLAMA, f"model.activation={name}", "model.hidden=64")
    exact, coarse = (
        trainer(world, small_deck(*keys, f"precision.compute={form}")).train(1)[0].loss
        for form in ("fp32", "fp8")
    )
    assert coarse == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            replace(dense.GPT2, activation="geglu"),
            'model.activation = "geglu": the GPT-2 of transformers requires "gelu-tanh", "gelu" or '
            '"relu2", so this model cannot be exported',
        ),
        (
            replace(dense.QWEN3, activation="relu2"),
            'model.activation = "relu2": the Qwen3ForCausalLM of transformers requires "swiglu", "geglu", '
            '"geglu-exact" or "gated-relu2", so this model cannot be exported',
        ),
        (
            replace(
                dense.LLAMA,
                activation="relu2",
                experts=ExpertsTable(count=4, mlp=80, balance="none", balance_loss=0.0),
            ),
            'model.activation = "relu2": the MixtralForCausalLM of transformers requires "swiglu", "geglu", '
            '"geglu-exact" or "gated-relu2", so this model cannot be exported',
        ),
    ],
    ids=["gpt2", "qwen3", "mixtral"],
)
def test_export_refuses_activations_of_other_architectures(shape: ModelShape, message: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        config_of(shape, "float32")
    assert str(caught.value) == message


def test_default_activation_and_width() -> None:
    def of(*keys: str) -> tuple[str, int]:
        model = small_deck("model.hidden=512", *keys).model
        return model.activation, model.mlp

    assert of() == ("gelu-tanh", 2048)
    assert of("model.family=llama") == ("swiglu", 1536)
    assert of("model.activation=geglu") == ("geglu", 1536)
    assert of("model.family=llama", "model.activation=relu2") == ("relu2", 2048)
