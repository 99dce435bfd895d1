"""The tuner finds what is best where that is known, says tie where nothing is, and looks at the prefix only."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cases import requests_of

from tierstore._native import Oversized, lfu_decay_options
from tierstore.cache.config import CacheConfig, Scope
from tierstore.config import load
from tierstore.lab.candidates import (
    SIMPLEST_FIRST,
    Candidate,
    cache_configuration,
    configuration_text,
    default_candidate,
    half_lives,
    lfu_decay,
    live_policies,
    neighbours,
)
from tierstore.lab.costs import Machine, Objective
from tierstore.lab.miss_curves import survey
from tierstore.lab.results import TuneVerdict
from tierstore.lab.simulate import PolicySpec, known_policies
from tierstore.lab.tuning import Hindsight, TuneOptions, tune
from tierstore.trace.replay import quotas_by_layer
from tierstore.train.config import TrainConfig

STEPS, EACH = 400, 50
CHEAP = ("lru", "lfu-decay")


def single(entries, **columns):
    """One request an event, 50 events a step."""
    return requests_of([[int(entry)] for entry in entries], steps=np.arange(len(entries)) // EACH, **columns)


def walk(seed=0):
    """Neighbours of what was asked for last: recency is everything."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.integers(-2, 3, STEPS * EACH)) % 1000


def scans(seed=0):
    """A hot set, and a scan of 2000 entries that never come back in time."""
    rng = np.random.default_rng(seed)
    count = STEPS * EACH
    return np.where(rng.random(count) < 0.4, rng.integers(0, 50, count), 50 + np.arange(count) % 2000)


def test_requests_that_are_all_alike_are_a_tie():
    found = tune(
        single(np.random.default_rng(1).integers(0, 200, 10 * STEPS * EACH)), 0.3, TuneOptions(policies=CHEAP)
    )
    assert found.result.verdict is TuneVerdict.TIE
    assert found.result.gain_low <= 0 <= found.result.gain_high
    assert found.chosen == Candidate(PolicySpec("lru"))  # the simplest


def test_recency_wants_lru():
    found = tune(single(walk()), 0.05, TuneOptions(policies=CHEAP))
    assert found.chosen.policy.name == "lru"
    assert found.result.verdict is TuneVerdict.BETTER
    assert found.result.baseline.policy == "lfu-decay"
    assert found.result.gain == pytest.approx(
        found.result.baseline.miss_ratio - found.result.chosen.miss_ratio
    )
    assert found.result.gain_low <= found.result.gain <= found.result.gain_high
    assert found.result.regret < 0.01


def test_scans_want_frequency():
    found = tune(single(scans()), 0.05, TuneOptions(policies=CHEAP, baseline=Candidate(PolicySpec("lru"))))
    assert found.chosen.policy.name == "lfu-decay"
    assert found.result.verdict is TuneVerdict.BETTER
    assert found.result.gain > 0.1
    assert found.result.regret < 0.01
    assert found.result.chosen.steps == found.result.baseline.steps == STEPS // 2
    assert found.result.tuned_steps == STEPS // 2


