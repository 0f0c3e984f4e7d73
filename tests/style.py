"""Lint step for rules of style that ruff does not have: sentences, names, and descriptions of what exists.

    python -m tests.style

It checks the packages that `[tool.hpctrain.style]` in pyproject.toml lists as done, and prints one line
for each violation. Docstrings of all packages may only describe parameters and attributes that exist.
The refused words are in style_words.txt.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "hpctrain"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Trees = Mapping[Path, ast.Module]
Classes = Mapping[str, list[ast.ClassDef]]


class Words(NamedTuple):
    """Refused first words of docstrings and lower-case words within names, and names that are allowed."""

    fragments: frozenset[str]
    names: frozenset[str]
    allowed: frozenset[str]


class Violation(NamedTuple):
    """Line of a file that breaks a rule, and what is wrong with it."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def read_words(path: Path) -> Words:
    """Return the words of a file with the sections `[fragments]`, `[names]` and `[allowed names]`."""
    sections: defaultdict[str, set[str]] = defaultdict(set)
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif not line.startswith("#"):
            sections[section] |= set(line.split())
    return Words(*(frozenset(sections[each]) for each in ("fragments", "names", "allowed names")))


def read_done_packages(root: Path) -> frozenset[str]:
    """Return the packages and modules below `hpctrain/` that pyproject.toml lists as done."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return frozenset(settings["tool"]["hpctrain"]["style"]["done"])


def parse(root: Path) -> dict[Path, ast.Module]:
    """Return the syntax tree of each module of the project, by its path relative to `root`."""
    return {
        path.relative_to(root): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((root / SOURCES).rglob("*.py"))
    }


def package_of(path: Path) -> str:
    """Return the top-level package of a module, or the module's own name if it is in none."""
    return path.parts[1].removesuffix(".py")


def split_name(name: str) -> list[str]:
    """Return the words of a name in snake_case or CamelCase, in lower case."""
    name = re.sub(r"held_?out", "", name, flags=re.IGNORECASE)  # a held-out set is a term of the field
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def check_docstrings(path: Path, tree: ast.Module, words: Words) -> Iterator[Violation]:
    """Yield the docstrings that are fragments or only point to another docstring."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | Definition) or not (docstring := ast.get_docstring(node)):
            continue
        line = getattr(node, "lineno", 1)
        first = docstring.split("\n\n")[0].split()
        if first[0] in {"See", "As"} and len(first) < 5:
            yield Violation(path, line, "docstring only points elsewhere; mark an override with @override")
        elif first[0].rstrip(",.:;") in words.fragments:
            yield Violation(path, line, f'docstring begins with "{first[0]}"; write a complete sentence')


def described_names(docstring: str, section: str) -> Iterator[str]:
    """Yield the names that a section of a docstring describes, such as `Args`."""
    entry = None
    in_section = False
    for line in docstring.splitlines():
        if re.match(r"\w+:$", line):
            in_section, entry = line == f"{section}:", None
        elif in_section and line.strip():
            indent = len(line) - len(line.lstrip())
            entry = indent if entry is None else entry
            if indent == 0:
                in_section = False
            elif indent == entry and (match := re.match(r"([*\w, `]+?)(?: \(.*?\))?:(?: |$)", line.strip())):
                yield from (name.strip("*` ") for name in match[1].split(","))


def parameter_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of a function's parameters."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def attribute_names(node: ast.ClassDef, classes: Classes, seen: set[str]) -> set[str]:
    """Return the names of a class's attributes, methods and constructor parameters, with inherited ones."""
    names: set[str] = set()
    for base in node.bases:
        name = ast.unparse(base).split("[")[0].split(".")[-1]
        for each in classes.get(name, []) if name not in seen else []:
            names |= attribute_names(each, classes, seen | {name})
    for statement in ast.walk(node):
        if isinstance(statement, ast.Attribute) and isinstance(statement.ctx, ast.Store):
            names.add(statement.attr)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.Assign):
            names |= {
                part.id
                for part in ast.walk(statement)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
            if statement.name in {"__init__", "__new__", "__call__"}:
                names |= parameter_names(statement)
    return names


def check_described_names(path: Path, tree: ast.Module, classes: Classes) -> Iterator[Violation]:
    """Yield the docstrings that describe a parameter or an attribute which does not exist."""
    for node in ast.walk(tree):
        if not isinstance(node, Definition) or not (docstring := ast.get_docstring(node)):
            continue
        is_class = isinstance(node, ast.ClassDef)
        names = attribute_names(node, classes, {node.name}) if is_class else parameter_names(node)
        sections = ("Args", "Attributes") if is_class else ("Args",)
        for section in sections:
            for name in described_names(docstring, section):
                if name not in names:
                    yield Violation(
                        path, node.lineno, f"docstring of {node.name} describes {name}, which is not there"
                    )


def names_in(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of the module, and of its classes, functions, parameters and attributes."""
    yield 1, path.stem
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def check_names(path: Path, tree: ast.Module, words: Words) -> Iterator[Violation]:
    """Yield the names that contain a refused word."""
    for line, name in names_in(path, tree):
        if name in words.allowed:
            continue
        for word in sorted(words.names.intersection(split_name(name))):
            yield Violation(path, line, f'name {name} contains the word "{word}"')


def check_duplicates(trees: Trees, done: Collection[str]) -> Iterator[Violation]:
    """Yield the classes and modules of done packages whose name exists elsewhere in the project.

    A module may have the name of a module of a package that is not done, since that one will change. Modules
    of deck/sections/ have the names of the sections of a deck, and those of cli/ the names of the verbs.
    """
    classes: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
    modules: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, tree in trees.items():
        if (
            path.stem != "__init__"
            and path.parent.name not in {"sections", "cli"}
            and package_of(path) in done
        ):
            modules[path.stem].append((path, 1))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((path, node.lineno))
    for kind, places_by_name in (("class", classes), ("module", modules)):
        for name, places in places_by_name.items():
            for path, line in places:
                if len(places) > 1 and package_of(path) in done:
                    elsewhere = ", ".join(str(place) for place, _ in places if place != path)
                    yield Violation(path, line, f"{kind} {name} exists also in {elsewhere or 'this module'}")


def check(root: Path, done: Collection[str], words: Words) -> list[Violation]:
    """Return all violations in the done packages of the project below `root`, sorted by place."""
    trees = parse(root)
    unknown = set(done) - {package_of(path) for path in trees}
    if unknown:
        raise ValueError(f"pyproject.toml: [tool.hpctrain.style] lists unknown packages: {sorted(unknown)}")
    classes: defaultdict[str, list[ast.ClassDef]] = defaultdict(list)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(node)
    violations = list(check_duplicates(trees, done))
    for path, tree in trees.items():
        violations += check_described_names(path, tree, classes)
        if package_of(path) in done:
            violations += [*check_docstrings(path, tree, words), *check_names(path, tree, words)]
    return sorted(violations)


def main() -> int:
    """Print the violations; return 1 if there are any."""
    violations = check(ROOT, read_done_packages(ROOT), read_words(ROOT / "tests" / "style_words.txt"))
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
