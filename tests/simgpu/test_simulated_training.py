"""tierstore trains on a device with memory of its own: the CPU's bits, and every access is ordered."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import Ranks
from rank_cases import TINY
from training_cases import WAYS, train

from tierstore.config import load
from tierstore.train.config import TrainConfig


@pytest.mark.parametrize("way", WAYS)
def test_one_device(ranks: Ranks, simulated_ranks: Ranks, tmp_path: Path, text: Path, way: str) -> None:
    ((expected, _, _),) = ranks.run(1, train, tmp_path / "cpu", WAYS[way], str(text))
    ((found, violations, counts),) = simulated_ranks.run(1, train, tmp_path / "device", WAYS[way], str(text))
    assert not violations
    assert found == expected
    expert = load(TrainConfig, None, TINY).model.expert_shape.numel * 4
    # Every copy that does not block is that of an expert, from pinned memory.
    pinned = counts["h2d.bytes"] - counts["h2d.pageable_bytes"]
    assert pinned == counts["h2d.async"] * expert > 0
