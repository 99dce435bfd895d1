"""What the plots draw. How they look was looked at; here: that nothing is missing, and that they are plain SVG."""

import xml.etree.ElementTree as ElementTree

import pytest
from studies import small_study

from tierstore.lab.plots import curves_plot, half_life_plot, pareto_plot, styles_of, windows_plot
from tierstore.lab.results import Role


@pytest.fixture
def regime():
    return small_study().regimes[0]


def texts(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.get("width") is None
    assert root.get("viewBox")
    return [element.text for element in root.iter() if element.tag.endswith("text") and element.text]


def test_every_policy_has_a_look_of_its_own():
    labels = [(f"policy-{number}", Role.POLICY) for number in range(15)] + [("belady", Role.BOUND)]
    styles = styles_of(labels + labels)
    assert len({(style.colour, style.marker, style.line) for style in styles.values()}) == 16
    assert len({style.marker for style in styles.values()}) == 16  # also without colours
    assert styles["belady"].marker == ""


def test_plots_name_what_they_draw(regime):
    focused = regime.focused()
    styles = styles_of([(curve.label, curve.role) for curve in regime.curves])
    shown = texts(curves_plot(regime.curves, styles))
    assert {"lru", "lfu-decay", "belady (bound)", "1 - C/N", "miss ratio"} <= set(shown)
    shown = texts(pareto_plot(focused, styles))
    assert "stall, ms a step (estimated)" in shown
    assert {"lru", "lfu-decay", "belady (bound)", "best of both"} <= set(shown)
    shown = texts(windows_plot(focused, styles))
    assert {"lru", "step", "hit ratio"} <= set(shown)
    shown = texts(half_life_plot(regime.half_lives))
    assert {".350", "never", "8", "40%"} <= set(shown)


def test_without_stalls_reads_are_drawn(regime):
    focused = [point for point in regime.focused() if point.policy != "lru"]
    bare = [
        type(point)(**{**{n: getattr(point, n) for n in point.__slots__}, "stall_s_per_step": None})
        for point in focused
    ]
    shown = texts(pareto_plot(bare, styles_of([(one.label, one.role) for one in bare])))
    assert "read, MB a step (simulated)" in shown


def test_ink_follows_the_page(regime):
    styles = styles_of([(curve.label, curve.role) for curve in regime.curves])
    svg = curves_plot(regime.curves, styles)
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert svg == curves_plot(regime.curves, styles)  # no dates, no random ids
