"""Tests of chat models that are imported, trained on conversations, exported and loaded by `transformers`.

Modules: checkpoint/exchange/model_files.py, checkpoint/exchange/tokenizer_files.py and
train/corpus_comparison.py.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import pytest
import tokenizers
import torch

import hpctrain
from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.stored_tokenizer import stored_settings, tokenizer_of_state
from hpctrain.comm.world import World
from hpctrain.data.chat_template import LLAMA3, ChatTemplate
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError
from hpctrain.generate.continuation import Continuation
from hpctrain.generate.generate_command import GenerateOptions, generate
from hpctrain.generate.prompts import PromptOptions
from hpctrain.generate.sampling import Sampling
from hpctrain.train.run import resume, run_deck
from tests.data.chats import talk, write_rows
from tests.data.preparing import prepare, prepare_rows

transformers = pytest.importorskip("transformers")

SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|pad|>",
)  # fmt: skip
BEGIN, END, _, _, TURN, PAD = range(len(SPECIAL))
CUSTOM_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
)
ROWS = [
    *[{"messages": talk("hello", "hello there")}] * 4,
    {"messages": talk("two", "plus two")},
]
CONFIG = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
    "pad_token": {"__type": "AddedToken", "content": "<|pad|>", "special": True},
    "model_max_length": 48,
    "clean_up_tokenization_spaces": True,
    "padding_side": "left",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "added_tokens_decoder": {str(n): {"content": each, "special": True} for n, each in enumerate(SPECIAL)},
}
GENERATION = {"eos_token_id": [END], "bos_token_id": BEGIN, "temperature": 0.6, "do_sample": True}
DECK = """
[run]
title = "run"
steps = 30
seed = 3
[model]
from = "base"
[data]
tokens = "chat.h5"
validation = 0.0
pack = false
[batch]
global_size = 5
micro_size = 5
sequence = 32
[learning_rate]
peak = 0.02
warmup = 3
"""


def make_base(folder: Path, **changes: Any) -> Path:
    """Write a base model such as that of Llama 3, with its tokenizer but without a chat template."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(["hello there two plus two user assistant"], trainer)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    sizes = {
        "vocab_size": library.get_vocab_size(), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "initializer_range": 0.013,
        "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD,
    }  # fmt: skip
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))
    model.save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config", CONFIG), ("generation_config", GENERATION)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    roles = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))
    return folder


@dataclass(frozen=True)
class Tuned:
    """Folder with `base`, `chat.h5`, the run of `DECK`, and `out`, the exported model of the run."""

    folder: Path

    def json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the exported folder."""
        content: dict[str, Any] = json.loads((self.folder / "out" / name).read_text())
        return content

    @property
    def checkpoint(self) -> Path:
        """Newest checkpoint of the run."""
        return self.folder / "runs/run/checkpoints/latest"


@pytest.fixture(scope="module")
def tuned(world: World, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Base model that was trained on conversations with the chat template of Llama 3."""
    folder, alone, before = tmp_path_factory.mktemp("tuned"), world.single_rank_world(), Path.cwd()
    make_base(folder / "base")
    os.chdir(folder)
    try:
        source = write_rows(folder / "chat.jsonl", ROWS)
        prepare_rows(alone, Path("chat.h5"), [source], kind="chat", template="llama3", tokenizer="base")
        Path("deck.toml").write_text(DECK)
        assert run_deck(alone, Path("deck.toml"), []) == 0
        export_model(alone, Path("runs/run/checkpoints/latest"), Path("out"), None, 10**9)
    finally:
        os.chdir(before)
    return Tuned(folder)


def test_special_tokens_of_a_list_and_wrong_ids(world: World, tmp_path: Path) -> None:
    base, out, alone = (
        make_base(tmp_path / "base", eos_token_id=9999),
        tmp_path / "out",
        world.single_rank_world(),
    )
    config = json.dumps({**CONFIG, "eos_token": ["<|end_of_text|>", "<|eot_id|>"]})
    (base / "tokenizer_config.json").write_text(config)
    warning, made = import_model(alone, base, tmp_path / "base.h5").splitlines()
    problem = "eos_token_id = 9999: token 9999 is not in the tokenizer, so it is ignored"
    assert warning == f"{base}/config.json: {problem}" and "with its tokenizer" in made
    export_model(alone, tmp_path / "base.h5", out, None, 10**9)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [END, TURN]
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token == "<|end_of_text|>"


