"""Command lines that start another Python interpreter.

`python -c` and `python -m` search the current folder first, so a user's `json.py` or `random.py` would hide
the module of the standard library. The commands of this module do not search it. They import the same
hpctrain as this process, even if it is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])

_WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:] = [folder for folder in sys.path if folder]; "
"""Code that must run before the first import of a file. It imports only `sys`, which is built in."""

_RUN_MODULE = "from runpy import run_module; run_module({module!r}, run_name='__main__', alter_sys=True)"


def code_command(code: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that runs Python code with `arguments` as `sys.argv[1:]`."""
    return [sys.executable, "-c", _WITHOUT_CURRENT_FOLDER + code, *arguments]


def module_command(module: str = "hpctrain", arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module of hpctrain with `arguments`, as `python -m` does."""
    add_root = f"sys.path += [] if {_ROOT!r} in sys.path else [{_ROOT!r}]; "
    return code_command(add_root + _RUN_MODULE.format(module=module), arguments)
