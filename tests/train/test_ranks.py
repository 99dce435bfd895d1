"""Training on several ranks: as one process does, with the same bits however it is held. Kills: test_rank_kills."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launcher import Ranks
from rank_cases import (
    MODES,
    Make,
    Settings,
    ahead,
    alone,
    attempt,
    check_against_one,
    checksums,
    orders,
    train,
    weights,
    whole_run,
)
from refusals import refuses

from tierstore import _native
from tierstore.errors import ConfigError, StoreError, StoreExistsError, StoreFormatError, StoreMissingError
from tierstore.model.store_schema import STATE_KEY
from tierstore.parallel import Collective, ExchangeMode, Mesh
from tierstore.store import OpenAt
from tierstore.store.disk.home import rank_directory
from tierstore.store.reading import read_states
from tierstore.train.files import MicroOrder
from tierstore.train.ranks import Opening, agree, rank_file


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "expert"), [(2, 0), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_does(
    ranks: Ranks, settings: Make, mode: str, size: int, expert: int
) -> None:
    """Steps of the same global batches: losses within fp32 rounding of one process, and experts alike."""
    check_against_one(
        ranks, settings(MODES[mode]), settings(MODES[mode]), size, expert or size, expert=expert
    )


@pytest.mark.slow
def test_four_ranks_that_share_six_experts_compute_what_one_process_does(
    ranks: Ranks, settings: Make
) -> None:
    check_against_one(ranks, settings(MODES["clip"]), settings(MODES["clip"]), 4, 4)


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"clip_norm": 0.5, "model.tie_embeddings": "tied", "dense.gradient_buffers": 1},
        # Some experts are reached by tokens of one rank alone, and sleep before.
        {"model.experts": 40, "model.top_k": 1, "model.seq_len": 4, "prefetch.predictor": "router"},
    ],
    ids=["immediate", "clip", "few"],
)
@pytest.mark.parametrize(("size", "expert"), [(2, 0), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_layer_order_has_the_bits_of_micro_order(
    ranks: Ranks, settings: Make, mode: Settings, size: int, expert: int
) -> None:
    """Losses, norms and records of every rank; with replicas of experts too, whose gradients are sums of sums."""
    changes = {"data.micro_batches": 3, "host_budget": 60_000, **mode}
    expected = ranks.run(size, train, settings(changes), 3, Opening.CREATE, expert=expert)
    layered = settings({**changes, "data.micro_order": "layer"})
    assert ranks.run(size, train, layered, 3, Opening.CREATE, expert=expert) == expected


def test_all_ranks_take_one_order(ranks: Ranks, settings: Make) -> None:
    """Links may be each rank's own; that of rank 0 is so slow that layer order pays, and the other would compute less."""
    changes = settings({"data.micro_batches": 2, "host_budget": 60_000, "model.seq_len": 1024})
    changes["data.batch_size"] = 64
    (slow, first), (fast, second) = ranks.run(2, orders, changes, [{"links.disk.bandwidth": 1 << 20}, {}])
    assert (slow.value, fast.value) == (MicroOrder.LAYER, MicroOrder.MICRO)
    assert first == second == slow


def test_replicas_round_alike(ranks: Ranks, settings: Make) -> None:
    """Narrow moments: rounding depends on the record's key and the step, not on who holds it, where and in what budget."""
    changes = {"adamw.moments": "int8", "data.micro_batches": 2}
    made = settings(changes)
    found = ranks.run(2, train, made, 6, Opening.CREATE, expert=1)
    tight = settings({**changes, "host_budget": 60_000})
    assert ranks.run(2, train, tight, 6, Opening.CREATE, expert=1) == found
    first, second = ranks.run(2, weights, made, expert=1)
    assert first.keys() == second.keys()
    for key, weight in first.items():
        assert np.array_equal(second[key], weight)


