"""Block inputs come back with their bytes, whatever the budget; what does not fit goes to disk, checked and accounted."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from conftest_store import small_store
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from tierstore.errors import ChecksumError, StorePoisonedError
from tierstore.links import LinkConfig
from tierstore.stats import Cause, StallKey, StallLedger, Tier
from tierstore.store import ParameterStore, RecordSchema, StoreConfig, StripeConfig
from tierstore.store.core import StoreCore
from tierstore.train.boundaries import BoundaryStore, MemoryBoundaries, open_boundaries
from tierstore.train.budgets import BoundarySplit, split_boundaries

PAGE = 4096


@pytest.fixture
def core(tmp_path: Path) -> Iterator[StoreCore]:
    with small_store(tmp_path / "store", count=1) as store:
        yield store.core


def opened(
    core: StoreCore,
    *,
    layers: int,
    micros: int = 1,
    nbytes: int = PAGE,
    slots: int = 0,
    ledger: StallLedger | None = None,
) -> BoundaryStore:
    split = split_boundaries(layers, micros, nbytes, slots * PAGE)
    return open_boundaries(
        core, ledger or StallLedger(), split, micro_batches=micros, device=torch.device("cpu")
    )


def numbered(value: float, numel: int = PAGE // 4) -> torch.Tensor:
    return torch.full((numel,), float(value))


def scratch_fds() -> list[int]:
    """The descriptors of the spilled boundaries: their files have no name."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of the listing itself
            continue
        if target.endswith("/scratch/boundaries (deleted)"):
            found.append(int(name))
    return found


# The split -------------------------------------------------------------------------------------------------


def test_split_by_hand() -> None:
    """3 layers of 2 micro-batches, 5,000 bytes each in slots of two pages: 6 boundaries. A budget of 5 pages has 2 slots;
    4 are spilled.
    """
    assert split_boundaries(3, 2, 5000, 5 * PAGE) == BoundarySplit(6, 2 * PAGE, 2)
    assert split_boundaries(3, 2, 5000, 5 * PAGE).spilled_bytes == 4 * 2 * PAGE
    assert split_boundaries(3, 2, 5000, 0) == BoundarySplit(6, 2 * PAGE, 6)
    assert split_boundaries(3, 2, 5000, 1 << 30).spilled_bytes == 0


# What comes back -------------------------------------------------------------------------------------------


def test_spilled_by_hand(core: StoreCore) -> None:
    """The picture of the module: 5 layers, 2 slots. 3 are written and read again, each a page."""
    with opened(core, layers=5, slots=2) as kept:
        for layer in range(5):
            kept.keep(layer, 0, numbered(layer))
        assert (kept.read_bytes, kept.written_bytes) == (0, 3 * PAGE)
        for layer in reversed(range(5)):
            assert torch.equal(kept.take(layer, 0), numbered(layer))
        assert (kept.read_bytes, kept.written_bytes) == (3 * PAGE, 3 * PAGE)


def test_everything_in_memory_is_not_copied(core: StoreCore) -> None:
    with opened(core, layers=2) as kept:
        assert isinstance(kept, MemoryBoundaries)
        whole, part = numbered(1), numbered(2)[:8]
        kept.keep(0, 0, whole)
        kept.keep(1, 0, part)
        assert kept.take(1, 0).untyped_storage().nbytes() == part.nbytes
        assert kept.take(0, 0).data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("slots", [0, 2])
def test_no_graph_and_one_layout(core: StoreCore, slots: int) -> None:
    """What is computed from a boundary must not depend on how it was kept: not on its strides either."""
    with opened(core, layers=3, slots=slots) as kept:
        for layer in range(3):
            kept.keep(layer, 0, torch.arange(6.0, requires_grad=True).view(2, 3).T)
        for layer in reversed(range(3)):
            taken = kept.take(layer, 0)
            assert taken.is_contiguous()
            assert not taken.requires_grad
            assert taken.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("slots", [0, 4])
def test_order(core: StoreCore, slots: int) -> None:
    with opened(core, layers=3, micros=2, slots=slots) as kept:
        kept.keep(0, 0, numbered(0))
        kept.keep(1, 1, numbered(1))
        with refuses(ValueError, "layer 1", "micro-batch 1"):
            kept.keep(1, 1, numbered(1))
        with refuses(ValueError, "1 was before 0"):
            kept.keep(0, 1, numbered(1))
        with refuses(ValueError, "layer 1 comes before 0"):
            kept.take(0, 0)
        with pytest.raises(KeyError):
            kept.take(1, 0)
        kept.take(1, 1)
        assert torch.equal(kept.take(0, 0), numbered(0))


