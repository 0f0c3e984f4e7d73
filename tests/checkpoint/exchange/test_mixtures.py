"""Mixtures of experts of `transformers`, imported and exported; what cannot be either.

Tests of checkpoint/exchange/hugging_face/architectures.py and deck/families/llama.py, and of what other files
do for mixtures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from hpctrain.checkpoint.exchange import convert as exchange
from hpctrain.checkpoint.exchange import source
from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.checkpoint.exchange.source import model_keys, read_source_keys, source_shape
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.families import CHOICES
from hpctrain.deck.presets import presets
from hpctrain.deck.read import parse_deck
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.deck.sections.latent import LatentTable
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.build import build_engine
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.stage_values import load_parameters
from hpctrain.engine.stages.stage import build_stage
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.generate.model_loading import load_model
from hpctrain.model.construction import build_model
from hpctrain.model.part import ModelPart, logits_of
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.sharding.replication import Replications
from hpctrain.train.start import start_from_source
from tests.checkpoint.exchange.test_hugging_face import (
    TOKENS,
    assert_same_bits,
    change,
    no_warnings,
    saved,
    tensors_of,
)
from tests.engines import LLAMA, small_deck

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FEW = {"num_experts_per_tok": 2, "intermediate_size": 48}
OF_DOTS1 = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": None,
    **FEW,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, **FEW}),
    "mixtral-heads": ("Mixtral", {"num_local_experts": 3, "head_dim": 12, "rms_norm_eps": 1e-3, **FEW}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 20, "head_dim": 12, **FEW}),
    "qwen3-moe-every": ("Qwen3Moe", {
        "num_experts": 4, "moe_intermediate_size": 20, "decoder_sparse_step": 2, "norm_topk_prob": True, **FEW
    }),
    "qwen3-moe-first": ("Qwen3Moe", {"num_experts": 4, "mlp_only_layers": [0, 1], **FEW}),
    "qwen3-moe-listed": ("Qwen3Moe", {"num_experts": 4, "mlp_only_layers": [1], **FEW}),
    "olmoe": ("Olmoe", {"num_experts": 5, "rope_theta": 300.0, **FEW}),
    "dots1": ("Dots1", OF_DOTS1),
    "dots1-unshared": ("Dots1", {**OF_DOTS1, "n_shared_experts": 0}),
}  # fmt: skip


def reference(name: str, **changes: Any) -> torch.nn.Module:
    """A mixture of `transformers` with random weights, norms and biases of choices too."""
    kind, keys = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | keys | changes)
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for each, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in each:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.eval()


def our_model(path: Path, world: World) -> ModelPart:
    """The model of a checkpoint, on one rank, with the state of its routers, as `generate` loads it."""
    deck, lone = stored_deck(read_state(path), path), world.single_rank_world()
    mesh = Mesh(lone, {})
    layer_context = make_layer_context(deck, mesh, SavedPolicy(), lone.device)
    model = build_model(source_shape(path), layer_context)
    stage = build_stage(deck, layer_context, [model], Replications.unsharded(mesh))
    load_parameters(path, stage, lone.everyone)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_keep_logits_and_bits(name: str, world: World, tmp_path: Path) -> None:
    model = reference(name)
    theirs = saved(model, tmp_path / "theirs")
    import_model(world, theirs, tmp_path / "model.h5")
    with torch.no_grad():
        expected = model(TOKENS).logits
        logits = logits_of(our_model(tmp_path / "model.h5", world), TOKENS)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

        told = export_model(world, tmp_path / "model.h5", tmp_path / "ours", None, 10**9)
        assert " active per token)" in told
        assert_same_bits(tensors_of(tmp_path / "ours"), tensors_of(theirs))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(again) is type(model)
        assert torch.equal(again.eval()(TOKENS).logits, expected)
    import_model(world, tmp_path / "ours", tmp_path / "again.h5")
    with h5py.File(tmp_path / "model.h5") as one, h5py.File(tmp_path / "again.h5") as other:
        assert (one["checksums"][...] == other["checksums"][...]).all()


def test_matrices_of_no_shared_experts_may_be_missing(world: World, tmp_path: Path) -> None:
    theirs = saved(reference("dots1-unshared"), tmp_path / "theirs")
    import_model(world, theirs, tmp_path / "model.h5")
    tensors = tensors_of(theirs)
    full = {name: each for name, each in tensors.items() if each.numel()}
    assert len(full) == len(tensors) - 2 * 3  # two of three layers have experts
    safetensors_torch.save_file(full, theirs / "model.safetensors", {"format": "pt"})
    import_model(world, theirs, tmp_path / "again.h5")
    export_model(world, tmp_path / "again.h5", tmp_path / "ours", None, 10**9)
    assert_same_bits(tensors_of(tmp_path / "ours"), tensors)
    with no_warnings():
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def test_many_files_and_small_pieces(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces smaller than a row; biases of choices stay fp32 where all else is not."""
    monkeypatch.setattr(exchange, "PIECE_BYTES", 60)
    monkeypatch.setattr(source, "BUFFER_BYTES", 60)
    theirs = saved(reference("dots1").to(torch.bfloat16), tmp_path / "theirs", max_shard_size="8KB")
    import_model(world, theirs, tmp_path / "model.h5")
    export_model(world, tmp_path / "model.h5", tmp_path / "ours", "bf16", 8000)
    found, expected = tensors_of(tmp_path / "ours"), tensors_of(theirs)
    biases = {name for name in expected if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    for name in biases:
        assert found[name].dtype == torch.float32
        found[name] = found[name].to(expected[name].dtype)
    assert_same_bits(found, expected)


MIXTURE = (*LLAMA, "model.vocabulary=257", "model.experts.count=4", "model.experts.mlp=24")
DOTS1 = (
    *MIXTURE, "model.experts.router=sigmoid", "model.experts.balance=bias", "model.experts.shared=1",
    "model.query_key_norm=head",
)  # fmt: skip


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize(
    "overrides",
    [
        (*MIXTURE, "layout.expert=2"),
        (*MIXTURE, "layout.tensor=2", "layout.expert_tensor=2", "precision.compute=bf16"),
        (*DOTS1, "layout.pipeline=2"),
    ],
    ids=["expert", "expert-tensor-bf16", "pipeline-bias"],
)
def test_what_a_layout_saved_is_what_transformers_computes(
    overrides: tuple[str, ...], world: World, mpi_tmp_path: Path
) -> None:
    deck = small_deck(*overrides)
    engine = build_engine(deck, world, make_mesh(deck, world))
    path = mpi_tmp_path / "run.h5"
    save(
        path,
        world.everyone,
        training_entries(engine.state(), writing=True),
        {"deck": deck_text(deck), "tokenizer": "bytes"},
    )
    export_model(world, path, mpi_tmp_path / "theirs", "fp32", 20_000)
    import_model(world, mpi_tmp_path / "theirs", mpi_tmp_path / "again.h5")
    model = transformers.AutoModelForCausalLM.from_pretrained(mpi_tmp_path / "theirs").eval()
    generating, tokenizer = load_model(world, mpi_tmp_path / "again.h5")
    assert tokenizer.encode("fox") == list(b"fox")
    with torch.no_grad():
        torch.testing.assert_close(logits_of(generating, TOKENS), model(TOKENS).logits, rtol=1e-5, atol=1e-5)


DECK = """
[run]
steps = 2
[model]
from = "{source}"
[data]
tokens = "none"
[batch]
global_size = 4
sequence = 24
[communication]
bucket_bytes = 10000
"""


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mixtral", ["layout.expert=2", "layout.zero=3"]),
        ("dots1", ["layout.tensor=2", "layout.expert=2"]),
        ("olmoe", ["layout.tensor=2", "layout.expert_tensor=2"]),
    ],
)
def test_a_run_starts_from_a_mixture(
    name: str, overrides: list[str], kind: str, world: World, mpi_tmp_path: Path
) -> None:
    model, start = reference(name), mpi_tmp_path / "theirs"
    if world.rank == 0:
        saved(model, start)
    world.everyone.barrier()
    if kind == "checkpoint":
        import_model(world, start, mpi_tmp_path / "model.h5")
        start = mpi_tmp_path / "model.h5"
    deck = parse_deck(DECK.format(source=start), overrides, read_source=read_source_keys, ranks=world.size)
    engine = build_engine(deck, world, make_mesh(deck, world))
    assert "copy" not in start_from_source(deck, engine)
    with torch.no_grad():
        logits, expected = logits_of(engine.model, TOKENS), model(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        ("mixtral", "sliding_window", 0, "sliding_window = 0: must be a whole number from 1 to"),
        (
            "mixtral",
            "num_experts_per_tok",
            5,
            "num_experts_per_tok = 5: must be at most num_local_experts = 4",
        ),
        ("mixtral", "hidden_act", "mish", "hidden_act = 'mish'"),
        ("mixtral", "num_local_experts", 10**6, "describes 1000000 experts in each of 3 layers, but the"),
        (
            "mixtral",
            "num_local_experts",
            5,
            "where num_local_experts = 5, but the files have 4",
        ),
        ("qwen3-moe", "mlp_only_layers", [0, 1, 2], "mlp_only_layers = [0, 1, 2]: leaves no layer with"),
        ("qwen3-moe", "attention_bias", True, "q_proj.bias: not in these files"),
        ("qwen3-moe", "norm_topk_prob", 1, "norm_topk_prob = 1: must be true or false"),
        ("olmoe", "clip_qkv", 8.0, "clip_qkv = 8.0: unsupported; expected None for olmoe"),
        ("dots1", "first_k_dense_replace", 3, "first_k_dense_replace = 3: leaves no layer with experts"),
        ("dots1", "n_group", 3, "n_group = 3: must divide n_routed_experts = 8"),
        ("dots1", "topk_group", 5, "topk_group = 5: must be at most n_group = 4"),
        ("dots1", "routed_scaling_factor", 0, "routed_scaling_factor = 0: must be a number above 0"),
        ("dots1", "layer_types", ["sliding_attention"], "layer_types = ['sliding_attention']"),
    ],
)
def test_configs_that_are_refused(
    name: str, key: str, value: object, told: str, world: World, tmp_path: Path
) -> None:
    folder = saved(reference(name), tmp_path / "theirs")
    change(folder, {key: value})
    with pytest.raises(HpctrainError) as caught:
        import_model(world, folder, tmp_path / "model.h5")
    assert caught.value.exit_code == 2
    assert any(told in problem for problem in caught.value.problems), caught.value.problems


