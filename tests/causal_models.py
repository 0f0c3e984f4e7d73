"""Small models of `transformers` that hpctrain does not have itself, and what works with each of them.

`python -m tests.causal_models` prints the results that `causal_models.toml` has; see `main`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import tomllib
import torch
from torch import Tensor, nn

from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.hugging_face.architectures import native_architecture
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.checkpoint.stored_deck import deck_state, stored_deck
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.generate.continuous_batching import GeneratedText, continue_texts
from hpctrain.generate.model_loading import load_module
from hpctrain.generate.module_passes import ModulePasses
from hpctrain.generate.sampling import KeyedSampler, Sampling
from hpctrain.model.modules.causal_classes import causal_class
from hpctrain.train.start import start_from_source
from tests.engines import Trainer
from tests.model.modules.module_decks import OPTIMIZER, STEPS, plain_loop

SEQUENCE = 16
TOKENS = 5
MOST_PARAMETERS = 2_000_000
RESULTS = Path(__file__).with_name("causal_models.toml")

Result = TypeVar("Result")

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size",), 61),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    "encoder_layers": 1,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    "v_head_dim": 8,
    "sliding_window": 6,
    "first_k_dense_replace": 1,
    "layer_types": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
"""Sizes of small models; a model has those whose names its configuration has."""

_LATENT = {"head_dim": 4, "num_key_value_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

_INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
_BLT_PART = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v32": _LATENT,
    "glm4_moe_lite": _LATENT,
    "minicpm3": _LATENT,
    "youtu": {**_LATENT, "pad_token_id": None},  # transformers loads zeros as the vector of padding
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma4_text": {
        **_WINDOWED,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 61,
        "global_head_dim": 8,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "adapter_rank": 8,
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "num_nextn_predict_layers": 0,
    },
    "inkling2_text": {
        "unpadded_vocab_size": 61,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 6,
        "d_rel": 4,
        "rel_extent": 16,
        "n_layers_per_attn_res_block": 1,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "pronunciation_embed_dim": 16,
        "shape_vocab_size": 20,
        "shape_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "fuyu": {
        "text_config": {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 32,
        },
        "patch_size": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2, "num_expert_group": 1},
    "blt": {
        "cross_attn_k": 2,
        "encoder_hash_byte_group_size": [2, 3],
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {**_BLT_PART, "vocab_size": 61, "hidden_size_global": 32, "num_hidden_layers": 1},
        "decoder_config": {**_BLT_PART, "vocab_size": 61, "hidden_size_global": 32, "num_hidden_layers": 2},
        "global_config": {**_BLT_PART, "num_hidden_layers": 2},
        "patcher_config": {**_BLT_PART, "vocab_size": 61, "num_hidden_layers": 1},
    },
    "cohere_compass_text": {
        **_WINDOWED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "cpmant": {
        "dim_head": 8,
        "dim_ff": 48,
        "position_bias_num_buckets": 8,
        "position_bias_max_distance": 16,
        "prompt_types": 2,
        "prompt_length": 2,
        "segment_types": 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        **_LATENT,
        **_INDEXED,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 8,
        "swa_qk_nope_head_dim": 4,
        "swa_qk_rope_head_dim": 4,
        "swa_v_head_dim": 8,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 61,
        "laurel_rank": 8,
    },
    "glm_moe_dsa": {**_LATENT, **_INDEXED},
    "kimi_linear": {**_LATENT, **_HYBRID, "linear_head_dim": 8, "linear_num_heads": 4},
    "longcat_flash": {
        **_LATENT,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
    },
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": None},
    "mamba2": {"head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "reformer": {
        "is_decoder": True,
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [8, 24],
        "feed_forward_size": 48,
        "hash_seed": 1,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "xlm": {"causal": True, "use_lang_emb": False, "emb_dim": 32},
    "xlnet": {"attn_type": "uni", "d_inner": 48, "d_head": 8},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}
"""Further sizes of some models."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "gemma4_unified_text": ("optimizer.adamw.epsilon=0.1",),
}
"""Keys of the decks of some models.

With the usual epsilon, a plain loop in fp32 differs from one in fp64 by more than the tolerance: gradients
are small, and Adam makes updates of one size of their rounding.
"""