def test_announced(core: StoreCore) -> None:
    with opened(core, layers=3, slots=1) as kept:
        with refuses(ValueError, "layer 0", 8192, 4096):
            kept.keep(0, 0, numbered(0, PAGE // 2))
        with refuses(ValueError, "layer 3", "micro-batch 0"):
            kept.keep(3, 0, numbered(0))


DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, list[tuple[Sequence[int], int]]]:
    """Layers, micro-batches, slots; of each step the order within its layers, and after how many keeps it is given up."""
    layers, micros = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    slots = draw(st.integers(micros, layers * micros + 1))
    order = st.permutations(range(micros))
    given_up = st.integers(0, 2 * layers * micros)
    return layers, micros, slots, draw(st.lists(st.tuples(order, given_up), min_size=1, max_size=4))


@settings(max_examples=share(60))
@given(steps(), st.randoms(use_true_random=False))
def test_like_a_dictionary(core_of: StoreCore, made: tuple, random) -> None:  # type: ignore[type-arg, no-untyped-def]
    layers, micros, slots, runs = made
    with opened(core_of, layers=layers, micros=micros, slots=slots) as kept:
        for order, given_up in runs:
            held: dict[tuple[int, int], torch.Tensor] = {}
            for layer in range(layers):
                for micro in order:
                    if len(held) >= given_up:
                        continue
                    dtype = random.choice(DTYPES)
                    numel = random.randint(0, PAGE // dtype.itemsize)
                    held[layer, micro] = torch.randint(-(1 << 15), 1 << 15, (numel,)).to(dtype)
                    kept.keep(layer, micro, held[layer, micro])
            if given_up < layers * micros:
                kept.clear()
                continue
            for layer in reversed(range(layers)):
                for micro in reversed(order):
                    taken = kept.take(layer, micro)
                    assert taken.dtype is held[layer, micro].dtype
                    assert torch.equal(taken, held.pop((layer, micro)))
        assert kept.read_bytes <= kept.written_bytes <= len(runs) * max(layers * micros - slots, 0) * PAGE


@pytest.fixture(scope="module")
def core_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreCore]:
    with small_store(tmp_path_factory.mktemp("boundaries") / "store", count=1) as store:
        yield store.core


# Failures --------------------------------------------------------------------------------------------------


def test_damage_is_found(core: StoreCore) -> None:
    with opened(core, layers=4, slots=1) as kept:
        for layer in range(4):
            kept.keep(layer, 0, numbered(layer))
        for fd in scratch_fds():
            with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
                file.seek(1000)
                file.write(b"\xff")  # slot 0: what is read first, layer 2
        kept.take(3, 0)
        with refuses(ChecksumError, "layer 2", "micro-batch 0", "scratch/boundaries"):
            kept.take(2, 0)


def test_write_that_fails(core: StoreCore) -> None:
    """It is raised to whoever wants its memory next, and poisons the store: nothing is tried again."""
    with opened(core, layers=4, slots=1) as kept:
        full = os.open("/dev/full", os.O_RDWR)
        for fd in scratch_fds():
            os.dup2(full, fd)
        os.close(full)
        kept.keep(0, 0, numbered(0))
        with refuses(OSError, "scratch/boundaries") as failed:
            kept.keep(1, 0, numbered(1))
        assert failed.value.errno == errno.ENOSPC
    with pytest.raises(StorePoisonedError):
        core.failures.check()


def test_no_space(tmp_path: Path) -> None:
    """The error comes at once, and the store can be used as before."""
    limited = StripeConfig(limits=(1 << 20,))
    with small_store(tmp_path / "store", count=1, stripe=limited) as store:
        before = store.core.extents.allocated_bytes
        with refuses(OSError, "stripe.limits") as failed:
            opened(store.core, layers=1000, slots=1)
        assert failed.value.errno == errno.ENOSPC
        assert store.core.extents.allocated_bytes == before
        assert not scratch_fds()
        with opened(store.core, layers=4, slots=1) as kept:
            kept.keep(0, 0, numbered(0))
        store.commit()


def test_nothing_is_left(core: StoreCore) -> None:
    scratch, before = core.directory / "scratch", core.extents.allocated_bytes
    others = scratch_fds()  # of a test that was interrupted before, in this process
    with opened(core, layers=9, slots=1) as kept:
        kept.keep(0, 0, numbered(0))
        assert len(scratch_fds()) > len(others)
        assert not list(scratch.iterdir())  # a kill here leaves nothing
        assert core.extents.allocated_bytes == before + 8 * PAGE
    assert scratch_fds() == others
    assert core.extents.allocated_bytes == before
    kept.close()


# Cost ------------------------------------------------------------------------------------------------------


def test_stalls_are_charged(tmp_path: Path) -> None:
    """A slow disk: layer 1 waits for the write of layer 0, whose memory it takes."""
    ledger = StallLedger()
    config = StoreConfig(host_budget=1 << 20, disk=LinkConfig(latency=0.02))
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", 8)], config) as store:
        with opened(store.core, layers=2, slots=1, ledger=ledger) as kept:
            for layer in range(2):
                kept.keep(layer, 0, numbered(layer))
            kept.take(1, 0)
            kept.take(0, 0)
        rows = {row.key: row.stall_ns for row in ledger.rows()}
        assert rows.keys() == {StallKey(layer, Tier.NVME, Cause.BOUNDARY_SPILL) for layer in (0, 1)}
        assert all(rows.values())
        drive = store.core.extents.drive_reports()[0]
        assert (drive.read_bytes, drive.written_bytes) == (PAGE, PAGE)
