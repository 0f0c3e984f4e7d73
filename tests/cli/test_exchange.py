"""`hpctrain export` and `hpctrain import`, and the exit codes of folders that will not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

Launch = Callable[..., CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config: dict[str, Any] = {"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**config, bos_token_id=None, eos_token_id=None)
    )
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_there_and_back(folder: Path, launch: Launch, tmp_path: Path) -> None:
    done = launch(2, "-m", "hpctrain", "import", "theirs", "model.h5")
    assert (done.returncode, done.stderr) == (0, "")
    ignored, written = done.stdout.splitlines(keepends=True)
    assert ignored.startswith("theirs/config.json: training ignores embd_pdrop = 0.1, resid_pdrop = 0.1 ")
    assert written.startswith("model.h5: gpt2, 11K parameters, ")
    assert written.endswith(
        'without a tokenizer (it has no tokenizer.json); to train it, set [model] from = "model.h5"\n'
    )
    done = launch(2, "-m", "hpctrain", "export", "model.h5", "ours", "--dtype=bf16", "--max-shard-size=10kB")
    assert (done.returncode, done.stderr) == (0, "")
    files = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert (
        done.stdout
        == "ours: gpt2, 11K parameters, bf16, 21.9 kB in 3 files, without a tokenizer (it has none)\n"
    )
    (tmp_path / "deck.toml").write_text(
        '[run]\nsteps = 1\n[model]\nfrom = "ours"\n[data]\ntokens = "none.h5"\n[batch]\nglobal_size = 2\n'
    )
    done = launch(0, "-m", "hpctrain", "deck", "deck.toml", "--set=model.layers=3")
    assert done.returncode == 2
    assert done.stderr == (
        'hpctrain: error: --set model.layers=3: conflicts with model.from = "ours", whose model has 2 '
        "(leave this key out)\n"
    )
    done = launch(0, "-m", "hpctrain", "plan", "deck.toml", "--ranks=2")
    assert done.returncode == 0 and "gpt2, 11K parameters" in done.stdout
    for file in ("theirs/config.json", "theirs/model.safetensors"):
        done = launch(0, "-m", "hpctrain", "deck", "deck.toml", f"--set=model.from={file}")
        assert done.returncode == 2 and f"{file}: is a file; give its folder" in done.stderr


@pytest.mark.parametrize(
    ("verb", "code", "told"),
    [
        ("import nowhere out.h5", 3, "nowhere: no such file or folder\n"),
        (
            "import maker/model out.h5",
            3,
            "maker/model: no such file or folder; nothing is downloaded: fetch ",
        ),
        ("import cut/config.json out.h5", 2, "cut/config.json: is a file; give its folder, which must "),
        ("import cut out.h5", 3, "cut/model.safetensors: damaged or truncated safetensors: "),
        ("export theirs/config.json out", 2, "theirs/config.json: not an HDF5 file, so not a checkpoint"),
        ("import cut .", 2, ".: is a folder (name a file)"),
        ("import cut / --force", 2, "/: is a folder (name a file)"),
        ("import cut theirs --force", 2, "theirs: is a folder (name a file)"),
        ("export theirs/config.json out --max-shard-size=much", 2, '--max-shard-size: "much" is not a size'),
    ],
)
def test_mistakes_are_one_sentence(
    verb: str, code: int, told: str, folder: Path, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "cut").mkdir()
    for file in folder.iterdir():
        (tmp_path / "cut" / file.name).write_bytes(file.read_bytes())
    tensors = tmp_path / "cut" / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    done = launch(0, "-m", "hpctrain", *verb.split())
    assert done.returncode == code
    assert done.stderr.startswith(f"hpctrain: error: {told}") and done.stderr.count("\n") == 1
    assert not any(path.name.startswith((".", "out")) for path in tmp_path.iterdir())


def test_an_export_deletes_what_exports_left_alone(tmp_path: Path, folder: Path, launch: Launch) -> None:
    assert launch(0, "-m", "hpctrain", "import", folder, "ours.h5").returncode == 0
    (tmp_path / "empty").mkdir()
    done = launch(0, "-m", "hpctrain", "export", tmp_path / "ours.h5", ".", cwd=tmp_path / "empty")
    assert done.returncode == 2
    assert done.stderr == "hpctrain: error: .: does not name a new folder; give the name of a new one\n"
    left = tmp_path / ".out.tmp"
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").write_text("left over")
    (left / "thesis.tex").write_text("years of work")
    done = launch(0, "-m", "hpctrain", "export", "ours.h5", "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert "contains thesis.tex, which no export wrote" in done.stderr
    assert [path.name for path in left.iterdir()] == ["thesis.tex"]
    (left / "thesis.tex").unlink()
    assert launch(0, "-m", "hpctrain", "export", "ours.h5", "out").returncode == 0
    assert not left.exists()
    assert (tmp_path / "out/model.safetensors").exists()
