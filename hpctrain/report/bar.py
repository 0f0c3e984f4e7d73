"""Progress bar for long operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(count: int | None, what: str = "planned") -> Iterator[Callable[[int], None]]:
    """Return a context manager with a progress bar on stderr, if that is a terminal.

    Args:
        count: Number of all items; None if it is unknown.
        what: What happens to the items, such as "planned". The bar shows this text.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=count)
        yield lambda done: bar.update(task, completed=done)
