"""Awaiting the store from asyncio: others run meanwhile, and cancelling stops the waiting, not the work."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest_store import flip_bit, small_model, small_store, weights

from tierstore import _native
from tierstore.errors import ChecksumError
from tierstore.store import Group, ParameterStore, StoreConfig

NUMEL = 3000


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(NUMEL).astype(np.float32)


async def test_fetch_update_commit(tmp_path: Path) -> None:
    model = small_model(NUMEL)
    with small_store(tmp_path / "store", budget=120_000) as store:
        for step in range(6):
            gradients = {f"e{step % 4}": gradient(step)}
            await store.update_async(gradients, lr=0.01)
            model.update(gradients, 0.01)
            assert await store.commit_async({"step": b"%d" % step}) == step + 2
            for key in ("e0", "e3"):
                with await store.fetch_async([key]) as lease:
                    assert (lease[key].copy("weight") == model.records[key][0]).all()
        crc = store.records_crc32c()
        store.commit()
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        assert store.records_crc32c() == crc
        assert store.last_commit.state["step"] == b"5"


async def test_concurrent_tasks(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:

        async def reader(key: str) -> np.ndarray:
            with await store.fetch_async([key]) as lease:
                return lease[key].copy("weight")

        results = await asyncio.gather(
            reader("e0"), reader("e1"), store.commit_async(), reader("e1"), reader("e2")
        )
        initial = weights(4, NUMEL)
        for key, found in zip(("e0", "e1", "e1", "e2"), results[:2] + results[3:], strict=True):
            assert (found == initial[key]).all()
        await asyncio.gather(*(store.update_async({f"e{i}": gradient(i)}, lr=0.1) for i in range(4)))
        assert store.status().steps == 4
        await asyncio.gather(store.commit_async(), store.commit_async({"a": b"1"}))
        assert store.verify().failures == []


async def test_cancelled_awaits_leave_a_working_store(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=60_000)) as store:
        for key in store.keys:
            task = asyncio.create_task(store.fetch_async([key], [Group.WEIGHTS, Group.MOMENTS]))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                task.result().release()  # it was there at once
            update = asyncio.create_task(store.update_async({key: gradient(1)}, lr=0.1))
            await asyncio.sleep(0)
            update.cancel()
            commit = asyncio.create_task(store.commit_async())
            await asyncio.sleep(0)
            commit.cancel()
            await asyncio.gather(update, commit, return_exceptions=True)
        assert store.status().steps == 4
        crc = store.records_crc32c()
        store.commit()
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        assert store.records_crc32c() == crc


async def test_damage_is_raised_where_it_is_awaited(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    flip_bit(tmp_path / "store" / "extents" / "expert.weights", 8 * 5)
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        with pytest.raises(ChecksumError, match="'e0', section weight"):
            await store.fetch_async(["e0"])
        (await store.fetch_async(["e1"])).release()


def test_one_loop_after_another(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", budget=60_000) as store:
        for _ in range(3):
            for key in store.keys:
                asyncio.run(store.fetch_async([key])).release()


class HeldSyncs:
    """Lets no fdatasync of ``store`` finish before ``release``."""

    def __init__(self, store: ParameterStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = store.core.engine
        self._gates: list[int] = []
        sync = _native.Engine.sync

        def held(engine: _native.Engine, file: _native.File, *, after: Sequence[int] = ()) -> int:
            self._gates.append(engine.external(after=[sync(engine, file, after=after)]))
            return self._gates[-1]

        monkeypatch.setattr(_native.Engine, "sync", held)

    @property
    def waiting(self) -> int:
        return len(self._gates)

    def release(self) -> None:
        while self._gates:
            self._engine.complete_external(self._gates.pop())


async def test_the_loop_runs_while_a_commit_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others fetch and update meanwhile; what they do is part of the commit."""
    with small_store(tmp_path / "store") as store:
        store.update({"e0": gradient(0)}, lr=0.1)
        syncs = HeldSyncs(store, monkeypatch)
        late = threading.Timer(20.0, syncs.release)  # a loop that is blocked cannot release them
        late.start()
        commit = asyncio.create_task(store.commit_async({"a": b"1"}))
        while not (syncs.waiting or commit.done()):
            await asyncio.sleep(0.001)
        held = syncs.waiting
        for _ in range(100):
            await asyncio.sleep(0.001)
            (await store.fetch_async(["e1"])).release()
        assert (commit.done(), syncs.waiting, store.last_commit.generation) == (False, held, 1)
        await store.update_async({"e1": gradient(1)}, lr=0.1)
        syncs.release()
        while not commit.done():
            await asyncio.sleep(0.001)
            syncs.release()  # of what the update has written
        assert await commit == 2
        late.cancel()
        assert late.finished.is_set()
        crc = store.records_crc32c()
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        assert (store.records_crc32c(), store.last_commit.state["a"]) == (crc, b"1")
        assert store.verify().failures == []


async def test_a_commit_syncs_what_was_written_while_an_earlier_one_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(tmp_path / "store") as store:
        store.update({"e0": gradient(0)}, lr=0.1)
        syncs = HeldSyncs(store, monkeypatch)
        cancelled = asyncio.create_task(store.commit_async())
        while not (syncs.waiting or cancelled.done()):
            await asyncio.sleep(0.001)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        commit = asyncio.create_task(store.commit_async())
        await asyncio.sleep(0.05)
        assert not commit.done(), "the syncs that the cancelled one has queued are its own too"
        syncs.release()
        assert await commit == 2


async def test_a_loop_that_never_rests_has_its_commit(tmp_path: Path) -> None:
    """Another task changes the store at every turn of the loop: after some rounds the commit takes what there is."""
    with small_store(tmp_path / "store") as store:

        async def change() -> None:
            while True:
                await store.update_async({"e0": gradient(0)}, lr=0.1)

        changing = asyncio.create_task(change())
        await asyncio.sleep(0)
        for number in range(3):
            assert await store.commit_async() == number + 2
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        store.commit()
        crc = store.records_crc32c()
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        assert store.records_crc32c() == crc
