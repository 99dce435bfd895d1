"""What commands print: tables and progress for people, one JSON object for programs.

With ``--json`` everything for people goes to stderr, and stdout is the object, on one line. Without it the
same table goes to stdout. Every number in the object says its unit in its key: the tests of the commands check it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from tierstore.errors import naming

_PLAIN_WIDTH = 120  # columns for tables where there is no terminal to ask
_PLAIN_INTERVAL_S = 5.0


class OutputMode(Enum):
    """Who reads stdout."""

    HUMAN = "human"
    JSON = "json"
    SILENT = "silent"  # one of several ranks: the first one speaks for all


class Output:
    """Where a command prints."""

    def __init__(self, mode: OutputMode) -> None:
        self.mode = mode
        self.console = Console(
            stderr=mode is OutputMode.JSON,
            quiet=mode is OutputMode.SILENT,
            highlight=False,
            markup=False,
            emoji=False,
        )
        if not self.console.is_terminal:
            self.console.width = _PLAIN_WIDTH

    @classmethod
    def for_option(cls, as_json: bool) -> Output:
        """The Output of ``--json`` given or not."""
        return cls(OutputMode.JSON if as_json else OutputMode.HUMAN)

    def line(self, text: str = "") -> None:
        """One line for people; it is not wrapped."""
        with self.named():
            self.console.print(text, soft_wrap=True)

    def named(self) -> AbstractContextManager[None]:
        """An OSError of what the block prints names the stream: a log on a full disk, say."""
        return naming("standard error" if self.console.stderr else "standard output")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table for people. Columns of numbers, and of numbers with units, are set to the right."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            cells = [str(row[index]) for row in rows]
            right = bool(cells) and all(cell[:1].isdigit() or cell in ("", "-") for cell in cells)
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        if title:
            self.line(title)  # rich would wrap it to the width of the table
        with self.named():
            self.console.print(table)

    def emit(self, result: Mapping[str, object]) -> None:
        """The command's JSON object, in JSON mode: the last line of stdout. Numbers not finite become null."""
        if self.mode is OutputMode.JSON:
            with naming("standard output"):
                click.echo(json.dumps(finite(result), allow_nan=False))

    def progress(self, total: int, *, label: str) -> ProgressBar:
        """A ProgressBar of ``total`` steps, for people."""
        return ProgressBar(self.console, total, label=label)


class ProgressBar:
    """A bar on a terminal; elsewhere a plain line at the first and last step and every few seconds.

    A context manager: a bar takes the terminal over until it is left.
    """

    def __init__(
        self,
        console: Console,
        total: int,
        *,
        label: str,
        interval_s: float = _PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._label = label
        self._interval_s = interval_s
        self._clock = clock
        self._last_line_s = -math.inf
        self._last_step = -1
        self._bar: RichProgress | None = None
        if console.is_terminal and not console.quiet:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[shown]}"),
                console=console,
            )
            self._task = self._bar.add_task(label, total=total, shown="")

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, total: int, fields: Mapping[str, object]) -> None:
        """``step`` of ``total`` is done. ``fields`` are shown as ``name value``; a float with 4 digits."""
        shown = "  ".join(f"{name} {_shown(value)}" for name, value in fields.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=total, shown=shown)
            return
        now = self._clock()
        due = now - self._last_line_s >= self._interval_s
        if (due or step >= total) and step != self._last_step:
            self._last_line_s, self._last_step = now, step
            self._console.print(f"{self._label} {step}/{total}  {shown}".rstrip(), soft_wrap=True)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finite(value: object) -> object:
    """``value`` with numbers that JSON cannot write (a loss that became NaN) as None."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
