"""AUTO's number of chunks by the profile of a machine: what is refused, what it costs, and what ranks choose by it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launcher import RankFailedError, Ranks
from rank_cases import TINY, Make, Settings, alone, train
from refusals import refuses

from tierstore.config import load
from tierstore.machine_profile import ASSUMED, Cost, save_profile
from tierstore.model.store_schema import TrainState
from tierstore.moe.source import Chunking
from tierstore.parallel import Mesh, RankGroup
from tierstore.plan.capacity import Setting
from tierstore.plan.predict import predict
from tierstore.train.chunk_control import ChunkControl, LayerCosts, profiled, read_profile
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

MODEL: Settings = {"model.experts": 8, "model.top_k": 8}
#: Exchanges take about as long as the experts' products: messages that start in no time, and such as hide nothing.
EXPERT = Cost(0.0, 1e6)
QUICK, DEAR = Cost(0.0, 1e5), Cost(10.0, 1e5)


def write_profile(path: Path, exchange: Cost, **changes: Any) -> Path:
    made = replace(
        ASSUMED,
        ranks=2,
        exchanges={2: exchange},
        expert_forward=EXPERT,
        expert_backward=EXPERT,
        machine="by hand",
    )
    save_profile(replace(made, **changes), path)
    return path


def mesh_of(sharing: int, *, tensor: int = 1) -> Mesh:
    """Of the first of ``sharing`` ranks, which agrees with nobody."""
    group = RankGroup(0, range(sharing), {})
    if tensor > 1:
        return replace(alone(), expert=group, tensor=group)
    return replace(alone(), data=group, expert=group)


def configured(path: Path | None, settings: Settings | None = None) -> TrainConfig:
    told = {} if path is None else {"parallel.profile": str(path)}
    return load(TrainConfig, None, {**TINY, **MODEL, **told, **(settings or {})})


def control_of(config: TrainConfig, mesh: Mesh) -> ChunkControl:
    control = ChunkControl(config, mesh, Chunking())
    control.begin(TrainState(), lambda note: None)
    return control


# What a profile says ----------------------------------------------------------------------------------------


def test_costs_by_hand(tmp_path: Path) -> None:
    """An expert of 3 x 16 x 32 parameters: 3,072 operations a row forward, 6,144 backward, and 2,048 for what feeds the
    activation once more. A limited link is the slower of two.
    """
    path = write_profile(
        tmp_path / "p.json", Cost(0.25, 1e5), expert_forward=Cost(0.5, 1e3), expert_backward=Cost(0.75, 2e3)
    )
    config = configured(path)
    found = profiled(mesh_of(2), config.model.expert_shape, path, config.links.rows)
    assert (found.message, found.byte, found.chunk, found.expert, found.row) == (0.25, 1e-5, 0.5, 0.5, 3.072)
    assert (found.backward.expert, found.backward.row, found.backward.row_again) == (0.75, 3.072, 1.024)
    slow = configured(path, {"links.gather.latency": 2.0, "links.gather.bandwidth": 1000})
    limited = profiled(mesh_of(2), config.model.expert_shape, path, slow.links.rows)
    assert (limited.message, limited.byte) == (2.0, 1e-3)
    assert isinstance(limited, LayerCosts)


@pytest.mark.parametrize(("exchange", "chunks"), [(QUICK, 4), (DEAR, 1)])
def test_a_profile_decides_and_is_named(tmp_path: Path, exchange: Cost, chunks: int) -> None:
    path = write_profile(tmp_path / "p.json", exchange)
    chosen = control_of(configured(path), mesh_of(2)).chosen
    assert (chosen.value.forward, chosen.value.backward) == (chunks, chunks)
    assert f"auto: tokens spread evenly, costs of {path}; a layer's passes take" in chosen.describe()
    assert chosen.facts["costs"] == f"of {path}"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model.expert_activations": "recompute"},
        {"data.micro_batches": 2},
        {"model.experts": 2, "model.top_k": 2, "parallel.pipeline_degree": "auto-split"},
    ],
)
@pytest.mark.parametrize("latency", [0.0, 0.002, 0.01, 0.05, 0.3])
def test_the_plan_says_what_the_run_chooses(tmp_path: Path, latency: float, settings: Settings) -> None:
    """With the same profile, before anything has been counted."""
    path = write_profile(tmp_path / "p.json", Cost(latency, 1e5), expert_forward=Cost(0.003, 1e6))
    config = configured(path, {"data.micro_order": "micro", **settings})
    chosen = control_of(config, mesh_of(2)).chosen
    setting = Setting(config=config, model=config.model.architecture, ranks=2)
    degrees = predict(setting, read_profile(path, 2)).degrees
    assert tuple(degrees.taken.values()) == (chosen.value.forward, chosen.value.backward)


def test_results_of_tensor_parallel_ranks_come_back_in_chunks(tmp_path: Path) -> None:
    """Nothing travels to their experts. Of two ranks each computes half of 32 tokens' 8 experts, 128 rows of 3.072 ms, and
    sends their results, 8,192 bytes, in 81.92 ms: forward all but the last quarter travels beside the products.
    """
    path = write_profile(tmp_path / "p.json", QUICK)
    config = configured(path, {"model.compute_dtype": "fp32"})
    chosen = control_of(config, mesh_of(2, tensor=2)).chosen
    assert chosen.value.forward == 4
    computed, back = 128 * 3.072e-3, 128 * 64 / 1e5
    told = configured(None, {"parallel.pipeline_degree": 2})
    number = control_of(told, mesh_of(2, tensor=2)).chosen
    assert number.value.forward == number.value.backward == 2
    backward = 2 * computed + (back + 128 * 4 / 1e5) / 4
    seconds = computed + back / 4 + backward
    assert f"a layer's passes take {seconds:.3g} s" in chosen.describe()


# What is refused --------------------------------------------------------------------------------------------


def test_nothing_is_read_where_nothing_is_chosen(tmp_path: Path) -> None:
    control = ChunkControl(configured(tmp_path / "none.json"), alone(), Chunking())
    assert control.chosen is None


def test_a_refusal_leaves_nothing_behind(ranks: Ranks, settings: Make, tmp_path: Path) -> None:
    told = settings({**MODEL, "parallel.profile": str(tmp_path / "none.json")})
    with refuses(RankFailedError, "parallel.profile:", "none.json", "No such file"):
        ranks.run(2, train, told, 1, Opening.CREATE)
    assert not list(Path(told["store"]).glob("*"))


# Real ranks -------------------------------------------------------------------------------------------------


def _run(
    mesh: Mesh, settings: Settings, profile: Path
) -> tuple[list[float], int, list[int] | None, str, list[int] | None]:
    """Losses and checksum of three steps, the chunks that a resumed run found, AUTO's line, and those of the state."""
    config = load(TrainConfig, None, {**TINY, **MODEL, **settings, "parallel.profile": str(profile)})
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        losses = [trainer.step().loss for _ in range(3)]
        trainer.commit()
        said, held = trainer.chunks.chosen.describe(), trainer.state.chunks
        crc = trainer.store.records_crc32c()
    with open_session(config, Opening.RESUME, mesh=mesh) as again:
        return losses, crc, again.state.chunks, said, held


