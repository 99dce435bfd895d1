"""The disk probe: what it moves, and that without O_DIRECT it measures the disk all the same. No test asserts a speed."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tierstore.bench import probes
from tierstore.bench.probes import Bytes, DiskProbe, Durable
from tierstore.capabilities import Capability
from tierstore.store.config import IoConfig

SIZE = 64 << 10


class Watched(DiskProbe):
    """Keeps what is submitted, and how it ends, in order."""

    log: list[tuple[str, int]]

    def _submit(self, call: Callable[..., int], slot: int, size: int) -> None:
        self.log.append((call.__name__, slot))
        super()._submit(call, slot, size)

    def _drain(self, durable: Durable) -> None:
        self.log.append((f"durable {durable.value}", 0))
        super()._drain(durable)


@pytest.fixture(params=[Capability.AUTO, Capability.OFF])
def direct(request: pytest.FixtureRequest) -> Capability:
    return request.param


def test_the_disk_s_own_speed(tmp_path: Path, direct: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place once: 8 reads, 8 writes of 8 places. Through the page cache it is emptied first, and written out."""
    dropped: list[Path] = []
    monkeypatch.setattr(probes, "drop_pages", dropped.append)
    Watched.log = []
    with closing(Watched(tmp_path, 8 * SIZE, (SIZE,), IoConfig(direct=direct))) as probe:
        past = probe._file.direct
        for kind, mix in (("read", Bytes(8 * SIZE, 0)), ("write", Bytes(0, 8 * SIZE))):
            probe.log.clear()
            assert probe.disk_bytes_per_s(mix) > 0
            assert sorted(probe.log[:-1]) == [(kind, slot) for slot in range(8)]
            assert probe.log[-1][0] == ("durable no" if past else "durable yes")
    assert dropped == ([] if past else [tmp_path / "bench-disk.tmp"] * 2)
    assert direct is Capability.AUTO or not past
    assert list(tmp_path.iterdir()) == []


def test_a_mix_is_interleaved_in_proportion(tmp_path: Path) -> None:
    Watched.log = []
    with closing(Watched(tmp_path, 8 * SIZE, (SIZE,), IoConfig())) as probe:
        probe.log.clear()
        probe.bytes_per_s(Bytes(6 * SIZE, 2 * SIZE), durable=Durable.YES)
    kinds = [kind for kind, _ in probe.log]
    assert kinds == ["read", "write", "read", "read", "read", "write", "read", "read", "durable yes"]
