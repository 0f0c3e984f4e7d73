"""`hpctrain check` of modules that users bring: right ones pass, faults are told by what is wrong.

Tests of train/plain_torch_step.py, train/module_probe.py, train/outputs.py, train/scaled_down_deck.py and
train/layout_difference.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.train.layout_check import _describe_model, check
from hpctrain.train.layout_verification import verify_layout
from tests.causal_models import deck_of, tiny_model

MODULES = Path(__file__).with_name("wrong_modules.py")
DECK = """
[run]
title = "mine"
steps = 3
[model]
module = "{module}"
blocks = "layers.*"
{more}
[data]
tokens = "nowhere.h5"
[batch]
global_size = 8
sequence = 12
[layout]
zero = {zero}
"""


def told(
    world: World, folder: Path, name: str, *overrides: str, more: str = "", zero: int = 0
) -> tuple[int, str]:
    """The exit code, and what rank 0 shows, on one line."""
    path = folder / "deck.toml"
    if world.rank == 0:
        path.write_text(DECK.format(module=f"{MODULES}:{name}", more=more, zero=zero))
    world.everyone.barrier()
    shown = list[str]()
    code = check(world, path, overrides, shown.append)
    text: str = world.everyone.broadcast_object(shown[0] if shown else None)
    return code, " ".join(text.split())


RIGHT = {
    "plain": ("Right", ""),
    "dropout": ("Right", "arguments = {rate = 0.2}"),
    "own loss": ("Right", f'loss = "{MODULES}:summed"'),
    "harmless": ("Harmless", ""),
    "frozen": ("Right", 'frozen = ["embed.*"]'),
}


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", RIGHT)
def test_right_modules_raise_no_alarm(world: World, mpi_tmp_path: Path, kind: str, zero: int) -> None:
    name, more = RIGHT[kind]
    code, text = told(world, mpi_tmp_path, name, more=more, zero=zero * (world.size > 1))
    assert code == 0, text
    assert "this layout computes the same model" in text
    assert ("passes outside of buffers" in text) == (kind == "harmless")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_is_unusual_raises_no_alarm(world: World, mpi_tmp_path: Path) -> None:
    code, text = told(world, mpi_tmp_path, "Unusual", more=f'loss = "{MODULES}:weighted"')
    assert code == 0, text


STATE = "passes of the same input, seed and buffers differ: the module keeps state outside of buffers"
SUMS = "it must return a sum and a count, not a mean"
WRONG = {
    "own generator": ("OwnGenerator", "", "random numbers that torch.manual_seed does not seed"),
    "numpy's": ("OfNumpy", "", "the forward pass draws random numbers from Python or numpy"),
    "Python's": ("OfPython", "", "the forward pass draws random numbers from Python or numpy"),
    "same masks": ("SameMasks", "", "the forward pass seeds torch's random numbers itself"),
    "counter": ("Counter", "", f"{STATE}, which checkpoints do not store: passes"),
    "cache": ("Cache", "", f"{STATE}, which checkpoints do not store: mean"),
    "in place": ("InPlace", "", "the forward pass changes its input in place"),
    "tied by memory": ("TiedByMemory", "", "embed.weight and head.weight are two parameters that share"),
    "infinite": ("Infinite", "", "the output of the forward pass is not finite"),
    "mean": ("Right", f'loss = "{MODULES}:averaged"', SUMS),
    "mean alone": ("Right", f'loss = "{MODULES}:averaged_alone"', SUMS),
    "samples mixed": ("Right", f'loss = "{MODULES}:changes_targets"', "model.loss is not a sum over samples"),
    "by rank": ("ByRank", "", "output of head on data rank 1 differs"),
}  # fmt: skip


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", WRONG)
def test_faults_are_told(world: World, mpi_tmp_path: Path, kind: str) -> None:
    name, more, sentence = WRONG[kind]
    code, text = told(world, mpi_tmp_path, name, more=more)
    assert code == 1, text
    assert sentence in text, text


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_run_that_verifies_its_layout_is_told_too(world: World, mpi_tmp_path: Path) -> None:
    told(world, mpi_tmp_path, "Counter")
    deck = read_deck(mpi_tmp_path / "deck.toml")
    with pytest.raises(
        HpctrainError,
        match=r"layout check: two forward passes .* checkpoints do not store: passes",
    ):
        verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.mpi(min_size=2, max_size=2)
def test_blocks_that_one_rank_leaves_out_are_told(world: World, mpi_tmp_path: Path) -> None:
    apart = world.subworld(range(world.size))  # as calls that nobody answered stay there
    with pytest.raises(HpctrainError, match=r"the ranks make different calls: .* for example skips a block"):
        told(apart, mpi_tmp_path, "OtherBlocks", zero=3)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_parameters_without_gradients_are_noted(world: World, mpi_tmp_path: Path) -> None:
    code, text = told(world, mpi_tmp_path, "Detached")
    assert code == 0
    assert "layers.0.weight, layers.0.bias, layers.1.weight and 1 other have no gradient in this pass" in text


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_module_that_is_too_large_asks_for_smaller_arguments(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.train.scaled_down_deck._MOST_PARAMETERS", 1000)
    with pytest.raises(HpctrainError, match=r"has 1\.6K parameters.*the table \[model\.miniature\]"):
        told(world, mpi_tmp_path, "Right")


def test_a_model_of_transformers_is_named_by_its_class(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny_model("bloom").save_pretrained(tmp_path / "bloom")  # type: ignore[operator]
    line = _describe_model(deck_of(tmp_path / "bloom"))
    assert line.startswith("Two steps of BloomForCausalLM of transformers in fp64, compared with one rank, ")