def test_ranks_choose_by_profiles_and_keep_their_bits(ranks: Ranks, settings: Make, tmp_path: Path) -> None:
    """Costs with which one chunk is best, and such with which four are; the choice is printed, held and taken up."""
    bits = []
    for name, exchange, chunks in (("quick", QUICK, 4), ("dear", DEAR, 1)):
        path = write_profile(tmp_path / f"{name}.json", exchange)
        found = ranks.run(2, _run, settings({}), path)
        for _, _, resumed, said, held in found:
            assert held == resumed == [chunks, chunks]
            assert f"{chunks} forward, {chunks} backward (auto: " in said
            assert f"costs of {path}" in said
        assert len({said for _, _, _, said, _ in found}) == 1
        bits.append([(losses, crc) for losses, crc, *_ in found])
    assert bits[0] == bits[1]


def _own_profile(mesh: Mesh, settings: Settings, paths: tuple[Path, ...]) -> str:
    """Rank by rank another file."""
    config = load(TrainConfig, None, {**TINY, **MODEL, **settings})
    found = profiled(mesh, config.model.expert_shape, paths[mesh.world.rank], config.links.rows)
    return str((found.message, found.byte))


def test_ranks_with_files_of_their_own_agree(ranks: Ranks, settings: Make, tmp_path: Path) -> None:
    """On the largest of each cost."""
    paths = (
        write_profile(tmp_path / "a.json", Cost(0.5, 1e5)),
        write_profile(tmp_path / "b.json", Cost(0.25, 1e3)),
    )
    assert ranks.run(2, _own_profile, settings({}), paths) == [str((0.5, 1e-3))] * 2