def test_export_keeps_the_imported_settings(tuned: Tuned) -> None:
    """Only the chat template and the token that ends a turn differ from the imported files."""
    config = tuned.json("tokenizer_config.json")
    assert config == {**CONFIG, "chat_template": LLAMA3, "model_max_length": 48}
    assert tuned.json("special_tokens_map.json")["bos_token"] == "<|begin_of_text|>"
    assert tuned.json("special_tokens_map.json")["eos_token"]["content"] == "<|end_of_text|>"
    assert tuned.json("generation_config.json") == {**GENERATION, "eos_token_id": [END, TURN]}
    model = tuned.json("config.json")
    imported = json.loads((tuned.folder / "base" / "config.json").read_text())
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (BEGIN, [END, TURN], PAD)
    assert (model["max_position_embeddings"], model["initializer_range"]) == (64, 0.013)
    changed = {key for key in imported if model.get(key) != imported[key]}
    assert changed <= {"eos_token_id", "transformers_version"}
    assert (tuned.folder / "out" / "tokenizer.json").read_text() == (
        tuned.folder / "base" / "tokenizer.json"
    ).read_text()


def test_transformers_chats_with_the_exported_model(tuned: Tuned) -> None:
    """It renders the tokens that the model was trained on, and answers end with the token of a turn."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned.folder / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
    )  # fmt: skip
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (48, "left")
    file = TokenFile(tuned.folder / "chat.h5")
    for number in (0, 4):
        messages = ROWS[number]["messages"]
        ids = tokenizer.apply_chat_template(messages)["input_ids"]
        begin = file.document_end(number - 1) if number else 0
        assert ids == file.read(begin, file.document_end(number) - begin).tolist()
        assert (
            tokenizer.apply_chat_template(messages, tokenize=False)
            == (ChatTemplate(LLAMA3).render(messages)[0])
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned.folder / "out")
    assert model.generation_config.eos_token_id == [END, TURN]
    prompt = tokenizer.apply_chat_template(talk("hello"), add_generation_prompt=True, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(written) == "hello there<|eot_id|>"


def test_import_and_export_again(tuned: Tuned, world: World, tmp_path: Path) -> None:
    """The second export is equal to the first one in every file."""
    alone = world.single_rank_world()
    import_model(alone, tuned.folder / "out", tmp_path / "again.h5")
    state = read_state(tmp_path / "again.h5")
    tokenizer = tokenizer_of_state(state, tmp_path / "again.h5")
    assert tokenizer is not None and tokenizer.ends == {END, TURN}
    assert stored_settings(state).chat_template == LLAMA3
    export_model(alone, tmp_path / "again.h5", tmp_path / "again", None, 10**9)
    for file in (tuned.folder / "out").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    prepare_rows(
        alone, tmp_path / "more.h5", [str(tuned.folder / "chat.jsonl")], kind="chat",
        tokenizer=str(tmp_path / "again"),
    )  # fmt: skip
    more, first = TokenFile(tmp_path / "more.h5"), TokenFile(tuned.folder / "chat.h5")
    assert (more.read(0, more.tokens) == first.read(0, first.tokens)).all()


def test_generated_text_ends_with_the_turn(
    tuned: Tuned, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of `hpctrain generate --chat` and of policies end with the token of a turn."""
    model = hpctrain.load(tuned.checkpoint)
    assert model.tokenizer.ends == TokenFile(tuned.folder / "chat.h5").tokenizer.ends == {END, TURN}
    for token in (END, TURN):
        text = Continuation(model.tokenizer, model.tokenizer.encode("hello"), ())
        assert text.add(token) and text.finish_reason == "end"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "two"}\n')
    texts: list[str] = []
    alone, sampling = world.single_rank_world(), Sampling(tokens=30, temperature=0)
    options = GenerateOptions(PromptOptions(json_lines="lines.jsonl"), sampling, chat=True)
    generate(alone, tuned.checkpoint, options, texts.append, live=False)
    answers = [json.loads(each) for each in texts]
    assert [each["ended"] for each in answers] == ["end", "end"] and answers[0]["text"] == "hello there"
    texts.clear()
    options = GenerateOptions(PromptOptions("hello"), sampling, chat=True)
    generate(alone, tuned.checkpoint, options, texts.append, live=False)
    assert texts == ["hello there\n"]


def test_a_model_without_a_template_cannot_chat(tuned: Tuned, world: World, tmp_path: Path) -> None:
    import_model(world.single_rank_world(), tuned.folder / "base", tmp_path / "base.h5")
    options = GenerateOptions(PromptOptions("a"), Sampling(), chat=True)
    with pytest.raises(HpctrainError, match=r"--chat: .*base.h5: has no chat template; train on") as caught:
        generate(world.single_rank_world(), tmp_path / "base.h5", options, print, live=False)
    assert caught.value.exit_code == 2


