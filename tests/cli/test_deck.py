from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hpctrain.cli.deck import command
from hpctrain.deck.read import parse_deck
from hpctrain.deck.reference import reference_text
from hpctrain.errors import HpctrainError

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
DECK = '[run]\nsteps = 2\n[model]\npreset = "gpt2-124m"\n[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 8\n'


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A deck in a file."""
    (tmp_path / "small.toml").write_text(DECK)
    return str(tmp_path / "small.toml")


def test_the_resolved_deck_is_printed(path: str) -> None:
    result = CliRunner().invoke(command, [path, "--set", "layout.tensor=2", "--ranks", "8"])
    assert result.exit_code == 0
    assert "\nhidden = 768\n" in result.output
    assert "\n# data: all remaining ranks: 4 on 8 ranks\n" in result.output
    assert parse_deck(result.output) == parse_deck(DECK, ["layout.tensor=2", "run.title=small"])


def test_problems_are_raised_for_the_command_line(path: str) -> None:
    result = CliRunner().invoke(command, [path, "--ranks", "3"])
    assert isinstance(result.exception, HpctrainError)
    assert result.exception.problems == (
        f"{path}:8: batch.global_size = 8: must be a multiple of batch.micro_size x data ranks = 1 x 3 = 3 "
        "(use 6 or 9)",
    )


POLICY = """
[objective]
kind = "ppo"
beta = 0.1
[policy]
reward = ["exact-match"]
critic = ["layout.tensor=3", "layout.zero=1"]
reference = ["layout.pipeline=5"]
"""


def test_critic_and_reference_are_checked_against_ranks(tmp_path: Path) -> None:
    """Each is told under its key, and if only keys are wrong, without ranks, too."""
    path = tmp_path / "policy.toml"
    path.write_text(DECK + POLICY)
    for ranks in (2, 4):
        found = CliRunner().invoke(command, [str(path), "--ranks", str(ranks)])
        assert isinstance(found.exception, HpctrainError)
        critic, reference = sorted(found.exception.problems, key=lambda each: "pipeline" in each)
        assert critic.startswith(f'{path}:15: policy.critic = ["layout.tensor=3", ')
        assert ": layout.tensor=3: layout.tensor x " in critic and f"number of ranks, {ranks} (" in critic
        assert reference.startswith(f'{path}:16: policy.reference = ["layout.pipeline=5"]: layout.pipeline')
    fitting = ["--set", 'policy.critic=["layout.tensor=2"]', "--set", "policy.reference=[]"]
    assert CliRunner().invoke(command, [str(path), *fitting, "--ranks", "4"]).exit_code == 0
    assert CliRunner().invoke(command, [str(path), *fitting, "--ranks", "3"]).exit_code == 1
    wrong = CliRunner().invoke(command, [str(path), "--set", 'policy.critic=["model.heads=7"]'])
    assert isinstance(wrong.exception, HpctrainError) and "model.heads=7" in str(wrong.exception)


def test_the_reference_needs_no_deck() -> None:
    result = CliRunner().invoke(command, ["--reference"])
    assert (result.exit_code, result.output) == (0, reference_text())


def test_the_reference_of_a_section() -> None:
    result = CliRunner().invoke(command, ["--reference", "layout"])
    assert (result.exit_code, result.output) == (0, reference_text("layout"))


def test_the_ranks_that_a_launcher_started_are_checked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert isinstance(CliRunner().invoke(command, [path]).exception, HpctrainError)
    assert "all remaining ranks: 4 on 4 ranks" in CliRunner().invoke(command, [path, "--ranks", "4"]).output


def test_one_rank_prints(path: str, launch: Launch) -> None:
    done = launch(2, "-m", "hpctrain", "deck", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("[layout]") == 1
    assert "\n# data: all remaining ranks: 2 on 2 ranks\n" in done.stdout


def test_one_rank_tells_what_is_wrong(path: str, launch: Launch) -> None:
    done = launch(2, "-m", "hpctrain", "deck", path, "--set", "layout.tensor=5", "--set", "layout.tensr=2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("--set layout.tensor=5: must divide model.mlp = 3072 (") == 1
    assert done.stderr.count("--set layout.tensr=2: unknown key (did you mean layout.tensor?)") == 1
    assert "Traceback" not in done.stderr


def test_nothing_asked_for() -> None:
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 2
    assert "one of DECK, --from and --reference is required" in result.output


MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, width)])

    def forward(self, x, **more):
        return self.layers[0](x)

class Data:
    def __len__(self): return 8
    def __getitem__(self, index): return {"x": torch.zeros(3), "y": 1}

def loss(outputs, batch): return outputs.sum(), len(outputs)
"""
OF_MODULE = """
[run]
steps = 2
[model]
module = "mine.py:Net"
blocks = "layers.*"
loss = "mine.py:loss"
[data]
dataset = "mine.py:Data"
[batch]
global_size = 8
"""


