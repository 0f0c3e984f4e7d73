"""Import of functions and classes that a deck names as "FILE.py:FUNCTION" or "PACKAGE:FUNCTION"."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import isclass, isroutine, signature
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from hpctrain.deck.code import NamedCode, is_file_target
from hpctrain.errors import HpctrainError, UserCodeError
from hpctrain.text import nearest

_HPCTRAIN = str(Path(__file__).resolve().parents[1])
_STANDARD_REFUSAL = (
    "is part of Python's standard library or of hpctrain, neither of which has models, datasets or losses; "
    "name a function or class in your own file or in an installed package"
)

_WITH_FRAMES = 2
"""Frames of an exception that the body of a `with run_user_code(...)` raises itself."""

_PREFIX = "hpctrain_module_"
"""Prefix of the names of modules that are loaded from files."""


@cache
def _library_places() -> tuple[str, ...]:
    """Return the beginnings of names of files with code of hpctrain, torch and Python's import system."""
    torch = find_spec("torch")  # not imported, since processes that only evaluate texts do without it
    folders = [_HPCTRAIN, str(Path(importlib.__file__).parent), "<frozen"]
    if torch is not None and torch.origin is not None:
        folders.append(str(Path(torch.origin).parent))
    return tuple(folders)


@cache
def _standard_folders() -> frozenset[Path]:
    """Return the folders of Python's standard library. Installed packages may be in their subfolders."""
    return frozenset(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


@contextmanager
def run_user_code(activity: str) -> Iterator[None]:
    """Return a context manager that reports exceptions of the user's code as errors of the user.

    HpctrainErrors, exceptions that hpctrain's own code raises, and those for lack of memory pass unchanged. A
    TypeError, ValueError or OverflowError of the call itself counts as one of the user's code, whose object
    does not fit.

    Args:
        activity: Beginning of the message, such as "train.py fails to load".

    Raises:
        UserCodeError: The user's code failed or ended the process. The message lists its lines that led
        there.
    """
    try:
        yield
    except (HpctrainError, MemoryError):
        raise
    except SystemExit as left:
        raise UserCodeError(
            f"{activity}: it ends the process (exit code {left.code!r}): put the lines that run a script "
            'under `if __name__ == "__main__":`'
        ) from left
    except Exception as error:
        if (torch := sys.modules.get("torch")) is not None and isinstance(error, torch.OutOfMemoryError):
            raise
        every = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in every if not frame.filename.startswith(_library_places())]
        misfit = isinstance(error, TypeError | ValueError | OverflowError) and len(every) <= _WITH_FRAMES
        if every[-1].filename.startswith(_HPCTRAIN) and not misfit:
            raise
        lines = [
            f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {(frame.line or '').strip()}"
            for frame in frames
        ]
        reason = f"{type(error).__name__}: {error}".strip().splitlines()
        raise UserCodeError([f"{activity}: {reason[0]}", *dict.fromkeys(lines)]) from error


def import_function(code: NamedCode) -> Callable[..., Any]:
    """Import the function or class that a deck names. Local: ranks do not wait for each other.

    Its module is loaded once per process, which runs its code, and the folder of a file is added to
    `sys.path`. A module that fails to load is loaded anew by the next call.

    Raises:
        UntrustedCodeError: `code.refusal` is not empty: a stored deck names code that the user does not
            trust.
        UserCodeError: Its module fails to load.
        HpctrainError: There is no such file or name, or it is part of Python's standard library or of
            hpctrain.
    """
    code.require_trusted()
    target = code.target
    home, _, name = target.rpartition(":")
    _refuse_standard_module(home, is_file_target(target))
    value: Any = _load_file(Path(home)) if is_file_target(target) else _import(home)
    path = home
    for part in name.split("."):
        if part.startswith("__"):
            raise HpctrainError(f"{path}: {part} is one of Python's own attributes, not a function or class")
        if isinstance(value, ModuleType) and path != home and not _is_part(value, home):
            own = f"{value.__name__}:{part}"
            raise HpctrainError(f"{path} is a module that {home} imports, not a part of it; name {own}")
        if not hasattr(value, part):
            near = nearest(part, [each for each in dir(value) if not each.startswith("_")])
            meant = f" (did you mean {near}?)" if near else ""
            raise HpctrainError(f"{path} has no {part}{meant}")
        value, path = getattr(value, part), f"{path}:{part}"
    if not callable(value):
        raise HpctrainError(f"{path} is not a function or class, but of type {type(value).__name__}")
    _refuse_standard_function(value, path)
    function: Callable[..., Any] = value
    return function


def _refuse_standard_module(place: str, in_file: bool) -> None:
    """Raise HpctrainError if a module belongs to Python's standard library or hpctrain, before importing it.

    Some functions there start programs, delete files or evaluate text; none builds a model, dataset or loss.
    """
    if _is_standard_file(Path(place)) if in_file else _is_standard_module(place):
        raise HpctrainError(f"{place} {_STANDARD_REFUSAL}")


def _refuse_standard_function(value: object, path: str) -> None:
    """Raise HpctrainError for a function of the standard library or hpctrain that another module imports."""
    while isinstance(value, partial):
        value = value.func
    if isclass(value) or isroutine(value):
        home = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
        if _is_standard_module(str(home)):
            raise HpctrainError(f"{path} is {home}:{value.__name__}, which {_STANDARD_REFUSAL}")


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
    return file.is_relative_to(_HPCTRAIN) or (
        not installed and any(file.is_relative_to(folder) for folder in _standard_folders())
    )


def _is_part(module: ModuleType, place: str) -> bool:
    """Return True if a module is part of the package, or in the folder of the file, that a deck names."""
    if not place.endswith(".py"):
        return module.__name__.partition(".")[0] == place.partition(".")[0]
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(Path(place).resolve().parent)


def is_loaded_file(name: str) -> bool:
    """Return True if a name is one that `import_function` gives to the module of a file.

    Args:
        name: Name of a module, such as a key of `sys.modules`.
    """
    return name.startswith(_PREFIX)


def _load_file(path: Path) -> ModuleType:
    """Return the module of a file, which is loaded once and can import other modules in its folder.

    The script that started this process, and modules that it imported, are not loaded again.
    """
    name = f"{_PREFIX}{path.stem}_{crc32(str(path).encode()):08x}"
    for known in (name, "__main__", path.stem):
        module = sys.modules.get(known)
        file = getattr(module, "__file__", None)
        if module is not None and file is not None and Path(file).resolve() == path.resolve():
            return module
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
                raise HpctrainError(
                    f"the package {error.name} is not installed (a file is named FILE.py)"
                ) from None
            raise


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any], title: str, table: str) -> Any:
    """Call a user's function with arguments of a deck, and return its result. Local.

    Args:
        function: The function or class.
        arguments: Its keyword arguments.
        title: Name of the function in messages.
        table: Table of the deck that holds the arguments, such as "model.arguments".

    Raises:
        UserCodeError: The function fails.
        HpctrainError: The arguments do not fit its signature.
    """
    with suppress(ValueError):  # some built-in functions have no signature
        parameters = signature(function)
        try:
            parameters.bind(**arguments)
        except TypeError as error:
            names = ", ".join(parameters.parameters) or "none"
            raise HpctrainError(f"{title}: [{table}] does not fit: {error} (it takes {names})") from None
    with run_user_code(f"{title} fails"):
        return function(**arguments)
