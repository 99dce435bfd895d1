"""What ran when, as a timeline's file says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class TimelineSlice(NamedTuple):
    """Something that ran from ``begin`` to ``end``, in microseconds of CLOCK_MONOTONIC."""

    name: str
    begin: float
    end: float


def read_slices(timeline: Path) -> dict[str, list[TimelineSlice]]:
    """The slices of ``timeline``, which was closed, by track. Raises OSError."""
    return slices_by_track(json.loads(timeline.read_text()))


def slices_by_track(events: Sequence[Mapping[str, Any]]) -> dict[str, list[TimelineSlice]]:
    """The slices among ``events``, by track and in the order in which they were written."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices: dict[str, list[TimelineSlice]] = {}
    for event in events:
        if event["ph"] == "X":
            # "disk reads 2" is the second lane of "disk reads".
            track = names[event["tid"]].rstrip("0123456789").rstrip()
            found = TimelineSlice(event["name"], event["ts"], event["ts"] + event["dur"])
            slices.setdefault(track, []).append(found)
    return slices
