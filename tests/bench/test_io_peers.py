"""The libraries' cold reads: every byte checked, the absent named, a liar caught."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tierstore.bench import io_peers
from tierstore.bench.io_peers import PEERS, PeerMismatch, PeerRecords, compare_peers

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
    targets = {ratio.to: ratio.target for ratio in found.ratios}
    assert targets["aiofiles"] == targets["lmdb"] == 2


class Liar:
    """Its records are all alike."""

    def prepare(self, place: Path, records: PeerRecords) -> list[Path]:
        self.content = records.content(0)
        (place / "liar").write_bytes(self.content.tobytes())
        return [place / "liar"]

    def read(self, order: Sequence[int], take: Callable[[int, np.ndarray], None]) -> None:
        for number in order:
            take(number, self.content)

    def close(self) -> None:
        pass


class Forgetful(Liar):
    """It reads the first one only."""

    def read(self, order: Sequence[int], take: Callable[[int, np.ndarray], None]) -> None:
        take(0, self.content)


class Broken(Liar):
    """Installed, and of no use."""

    def prepare(self, place: Path, records: PeerRecords) -> list[Path]:
        raise RuntimeError("its library is missing")


def only(peer: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_peers, "PEERS", {"json": lambda chunk, depth: peer()})


@pytest.mark.parametrize(
    ("peer", "says"), [(Liar, "not what was written"), (Forgetful, r"read records \[0\]")]
)
def test_other_bytes_are_caught(
    peer: type[Liar], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(peer, monkeypatch)
    found, notes = compare_peers(tmp_path, RECORDS, chunk_bytes=4096, queue_depth=1, rounds=1)
    assert [series.program for series in found.series] == ["tierstore"]
    assert any(re.search(says, note) for note in notes)


def test_our_own_other_bytes_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_peers, "Ours", lambda chunk, depth: Liar())
    with pytest.raises(PeerMismatch, match="tierstore: record"):
        compare_peers(tmp_path, RECORDS, chunk_bytes=4096, queue_depth=1, rounds=1)


def test_what_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(Broken, monkeypatch)
    found, notes = compare_peers(tmp_path, RECORDS, chunk_bytes=4096, queue_depth=1, rounds=1)
    assert [series.program for series in found.series] == ["tierstore"]
    assert "json: its library is missing" in notes


def test_what_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_peers, "PEERS", {"no_such_library": lambda chunk, depth: Liar()})
    _, notes = compare_peers(tmp_path, RECORDS, chunk_bytes=4096, queue_depth=1, rounds=1)
    assert "no_such_library: not installed" in notes
