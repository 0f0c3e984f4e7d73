"""The Dockerfile and the Apptainer definition build the same image: each is carried out on stand-ins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "containers"
INSTALLED = Path("/opt/hpctrain")
ARGUMENT = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def definition() -> tuple[dict[str, str], dict[str, str]]:
    """Header and sections of the Apptainer definition, without indents of lines."""
    header, sections, name = {}, {}, ""
    for line in (RECIPES / "hpctrain.def").read_text().splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            sections[name] = ""
        elif name:
            sections[name] += line.strip() + "\n"
        elif line and not line.startswith("#"):
            key, _, value = line.partition(":")
            header[key.strip()] = value.strip()
    return header, sections


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile in order, each on one line."""
    text = re.sub(r"\\\n\s*", "", (RECIPES / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def instructions(name: str) -> list[str]:
    return [rest for word, rest in dockerfile() if word == name]


def defaults() -> dict[str, str]:
    """Arguments of the Dockerfile that building takes, and their defaults."""
    found = dict(text.partition("=")[::2] for text in instructions("ARG"))
    return {name: value for name, value in found.items() if name != "BASE"}


def shell(script: str, folder: Path, **variables: str) -> str:
    """What a script prints under /bin/sh as Apptainer starts it, with a bare environment."""
    environment = {"PATH": os.defpath} | variables
    done = subprocess.run(
        ["/bin/sh", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_post(folder: Path, **arguments: str) -> str:
    """What %post hands to image.sh, for which a script stands in that prints its environment."""
    values = dict(line.split("=", 1) for line in definition()[1]["arguments"].split()) | arguments
    (folder / "containers").mkdir(exist_ok=True)
    script = folder / "containers" / "image.sh"
    script.write_text('#!/bin/sh\necho "${TORCH_INDEX-unset}|${EXTRAS-unset}|$GPU"\n')
    script.chmod(0o755)
    post = ARGUMENT.sub(lambda match: values[match[1]], definition()[1]["post"])
    assert str(INSTALLED) in post
    return shell(post.replace(str(INSTALLED), str(folder)), folder).strip()


def test_both_begin_with_the_same_base() -> None:
    header, _ = definition()
    assert header["Bootstrap"] == "docker"
    assert f"BASE={header['From']}" in instructions("ARG")
    assert instructions("FROM") == ["${BASE}"]


def test_both_take_the_same_arguments_and_run_the_same_script(tmp_path: Path) -> None:
    given = definition()[1]["arguments"].split()
    assert {name.upper(): value for name, _, value in (line.partition("=") for line in given)} == defaults()
    assert instructions("RUN") == ["containers/image.sh"]
    assert instructions("WORKDIR")[0] == str(INSTALLED)
    assert run_post(tmp_path) == f"{defaults()['TORCH_INDEX']}|{defaults()['EXTRAS']}|"
    assert run_post(tmp_path, torch_index="", extras="test", gpu="cuda") == "|test|cuda"
    assert run_post(tmp_path, torch_index="https://a.b/c?d=e&f") == "https://a.b/c?d=e&f||"


def test_arguments_reach_the_installation(tmp_path: Path) -> None:
    """image.sh on stand-ins of apt-get and install.sh: auto leaves the choice of torch to the latter.

    It leaves nothing in a /tmp that may be the host's, and makes what only the owner may read readable.
    """
    (tmp_path / "containers").mkdir()
    (tmp_path / "bin").mkdir()
    text = (RECIPES / "image.sh").read_text()
    for path in ("/etc/ssh", "/run/sshd", "/var/lib/apt"):
        assert path in text
        text = text.replace(path, f"{tmp_path}{path}")
    for folder in ("ssh_config.d", "sshd_config.d"):
        (tmp_path / "etc" / "ssh" / folder).mkdir(parents=True)
    printed = '#!/bin/sh\necho "${TORCH_INDEX-unset}|${EXTRAS-unset}|$GPU|$FETCH|$VENV|$TMPDIR"\n'
    for path, content in (("containers/image.sh", text), ("containers/install.sh", printed)):
        (tmp_path / path).write_text(content)
        (tmp_path / path).chmod(0o755)
    (tmp_path / "bin" / "apt-get").symlink_to("/bin/true")
    (tmp_path / "secret").touch(mode=0o600)
    for given, taken in (("auto", "unset"), ("", ""), ("https://a.b/c", "https://a.b/c")):
        variables = {
            "PATH": f"{tmp_path}/bin:{os.defpath}",
            "TORCH_INDEX": given,
            "EXTRAS": "test",
            "GPU": "cuda",
        }
        out = shell("containers/image.sh", tmp_path, **variables).strip().split("|")
        assert out[:-1] == [taken, "test", "cuda", "no", f"{tmp_path}/.venv"]
        assert not Path(out[-1]).exists()
    assert (tmp_path / "secret").stat().st_mode & 0o044 == 0o044


def test_the_files_of_the_definition_are_enough(tmp_path: Path) -> None:
    """What %files copies can be built; the Dockerfile copies all."""
    for line in definition()[1]["files"].strip().splitlines():
        source, target = line.split()
        assert Path(target) == INSTALLED / source
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, tmp_path / source)
    assert ("COPY", ". .") in dockerfile()
    for name in ("image.sh", "install.sh", "constraints.txt"):
        assert (tmp_path / "containers" / name).exists()
    build = "from setuptools import build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    assert "License-File: LICENSE" in metadata
    assert (ROOT / "README.md").read_text() in metadata
    sources = next(tmp_path.glob("*.egg-info/SOURCES.txt")).read_text().splitlines()
    packages = {str(path.relative_to(ROOT)) for path in (ROOT / "hpctrain").rglob("*.py")}
    assert packages <= set(sources)


def test_both_set_the_same_environment(tmp_path: Path) -> None:
    pairs = dict(pair.split("=", 1) for text in instructions("ENV") for pair in text.split())
    script = definition()[1]["environment"] + "env"

    def environment(**variables: str) -> dict[str, str]:
        lines = shell(script, tmp_path, **variables).splitlines()
        return dict(line.split("=", 1) for line in lines)

    found = environment(PATH="/usr/bin")
    for name, value in pairs.items():
        assert found[name] == value.replace("$PATH", "/usr/bin")
    assert pairs.keys() == found.keys() - {"PWD", "SHLVL", "_", "OLDPWD"}
    host = environment(PATH="/usr/bin", OMP_NUM_THREADS="8", PYTHONPATH="/host", SLURM_PROCID="3")
    assert (host["OMP_NUM_THREADS"], host["SLURM_PROCID"]) == ("8", "3")
    assert "PYTHONPATH" not in host


def test_the_run_script_hands_on_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "hpctrain").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "hpctrain").chmod(0o755)
    script = f"set -- run 'a deck.toml'\n{definition()[1]['runscript']}"
    assert shell(script, tmp_path, PATH=f"{tmp_path}:{os.defpath}") == "run|a deck.toml|"


def test_the_scripts_have_no_faults() -> None:
    program = Path(sys.executable).parent / "shellcheck"
    if not program.exists():
        pytest.skip("shellcheck is not installed")
    subprocess.run([program, "--severity=warning", *sorted(RECIPES.glob("*.sh"))], check=True)
    for name in ("post", "environment", "runscript"):
        subprocess.run(
            [program, "--shell=sh", "--severity=warning", "-"],
            input=definition()[1][name],
            text=True,
            check=True,
        )
