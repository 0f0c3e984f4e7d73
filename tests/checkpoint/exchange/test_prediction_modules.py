"""Modules of multi-token prediction in folders of DeepSeek-V3: there and back, and as a start of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.source import load_source, open_model, source_shape
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import model_entries, training_entries
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import parameter_list
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.objective.multi_token import MultiToken
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.replication import Replications
from tests.checkpoint.exchange.test_families import LAYERS, reference
from tests.checkpoint.exchange.test_hugging_face import assert_same_bits, tensors_of
from tests.engines import make_buckets, small_deck

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")


def save_with_modules(folder: Path, modules: int = 1) -> dict[str, Tensor]:
    """Save a model of `transformers`, add modules to it, and return the tensors of the modules."""
    reference("deepseek-v3").save_pretrained(folder)
    tensors = tensors_of(folder)
    last, hidden = f"model.layers.{LAYERS - 1}.", tensors["model.norm.weight"].shape[0]
    torch.manual_seed(3)
    added: dict[str, Tensor] = {}
    for new in (f"model.layers.{LAYERS + number}." for number in range(modules)):
        module = {new + name.removeprefix(last): each for name, each in tensors.items() if last in name}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            module[f"{new}{name}.weight"] = torch.randn(hidden)
        module[f"{new}eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
        added |= {name: each + 0.1 * torch.randn_like(each) for name, each in module.items()}
        added[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        added[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    safetensors.save_file({**tensors, **added}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": modules}))
    return added


def transformer_of(world: World, source: Path, shape: ModelShape) -> Transformer:
    """Return a model of this shape on one rank, with the weights of a folder or a file."""
    mesh = Mesh(world.single_rank_world(), {})
    model = Transformer(shape, LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context")))
    buckets = make_buckets(model.units(), Replications.unsharded(mesh), torch.float32, 10_000)
    load_source(source, world, model_entries(buckets))
    return model


def test_export_gives_back_the_same_bits(world: World, tmp_path: Path) -> None:
    save_with_modules(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    assert source_shape(tmp_path / "model.h5").mtp_layers == 1
    export_model(world, tmp_path / "model.h5", tmp_path / "ours", None, 1 << 30)
    assert_same_bits(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("kind", ["theirs", "model.h5"])
@pytest.mark.parametrize("modules", [0, 1, 2])
def test_a_run_takes_the_modules_that_it_has(world: World, tmp_path: Path, kind: str, modules: int) -> None:
    added = save_with_modules(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    shape = replace(open_model(tmp_path / "theirs").shape, mtp_layers=modules)
    model = transformer_of(world, tmp_path / kind, shape)
    found = {parameter.shard.name: parameter for parameter in parameter_list(model)}
    projection = f"model.layers.{LAYERS}.eh_proj.weight"
    for depth in range(modules):
        values = found[f"blocks.{LAYERS + depth}.projection.weight"]
        assert torch.equal(values, torch.zeros_like(values) if depth else added[projection])
    assert torch.equal(found["embedding.tokens.weight"], added[f"model.layers.{LAYERS}.embed_tokens.weight"])


def test_modules_that_a_folder_lacks_are_left_out(world: World, tmp_path: Path) -> None:
    reference("deepseek-v3", num_nextn_predict_layers=1).save_pretrained(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    assert source_shape(tmp_path / "model.h5").mtp_layers == 0


@pytest.mark.parametrize("number", [0, 2, -1, "1", True, None])
def test_a_number_of_modules_that_contradicts_the_files_is_refused(number: object, tmp_path: Path) -> None:
    save_with_modules(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": number}))
    with pytest.raises(HpctrainError) as caught:
        open_model(tmp_path)
    (sentence,) = caught.value.problems
    assert f"config.json: num_nextn_predict_layers = {number!r}: contradicts the files" in sentence
    assert f"are model.layers.{LAYERS}" in sentence


def test_an_export_says_that_it_leaves_modules_out(world: World, tmp_path: Path) -> None:
    deck = small_deck("model.family=llama", "model.mtp_layers=2")
    engine = build_engine(deck, world, make_mesh(deck, world))
    entries = training_entries(engine.state(), writing=True)
    save(tmp_path / "run.h5", world.everyone, entries, {"deck": deck_text(deck)})
    lines = export_model(world, tmp_path / "run.h5", tmp_path / "ours", None, 1 << 30).splitlines()
    left = "leaves out 2 modules of multi-token prediction, which LlamaForCausalLM does not have"
    assert lines[0] == f"{tmp_path / 'ours'}: {left}" and len(lines) == 2


def test_states_of_two_depths_are_those_of_transformers(world: World, tmp_path: Path) -> None:
    """Depth 2 reads the state of depth 1 after its last norm, as MtpModel passes it on."""
    save_with_modules(tmp_path, 2)
    from transformers.cache_utils import MtpCache  # takes a second to import
    from transformers.modeling_layers import MtpModel

    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    patterns = [rf"model\.layers\.{LAYERS + number}\..*" for number in range(2)]
    main._keys_to_ignore_on_load_unexpected = patterns  # names the tensors of modules
    modules = MtpModel.from_pretrained(main).eval()
    for name, buffer in (*main.named_buffers(), *modules.named_buffers()):
        if name.endswith("e_score_correction_bias"):  # no parameter of ours: it starts at zero here
            buffer.zero_()
    tokens = torch.randint(main.config.vocab_size, (2, 7))
    cache = MtpCache(config=main.config.get_mtp_config())
    with torch.no_grad():
        states = [main.model(tokens).last_hidden_state]
        for depth in (1, 2):
            further, places = tokens[:, depth:], torch.arange(depth, 7).expand(2, -1)
            states.append(
                modules.forward_layer(depth - 1, states[-1][:, :-1], places, cache, input_ids=further)
            )
    ours = transformer_of(world, tmp_path, open_model(tmp_path).shape)
    micro = MicroBatch.of_tokens(tokens, tokens)
    found = ours(ModelInputs(MultiToken(depths=2).fields_of(micro), torch.arange(7))).detach().chunk(3, 1)
    for depth, (state, expected) in enumerate(zip(found, states, strict=True)):
        torch.testing.assert_close(state.transpose(0, 1)[:, : 7 - depth], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("copy", "layer"), [("embed_tokens", "embedding"), ("shared_head.head", "output layer")]
)
def test_modules_with_other_tables_are_refused(world: World, tmp_path: Path, copy: str, layer: str) -> None:
    save_with_modules(tmp_path / "theirs")
    name = f"model.layers.{LAYERS}.{copy}.weight"
    tensors = tensors_of(tmp_path / "theirs")
    tensors[name][5, 3] += 1
    safetensors.save_file(tensors, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    with pytest.raises(HpctrainError, match=rf"{name}: differs from the {layer} of the model") as caught:
        import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    assert caught.value.exit_code == 2
    shape = replace(open_model(tmp_path / "theirs").shape, mtp_layers=0)
    transformer_of(world, tmp_path / "theirs", shape)  # modules that are not used are not compared
