"""Rewrites files of screens: `python -m tests.screens.update [VERB ...]`, all without a VERB.

Add a command to a file by its line "$ hpctrain ..." alone, and run this.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.screens.screens import FOLDER, UPDATE


def main() -> int:
    """Run the test of the screens with the variable that makes it write, and return its exit code."""
    os.environ[UPDATE] = "1"
    test = str(FOLDER / "test_screens.py")
    names = [f"{test}::test_screens_are_as_in_the_file[{verb}]" for verb in sys.argv[1:]]
    return int(pytest.main(["-q", *(names or [test])]))


if __name__ == "__main__":
    sys.exit(main())
