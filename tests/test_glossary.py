"""GLOSSARY.md explains every class that crosses a package border, in one short sentence."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.launch import ROOT

SOURCES = ROOT / "hpctrain"
MOST_WORDS = 30
NAME = re.compile(r"`(\w+)`")


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of each module."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py"))}


def package_of(path: Path) -> str:
    """Return the top-level package of a module, or the module's own name if it is in none."""
    return path.relative_to(SOURCES).parts[0].removesuffix(".py")


def classes() -> dict[tuple[str, str], str]:
    """Return the package of each class, by module and name."""
    return {
        (".".join(path.relative_to(ROOT).with_suffix("").parts), node.name): package_of(path)
        for path, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def aliases() -> dict[str, set[str]]:
    """Return the classes of each type alias that is a union, such as `A = B | C`."""
    return {
        node.targets[0].id: {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.BitOr)
    }


def uses(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import, and of each attribute of an imported module."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias.name
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield modules.get(node.value.id, ""), node.attr


def crossing_classes() -> set[str]:
    """Return the names of the classes that a module of another package uses."""
    known = classes()
    return {
        name
        for path, tree in trees().items()
        for module, name in uses(tree)
        if known.get((module, name), package_of(path)) != package_of(path)
    }


def rows() -> Iterator[tuple[list[str], list[str], str]]:
    """Yield the terms, the earlier names and the sentence of each row of the glossary."""
    text = (SOURCES / "GLOSSARY.md").read_text(encoding="utf-8")
    for terms, earlier, sentence in re.findall(r"^- ([^(:]*)(?:\(([^)]*)\))?: (.*)$", text, re.MULTILINE):
        yield NAME.findall(terms), NAME.findall(earlier), sentence


def test_every_class_that_crosses_a_package_border_has_a_row() -> None:
    explained = {name for terms, _, _ in rows() for name in terms}
    explained |= {name for alias, names in aliases().items() if alias in explained for name in names}
    assert crossing_classes() - explained == set()


def test_every_row_explains_classes_of_the_code_in_one_short_sentence() -> None:
    existing = {name for _, name in classes()} | aliases().keys()
    for terms, _, sentence in rows():
        assert existing & {*terms}, terms
        assert sentence.endswith("."), terms
        assert len(re.split(r"[.;] ", sentence)) <= 3, terms
        assert len(sentence.split()) <= MOST_WORDS, terms


def test_every_term_has_one_row() -> None:
    counts = Counter(term for terms, _, _ in rows() for term in terms)
    assert [term for term, count in counts.items() if count > 1] == []


def test_no_class_has_an_earlier_name() -> None:
    earlier_names = {name for _, earlier, _ in rows() for name in earlier}
    assert len(earlier_names) > 100
    assert earlier_names & {name for _, name in classes()} == set()


def test_no_class_name_exists_twice() -> None:
    names = Counter(
        node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []
