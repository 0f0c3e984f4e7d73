"""Whoever changes a module finds its tests: in a file of its name, or in one whose head names it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG = 100
"""Lines from which on a module is to be found so."""


def test_every_long_module_has_a_test_file() -> None:
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = "\n".join(text.partition('"""')[2].partition('"""')[0] for text in texts)
    missing = []
    for path in (ROOT / "hpctrain").rglob("*.py"):
        module = path.relative_to(ROOT / "hpctrain")
        mirror = ROOT / "tests" / module.with_name(f"test_{module.name}")
        if len(path.read_text().splitlines()) > LONG and not mirror.exists() and str(module) not in named:
            missing.append(str(module))
    assert sorted(missing) == []
