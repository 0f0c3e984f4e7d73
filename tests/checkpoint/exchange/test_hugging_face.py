"""Hugging Face folders made by `transformers`, imported and exported; folders that are refused.

Tests of checkpoint/exchange/convert.py, checkpoint/exchange/prepared_export.py,
checkpoint/exchange/safetensors_folder.py, checkpoint/exchange/source.py and
checkpoint/exchange/hugging_face/tensor_names.py.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.exchange import convert as exchange
from hpctrain.checkpoint.exchange import safetensors_folder, source
from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.source import read_source_keys, source_shape
from hpctrain.checkpoint.load import load, read_state
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import model_entries, training_entries
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.sections.model import source_problems
from hpctrain.deck.sources import toml_value
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.model.part import logits_of
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.replication import Replications
from tests.engines import LLAMA, make_buckets, small_deck
from tests.rope_scalings import SCALINGS, hf_rope_parameters

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"tie_word_embeddings": True}),
    "gpt2-untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 40, "layer_norm_epsilon": 1e-3}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-grouped": ("Llama", {"num_key_value_heads": 2, "rope_theta": 300.0, "rms_norm_eps": 1e-3}),
    "llama-heads": ("Llama", {"num_key_value_heads": 2, "head_dim": 6}),
    **{
        f"llama-{name}": (
            "Llama",
            {"num_key_value_heads": 2, "rope_parameters": hf_rope_parameters(each, 300.0)},
        )
        for name, each in SCALINGS.items()
    },
    "llama-biased": ("Llama", {"num_key_value_heads": 2, "attention_bias": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen2-tied": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 6}),
    "qwen3-biased": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "gpt2-relu2": ("GPT2", {"activation_function": "relu2"}),
    "llama-geglu": ("Llama", {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-gated-relu2": ("Llama", {"num_key_value_heads": 2, "hidden_act": "relu2"}),
    "arcee": ("Arcee", {"num_key_value_heads": 2}),
    "llama-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": 61, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "Llama": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
    },
    "Mistral": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
    },
    "Qwen2": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
    },
    "Qwen3": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
    },
    "Arcee": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
    },
}


def reference(name: str, **changes: Any) -> torch.nn.Module:
    """A model of `transformers` with random weights, biases and norms too."""
    kind, keys = MODELS[name]
    keys = SIZES[kind] | keys | {"bos_token_id": None, "eos_token_id": None} | changes
    config = getattr(transformers, f"{kind}Config")(**keys)
    torch.manual_seed(7)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def saved(model: torch.nn.Module, folder: Path, **arguments: Any) -> Path:
    model.save_pretrained(folder, **arguments)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the library's own reader."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors_torch.load_file(file).items()
    }


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def our_model(path: Path, world: World) -> Transformer:
    """The model of a checkpoint, on one rank."""
    lone = world.single_rank_world()
    mesh = Mesh(lone, {})
    layer_context = LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context"))
    model = Transformer(source_shape(path), layer_context)
    buckets = make_buckets(model.units(), Replications.unsharded(mesh), torch.float32, 10_000, trained=False)
    load(path, lone.everyone, model_entries(buckets))
    return model


def rewritten(path: Path, out: Path, state: dict[str, Any], world: World) -> None:
    """The tensors of a checkpoint under another state."""
    with h5py.File(path) as file:
        found: dict[str, Tensor] = {}
        file["model"].visititems(
            lambda name, item: (
                found.update({name: torch.from_numpy(item[()])}) if isinstance(item, h5py.Dataset) else None
            )
        )
    entries = [
        TensorRange(f"/model/{name}", Shard.replicated(name, tuple(tensor.shape)), tensor.reshape(-1))
        for name, tensor in found.items()
    ]
    save(out, world.single_rank_world().everyone, entries, state)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Fail if `transformers` warns of something in the block."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not records, [record.getMessage() for record in records]


TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))


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
        assert "fp32" in told and "1 file," in told and "without a tokenizer" in told
        assert_same_bits(tensors_of(tmp_path / "ours"), tensors_of(theirs))
        with no_warnings():
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(again) is type(model)
        assert torch.equal(again.eval()(TOKENS).logits, expected)
    import_model(world, tmp_path / "ours", tmp_path / "again.h5")
    with h5py.File(tmp_path / "model.h5") as one, h5py.File(tmp_path / "again.h5") as other:
        assert (one["checksums"][...] == other["checksums"][...]).all()


@pytest.mark.parametrize("name", ["gpt2", "llama-grouped"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_in_many_files_and_small_pieces(
    name: str, dtype: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces smaller than a row, so that every kind of box is read."""
    for module in (exchange, source):
        monkeypatch.setattr(module, "PIECE_BYTES" if module is exchange else "BUFFER_BYTES", 100)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    theirs = saved(reference(name).to(half), tmp_path / "theirs", max_shard_size="8KB")
    assert (theirs / "model.safetensors.index.json").exists()
    import_model(world, theirs, tmp_path / "model.h5")
    export_model(world, tmp_path / "model.h5", tmp_path / "ours", dtype, 8000)
    files = sorted(file.name for file in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same_bits(tensors_of(tmp_path / "ours"), tensors_of(theirs))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == half
    export_model(world, tmp_path / "model.h5", tmp_path / "single", None, 10**9)
    widened = {tensor: value.float() for tensor, value in tensors_of(theirs).items()}
    assert_same_bits(tensors_of(tmp_path / "single"), widened)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "overrides",
    [
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.pipeline=2", "model.family=llama", "model.key_value_heads=2", "model.mlp=48"),
        ("layout.zero=3", "precision.compute=bf16", "model.tied=false"),
    ],
    ids=["tensor", "pipeline", "zero-bf16"],
)
def test_what_a_layout_saved_is_what_transformers_computes(
    overrides: tuple[str, ...], world: World, mpi_tmp_path: Path
) -> None:
    deck = small_deck(*overrides)
    engine = build_engine(deck, world, make_mesh(deck, world))
    path = mpi_tmp_path / "run.h5"
    entries = training_entries(engine.state(), writing=True)
    save(path, world.everyone, entries, {"deck": deck_text(deck), "tokenizer": "bytes"})
    half = "precision.compute=bf16" in overrides
    export_model(world, path, mpi_tmp_path / "default", None, 20_000)
    export_model(world, path, mpi_tmp_path / "single", "fp32", 20_000)
    if world.rank == 0:
        exact = transformers.AutoModelForCausalLM.from_pretrained(mpi_tmp_path / "single").eval()
        rounded = tensors_of(mpi_tmp_path / "default")
        for name, tensor in tensors_of(mpi_tmp_path / "single").items():
            assert rounded[name].dtype == (torch.bfloat16 if half else torch.float32)
            assert torch.equal(tensor.to(rounded[name].dtype), rounded[name]), name
        import_model(world.single_rank_world(), mpi_tmp_path / "single", mpi_tmp_path / "again.h5")
        with torch.no_grad():
            logits = logits_of(our_model(path if not half else mpi_tmp_path / "again.h5", world), TOKENS)
            torch.testing.assert_close(logits, exact(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_bytes_are_a_tokenizer_of_transformers(world: World, tmp_path: Path) -> None:
    model = reference("llama", vocab_size=257)
    theirs = saved(model, tmp_path / "theirs")
    import_model(world, theirs, tmp_path / "model.h5")
    state = read_state(tmp_path / "model.h5")
    assert state["model_only"] and state["tokenizer"] is None
    with_bytes = {**state, "tokenizer": "bytes"}
    del with_bytes["versions"]
    rewritten(tmp_path / "model.h5", tmp_path / "bytes.h5", with_bytes, world)
    told = export_model(world, tmp_path / "bytes.h5", tmp_path / "ours", None, 10**9)
    assert told.endswith("with its tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    text = "Grüße,  <tab>\t\n\0 日本 \x7f"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256 and len(tokenizer) == 257
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["eos_token_id"] == 256


def test_a_tokenizer_travels_both_ways(world: World, tmp_path: Path) -> None:
    theirs = saved(reference("gpt2", vocab_size=300), tmp_path / "theirs")
    text = Tokenizer.train(["the quick brown fox " * 20], 270).text
    (theirs / "tokenizer.json").write_text(text)
    assert import_model(world, theirs, tmp_path / "model.h5").count("with its tokenizer") == 1
    export_model(world, tmp_path / "model.h5", tmp_path / "ours", None, 10**9)
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == text
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer.encode("quick fox", add_special_tokens=False) == Tokenizer(text).encode("quick fox")
    (theirs / "tokenizer.json").write_text(Tokenizer.train(["jumps over the lazy dog" * 9], 280).text)
    small = saved(reference("gpt2"), tmp_path / "small")
    shutil.copy(theirs / "tokenizer.json", small)
    told = import_model(world, small, tmp_path / "small.h5")
    assert "without a tokenizer (tokenizer.json has " in told and "tokens, but the model only 61)" in told


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "tokenizer.json",
            b'{"model": {"vocab": {"a": 0',
            "tokenizer.json: is not a `tokenizers` JSON (it is not",
        ),
        ("tokenizer.json", b"\xff", "tokenizer.json: is not UTF-8 text; replace it, or remove it to import"),
        (
            "tokenizer.json",
            b"{}",
            "tokenizer.json: is not a `tokenizers` JSON (it has no `model`); replace it,",
        ),
        (
            "tokenizer.json",
            b'{"model": {"type": "New", "vocab": {"</s>": 0}}, "added_tokens": []}',
            "tokenizer.json: is not a `tokenizers` JSON that this version can read: ",
        ),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: is not readable as JSON"),
    ],
)
def test_a_damaged_tokenizer_is_refused(
    world: World, tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    theirs = saved(reference("gpt2"), tmp_path / "theirs")
    (theirs / name).write_bytes(content)
    with pytest.raises(HpctrainError) as caught:
        import_model(world, theirs, tmp_path / "model.h5")
    assert caught.value.exit_code == 2 and not (tmp_path / "model.h5").exists()
    assert f"{theirs}/{problem}" in str(caught.value)


def test_files_of_the_first_gpt2_and_of_older_llamas(world: World, tmp_path: Path) -> None:
    """Names without a prefix, masks among the tensors; rope_theta beside rope_scaling, heads not given."""
    model = reference("gpt2")
    old = saved(model, tmp_path / "old")
    tensors = {name.removeprefix("transformer."): value for name, value in tensors_of(old).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    safetensors_torch.save_file(tensors, old / "model.safetensors")
    change(old, {"architectures": None, "tie_word_embeddings": None, "n_inner": None})
    import_model(world, old, tmp_path / "old.h5")
    with torch.no_grad():
        logits = logits_of(our_model(tmp_path / "old.h5", world), TOKENS)
        torch.testing.assert_close(logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)

    older = saved(reference("llama", rope_theta=77.0), tmp_path / "older")
    changes = {"rope_parameters": None, "rope_theta": 77.0, "num_key_value_heads": None, "head_dim": None}
    change(older, changes, rope_scaling=None)
    assert source_shape(older).rope_base == 77.0
    assert source_shape(older).key_value_heads == 4


def change(folder: Path, changes: dict[str, Any], **nulls: None) -> None:
    """Set keys of config.json; None removes one, but for those given by name."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if key not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(config | nulls))


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        (
            "gpt2",
            "activation_function",
            "relu",
            "'relu': unsupported; expected 'gelu', 'gelu_new' or 'relu2' for gpt2",
        ),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", "n_layer", 10**9, "n_layer = 1000000000: must be a whole number from 1 to"),
        ("gpt2", "n_layer", 50_000, "n_layer = 50000: describes more layers than there are, since the files"),
        ("gpt2", "n_head", 5, "n_head = 5: must divide n_embd = 32"),
        ("gpt2", "num_attention_heads", 8, "num_attention_heads = 8: transformers computes with it in place"),
        ("gpt2", "n_embd", True, "n_embd = True: must be a whole number"),
        ("gpt2", "layer_norm_epsilon", -1, "layer_norm_epsilon = -1: must be a number above 0"),
        ("gpt2", "tie_word_embeddings", "yes", "tie_word_embeddings = 'yes': must be true or false"),
        ("gpt2", "architectures", ["GPT2Model"], "architectures = ['GPT2Model'], model_type = 'gpt2'"),
        (
            "llama",
            "architectures",
            ["MambaForCausalLM"],
            "unsupported architecture; expected LlamaForCausalLM",
        ),
        ("llama", "model_type", "gpt2", "'gpt2': contradicts architectures = ['LlamaForCausalLM']"),
        (
            "llama",
            "architectures",
            "LlamaForCausalLM",
            "architectures = 'LlamaForCausalLM': must be a list with the name of a class, such as [",
        ),
        ("llama", "is_causal", False, "is_causal = False: unsupported: predictions would depend on later"),
        ("llama", "torch_dtype", "bfloat16", "torch_dtype = 'bfloat16': contradicts dtype = 'float32'"),
        (
            "llama",
            "rope_parameters",
            {"full_attention": {"rope_type": "default", "rope_theta": 3.0}},
            "rope_parameters: full_attention = {'rope_type': 'default', 'rope_theta': 3.0}: unsupported",
        ),
        ("gpt2", "sliding_window", 10, "sliding_window = 10: gpt2 models of transformers ignore this key"),
        ("llama", "hidden_act", "mish", "hidden_act = 'mish'"),
        ("llama", "attention_bias", 1, "attention_bias = 1: must be true or false"),
        ("llama", "attention_bias", True, "q_proj.bias: not in these files"),
        ("llama", "mlp_bias", 1, "mlp_bias = 1: must be true or false"),
        ("llama", "mlp_bias", True, "gate_proj.bias: not in these files"),
        ("llama", "sliding_window", 4096, "sliding_window = 4096"),
        ("mistral", "sliding_window", 0, "sliding_window = 0: must be a whole number from 1 to"),
        ("mistral", "sliding_window", -3, "sliding_window = -3: must be a whole number from 1 to"),
        ("qwen3", "layer_types", ["chunked_attention"] * 3, "layer_types = ['chunked_attention', "),
        (
            "qwen3",
            "layer_types",
            ["sliding_attention"] * 2,
            "use_sliding_window = False: must be true, since layer_types has 'sliding_attention'",
        ),
        (
            "llama",
            "rope_scaling",
            {"type": "ntk", "factor": 2.0},
            "rope_scaling: rope_type = 'ntk': unsupported",
        ),
        ("llama", "rope_parameters", {"rope_type": "llama3"}, "requires factor with rope_type = 'llama3'"),
        ("llama", "head_dim", 7, "head_dim = 7: must be even"),
        ("llama", "head_dim", 16, "q_proj.weight: has shape [32, 32], expected [64, 32]"),
        ("llama", "hidden_size", None, "by config.json, where hidden_size is missing and 4096 by default"),
        ("llama", "num_key_value_heads", 2, "by config.json, where num_key_value_heads = 2"),
        ("llama", "intermediate_size", 40, "by config.json, where intermediate_size = 40"),
        ("gpt2", "n_positions", 8, "by config.json, where n_positions = 8"),
        ("llama", "num_key_value_heads", 3, "num_key_value_heads = 3: must divide"),
        ("llama", "quantization_config", {"bits": 4}, "quantization_config = {'bits': 4}"),
        ("llama", "vocab_size", 62, "model.embed_tokens.weight: has shape [61, 32], expected [62, 32]"),
        (
            "llama",
            "vocab_size",
            62,
            "by config.json, where vocab_size = 62 (61 would fit) (and 1 more differ)",
        ),
        (
            "llama",
            "num_hidden_layers",
            3,
            "by config.json, where num_hidden_layers = 3, but the files have 2",
        ),
        ("llama", "num_hidden_layers", 3, "model.layers.2.input_layernorm.weight: not in these files"),
        ("llama", "num_hidden_layers", 1, "model.layers.1.input_layernorm.weight: in this file, but not"),
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
    assert not (tmp_path / "model.h5").exists()


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_an_output_layer_beside_a_tied_embedding_must_equal_it(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BUFFER_BYTES", 1000)  # compares several pieces
    folder = saved(reference(name), tmp_path / "theirs")
    tensors = tensors_of(folder)
    (embedding,) = (each for each in tensors if each.endswith(("wte.weight", "embed_tokens.weight")))
    head = tensors[embedding].clone()
    safetensors_torch.save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    import_model(world, folder, tmp_path / "equal.h5")
    for wrong in (head[:-1], head.index_fill(0, torch.tensor(len(head) - 1), 3.0)):
        safetensors_torch.save_file({**tensors, "lm_head.weight": wrong}, folder / "model.safetensors")
        with pytest.raises(
            HpctrainError, match=r"lm_head\.weight: differs.* set tie_word_embeddings to"
        ) as told:
            import_model(world, folder, tmp_path / "model.h5")
        assert told.value.exit_code == 2
        assert not (tmp_path / "model.h5").exists()
        replicated = Shard.replicated("final_norm.weight", (32,))
        entries = [TensorRange("/model/final_norm.weight", replicated, torch.zeros(32))]
        with pytest.raises(HpctrainError, match="lm_head"):
            source.load_source(folder, world, entries)


@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_layer_types_of_mistral_say_which_layers_have_windows(head: str) -> None:
    config: dict[str, Any] = {
        "architectures": [f"MistralFor{head}"],
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "id2label": {"0": "score"},
    }
    assert shape_of(config, "config.json").windows == (9,)
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    shape = shape_of({**config, "layer_types": kinds}, "config.json")
    assert [shape.window(layer) for layer in range(4)] == [0, 9, 0, 0]


def _index(folder: Path, edit: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def _cut(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:-count])


def _header(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert len(old) == len(new) and old in data
    file.write_bytes(data.replace(old, new, 1))


def _second(folder: Path) -> Path:
    return next(folder.glob("model-00002-of-*.safetensors"))


@pytest.mark.parametrize(
    ("spoil", "code", "told"),
    [
        (lambda f: _index(f, lambda m: m.update({"lm_head.weight": "../evil.safetensors"})), 2, "../evil"),
        (lambda f: _index(f, lambda m: m.update({"lm_head.weight": "/etc/passwd"})), 2, "'/etc/passwd'"),
        (lambda f: _index(f, lambda m: m.update({"lm_head.weight": 3})), 2, "in 3: must be"),
        (lambda f: _index(f, lambda m: m.update({"lm_head.weight": "a.bin"})), 2, "in 'a.bin': must be"),
        (lambda f: _index(f, lambda m: m.update({"lm_head.weight": "no.safetensors"})), 3, "no such file"),
        (lambda f: _index(f, lambda m: m.update({"extra": min(m.values())})), 2, "does not contain extra"),
        (lambda f: _index(f, lambda m: m.pop("model.norm.weight") and None), 2, "contains model.norm.weight"),
        (lambda f: _index(f, lambda m: m.clear()), 3, "it has no weight_map"),
        (lambda f: _cut(_second(f), 5), 3, "damaged or truncated safetensors"),
        (lambda f: _second(f).write_bytes(b""), 3, "damaged or truncated safetensors"),
        (lambda f: _second(f).write_bytes(b"\xff" * 4000), 3, "damaged or truncated safetensors"),
        (lambda f: _header(_second(f), b'"F32"', b'"I32"'), 2, "has type I32, expected F32, BF16"),
        (lambda f: _cut(f / "config.json", 30), 3, "config.json: damaged or truncated: it is not JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), 3, "it is not JSON"),
        (lambda f: (f / "config.json").write_text("[1]"), 3, "it is not a JSON object"),
        (
            lambda f: (f / "config.json").unlink(),
            2,
            "is not a Hugging Face folder, since it has no config.json",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").unlink(),
            3,
            "model.safetensors.index.json: no such file; it lists the tensors in model-00001-of-",
        ),
        (lambda f: [each.unlink() for each in f.glob("model*")], 2, "contains no weights"),
    ],
)
def test_folders_that_are_refused(
    spoil: Callable[[Path], object], code: int, told: str, world: World, tmp_path: Path
) -> None:
    folder = saved(reference("llama"), tmp_path / "theirs", max_shard_size="8KB")
    spoil(folder)
    with pytest.raises(HpctrainError) as caught:
        import_model(world, folder, tmp_path / "model.h5")
    assert caught.value.exit_code == code
    assert any(told in problem for problem in caught.value.problems), caught.value.problems
    assert not (tmp_path / "model.h5").exists()


def test_a_file_that_does_not_fit_into_the_address_space_is_an_error(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 54018795200 bytes: Cannot allocate memory (12)")

    folder = saved(reference("llama"), tmp_path / "theirs")
    monkeypatch.setattr(safetensors_folder, "safe_open", refuse)
    with pytest.raises(InputOutputError, match=r"model\.safetensors: cannot be mapped into memory: unable"):
        import_model(world, folder, tmp_path / "model.h5")


def test_pickles_are_never_read(world: World, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    folder = saved(reference("gpt2"), tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Evil()}, folder / "pytorch_model.bin")
    for path in (folder, folder / "pytorch_model.bin"):
        with pytest.raises(
            HpctrainError, match=r"pytorch_model\.bin: weights in a pickle can run code"
        ) as caught:
            import_model(world, path, tmp_path / "model.h5")
        assert f'save_pretrained("{folder}-safetensors")' in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_exports_that_are_refused_leave_nothing(
    world: World, tmp_path: Path, flip: Callable[..., None]
) -> None:
    theirs = saved(reference("gpt2"), tmp_path / "theirs")
    path = tmp_path / "model.h5"
    import_model(world, theirs, path)
    with pytest.raises(HpctrainError, match=r"already exists \(--force replaces it\)"):
        import_model(world, theirs, path)
    import_model(world, theirs, path, replace=True)
    with pytest.raises(HpctrainError, match="theirs: is not empty; name a new folder"):
        export_model(world, path, theirs, None, 10**9)

    state = {**read_state(path), "tokenizer": "bytes"}
    state.pop("versions")
    grouped = state["deck"].replace("key_value_heads = 4", "key_value_heads = 2")
    rewritten(path, tmp_path / "grouped.h5", {**state, "deck": grouped}, world)
    with pytest.raises(
        HpctrainError, match=r"key_value_heads = 2: the GPT-2 of transformers requires as many"
    ):
        export_model(world, tmp_path / "grouped.h5", tmp_path / "ours", None, 10**9)
    reading = f'include = "{tmp_path / "secret"}"\n' + state["deck"]
    rewritten(path, tmp_path / "reading.h5", {**state, "deck": reading}, world)
    with pytest.raises(HpctrainError, match="a deck that is stored in a file cannot include others"):
        export_model(world, tmp_path / "reading.h5", tmp_path / "ours", None, 10**9)

    with h5py.File(path) as file:
        offset = file["model/blocks.1.feed_forward.up.weight"].id.get_offset()
    flip(path, offset + 9)
    with pytest.raises(InputOutputError, match=r"/model/blocks.1.feed_forward.up.weight is damaged"):
        export_model(world, path, tmp_path / "ours", None, 10**9)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "grouped.h5", "model.h5", "reading.h5", "theirs"
    ]  # fmt: skip


def test_values_beyond_fp16_are_refused(world: World, tmp_path: Path) -> None:
    model = reference("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = 1e5
    import_model(world, saved(model, tmp_path / "theirs"), tmp_path / "model.h5")
    with pytest.raises(HpctrainError, match=r"/model/final_norm.weight: has values beyond the range of fp16"):
        export_model(world, tmp_path / "model.h5", tmp_path / "ours", "fp16", 10**9)
    assert not (tmp_path / "ours").exists()


def test_multipliers_need_a_weight_that_takes_them(world: World, tmp_path: Path) -> None:
    keys = "model.family=gemma", "model.parametrization=mup", "model.base_width=8", "model.base_head_size=3"
    deck = small_deck(*LLAMA, *keys)
    engine = build_engine(deck, world, make_mesh(deck, world))
    path = tmp_path / "run.h5"
    save(path, world.everyone, training_entries(engine.state(), writing=True), {"deck": deck_text(deck)})
    with pytest.raises(HpctrainError, match=r'cannot be exported with model\.norm_weight = "one_plus"'):
        export_model(world, path, tmp_path / "exported", "fp32", 10**9)


@pytest.mark.parametrize(
    "family",
    [(), ("model.tied=false",), LLAMA, (*LLAMA, "model.query_key_norm=head")],
    ids=["gpt2", "untied", "llama", "qwen3"],
)
def test_the_multipliers_of_mup_are_in_the_weights(
    family: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    """What is exported has none, and computes the same; what starts from the checkpoint keeps them."""
    base = ("model.parametrization=mup", "model.base_width=8", "model.base_head_size=3")
    deck = small_deck(*family, *base, "batch.sequence=24")
    engine = build_engine(deck, world, make_mesh(deck, world), noise_std=0.2)
    path = tmp_path / "run.h5"
    save(path, world.everyone, training_entries(engine.state(), writing=True), {"deck": deck_text(deck)})
    for dtype in ("fp32", "bf16"):
        export_model(world, path, tmp_path / dtype, dtype, 10**9)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32").eval()
    with torch.no_grad():
        logits = logits_of(our_model(path, world), TOKENS)
        torch.testing.assert_close(logits, exported(TOKENS).logits, rtol=1e-5, atol=1e-5)
    rounded = tensors_of(tmp_path / "bf16")
    assert_same_bits(rounded, {name: t.bfloat16() for name, t in tensors_of(tmp_path / "fp32").items()})
    keys = read_source_keys(str(path))
    assert keys["model.base_width"] == 8 and keys["model.base_head_size"] == 3
    started = small_deck(*(f"{key}={toml_value(value)}" for key, value in keys.items()))
    assert not source_problems(started, keys)
    (problem,) = source_problems(
        started, {name: value for name, value in keys.items() if "base" not in name and "param" not in name}
    )
    assert problem.key == "model.parametrization"
