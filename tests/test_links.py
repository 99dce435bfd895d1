"""Limits as configured and as said at the head of a run; over transfers they change times and nothing else."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstore._native import Activity, Arena, Buffer, Engine, HugePages, Link
from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.links import CollectiveLink, LinkConfig, LinksConfig, limited, open_link, wait_until
from tierstore.store import ParameterStore, RecordSchema, StoreConfig
from tierstore.tiers import DeviceSlots, LimitedTier, open_device_tier

MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Run:
    links: LinksConfig = field(default_factory=LinksConfig)


def test_links_are_off_by_default() -> None:
    config = LinksConfig()
    assert config.describe() is None
    assert [open_link(link) for link in (config.copy, config.gather, config.exchange, config.disk)] == [
        None
    ] * 4


def test_links_are_a_table_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[links.gather]\nbandwidth = "1GiB"\nlatency = 0.001\n[links.disk]\nlatency = 0.5\n')
    config = load(Run, path, {"links.copy.bandwidth": "4MiB"}).links
    assert config.describe() == (
        "links limited: copy 4 MiB/s, gather 1 GiB/s after 1 ms, disk any speed after 500 ms"
    )
    gather, disk = open_link(config.gather), open_link(config.disk)
    assert (gather.bandwidth, gather.latency) == (1 << 30, 0.001)
    assert disk.bandwidth == math.inf


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("links.copy.bandwidth", "bandwidth: expected a size of at least 0"),
        ("links.disk.latency", "latency: expected"),
    ],
)
def test_what_is_no_speed_is_refused(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(Run, None, {setting: -1})


def test_without_a_link_an_operation_is_itself() -> None:
    with Engine() as engine:
        ticket = engine.barrier()
        assert limited(engine, None, ticket, 1, activity=Activity.READ) == ticket


def test_a_limited_operation_follows_what_it_followed() -> None:
    """Neither the operation nor its turn on the link begins before the gate opens, and a failure is handed on."""
    with Engine() as engine:
        link, gate = Link(latency=0.0), engine.external()
        ticket = limited(engine, link, engine.barrier([gate]), 1, activity=Activity.READ, after=[gate])
        assert not engine.done(ticket)
        assert link.stats()["transfers"] == 0
        engine.complete_external(gate, "no luck")
        with pytest.raises(RuntimeError, match="no luck"):
            engine.wait(ticket)


def test_the_link_of_collectives_remembers_its_last_turn() -> None:
    unlimited = CollectiveLink(None)
    assert unlimited.reserve(1 << 30) <= time.monotonic_ns()
    before = time.monotonic_ns()
    link = CollectiveLink(Link(1e6))
    first = link.reserve(10_000)
    assert first >= before + 10 * MS
    second = link.reserve(2000)
    assert second == first + 2 * MS  # had the first been over by then, this would be later
    assert link.last_turn == (first, second)
    assert (link.messages, link.sent_bytes) == (2, 12_000)
    wait_until(second)
    assert time.monotonic_ns() >= second
    wait_until(0)


def test_a_message_that_is_still_being_computed_takes_its_turn_then() -> None:
    """At 1 MB/s: one issued now, of 10 ms, and two that a device will have computed in 100 and 105 ms, of 20 ms each."""
    now = time.monotonic_ns()
    link = CollectiveLink(Link(1e6))
    link.reserve(10_000)
    link.clock_ns = lambda: now + 100 * MS
    assert link.reserve(20_000) == now + 120 * MS
    link.clock_ns = lambda: now + 105 * MS
    assert link.reserve(20_000) == now + 140 * MS
    assert link.last_turn == (now + 120 * MS, now + 140 * MS)


def test_a_limited_disk_stores_the_same_bytes(tmp_path: Path) -> None:
    """Every read and write-back of an extent takes its turn; a commit waits for those of its writes."""
    weight = np.arange(4096, dtype=np.float32)

    def run(name: str, disk: LinkConfig) -> tuple[int, float]:
        begun = time.monotonic()
        config = StoreConfig(host_budget=1 << 20, disk=disk)
        with ParameterStore.create(tmp_path / name, [RecordSchema("r", 4096)], config) as store:
            store.register("a", "r", weight=weight)
            store.commit()
            store.update({"a": np.ones(4096, np.float32)}, lr=1e-2)
            store.commit()
            seconds = time.monotonic() - begun
            with store.fetch(["a"]) as lease:
                found = lease["a"].copy("weight").copy()
            assert not np.array_equal(found, weight)
            return store.records_crc32c(), seconds

    free, _ = run("free", LinkConfig())
    slow, seconds = run("slow", LinkConfig(latency=0.02))
    assert slow == free
    assert seconds >= 0.06  # weights and moments once, and again


def test_limited_copies_hold_the_same_weights() -> None:
    with Engine() as engine:
        engine.record_spans(10)
        slots, link = DeviceSlots(1024, torch.float32, weights=1, gradients=1), Link(1e6)
        tier = LimitedTier(open_device_tier(engine, slots, torch.device("cpu"), HugePages.OFF), engine, link)
        arena = Arena(4096, HugePages.OFF)
        source = Buffer(arena, [(0, 4096)], 4096)
        source.array()[:] = 7
        ticket = tier.load(0, source, [])
        engine.wait(ticket)
        assert bytes(tier.weights(0).numpy().tobytes()) == b"\x07" * 4096
        slot, guards = tier.allocate_gradient()
        assert guards == []
        tier.gradients(slot).fill_(2.0)
        copied, after = tier.copy_to_host(slot)
        engine.wait_all(after)
        assert bytes(copied.array()) == tier.gradients(slot).numpy().tobytes()
        tier.free_gradient(slot, after)
        assert link.stats() == {"transfers": 2, "nbytes": 8192, "busy_s": pytest.approx(0.008192)}
        held = [span for span in engine.drain_spans()[0] if span[1]]
        assert [span[4] - span[3] for span in held] == [4_096_000, 4_096_000]
        tier.close()