@pytest.mark.parametrize("size", [1, 2])
def test_the_checksum_over_all_ranks(ranks: Ranks, settings: Make, size: int) -> None:
    """Over theirs in rank order, on all of them; and where one is asked to stop, all stop."""
    found = ranks.run(size, checksums, settings({}))
    own = [rank[0] for rank in found]
    expected = own[0] if size == 1 else _native.crc32c(np.array(own, "<u4"))
    assert [rank[1] for rank in found] == [expected] * size
    stopped = ranks.run(size, checksums, settings({}), size - 1)
    assert [rank[1] for rank in stopped] == [None] * size


HOLDS: dict[str, Settings] = {
    "nothing gathered ahead": {"prefetch.gather_depth": 0},
    "far ahead": {"prefetch.gather_depth": 4, "dense.buffers": 2},
    "tight": {"host_budget": 60_000, "cache.policy": "lru", "prefetch.depth": 0},
    "deep": {"host_budget": 120_000, "prefetch.depth": 3, "io.backend": "threads"},
    "small buckets": {"dense.bucket_bytes": 512, "dense.gradient_buffers": 1, "dense.buffers": 2},
    "one message each": {"dense.fusion": "parameter"},
    "kept gathered": {"dense.reshard": "after-backward", "dense.buffers": 4},
    "slow links": {"links.gather.latency": 0.001, "links.copy.latency": 0.0005, "links.disk.latency": 0.0005},
}


#: On four ranks, where a session takes longest.
SOME = ("tight", "small buckets", "one message each")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "expert"), [(2, 0), (2, 1), (4, 2)])
def test_however_it_is_held_the_bits_are_the_same(
    ranks: Ranks, settings: Make, size: int, expert: int
) -> None:
    mode = {"clip_norm": 0.5, "data.micro_batches": 2} if expert else {}
    expected = ranks.run(size, train, settings(mode), 3, Opening.CREATE, expert=expert)
    for name, hold in HOLDS.items():
        if size == 4 and name not in SOME:
            continue
        held = settings({**mode, **hold})
        found = ranks.run(size, train, held, 2, Opening.CREATE, expert=expert)
        rest = ranks.run(size, train, held, 3, Opening.RESUME, expert=expert)
        for rank in range(size):
            losses = found[rank][0] + rest[rank][0]
            assert losses == expected[rank][0], name
            # Sliced by parameter, ranks hold other parts of the dense weights: the same bits elsewhere.
            if "dense.fusion" not in hold:
                assert rest[rank][2] == expected[rank][2], name


@pytest.mark.slow
@pytest.mark.parametrize(("size", "expert"), [(2, 0), (4, 2)])
def test_validation_sampling_and_skipped_steps(ranks: Ranks, settings: Make, size: int, expert: int) -> None:
    plain: Settings = {"eval_batches": 2, "host_budget": 60_000, "clip_norm": 0.5}
    single = whole_run(alone(), settings({**plain, "host_budget": 4 << 20}), 4)
    several = ranks.run(size, whole_run, settings(plain), 4, expert=expert)
    for rank in several:
        assert rank[:2] == several[0][:2]
        assert 1 <= len(rank[2]) <= 5  # bytes that are no UTF-8 are shown as one
    np.testing.assert_allclose(several[0][0], single[0], rtol=2e-5)
    np.testing.assert_allclose(several[0][1], single[1], rtol=2e-5)
    # A learning rate that blows up: every rank skips the same steps, with gathers under way, and goes on.
    wild = {**plain, "schedule.lr": 1e30, "schedule.warmup_steps": 0, "max_skipped": 9}
    skipped = ranks.run(size, whole_run, settings(wild), 4, expert=expert)
    assert skipped[0][3] >= 1
    assert {rank[3] for rank in skipped} == {skipped[0][3]}


# Openings ---------------------------------------------------------------------------------------------------


def agreed(mesh: Mesh, store: Path, wanted: Opening) -> tuple[str, str] | str:
    try:
        found = agree(store, wanted, attempt(mesh, store))
    except StoreError as error:
        return f"{type(error).__name__}: {error}"
    return found.opening.value, found.at.value


