"""Building of the module that a deck names, and messages that show the user's own lines.

Also deck/user_code.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hpctrain.deck.code import NamedCode
from hpctrain.deck.user_code import import_function, run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.instantiate import build_module
from hpctrain.text import nearest

FILE = """
from beside import WIDTH
from torch import nn

class Holder:
    make = staticmethod(lambda: nn.Linear(WIDTH, 2))

def build(hidden, layers=1):
    return nn.Linear(hidden, layers)

def fails():
    return helper()

def helper():
    raise ValueError("not\\nthis way")

def number():
    return 3

answer = 42
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 5")
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("import torch\nx = 1 / 0\n")
    return tmp_path / "mine.py"


def problems(target: str, **arguments: object) -> tuple[str, ...]:
    with pytest.raises(HpctrainError) as caught:
        build_module(NamedCode(target), arguments)
    return caught.value.problems


def test_a_function_of_a_file_is_called_with_the_arguments(file: Path) -> None:
    module = build_module(NamedCode(f"{file}:build"), {"hidden": 3, "layers": 4})
    assert isinstance(module, nn.Linear) and module.weight.shape == (4, 3)
    assert build_module(NamedCode(f"{file}:Holder.make"), {}).weight.shape == (2, 5)
    assert import_function(NamedCode(f"{file}:build")) is import_function(NamedCode(f"{file}:build"))


def test_a_function_of_a_package_is_found() -> None:
    assert import_function(NamedCode("torch.nn:Linear")) is nn.Linear
    assert build_module(NamedCode("torch.nn:Linear"), {"in_features": 2, "out_features": 3}).weight.shape == (
        3,
        2,
    )


def test_a_class_of_transformers_is_made_of_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    module = build_module(NamedCode("transformers:GPT2LMHeadModel"), sizes)
    assert module.transformer.wte.weight.shape == (11, 8)
    transformers.GPT2Config(**sizes).save_pretrained(tmp_path)
    again = build_module(NamedCode("transformers:GPT2LMHeadModel"), {"config": str(tmp_path), "n_layer": 2})
    assert len(again.transformer.h) == 2 and again.transformer.wte.weight.shape == (11, 8)


def test_a_config_that_loads_code_from_elsewhere_is_refused(tmp_path: Path) -> None:
    """As attention kernels of a hub, which anyone may publish; an argument of the deck replaces it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes).to_dict() | {"attn_implementation": "someone/kernels"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (message,) = problems("transformers:GPT2LMHeadModel", config=str(tmp_path))
    assert message == (
        f"{tmp_path}/config.json: attn_implementation = someone/kernels: refers to remote code (set "
        "attn_implementation in [model.arguments])"
    )
    own = {"config": str(tmp_path), "attn_implementation": "eager"}
    assert isinstance(build_module(NamedCode("transformers:GPT2LMHeadModel"), own), nn.Module)


def test_names_that_no_config_knows_are_told(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    message = "transformers:GPT2LMHeadModel: [model.arguments] does not fit: GPT2Config has no "
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2}
    assert problems("transformers:GPT2LMHeadModel", **sizes, n_layers=2, heads=2) == (
        f"{message}n_layers (did you mean n_layer?)",
        f"{message}heads",
    )
    # Of which some are others' names, or stand for others.
    also = {"hidden_size": 8, "num_labels": 3, "attn_implementation": "eager", "output_attentions": False}
    assert isinstance(build_module(NamedCode("transformers:GPT2LMHeadModel"), {**sizes, **also}), nn.Module)
    transformers.GPT2Config(**sizes, mine=3).save_pretrained(tmp_path)
    folder = {"config": str(tmp_path), "local_files_only": True}
    assert isinstance(
        build_module(NamedCode("transformers:GPT2LMHeadModel"), {**folder, "mine": 4}), nn.Module
    )
    assert problems("transformers:GPT2LMHeadModel", **folder, mein=4) == (
        f"{message}mein (did you mean mine?)",
    )
    sub_config = problems("transformers:Gemma3ForConditionalGeneration", text_config={"hiden_size": 8})
    assert sub_config[0].endswith(
        "text_config: Gemma3TextConfig has no hiden_size (did you mean hidden_size?)"
    )


def test_what_is_not_there_is_told_with_what_is_near(file: Path) -> None:
    assert problems(f"{file.parent}/other.py:build") == (f"{file.parent}/other.py: there is no such file",)
    assert problems(f"{file}:bild") == (f"{file} has no bild (did you mean build?)",)
    assert problems("no_such_package.x:build") == (
        "the package no_such_package is not installed (a file is named FILE.py)",
    )
    assert problems("torch.no_such:build") == (
        "the package torch.no_such is not installed (a file is named FILE.py)",
    )


def test_what_is_no_module_is_told(file: Path) -> None:
    assert problems(f"{file}:number") == ("mine.py:number: expected a torch.nn.Module, got an int",)
    assert problems(f"{file}:answer") == (f"{file}:answer is not a function or class, but of type int",)


def test_arguments_that_do_not_fit_are_told(file: Path) -> None:
    message = "mine.py:build: [model.arguments] does not fit: "
    assert problems(f"{file}:build") == (
        f"{message}missing a required argument: 'hidden' (it takes hidden, layers)",
    )
    assert problems(f"{file}:build", hidden=3, heads=2) == (
        f"{message}got an unexpected keyword argument 'heads' (it takes hidden, layers)",
    )


def test_a_failure_of_the_users_own_is_told_with_the_users_own_lines(file: Path) -> None:
    assert problems(f"{file}:fails") == (
        "mine.py:fails fails: ValueError: not",
        f"  {file}, line 12, in fails: return helper()",
        f'  {file}, line 15, in helper: raise ValueError("not\\nthis way")',
    )
    broken = file.with_name("broken.py")
    assert problems(f"{broken}:build") == (
        f"{broken} fails to load: ZeroDivisionError: division by zero",
        f"  {broken}, line 2, in <module>: x = 1 / 0",
    )
    (file.parent / "torn.py").write_text("def build(:\n")
    (message,) = problems(f"{file.parent}/torn.py:build")
    assert message.startswith(f"{file.parent}/torn.py fails to load: SyntaxError: ")
    (file.parent / "leaves.py").write_text("import sys\nsys.exit(5)\n")
    for _ in range(2):
        assert problems(f"{file.parent}/leaves.py:build") == (
            f"{file.parent}/leaves.py fails to load: it ends the process (exit code 5): put the lines "
            'that run a script under `if __name__ == "__main__":`',
        )


def test_a_package_that_fails_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    (message, line) = problems("broken:build")
    assert (
        message == "broken fails to load: ZeroDivisionError: division by zero" and "broken.py, line 2" in line
    )


def test_what_does_not_fit_a_users_function_is_told_and_what_fails_within_ours_is_not() -> None:
    message = r"^it fails: TypeError: .* takes 0 positional arguments but 1 "
    function: Any = lambda: 3  # noqa: E731
    with pytest.raises(HpctrainError, match=message), run_user_code("it fails"):
        function(2)
    with pytest.raises(TypeError), run_user_code("it fails"):
        nearest(3, ["a"])  # type: ignore[arg-type]
