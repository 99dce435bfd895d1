"""Traces of version 2, as the first release wrote them, open and replay to the same counts for ever.

``tests/fixtures/trace-v2.run.trace`` is a small training run (a quota for each layer, kept gradients, write-back
every second step, a validation), ``trace-v2.kinds.trace`` has every kind of event, pins and split accesses among
them. ``trace-v2.json`` says what they held and came to.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tierstore.lab.requests import load_requests
from tierstore.trace.files import TraceWriter, load_trace, read_summary
from tierstore.trace.replay import STEP_COUNTS, replay, replay_steps

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPECTED = json.loads((FIXTURES / "trace-v2.json").read_text())


@pytest.fixture(params=sorted(EXPECTED))
def name(request):
    return request.param


@pytest.fixture
def path(name, tmp_path):
    return Path(shutil.copy(FIXTURES / f"trace-v2.{name}.trace", tmp_path))


def test_it_is_what_it_was(name, path):
    with path.open("rb") as file:
        summary = read_summary(file)
    found = {"sha256": summary.sha256, "events": summary.events, "units": summary.units}
    assert found == {key: EXPECTED[name][key] for key in found}


def test_every_kind_of_event_is_in_it():
    assert set(load_trace(FIXTURES / "trace-v2.kinds.trace").kinds.tolist()) == {*range(11)}, (
        "all of version 2"
    )


def test_it_replays_to_the_same_counts(name, path):
    stats, expected = replay(path), EXPECTED[name]["stats"]
    by_group, by_layer = expected.pop("by_group"), expected.pop("by_layer")
    assert {key: getattr(stats, key) for key in expected} == expected
    assert {key: {"hits": one.hits, "misses": one.misses} for key, one in stats.by_group.items()} == by_group
    assert [{"hits": one.hits, "misses": one.misses} for one in stats.by_layer] == by_layer
    header = load_trace(path).header
    lru = replace(header, policy="lru", policy_options={}, scope="global", layer_quotas=())
    counts = replay_steps(path, lru)
    assert counts[:, : STEP_COUNTS.index("prefetch_reads")].tolist() == EXPECTED[name]["steps"]
    assert header.clock == "steps"


def test_a_study_reads_the_same_requests(name, path):
    requests = load_requests(path)
    found = {
        "events": requests.events,
        "requests": len(requests.entries),
        "steps": requests.step_count,
        "frames": requests.table.total_frames,
        "left_out": requests.left_out,
    }
    assert found == EXPECTED[name]["requests"]


def test_what_is_written_of_it_again_is_the_same_trace(name, path, tmp_path):
    trace = load_trace(path)
    with TraceWriter(tmp_path / "again.trace", trace.header) as writer:
        writer.extend(trace)
    with (tmp_path / "again.trace").open("rb") as file:
        assert read_summary(file).sha256 == EXPECTED[name]["sha256"]
