"""A progress bar that is gone when the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Hear = Callable[[int, int, str], None]


@contextmanager
def progress_bar(what: str, console: Console | None = None, start: str = "starting") -> Iterator[Hear]:
    """Shows progress on a console (unset, stderr) for as long as the context lasts.

    Args:
        what: the work, in front of the bar.
        start: what it begins with.

    Yields:
        A function of (done, in all or 0 where unknown, the current part).
    """
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"))
    shown = console or Console(stderr=True)
    hidden = not shown.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=shown, transient=True, disable=hidden) as bar:
        line = bar.add_task(start, total=None)

        def hear(done: int, total: int, part: str) -> None:
            bar.update(line, completed=done, total=total or None, description=part)

        yield hear
