"""The study of cache policies: regimes of an npz, traces as they are, and its tables from numbers made by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import policy_study
import pytest
from policy_study import TOPK_REGIMES, StudyOptions, run_study, study_markdown
from studies import outcome, small_study

from tierstore.errors import ConfigError, DataError
from tierstore.lab.generators import RoutingWorkload
from tierstore.lab.importing import write_trace
from tierstore.lab.miss_curves import curves
from tierstore.lab.requests import load_requests
from tierstore.lab.results import Role, Study

pytestmark = pytest.mark.usefixtures("forked_python")

SMALL = StudyOptions(
    capacities=(0.4, 0.7),
    focus=0.4,
    tuned_at=(0.4,),
    half_life_capacities=(0.4,),
    weight_bytes=1000,
    threads=2,
)


def test_an_npz_is_studied_in_its_regimes(tmp_path, monkeypatch):
    workload = RoutingWorkload(layers=2, experts=8, k=2, tokens_per_step=4, steps=24, skew=1, persistence=0.5)
    topk = np.concatenate(list(workload.topk()))
    source = tmp_path / "routing.npz"
    np.savez(source, topk=topk.astype(np.uint8), prompt_len=np.full(8, 12))
    regimes = {
        "decode, 2": {"regime": "decode", "sequences": 2},
        "train, 4": {"regime": "train", "tokens_per_step": 4},
    }
    monkeypatch.setattr(policy_study, "TOPK_REGIMES", regimes)
    said = []
    study = run_study([source], SMALL, said.append)
    assert [regime.name for regime in study.regimes] == list(regimes)
    assert [regime.trace.steps for regime in study.regimes] == [48, 24]
    assert study.regimes[1].trace.total_bytes == 16_000
    assert "train, 4: curves" in said
    for regime in study.regimes:
        assert regime.focus == 0.4
        assert len(regime.curves) == len(regime.layered)
        assert regime.tuned.tuned_steps == regime.trace.steps // 2
        assert regime.against_lru.baseline.policy == "lru"
        assert regime.against_lru.chosen.policy in ("lru", "lfu-decay")
        assert all(len(curve.points) == 2 for curve in regime.curves)
        bound = next(one for one in regime.focused() if one.role is Role.BOUND)
        assert all(bound.misses <= one.misses for one in regime.focused())
    assert not any(one.written_bytes for one in study.regimes[0].focused())
    assert all(one.written_bytes for one in study.regimes[1].focused())


def test_a_regime_that_an_npz_is_too_small_for_is_left_out(tmp_path, monkeypatch):
    workload = RoutingWorkload(layers=2, experts=8, k=2, tokens_per_step=4, steps=6)
    source = tmp_path / "routing.npz"
    np.savez(source, topk=np.concatenate(list(workload.topk())).astype(np.uint8), prompt_len=np.full(2, 12))
    regimes = {
        "decode, 3": {"regime": "decode", "sequences": 3},
        "train, 12": {"regime": "train", "tokens_per_step": 12},
        "train, 4": {"regime": "train", "tokens_per_step": 4},
    }
    monkeypatch.setattr(policy_study, "TOPK_REGIMES", regimes)
    said = []
    study = run_study([source], SMALL, said.append)
    assert [regime.name for regime in study.regimes] == ["train, 4"]
    left_out = [line for line in said if ": left out: " in line]
    assert left_out[0].startswith("decode, 3: ")
    assert "2 prompts cannot fill 3 sequences" in left_out[0]
    assert left_out[1].startswith("train, 12: ")
    assert "expected at least 4 steps, found 2" in left_out[1]
    monkeypatch.setattr(policy_study, "TOPK_REGIMES", {"decode, 3": regimes["decode, 3"]})
    with pytest.raises(DataError, match="cannot fill"):
        run_study([source], SMALL)


def test_a_trace_is_studied_as_it_was_recorded(tmp_path):
    workload = RoutingWorkload(layers=1, experts=12, k=2, tokens_per_step=2, steps=30)
    source = tmp_path / "run.trace"
    write_trace(source, workload.table(), workload.chunks(), origin="a test")
    (regime,) = run_study([source], SMALL).regimes
    assert regime.name == "run"
    assert regime.layered == ()  # one layer has nothing to share
    requests = load_requests(source)
    assert regime.trace.sha256 == requests.sha256
    (lru,) = curves(requests, ["lru"], [0.4])[0].points
    found = next(one for one in regime.focused() if one.policy == "lru")
    assert (found.misses, found.write_backs) == (lru.misses, lru.write_backs)


def test_what_cannot_be_studied(tmp_path):
    (tmp_path / "keys").write_text("1\n2\n")
    with pytest.raises(ConfigError, match=r"keys: expected a trace or an npz with topk; import it first"):
        run_study([tmp_path / "keys"], StudyOptions())
    with pytest.raises(ConfigError, match="focus: expected one of the capacities"):
        StudyOptions(focus=0.35)
    assert len(TOPK_REGIMES) == 9  # and a run of our own is the tenth


@pytest.mark.slow
def test_the_study_of_a_trace_as_its_documentation_calls_it(tmp_path):
    workload = RoutingWorkload(layers=2, experts=6, k=1, tokens_per_step=3, steps=12)
    write_trace(tmp_path / "run.trace", workload.table(), workload.chunks(), origin="a test")
    options = ["run.trace", "--markdown", "study.md", "--html", "study.html", "--threads", "2"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, policy_study.__file__, *options],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout.splitlines()[-1])["regimes"]
    assert found["name"] == "run"
    assert "### Distance from the bound" in (tmp_path / "study.md").read_text()
    assert found["trace"]["sha256"] in (tmp_path / "study.html").read_text()


# Tables -----------------------------------------------------------------------------------------------------


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
