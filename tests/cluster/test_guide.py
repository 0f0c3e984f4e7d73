"""Commands of the guide and the README that need a cluster, in the order of their pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.guide.pages import FOLDER
from tests.cluster.cluster import Cluster, wait_until
from tests.guide.commands import (
    PageCommand,
    PageFile,
    differences,
    page_fixtures,
    page_steps,
    run_command,
    write_file,
)
from tests.guide.test_commands import copy_fixture
from tests.selection import ROOT

pytestmark = pytest.mark.cluster

PAGES = sorted(
    path
    for path in (*FOLDER.glob("*/*.md"), ROOT / "README.md")
    if "<!-- test: cluster -->" in path.read_text(encoding="utf-8")
)
QUESTIONS = ("sbatch", "squeue", "scancel", "scontrol")
"""Commands that may run while jobs do; before any other one of the cluster the jobs have to end."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_does_on_a_cluster_what_it_shows(
    cluster: Cluster, project: Path, tmp_path: Path, path: Path
) -> None:
    text = path.read_text(encoding="utf-8")
    for name in page_fixtures(text):
        copy_fixture(tmp_path, name, project)
    problems = []
    for step in page_steps(text):
        if isinstance(step, PageFile):
            write_file(step, project)
        elif not step.cluster:
            run_command(step, project)  # tests/guide/test_commands.py compares what it prints
        else:
            problems += run_on_cluster(step, cluster, project)
    wait_until(lambda: not cluster.jobs(), 120, "the jobs to end")
    assert not problems, "\n\n".join([f"{path}:", *problems])


def run_on_cluster(command: PageCommand, cluster: Cluster, project: Path) -> list[str]:
    """Run a command on the head node, and return how its exit code and output differ from the page."""
    if not command.text.startswith(QUESTIONS):
        wait_until(lambda: not cluster.jobs(), 120, f"the jobs to end before {command.text}")
    path = f"PATH={project}/.venv/bin:$PATH"
    done = cluster.run("bash", "-c", f"{path}; {command.text}", cwd=project, check=False, COLUMNS="100")
    return differences(command, done.returncode, done.stdout + done.stderr)