def test_the_choice_looks_at_the_prefix_only():
    first, second = scans()[: STEPS * EACH // 2], walk(1)[: STEPS * EACH // 2]
    whole = tune(single(scans()), "100f", TuneOptions(policies=CHEAP))
    turned = tune(single(np.concatenate((first, second))), "100f", TuneOptions(policies=CHEAP))
    assert turned.chosen == whole.chosen
    assert turned.result.regret > 0.2


def test_the_advice_is_of_the_prefix():
    first, second = scans()[: STEPS * EACH // 2], np.zeros(STEPS * EACH // 2, np.int64)
    requests = single(np.concatenate((first, second)))
    found = tune(requests, "100f", TuneOptions(policies=CHEAP, prefix=0.25))
    assert found.regime == survey(requests.between(0, STEPS // 4), 100)


def test_starvation_is_said_with_the_configuration(monkeypatch):
    monkeypatch.setattr("tierstore.lab.tuning.neighbours", lambda candidate: iter(()))
    starving = Candidate(lfu_decay(16, 0.5))
    found = tune(single(scans()), 0.05, TuneOptions(policies=("fifo",), baseline=starving))
    assert found.chosen == starving
    assert found.result.warning == cache_configuration(starving).starvation_warning
    assert tune(single(walk()), 0.05, TuneOptions(policies=("lru",))).result.warning is None


def test_hindsight_over_everything_that_was_tried():
    first, second = scans()[: STEPS * EACH // 2], walk(1)[: STEPS * EACH // 2]
    requests = single(np.concatenate((first, second)))
    policies = (*CHEAP, "lfu", "w-tinylfu", "s3-fifo", "lirs")
    finalists = tune(requests, "100f", TuneOptions(policies=policies))
    everything = tune(requests, "100f", TuneOptions(policies=policies, hindsight=Hindsight.ALL))
    assert everything.chosen == finalists.chosen
    assert everything.result.best.misses < finalists.result.best.misses
    assert everything.result.regret > finalists.result.regret
    assert everything.result.best_of == "the best tried in hindsight"
    assert finalists.result.best_of == "the best of the finalists in hindsight"
    assert len(everything.ranked) > len(finalists.ranked)


def test_an_uneven_model_gets_uneven_quotas():
    rng = np.random.default_rng(0)
    events, layers = [], []
    for step in range(800):
        events += [[step % 4], [4 + int(rng.integers(40))]]
        layers += [0, 2]
    requests = requests_of(events, layers=layers, steps=np.repeat(np.arange(800), 2))
    found = tune(requests, "6f", TuneOptions(policies=("lru",), scopes=(Scope.LAYER,)))
    assert found.chosen.layer_quotas == (4, 0, 2)
    assert "layer_shares = [0.666666667, 0.333333333]" in found.result.configuration


@pytest.mark.parametrize("percent", range(1, 6))
def test_small_capacities(percent):
    # Four layers of 64: 2, 5, 7, 10 and 12 frames. From 8 on each layer has room of its own.
    rng = np.random.default_rng(0)
    events = [
        (layer * 64 + np.sort(rng.choice(64, 6, replace=False))).tolist()
        for _ in range(40)
        for layer in range(4)
    ]
    requests = requests_of(events, layers=list(range(4)) * 40, steps=np.repeat(np.arange(40), 4))
    found = tune(requests, percent / 100, TuneOptions(policies=("lru",), hindsight=Hindsight.ALL))
    layered = [one for one, _ in found.ranked if one.scope is Scope.LAYER]
    assert bool(layered) is (percent >= 4)
    assert all(sum(one.layer_quotas) in (0, percent * 256 // 100) for one in layered)


def test_objectives():
    # Two loops that do not fit together; the entries of one are dirty, and cost a write each.
    count = STEPS * EACH
    entries = scans()
    writes = [[int(entry < 50)] for entry in entries]
    requests = single(entries, writes=writes, frame_bytes=1 << 20)
    machine = Machine(read_bytes_per_s=1e9, write_bytes_per_s=1e8)
    for objective in Objective:
        found = tune(requests, 0.04, TuneOptions(policies=CHEAP, objective=objective), machine=machine)
        result = found.result
        assert result.objective == objective.value
        assert result.cost(result.best) <= result.cost(result.chosen)
        assert result.gain_low <= result.gain <= result.gain_high
    saved = result.baseline.stall_s_per_step - result.chosen.stall_s_per_step
    assert result.gain == pytest.approx(saved)
    assert result.chosen.requests == count // 2


def test_progress_is_heard_by_stage():
    heard = []
    tune(single(walk()), 0.1, TuneOptions(policies=CHEAP), progress=lambda *args: heard.append(args))
    stages = list(dict.fromkeys(stage for stage, _, _ in heard))
    assert stages == ["grid", "neighbours", "prefix", "rest"]
    assert all(1 <= done <= total for _, done, total in heard)


def test_equal_seeds_tune_equally():
    one, other = (tune(single(scans()), 0.05, TuneOptions(threads=threads)) for threads in (1, 4))
    assert one.chosen == other.chosen
    assert (one.result.gain_low, one.result.gain_high) == (other.result.gain_low, other.result.gain_high)


def test_an_imported_trace_is_tuned_below_its_largest_entry():
    """A cache that holds all but the largest: what is chosen keeps the others, and the largest passes by."""
    events = [[0], [1], [2]] * 40
    imported = replace(requests_of(events, sizes=[1, 1, 9]), oversized=Oversized.BYPASS)
    found = tune(imported, "2f", TuneOptions(policies=("lru", "fifo"), scopes=(Scope.GLOBAL,)))
    assert all(
        (outcome.hits, outcome.misses, outcome.not_admitted) == (40, 20, 20) for _, outcome in found.ranked
    )


def test_stalls_are_chosen_by_the_latency_of_each_read():
    """LFU misses a third less than FIFO here, and reads more bytes, as it keeps the small entries."""
    rng = np.random.default_rng(24)
    chances, keys = rng.random(14), []
    chances /= chances.sum()
    while len(keys) < 4000:
        large = rng.random() < 0.3
        keys += [*range(10, 14)][: rng.integers(1, 5)] if large else rng.choice(14, 8, p=chances).tolist()
    requests = requests_of(
        [[key] for key in keys[:4000]], sizes=[*[1] * 10, *[5] * 4], steps=np.repeat(np.arange(400), 10)
    )
    options = {
        "policies": ("fifo", "lfu"),
        "scopes": (Scope.GLOBAL,),
        "baseline": Candidate(PolicySpec("fifo")),
    }
    by_bytes = tune(requests, "12f", TuneOptions(objective=Objective.BYTES, **options))
    assert by_bytes.chosen.policy.name == "fifo"
    by_stall = tune(requests, "12f", TuneOptions(objective=Objective.STALL, **options))
    assert (by_stall.chosen.policy.name, by_stall.result.verdict) == ("lfu", TuneVerdict.BETTER)
    for _, outcome in by_stall.ranked:  # at 100 us a read; the bytes take next to nothing
        assert outcome.stall_s_per_step == pytest.approx(100e-6 * outcome.misses / outcome.steps, rel=1e-3)


# Candidates --------------------------------------------------------------------------------------------------


def test_policies_without_a_rank_come_last():
    known = known_policies(bounds=False)
    assert live_policies()[: len(SIMPLEST_FIRST)] == SIMPLEST_FIRST
    assert sorted(live_policies()) == sorted(known)
    assert Candidate(PolicySpec("lru")).complexity < Candidate(PolicySpec("learned-use")).complexity


def test_the_default_is_the_trainer_s():
    passes = requests_of([[0, 1], [2, 3]] * 4, layers=[0, 1] * 4)
    assert cache_configuration(default_candidate(passes)) == TrainConfig().cache
    assert default_candidate(passes).policy == PolicySpec("next-use")
    # Plain keys come from no training: what a store does by itself.
    config, default = cache_configuration(default_candidate(requests_of([[0], [1]]))), CacheConfig()
    assert (config.policy, config.scope, config.layer_shares) == (default.policy, default.scope, ())
    assert lfu_decay_options(dict(config.options)).beta == lfu_decay_options(dict(default.options)).beta
    assert (
        lfu_decay_options(dict(config.options)).interval == lfu_decay_options(dict(default.options)).interval
    )


def test_passes_are_tuned_against_what_train_does():
    rng = np.random.default_rng(0)
    events = [
        (layer * 16 + np.sort(rng.choice(16, 3, replace=False))).tolist()
        for _ in range(60)
        for layer in range(3)
    ]
    requests = requests_of(events, layers=list(range(3)) * 60, steps=np.repeat(np.arange(60), 3))
    found = tune(requests, 0.4, TuneOptions(policies=("lru", "next-use"), scopes=(Scope.GLOBAL,)))
    assert found.result.baseline.label == "next-use"
    tried = {one.policy.options.get("half_life") for one, _ in found.ranked if one.policy.name == "next-use"}
    assert None in tried


def test_the_grid_of_half_lives():
    assert half_lives(100) == [1, 4, 16, 64, math.inf]
    near = list(neighbours(Candidate(lfu_decay(16))))
    tried = [one.policy.options["half_life"] for one in near]
    forgetful = [16 / 8**0.5, 8, 16 / 2**0.5, 16 * 2**0.5, 32, 16 * 8**0.5, 16, 16]
    assert tried == pytest.approx([*forgetful, 16, 8, 32])
    assert [one.policy.options.get("remember", 0.0) for one in near] == [0.0] * 8 + [1.0] * 3
    assert all(one.key != Candidate(lfu_decay(16)).key for one in near)
    assert list(neighbours(Candidate(PolicySpec("lru")))) == []
    cycles = neighbours(Candidate(PolicySpec("next-use", {"half_life": 8.0}), Scope.LAYER))
    assert [(one.policy.options["half_life"], one.scope) for one in cycles] == [
        (4, Scope.LAYER),
        (16, Scope.LAYER),
    ]
    assert list(neighbours(Candidate(PolicySpec("next-use")))) == []


@pytest.mark.parametrize("half_life", [0.5, 1, 2.8, 8, 512, math.inf])
def test_a_candidate_s_configuration_is_what_train_takes(tmp_path, half_life):
    requests = requests_of([[0, 1], [2, 3, 4, 5]], layers=[0, 2])
    candidate = Candidate(lfu_decay(half_life, 1.0), Scope.LAYER, (2, 0, 3))
    path = tmp_path / "run.toml"
    path.write_text(configuration_text(requests, candidate, 5))
    cache = load(TrainConfig, path).cache
    assert cache == cache_configuration(candidate)
    assert cache.options == candidate.policy.options
    assert cache.half_life == pytest.approx(half_life)
    assert quotas_by_layer([0, 2], 5, cache.layer_shares) == [2, 0, 3]


def test_a_policy_that_train_does_not_run_is_said():
    assert cache_configuration(Candidate(PolicySpec("belady"))) is None
    text = configuration_text(requests_of([[0]]), Candidate(PolicySpec("belady")), 1)
    assert "belady is not a policy of tierstore train" in text
    assert all(line.startswith("#") for line in text.splitlines())
