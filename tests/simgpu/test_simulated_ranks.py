"""Several ranks, each with a device: the bits of as many ranks on the CPU, and every access is ordered."""

from collections.abc import Mapping
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


#: What the table allows together. A run with LoRA has a model of transformers, whose weights it freezes: with another
#: feature, each of the two is tried.
PAIRS = {
    frozenset(pair)
    for pair in combinations(Feature, 2)
    if pairing(*pair).verdict is not Compatibility.REFUSED and pair != (Feature.LORA, Feature.WRAPPED)
}


def covering() -> list[frozenset[Feature]]:
    """Sets of features that are allowed together, as large as can be, until every pair is in one."""
    allowed = [
        (frozenset(found), pairs)
        for size in range(2, len(Feature) + 1)
        for found in combinations(Feature, size)
        if (pairs := {*map(frozenset, combinations(found, 2))}) <= PAIRS
    ]
    missing, sets = PAIRS, []
    while missing:
        found, pairs = max(allowed, key=lambda each: (len(each[1] & missing), len(each[0])))
        sets.append(found)
        missing = missing - pairs
    return sets


SETS = covering()


def test_every_pair_is_in_a_set() -> None:
    assert len(PAIRS) == 38
    assert all(any(pair <= found for found in SETS) for pair in PAIRS)
    assert frozenset().union(*SETS[:3]) == {*Feature}
    assert len(SETS) < 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    SETS[: max(share(len(SETS)), 3)],  # in which every feature is
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
    size, parallel = together(features)
    settings = settings_of(features, parallel=parallel, text=str(text))
    expected = ranks.run(size, train_with, tmp_path / "cpu", settings, features, model, **parallel)
    found = simulated_ranks.run(size, train_with, tmp_path / "device", settings, features, model, **parallel)
    assert [violations for _, violations in found] == [{}] * size
    assert [outcome for outcome, _ in found] == [outcome for outcome, _ in expected]
    assert found[0][0][2] == ""
