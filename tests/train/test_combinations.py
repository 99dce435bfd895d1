"""Every pair of features: the same bits as without, or rounding within the stated tolerance, or refused with its reason."""

import textwrap
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combination_cases import STEPS, WORK, Outcome, logical, settings_of, together, train_features
from launcher import Ranks

from tierstore.parallel import ExchangeMode
from tierstore.train.combinations import Compatibility, Feature, Pairing, pairing, refusal

DOCUMENT = Path(__file__).parents[2] / "docs/PARALLEL.md"


def test_every_pair_has_one_verdict() -> None:
    found = list(combinations(Feature, 2))
    assert len(found) == 45
    for one, other in found:
        verdict = pairing(one, other)
        assert pairing(one, other) is pairing(other, one) is verdict
        assert verdict.why
        assert (verdict.tolerance > 0) is (verdict.verdict is Compatibility.WITHIN)


def test_the_document_has_the_table() -> None:
    assert as_markdown() in DOCUMENT.read_text(), "docs/PARALLEL.md: put what as_markdown() gives there"


def as_markdown() -> str:
    """The table of verdicts with the numbers of their reasons, and the reasons."""
    columns = list(Feature)[1:]
    reasons: dict[str, int] = {}
    for one, other in combinations(Feature, 2):
        reasons.setdefault(pairing(one, other).why, len(reasons) + 1)
    lines = ["| | " + " | ".join(feature.value for feature in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for row, one in enumerate(list(Feature)[:-1]):
        found = [pairing(one, other) if number >= row else None for number, other in enumerate(columns)]
        cells = [f"{_sign(each)}{reasons[each.why]}" if each else "" for each in found]
        lines.append(f"| {one.value} | " + " | ".join(cells) + " |")
    lines.append("")
    for why, number in reasons.items():
        start = f"{number}. "
        lines += textwrap.wrap(start + why, 100, subsequent_indent=" " * len(start))
    return "\n".join(lines) + "\n"


def _sign(found: Pairing) -> str:
    if found.verdict is Compatibility.WITHIN:
        assert found.tolerance == 2e-5, "the document has one tolerance"
    return {Compatibility.BIT_EQUAL: "=", Compatibility.WITHIN: "~", Compatibility.REFUSED: "refused, "}[
        found.verdict
    ]


def test_what_is_refused_is_found_in_any_company() -> None:
    """Layer order and stages exclude each other, whatever else there is; what is auto asks first."""
    taken = {Feature.NARROW: "adamw.moments", Feature.STAGES: "parallel.stages"}
    why = refusal(taken, Feature.LAYER_MAJOR)
    assert why.startswith("not with parallel.stages (pipeline stages): 1F1B")
    assert refusal(taken, Feature.CHUNKS) is None
    assert refusal(taken, Feature.STAGES) is None


class Runs:
    """Runs with features, each once; those without are references of many."""

    def __init__(self, ranks: Ranks, directory: Path, model: Path, text: Path) -> None:
        self._ranks = ranks
        self._directory = directory
        self._model = model
        self._text = str(text)
        self._stores = 0
        self._known: dict[Any, tuple[Path, list[Outcome]]] = {}

    def run(
        self, features: frozenset[Feature], size: int, parallel: dict[str, Any], **changes: Any
    ) -> tuple[Path, list[Outcome]]:
        """What each of ``size`` ranks came to, laid out as ``parallel`` says, and their store."""
        key = (features, size, *sorted(parallel.items()), *sorted(changes.items()))
        if key not in self._known:
            self._stores += 1
            store = self._directory / f"store{self._stores}"
            settings = settings_of(features, parallel=parallel, text=self._text) | changes
            laid_out = {"exchange": ExchangeMode.FLAT, **parallel}
            if {Feature.TENSOR, Feature.HIERARCHICAL} <= features:  # refused when ranks join, too
                laid_out |= {"exchange": ExchangeMode.FLAT}
            found = self._ranks.run(size, train_features, store, settings, features, self._model, **laid_out)
            self._known[key] = store, [Outcome(*each) for each in found]
        return self._known[key]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of transformers' own."""
    from tiny_families import make_config, plain_model

    directory = tmp_path_factory.mktemp("model")
    plain_model(make_config("qwen3_moe", num_experts=8)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, model: Path, text: Path) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("combinations"), model, text)


def apart(one: Feature, other: Feature) -> tuple[int, dict[str, Any]]:
    """As many ranks with pieces of the batch of their own; one process where work is all that differs."""
    if {one, other} <= WORK.keys():
        return 1, {}
    size, parallel = together((one, other))
    data = size // parallel.get("stages", 1) // parallel.get("tensor", 1)
    # Tensor-parallel groups each have all experts, and so has each rank then.
    return data, {"expert": 1} if parallel.get("tensor", 1) > 1 and data > 1 else {}


PAIRS = [
    pytest.param(one, other, id=f"{one.name}-{other.name}".lower()) for one, other in combinations(Feature, 2)
]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_pair_is_what_the_table_says(runs: Runs, one: Feature, other: Feature) -> None:
    expected = pairing(one, other)
    features = frozenset({one, other})
    store, found = runs.run(features, *together(features))
    if expected.verdict is Compatibility.REFUSED:
        for outcome in found:
            assert expected.why in outcome.refused
            assert not outcome.touched
        return
    assert all(not outcome.refused for outcome in found), found[0].refused
    assert all(outcome.losses == found[0].losses for outcome in found)
    assert len(found[0].losses) == STEPS
    if features <= WORK.keys() and expected.verdict is Compatibility.BIT_EQUAL:
        # Nothing but the budget, and when experts are stepped, is left to differ.
        reference, others = runs.run(features, *together(features), host_budget=8 << 20)
    else:
        reference, others = runs.run(frozenset(features & WORK.keys()), *apart(one, other))
    _compare(expected, (store, found), (reference, others), features)


def _compare(
    expected: Pairing,
    got: tuple[Path, list[Outcome]],
    want: tuple[Path, list[Outcome]],
    features: frozenset[Feature],
) -> None:
    equal = expected.verdict is Compatibility.BIT_EQUAL
    if equal:
        assert got[1][0].losses == want[1][0].losses
    else:
        np.testing.assert_allclose(got[1][0].losses, want[1][0].losses, rtol=expected.tolerance)
    if equal and len(got[1]) == len(want[1]):
        assert [outcome.crc for outcome in got[1]] == [outcome.crc for outcome in want[1]]
    elif Feature.LORA not in features:
        _compare_models(logical(got[0]), logical(want[0]), equal=equal, tolerance=10 * expected.tolerance)


def _compare_models(got: dict[str, Any], want: dict[str, Any], *, equal: bool, tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        if equal:
            assert np.array_equal(got[name], array), name
        elif "/0" in name:  # the weights
            np.testing.assert_allclose(got[name], array, atol=tolerance, err_msg=name)
