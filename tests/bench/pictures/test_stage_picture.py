"""The picture of a step through stages, from slices made by hand."""

from __future__ import annotations

import re

import pytest

from tierstore.bench.pictures.slices import TimelineSlice
from tierstore.bench.pictures.stages import draw_stages


def stage(*passes: tuple[str, float, float]) -> dict[str, list[TimelineSlice]]:
    """The slices of one stage, in milliseconds."""
    return {"compute": [TimelineSlice(name, begin * 1e3, end * 1e3) for name, begin, end in passes]}


def test_the_last_step_of_two_stages() -> None:
    """Passes of 47 and 94 ms: (2 + 1) x 141 = 423 ms from 1000 on, so 752 / 423 pixels a millisecond."""
    first = stage(
        ("forward 6.0", 0, 47),
        ("backward 6.0", 100, 194),
        ("forward 7.0", 1000, 1047),
        ("forward 7.1", 1047, 1094),
        ("backward 7.0", 1188, 1282),
        ("backward 7.1", 1329, 1423),
    )
    second = stage(
        ("forward 7.0", 1047, 1094),
        ("backward 7.0", 1094, 1188),
        ("forward 7.1", 1188, 1235),
        ("backward 7.1", 1235, 1329),
    )
    svg = draw_stages([first, second])
    scale = 752 / 423

    def drawn(colour: str) -> list[tuple[float, int, float]]:
        """Begin and length in ms, and the row, of all bars."""
        paths = re.findall(f'<path fill="{colour}"[^>]* d="([^"]*)"', svg)
        bars = [bar for path in paths for bar in re.findall(r"M([\d.]+) (\d+)h([\d.]+)", path)]
        return [((float(x) - 116) / scale, (int(y) - 8) // 26, float(width) / scale) for x, y, width in bars]

    assert drawn("#4c72b0") == [
        pytest.approx(bar, abs=0.1) for bar in [(0, 0, 47), (47, 0, 47), (47, 1, 47), (188, 1, 47)]
    ]
    assert drawn("#dd8452") == [
        pytest.approx(bar, abs=0.1) for bar in [(188, 0, 94), (329, 0, 94), (94, 1, 94), (235, 1, 94)]
    ]
    labels = re.findall(r'font-size="11"[^>]*>(\d)<', svg)
    assert labels == ["0", "1", "0", "1", "0", "0", "1", "1"]
    assert [title in svg for title in (">stage 0<", ">stage 1<", ">stage 2<")] == [True, True, False]
