"""A picture of one step: what computed, and what was on which link meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tierstore.bench.pictures.bars import Bar, BarPanel, BarRow, draw_bars, joined
from tierstore.bench.pictures.slices import TimelineSlice, read_slices
from tierstore.outputs import OutputKind, write_output
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
_CAPTION = "ms: one step of one of two ranks (forward blue, backward orange)"


def draw(timeline: Path, svg: Path) -> None:
    """Draws the last step of ``timeline`` into ``svg``."""
    slices, (begin, end) = last_step(read_slices(timeline))
    rows: list[BarRow] = []
    for title, track, link_only, colour in _ROWS:
        kept = [part for part in slices.get(track.value, []) if part.name.endswith("(link)") or not link_only]
        bars: list[Bar] = []
        for name, start, stop in kept:
            face = _PASS_COLOURS.get(name.split()[0], colour) if track is Track.COMPUTE else colour
            bars.append(Bar((start - begin) / 1e3, (stop - begin) / 1e3, face))
        if link_only:
            # Transfers that follow one another at once are one bar: a reader cannot see them apart.
            spans = joined([(bar.begin, bar.end) for bar in bars], (end - begin) / 1e6)
            bars = [Bar(*span, colour) for span in spans]
        rows.append(BarRow(title=title, bars=bars))
    drawn = draw_bars([BarPanel(rows=rows)], length=(end - begin) / 1e3, caption=_CAPTION)
    write_output(svg, OutputKind.PICTURE, drawn)


def last_step(
    slices: Mapping[str, Sequence[TimelineSlice]],
) -> tuple[dict[str, list[TimelineSlice]], tuple[float, float]]:
    """``slices`` by track, and begin and end of the last step: from its first forward pass."""
    compute = slices[Track.COMPUTE.value]
    begin = max(start for name, start, _ in compute if name == "forward 0")
    end = max(end for _, _, end in compute)
    return {
        track: [part for part in parts if part.end > begin and part.begin < end]
        for track, parts in slices.items()
    }, (begin, end)
