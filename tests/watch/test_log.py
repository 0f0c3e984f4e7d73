from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.errors import InputOutputError
from hpctrain.watch.log import close_log, open_log, show_warnings


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_log(logging.getLogger("hpctrain"))


def test_first_rank_logs_to_file_and_warns_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = open_log(tmp_path, 0)
    logger.debug("nothing")
    logger.info("checkpoint saved")
    logging.getLogger("hpctrain.somewhere").warning("loss scale %d", 512)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    assert re.fullmatch(
        f"{stamp}INFO    checkpoint saved\n{stamp}WARNING loss scale 512\n",
        (tmp_path / "log.txt").read_text(),
    )
    assert capfd.readouterr() == ("", "warning: loss scale 512\n")


def test_other_rank_has_a_file_only_when_it_complains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = open_log(tmp_path, 3)
    logger.info("quiet")
    assert list(tmp_path.iterdir()) == []
    logger.warning("loud")
    assert (tmp_path / "log.3.txt").read_text().endswith(" WARNING loud\n")
    assert capfd.readouterr() == ("", "")


def test_opening_again_appends_once(tmp_path: Path) -> None:
    open_log(tmp_path, 0).info("one")
    open_log(tmp_path, 0).info("two")
    assert [line[-3:] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["one", "two"]


def test_closing_leaves_the_logger_as_it_was(tmp_path: Path) -> None:
    root = list(logging.getLogger().handlers)
    logger = open_log(tmp_path, 0)
    close_log(logger)
    assert (logger.handlers, logger.propagate, logger.level) == ([], True, logging.NOTSET)
    assert logging.getLogger().handlers == root


def test_warnings_can_be_shown_elsewhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = open_log(tmp_path, 0)
    shown: list[str] = []
    show_warnings(logger, shown.append)
    logger.error("above the bar")
    show_warnings(logger, None)
    logger.warning("on stderr")
    assert shown == ["error: above the bar"]
    assert capfd.readouterr().err == "warning: on stderr\n"


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputOutputError, match=r"log\.txt: cannot be opened: No such file"):
        open_log(tmp_path / "gone", 0)


def test_log_that_cannot_be_written_complains_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = open_log(tmp_path / "gone", 1)
    logger.warning("lost")
    logger.warning("lost, too")
    error = capfd.readouterr().err
    assert error.startswith("warning: ")
    assert error.count("\n") == 1
    assert "lines are missing" in error


def test_no_control_characters_reach_file_or_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors of packages that a run tells of may have colours, or worse."""
    logger = open_log(tmp_path, 0)
    try:
        logger.warning("%s: fails: \x1b[2J\x07%s", "report.wandb", "näh\u202e\nsecond")
    finally:
        close_log(logger)
    said = "report.wandb: fails: \\u001B[2J\\u0007näh\\u202E\nsecond\n"
    assert (tmp_path / "log.txt").read_text().endswith(said)
    assert capsys.readouterr().err == f"warning: {said}"
