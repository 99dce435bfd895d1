"""``prefetch.predictor = "router"`` in runs: the same bits, the same decisions in a replay, on ranks and after a resume."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from launcher import Ranks
from rank_cases import alone, guessed, train

from tierstore.config import load
from tierstore.prefetch import PredictorName
from tierstore.trace.replay import replay
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

Make = Callable[[Mapping[str, Any]], TrainConfig]
Least = Callable[[TrainConfig], int]

#: Few tokens and many experts, so that guesses matter.
FEW = {"model.n_layers": 4, "model.top_k": 1, "data.batch_size": 1, "steps": 8, "prefetch.depth": 2}
LAYER = {"data.micro_batches": 2, "data.micro_order": "layer"}
MODES: dict[str, Mapping[str, Any]] = {
    "immediate": {},
    "clip": {"clip_norm": 0.5, "data.micro_batches": 2},
    "checkpoint": {"model.checkpoint_activations": "block"},
    "layer order": {"data.micro_batches": 3, "data.micro_order": "layer"},
    "bf16": {"model.compute_dtype": "bf16", "prefetch.guesses": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_and_a_replay_decides_alike(
    mode: str, configure: Make, least: Least, tmp_path: Path
) -> None:
    found = []
    for name in (PredictorName.NONE, PredictorName.ROUTER):
        changes = {**FEW, **MODES[mode], "prefetch.predictor": name}
        config = configure({**changes, "host_budget": 3 * least(configure(changes))})
        trace = tmp_path / f"{name.value}.trace"
        with open_session(config, Opening.CREATE, trace=trace) as trainer:
            losses = [trainer.step().loss for _ in range(config.steps)]
            trainer.evaluate()
            text = trainer.sample("def", 4)
            trainer.commit()
            found.append((losses, text, trainer.store.records_crc32c()))
            live, counts = trainer.store.cache.residency.stats(), trainer.experts.guesses
        assert live.evictions
        assert replay(trace) == live
        assert (counts.guessed > 0) is (name is PredictorName.ROUTER)
        assert 0 <= counts.right <= min(counts.used, counts.guessed)
    assert found[0] == found[1]


def test_a_resumed_run_has_the_same_bits_and_the_same_decisions_each_time(
    configure: Make, least: Least
) -> None:
    """Copies of routers are not kept in a commit: in its first pass a resumed run guesses from history, as a new one
    does. From the same commit it takes the same decisions every time.
    """
    changes = {**FEW, "prefetch.predictor": "router"}
    config = configure({**changes, "host_budget": 3 * least(configure(changes))})
    with open_session(config, Opening.CREATE) as trainer:
        for _ in range(3):
            trainer.step()
        trainer.commit()
        straight = [trainer.step().loss for _ in range(3)]
    resumed = []
    for _ in range(2):
        with open_session(config, Opening.RESUME) as trainer:
            losses = [trainer.step().loss for _ in range(3)]
            counts = trainer.experts.guesses
            stats = trainer.store.cache.residency.stats()
            resumed.append((losses, (counts.used, counts.guessed, counts.right), stats))
    assert resumed[0] == resumed[1]
    assert resumed[0][0] == straight


@pytest.mark.parametrize(("expert", "order"), [(0, {}), (1, {}), (1, LAYER)])
def test_two_ranks_guess_what_both_of_them_need(
    ranks: Ranks, settings: Callable[..., dict[str, Any]], expert: int, order: Mapping[str, Any]
) -> None:
    """Guesses are of the global batch: the two halves of the experts together are what one process guesses."""
    few = {
        "model.n_layers": 3,
        "model.top_k": 1,
        "data.batch_size": 2,
        "prefetch.predictor": "router",
        **order,
    }
    single, several = settings(few), settings(few)
    found = ranks.run(2, guessed, several, 6, expert=expert)
    assert found[0][0] == found[1][0], "the same losses on both"
    (losses, offers), plain = guessed(alone(), single, 6), train(alone(), settings(few), 6, Opening.CREATE)
    assert losses == plain[0]
    assert found[0][1] == found[1][1], "one guess for all"
    assert [offer[:2] for offer in found[0][1]] == [offer[:2] for offer in offers]
    assert found[0][1][:2] == offers[:2], "before rounding sets them apart"


def test_plan_counts_the_copies() -> None:
    from tierstore.plan.capacity import Setting, capacity

    config = load(TrainConfig, None, {"prefetch.predictor": "router"})
    terms = {
        term.name: term.nbytes
        for term in capacity(Setting(config=config, model=config.model.architecture)).terms
    }
    assert terms["router copies"] == 4 * 65 * 256, "one of two layers of 64 experts, width 256, with its norm"
    plain = load(TrainConfig, None, {})
    setting = Setting(config=plain, model=plain.model.architecture)
    assert "router copies" not in {term.name for term in capacity(setting).terms}
