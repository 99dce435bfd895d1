"""Training whose rows go in two steps: the bits of the flat exchange, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher import Ranks
from rank_cases import Settings, attempt, train

from tierstore.parallel import Collective, ExchangeMode, Mesh, ParallelConfig
from tierstore.train.ranks import Opening

#: Four ranks on two nodes.
NODES: dict[str, Any] = {"exchange": ExchangeMode.HIERARCHICAL, "node_ranks": 2}

MODES: dict[str, Settings] = {
    "immediate": {},
    "clip, micro-batches": {"clip_norm": 0.5, "data.micro_batches": 2},
    "layer order": {"data.micro_batches": 3, "data.micro_order": "layer", "host_budget": 60_000},
    "activations again": {"model.checkpoint_activations": "block", "host_budget": 60_000},
    "chunks": {"parallel.pipeline_degree": 3, "model.experts": 12, "data.micro_batches": 2},
    # Ranks without rows, and without experts.
    "few": {"model.experts": 3, "model.top_k": 1, "model.seq_len": 4},
}


def _train(mesh: Mesh, settings: Settings, steps: int) -> tuple[Any, int]:
    """What ``train`` found, and how many messages of rows went to another node."""
    before = mesh.traffic()[Collective.ALL_TO_ALL].node_messages
    found = train(mesh, settings, steps, Opening.CREATE)
    return found, mesh.traffic()[Collective.ALL_TO_ALL].node_messages - before


@pytest.mark.parametrize(
    "mode",
    [name if name == "few" else pytest.param(name, marks=pytest.mark.slow) for name in MODES],
)
def test_training_has_the_bits_of_the_flat_exchange(
    ranks: Ranks, settings: Callable[..., dict[str, Any]], mode: str
) -> None:
    """Losses, norms and records of 4 ranks on 2 nodes; between nodes go at most half as many messages."""
    changes = MODES[mode]
    flat = ranks.run(4, _train, settings(changes), 3, exchange=ExchangeMode.FLAT, node_ranks=2)
    two_steps = ranks.run(4, _train, settings(changes), 3, **NODES)
    assert [found for found, _ in two_steps] == [found for found, _ in flat]
    assert 0 < sum(sent for _, sent in two_steps) < sum(sent for _, sent in flat)


def _commit_every_step(mesh: Mesh, settings: Settings, steps: int) -> tuple[list[float], list[float], int]:
    return train(attempt(mesh, settings["store"]), settings, steps, Opening.RESTART, commit_every=1)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3])
def test_kills_change_no_bit(
    ranks: Ranks, settings: Callable[..., dict[str, Any]], tmp_path: Path, kills: int
) -> None:
    """Of random ranks at random moments, each followed by a resume; then the bits of an undisturbed flat run."""
    steps = 12
    started = time.monotonic()
    expected = ranks.run(4, train, settings({}), steps, Opening.CREATE, exchange=ExchangeMode.FLAT)
    longest = max(0.5, time.monotonic() - started)
    random_, store, done = random.Random(5), settings({}), 0
    parallel = ParallelConfig(timeout_s=30.0, grace_s=2.0, **NODES)
    while True:
        with ranks.fresh(4, parallel, tmp_path / "stderr") as world:
            for rank in range(4):
                world.send(rank, _commit_every_step, store, steps)
            if done == kills:
                found = [world.receive(rank) for rank in range(4)]
                break
            deadline = time.monotonic() + random_.uniform(0.05, longest)
            finished = all(c.poll(max(deadline - time.monotonic(), 0)) for c in world.connections)
            if finished:  # too late to disturb it
                store = settings({})
                continue
            os.kill(world.pids[random_.randrange(4)], signal.SIGKILL)
            world.end()
            codes = [ranks.exit_code(pid) for pid in world.pids]
            assert -signal.SIGKILL in codes
            done += 1
    for rank in range(4):
        kept = found[rank][0]
        assert kept == expected[rank][0][steps - len(kept) :]
        assert found[rank][2] == expected[rank][2]
