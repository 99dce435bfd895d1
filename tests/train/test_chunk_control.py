"""Chunks of a pass in whole training runs: the same bits for every number of them, parts of experts close to experts as
wholes, and AUTO's choice at commits.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from launcher import Ranks
from rank_cases import TINY, Make, Settings, alone, train

from tierstore.config import load
from tierstore.model.store_schema import TrainState
from tierstore.moe.exchange import PassLoads, Rows
from tierstore.moe.source import ChunkDegrees, Chunking
from tierstore.parallel import Mesh, RankGroup
from tierstore.parallel.collectives import Collective
from tierstore.timeline import Timeline
from tierstore.trace import load_trace
from tierstore.trace.replay import replay
from tierstore.train import chunk_control
from tierstore.train.chunk_control import ChunkControl, LayerCosts, even_loads, probe
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.report import counters
from tierstore.train.session import open_session

#: Messages start in no time: as many chunks as there may be.
FREE = LayerCosts(message=0.0, byte=1e-6, chunk=0.0, expert=1e-3, row=1e-4)
#: Starting a message takes longer than all that it could hide.
DEAR = LayerCosts(message=10.0, byte=1e-6, chunk=0.0, expert=1e-3, row=1e-4)

MODES: dict[str, Settings] = {
    "bf16": {"model.compute_dtype": "bf16"},
    "computed again": {"model.checkpoint_activations": "block", "model.expert_activations": "recompute"},
    "micro-batches, clipped": {"clip_norm": 0.5, "data.micro_batches": 2},
    "layer order": {"data.micro_batches": 2, "data.micro_order": "layer"},
}


def configured(settings: Settings) -> TrainConfig:
    return load(TrainConfig, None, {**TINY, **settings})


# The same bits ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "expert", "mode"),
    [*((2, 0, mode) for mode in MODES), (4, 0, "layer order"), (4, 2, "micro-batches, clipped")],
)
def test_the_number_of_chunks_changes_no_bit(
    ranks: Ranks, settings: Make, size: int, expert: int, mode: str
) -> None:
    """In a cache that holds few experts, with replicas too; AUTO changes its mind at every commit."""
    model = {"model.experts": 16, "host_budget": 300_000, **MODES[mode]}
    one = ranks.run(size, _train, settings(model), 1, expert=expert)
    for degree in (2, 4, "auto") if size == 2 else (4, "auto"):
        assert ranks.run(size, _train, settings(model), degree, expert=expert) == one, degree


def _train(mesh: Mesh, settings: Settings, degree: int | str) -> tuple[list[float], list[float], int]:
    """Three steps with a commit after each; AUTO chooses by turns as many chunks as can be, and one."""
    turns = iter([FREE, DEAR] * 10)

    class Fickle(ChunkControl):
        def _choose(self, reason: str) -> None:
            self._costs = next(turns)
            super()._choose(reason)

    with (
        mock.patch("tierstore.train.session.ChunkControl", Fickle),
        mock.patch.object(chunk_control, "probe", return_value=FREE),
    ):
        told = {**settings, "parallel.pipeline_degree": degree}
        return train(mesh, told, 3, Opening.CREATE, commit_every=1)


# Experts in parts -------------------------------------------------------------------------------------------

#: One expert of a layer on each of two ranks, which hold fewer of them than there are.
ONE_EACH: Settings = {"model.experts": 2, "host_budget": 120_000}


def _stepped(
    mesh: Mesh, settings: Settings, costs: LayerCosts, steps: int, opening: Opening
) -> tuple[list[float], int, list[int] | None, str]:
    """Losses, checksum, the number of chunks that is stored, and the line about it, after ``steps`` steps in all."""
    with (
        mock.patch.object(chunk_control, "probe", return_value=costs),
        open_session(configured(settings), opening, mesh=mesh) as trainer,
    ):
        losses = []
        while trainer.state.position < steps:
            losses.append(trainer.step().loss)
            trainer.commit()
        line = trainer.chunks.chosen.describe()
        return losses, trainer.store.records_crc32c(), trainer.state.chunks, line


def test_one_expert_of_a_rank_in_two_chunks(ranks: Ranks, settings: Make) -> None:
    """As close to one chunk as rounding, and not equal to it; the same bits however passes are computed again, and in
    whatever order of micro-batches.
    """
    told = {**ONE_EACH, "data.micro_batches": 2, "data.micro_order": "micro", "parallel.pipeline_degree": 2}
    two = ranks.run(2, train, settings(told), 4, Opening.CREATE)
    one = ranks.run(2, train, settings({**told, "parallel.pipeline_degree": 1}), 4, Opening.CREATE)
    for (losses, norms, crc), (wanted, wanted_norms, other) in zip(two, one, strict=True):
        assert losses == pytest.approx(wanted, rel=2e-5)
        assert norms == pytest.approx(wanted_norms, rel=2e-4)
        assert crc != other
    for mode in ("computed again", "layer order"):
        assert ranks.run(2, train, settings({**told, **MODES[mode]}), 4, Opening.CREATE) == two, mode


def test_a_choice_that_changes_bits_is_made_once_and_kept(ranks: Ranks, settings: Make) -> None:
    """Costs that are nothing divide experts into as many parts as may be; a run that is resumed where DEAR ones would not,
    does as the one that was not interrupted.
    """
    free = replace(FREE, expert=0.0)
    told, again = (settings({**ONE_EACH, "parallel.pipeline_degree": "auto-split"}) for _ in range(2))
    straight = ranks.run(2, _stepped, told, free, 4, Opening.CREATE)
    ranks.run(2, _stepped, again, free, 2, Opening.CREATE)
    resumed = ranks.run(2, _stepped, again, DEAR, 4, Opening.RESUME)
    for (losses, crc, chunks, line), (rest, same, kept, taken_up) in zip(straight, resumed, strict=True):
        assert (losses[2:], crc, chunks) == (rest, same, kept)
        assert chunks == [16, 16]
        assert "16 forward, 16 backward, each expert in 16 parts (auto-split: tokens spread evenly" in line
        assert "(auto-split: taken up from the last commit)" in taken_up


# What AUTO chooses ------------------------------------------------------------------------------------------


def _mesh(sharing: int = 2) -> Mesh:
    """Of the first of ``sharing`` ranks, which agrees with nobody."""
    group = RankGroup(0, range(sharing), {})
    return replace(alone(), data=group, expert=group)


def _control(
    costs: LayerCosts, settings: Settings, chunking_: Chunking | None = None, sharing: int = 2
) -> ChunkControl:
    with mock.patch.object(chunk_control, "probe", return_value=costs):
        return ChunkControl(configured(settings), _mesh(sharing), chunking_ or Chunking())


def test_even_loads_by_hand() -> None:
    """Four sequences of 8 tokens on two ranks: 16 tokens each, which choose 2 experts of 6; each rank owns 3."""
    found = even_loads(configured({}), _mesh())
    assert (found.travelling, found.computed, found.experts) == (16.0, 32, 3)


def test_choice_worked_by_hand() -> None:
    """16 rows of 64 bytes travel, 32 rows in 3 experts take 3 x 1 + 32 x 0.1 = 6.2 ms. Forward with r chunks, in ms: the
    network is busy for r + 2.048, and the device starts after 0.5 + 1.024 / r and ends as long before the pass does: in all
    1 + 2.048 / r + 6.2. For r = 3 these are 5.05 and 7.88, for 5 7.05 and 7.61, for 6 8.05 and 7.54: 5 is the best, and 3
    all that can be.
    """
    costs = LayerCosts(message=0.5e-3, byte=1e-6, chunk=0.0, expert=1e-3, row=1e-4)
    control = _control(costs, {"model.compute_dtype": "fp32"})
    control.begin(TrainState(), lambda note: None)
    assert control.chosen.value.forward == 3
    assert control.chosen.facts["wanted"].forward == 5
    for costs, wanted in ((FREE, 3), (DEAR, 1)):
        control = _control(costs, {})
        control.begin(TrainState(), lambda note: None)
        assert control.chosen.value == ChunkDegrees(wanted, wanted)
        capped = "would be better, and a rank owns 3 experts of a layer" in control.chosen.describe()
        assert capped == (wanted == 3)


def test_choice_of_parts_worked_by_hand() -> None:
    """Each chunk starts an expert's products once more. 16 rows of 64 bytes travel, 32 rows in 3 experts take 3.23 ms.
    Forward with r chunks, in ms: the network is busy for 0.2 r + 2.048, and the device is done after 0.2 + 2.048 / r + 3.23
    + 0.01 r. For r = 7 these are 3.45 and 3.79, for 8 3.65 and 3.77, for 9 3.85 and 3.75: 8 is the best. The backward pass
    takes as long twice and sends weights, too: 0.4 + 2.176 / r + 6.46 + 0.02 r is least for r = 10. Chunks are equal where
    r is a multiple of 3: both take 9, three parts of each expert, in 3.85 + 7.28 ms. Where the start takes 1 ms, one chunk
    is the best.
    """
    costs = LayerCosts(message=0.1e-3, byte=1e-6, chunk=0.0, expert=1e-5, row=1e-4)
    told: Settings = {"model.compute_dtype": "fp32", "parallel.pipeline_degree": "auto-split"}
    passes = Chunking()
    for expert, degrees in ((1e-3, ChunkDegrees()), (1e-5, ChunkDegrees(9, 9, 3))):
        control = _control(replace(costs, expert=expert), told, passes)
        control.begin(TrainState(), lambda note: None)
        assert passes.degrees == degrees
    count(passes, (8, 24, 3))
    control._costs = DEAR
    assert control.at_commit(7) == [9, 9]
    assert passes.degrees == degrees


def test_parts_as_configured() -> None:
    """Of 6 experts on 2 ranks, 3 chunks are whole experts, 4 to 6 two parts of each, 7 three parts."""
    for degree, parts in ((3, 1), (4, 2), (6, 2), (7, 3), (48, 16)):
        control = ChunkControl(configured({"parallel.pipeline_degree": degree}), _mesh(), Chunking())
        assert control.chosen.value == ChunkDegrees(degree, degree, parts)


def count(passes: Chunking, *loads: tuple[int, int, int]) -> None:
    """Counts a backward pass for each of ``loads``: rows that travel, rows that are computed, experts."""
    for each in loads:
        passes.count(cast(Rows, SimpleNamespace(most=partial(PassLoads, *each))))


def test_choices_are_made_at_commits_and_noted() -> None:
    """With no rows counted the choice stands; each change is told once, with the step."""
    told: list[str] = []
    passes = Chunking()
    control = _control(FREE, {}, passes)
    control.begin(TrainState(), told.append)
    assert passes.degrees == ChunkDegrees(3, 3)
    assert control.at_commit(0) == [3, 3]
    count(passes, (8, 24, 3), (12, 16, 3))
    control._costs = DEAR
    assert control.at_commit(7) == [1, 1]
    assert passes.mean_loads() == PassLoads()
    assert told == ["step 0: chunks: 3 forward, 3 backward", "step 7: chunks: 1 forward, 1 backward"]
    assert control.chosen.reason.startswith(
        "auto: rows since the last commit, costs probed; a layer's passes take "
    )


def test_a_resumed_run_goes_on_with_its_choice() -> None:
    passes = Chunking()
    control = _control(DEAR, {}, passes)
    control.begin(TrainState(position=5, chunks=[2, 9]), lambda note: None)
    assert passes.degrees == ChunkDegrees(2, 3)  # not more than there may be
    assert control.at_commit(5) == [2, 3]
    packed = TrainState(chunks=[2, 3]).pack()
    assert TrainState.unpack({"train": packed}, where="here").chunks == [2, 3]


def test_a_slightly_better_choice_is_not_taken_up() -> None:
    passes = Chunking()
    control = _control(FREE, {"model.experts": 64}, passes)
    control.begin(TrainState(), lambda note: None)
    passes.degrees = ChunkDegrees(31, 31)  # of 32, with less than a hundredth between them
    count(passes, (16, 32, 32))
    assert control.at_commit(1) == [31, 31]


def test_where_nothing_travels_nothing_is_chosen() -> None:
    no_experts = {"model.moe_every": 0}
    for settings, mesh in (
        ({}, alone()),
        ({"parallel.pipeline_degree": 5}, alone()),
        (no_experts, _mesh(2)),
        ({**no_experts, "parallel.pipeline_degree": 2}, _mesh(2)),
    ):
        control = ChunkControl(configured(settings), mesh, Chunking())
        control.begin(TrainState(), lambda note: None)
        assert control.chosen is None
        assert control.at_commit(3) is None
    # One expert on a rank: there is nothing to probe for, and it is said.
    only = ChunkControl(configured({}), _mesh(4), Chunking())
    assert "1 forward, 1 backward (auto: some rank has at most one expert" in only.chosen.describe()
    assert only.at_commit(1) is None


# The probe --------------------------------------------------------------------------------------------------


def _probed(mesh: Mesh) -> tuple[LayerCosts, int]:
    """What is found, and how many exchanges of rows were counted meanwhile."""
    sent = mesh.expert.traffic[Collective.ALL_TO_ALL]
    before = sent.calls
    model = configured({}).model
    found = probe(mesh, model.expert_shape, torch.float32, row_bytes=64, rows_to_each=100, rows_of_expert=8)
    return found, sent.calls - before


def test_all_ranks_hold_the_same_costs(ranks: Ranks) -> None:
    (first, sent), (other, _) = ranks.run(2, _probed)
    assert first == other
    assert first.message + first.byte > 0
    assert first.expert + first.row > 0
    assert sent == 0


# The run's files --------------------------------------------------------------------------------------------


def _recorded(mesh: Mesh, settings: Settings, directory: Path) -> dict[str, Any]:
    """Live counts of a run, and those of its trace replayed; the trace's notes; names in the timeline."""
    name = directory / f"rank-{mesh.world.rank}"
    trace, drawn = name.with_suffix(".trace"), name.with_suffix(".json")
    with (
        Timeline(drawn) as timeline,
        open_session(
            configured(settings), Opening.CREATE, mesh=mesh, trace=trace, timeline=timeline
        ) as trainer,
    ):
        for _ in range(3):
            trainer.step()
            trainer.commit()
        trainer.store.end_trace()
        mapped = ("mapped_count", "mapped_bytes")  # of no cache
        live = {name: count for name, count in counters(trainer).items() if name not in mapped}
    stats = replay(trace)
    return {
        "live": live,
        "replayed": {count: getattr(stats, count) for count in live},
        "notes": load_trace(trace).header.notes,
        "order": load_trace(trace).header.group_order,
        "drawn": drawn.read_text(),
    }


@pytest.mark.parametrize(
    ("experts", "budget", "parts"), [(6, 120_000, ""), (2, 50_000, ", each expert in 2 parts")]
)
def test_a_replay_counts_as_the_run_did(
    ranks: Ranks, settings: Make, tmp_path: Path, experts: int, budget: int, parts: str
) -> None:
    told = settings({"host_budget": budget, "model.experts": experts, "parallel.pipeline_degree": 2})
    for found in ranks.run(2, _recorded, told, tmp_path):
        assert found["live"]["evictions"] > 0
        assert found["replayed"] == found["live"]
        assert found["notes"] == (f"step 0: chunks: 2 forward, 2 backward{parts}",)
        assert found["order"] == "key"
        for layer in (0, 1):
            for what in ("dispatch", "experts", "combine"):
                for chunk in (0, 1):
                    for phase in ("forward", "backward"):
                        assert f'"{phase} {layer}: {what} chunk {chunk}"' in found["drawn"]
