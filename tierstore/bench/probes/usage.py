"""What a process holds: memory, descriptors, disk; and whether that grows."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tierstore.bench.results.figures import Figures, named

_BLOCK = 512  # the unit of st_blocks, whatever the file system's
_DEVIATIONS = 3.0
_LEAST_SAMPLES = 12


@dataclass(frozen=True)
class ProcessUsage:
    """Of this process now: bytes resident, descriptors open, and bytes of blocks that its store takes."""

    resident_bytes: int
    descriptors: int
    disk_bytes: int


def usage(*directories: Path) -> ProcessUsage:
    """The ProcessUsage of this process, whose store is in ``directories``. Open files without a name count."""
    nameless = 0
    descriptors = os.listdir("/proc/self/fd")
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the listing's own
            status = os.stat(f"/proc/self/fd/{descriptor}")
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                nameless += status.st_blocks * _BLOCK
    return ProcessUsage(
        resident_bytes=int(psutil.Process().memory_info().rss),
        descriptors=len(descriptors) - 1,
        disk_bytes=sum(map(disk_bytes, directories)) + nameless,
    )


def disk_bytes(directory: Path) -> int:
    """Bytes of blocks of all files under ``directory``: what they take, not what they are long."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_blocks * _BLOCK
    return total


def process_bytes() -> tuple[int, int]:
    """Bytes that this process has caused to be read from storage, and sent to it: direct transfers, page faults, and page
    cache that it made dirty.
    """
    with open("/proc/self/io") as file:
        fields = dict(line.split(": ") for line in file.read().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])


def process_written_bytes() -> int:
    """The second of ``process_bytes``."""
    return process_bytes()[1]


@dataclass(frozen=True)
class Trend(Figures):
    """A quantity over time, by a straight line through its samples after the first quarter of them.

    ``unit``: what it is in, ``bytes`` or ``count``. ``grows``: the line rises by more than ``tolerance`` within the
    samples, and by more than three standard errors of its slope. ``judged``: there were samples enough, over time enough,
    to say so.
    """

    first: float = field(metadata=named("first_{unit}"))
    middle: float = field(metadata=named("middle_{unit}"))
    last: float = field(metadata=named("last_{unit}"))
    slope_per_s: float = field(metadata=named("slope_{unit}_per_s"))
    unit: str
    span_s: float
    judged: bool
    grows: bool

    @staticmethod
    def of(
        times: Sequence[float], values: Sequence[float], unit: str, *, tolerance: float, least_span_s: float
    ) -> Trend:
        """The trend of ``values`` at ``times`` (seconds, rising). Raises ValueError for none."""
        if not values:
            raise ValueError("a trend of no samples")
        begin = len(values) // 4
        t, y = np.array(times[begin:], np.float64), np.array(values[begin:], np.float64)
        span = float(t[-1] - t[0])
        enough = len(y) >= _LEAST_SAMPLES and span >= least_span_s
        slope, error = _slope(t, y) if len(y) > 2 and span > 0 else (0.0, math.inf)
        return Trend(
            first=values[0],
            middle=values[len(values) // 2],
            last=values[-1],
            slope_per_s=slope,
            unit=unit,
            span_s=span,
            judged=enough,
            grows=enough and slope * span > tolerance and slope > _DEVIATIONS * error,
        )


def _slope(t: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Least squares: the slope and its standard error."""
    away = t - t.mean()
    weight = float((away**2).sum())
    slope = float((away * y).sum()) / weight
    rest = y - y.mean() - slope * away
    return slope, math.sqrt(float((rest**2).sum()) / (len(y) - 2) / weight)
