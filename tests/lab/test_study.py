"""A study from its sources: an npz in its regimes, a trace as it is."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.errors import ConfigError, DataError
from tierstore.lab.generators import RoutingWorkload
from tierstore.lab.importing import write_trace
from tierstore.lab.requests import load_requests
from tierstore.lab.results import Role
from tierstore.lab.simulate import simulate
from tierstore.lab.study import TOPK_REGIMES, StudyOptions, run_study

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
    monkeypatch.setattr("tierstore.lab.study.TOPK_REGIMES", regimes)
    heard = []
    study = run_study([source], SMALL, progress=lambda regime, what: heard.append((regime, what)))
    assert [regime.name for regime in study.regimes] == list(regimes)
    assert [regime.trace.steps for regime in study.regimes] == [48, 24]
    assert study.regimes[1].trace.total_bytes == 16_000
    assert ("train, 4", "curves") in heard
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
    monkeypatch.setattr("tierstore.lab.study.TOPK_REGIMES", regimes)
    heard = []
    study = run_study([source], SMALL, progress=lambda regime, what: heard.append((regime, what)))
    assert [regime.name for regime in study.regimes] == ["train, 4"]
    said = {regime: what for regime, what in heard if what.startswith("left out")}
    assert "2 prompts cannot fill 3 sequences" in said["decode, 3"]
    assert "expected at least 4 steps, found 2" in said["train, 12"]
    monkeypatch.setattr("tierstore.lab.study.TOPK_REGIMES", {"decode, 3": regimes["decode, 3"]})
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
    (lru,) = simulate(requests, ["lru"], [0.4])
    found = next(one for one in regime.focused() if one.policy == "lru")
    assert (found.misses, found.write_backs) == (lru.misses, lru.write_backs)


def test_what_cannot_be_studied(tmp_path):
    (tmp_path / "keys").write_text("1\n2\n")
    with pytest.raises(ConfigError, match=r"keys: expected a trace or an npz with topk; import it first"):
        run_study([tmp_path / "keys"])
    with pytest.raises(ConfigError, match="focus: expected one of the capacities"):
        StudyOptions(focus=0.35)
    assert len(TOPK_REGIMES) == 9  # and a run of our own is the tenth
