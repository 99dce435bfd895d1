"""The benchmarks' page: whole, with every document, target and plot in it."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from documents import document, small

from tierstore.bench.comparing import compare
from tierstore.bench.documents import Better, Measurement, counted, measured
from tierstore.bench.report import plots_of, render_report


def texts(svg: str) -> set[str]:
    root = ElementTree.fromstring(svg)
    return {element.text for element in root.iter() if element.tag.endswith("text") and element.text}


def test_a_page_of_several() -> None:
    old = document(small())
    slow = document([measured("commit", [9.0, 9.1, 9.2, 9.0], "s", Better.LOWER), *small()[1:]])
    page = render_report([slow, document(small()[:3], bench="adamw")], comparisons=[compare(old, slow)])
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    for said in (
        "tierstore bench: commit, adamw",
        "commit: against an earlier run",
        "slower",
        "at most 1.200: met",
        "a &lt;processor&gt;",
        "block_bytes=65536",
        "1.125 to 1.225",
        "Made by tierstore",
    ):
        assert said in words, said
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert page.count("<svg") == len(plots_of(slow.measurements)) + len(plots_of(small()[:3]))
    assert not re.search(r"<script|<link|url\(http", page)


def test_a_sweep_is_a_curve_and_the_rest_rows() -> None:
    curve, alone, ratio = plots_of(small())
    assert (curve.title, curve.text) == ("read", "by block_bytes")
    assert {"threads", "io_uring", "4 KiB", "1 MiB", "bytes/s"} <= texts(curve.svg)
    assert alone.title == "Others in s"
    assert "commit" in texts(alone.svg)
    assert "commit to write" in texts(ratio.svg)
    assert plots_of([counted("dirty", 1, "bytes")]) == []


def sweep(**sides: list[object]) -> list[Measurement]:
    """Every combination of ``sides``, at three sizes."""
    found: list[dict[str, object]] = [{}]
    for name, values in sides.items():
        found = [{**each, name: value} for each in found for value in values]
    return [
        measured("read", [1.0 + size], "s", Better.LOWER, parameters={**each, "size": size})  # type: ignore[dict-item]
        for each in found
        for size in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("sides", "plots"),
    [
        ({"a": ["x", "y"]}, 1),
        ({"a": ["x", "y"], "b": ["p", "q", "r"]}, 1),  # six lines
        ({"a": ["x", "y"], "b": ["p", "q", "r", "s"]}, 2),  # eight are too many
        ({"a": ["x", "y"], "b": ["p", "q", "r", "s"], "c": ["m", "n"]}, 4),
    ],
)
def test_no_plot_has_too_many_lines(sides: dict[str, list[object]], plots: int) -> None:
    drawn = plots_of(sweep(**sides))
    assert len(drawn) == plots
    assert len({plot.title for plot in drawn}) == plots


def test_many_rows_are_several_plots() -> None:
    many = [
        measured("read", [1.0, 2.0], "s", Better.LOWER, parameters={"policy": f"p{number}"})
        for number in range(50)
    ]
    first, second = plots_of(many)
    assert "p39" in texts(first.svg)
    assert "p40" in texts(second.svg)
