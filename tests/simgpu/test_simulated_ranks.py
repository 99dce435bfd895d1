"""Several ranks, each with a device: the bits of as many ranks on the CPU, and every access is ordered."""

from collections.abc import Collection, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from combination_cases import settings_of, together
from effort import share
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
    _compare(ranks, simulated_ranks, tmp_path, text, model, frozenset({feature}))


def largest(features: Collection[Feature]) -> list[frozenset[Feature]]:
    """The sets of ``features`` that the table allows together and that are part of no larger one."""
    allowed = [
        frozenset(found)
        for size in range(1, len(features) + 1)
        for found in combinations(features, size)
        if all(pairing(*pair).verdict is not Compatibility.REFUSED for pair in combinations(found, 2))
    ]
    return [found for found in allowed if not any(found < other for other in allowed)]


#: LoRA freezes what a model of transformers trains otherwise, so each set with it is there without it, too.
SETS = [found for found in largest(Feature) if Feature.LORA in found] + largest(
    [feature for feature in Feature if feature is not Feature.LORA]
)


def test_every_pair_is_in_a_set() -> None:
    missing = [
        pair
        for pair in combinations(Feature, 2)
        if pairing(*pair).verdict is not Compatibility.REFUSED and not any(found >= {*pair} for found in SETS)
    ]
    assert not missing
    assert len(SETS) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    SETS[: share(len(SETS))],
    ids=lambda found: "-".join(each.name.lower() for each in Feature if each in found),
)
def test_features_together(
    ranks: Ranks,
    simulated_ranks: Ranks,
    tmp_path: Path,
    text: Path,
    model: Path,
    features: frozenset[Feature],
) -> None:
    _compare(ranks, simulated_ranks, tmp_path, text, model, features)


def _compare(
    ranks: Ranks,
    simulated_ranks: Ranks,
    tmp_path: Path,
    text: Path,
    model: Path,
    features: frozenset[Feature],
) -> None:
    size, parallel = together(features)
    settings = settings_of(features, parallel=parallel, text=str(text))
    expected = ranks.run(size, train_with, tmp_path / "cpu", settings, features, model, **parallel)
    found = simulated_ranks.run(size, train_with, tmp_path / "device", settings, features, model, **parallel)
    assert [violations for _, violations in found] == [{}] * size
    assert [outcome for outcome, _ in found] == [outcome for outcome, _ in expected]
    assert found[0][0][2] == ""
