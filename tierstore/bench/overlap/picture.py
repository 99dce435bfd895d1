"""A picture of one step: what computed, and what was on which link meanwhile."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.timeline import Track

#: Rows from the top: title, track, whether only the turns on its link are drawn, colour.
_ROWS = (
    ("computation", Track.COMPUTE, False, "#4c72b0"),
    ("stalls", Track.STALLS, False, "#c44e52"),
    ("gathers", Track.GATHERS, False, "#55a868"),
    ("reduce-scatters", Track.REDUCTIONS, False, "#8cc99b"),
    ("device copies", Track.DEVICE_COPIES, True, "#ccb974"),
    ("disk reads", Track.DISK_READS, True, "#8172b3"),
    ("disk writes", Track.DISK_WRITES, True, "#b3a8d6"),
)
_PASS_COLOURS = {"forward": "#4c72b0", "backward": "#dd8452", "optimizer": "#937860"}


def draw(timeline: Path, svg: Path) -> None:
    """Draws the last step of ``timeline`` into ``svg``."""
    slices, (begin, end) = last_step(json.loads(timeline.read_text()))
    rows: list[tuple[str, dict[str, list[tuple[float, float]]]]] = []
    for title, track, link_only, colour in _ROWS:
        kept = [part for part in slices.get(track.value, []) if part[0].endswith("(link)") or not link_only]
        colours: dict[str, list[tuple[float, float]]] = {}
        for name, start, stop in kept:
            face = _PASS_COLOURS.get(name.split()[0], colour) if track is Track.COMPUTE else colour
            colours.setdefault(face, []).append(((start - begin) / 1e3, (stop - begin) / 1e3))
        if link_only:
            # Transfers that follow one another at once are one bar: a reader cannot see them apart.
            colours = {face: _merged(spans, (end - begin) / 1e6) for face, spans in colours.items()}
        rows.append((title, colours))
    svg.write_text(_svg(rows, (end - begin) / 1e3))


def _svg(rows: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]], length_ms: float) -> str:
    """Bars of ``(begin, end)`` in ms, one path a row and colour."""
    left, right, height, bar = 116, 12, 26, 20
    width, bottom = 880 - left - right, 8 + height * len(rows)
    scale = width / length_ms
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {bottom + 44}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="880" height="{bottom + 44}" fill="#fff"/>',
    ]
    for row, (title, colours) in enumerate(rows):
        top = 8 + height * row
        lines.append(f'<text x="{left - 8}" y="{top + 15}" text-anchor="end">{title}</text>')
        for face, spans in colours.items():
            shapes = []
            for begin, end in spans:
                first, last = max(0.0, begin) * scale, min(length_ms, end) * scale
                shapes.append(f"M{left + first:.1f} {top}h{last - first:.1f}v{bar}H{left + first:.1f}z")
            drawn = " ".join(shapes)
            lines.append(f'<path fill="{face}" stroke="#fff" stroke-width=".3" d="{drawn}"/>')
    tick = 10.0 ** math.floor(math.log10(length_ms))
    tick /= 5 if length_ms < 2 * tick else 2 if length_ms < 5 * tick else 1
    marks = [number * tick for number in range(int(length_ms / tick) + 1)]
    ticks = "".join(f"M{left + mark * scale:.1f} {bottom}v5" for mark in marks)
    lines.append(f'<path fill="none" stroke="#000" d="M{left} {bottom}h{width}{ticks}"/>')
    for mark in marks:
        at = left + mark * scale
        lines.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{mark:g}</text>')
    lines.append(
        f'<text x="{left + width / 2:g}" y="{bottom + 36}" text-anchor="middle">'
        "ms: one step of one of two ranks (forward blue, backward orange)</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def _merged(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """``spans`` with those joined that are no more than ``gap`` apart."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def last_step(
    events: list[dict[str, Any]],
) -> tuple[dict[str, list[tuple[str, float, float]]], tuple[float, float]]:
    """The slices (name, start, end in us) by track, and begin and end of the last step: from its first forward pass."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices: dict[str, list[tuple[str, float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            # "disk reads 2" is the second lane of "disk reads".
            track = names[event["tid"]].rstrip("0123456789").rstrip()
            slices.setdefault(track, []).append((event["name"], event["ts"], event["ts"] + event["dur"]))
    compute = slices[Track.COMPUTE.value]
    begin = max(start for name, start, _ in compute if name == "forward 0")
    end = max(end for _, _, end in compute)
    return {
        track: [part for part in parts if part[2] > begin and part[1] < end]
        for track, parts in slices.items()
    }, (begin, end)
