"""The lint step of tests/style.py finds what it is for, and ruff and it agree on which packages are done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.style import check, package_of, parse, read_done_packages, read_words, split_name, tomllib

WORDS = read_words(ROOT / "tests" / "style_words.txt")
STYLE_RULES = {"D205", "D400", "D401", "D404", "D415", "PLR0913"}


def project(root: Path, **modules: str) -> Path:
    """Make a project of modules; `__` in a name separates a package from its module."""
    for name, text in modules.items():
        path = root / "hpctrain" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"""Of a token, in nats."""', 'docstring begins with "Of"'),
        ('def f() -> None:\n    """See Transport."""', "docstring only points elsewhere"),
        ("class SeatMap: ...", 'name SeatMap contains the word "seat"'),
        ("def f(was_told: int) -> None: ...", 'name was_told contains the word "told"'),
        ("def f(x):\n    x.kept = 1", 'name kept contains the word "kept"'),
    ],
)
def test_a_violation_is_found_in_a_package_that_is_done(tmp_path: Path, text: str, message: str) -> None:
    project(tmp_path, comm__module=text)
    (violation,) = check(tmp_path, {"comm"}, WORDS)
    assert violation.path == Path("hpctrain/comm/module.py")
    assert violation.message.startswith(message)
    project(tmp_path, deck__other="")
    assert check(tmp_path, {"deck"}, WORDS) == []


@pytest.mark.parametrize(
    ("code", "docstring", "names"),
    [
        (
            "def f(a, *b): DOC",
            "Args:|    a: First.|        more: No name.|    b: Others.|    c: None.",
            ["c"],
        ),
        ("def f(a): DOC", "Args:|    a: First.||Returns:|    b: Sum.", []),
        ("class C:\n    DOC\n    a: int", "Attributes:|    a: First.|    b: None.", ["b"]),
        ("class C:\n    DOC\n    a, b = 1, 2", "Attributes:|    a: First.|    b: Second.", []),
        ("class B:\n    def f(self): self.a = 1\nclass C(B): DOC", "Attributes:|    a, b: Both.", ["b"]),
        ("class C:\n    DOC\n    def __init__(self, a): ...", "Args:|    a: First.|    b: None.", ["b"]),
    ],
)
def test_described_names_must_exist(tmp_path: Path, code: str, docstring: str, names: list[str]) -> None:
    quoted = repr("Add.||" + docstring).replace("|", "\\n")
    project(tmp_path, comm__module="", deck__module=code.replace("DOC", quoted))
    messages = [each.message for each in check(tmp_path, {"comm"}, WORDS)]
    assert [message.split(" describes ")[1].split(",")[0] for message in messages] == names


def test_classes_and_modules_that_exist_twice_are_found(tmp_path: Path) -> None:
    project(tmp_path, comm__group="class Group: ...", deck__group="", deck__sub__rank="class Group: ...")
    messages = [str(each) for each in check(tmp_path, {"comm", "deck"}, WORDS)]
    assert messages == [
        "hpctrain/comm/group.py:1: class Group exists also in hpctrain/deck/sub/rank.py",
        "hpctrain/comm/group.py:1: module group exists also in hpctrain/deck/group.py",
        "hpctrain/deck/group.py:1: module group exists also in hpctrain/comm/group.py",
        "hpctrain/deck/sub/rank.py:1: class Group exists also in hpctrain/comm/group.py",
    ]


def test_good_style_has_no_violation(tmp_path: Path) -> None:
    text = '"""Buffers of a rank."""\n\ndef held_out_loss(size: int) -> int:\n    """Return the size."""\n'
    assert check(project(tmp_path, comm=text), {"comm"}, WORDS) == []


def test_names_are_split_into_words() -> None:
    assert split_name("HDF5ToldRun") == ["hdf", "5", "told", "run"]
    assert split_name("kept_bytes") == ["kept", "bytes"]
    assert split_name("held_out_loss") == split_name("HeldOutLoss") == ["loss"]


def test_an_unknown_package_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown packages: \\['com'\\]"):
        check(project(tmp_path, comm=""), {"com"}, WORDS)


def test_ruff_checks_the_same_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ignores = settings["tool"]["ruff"]["lint"]["per-file-ignores"]
    exempt = {
        package_of(Path(pattern.removesuffix("/**")))
        for pattern, rules in ignores.items()
        if pattern.startswith("hpctrain/") and set(rules) >= STYLE_RULES
    }
    packages = {package_of(path) for path in parse(ROOT)}
    assert exempt == packages - read_done_packages(ROOT)
