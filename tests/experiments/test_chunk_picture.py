"""The picture of a layer's passes, from slices made by hand."""

import re

import pytest
from pipemoe import TURN, draw, fastest_passes

from tierstore.timeline import TimelineSlice

#: Milliseconds: a layer in two chunks. All dispatches are issued at once, and a combine when its experts are done; turns on
#: the link follow one another. In the backward pass the weights go behind the rows, in 0.1 ms.
ISSUED = (
    *(("forward 0: dispatch chunk 0", 0), ("forward 0: dispatch chunk 1", 0)),
    *(("forward 0: combine chunk 0", 25), ("forward 0: combine chunk 1", 40)),
    *(("backward 0: dispatch chunk 0", 60), ("backward 0: dispatch chunk 0", 60)),
    *(("backward 0: dispatch chunk 1", 60), ("backward 0: dispatch chunk 1", 60)),
    *(("backward 0: combine chunk 0", 100), ("backward 0: combine chunk 0", 100)),
    *(("backward 0: combine chunk 1", 130), ("backward 0: combine chunk 1", 130)),
)
TURNS = (
    *((0, 10), (10, 20), (25, 35), (40, 50)),
    *((60, 70), (70, 70.1), (70.1, 80), (80, 80.1), (100, 110), (110, 110.1), (130, 140), (140, 140.1)),
)
#: The first one waits for its rows.
EXPERTS = (
    *(("forward 0: experts chunk 0", 0, 25), ("forward 0: experts chunk 1", 25, 40)),
    *(("backward 0: experts chunk 0", 60, 100), ("backward 0: experts chunk 1", 100, 130)),
)


def layer(later: float, slower: float = 1.0) -> dict[str, list[TimelineSlice]]:
    """The slices of the layer, ``later`` milliseconds later, where everything took ``slower`` times as long."""

    def at(name: str, begin: float, end: float) -> TimelineSlice:
        return TimelineSlice(name, (begin * slower + later) * 1e3, (end * slower + later) * 1e3)

    # A message ends when it was waited for, which may be long after its turn.
    messages = [at(name, begin, 150) for name, begin in ISSUED] + [at(TURN, *turn) for turn in TURNS]
    return {"all-to-alls": messages, "compute": [at(*each) for each in EXPERTS]}


def test_the_fastest_passes() -> None:
    """Of three rounds the second; a message has the time of its turn."""
    rounds = layer(1000, 1.1), layer(2000), layer(3000, 1.2)
    found = fastest_passes({track: [part for each in rounds for part in each[track]] for track in rounds[0]})
    assert found == fastest_passes(rounds[1])
    assert found[0].network == [
        (name, pytest.approx((begin + 2000) * 1e3), pytest.approx((end + 2000) * 1e3))
        for (name, _), (begin, end) in zip(ISSUED[:4], TURNS, strict=False)
    ]
    assert [each.name for each in found[1].device] == [name for name, *_ in EXPERTS[2:]]
    assert [(each.end - each.begin) / 1e6 for each in found] == pytest.approx([0.05, 0.0801])


def test_bars_stand_where_the_chunks_ran() -> None:
    """140.1 ms are 752 pixels; a chunk's rows and weights are one bar."""
    svg = draw({2: fastest_passes(layer(500))})

    def drawn(colour: str) -> list[tuple[float, float]]:
        (path,) = re.findall(f'<path fill="{colour}"[^>]* d="([^"]*)"', svg)
        scale = 752 / 140.1
        spans = re.findall(r"M([\d.]+) \d+h([\d.]+)", path)
        return [((float(x) - 116) / scale, (float(x) - 116 + float(width)) / scale) for x, width in spans]

    def close(*spans: tuple[float, float]) -> list[object]:
        return [pytest.approx(span, abs=0.05) for span in spans]

    assert drawn("#55a868") == close((0, 10), (10, 20), (60, 70.1), (70.1, 80.1))
    assert drawn("#8172b3") == close((25, 35), (40, 50), (100, 110.1), (130, 140.1))
    assert drawn("#4c72b0") == close((10, 25), (25, 40))
    assert drawn("#dd8452") == close((70.1, 100), (100, 130))
    assert re.findall(r'font-size="11"[^>]*>(\w+)<', svg) == [
        *("d0", "d1", "c0", "c1", "d0", "d1", "c0", "c1"),
        *("e0", "e1", "e0", "e1"),
    ]
    assert ">r = 2<" in svg
    assert ">forward: 50 ms<" in svg
    assert ">backward: 80 ms<" in svg
