"""Bars by hand: 752 pixels are 752 ms, from x = 116 on."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tierstore.reports.bars import Bar, BarPanel, draw_bars, joined
from tierstore.timeline import Timeline, Track, read_slices

BLUE, YELLOW = "#000080", "#ffff00"


def shapes(svg: str, colour: str) -> list[str]:
    """The bars of ``colour``, row by row."""
    paths = re.findall(f'<path fill="{colour}"[^>]* d="([^"]*)"', svg)
    return [shape for path in paths for shape in re.findall("M[^M]*z", path)]


def texts(svg: str) -> dict[str, tuple[float, float, str]]:
    """Where each text stands, and its colour."""
    found = {}
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        at = float(element.attrib["x"]), float(element.attrib["y"])
        found[str(element.text)] = (*at, element.attrib.get("fill", ""))
    return found


def test_bars_stand_where_they_ran() -> None:
    """Rows of 26 pixels from y = 8 on; what begins before 0 or ends behind the last millisecond is cut there."""
    rows = {
        "first": [Bar(0, 100, BLUE, "a"), Bar(200, 210, BLUE, "too long"), Bar(300, 400, YELLOW, "b")],
        "second": [Bar(-5, 10, BLUE), Bar(700, 900, BLUE), Bar(800, 900, YELLOW)],
    }
    svg = draw_bars([BarPanel(rows=rows)], length=752, caption="ms")
    assert shapes(svg, BLUE) == [
        "M116.0 8h100.0v20H116.0z",
        "M316.0 8h10.0v20H316.0z",
        "M116.0 34h10.0v20H116.0z",
        "M816.0 34h52.0v20H816.0z",
    ]
    assert shapes(svg, YELLOW) == ["M416.0 8h100.0v20H416.0z"]
    found = texts(svg)
    assert found["first"][:2] == (108, 23)
    assert found["second"][:2] == (108, 49)
    # Light on dark, dark on light, and only where there is room.
    assert found["a"] == (166.0, 22, "#fff")
    assert found["b"] == (466.0, 22, "#222")
    assert "too long" not in found
    assert found["ms"][:2] == (492, 96)
    assert [name for name in found if name.isdigit()] == [str(hundred * 100) for hundred in range(8)]


def test_panels_share_a_scale() -> None:
    rows = {"row": [Bar(10, 20, BLUE)]}
    panels = [
        BarPanel(rows=rows, heading="r = 1", marks=[(10, "here")]),
        BarPanel(rows=rows, heading="r = 2"),
    ]
    svg = draw_bars(panels, length=376, caption="")
    assert shapes(svg, BLUE) == ["M136.0 32h20.0v20H136.0z", "M136.0 82h20.0v20H136.0z"]
    found = texts(svg)
    assert found["here"][:2] == (136, 25)
    assert found["r = 2"][:2] == (108, 75)


def test_spans_that_follow_at_once_are_joined() -> None:
    assert joined([(5, 6), (0, 1), (1.5, 3), (2, 2.5)], 0.5) == [(0, 3), (5, 6)]


def test_slices_of_all_lanes(tmp_path: Path) -> None:
    """Two reads overlap, so the second has a lane of its own; a count is no slice."""
    path = tmp_path / "timeline.json"
    with Timeline(path) as timeline:
        timeline.add(Track.DISK_READS, "read", 1000, 5000)
        timeline.add(Track.DISK_READS, "read (link)", 2000, 4000)
        timeline.add(Track.COMPUTE, "forward 0", 0, 3000)
        timeline.count("hits", {"hits": 1})
    assert any(
        event["args"].get("name") == "disk reads 2"
        for event in json.loads(path.read_text())
        if "args" in event
    )
    assert read_slices(path) == {
        "disk reads": [("read", 1, 5), ("read (link)", 2, 4)],
        "compute": [("forward 0", 0, 3)],
    }
