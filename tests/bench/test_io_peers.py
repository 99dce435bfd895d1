"""The libraries' cold reads: every byte checked, the absent named, a liar caught."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tierstore.bench import io_peers
from tierstore.bench.io_peers import PEERS, Peer, PeerMismatch, PeerRecords, Read, compare_peers

RECORDS = PeerRecords(count=5, nbytes=256 << 10)


def test_all_that_are_installed(tmp_path: Path) -> None:
    ticks: list[None] = []
    found, notes = compare_peers(
        tmp_path, RECORDS, chunk_bytes=64 << 10, queue_depth=4, rounds=2, tick=lambda: ticks.append(None)
    )
    programs = [series.program for series in found.series]
    assert programs[0] == "tierstore"
    assert {"aiofiles", "lmdb", "numpy.memmap"} <= set(programs)  # what the tests require, and tierstore
    for name in PEERS:
        left_out = any(note.startswith(f"{name}:") for note in notes)
        assert left_out == ({"numpy": "numpy.memmap"}.get(name, name) not in programs)
    assert len(ticks) == 2 * len(programs)
    for series in found.series:
        assert [one.nbytes for one in series.samples] == [RECORDS.count * RECORDS.nbytes] * 2
    targets = {ratio["to"]: ratio["target_ratio"] for ratio in found.ratios()}
    assert targets["aiofiles"] == targets["lmdb"] == 2


@contextmanager
def liar(directory: Path, records: PeerRecords, *_: int) -> Iterator[tuple[list[Path], Read]]:
    """Its records are all alike."""
    path, content = directory / "liar", records.content(0)
    path.write_bytes(content.tobytes())

    def read(order: Sequence[int], take: Callable[[int, np.ndarray], None]) -> None:
        for number in order:
            take(number, content)

    yield [path], read


@contextmanager
def forgetful(directory: Path, records: PeerRecords, *_: int) -> Iterator[tuple[list[Path], Read]]:
    """It reads the first one only."""
    with liar(directory, records) as (paths, _):
        yield paths, lambda order, take: take(0, records.content(0))


@contextmanager
def broken(directory: Path, records: PeerRecords, *_: int) -> Iterator[tuple[list[Path], Read]]:
    """Installed, and of no use."""
    raise RuntimeError("its library is missing")
    yield


@pytest.mark.parametrize(
    ("peer", "says"), [(liar, "not what was written"), (forgetful, r"read records \[0\]")]
)
def test_other_bytes_are_caught(
    peer: Peer, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_peers, "PEERS", {"json": peer})
    found, notes = compare_peers(tmp_path, RECORDS, chunk_bytes=4096, queue_depth=1, rounds=1)
    assert [series.program for series in found.series] == ["tierstore"]
    assert any(re.search(says, note) for note in notes)


def test_our_own_other_bytes_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_peers, "ours", liar)
    with pytest.raises(PeerMismatch, match="tierstore: record"):
        compare_peers(tmp_path, RECORDS, chunk_bytes=4096, queue_depth=1, rounds=1)


def test_what_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_peers, "PEERS", {"json": broken})
    found, notes = compare_peers(tmp_path, RECORDS, chunk_bytes=4096, queue_depth=1, rounds=1)
    assert [series.program for series in found.series] == ["tierstore"]
    assert "json: its library is missing" in notes


def test_what_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_peers, "PEERS", {"no_such_library": liar})
    _, notes = compare_peers(tmp_path, RECORDS, chunk_bytes=4096, queue_depth=1, rounds=1)
    assert "no_such_library: not installed" in notes