def test_resumed_run_keeps_the_settings(
    tuned: Tuned, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The imported folder no longer exists, and the resumed run trains on plain text."""
    monkeypatch.chdir(tuned.folder)
    alone = world.single_rank_world()
    (tmp_path / "a.txt").write_text("hello there two plus two " * 30)
    prepare(alone, tmp_path / "a.h5", [str(tmp_path / "a.txt")], tokenizer="base")
    (tuned.folder / "base").rename(tmp_path / "gone")
    try:
        tokens, elsewhere = f"data.tokens={tmp_path / 'a.h5'}", f"run.dir={tmp_path / 'on'}"
        changes = [tokens, elsewhere, "run.steps=31", "data.document_mask=true"]
        assert resume(alone, tuned.checkpoint, changes) == 0
    finally:
        (tmp_path / "gone").rename(tuned.folder / "base")
    export_model(alone, tmp_path / "on/checkpoints/latest", tmp_path / "out", None, 10**9)
    for name in ("tokenizer_config.json", "generation_config.json", "config.json", "special_tokens_map.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == tuned.json(name), name


def test_template_of_the_token_file_is_exported(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template and the special tokens are those of the token file, without an imported model."""
    monkeypatch.chdir(tmp_path)
    alone = world.single_rank_world()
    make_base(tmp_path / "base")
    (tmp_path / "own.jinja").write_text(CUSTOM_TEMPLATE)
    source = write_rows(tmp_path / "chat.jsonl", ROWS)
    prepare_rows(alone, Path("chat.h5"), [source], kind="chat", template="own.jinja", tokenizer="base")
    deck = DECK.replace('from = "base"', 'family = "gpt2"\nlayers = 1\nhidden = 16\nheads = 2').replace(
        "= 30", "= 1"
    )
    Path("deck.toml").write_text(deck)
    assert run_deck(alone, Path("deck.toml"), []) == 0
    export_model(alone, Path("runs/run/checkpoints/latest"), Path("out"), None, 10**9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == CUSTOM_TEMPLATE and tokenizer.model_max_length == 32
    assert tokenizer.apply_chat_template(talk("a", "b"), tokenize=False) == (
        "<|begin_of_text|>[user]a<|end_of_text|>[assistant]b<|end_of_text|>"
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["n_positions"]) == (END, BEGIN, 32)
    assert "temperature" not in generation and generation["eos_token_id"] == [END]


def test_shorter_sequences_keep_the_context_of_earlier_runs(
    tuned: Tuned, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run starts from a checkpoint that has no imported model."""
    monkeypatch.chdir(tmp_path)
    alone = world.single_rank_world()
    shutil.copy(tuned.folder / "chat.h5", tmp_path)
    llama_deck = DECK.replace('from = "base"', 'family = "llama"\nlayers = 1\nhidden = 16\nheads = 2')
    Path("deck.toml").write_text(llama_deck.replace("= 30", "= 1").replace("sequence = 32", "sequence = 40"))
    assert run_deck(alone, Path("deck.toml"), []) == 0
    (tmp_path / "runs/run/checkpoints/latest").resolve().rename(tmp_path / "first.h5")
    Path("next.toml").write_text(DECK.replace('"base"', '"first.h5"').replace("= 30", "= 1"))
    assert run_deck(alone, Path("next.toml"), ["run.title=next"]) == 0
    export_model(alone, Path("runs/next/checkpoints/latest"), Path("out"), None, 10**9)
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 40


def test_named_templates_are_exported(tuned: Tuned, world: World, tmp_path: Path) -> None:
    """They are imported from several files, as newer versions of `transformers` write them."""
    folder = tmp_path / "several"
    shutil.copytree(tuned.folder / "base", folder)
    (folder / "chat_template.jinja").write_text(CUSTOM_TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tools")
    import_model(world.single_rank_world(), folder, tmp_path / "several.h5")
    export_model(world.single_rank_world(), tmp_path / "several.h5", tmp_path / "out", None, 10**9)
    for path in (folder, tmp_path / "out"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        assert tokenizer.chat_template == {"default": CUSTOM_TEMPLATE, "tool_use": "tools"}, path


def test_older_token_file_has_its_template(tuned: Tuned, tmp_path: Path) -> None:
    shutil.copy(tuned.folder / "chat.h5", tmp_path / "old.h5")
    with h5py.File(tmp_path / "old.h5", "r+") as file:
        del file["tokenizer_settings"]
    settings = TokenFile(tmp_path / "old.h5").tokenizer_settings
    assert settings.chat_template == LLAMA3 and settings.ends == (TURN,)
    assert settings.special_tokens["bos_token"] == "<|begin_of_text|>"


def test_learned_positions_limit_the_context(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that uses fewer learned positions exports a model with this shorter context."""
    monkeypatch.chdir(tmp_path)
    alone = world.single_rank_world()
    sizes = {"vocab_size": 257, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=256, eos_token_id=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    (tmp_path / "a.txt").write_text("the quick brown fox " * 40)
    prepare(alone, Path("chat.h5"), ["a.txt"])
    Path("deck.toml").write_text(DECK.replace("pack = false", "").replace("= 30", "= 1"))
    assert run_deck(alone, Path("deck.toml"), []) == 0
    export_model(alone, Path("runs/run/checkpoints/latest"), Path("out"), None, 10**9)
    assert json.loads((tmp_path / "out/config.json").read_text())["n_positions"] == 32
    tokenizer_config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert tokenizer_config["model_max_length"] == 32 and tokenizer_config["eos_token"] == "<|endoftext|>"
    assert Tokenizer("bytes").ends == {256}