def restart(mesh: Mesh, settings: Settings, steps: int) -> Any:
    return train(attempt(mesh, settings["store"]), settings, steps, Opening.RESTART)


def test_all_resume_at_the_newest_step_that_all_have(ranks: Ranks, settings: Make) -> None:
    straight, behind = settings(), settings()
    expected = ranks.run(2, train, straight, 6, Opening.CREATE)
    ranks.run(2, ahead, behind, 1)
    positions = [read_states(rank_directory(behind["store"], rank, 2), STATE_KEY) for rank in range(2)]
    assert [set(position) for position in positions] == [{OpenAt.LAST}, {OpenAt.LAST, OpenAt.PREVIOUS}]
    assert ranks.run(2, agreed, behind["store"], Opening.RESUME) == [
        ("resume", "last"),
        ("resume", "previous"),
    ]
    found = ranks.run(2, train, behind, 6, Opening.RESUME)
    for rank in range(2):
        assert found[rank][0] == expected[rank][0][2:]
        assert found[rank][2] == expected[rank][2]


def test_openings_that_cannot_be_are_refused_by_all_ranks_alike(ranks: Ranks, settings: Make) -> None:
    made = settings()
    missing = ranks.run(2, agreed, made["store"], Opening.RESUME)
    assert len(set(missing)) == 1
    assert missing[0].startswith("StoreMissingError: rank 0: ")
    ranks.run(2, ahead, made, 0)
    exists = ranks.run(2, agreed, made["store"], Opening.CREATE)
    assert len(set(exists)) == 1
    assert exists[0].startswith("StoreExistsError")
    for size in (1, 4):
        for wanted in (Opening.RESUME, Opening.CREATE):
            other = ranks.run(size, agreed, made["store"], wanted)
            assert f"the store of 2 ranks, and this run has {size}; tierstore reshard" in other[0]
    (made["store"] / "rank-0001" / "tierstore.json").unlink()
    assert "rank 1: " in ranks.run(2, agreed, made["store"], Opening.RESUME)[0]


def test_a_restarted_job_creates_again_what_was_never_acknowledged(ranks: Ranks, settings: Make) -> None:
    """Killed during creation: one rank has its first commit, the other has nothing."""
    made = settings()
    assert ranks.run(2, agreed, made["store"], Opening.RESTART) == [("create", "last")] * 2
    expected = ranks.run(2, restart, settings(), 2)
    ranks.run(2, train, made, 0, Opening.CREATE)
    (made["store"] / "rank-0001" / "tierstore.json").unlink()
    assert ranks.run(2, restart, made, 2) == expected
    assert ranks.run(2, agreed, made["store"], Opening.RESTART) == [("resume", "last")] * 2
    # What was acknowledged and cannot be found is not begun again: a drive is missing, say.
    (made["store"] / "rank-0000").rename(made["store"].with_name("elsewhere"))
    lost = ranks.run(2, agreed, made["store"], Opening.RESTART)
    assert lost[0].startswith("StoreError: ")
    assert "no store here" in lost[0]


def test_a_restarted_job_leaves_the_stores_of_others_alone(ranks: Ranks, settings: Make) -> None:
    """The first attempt was refused: so is the next one."""
    made = settings()
    ranks.run(2, train, made, 1, Opening.CREATE)
    for wanted in (Opening.CREATE, Opening.RESTART):
        assert ranks.run(2, agreed, made["store"], wanted)[1].startswith("StoreExistsError")
    single = settings()
    train(alone(), single, 1, Opening.CREATE)
    with pytest.raises(StoreExistsError):
        agree(single["store"], Opening.RESTART, alone())


