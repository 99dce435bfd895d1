"""What experiments compute from measured times and counts, by hand."""

import itertools
import re
from typing import Any

import exchange
import ppmoe
import pytest
import quant
import stages
import tasks
import uploads
from hypothesis import given
from hypothesis import strategies as st

from tierstore.capabilities import Finding
from tierstore.links import LinkConfig
from tierstore.timeline import TimelineSlice


def test_ppmoe_finds_a_crossing() -> None:
    """2 at speed 1, 0.5 at speed 4: on logarithmic scales 1 at 2."""
    assert ppmoe.crossing([1, 4], [2, 0.5]) == pytest.approx(2)
    assert ppmoe.crossing([1, 4], [4, 2]) is None
    assert ppmoe.crossing([1, 4], [1, 2]) is None
    # One ratio twice as large: the medians of slopes and intercepts are the others'.
    wild = [1 / 0.6, 1 / 0.8, 2.0, 1 / 1.25, 1 / 1.6]
    assert ppmoe.crossing([0.6, 0.8, 1.0, 1.25, 1.6], wild) == pytest.approx(1, rel=0.05)


@given(st.floats(0.5, 2), st.floats(-3, -0.2))
def test_ppmoe_finds_the_crossing_of_points_on_a_line(at: float, slope: float) -> None:
    speeds = [0.3, 0.6, 1.0, 1.7, 3.4]
    assert ppmoe.crossing(speeds, [(speed / at) ** slope for speed in speeds]) == pytest.approx(at)


def test_tasks_are_cut_as_the_paper_does_and_in_equal_pieces() -> None:
    modes = tasks.assignments()
    rows = {name: [stop - start for start, stop in itertools.pairwise(of.cuts)] for name, of in modes.items()}
    assert rows["one task a card"] == [512, 256, 128, 128, 0, 0, 0, 0]
    assert rows["balanced"] == rows["balanced again"] == [128] * 8
    assert rows["as printed, by the paper"] == [78, 78, 78, 78, 115, 115, 120, 120]
    assert rows["as printed, equal cost"] == [98, 97, 98, 98, 98, 97, 98, 98]
    # 62.6 and 74.0 samples a second and card: 1024 / 4.088 s on four, 1024 / 1.730 s on eight.
    alone, balanced = (
        tasks.FIXED_S + tasks.ROW_S * modes[name].most_rows for name in ("one task a card", "balanced")
    )
    assert 1024 / alone / 4 == pytest.approx(62.6, abs=0.05)
    assert 1024 / balanced / 8 == pytest.approx(74.0, abs=0.05)


def test_tasks_notice_a_lost_and_a_doubled_example() -> None:
    assert tasks.each_once([{"a": [(0, 0, 4)]}, {"a": [(0, 4, 6), (1, 0, 2)]}])
    assert not tasks.each_once([{"a": [(0, 0, 4)]}, {"a": [(0, 5, 6)]}])
    assert not tasks.each_once([{"a": [(0, 0, 4)]}, {"a": [(0, 3, 6)]}])


def test_uploads_by_hand() -> None:
    """16 experts in layers of 4. Two micro-batches pass over them four times and turn three times: 6 slots save 3 * 6 of
    64, or 3 * 2 if the layer that computes takes 4 of them. A layer ahead of it leaves none. Two forward passes over
    unchanged experts save 6 each.
    """
    step, twice = uploads.Way("", 4, updates=True), uploads.Way("", 2, updates=False)
    of = {"layers": 4, "per_layer": 4}
    assert uploads.bounds(step, 6, **of, depth=0) == (46, 58)
    assert uploads.bounds(step, 6, **of, depth=1) == (46, 64)
    assert uploads.bounds(step, 16, **of, depth=1) == (16, 16)
    assert uploads.bounds(twice, 6, **of, depth=0) == (20, 28)
    assert uploads.bounds(twice, 16, **of, depth=0) == (0, 0)


