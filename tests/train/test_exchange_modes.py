"""Training whose rows go in two steps: the bits of the flat exchange. Kills: test_rank_kills."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import Ranks
from rank_cases import Make, Settings, train

from tierstore.parallel import Collective, ExchangeMode, Mesh
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
def test_training_has_the_bits_of_the_flat_exchange(ranks: Ranks, settings: Make, mode: str) -> None:
    """Losses, norms and records of 4 ranks on 2 nodes; between nodes go at most half as many messages."""
    changes = MODES[mode]
    flat = ranks.run(4, _train, settings(changes), 3, exchange=ExchangeMode.FLAT, node_ranks=2)
    two_steps = ranks.run(4, _train, settings(changes), 3, **NODES)
    assert [found for found, _ in two_steps] == [found for found, _ in flat]
    assert 0 < sum(sent for _, sent in two_steps) < sum(sent for _, sent in flat)