def test_one_process_refuses_as_ever(tmp_path: Path, settings: Make) -> None:
    with pytest.raises(StoreMissingError):
        agree(tmp_path / "none", Opening.RESUME, alone())
    made = settings()
    train(alone(), made, 1, Opening.CREATE)
    with refuses(StoreExistsError, "--resume", "--store"):
        agree(made["store"], Opening.CREATE, alone())
    (tmp_path / "two" / "rank-0000").mkdir(parents=True)
    (tmp_path / "two" / "rank-0000" / "tierstore.json").write_text("{}")
    with refuses(StoreFormatError, "tierstore reshard"):
        agree(tmp_path / "two", Opening.CREATE, alone())


def told(mesh: Mesh, settings: Settings, changes: Settings) -> str:
    """A configuration of rank 1 that differs from rank 0's is refused on both."""
    mine = {**settings, **(changes if mesh.world.rank else {})}
    try:
        train(mesh, mine, 1, Opening.CREATE)
    except ConfigError as error:
        return str(error)
    return "trained"


def test_ranks_that_were_told_different_things_are_refused(
    ranks: Ranks, settings: Make, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text " * 900)
    for changes, named in (
        ({"schedule.lr": 1e-4}, "schedule.lr: was 0.005, is 0.0001"),
        ({"prefetch.gather_depth": 2}, "prefetch.gather_depth"),
        ({"data.paths": (str(other),)}, "conditions.data"),
    ):
        made = settings()
        found = ranks.run(2, told, made, changes)
        assert found[0] == found[1]
        assert found[0].startswith("rank 1 was given another configuration than rank 0: ")
        assert named in found[0]
        assert not made["store"].exists()
    assert ranks.run(2, told, settings(), {"io.backend": "threads"}) == ["trained"] * 2


def test_files_by_rank() -> None:
    assert rank_file(Path("a/m.jsonl"), 0) == Path("a/m.jsonl")
    assert rank_file(Path("a/m.jsonl"), 3) == Path("a/m.rank-0003.jsonl")
    assert rank_file(None, 3) is None
    assert rank_file(Path("/dev/null"), 3) == Path("/dev/null"), "which all ranks write"


# Rows that go in two steps between nodes --------------------------------------------------------------------


#: Four ranks on two nodes.
NODES: dict[str, Any] = {"exchange": ExchangeMode.HIERARCHICAL, "node_ranks": 2}

EXCHANGED: dict[str, Settings] = {
    "immediate": {},
    "clip, micro-batches": {"clip_norm": 0.5, "data.micro_batches": 2},
    "layer order": {"data.micro_batches": 3, "data.micro_order": "layer", "host_budget": 60_000},
    "activations again": {"model.checkpoint_activations": "block", "host_budget": 60_000},
    "chunks": {"parallel.pipeline_degree": 3, "model.experts": 12, "data.micro_batches": 2},
    # Ranks without rows, and without experts.
    "few": {"model.experts": 3, "model.top_k": 1, "model.seq_len": 4},
}


def _counted(mesh: Mesh, settings: Settings, steps: int) -> tuple[Any, int]:
    """What ``train`` found, and how many messages of rows went to another node."""
    before = mesh.traffic()[Collective.ALL_TO_ALL].node_messages
    found = train(mesh, settings, steps, Opening.CREATE)
    return found, mesh.traffic()[Collective.ALL_TO_ALL].node_messages - before


@pytest.mark.parametrize(
    "mode", [name if name == "few" else pytest.param(name, marks=pytest.mark.slow) for name in EXCHANGED]
)
def test_training_has_the_bits_of_the_flat_exchange(ranks: Ranks, settings: Make, mode: str) -> None:
    """Losses, norms and records of 4 ranks on 2 nodes; between nodes go at most half as many messages."""
    changes = EXCHANGED[mode]
    flat = ranks.run(4, _counted, settings(changes), 2, exchange=ExchangeMode.FLAT, node_ranks=2)
    two_steps = ranks.run(4, _counted, settings(changes), 2, **NODES)
    assert [found for found, _ in two_steps] == [found for found, _ in flat]
    assert 0 < sum(sent for _, sent in two_steps) < sum(sent for _, sent in flat)
