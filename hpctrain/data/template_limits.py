"""Limits of the process that renders chat templates."""

from __future__ import annotations

PROCESSOR_SECONDS = 10.0
"""Processor time for one conversation; one of 1000 messages takes some 20 ms."""

WALL_SECONDS = 120.0
"""Time for one request, in case the process does not compute."""

MEMORY_BYTES = 1 << 30
"""Address space of the process, Python and jinja2 included."""

MOST_CHARACTERS = 1 << 24
"""Length of a rendered text."""
