"""bench scale: exponents by hand, the structure of what it finds, and how its walk goes. Nothing here asserts a speed."""

import math
from collections import Counter
from pathlib import Path

import pytest
from tiny import TinyBench

from tierstore.bench.report import plots_of
from tierstore.bench.scale import DecisionProgram, fit_exponent, make_core, n_log_n_exponent
from tierstore.cache.access import Phase

pytestmark = pytest.mark.usefixtures("forked_python")

COSTS = {
    *("create", "first commit", "open", "index memory", "index memory a record"),
    *(
        "commit 1% dirty",
        "write the same bytes",
        "commit to write",
        "verify",
        "gc",
        "decide an access, lfu-decay",
    ),
    "decide an access, next-use",
}


def test_the_exponent_of_powers() -> None:
    for power in (0.0, 1.0, 2.0):
        found = fit_exponent([10, 100, 1000], [3 * n**power for n in (10, 100, 1000)])
        assert found == pytest.approx((power, 0), abs=1e-6)


def test_an_exponent_by_hand() -> None:
    # log10 of n: 1, 2, 3; of the costs: 1, 3, 2. Means 2 and 2: slope (-1 * -1 + 1 * 0) / 2 = 1/2. What is left is
    # -1/2, 1, -1/2: squares 3/2, over 3 - 2 points and 2: the spread is the root of 3/4.
    found = fit_exponent([10, 100, 1000], [10, 1000, 100])
    assert found == pytest.approx((0.5, math.sqrt(0.75)))
    assert fit_exponent([10, 1000], [1, 10]) == (pytest.approx(0.5), 0)
    with pytest.raises(ValueError, match="two sizes"):
        fit_exponent([10, 10], [1, 2])


def test_n_log_n_is_a_little_above_1() -> None:
    # Two points: log(n log n) rises by log(10) + log(2) from 10 to 100.
    assert n_log_n_exponent([10, 100]) == pytest.approx(1 + math.log10(2))


def test_the_walk_of_a_program() -> None:
    program = DecisionProgram(1024)
    assert (program.layers, program.width) == (4, 64)
    assert Counter(map(program.layer_of, range(1024))) == dict.fromkeys(range(4), 256)
    passes = list(program.passes())
    assert [layer for _, layer, _ in passes] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [phase for phase, _, _ in passes] == [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 4
    assert all(len(set(choice.tolist())) == 64 and choice.max() < 256 for choice in program.choices())
    assert DecisionProgram(100).width == 64
    assert make_core(program, "lru").stats().accesses == 0


def test_a_tiny_run(tmp_path: Path, tiny_bench: TinyBench) -> None:
    sizes = ["--records=100", "--records=200", "--records=400", "--decided=600", "--dirty-bytes=24KiB"]
    found = tiny_bench("scale", *sizes, "--accesses=20", "--rounds=1", f"--store={tmp_path / 'b'}")
    curves = found.figures["curves"]
    dirty = [(one["records"], one["record_bytes"]) for one in found.figures["dirty"]]
    assert dirty == [(200, 24 << 10)]
    assert set(curves) == COSTS
    for name, curve in curves.items():
        counts = [100, 200, 400] + [600] * name.startswith("decide an access")
        assert [point["records"] for point in curve["medians"]] == counts
        assert curve["exponent_spread_ratio"] >= 0
    assert not (tmp_path / "b").exists()
    assert "n **" in found.table
    measurements = found.document.measurements
    assert {plot.title for plot in plots_of(measurements)} >= {"open", "decide an access, next-use", "verify"}
    assert {one.parameters["of"] for one in measurements if one.name == "exponent"} == COSTS
    assert next(one for one in measurements if one.name == "open").target == 1.0
