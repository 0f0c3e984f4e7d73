"""Import of functions and classes that a deck names as "FILE.py:FUNCTION" or "PACKAGE:FUNCTION"."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import isclass, isroutine, signature
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from hpctrain.deck.code import NamedCode, is_file_target
from hpctrain.errors import HpctrainError, UsersError
from hpctrain.words import nearest

_OURS = str(Path(__file__).resolve().parents[1])
_TORCH = find_spec("torch")  # it is not imported for this: processes that only judge texts do without
_NOT_THEIRS = (
    *(_OURS, str(Path(importlib.__file__).parent), "<frozen"),
    *(() if _TORCH is None or _TORCH.origin is None else (str(Path(_TORCH.origin).parent),)),
)

_STANDARD = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})
"""Folders of Python's standard library. Installed packages may be in subfolders of them."""

_OF_STANDARD = (
    "is part of Python's standard library or of hpctrain, neither of which has models, datasets or losses; "
    "name a function or class in your own file or in an installed package"
)

_OF_WITH = 2
"""Frames of what fails in the very lines of a `with run_user_code(...)`: its own, and theirs."""

_PREFIX = "hpctrain_module_"
"""Of the names of modules that are loaded from files."""


@contextmanager
def run_user_code(doing: str) -> Iterator[None]:
    """What a user wrote runs within: where it fails, a UsersError of what it was `doing`, and of the
    lines of the user's own that led there. What fails within ours, or for want of memory, stays as it is; but
    not where a call, or what Python does with a user's object, does not fit that.
    """
    try:
        yield
    except (HpctrainError, MemoryError):
        raise
    except SystemExit as left:
        raise UsersError(
            f"{doing}: it ends the process (exit code {left.code!r}): what a script does besides, when it is "
            'started, is to be under `if __name__ == "__main__":`'
        ) from left
    except Exception as error:
        if (torch := sys.modules.get("torch")) is not None and isinstance(error, torch.OutOfMemoryError):
            raise
        every = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in every if not frame.filename.startswith(_NOT_THEIRS)]
        ill_fitting = isinstance(error, TypeError | ValueError | OverflowError) and len(every) <= _OF_WITH
        if every[-1].filename.startswith(_OURS) and not ill_fitting:
            raise
        told = [
            f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {(frame.line or '').strip()}"
            for frame in frames
        ]
        what = f"{type(error).__name__}: {error}".strip().splitlines()
        raise UsersError([f"{doing}: {what[0]}", *dict.fromkeys(told)]) from error


def import_function(code: NamedCode) -> Callable[..., Any]:
    """Return the function or class that a deck names.

    Raises:
        UntrustedCodeError: Only a stored deck names it.
        HpctrainError: There is no such file or name, it fails to load, or it is of Python's standard library.
    """
    code.require_trusted()
    target = code.target
    home, _, name = target.rpartition(":")
    _refuse_standard_library(home, is_file_target(target))
    found: Any = _load_file(Path(home)) if is_file_target(target) else _import(home)
    path = home
    for part in name.split("."):
        if part.startswith("__"):
            raise HpctrainError(f"{path}: {part} is one of Python's own attributes, not a function or class")
        if isinstance(found, ModuleType) and path != home and not _is_part(found, home):
            own = f"{found.__name__}:{part}"
            raise HpctrainError(f"{path} is a module that {home} imports, not a part of it; name {own}")
        if not hasattr(found, part):
            near = nearest(part, [each for each in dir(found) if not each.startswith("_")])
            meant = f" (did you mean {near}?)" if near else ""
            raise HpctrainError(f"{path} has no {part}{meant}")
        found, path = getattr(found, part), f"{path}:{part}"
    if not callable(found):
        raise HpctrainError(f"{path} is no function or class, but of type {type(found).__name__}")
    _refuse_foreign_function(found, path)
    function: Callable[..., Any] = found
    return function


def _refuse_standard_library(place: str, in_file: bool) -> None:
    """Raise HpctrainError if a module belongs to Python's standard library or hpctrain, before importing it.

    Some functions there start programs, delete files or evaluate text; none builds a model, dataset or loss.
    """
    if _is_standard_file(Path(place)) if in_file else _is_standard_module(place):
        raise HpctrainError(f"{place} {_OF_STANDARD}")


def _refuse_foreign_function(value: object, path: str) -> None:
    """Raise HpctrainError for a function of the standard library or hpctrain that another module imports."""
    while isinstance(value, partial):
        value = value.func
    if isclass(value) or isroutine(value):
        home = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
        if _is_standard_module(str(home)):
            raise HpctrainError(f"{path} is {home}:{value.__name__}, which {_OF_STANDARD}")


def _is_standard_module(name: str) -> bool:
    """Return True for a module of the standard library or hpctrain, not for a user's module of that name."""
    top = name.partition(".")[0]
    if top == "hpctrain":
        return True
    if top not in sys.stdlib_module_names:
        return False
    known = sys.modules.get(top)
    spec = find_spec(top) if known is None else known.__spec__
    file = None if spec is None or not spec.has_location else spec.origin
    return file is None or _is_standard_file(Path(file))


def _is_standard_file(path: Path) -> bool:
    file = path.resolve()
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return file.is_relative_to(_OURS) or (
        not installed and any(file.is_relative_to(folder) for folder in _STANDARD)
    )


def _is_part(module: ModuleType, place: str) -> bool:
    """Return True if a module is part of the package, or in the folder of the file, that a deck names."""
    if not place.endswith(".py"):
        return module.__name__.partition(".")[0] == place.partition(".")[0]
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(Path(place).resolve().parent)


def is_loaded_file(name: str) -> bool:
    """Whether a module of that name is a file that was loaded for a function of it."""
    return name.startswith(_PREFIX)


def _load_file(path: Path) -> ModuleType:
    """The module of a file, loaded once; beside it, it finds its own others. The script that begins a run,
    and what that has imported, are there already.
    """
    name = f"{_PREFIX}{path.stem}_{crc32(str(path).encode()):08x}"
    for known in (name, "__main__", path.stem):
        there = sys.modules.get(known)
        file = None if there is None else getattr(there, "__file__", None)
        if there is not None and file is not None and Path(file).resolve() == path.resolve():
            return there
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise HpctrainError(f"{path}: there is no such file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules[name] = module_from_spec(spec)
    try:
        with run_user_code(f"{path} fails to load"):
            spec.loader.exec_module(module)
    except HpctrainError:
        del sys.modules[name]
        raise
    return module


def _import(name: str) -> ModuleType:
    with run_user_code(f"{name} fails to load"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                sentence = f"there is no package {error.name} here (a file is named FILE.py)"
                raise HpctrainError(sentence) from None
            raise


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any], short: str, table: str) -> Any:
    """What a function, which is called `short`, gives for the arguments of a deck's `table`.

    HpctrainError where they do not fit, or it fails.
    """
    with suppress(ValueError):  # of which nobody knows what it takes
        taken = signature(function)
        try:
            taken.bind(**arguments)
        except TypeError as error:
            names = ", ".join(taken.parameters) or "none"
            raise HpctrainError(f"{short}: [{table}] does not fit: {error} (it takes {names})") from None
    with run_user_code(f"{short} fails"):
        return function(**arguments)
