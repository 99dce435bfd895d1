"""What computes for a synthetic stack: times by its own clock, and slots that stay as they are until it has finished."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tierstore._native import Arena, Buffer, Engine, HugePages
from tierstore.bench.overlap_rank import Computer, EmulatedDevice, Processor
from tierstore.links import LinkConfig
from tierstore.tiers import DeviceSlots, HostDeviceTier, limited_tier

SLOTS = DeviceSlots(1024, torch.float32, weights=1, gradients=1)


class Told:
    """A device that has finished when the test says so."""

    def __init__(self, engine: Engine) -> None:
        self.tickets = [engine.external()]

    def launch(self, seconds: float) -> None: ...
    def synchronize(self) -> None: ...
    def finished(self) -> list[int]:
        return self.tickets

    def clock_ns(self) -> int:
        return time.monotonic_ns()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as made:
        yield made


def test_a_device_computes_one_after_another_while_its_caller_goes_on(engine: Engine) -> None:
    device = EmulatedDevice(engine)
    assert device.finished() == []
    begun = device.clock_ns()
    for _ in range(3):
        device.launch(0.02)
    # Never less than the three; not a moment of the program's own, unless that took longer than the first of them.
    assert device.clock_ns() - begun >= 60_000_000
    (ticket,) = device.finished()
    device.synchronize()
    assert time.monotonic_ns() - begun >= 60_000_000
    engine.wait(ticket)


def test_a_processor_has_computed_when_it_goes_on() -> None:
    computer: Computer = Processor()
    products: list[None] = []
    multiply = torch.mm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", lambda *a, **k: (products.append(None), multiply(*a, **k)))
        for seconds in (0.001, 0.002):
            products.clear()
            computer.launch(seconds)
            assert len(products) == max(1, round(seconds / computer._s))
    assert computer.finished() == []


@pytest.mark.parametrize("link", [LinkConfig(), LinkConfig(bandwidth=10**12)])
def test_slots_stay_as_they_are_until_the_device_has_finished(engine: Engine, link: LinkConfig) -> None:
    told = Told(engine)
    tier = limited_tier(
        HostDeviceTier(engine, SLOTS, HugePages.OFF, computed=told.finished), engine, link, told.finished
    )
    arena = Arena(SLOTS.weight_bytes, HugePages.OFF)
    source = Buffer(arena, [(0, SLOTS.weight_bytes)], 4 * SLOTS.numel)
    engine.wait_all([tier.load(0, source, [])])  # nothing was computed with it yet
    tier.release_weights(0)
    source.copy_from(np.full(4 * SLOTS.numel, 7, np.uint8))
    again = tier.load(0, source, [])
    slot, guards = tier.allocate_gradient()
    assert guards == []
    copied, after = tier.copy_to_host(slot)
    assert copied.nbytes == 4 * SLOTS.numel
    assert not engine.done(again)
    assert {engine.done(ticket) for ticket in after} == {False}
    assert not tier.weights(0).any()
    engine.complete_external(told.tickets[0])
    engine.wait_all([again, *after])
    assert bool((tier.weights(0).view(torch.uint8) == 7).all())
    tier.close()
