"""A store resharded for another number of ranks holds what it held, and training goes on from there."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest_store import ScratchMemory
from launcher import Ranks
from rank_cases import MODES, Make, ahead, alone, laid_out, train, weights
from refusals import refuses

from tierstore.errors import ConfigError, StoreExistsError, StoreFormatError, StoreMissingError
from tierstore.parallel.config import RowPlacement
from tierstore.store import ParameterStore, StoreConfig, verify_store
from tierstore.store.disk import extents
from tierstore.store.disk.home import rank_directories
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.stored_model import open_stored


def contents(store: Path) -> list[int]:
    """The checksum of each rank's records, caught up."""
    found = []
    for directory in rank_directories(store) or [store]:
        assert not verify_store(directory).failures
        with ParameterStore.open(directory, StoreConfig(host_budget=1 << 20)) as opened:
            found.append(opened.records_crc32c())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.compute_dtype": "bf16"},
        {"adamw.inactive": "skip"},
        {"adamw.moments": "int8"},
        MODES["clip"],
    ],
)
def test_there_and_back_is_the_same_store(
    ranks: Ranks, settings: Make, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Two ranks to one, to four in pairs, and back to two: every byte of every record."""
    made = settings({**changes, "model.experts": 5})
    ranks.run(2, train, made, 2, Opening.CREATE)
    before = contents(made["store"])
    seen: list[tuple[int, int]] = []
    done = reshard(made["store"], tmp_path / "one", laid_out(1, 1), lambda *at: seen.append(at))
    assert (done.before, done.after, done.step) == (laid_out(2, 2), laid_out(1, 1), 2)
    assert (seen[0], seen[-1]) == ((0, done.nbytes), (done.nbytes, done.nbytes))
    assert len(seen) == 1 + done.records
    reshard(tmp_path / "one", tmp_path / "four", laid_out(4, 2))
    reshard(tmp_path / "four", tmp_path / "two", laid_out(2, 2))
    assert contents(tmp_path / "two") == before
    assert contents(made["store"]) == before
    four = contents(tmp_path / "four")
    assert len(four) == 4
    again = ranks.run(2, train, made, 4, Opening.RESUME)
    assert ranks.run(2, train, {**made, "store": tmp_path / "two"}, 4, Opening.RESUME) == again


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"model.compute_dtype": "bf16", "adamw.moments": "int8"}])
def test_any_layout_to_any_other(settings: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Along a chain of layouts of every kind, and from each back to one process: every byte of every record."""
    shapes = {"model.n_layers": 8, "model.n_heads": 4, "model.moe_every": 2}
    made = settings({**shapes, "model.shared_expert_d_ff": 16, **changes})
    train(alone(), made, 2, Opening.CREATE)
    before, store = contents(made["store"]), made["store"]
    for number, layout in enumerate(
        (
            laid_out(2, stages=2),
            laid_out(4, tensor=4),
            laid_out(8, tensor=2, stages=2),
            laid_out(6, 3),
            laid_out(4, stages=4),
            laid_out(4, tensor=2),
        )
    ):
        # Every second one has the rows of embedding and head divided.
        places = [RowPlacement.GATHERED, RowPlacement.PARTITIONED]
        embedding, head = places[number % 2], places[(number // 2) % 2]
        done = reshard(store, tmp_path / f"{number}", layout, embedding=embedding, head=head)
        store = tmp_path / f"{number}"
        assert done.after == layout
        assert len(contents(store)) == layout.world
        assert reshard(store, tmp_path / f"{number}-alone", laid_out(1)).before == layout
        assert contents(tmp_path / f"{number}-alone") == before


def test_training_goes_on_with_other_ranks(ranks: Ranks, settings: Make, tmp_path: Path) -> None:
    single, several = settings(), settings()
    expected, _, _ = train(alone(), single, 10, Opening.CREATE)
    first = ranks.run(2, train, several, 4, Opening.CREATE)[0][0]
    store = several["store"]
    for name, layout, until in (
        ("a", laid_out(4, 4), 6),
        ("b", laid_out(1, 1), 8),
        ("c", laid_out(2, 1), 10),
    ):
        reshard(store, tmp_path / name, layout)
        store = tmp_path / name
        moved = {**several, "store": store}
        if layout.world == 1:
            first += train(alone(), moved, until, Opening.RESUME)[0]
        else:
            expert = layout.expert
            first += ranks.run(layout.world, train, moved, until, Opening.RESUME, expert=expert)[0][0]
    np.testing.assert_allclose(first, expected, rtol=2e-5)
    want = weights(alone(), single)
    got = ranks.run(2, weights, {**several, "store": store}, expert=1)
    for key, weight in want.items():
        np.testing.assert_allclose(got[0][key], weight, atol=2e-4)
        assert np.array_equal(got[0][key], got[1][key])


def test_more_ranks_than_experts(ranks: Ranks, settings: Make, tmp_path: Path) -> None:
    made = settings({"model.experts": 3})
    expected = train(alone(), made, 2, Opening.CREATE)
    reshard(made["store"], tmp_path / "four", laid_out(4, 4))
    moved = {**made, "store": tmp_path / "four"}
    found = ranks.run(4, train, moved, 4, Opening.RESUME)
    reshard(tmp_path / "four", tmp_path / "one", laid_out(1, 1))
    assert len(expected[0]) == len(found[0][0]) == 2
    train(alone(), {**made, "store": tmp_path / "one"}, 5, Opening.RESUME)


def test_a_step_that_not_all_have_is_not_taken(ranks: Ranks, settings: Make, tmp_path: Path) -> None:
    straight, behind = settings(), settings()
    ranks.run(2, train, straight, 2, Opening.CREATE)
    ranks.run(2, ahead, behind, 1)
    assert reshard(behind["store"], tmp_path / "one", laid_out(1, 1)).step == 2
    reshard(straight["store"], tmp_path / "other", laid_out(1, 1))
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_what_cannot_be_is_refused_and_leaves_nothing(settings: Make, tmp_path: Path) -> None:
    made = settings()
    train(alone(), made, 1, Opening.CREATE)
    with refuses(ConfigError, "parallel.expert:", "4 ranks"):
        laid_out(4, 3)
    with refuses(ConfigError, "parallel.stages:", "2 blocks", "got 3"):
        reshard(made["store"], tmp_path / "new", laid_out(3, stages=3))
    with refuses(ConfigError, "model.n_heads:", "parallel.tensor = 3"):
        reshard(made["store"], tmp_path / "new", laid_out(3, tensor=3))
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("mine")
    with refuses(StoreExistsError, tmp_path / "new.partial"):
        reshard(made["store"], tmp_path / "new", laid_out(2, 2))
    assert (tmp_path / "new.partial" / "thesis.txt").read_text() == "mine"
    shutil.rmtree(tmp_path / "new.partial")
    with pytest.raises(StoreMissingError):
        reshard(tmp_path / "none", tmp_path / "new", laid_out(2, 2))
    with refuses(StoreExistsError, made["store"]):
        reshard(made["store"], made["store"], laid_out(2, 2))
    plain = tmp_path / "plain"
    from tierstore.store import RecordSchema

    with ParameterStore.create(plain, [RecordSchema("a", 64)], StoreConfig(host_budget=1 << 20)) as store:
        store.register("x", "a")
        store.commit()
    with refuses(StoreFormatError, plain):
        reshard(plain, tmp_path / "new", laid_out(2, 2))
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_it_holds_a_fixed_number_of_experts(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 in each layer, those that are read at once fit the limit, which has room for two; a third is announced, for
    slots of other sizes.
    """
    made = settings({"model.experts": 24})
    train(alone(), made, 1, Opening.CREATE)
    with open_stored(made["store"]) as stored:
        slot_bytes = sum(stored.expert_schema.layout(group).slot_bytes for group in COMMITTED_GROUPS)
    memory = ScratchMemory()
    monkeypatch.setattr(extents, "scratch_buffers", memory)
    monkeypatch.setattr(extents, "_IN_FLIGHT_BYTES", 2 * slot_bytes)
    done = reshard(made["store"], tmp_path / "new", laid_out(2, 2))
    assert done.records > 48
    assert memory.most == 2 * slot_bytes < done.account.parts["reads ahead"] <= 3 * slot_bytes


def test_an_interrupted_one_leaves_nothing(settings: Make, tmp_path: Path) -> None:
    made = settings()
    train(alone(), made, 1, Opening.CREATE)

    def interrupt(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard(made["store"], tmp_path / "new", laid_out(2, 2), interrupt)
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob("*.partial"))
    reshard(made["store"], tmp_path / "new", laid_out(2, 2))


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_tables_gathered_and_partitioned(ranks: Ranks, settings: Make, tmp_path: Path, tied: str) -> None:
    """Partitioned by two ranks, gathered by one and by three, and back: every byte; and AUTO goes on with what is there."""
    tables = {"parallel.embedding": "partitioned", "parallel.head": "partitioned"}
    made = settings({"model.experts": 5, "model.tie_embeddings": tied, "data.batch_size": 4, **tables})
    ranks.run(2, train, made, 3, Opening.CREATE)
    before = contents(made["store"])
    whole = RowPlacement.GATHERED
    reshard(made["store"], tmp_path / "one", laid_out(1))
    reshard(made["store"], tmp_path / "three", laid_out(3), embedding=whole, head=whole)
    reshard(tmp_path / "three", tmp_path / "three-alone", laid_out(1))
    assert contents(tmp_path / "three-alone") == contents(tmp_path / "one")
    divided = RowPlacement.PARTITIONED
    reshard(tmp_path / "one", tmp_path / "two", laid_out(2), embedding=divided, head=divided)
    assert contents(tmp_path / "two") == before
    again = ranks.run(2, train, made, 5, Opening.RESUME)
    back = {**made, "store": tmp_path / "two"} | dict.fromkeys(tables, "auto")
    assert ranks.run(2, train, back, 5, Opening.RESUME) == again
