"""Commands that start Python again.

`python -c` and `python -m` look for modules in the current folder first, so that a user's `json.py` or
`random.py` there would stand in for Python's own. These commands do not. They find hpctrain where this
process found it, even if it is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])

_WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:] = [folder for folder in sys.path if folder]; "
"""Runs before anything is imported from a file: `sys` is built in."""

_RUN_MODULE = "from runpy import run_module; run_module({module!r}, run_name='__main__', alter_sys=True)"


def code_command(code: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that runs Python code, which has the arguments as `sys.argv[1:]`."""
    return [sys.executable, "-c", _WITHOUT_CURRENT_FOLDER + code, *arguments]


def module_command(module: str = "hpctrain", arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module of hpctrain as `python -m` does."""
    find = f"sys.path += [] if {_ROOT!r} in sys.path else [{_ROOT!r}]; "
    return code_command(find + _RUN_MODULE.format(module=module), arguments)
