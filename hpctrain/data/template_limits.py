"""Resource limits of the process that renders chat templates."""

from __future__ import annotations

PROCESSOR_SECONDS = 10.0
"""Processor time per conversation, in seconds. A conversation of 1000 messages takes about 20 ms."""

WALL_SECONDS = 120.0
"""Wall-clock time per request, in seconds. It applies to a template that waits instead of computing."""

MEMORY_BYTES = 1 << 30
"""Address space of the process in bytes, including Python and jinja2."""

MAX_CHARACTERS = 1 << 24
"""Largest length of a rendered text, in characters."""
