"""Libraries that are compiled for this processor, and compilers that fail, hang or are killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.host import c_libraries as compiler
from hpctrain.host.c_libraries import (
    CompilerError,
    build_library,
    compile_library,
    find_compiler,
    open_library,
)
from hpctrain.parallel.kernels.functions import function_library

SOURCE = Path(function_library.__file__).with_name("functions.c")


def test_the_compiler_is_found_and_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = tmp_path / "small.c", os.environ["PATH"]
    source.write_text("int seven(void) { return 7; }\n")
    assert open_library(compile_library(source)).seven() == 7
    source.write_text("int seven(void) { return }\n")
    with pytest.raises(CompilerError, match=r"cannot compile small.c: .*error"):
        compile_library(source)
    with pytest.raises(CompilerError, match="no C compiler: cc, gcc, clang not found"):
        find_compiler({"PATH": str(tmp_path)})
    with pytest.raises(CompilerError, match="no C compiler: magic-cc not found"):
        find_compiler({"PATH": path, "CC": "magic-cc"})
    with pytest.raises(
        CompilerError,
        match=r'no C compiler: \$CC = cc ": not a command: No closing '
        "quotation",
    ):
        find_compiler({"PATH": path, "CC": 'cc "'})
    added, flags = tmp_path / "small.cpp", ["-DSEVEN=7", '-DLINKAGE=extern "C"']
    added.write_text("LINKAGE int seven() { return SEVEN; }\n")
    assert open_library(compile_library(added, options=flags)).seven() == 7
    with pytest.raises(CompilerError, match=r"no C\+\+ compiler: magic-c\+\+ not found"):
        compile_library(added, {"PATH": path, "CXX": "magic-c++", "CC": "cc"}, flags)
    # One that knows neither of the names of this processor, and one that knows the second.
    script = tmp_path / "cc"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-mcpu=native*) printf made > "$({_OUTPUT})";; *) exit 3;; esac\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert compile_library(source, {"PATH": f"{tmp_path}:{path}"}) == b"made"
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(CompilerError, match="exit status 3"):
        compile_library(source, {"PATH": f"{tmp_path}:{path}"})
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(compiler, "SECONDS", 0.5)
    with pytest.raises(CompilerError, match=r"cannot compile small.c: not finished after 0 s"):
        compile_library(source, {"PATH": f"{tmp_path}:{path}"})


def test_a_library_is_compiled_and_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, program = tmp_path / "small.c", tmp_path / "program.py"
    source.write_text("int seven(void) { return 7; }\n")
    program.write_text("")
    compiled = []
    monkeypatch.setattr(
        compiler, "compile_library", lambda source, *_: compiled.append(source) or compile_library(source)
    )
    libraries = [build_library(source, program) for _ in range(2)]
    assert libraries[0] == libraries[1]
    assert open_library(libraries[1]).seven() == 7
    assert len(compiled) == 1
    (cached,) = (tmp_path / "hpctrain" / "libraries").iterdir()
    cached.write_bytes(cached.read_bytes()[:-100])  # damaged
    assert build_library(source, program) == libraries[0]
    source.write_text("int seven(void) { return 8; }\n")
    assert open_library(build_library(source, program)).seven() == 8
    program.write_text("raise SystemExit(1)\n")
    for _ in range(2):  # what does not run is not kept
        with pytest.raises(CompilerError, match="does not run on this processor"):
            build_library(source, program)
    assert len(compiled) == 5
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    program.write_text("")
    assert open_library(build_library(source, program)).seven() == 8


def test_the_file_of_a_library_that_cannot_be_loaded_is_closed() -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="/proc/self/fd/"):
        open_library(b"no library")
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_nothing_is_left_of_a_compiler_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, number = tmp_path / "cc", tmp_path / "number"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {number}.new\nmv {number}.new {number}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(compiler, "SECONDS", 2.0)
    with pytest.raises(CompilerError, match="not finished after 2 s"):
        compile_library(tmp_path / "small.c", {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    process = Path("/proc", number.read_text().strip(), "stat")
    for _ in range(1000):
        try:
            if process.read_text().rpartition(")")[2].split()[0] == "Z":
                return  # ended, and whoever is to take note of it has not
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail("what the compiler had started goes on")


_OUTPUT = r"""echo "$*" | sed 's/.* -o \([^ ]*\) .*/\1/'"""


def test_a_compiler_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    compiler.chmod(0o755)
    program = "from hpctrain.engine.choices.function_choice import compile_functions; compile_functions()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"CC": str(compiler), "TMPDIR": str(tmp_path)}
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    number = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    while Path(f"/proc/{number}/stat").exists():
        # Of one that nobody waits for there is left that it has ended.
        if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)


def test_what_killed_runs_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, old in (("hpctrain-compiler-old", True), ("hpctrain-compiler-new", False), ("other", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "library.so").write_text("")
        if old:
            os.utime(tmp_path / name, (0, 0))
    (tmp_path / "hpctrain-compiler-link").symlink_to(tmp_path / "other")
    compile_library(SOURCE)
    left = {"hpctrain-compiler-new", "hpctrain-compiler-link", "other"}
    assert {each.name for each in tmp_path.iterdir()} == left
    assert (tmp_path / "other" / "library.so").exists()


def test_a_silent_compiler_is_said_to_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(CompilerError, match=r"exit status 1 without a message"):
        compile_functions()