def test_quant_takes_ratios_within_rounds() -> None:
    """Two rounds; a copy of 100 bytes, codes of 50."""
    samples = {"copy": [1.0, 2.0], "bf16": [4.0, 8.0], "int8": [2.0, 1.0]}
    copy, plain, int8 = quant.figures(samples, {"copy": 100, "bf16": 100, "int8": 50}, 60)
    assert (copy["bandwidth_to_copy_ratio"], copy["flops_per_s"]) == (1, 0)
    assert (plain["speed_to_torch_ratio"], plain["bandwidth_to_copy_ratio"]) == (1, 0.25)
    assert int8["speed_to_torch_ratio"] == (2 + 8) / 2
    assert int8["bandwidth_to_copy_ratio"] == (0.5 * 1 / 2 + 0.5 * 2) / 2
    assert int8["median_s"] == 1.5
    assert (int8["weight_bytes_per_s"], int8["flops_per_s"]) == (50 / 1.5, 60 / 1.5)


def test_exchange_takes_what_is_within_the_noise_for_a_tie() -> None:
    """The flat exchange to itself: 1.00, 0.98 and 1.03. Nine tenths of the way up are 2.8%: 1.02 is a tie, 1.2 is not."""
    rows: list[dict[str, Any]] = [
        {"again_ratio": 1.0, "hierarchical_to_flat_ratio": 0.75, "auto": "hierarchical"},
        {"again_ratio": 0.98, "hierarchical_to_flat_ratio": 1.2, "auto": "hierarchical"},
        {"again_ratio": 1.03, "hierarchical_to_flat_ratio": 1.02, "auto": "flat"},
    ]
    assert exchange.judge(rows) == pytest.approx(0.028)
    assert [row["faster"] for row in rows] == ["hierarchical", "flat", "tie"]
    assert [row["auto_right"] for row in rows] == [True, False, True]


def test_exchange_divides_a_nodes_link_where_no_kernel_limits_it() -> None:
    """A node sends 12 MB/s after 1 ms: each of its three ranks 4 MB/s."""
    node = LinkConfig(bandwidth=12_000_000, latency=1e-3)
    found = exchange.limit((), Finding(False, "no netem"), node, 3)
    assert found == LinkConfig(bandwidth=4_000_000, latency=1e-3)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ()),
        ({"held_count": [2, 2]}, ("stage 1 held 2",)),
        ({"in_order": False}, ("another order",)),
        ({"step_to_model_ratio": 1.2}, ("1.200 of the model",)),
    ],
)
def test_stages_name_what_is_wrong(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    row = {
        "stages_count": 2,
        "micro_batches_count": 4,
        "held_count": [2, 1],
        "in_order": True,
        "step_to_model_ratio": 1.0,
        **changes,
    }
    found = list(stages.failures(row))
    assert len(found) == len(names)
    assert all(name in text for name, text in zip(names, found, strict=True))


def test_stages_draw_the_last_step() -> None:
    """Passes of 47 and 94 ms: (2 + 1) x 141 = 423 ms from 1000 on, so 752 / 423 pixels a millisecond."""

    def stage(*passes: tuple[str, float, float]) -> dict[str, list[TimelineSlice]]:
        return {"compute": [TimelineSlice(name, begin * 1e3, end * 1e3) for name, begin, end in passes]}

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
    svg = stages.draw([first, second])
    scale = 752 / 423

    def drawn(colour: str) -> list[tuple[float, int, float]]:
        """Begin and length in ms, and the row, of all bars."""
        paths = re.findall(f'<path fill="{colour}"[^>]* d="([^"]*)"', svg)
        bars = [bar for path in paths for bar in re.findall(r"M([\d.]+) (\d+)h([\d.]+)", path)]
        return [((float(x) - 116) / scale, (int(y) - 8) // 26, float(width) / scale) for x, y, width in bars]

    forward = [(0, 0, 47), (47, 0, 47), (47, 1, 47), (188, 1, 47)]
    backward = [(188, 0, 94), (329, 0, 94), (94, 1, 94), (235, 1, 94)]
    assert drawn("#4c72b0") == [pytest.approx(bar, abs=0.1) for bar in forward]
    assert drawn("#dd8452") == [pytest.approx(bar, abs=0.1) for bar in backward]
    assert re.findall(r'font-size="11"[^>]*>(\d)<', svg) == ["0", "1", "0", "1", "0", "0", "1", "1"]