REFUSED: Mapping[str, str] = {
    "cpmant": "its predictions depend on later tokens",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "its predictions depend on keys and values of another model",
    ),
    **dict.fromkeys(
        (
            *("dots3_note", "emu3", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2"),
            *("llama4", "mllama", "moss_transcribe_diarize", "musicgen", "musicgen_melody"),
            *("phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
        ),
        "a model of images, audio or video, not of text",
    ),
}
"""Types of causal language models without a result, and the end of the sentence that refuses them."""

TRIED_ONCE = (
    *("bert-generation", "big_bird", "data2vec-text", "ernie", "megatron-bert", "rembert"),
    *("roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl"),
)
"""Types that have passed all checks once, whose code is like that of a type with results."""

WITHOUT_FP64 = ("blt", "inkling2_text", "reformer", "xglm")
"""Types whose code fails in fp64, or draws other random numbers there: a loop in fp32 is compared."""


def tiny_model(kind: str) -> nn.Module:
    """Return a small model of a type, with random weights that are not alike."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    known = config_class().to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    zeros = {key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float)}
    config = config_class(**{**sizes, **zeros, **CHANGES.get(kind, {})})
    build: Any = causal_class(kind, None)._from_config
    with torch.device("meta"):
        planned = build(config, attn_implementation="eager")
    assert sum(each.numel() for each in planned.parameters()) < MOST_PARAMETERS, "too large"
    torch.manual_seed(7)
    model: nn.Module = build(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.02)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and not buffer.is_floating_point():
                buffer.random_(0, SIZES["num_experts"])  # a table of the experts of each token
    return model


def on_rank_0(world: World, compute: Callable[[], Result]) -> Result:
    """Return what rank 0 computes by itself, or raise its error, on all ranks. Collective."""
    value: Any = None
    if world.rank == 0:
        try:
            value = compute()
        except Exception as error:  # noqa: BLE001  (all ranks raise it)
            value = AssertionError(f"{type(error).__name__}: {error}")
    value = world.everyone.broadcast_object(value)
    if isinstance(value, AssertionError):
        raise value
    shared: Result = value
    return shared


def save_model(kind: str, folder: Path, world: World) -> None:
    """Write a small model into a folder. Collective."""

    def write() -> None:
        tiny_model(kind).save_pretrained(folder)  # type: ignore[operator]

    on_rank_0(world, write)


def deck_of(folder: Path, *overrides: str) -> Deck:
    """Return the deck of a run from a folder, which says no more of the model."""
    text = f"""
[run]
steps = 20
[model]
from = "{folder}"
[data]
tokens = "none"
[batch]
global_size = 4
micro_size = 2
sequence = {SEQUENCE}
{OPTIMIZER}
"""
    return parse_deck(text, overrides, read_source=read_source_keys)


def trainer_of(world: World, deck: Deck) -> Trainer:
    """Return the trainer of a run from a folder, on random tokens."""
    engine = build_engine(deck, world, make_mesh(deck, world))
    start_from_source(deck, engine)
    source = SyntheticSource(deck.batch.sequence, deck.model.vocabulary or 0, masked=0.2)
    return Trainer(deck, engine, Batches(source, 1))


def plain_model(folder: Path) -> nn.Module:
    """Return the model of a folder as `transformers` itself loads it."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(folder).model_type
    model: nn.Module = causal_class(kind, None).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # products depend on how a file's memory is aligned
    for each in model.modules():
        config: Any = getattr(each, "config", None)
        if config is not None:
            config.use_cache = False  # decoders without their encoder, such as Bart's, have no cache
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"  # others have no fp64
    return model


def assert_steps(world: World, folder: Path, *overrides: str) -> Trainer:
    """Compare three steps with those of a plain torch loop over what `transformers` loads. Collective."""
    training = trainer_of(world, deck_of(folder, *KEYS.get(folder.name, ()), *overrides))

    def alone() -> list[list[float]]:
        dtype = torch.float32 if folder.name in WITHOUT_FP64 else torch.float64
        return plain_loop(training, plain_model(folder), {}, STEPS, dtype=dtype)[0]

    expected = on_rank_0(world, alone)
    found = [[result.loss, result.grad_norm] for result in training.train(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0.0)
    return training


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_there_and_back(world: World, folder: Path) -> None:
    """Compare a folder with its import's export, bit for bit. Collective."""
    import_model(world, folder, folder.with_suffix(".h5"), True)
    shutil.rmtree(folder.with_suffix(".back"), ignore_errors=True)
    world.everyone.barrier()
    export_model(world, folder.with_suffix(".h5"), folder.with_suffix(".back"), None, 1 << 40)
    with world.agreement():
        there, back = tensors_of(folder), tensors_of(folder.with_suffix(".back"))
        assert there.keys() == back.keys()
        for name, value in there.items():
            assert value.dtype == back[name].dtype and torch.equal(value, back[name]), name


def assert_export(world: World, training: Trainer, folder: Path) -> None:
    """Compare logits of an exported run's model with those of its module. Collective."""
    path, out = folder.with_suffix(".run.h5"), folder.with_suffix(".out")
    engine = training.engine
    state = {"step": STEPS, **deck_state(training.deck)}
    save(path, world.everyone, training_entries(engine.state(), writing=True), state, 1 << 20)
    shutil.rmtree(out, ignore_errors=True)
    world.everyone.barrier()
    export_model(world, path, out, None, 1 << 40)
    weights = parameters(world, training)

    def alone() -> float:
        exported, module = plain_model(out), plain_model(folder)
        named = dict(module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in weights.items():
                named[name].copy_(value)
            tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) % 61
            logits = [model.eval()(input_ids=tokens).logits for model in (exported, module)]
            original = plain_model(folder).eval()(input_ids=tokens).logits
        assert not torch.equal(original, logits[0])  # training has changed the model
        return (logits[0] - logits[1]).abs().max().item()

    assert on_rank_0(world, alone) == 0


def parameters(world: World, training: Trainer) -> dict[str, Tensor]:
    """Return all parameters, put together of all ranks' pieces. Collective."""
    pieces = [
        (segment.parameter.shard, segment.view(flat).detach().float().clone())
        for bucket in training.engine.stage.buckets
        for flat in [bucket.gather_owned(bucket.owned_values)]
        for segment in bucket.segments
    ]
    whole: dict[str, Tensor] = {}
    for shard, piece in (each for own in world.everyone.all_gather_object(pieces) for each in own):
        target = whole.setdefault(shard.name, torch.zeros(shard.shape))
        target[shard.slices] = piece[tuple(slice(0, size) for size in shard.extent)]
    return whole


@cache
def results() -> dict[str, dict[str, str]]:
    """Return what works for each type of model that is not built in."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    with RESULTS.open("rb") as stream:
        found: dict[str, dict[str, str]] = tomllib.load(stream)
    return {kind: each for kind, each in found.items() if not is_built_in(str(CLASSES.get(kind)))}


def is_built_in(name: str) -> bool:
    """Return True if hpctrain has the architecture of this name itself."""
    return native_architecture({"architectures": [name]}, "config.json") is not None


def assert_same_text(world: World, folder: Path) -> None:
    """Compare greedy continuations with those of a loop over what `transformers` loads. Collective."""
    import_model(world, folder, folder.with_suffix(".h5"), True)
    state = read_state(folder.with_suffix(".h5"))
    deck = stored_deck(state, folder).with_keys(batch={"sequence": SEQUENCE})
    part = load_module(world, folder.with_suffix(".h5"), deck)
    sampling = Sampling(tokens=TOKENS, temperature=0.0, seed=1)
    draw = KeyedSampler(sampling, deck.model.vocabulary or 0, str(folder), part.layer_context.tensor)
    texts = [GeneratedText([5 + 7 * number, 11, 3 + number], TOKENS, number) for number in range(3)]
    for _ in continue_texts(ModulePasses(part, 2), texts, draw, lambda *_: False):
        pass

    def alone() -> list[list[int]]:
        model, found = plain_model(folder).eval(), list[list[int]]()
        with torch.no_grad():
            for text in texts:
                tokens = text.tokens[: text.prompt_length]
                for _ in range(TOKENS):
                    tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
                found.append(tokens)
        return found

    assert [text.tokens for text in texts] == on_rank_0(world, alone)


Check = Callable[[World, Path], object]
CHECKS: Mapping[str, Check] = {
    "zero": lambda world, folder: assert_export(world, assert_steps(world, folder, "layout.zero=3"), folder),
    "export": assert_there_and_back,
    "generate": assert_same_text,
    "tensor": lambda world, folder: assert_steps(world, folder, "layout.tensor=2"),
    "pipeline": lambda world, folder: assert_steps(world, folder, "layout.pipeline=2"),
}


def attempt(check: Check, world: World, folder: Path) -> str:
    """Return "yes" if a check passes, else its error on one line. Collective."""
    try:
        check(world, folder)
        sentence = "yes"
    except HpctrainError as error:
        sentence = error.problems[0]
    except Exception as error:  # noqa: BLE001  (whatever it is, the table tells it)
        sentence = f"{type(error).__name__}: {(str(error) or '-').strip().splitlines()[0]}"
    every = world.everyone.all_gather_object(sentence)
    return next((each for each in every if each != "yes"), "yes")


def main(kinds: list[str], columns: list[str]) -> None:
    """Print the results of types of models, as TOML, on two ranks under mpirun."""
    import transformers

    from hpctrain.comm.verb import run_verb

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def work(world: World) -> None:
        root = Path(world.everyone.broadcast_object(tempfile.mkdtemp()))
        for kind in kinds:
            folder = root / kind
            lines = [f"[{kind}]"]
            saved = attempt(lambda world, folder: save_model(folder.name, folder, world), world, folder)
            if saved != "yes":
                lines = [f"# {kind}: {saved[:200]}"]
            else:
                for name, check in CHECKS.items():
                    if columns and name not in columns:
                        continue
                    lines.append(f"{name} = {attempt(check, world, folder)!r}")
            if world.rank == 0:
                print("\n".join(lines), flush=True)
            world.everyone.barrier()
            if world.rank == 0:
                for each in root.iterdir():
                    shutil.rmtree(each) if each.is_dir() else each.unlink()

    run_verb(work, device="cpu")


if __name__ == "__main__":
    main(sys.argv[2:], sys.argv[1].split(",") if sys.argv[1] != "all" else [])
