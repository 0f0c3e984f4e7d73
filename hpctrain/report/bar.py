"""A bar of what is done, while something long goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(count: int | None, what: str = "planned") -> Iterator[Callable[[int], None]]:
    """A bar on stderr of what is done, where that is a terminal; `count` is of all, if it is known."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=count)
        yield lambda done: bar.update(task, completed=done)
