"""Runs of modules that users bring, by the command: resumed on other numbers of ranks, inspected, planned,
and refused where something of a user's own is wrong. Of objective/module_loss.py, too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import h5py
import numpy as np
import pytest

from tests.launch import clean_environment
from tests.warm import Server

Launch = Callable[..., "CompletedProcess[str]"]

MODELS = Path(__file__).parents[1] / "model/modules/models.py"
RUN_KEYS = """
[checkpoint]
every = 3
keep = 9
[machine]
peak_flops = 1e10
[optimizer.adamw]
epsilon = 1e-5
[learning_rate]
peak = 1e-2
warmup = 2
"""
"""Keys of runs that are resumed and compared. Further keys of the learning rate may follow."""
DECK = f"""
[run]
title = "mine"
steps = 9
evaluate_every = 3
[model]
module = "my_models.py:gpt"
blocks = "layers.*"
[model.arguments]
dropout = 0.1
[data]
tokens = "tokens.h5"
validation = 0.1
[batch]
global_size = 8
micro_size = 2
sequence = 32
[layout]
zero = 3
{RUN_KEYS}
"""


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory, warm: Server) -> Path:
    """A token file, made once."""
    home = tmp_path_factory.mktemp("tokens")
    (home / "text.txt").write_text("".join(chr(32 + 7 * n * n % 61) for n in range(4000)))
    environment = clean_environment()
    command = [*warm.command(environment), "-m", "hpctrain", "prepare", "tokens.h5", "text.txt"]
    subprocess.run(command, cwd=home, env=environment, check=True, capture_output=True)
    return home / "tokens.h5"


@pytest.fixture
def folder(tmp_path: Path, tokens: Path) -> Path:
    shutil.copy(tokens, tmp_path)
    (tmp_path / "code").mkdir()
    text = MODELS.read_text().replace("VOCABULARY = 61", "VOCABULARY = 257")
    (tmp_path / "code/my_models.py").write_text(text)
    (tmp_path / "code/deck.toml").write_text(DECK)
    return tmp_path


def hpctrain(launch: Launch, ranks: int, *arguments: str, code: int = 0) -> str:
    done = launch(ranks, "-m", "hpctrain", *arguments)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def tensors(path: Path) -> dict[str, np.ndarray]:
    """All of a checkpoint, by name."""
    kinds = "model", "optimizer", "buffer"
    found: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:

        def take(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset) and name.startswith(kinds):
                found[name] = item[()]

        file.visititems(take)
    return found


def losses(folder: Path) -> list[float]:
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


@pytest.mark.sampled(1)
def test_a_run_goes_on_with_another_number_of_ranks(folder: Path, launch: Launch) -> None:
    run = folder / "runs/mine"
    hpctrain(launch, 2, "run", "code/deck.toml", "--set", "run.dir=runs/whole")
    short = ("--set", "run.steps=3", "--set", "learning_rate.decay_steps=9")
    hpctrain(launch, 2, "run", "code/deck.toml", *short)
    # The deck's folder need not be there any more, as its copy names the file.
    (folder / "code/deck.toml").unlink()
    one = ("--set", "layout.zero=0", "--set", "memory.recompute=full", "--set", "run.steps=6")
    hpctrain(launch, 1, "resume", "runs/mine", "--trust-code", *one)
    two = ("--set", "layout.zero=2", "--set", "memory.recompute=none", "--set", "run.steps=9")
    hpctrain(launch, 2, "resume", "runs/mine", "--trust-code", *two)
    np.testing.assert_allclose(losses(run), losses(folder / "runs/whole"), rtol=1e-5)
    expected = tensors(folder / "runs/whole/checkpoints/step-00000009.h5")
    for name, found in tensors(run / "checkpoints/step-00000009.h5").items():
        assert abs(found - expected[name]).max() <= 2e-5 * abs(expected[name]).max(), name
    assert "model/embed.weight" in expected and "model/head.weight" not in expected
    told = hpctrain(launch, 0, "inspect", "--tensors", str(run / "checkpoints/step-00000009.h5"))
    assert "my_models.py:gpt" in told and "hidden" not in told
    assert "layers.0.attention.qkv.weight" in told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("buffers", ["first", "average"])
def test_buffers_are_equal_on_all_ranks_and_go_on(folder: Path, launch: Launch, buffers: str) -> None:
    change = ["model.module=my_models.py:odd", "model.arguments=", f"model.buffers={buffers}"]
    change += ["model.blocks=blocks.*", "layout.zero=1"]
    sets = [each for key in change for each in ("--set", key)]
    hpctrain(launch, 2, "run", "code/deck.toml", *sets, "--set", "run.dir=runs/whole")
    whole = folder / "runs/whole"
    last = tensors(whole / "checkpoints/step-00000009.h5")
    assert last["buffer/norm.num_batches_tracked"] == [18]  # of 2 micro-batches a step
    assert abs(last["buffer/norm.running_mean"]).min() > 0
    shutil.copytree(whole, folder / "runs/again")
    for later in ("6", "9"):
        (folder / f"runs/again/checkpoints/step-0000000{later}.h5").unlink()
    hpctrain(
        launch, 2, "resume", "runs/again/checkpoints/step-00000003.h5", "--trust-code", "--set", "run.steps=9"
    )
    again = tensors(folder / "runs/again/checkpoints/step-00000009.h5")
    assert last.keys() == again.keys()
    for name, found in again.items():
        assert np.array_equal(found, last[name]), name
    by_other = "average" if buffers == "first" else "first"
    others = [each.replace(f"buffers={buffers}", f"buffers={by_other}") for each in sets]
    hpctrain(launch, 2, "run", "code/deck.toml", *others, "--set", "run.dir=runs/other")
    other = tensors(folder / "runs/other/checkpoints/step-00000009.h5")
    assert not np.array_equal(other["buffer/norm.running_mean"], last["buffer/norm.running_mean"])
    assert np.array_equal(other["model/table"], last["model/table"])  # no gradient sees them


def test_a_loss_of_the_users_own_counts_for_itself(folder: Path, launch: Launch) -> None:
    own = ("--set", "model.loss=my_models.py:every_second", "--set", "model.arguments={dropout=0.0}")
    hpctrain(launch, 1, "run", "code/deck.toml", *own, "--set", "layout.zero=0", "--set", "run.dir=runs/one")
    hpctrain(launch, 2, "run", "code/deck.toml", *own, "--set", "run.dir=runs/two")
    of_one, of_two = losses(folder / "runs/one"), losses(folder / "runs/two")
    np.testing.assert_allclose(of_two, of_one, rtol=1e-5)
    # As much a token as with the usual loss, of which it is about half of the tokens.
    plain = (
        "--set",
        "model.arguments={dropout=0.0}",
        "--set",
        "layout.zero=0",
        "--set",
        "run.dir=runs/plain",
    )
    hpctrain(launch, 1, "run", "code/deck.toml", *plain)
    np.testing.assert_allclose(of_one[0], losses(folder / "runs/plain")[0], rtol=0.05)


def test_half_precision_trains_from_fp32_masters(folder: Path, launch: Launch) -> None:
    bf16 = ("--set", "precision.compute=bf16", "--set", "run.dir=runs/half")
    hpctrain(launch, 2, "run", "code/deck.toml", *bf16)
    hpctrain(launch, 2, "run", "code/deck.toml", "--set", "run.dir=runs/full")
    half, full = losses(folder / "runs/half"), losses(folder / "runs/full")
    np.testing.assert_allclose(half, full, rtol=0.02)
    with h5py.File(folder / "runs/half/checkpoints/step-00000009.h5") as file:
        assert file["master/norm.weight"].dtype == np.float32
        assert file["model/norm.weight"].dtype == np.uint16


def test_a_plan_tells_what_a_run_holds(folder: Path, launch: Launch) -> None:
    planned = json.loads(hpctrain(launch, 0, "plan", "code/deck.toml", "--ranks", "2", "--json"))
    told = hpctrain(launch, 0, "plan", "code/deck.toml", "--ranks", "2")
    assert "my_models.py:gpt" in told and "unknown" not in told and "not known" not in told
    out = hpctrain(launch, 2, "run", "code/deck.toml")
    held = json.loads((folder / "runs/mine/plan.json").read_text())["measured"]
    (stage,) = planned["stages"]
    for kind in ("parameter", "gradient", "optimizer", "activation"):
        (here,) = [row[f"{kind}_bytes"] for row in held]
        assert stage[f"{kind}_bytes"] == here > 0, kind
    (row,) = [line for line in out.splitlines() if line.startswith("activations ")]
    assert row.endswith("+0.0%"), row


def test_activations_of_what_needs_values_are_unknown_and_it_trains(folder: Path, launch: Launch) -> None:
    build = "model.module=my_models.py:Branching"
    change = ("--set", build, "--set", "model.arguments=", "--set", "model.blocks=")
    told = hpctrain(launch, 0, "plan", "code/deck.toml", "--ranks", "2", *change)
    in_one_line = " ".join(told.split())
    assert "memory of activations is unknown and not included" in in_one_line
    assert "does not run on tensors without values: my_models.py:Branching fails with" in in_one_line
    planned = json.loads(hpctrain(launch, 0, "plan", "code/deck.toml", "--ranks", "2", "--json", *change))
    assert planned["stages"][0]["activation_bytes"] is None
    assert "RuntimeError" in planned["activations_unknown"]
    out = hpctrain(launch, 2, "run", "code/deck.toml", *change)
    assert "Traceback" not in told + out
    held = json.loads((folder / "runs/mine/plan.json").read_text())
    assert held["predicted"]["stages"][0]["activation_bytes"] is None
    assert held["measured"][0]["activation_bytes"] > 0


WRONG = {
    "no file": (("model.module=other.py:gpt",), "other.py: there is no such file"),
    "no function": (("model.module=my_models.py:gtp",), "my_models.py has no gtp (did you mean gpt?)"),
    "arguments": (("model.arguments={width=3}",), "got an unexpected keyword argument 'width'"),
    "no blocks": (
        ("model.blocks=layer.*",),
        "matches no submodule (did you mean layers.*?)",
    ),
    "no module": (
        ("model.module=torch.nn:Parameter", "model.arguments={}"),
        "expected a torch.nn.Module, got a Parameter",
    ),
    "buffers": (
        ("model.module=my_models.py:odd", "model.arguments=", "model.blocks=blocks.*"),
        '3 persistent buffers (norm.running_mean, norm.running_var, norm.num_batches_tracked): "first" keeps',
    ),
    "no loss": (("model.loss=my_models.py:los",), "my_models.py has no los"),
    "frozen": (("model.frozen=['nothing.*']",), 'no parameter matches "nothing.*"'),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_told_once_in_a_sentence(folder: Path, launch: Launch, wrong: str) -> None:
    changes, told = WRONG[wrong]
    sets = [each for key in changes for each in ("--set", key)]
    out = hpctrain(launch, 2, "run", "code/deck.toml", *sets, code=2)
    assert out.count(told) == 1, out
    assert "Traceback" not in out and not (folder / "runs").exists()


def test_a_module_that_needs_values_to_be_built_is_told_with_its_lines(folder: Path, launch: Launch) -> None:
    (folder / "code/needy.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n"
        "    sizes = [int(size) for size in torch.linspace(2, 4, 3)]\n    return nn.Linear(*sizes[:2])\n"
    )
    change = ("--set", "model.module=needy.py:build", "--set", "model.arguments=", "--set", "model.blocks=")
    out = hpctrain(launch, 2, "run", "code/deck.toml", *change, code=2)
    assert out.count('a module is first built on the device "meta" of torch') == 1, out
    assert out.count("needy.py, line 5, in build: sizes = [int(size)") == 1, out
    assert "Traceback" not in out


TORN = """
from torch import nn

class Torn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(257, 8), nn.Linear(9, 257)

    def forward(self, tokens):
        return self.last(self.embed(tokens))

class Short(Torn):
    def forward(self, tokens):
        return self.embed(tokens)[:, 1:]
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "Torn",
            [
                "torn.py:Torn fails with tokens of shape [2, 32]: RuntimeError: mat1",
                "in forward: return self.last",
            ],
        ),
        ("Short", ["returns logits of shape [2, 31, 8] for 2 sequences of 32 tokens"]),
    ],
)
def test_what_fails_in_a_step_is_told_as_the_users_own(
    folder: Path, launch: Launch, name: str, told: list[str]
) -> None:
    (folder / "code/torn.py").write_text(TORN)
    change = ("--set", f"model.module=torn.py:{name}", "--set", "model.arguments=", "--set", "model.blocks=")
    out = hpctrain(launch, 2, "run", "code/deck.toml", *change, code=2)
    assert "Traceback" not in out
    for each in told:
        assert out.count("hpctrain: error: ") == len(told) and out.count(each) == 1, out
