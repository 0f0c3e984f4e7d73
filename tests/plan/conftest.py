"""All plans in these tests are those of fresh processes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plans_of_fresh_processes(fresh: None) -> None:
    """See `fresh`."""