def test_defaults_of_deepseek_are_those_of_its_config() -> None:
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 4, "head_dim": 64}
    shape = shape_of(config, "config.json")
    sizes = LatentTable(key_value_rank=512, query_rank=1536, rotary_size=64, value_size=128)
    assert (shape.head_size, shape.latent, shape.heads) == (192, sizes, 128)
    experts = shape.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.shared, experts.dense_first) == (256, 8, 1, 3)
    assert (experts.router, experts.balance, experts.router_scale) == ("sigmoid", "bias", 2.5)
    assert (experts.router_groups, experts.router_groups_per_token, experts.mlp) == (8, 4, 2048)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MixtralForCausalLM", (8, 2, 14336, True, 1e6, 8, "none")),
        ("Qwen3MoeForCausalLM", (128, 8, 768, False, 1e4, 4, "head")),
        ("OlmoeForCausalLM", (64, 8, 2048, False, 1e4, 16, "all")),
    ],
)
def test_what_a_config_does_not_say_is_the_default_of_its_family(
    name: str, expected: tuple[Any, ...]
) -> None:
    shape = shape_of({"architectures": [name]}, "config.json")
    theirs = getattr(transformers, name.removesuffix("ForCausalLM") + "Config")()
    experts = shape.experts
    assert experts is not None
    found = (
        experts.count, experts.per_token, experts.mlp, experts.router_normalize, shape.rope_base,
        shape.key_value_heads, shape.query_key_norm,
    )  # fmt: skip
    assert found == expected
    assert (shape.hidden, shape.layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert shape.norm_epsilon == theirs.rms_norm_eps and shape.vocabulary == theirs.vocab_size
    assert experts.count == theirs.num_local_experts and shape.sequence == theirs.max_position_embeddings


PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000,
        "tie_word_embeddings": False, "output_router_logits": False, "router_aux_loss_coef": 0.02,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_presets(name: str) -> None:
    shape = shape_of(PUBLISHED[name], "config.json")
    preset = presets()[name]
    keys = {f"model.{key}": value for key, value in preset.model.items()}
    keys |= {f"model.experts.{key}": value for key, value in preset.experts.items()}
    settled = {f"model.{key}": value for key, value in model_keys(shape).items()}
    assert {key: settled[key] for key in keys} == keys


TINY = ModelShape(
    family="llama", layers=2, hidden=32, heads=4, key_value_heads=2, mlp=48, vocabulary=61, sequence=24,
    tied=False, experts=ExpertsTable(count=4, mlp=48, balance_loss=0.01),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"experts": {"capacity": 1.5}},
            "model.experts.capacity = 1.5: the MixtralForCausalLM of transformers requires none",
        ),
        (
            {"experts": {"router_scale": 2.0}},
            "model.experts.router_scale = 2.0: the MixtralForCausalLM of transformers requires 1.0",
        ),
        ({"experts": {"router_normalize": False}}, "model.experts.router_normalize = false"),
        ({"experts": {"balance": "bias"}}, 'model.experts.balance = "bias"'),
        ({"experts": {"router_groups": 2}}, "model.experts.router_groups = 2"),
        ({"experts": {"shared": 1}}, "model.experts.shared = 1"),
        (
            {"experts": {"dense_first": 1}},
            "model.experts.dense_first = 1: the MixtralForCausalLM of transformers requires 0",
        ),
        (
            {"query_key_norm": "all", "experts": {"every": 2}},
            "model.experts.every = 2: the OlmoeForCausalLM of",
        ),
        ({"query_key_norm": "all", "head_size": 6}, "model.head_size = 6: the OlmoeForCausalLM of"),
        ({"experts": {"router": "sigmoid"}}, "the Dots1ForCausalLM of transformers"),
        ({"experts": None, "query_key_norm": "all"}, 'model.query_key_norm = "all"'),
        ({"mlp_bias": True}, "model.mlp_bias = true: the MixtralForCausalLM of transformers requires false"),
        (
            {"experts": {"router_bias": True}},
            "model.experts.router_bias = true: the MixtralForCausalLM of transformers",
        ),
        (
            {"experts": None, "query_key_norm": "head", "attention_bias": "query_key_value"},
            'the Qwen3ForCausalLM of transformers requires "none" or "all"',
        ),
        (
            {
                **dict.fromkeys((*CHOICES, "embedding_multiplier")),
                "experts": None,
                "family": "gpt2",
                "attention_bias": "none",
            },
            'requires "all"',
        ),
    ],
)
def test_what_transformers_does_not_have_is_not_exported(changes: dict[str, Any], told: str) -> None:
    fields = {**vars(TINY), "head_size": 0, **changes}
    if keys := changes.get("experts"):
        assert TINY.experts is not None
        fields["experts"] = ExpertsTable(**{**dict(TINY.experts), **keys})
    with pytest.raises(HpctrainError, match="so this model cannot be exported") as caught:
        config_of(ModelShape(**fields), "float32")
    assert told in str(caught.value)


def test_a_damaged_expert_is_noticed(world: World, tmp_path: Path, flip: Any) -> None:
    path = tmp_path / "model.h5"
    import_model(world, saved(reference("mixtral"), tmp_path / "theirs"), path)
    with h5py.File(path) as file:
        offset = file["model/blocks.1.feed_forward.experts.down.weight"].id.get_offset()
    flip(path, offset + 4 * 32 * 48 * 2 + 5)
    with pytest.raises(InputOutputError, match=r"blocks.1.feed_forward.experts.down.weight is damaged"):
        export_model(world, path, tmp_path / "ours", None, 10**9)
    assert not (tmp_path / "ours").exists()
