from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpctrain.report import terminal
from hpctrain.report.terminal import Terminal, coloured, columns, find_terminal, fit, stdout_console


@dataclass
class Processes:
    """A tree like /proc: each process with a name, a parent and what its descriptors 1 and 2 lead to."""

    root: Path
    terminal: str
    pipe: str
    file: str
    opened: list[int] = field(default_factory=list)

    def add(self, process: int, parent: int, name: str, output: str, errors: str | None = None) -> None:
        files = self.root / str(process) / "fd"
        files.mkdir(parents=True)
        (files / "1").symlink_to(output)
        (files / "2").symlink_to(errors or output)
        (self.root / str(process) / "stat").write_text(f"{process} ({name}) S {parent} 1 1 0 -1 4194560\n")


@pytest.fixture(autouse=True)
def no_width_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    inside, outside = pty.openpty()
    fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 123, 0, 0))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    yield Processes(tmp_path / "proc", os.ttyname(outside), str(tmp_path / "pipe"), str(tmp_path / "file"))
    os.close(inside)
    os.close(outside)


def test_terminal_of_the_launcher_counts_not_the_pipe_of_the_rank(processes: Processes) -> None:
    processes.add(10, 1, "bash", processes.terminal)
    processes.add(20, 10, "mpiexec.hydra", processes.terminal)
    processes.add(30, 20, "hydra_pmi_proxy", processes.pipe)
    processes.add(40, 30, "python (a) b", processes.pipe)
    terminal = find_terminal(processes.root, 40)
    assert terminal is not None
    assert terminal.columns() == 123
    assert terminal.takes_errors


@pytest.mark.parametrize("name", ["mpirun", "mpirun.openmpi", "mpiexec", "orterun", "prterun", "srun"])
@pytest.mark.parametrize("to", ["file", "pipe", "null"])
def test_pseudo_terminal_of_a_rank_does_not_count(processes: Processes, name: str, to: str) -> None:
    output = "/dev/null" if to == "null" else str(getattr(processes, to))
    processes.add(10, 1, "bash", processes.terminal)
    processes.add(20, 10, name, output, processes.terminal)
    processes.add(40, 20, "python", processes.terminal)
    assert find_terminal(processes.root, 40) is None


def test_errors_that_go_elsewhere_are_noticed(processes: Processes) -> None:
    processes.add(20, 1, "mpirun", processes.terminal, processes.file)
    processes.add(40, 20, "python", processes.pipe)
    terminal = find_terminal(processes.root, 40)
    assert terminal is not None
    assert not terminal.takes_errors


@pytest.mark.parametrize("agent", ["orted", "prted", "hydra_pmi_proxy", "slurmstepd"])
def test_rank_on_another_node_has_no_terminal(processes: Processes, agent: str) -> None:
    processes.add(20, 1, agent, "/dev/null")
    processes.add(40, 20, "python", processes.terminal)
    assert find_terminal(processes.root, 40) is None


def test_without_a_launcher_the_process_itself_counts(processes: Processes) -> None:
    processes.add(10, 1, "bash", processes.file)
    processes.add(40, 10, "python", processes.terminal)
    processes.add(41, 10, "python", processes.pipe)
    assert find_terminal(processes.root, 40) is not None
    assert find_terminal(processes.root, 41) is None


def test_file_chosen_by_a_shell_under_the_launcher(processes: Processes) -> None:
    processes.add(20, 1, "mpirun", processes.terminal)
    processes.add(30, 20, "sh", processes.pipe)
    processes.add(40, 30, "python", processes.file)
    assert find_terminal(processes.root, 40) is None


def test_nearest_launcher_counts(processes: Processes) -> None:
    processes.add(10, 1, "srun", processes.file)
    processes.add(20, 10, "mpirun", processes.terminal)
    processes.add(40, 20, "python", processes.pipe)
    assert find_terminal(processes.root, 40) is not None


def test_circle_and_missing_processes_end_the_walk(processes: Processes) -> None:
    processes.add(40, 41, "python", processes.pipe)
    assert find_terminal(processes.root, 40) is None
    processes.add(41, 40, "python", processes.pipe)
    assert find_terminal(processes.root, 40) is None


def test_width_that_is_not_known_is_80(processes: Processes) -> None:
    inside, outside = pty.openpty()
    processes.add(40, 1, "python", os.ttyname(outside))
    terminal = find_terminal(processes.root, 40)
    assert terminal is not None
    assert terminal.columns() == 80
    os.close(inside)
    os.close(outside)


def test_no_proc_at_all(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_terminal(processes.root / "nothing") is None


@pytest.mark.parametrize("seen", [True, False])
def test_a_table_has_colours_on_a_terminal_alone(
    processes: Processes, seen: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    found = Terminal(processes.terminal, takes_errors=True) if seen else None
    monkeypatch.setattr(terminal, "find_terminal", lambda: found)
    console = stdout_console()
    assert console.width == (123 if seen else 160)
    console.print("[bold]a[/bold]")
    assert capsys.readouterr().out == ("\x1b[1ma\x1b[0m\n" if seen else "a\n")


def test_without_colours_nothing_is_bold_either(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "find_terminal", lambda: Terminal(processes.terminal, takes_errors=True))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stdout_console().print("[bold red]a[/bold red]")
    assert capsys.readouterr().out == "a\n"
    assert not coloured()
    monkeypatch.setenv("NO_COLOR", "")
    assert coloured()
    monkeypatch.setenv("TERM", "dumb")
    assert not coloured()


def test_columns_may_be_wished_for(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Terminal(processes.terminal, takes_errors=True)
    monkeypatch.setattr(terminal, "find_terminal", lambda: found)
    assert columns() == 123
    monkeypatch.setenv("COLUMNS", "60")
    assert (columns(), stdout_console().width) == (60, 60)
    monkeypatch.setattr(terminal, "find_terminal", lambda: None)
    assert columns() == 60
    for none in ("", "0", "-5", "wide", "9" * 30):
        monkeypatch.setenv("COLUMNS", none)
        assert columns() is None


def test_lines_are_broken_between_words() -> None:
    line = "runs/small: a sentence  that is told, of runs/a-folder-with-a-long-name-that-is-not-broken"
    assert fit(line, None) == fit(line, len(line)) == [line]
    assert fit(line, 40) == [
        "runs/small: a sentence  that is told, of",
        "  runs/a-folder-with-a-long-name-that-is-not-broken",
    ]


def test_a_command_is_not_broken() -> None:
    """It is there to be copied, even where it is wider than the screen."""
    command = "`hpctrain resume 'a run' --set run.steps=20`"
    told = fit(f"stopped after step 3 of 20: SIGINT; go on with {command}, or let it be", 40)
    assert told == ["stopped after step 3 of 20: SIGINT; go", "  on with", f"  {command},", "  or let it be"]
