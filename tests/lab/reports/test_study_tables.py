"""Tables of a study, from numbers made by hand."""

from __future__ import annotations

from dataclasses import replace

from studies import outcome, small_study

from tierstore.lab.reports.study_tables import study_markdown
from tierstore.lab.results import Role, Study


def tables(text):
    """Each table under its heading: rows of cells, without the rule."""
    found = {}
    for part in text.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("|")]
        assert all(len(row) == len(rows[0]) for row in rows[2:]), title
        found[title] = [rows[0], *rows[2:]]
    return found


def test_every_table_by_hand():
    regime = small_study().regimes[0]
    layered = (outcome("lru", 0.4, 620), outcome("belady", 0.4, 610, role=Role.BOUND))
    regime = replace(regime, layered=layered, against_lru=regime.tuned, elsewhere=(regime.tuned,))
    text = study_markdown(Study(title="", regimes=(regime, replace(regime, name="again", layered=()))))
    found = tables(text)
    assert found["Miss ratio, one cache for all layers"][1:] == [
        ["lru", ".5000", ".5000"],
        ["lfu-decay", "**.4500**", "**.4500**"],
        ["belady", ".3000", ".3000"],
    ]
    assert found["Miss ratio, a quota for each layer"] == [
        ["policy", "training, <16> tokens"],
        ["lru", "**.6200**"],
        ["belady", ".6100"],
    ]
    assert found["Distance from the bound"][1][1:] == [
        ".3000",
        "lfu-decay",
        "+0.1500",
        "+0.2000",
        "+0.1500",
        "-",
    ]
    assert found["Written back, MB a step"][1] == ["lru", "10", "10"]
    assert found["Read and written, MB a step"][1] == ["lru", "63", "63"]
    assert found["LFU-decay tuned on the first half, against LRU on the second"][1][1:] == [
        "lfu-decay",
        ".2500",
        ".2250",
        "+0.0250 (+0.0100 to +0.0400)",
        "better",
    ]
    choices = found["The tuner's choice on the first half, scored on the second"]
    assert choices[1][0] == "training, <16> tokens, 40%"
    assert choices[1][6] == "2.27%"
    assert len(choices) == 5
    near = "Within 1% of the best tried, in hindsight: 0 of 4 cases; 0 of 2 regimes, at every capacity."
    assert near in text
    assert found["Miss ratio over capacity"][:5] == [
        ["regime, policy", "20%", "40%", "60%"],
        ["training, <16> tokens: lru", ".7000", ".5000", ".3000"],
        ["training, <16> tokens: lfu-decay", ".6500", ".4500", ".2500"],
        ["training, <16> tokens: best", ".6500", ".4500", ".2500"],
        ["training, <16> tokens: bound", ".5000", ".3000", ".1000"],
    ]


def test_what_is_no_bound_is_not_called_one():
    regime = small_study().regimes[0]
    *policies, belady = regime.curves
    points = [replace(point, role=Role.CLAIRVOYANT) for point in belady.points[:2]]
    wide = replace(belady, points=(*points, belady.points[2]))
    text = study_markdown(Study(title="", regimes=(replace(regime, curves=(*policies, wide)),)))
    found = tables(text)
    assert found["Miss ratio, one cache for all layers"][-1] == ["belady (clairvoyant)", ".3000"]
    assert found["Distance from the bound"][1][1:4] == ["no bound; clairvoyant .3000", "lfu-decay", "+0.1500"]
    assert found["Miss ratio over capacity"][4:] == [
        ["training, <16> tokens: bound", "-", "-", ".1000"],
        ["training, <16> tokens: clairvoyant", ".5000", ".3000", "-"],
    ]


def test_what_was_not_asked_for_has_no_table():
    regime = replace(small_study(writes=0).regimes[0], tuned=None, half_lives=None)
    found = tables(study_markdown(Study(title="", regimes=(regime,))))
    assert "Written back, MB a step" not in found
    assert "Miss ratio, a quota for each layer" not in found
    assert "The tuner's choice on the first half, scored on the second" not in found
    assert "LFU-decay tuned on the first half, against LRU on the second" not in found
    assert tables(study_markdown(Study(title="", regimes=()))) == {}
