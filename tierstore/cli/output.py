"""Command output: tables and progress for people, one JSON object for programs.

With ``--json`` stdout gets only the object, on one line, and everything else goes to stderr; without it the tables go to
stdout. The key of every number in the object names its unit; the commands' tests check this.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from tierstore.errors import naming
from tierstore.machine import MemoryAccount, peak_resident_bytes
from tierstore.outputs import to_json
from tierstore.stats import OnProgress
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # this imports LMDB, which --help must not load
    from tierstore.store.disk.drives import DriveReport

_PLAIN_WIDTH = 160  # columns of tables without a terminal: paths of 90 characters stay whole
_PLAIN_INTERVAL_S = 5.0


class OutputMode(Enum):
    """Who reads stdout."""

    HUMAN = "human"
    JSON = "json"
    SILENT = "silent"  # ranks other than the first


class Output:
    """The output of a command."""

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

    def of_first_rank(self) -> Output:
        """This output on rank 0, silence on the other ranks that torchrun started."""
        from tierstore.parallel.layout import RankEnvironment

        return Output(OutputMode.SILENT) if RankEnvironment.from_environment().rank else self

    def line(self, text: str = "") -> None:
        """Print one line for people, unwrapped."""
        with _naming(self.console):
            self.console.print(text, soft_wrap=True)

    def announce(self, account: MemoryAccount) -> None:
        """Print what the process will hold."""
        self.line(account.describe())

    def compare(self, account: MemoryAccount) -> dict[str, object]:
        """Print what was announced beside the peak; returns both for ``emit``."""
        peak = peak_resident_bytes()
        self.line(account.compare(peak))
        return {"memory": account.as_json(), "peak_resident_bytes": peak}

    def write(self, text: str) -> None:
        """Write ``text`` for people at once, as it is: the console would turn tabs into blanks."""
        with _naming(self.console):
            self.console.file.write(text)
            self.console.file.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table for people. Columns of numbers, with or without units, are right-aligned."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            cells = [str(row[index]) for row in rows]
            right = bool(cells) and all(cell[:1].isdigit() or cell in ("", "-") for cell in cells)
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        if title:
            self.line(title)  # rich would wrap the title to the table's width
        with _naming(self.console):
            self.console.print(table)

    def drives(self, title: str, reports: Sequence[DriveReport]) -> None:
        """Print one row for each directory of a store: the bytes stored and moved, the rate while anything was moving, and
        its share of new records.
        """
        columns = ("directory", "in use", "reserved", "read", "written", "bandwidth", "share")
        rows = [
            (
                report.path,
                *map(
                    format_bytes,
                    (report.used_bytes, report.reserved_bytes, report.read_bytes, report.written_bytes),
                ),
                f"{format_bytes(report.bandwidth)}/s" if report.bandwidth else "not measured",
                f"{report.share:.0%}",
            )
            for report in reports
        ]
        self.table(title, columns, rows)

    def emit(self, result: Mapping[str, object]) -> None:
        """In JSON mode, print the command's JSON object (``to_json``) as the last line of stdout."""
        if self.mode is OutputMode.JSON:
            with naming("standard output"):
                click.echo(json.dumps(to_json(result), allow_nan=False))

    def progress(self, *, label: str) -> ProgressBar:
        """Make a ProgressBar for people."""
        return ProgressBar(self.console, label=label)

    @contextmanager
    def passing(self, label: str) -> Iterator[OnProgress]:
        """Show a pass over a store by its bytes, from now on: what it opens and imports first may take seconds."""
        with ProgressBar(self.console, label=label, unit=ProgressUnit.BYTES) as bar:
            bar.update(0, 0)
            yield bar.update

    @contextmanager
    def reserving(self) -> Iterator[OnProgress]:
        """Show how a host cache of at least 1 GiB gets its memory: a hypervisor may give less than 1 GiB a second."""
        with ProgressBar(self.console, label="reserve memory", unit=ProgressUnit.BYTES) as bar:

            def populating(done: int, total: int) -> None:
                if total >= 1 << 30:
                    bar.update(done, total)
                if done == total:
                    bar.close()

            yield populating


class ProgressUnit(Enum):
    """What a ProgressBar counts."""

    STEPS = "steps"
    BYTES = "bytes"  # shown with their rate and the time left


class ProgressBar:
    """A bar on a terminal; elsewhere, a plain line at the first and last step and every few seconds.

    A context manager: from its first ``update`` until ``close`` the bar controls the terminal.
    """

    def __init__(
        self,
        console: Console,
        *,
        label: str,
        unit: ProgressUnit = ProgressUnit.STEPS,
        interval_s: float = _PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._label = label
        self._unit = unit
        self._interval_s = interval_s
        self._clock = clock
        self._last_line_s = -math.inf
        self._last_step = -1
        self._begun: tuple[float, int] | None = None  # the time and the step of the first update with a total
        self._drawn = console.is_terminal and not console.quiet
        self._bar: RichProgress | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the bar and release the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def _start(self, total: int) -> RichProgress:
        bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[shown]}"),
            console=self._console,
        )
        self._task = bar.add_task(self._label, total=total or None, count="", shown="")
        bar.start()
        return bar

    def update(self, step: int, total: int, fields: Mapping[str, object] = MappingProxyType({})) -> None:
        """Show that ``step`` of ``total`` (0: unknown yet) is done, and ``fields`` as ``name value`` (floats with 4
        significant digits)."""
        with _naming(self._console):
            now = self._clock()
            count, *more = self._counted(step, total, now)
            shown = "  ".join([*more, *(f"{name} {_shown(value)}" for name, value in fields.items())])
            if self._drawn:
                self._bar = self._bar or self._start(total)
                self._bar.update(self._task, completed=step, total=total or None, count=count, shown=shown)
                return
            due = now - self._last_line_s >= self._interval_s
            if (due or step >= total) and step != self._last_step:
                self._last_line_s, self._last_step = now, step
                self._console.print(f"{self._label} {count}  {shown}".rstrip(), soft_wrap=True)

    def _counted(self, step: int, total: int, now: float) -> list[str]:
        """What is done, and of bytes their rate since the first update and the time left."""
        if not total:
            return ["..."]
        if self._unit is ProgressUnit.STEPS:
            return [f"{step}/{total}"]
        found = [f"{format_bytes(step)}/{format_bytes(total)}"]
        self._begun = self._begun or (now, step)
        elapsed_s, done = now - self._begun[0], step - self._begun[1]
        if elapsed_s > 0 and done > 0:
            found.append(f"{format_bytes(done / elapsed_s)}/s")
            if step < total:
                found.append(f"{format_seconds((total - step) * elapsed_s / done)} left")
        return found


def _naming(console: Console) -> AbstractContextManager[None]:
    """A context in which an OSError of printing, such as a full disk behind a log, names the stream."""
    return naming("standard error" if console.stderr else "standard output")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