def of_module(path: str, *overrides: str) -> list[str]:
    """What is wrong with a deck of a module."""
    home = Path(path).parent
    (home / "mine.py").write_text(MODULE)
    (home / "mine.toml").write_text(OF_MODULE)
    sets = [word for each in overrides for word in ("--set", each)]
    result = CliRunner().invoke(command, [str(home / "mine.toml"), *sets])
    if result.exception is None:
        return []
    assert isinstance(result.exception, HpctrainError), result.exception
    return [each.replace(f"{home}/", "") for each in result.exception.problems]


def test_what_a_deck_names_of_a_users_own_is_looked_into(path: str) -> None:
    assert of_module(path) == []
    assert of_module(path, "model.blocks=layer", "model.loss=mine.py:los", "model.initial=mine.py:no") == [
        "--set model.blocks=layer: matches no submodule (did you mean layers?)",
        "--set model.loss=mine.py:los: mine.py has no los (did you mean loss?)",
        "--set model.initial=mine.py:no: mine.py has no no",
    ]
    missing, loss = of_module(path, "model.module=other.py:Net", "model.loss=mine.py:los")
    assert missing.endswith("other.py: there is no such file") and "did you mean loss?" in loss
    (arguments,) = of_module(path, "model.arguments={widht = 3}")
    assert "[model.arguments] does not fit: got an unexpected keyword argument 'widht'" in arguments
    dataset, loss = of_module(path, "data.dataset=mine.py:Date", "model.loss=mine.py:los")
    assert "mine.py has no Date (did you mean Data?)" in dataset and "did you mean loss?" in loss
    (classes,) = of_module(path, "model.loss=")
    assert "has no entry targets or labels in its batches (x, y) (add one, or set model.loss)" in classes


def test_what_a_module_starts_from_is_looked_into(path: str) -> None:
    home = Path(path).parent
    (source,) = of_module(path, f"model.from={home}/nosuch")
    assert source == "--set model.from=nosuch: there is no such file or folder"
    (home / "old").mkdir()
    (home / "old" / "pytorch_model.bin").touch()
    (pickled,) = of_module(path, f"model.from={home}/old")
    assert "save_file({name: each.clone()" in pickled and "AutoModel" not in pickled
    (alone,) = of_module(path, f"model.from={home}/old/pytorch_model.bin")
    assert alone.endswith(" (then set model.from to the folder old)")
    torch.save(dict(torch.nn.Linear(2, 2).named_parameters()), home / "old" / "pytorch_model.bin")
    program = shlex.split(pickled.partition("them: ")[2])
    subprocess.run([sys.executable, *program[1:]], check=True, cwd=home)
    assert of_module(path, f"model.from={home}/old") == []
    (file,) = of_module(path, f"model.from={home}/old/model.safetensors")
    assert "is a file; give its folder old, in which it must have the name model.safetensors" in file


def test_a_module_is_called_with_something(path: str) -> None:
    (named,) = of_module(path, "data.inputs=[]")
    assert named.endswith("must name at least one batch entry (the entries of a batch are x, y)")
    with_others = MODULE.replace("x, **more", "z, **more")
    assert with_others != MODULE
    (Path(path).parent / "others.py").write_text(with_others)
    (named,) = of_module(path, "model.module=others.py:Net")
    assert "of the module, z (the entries of a batch are x, y" in named
    for key in ("model.module", "data.dataset"):
        (kind,) = of_module(path, f"{key}=3")
        assert kind.startswith(f"--set {key}=3: must be ")
