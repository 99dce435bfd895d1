"""Several ranks, each with a device: the bits of as many ranks on the CPU, and every access is ordered."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from combination_cases import settings_of, together
from effort import THOROUGH, share
from launcher import Ranks
from training_cases import check_counts, train, train_with

from tierstore.train.combinations import Compatibility, Feature, pairing

#: Two ranks, each with half of the experts.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole layers": {},
    "chunks": {"parallel.pipeline_degree": 2},
    "parts of experts": {"parallel.pipeline_degree": 8},
    "capacity": {"model.capacity_factor": 1.0},
    "dense on the host": {
        "dense.optimizer_state": "host",
        "data.micro_batches": 2,
        "data.micro_order": "layer",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_experts_of_two_ranks(
    ranks: Ranks, simulated_ranks: Ranks, tmp_path: Path, text: Path, way: str
) -> None:
    expected = ranks.run(2, train, tmp_path / "cpu", WAYS[way], str(text))
    found = simulated_ranks.run(2, train, tmp_path / "device", WAYS[way], str(text))
    assert [violations for _, violations, _ in found] == [{}, {}]
    assert [outcome for outcome, _, _ in found] == [outcome for outcome, _, _ in expected]
    for _, _, counts in found:
        check_counts(counts, WAYS[way])


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
    _compare(ranks, simulated_ranks, tmp_path, text, model, feature, feature)


#: In .ci/run all that the table allows.
PAIRS = [
    pytest.param(one, other, id=f"{one.name}-{other.name}".lower())
    for one, other in combinations(Feature, 2)
    if pairing(one, other).verdict is not Compatibility.REFUSED
]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), PAIRS if share(THOROUGH) == THOROUGH else PAIRS[:1])
def test_a_pair(
    ranks: Ranks,
    simulated_ranks: Ranks,
    tmp_path: Path,
    text: Path,
    model: Path,
    one: Feature,
    other: Feature,
) -> None:
    _compare(ranks, simulated_ranks, tmp_path, text, model, one, other)


def _compare(
    ranks: Ranks,
    simulated_ranks: Ranks,
    tmp_path: Path,
    text: Path,
    model: Path,
    one: Feature,
    other: Feature,
) -> None:
    features = frozenset({one, other})
    size, parallel = together(one, other)
    settings = settings_of(features, parallel=parallel, text=str(text))
    expected = ranks.run(size, train_with, tmp_path / "cpu", settings, features, model, **parallel)
    found = simulated_ranks.run(size, train_with, tmp_path / "device", settings, features, model, **parallel)
    assert [violations for _, violations in found] == [{}] * size
    assert [outcome for outcome, _ in found] == [outcome for outcome, _ in expected]
    assert found[0][0][2] == ""
