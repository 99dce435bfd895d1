"""What writing does to a drive: how long one lasts that is warranted for so many bytes (its TBW)."""

from __future__ import annotations

import math

DAY_S = 86400.0


def drive_life_s(endurance_bytes: float, written_bytes: float, elapsed_s: float) -> float:
    """Seconds until ``endurance_bytes`` are written at the rate of ``written_bytes`` in ``elapsed_s``; infinity where
    nothing is written.
    """
    written_per_s = written_bytes / elapsed_s if elapsed_s > 0 else 0.0
    return endurance_bytes / written_per_s if written_per_s else math.inf
