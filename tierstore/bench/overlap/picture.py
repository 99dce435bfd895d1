"""A picture of one step: what computed, and what was on which link meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tierstore.errors import CapabilityError
from tierstore.timeline import Track

__all__ = ["check", "draw"]

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


def check() -> None:
    """Raises CapabilityError where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CapabilityError("svg: drawing needs matplotlib, which is not installed") from error


def draw(timeline: Path, svg: Path) -> None:
    """Draws the last step of ``timeline`` into ``svg``."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tierstore"  # the same drawing is the same file
    from matplotlib import pyplot

    slices, step = last_step(json.loads(timeline.read_text()))
    begin, end = step
    figure, axes = pyplot.subplots(figsize=(11, 3.2))
    for row, (title, track, link_only, colour) in enumerate(_ROWS):
        kept = [part for part in slices.get(track.value, []) if part[0].endswith("(link)") or not link_only]
        colours: dict[str, list[tuple[float, float]]] = {}
        for name, start, stop in kept:
            face = _PASS_COLOURS.get(name.split()[0], colour) if track is Track.COMPUTE else colour
            colours.setdefault(face, []).append((start - begin, stop - begin))
        for face, spans in colours.items():
            # Transfers that follow one another at once are one bar: they cannot be seen apart.
            bars = _merged(spans, (end - begin) / 1000) if link_only else spans
            widths = [(start / 1e3, (stop - start) / 1e3) for start, stop in bars]
            axes.broken_barh(widths, (row - 0.4, 0.8), facecolors=face, edgecolor="white", linewidth=0.3)
        axes.text(-0.005, row, title, ha="right", va="center", transform=axes.get_yaxis_transform())
    axes.set_ylim(len(_ROWS) - 0.5, -0.5)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_yticks([])
    axes.set_xlabel("ms: one step of one of two ranks (forward blue, backward orange)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(svg, metadata={"Date": None})
    pyplot.close(figure)


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
