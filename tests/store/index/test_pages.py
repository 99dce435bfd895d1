"""The index's own checks: every damaged byte of it is found, or means nothing, and none ends the process."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store

from tierstore.errors import StoreFormatError
from tierstore.store.index.database import Index, check_pages

PAGE = 4096


@pytest.fixture
def data(fast_path: Path) -> Path:
    """An index of two levels, with a snapshot, long state and free pages."""
    path = fast_path / "s"
    with small_store(path, count=60, numel=300, retain=1) as store:
        store.update({"e0": np.ones(300, np.float32)}, lr=0.1)
        store.commit({"a": b"state" * 50}, snapshot="s")
        for number in range(3):
            store.update({f"e{number}": np.ones(300, np.float32)}, lr=0.1)
            store.commit({"big": os.urandom(6000)})
    return path / "index" / "data.mdb"


def everything(data: Path) -> object:
    index = Index(data.parent)
    try:
        names = index.snapshots()
        commits = [index.read_commit(name) for name in (None, *names)]
        packed = [(commit.generation, list(commit.records.packed()), commit.state) for commit in commits]
        return names, index.read_meta(), packed
    finally:
        index.close()


def in_child(action: Callable[[], str]) -> str:
    """What ``action`` returns in a child of this process; what ended it, if something did."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.write(write, action().encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(read, "rb") as pipe:
        return pipe.read().decode() if status == 0 else f"ended with {status}"


def test_one_flipped_bit_is_found_or_means_nothing(data: Path) -> None:
    whole = data.read_bytes()
    wanted, used = everything(data), len(whole.rstrip(b"\0"))
    rng, refused = random.Random(3), 0
    for _ in range(600):
        at, bit = rng.randrange(used), rng.randrange(8)
        with open(data, "r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << bit]))
        try:
            found = everything(data)
        except StoreFormatError:
            refused += 1
        else:
            assert found == wanted, (at, bit)
        with open(data, "r+b") as file:
            file.seek(at)
            file.write(whole[at : at + 1])
    assert refused > 50
    assert everything(data) == wanted


@pytest.mark.slow
def test_damaged_pages_are_refused_and_never_end_the_process(data: Path) -> None:
    """Whole pages of rubbish, of one byte, of another page: LMDB alone would follow them anywhere."""
    whole = data.read_bytes()
    wanted, pages = everything(data), len(whole.rstrip(b"\0")) // PAGE + 1
    rng = random.Random(4)

    def outcome() -> str:
        try:
            return "same" if everything(data) == wanted else "changed"
        except StoreFormatError:
            return "refused"

    def outcomes() -> str:
        found = set()
        for number in range(200):
            page = rng.randrange(pages)
            rubbish = (
                rng.randbytes(PAGE),
                rng.randbytes(1) * PAGE,
                whole[page * PAGE : page * PAGE + 16] + rng.randbytes(PAGE - 16),
                whole[page * PAGE : page * PAGE + 8] + whole[rng.randrange(pages) * PAGE + 8 :][: PAGE - 8],
            )[number % 4]
            data.write_bytes(whole[: page * PAGE] + rubbish + whole[(page + 1) * PAGE :])
            found.add(outcome())
        return " ".join(sorted(found))

    assert in_child(outcomes) == "refused same"


def test_heads_that_do_not_follow_one_another_are_refused(data: Path) -> None:
    whole = data.read_bytes()
    for page, transaction in ((0, 1), (1, 4), (0, 2**40)):
        at = page * PAGE + 16 + 128
        data.write_bytes(whole[:at] + transaction.to_bytes(8, "little") + whole[at + 8 :])
        with pytest.raises(StoreFormatError, match="head"):
            check_pages(data)
    data.write_bytes(whole)
    check_pages(data)
