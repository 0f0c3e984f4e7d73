"""Facts about a module before it has memory, and refused modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpctrain.costs.layer_flops import model_flops
from hpctrain.deck.code import NamedCode
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.construction import architecture_of, bare_model, layer_kinds
from hpctrain.model.count import count
from hpctrain.model.modules.module_architecture import ModuleArchitecture, find_blocks
from hpctrain.model.part import parameter_list
from tests.model.modules import models

MODULES = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 3, dtype=torch.bfloat16)
        self.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.c = nn.Parameter(torch.zeros(3))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
        self.again = nn.ModuleList(self.rows)

def integers():
    module = nn.Linear(2, 3)
    module.mask = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    module.turns = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return module

def frozen():
    return nn.Linear(2, 3).requires_grad_(False)

def lazy():
    return nn.LazyLinear(3)
"""
DECK = """
[run]
steps = 20
[model]
module = "{target}"
[data]
tokens = "none"
[batch]
global_size = 8
sequence = 32
[learning_rate]
peak = 1e-2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "modules.py").write_text(MODULES)
    return tmp_path / "modules.py"


def deck_of(file: Path, name: str, *overrides: str) -> Deck:
    return parse_deck(DECK.format(target=f"{file}:{name}"), overrides)


def problems(file: Path, name: str, *overrides: str) -> list[str]:
    with pytest.raises(HpctrainError) as caught:
        architecture_of(deck_of(file, name, *overrides), 61)
    return [each.rpartition('": ')[2] for each in caught.value.problems]


def test_parameters_and_flops_are_counted_without_memory() -> None:
    file = Path(models.__file__)
    architecture = architecture_of(deck_of(file, "gpt", "model.blocks=layers.*"), 61)
    expected = sum(parameter.numel() for parameter in models.gpt().parameters())
    numbers = count(architecture)
    assert numbers.parameters == numbers.active_parameters == expected
    # 6 for each element of the blocks' matrices and of the head, which is the table; positions are no matrix.
    # Of each block 12 h s besides, of queries, keys and values.
    of_block = 3 * 32 * 32 + 32 * 32 + 2 * 2 * 32 * 32
    flops = model_flops(architecture)
    assert flops.flops_per_token == 6 * (3 * of_block + 61 * 32) + 3 * 12 * 32 * 32
    assert flops.block_forward == 2 * 3 * of_block + 3 * 4 * 32 * 32
    assert flops.core_forward == 3 * 4 * 32 * 32
    assert tuple(map(str, layer_kinds(architecture))) == ("outside", "Block", "Block", "Block", "result")
    assert architecture.title == "models.py:gpt" and architecture.block_count == 3


def test_equal_decks_ask_for_equal_architectures(file: Path) -> None:
    one, other = (architecture_of(deck_of(file, "Mixed"), 61) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != architecture_of(deck_of(file, "Mixed", "precision.compute=bf16"), 61)


def test_one_parameter_of_several_names_is_one(file: Path) -> None:
    architecture = architecture_of(deck_of(file, "Tied", "model.blocks=rows.*"), 61)
    model = bare_model(architecture)
    names = [parameter.shard.name for parameter in parameter_list(model)]
    assert names == [f"rows.{row}.{kind}" for row in range(5) for kind in ("weight", "bias")]
    assert next(iter(model.names.values())) == ["rows.0.weight", "again.0.weight"]  # type: ignore[attr-defined]
    assert architecture.notes[0] == "rows.0.weight and again.0.weight are one parameter"
    assert architecture.notes[3:] == ("and 7 others with several names",)


def test_other_formats_are_told(file: Path) -> None:
    (note,) = architecture_of(deck_of(file, "Mixed"), 61).notes
    made = "parameters that the module creates in bfloat16 and float64 are stored in float32"
    assert note == f"{made} and updated in float32"


def test_blocks_have_a_pattern_between_dots() -> None:
    module = models.gpt()
    assert [*find_blocks(module, "layers.*")] == ["layers.0", "layers.1", "layers.2"]
    assert [*find_blocks(module, "layers.[02].mlp")] == ["layers.0.mlp", "layers.2.mlp"]
    assert find_blocks(module, "layers") == {"layers": module.layers} and not find_blocks(module, None)


def test_what_cannot_be_trained_is_told(file: Path) -> None:
    assert problems(file, "integers") == [
        "has a parameter mask of unsupported type int32",
        "has a parameter turns of unsupported type complex64",
    ]
    assert problems(file, "frozen") == ["has no trainable parameter"]
    assert problems(file, "lazy")[0] == (
        "has a parameter weight whose shape is unknown before the first call"
    )
    named = problems(Path(models.__file__), "gpt", "model.blocks=layers.*.attn")
    told = "matches no submodule (did you mean layers.0.attention?)"
    assert named == [f"--set model.blocks=layers.*.attn: {told}"]


def test_its_class_is_chosen_by_the_deck(file: Path) -> None:
    assert isinstance(architecture_of(deck_of(file, "Mixed"), 61), ModuleArchitecture)


def test_experts_of_transformers_are_computed_in_double_precision() -> None:
    sizes = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
    }
    named = NamedCode("transformers:MixtralForCausalLM"), json.dumps(sizes), None, 4, None
    tokens = torch.arange(4)[None]
    logits = {}
    for storage in (torch.float64, torch.float32):
        torch.manual_seed(1)
        module = ModuleArchitecture(*named, storage).build(torch.device("cpu")).to(storage)
        logits[storage] = module(input_ids=tokens).logits
    assert torch.allclose(logits[torch.float64].float(), logits[torch.float32], atol=1e-5)
