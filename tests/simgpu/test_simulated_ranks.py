"""Several ranks, each with a device: the bits of as many ranks on the CPU, and every access is ordered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from combination_cases import LAID_OUT, settings_of
from launcher import Ranks
from training_cases import train_with

from tierstore.train.combinations import Feature


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of transformers' own."""
    from tiny_families import make_config, plain_model

    directory = tmp_path_factory.mktemp("model")
    plain_model(make_config("qwen3_moe", num_experts=8)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name.lower())
def test_a_feature(
    ranks: Ranks, simulated_ranks: Ranks, tmp_path: Path, text: Path, model: Path, feature: Feature
) -> None:
    features = frozenset({feature})
    parallel: dict[str, Any] = dict(LAID_OUT.get(feature, {}))
    size = 4 if "node_ranks" in parallel else 2
    settings = settings_of(features, parallel=parallel, text=str(text))
    expected = ranks.run(size, train_with, tmp_path / "cpu", settings, features, model, **parallel)
    found = simulated_ranks.run(size, train_with, tmp_path / "device", settings, features, model, **parallel)
    assert [violations for _, violations in found] == [{}] * size
    assert [outcome for outcome, _ in found] == [outcome for outcome, _ in expected]
    assert found[0][0][2] == ""
