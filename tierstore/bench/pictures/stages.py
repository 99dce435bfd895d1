"""A picture of one step through pipeline stages: a row a stage, a bar a pass with its micro-batch's number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierstore.bench.pictures.bars import Bar, BarPanel, BarRow, draw_bars
from tierstore.bench.pictures.slices import TimelineSlice
from tierstore.timeline import Track

_COLOURS = {"forward": "#4c72b0", "backward": "#dd8452"}
_CAPTION = "ms: one step, forward (blue) and backward (orange) passes by micro-batch"


def draw_stages(timelines: Sequence[Mapping[str, Sequence[TimelineSlice]]]) -> str:
    """An SVG of the last step in ``timelines``, slices by track of each stage. Their passes are named by phase, step and
    micro-batch ("forward 3.0"), as ``StagePipeline`` does.
    """
    steps = [_last_step(slices[Track.COMPUTE.value]) for slices in timelines]
    begin = min(each.begin for passes in steps for each in passes)
    end = max(each.end for passes in steps for each in passes)
    rows = []
    for stage, passes in enumerate(steps):
        bars = []
        for name, start, stop in passes:
            phase, _, micro = name.replace(".", " ").split()
            bars.append(Bar((start - begin) / 1e3, (stop - begin) / 1e3, _COLOURS[phase], micro))
        rows.append(BarRow(title=f"stage {stage}", bars=bars))
    return draw_bars([BarPanel(rows=rows)], length=(end - begin) / 1e3, caption=_CAPTION)


def _last_step(passes: Sequence[TimelineSlice]) -> list[TimelineSlice]:
    """Of ``passes``, those of the last step."""
    numbers = [int(each.name.split()[1].split(".")[0]) for each in passes]
    return [each for each, number in zip(passes, numbers, strict=True) if number == max(numbers)]
