"""Every planted bug is found by the simulated device, and nothing where none is planted."""

from pathlib import Path

import pytest
from effort import share
from launcher import Ranks
from mutants import MUTANTS, Mutant, violations_of

from tierstore.parallel import ParallelConfig


def test_the_list() -> None:
    assert len(MUTANTS) >= 20
    assert sum(mutant.pinned for mutant in MUTANTS) >= 5
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def _broken(
    ranks: Ranks, store: Path, text: Path, mutant: Mutant, number: int | None
) -> list[dict[str, int]]:
    settings = {**mutant.settings, **{f"parallel.{name}": value for name, value in mutant.parallel.items()}}
    with ranks.fresh(mutant.ranks, ParallelConfig(timeout_s=30.0, **mutant.parallel)) as world:
        return world.run(violations_of, store, number, settings, str(text))


TRIED = range(0, len(MUTANTS), len(MUTANTS) // share(len(MUTANTS)))  # all of them in .ci/run


@pytest.mark.parametrize("number", TRIED, ids=[MUTANTS[number].name for number in TRIED])
def test_a_mutant_is_found(simulated_ranks: Ranks, tmp_path: Path, text: Path, number: int) -> None:
    found = _broken(simulated_ranks, tmp_path / "store", text, MUTANTS[number], number)
    assert any(any(each.values()) for each in found), found


@pytest.mark.parametrize(("ranks", "parallel"), [(2, {}), (2, {"expert": 1}), (4, {"expert": 1})])
def test_nothing_is_found_without(
    simulated_ranks: Ranks, tmp_path: Path, text: Path, ranks: int, parallel: dict[str, int]
) -> None:
    mutants = [m for m in MUTANTS if (m.ranks, dict(m.parallel)) == (ranks, parallel)]
    for number, settings in enumerate({str(m.settings): m for m in mutants}.values()):
        assert not any(_broken(simulated_ranks, tmp_path / str(number), text, settings, None))
