"""Tokens served from a device with memory of its own: the CPU's, and every access is ordered."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from launcher import Ranks
from served_stores import make_tiny_store, served_store
from torch.nn.attention import SDPBackend, sdpa_kernel

from tierstore.parallel import Mesh
from tierstore.timeline import open_timeline, read_slices

#: Ways to keep experts on the device, by the names of ``served_store``.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "all that is free": {},
    "few slots": {"device_budget": 1 << 15},
    "router guesses": {"device_budget": 1 << 15, "prefetch__predictor": "router"},
    "a ring": {"device_budget": 1 << 20, "ring__memory": "ring"},
    "slots": {"device_budget": 1 << 18},
    "invariant batches": {"device_budget": 1 << 15, "batch__invariant": True},
    "a limited link": {"device_budget": 1 << 15, "links__copy__bandwidth": 1 << 28},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_store(tmp_path_factory.mktemp("served") / "store")


def _tokens(
    mesh: Mesh, store: Path, settings: Mapping[str, Any], timeline: Path | None = None
) -> tuple[list[list[int]], dict[str, int], dict[str, int]]:
    """What two sequences go on with, greedily, and the violations and counts on a simulated device."""
    simulating = mesh.device.type != "cpu"
    if simulating:
        simulated.reset()
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        open_timeline(timeline) as sink,
        served_store(store, device=mesh.device.type, timeline=sink, **settings) as (_, runner),
    ):
        joined = runner.join([[1, 2, 3, 4], [5, 6, 7]])
        tokens = [int(logits_V.argmax()) for logits_V in joined.values()]
        found = [tokens]
        for _ in range(6):
            out = runner.step(dict(zip(joined, tokens, strict=True)))
            tokens = [int(out[number].argmax()) for number in joined]
            found.append(tokens)
    return (found, simulated.violations(), simulated.counts()) if simulating else (found, {}, {})


@pytest.mark.parametrize("way", WAYS)
def test_tokens(ranks: Ranks, simulated_ranks: Ranks, store: Path, way: str) -> None:
    ((expected, _, _),) = ranks.run(1, _tokens, store, WAYS[way])
    ((found, violations, counts),) = simulated_ranks.run(1, _tokens, store, WAYS[way])
    assert not violations
    assert found == expected
    assert counts["h2d.async"] > 0


@pytest.mark.parametrize("way", ["few slots", "a ring"])
def test_a_timeline_shows_when_the_device_works(
    simulated_ranks: Ranks, store: Path, tmp_path: Path, way: str
) -> None:
    """Seven passes, and each copy to a slot; the host waits for the device once more than without, to compare the clocks."""
    ((expected, _, plain),) = simulated_ranks.run(1, _tokens, store, WAYS[way])
    path = tmp_path / "timeline.json"
    ((found, violations, counts),) = simulated_ranks.run(1, _tokens, store, WAYS[way], path)
    assert not violations
    assert found == expected
    waits = [{name: n for name, n in each.items() if name.startswith("sync.")} for each in (plain, counts)]
    assert waits[1] == {**waits[0], "sync.event": waits[0]["sync.event"] + 1}
    slices = read_slices(path)
    passes = [part for part in slices["compute"] if part.name.split()[0] in ("prefill", "decode")]
    assert [part.name for part in passes] == ["prefill 8", *["decode 2"] * 6]
    assert all(one.end <= other.begin for one, other in itertools.pairwise(passes))
    loads = [part for part in slices["device copies"] if part.name == "load weights"]
    assert all(passes[0].begin <= part.end for part in loads)
    assert len(loads) <= counts["h2d.async"]
    assert loads
