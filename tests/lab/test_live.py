"""A recorded run is tuned with the prefetches that it made, through the core that made them."""

from dataclasses import replace

import numpy as np
import pytest
from command_line import invoke
from core_calls import units

from tierstore._native import Residency, StepClock
from tierstore.cache.config import Scope
from tierstore.errors import BudgetError
from tierstore.lab.candidates import Candidate
from tierstore.lab.costs import Objective
from tierstore.lab.requests import load_requests
from tierstore.lab.simulate import Contract, PolicySpec, ReplaySetting, recording_of, replay_recorded
from tierstore.lab.tuning import Hindsight, TuneOptions, tune
from tierstore.trace.files import TraceRecorder, load_trace
from tierstore.trace.replay import STEP_COUNTS, replay, replay_steps

LAYERS, EXPERTS, STEPS = 3, 8, 40
CAPACITY, LOOKAHEAD = 16, 6


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Passes over three layers; each fetches ahead what the next one asks for."""
    path = tmp_path_factory.mktemp("live") / "run.trace"
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, EXPERTS + 1)
    core = Residency(CAPACITY, policy="lru", lookahead_frames=LOOKAHEAD)
    with TraceRecorder(path, core):
        for layer in range(LAYERS):
            for _ in range(EXPERTS):
                core.add_record(layer, [1, 0, 0], [4096, 0, 0], 1)
        for _ in range(STEPS):
            chosen = [
                layer * EXPERTS + np.sort(rng.choice(EXPERTS, 3, replace=False, p=weights / weights.sum()))
                for layer in range(LAYERS)
            ]
            for layer in range(LAYERS):
                groups, _ = core.begin_access(1, layer, *units(chosen[layer]))
                for _ in range(groups):
                    units_served, _, _ = core.next_group()
                    for unit in units_served.tolist():
                        core.end_unit(unit)
                    core.end_group()
                if layer + 1 < LAYERS:
                    core.prefetch(1, layer + 1, *units(chosen[layer + 1]))
            core.end_step()
    return path


def test_steps_add_up_to_the_replay(recorded):
    header = replace(load_trace(recorded).header, policy="lfu-decay", capacity_frames=12, lookahead_frames=4)
    whole, steps = replay(recorded, header), replay_steps(recorded, header)
    assert steps.shape == (STEPS, len(STEP_COUNTS))
    assert dict(zip(STEP_COUNTS, steps.sum(axis=0).tolist(), strict=True)) == {
        name: getattr(whole, name) for name in STEP_COUNTS
    }


def test_the_tuner_scores_with_the_recorded_prefetches(recorded):
    requests = load_requests(recorded)
    recording = recording_of(recorded, requests)
    assert (recording.header.capacity_frames, recording.header.lookahead_frames) == (16, 6)
    assert recording.lookahead_at(8) == 3
    lru = Candidate(PolicySpec("lru"))
    options = TuneOptions(policies=("lru", "fifo"), scopes=(Scope.GLOBAL,), baseline=lru)
    found = tune(requests, 8, options, recording=recording)
    assert found.result.scored == "the recorded prefetches and a lookahead of 3 frames"
    for candidate, outcome in found.ranked:
        header = replace(
            recording.header,
            policy=candidate.policy.name,
            policy_options=candidate.policy.options,
            capacity_frames=8,
            lookahead_frames=3,
        )
        steps = replay_steps(recorded, header)[found.result.tuned_steps :]
        total = dict(zip(STEP_COUNTS, steps.sum(axis=0).tolist(), strict=True))
        assert outcome.read_bytes == total["read_bytes"] == outcome.misses * 4096
        assert outcome.hits + outcome.misses + total["creates"] == outcome.requests
        assert (outcome.lookahead_frames, outcome.steps) == (3, STEPS // 2)
    alone = tune(requests, 8, options)
    assert alone.result.scored == "no lookahead"
    by_name = {outcome.policy: outcome for _, outcome in alone.ranked}
    assert any(outcome.read_bytes != by_name[outcome.policy].read_bytes for _, outcome in found.ranked)


def test_reads_ahead_count_one_each_whatever_their_size(tmp_path):
    """Four records of 1 byte and one of 1 MB, in turns through two frames: each is read ahead, every time."""
    path = tmp_path / "run.trace"
    core = Residency(2, policy="lru", lookahead_frames=1)
    with TraceRecorder(path, core):
        for record in range(5):
            core.add_record(0, [1, 0, 0], [1 if record else 10**6, 0, 0], 1)
        for step in range(40):
            core.prefetch(1, 0, *units([step % 5]))
            core.begin_access(1, 0, *units([step % 5]))
            core.next_group()
            core.end_group()
            core.end_step()
    requests = load_requests(path)
    (replayed,) = replay_recorded(
        requests, recording_of(path, requests), [ReplaySetting(PolicySpec("lru"), 2)], threads=1
    )
    assert replayed.step_misses.tolist() == [1] * 40
    outcome = replayed.outcome(requests, slice(20, None))
    assert (outcome.misses, outcome.hits, outcome.read_bytes) == (20, 0, 4 * 10**6 + 16)


def test_prefetches_of_a_run_without_steps_are_not_scored(tmp_path):
    """Its replay has one step, and each of its accesses is one to the lab."""
    path = tmp_path / "run.trace"
    core = Residency(2, policy="lru", lookahead_frames=1, clock=StepClock.ACCESSES)
    with TraceRecorder(path, core):
        for _ in range(3):
            core.add_record(0, [1, 0, 0], [1, 0, 0], 1)
        for number in range(9):
            core.prefetch(4, 0, *units([number % 3]))
            core.begin_access(4, 0, *units([number % 3]))
            core.next_group()
            core.end_group()
    requests = load_requests(path)
    assert (requests.step_count, recording_of(path, requests)) == (9, None)
    refused = invoke("cache", "simulate", path, "--lookahead", "recorded", "--capacity", "1.0")
    assert refused.exit_code == 2
    assert "has no prefetches of a training run" in refused.stderr


def test_the_grid_is_scored_with_the_prefetches_too(recorded, monkeypatch):
    # Whatever requests alone would say of a candidate, the search does not ask them.
    def refuse(*arguments, **keywords):
        raise AssertionError("a candidate was replayed without the prefetches")

    monkeypatch.setattr("tierstore.lab.tuning.replay_each", refuse)
    requests = load_requests(recorded)
    heard = []
    found = tune(
        requests,
        8,
        TuneOptions(scopes=(Scope.GLOBAL,), hindsight=Hindsight.ALL),
        recording=recording_of(recorded, requests),
        progress=lambda stage, done, total: heard.append(stage),
    )
    assert list(dict.fromkeys(heard)) == ["baseline", "grid", "neighbours"]
    assert len(found.ranked) > 15
    assert found.result.baseline.policy == "next-use"
    assert found.result.regret >= 0


def test_bytes_are_scored_so_and_stalls_are_not(recorded):
    requests = load_requests(recorded)
    recording = recording_of(recorded, requests)
    for changed, lookahead in (
        ({"objective": Objective.BYTES}, True),
        ({"objective": Objective.STALL}, False),
        ({"contract": Contract.SEQUENTIAL}, False),
    ):
        options = TuneOptions(policies=("lru",), **changed)
        found = tune(requests, 8, options, recording=recording)
        assert ("lookahead of 3" in found.result.scored) is lookahead
        assert found.result.gain_low <= found.result.gain <= found.result.gain_high


def test_what_has_no_room_beside_the_prefetches(recorded):
    requests = load_requests(recorded)
    recording = recording_of(recorded, requests)
    settings = [ReplaySetting(PolicySpec("lru"), size, Scope.LAYER) for size in (2, 9)]
    none, one = replay_recorded(requests, recording, settings)
    assert none is None
    assert one is not None
    with pytest.raises(BudgetError, match="too small"):
        tune(
            requests,
            2,
            TuneOptions(policies=("lru",), baseline=Candidate(PolicySpec("lru"), Scope.LAYER)),
            recording=recording,
        )


def test_a_trace_without_prefetches_is_no_recording(recorded, tmp_path):
    path = tmp_path / "plain.trace"
    core = Residency(4, policy="lru", lookahead_frames=2)
    with TraceRecorder(path, core):
        core.add_record(0, [1, 0, 0], [4096, 0, 0], 1)
        core.begin_access(1, 0, *units([0]))
        core.next_group()
        core.end_unit(0)
        core.end_group()
        core.end_step()
    assert recording_of(path, load_requests(path)) is None


def test_the_commands_say_which(recorded):
    def said(*arguments):
        ran = invoke("cache", *arguments)
        return ran.stdout + ran.stderr

    ahead = said("simulate", recorded, "--policy", "lru", "--capacity", "0.34", "--lookahead", "recorded")
    assert "the recorded prefetches" in ahead
    assert "event-atomic, no lookahead, global scope" in said("simulate", recorded, "--policy", "lru")
    assert "event-atomic, no lookahead, global scope" in said("curve", recorded, "--policy", "lru")
    assert "lookahead of 4 frames" in said("tune", recorded, "--capacity", "0.5", "--policy", "lru")
    assert "expected policies, got belady, which no run can use" in said(
        "simulate", recorded, "--policy", "belady", "--lookahead", "recorded"
    )
    assert "expected --contract event-atomic" in said(
        "simulate", recorded, "--contract", "sequential", "--lookahead", "recorded"
    )
