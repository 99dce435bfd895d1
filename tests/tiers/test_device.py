"""The contract of a device tier, for every device here: slots hold what was loaded, gradients land whole."""

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tierstore._native import Arena, Buffer, Engine, File, HugePages
from tierstore.capabilities import Capability
from tierstore.errors import CapabilityError
from tierstore.links import LinkConfig
from tierstore.tiers import (
    DeviceSlots,
    DeviceTier,
    WeightLoads,
    accelerated,
    describe_weights,
    open_device_tier,
    weights_in_place,
)
from tierstore.tiers.device import gradient_type, tensor_of
from tierstore.tiers.slots import SlotGradient

#: "faked": the tier of an accelerator, its tickets and threads, over copies that the CPU makes at once.
DEVICES = ["cpu", "faked", *(["cuda"] if torch.cuda.is_available() else [])]
NUMEL = 3001  # neither a whole number of pages nor of cache lines


@dataclass
class Bench:
    engine: Engine
    tier: DeviceTier
    slots: DeviceSlots

    def source(self, values: torch.Tensor) -> Buffer:
        """Host memory in two pieces that are not adjacent, as a cache entry's may be."""
        raw = values.view(torch.uint8).numpy()
        size = -(-raw.nbytes // 8192) * 4096
        arena = Arena(3 * size, HugePages.OFF)
        buffer = Buffer(arena, [(0, size), (2 * size, size)], raw.nbytes)
        buffer.copy_from(raw)
        return buffer


class _Idle:
    """A stream, or an event, of a device that has always finished."""

    device = torch.device("cpu")

    def __init__(self, *_: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def _faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "Stream", _Idle)
        patch.setattr(torch, "Event", _Idle)
        patch.setattr(torch.accelerator, "current_stream", lambda device: _Idle())
        yield


#: Types of weights, and what gradients are.
TYPES = [
    (torch.float32, SlotGradient.SUM),
    (torch.bfloat16, SlotGradient.SUM),
    (torch.bfloat16, SlotGradient.PRODUCT),
]


@pytest.fixture(params=[(d, *t) for d in DEVICES for t in TYPES], ids=str)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    name, dtype, gradient = request.param
    slots = DeviceSlots(NUMEL, dtype, weights=3, gradients=2, gradient=gradient)
    tier: DeviceTier
    with Engine() as engine:
        if name == "faked":
            with _faked(monkeypatch):
                tier = accelerated.AcceleratedTier(engine, slots, torch.device("cpu"), HugePages.OFF)
                yield Bench(engine, tier, slots)
                tier.close()
        else:
            tier = open_device_tier(engine, slots, torch.device(name), HugePages.OFF)
            yield Bench(engine, tier, slots)
            tier.close()


def test_a_loaded_slot_holds_its_source(bench: Bench) -> None:
    torch.manual_seed(1)
    values = [torch.randn(NUMEL).to(bench.slots.compute) for _ in range(3)]
    tickets = [bench.tier.load(slot, bench.source(v), []) for slot, v in enumerate(values)]
    for slot, ticket in enumerate(tickets):
        bench.engine.wait_all([ticket])
        found = bench.tier.weights(slot)
        assert found.dtype == bench.slots.compute
        assert found.device.type == bench.tier.device.type
        assert torch.equal(found.cpu(), values[slot])


def test_a_load_follows_its_tickets(bench: Bench) -> None:
    gate = bench.engine.external()
    source = bench.source(torch.ones(NUMEL).to(bench.slots.compute))
    ticket = bench.tier.load(0, source, [gate])
    assert not bench.engine.done(ticket)
    source.copy_from(torch.full((NUMEL,), 2.0).to(bench.slots.compute).view(torch.uint8).numpy())
    bench.engine.complete_external(gate)
    bench.engine.wait_all([ticket])
    assert torch.equal(bench.tier.weights(0).cpu(), torch.full((NUMEL,), 2.0).to(bench.slots.compute))


def test_a_load_waits_for_what_was_computed_before_its_slot_was_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for what the compute stream was told afterwards, which would keep copies behind computation."""
    told = 0
    awaited: list[int] = []

    class Event(_Idle):
        def record(self, stream: object) -> None:
            self.reached = told

    class Stream(_Idle):
        def wait_event(self, event: object) -> None:
            awaited.append(event.reached)

    with Engine() as engine, _faked(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch, "Stream", Stream)
        slots = DeviceSlots(NUMEL, torch.float32, weights=2, gradients=1)
        tier = accelerated.AcceleratedTier(engine, slots, torch.device("cpu"), HugePages.OFF)
        source = Bench(engine, tier, slots).source(torch.ones(NUMEL))
        for slot in range(2):
            engine.wait_all([tier.load(slot, source, [])])
        assert awaited == [0, 0]
        told = 1
        tier.release_weights(0)
        told = 2
        tier.release_weights(1)
        told = 3
        for slot in range(2):
            engine.wait_all([tier.load(slot, source, [])])
        assert awaited == [0, 0, 1, 2]
        tier.close()


def test_a_load_whose_read_is_unfinished_holds_nothing_up(bench: Bench) -> None:
    gate = bench.engine.external()
    late = bench.source(torch.full((NUMEL,), 1.0).to(bench.slots.compute))
    there = bench.source(torch.full((NUMEL,), 2.0).to(bench.slots.compute))
    tickets = [bench.tier.load(0, late, [gate]), bench.tier.load(1, there, [])]
    bench.engine.wait_all(bench.tier.awaited(1, tickets[1]))
    assert float(bench.tier.weights(1)[0]) == 2.0
    bench.engine.wait(tickets[1])
    assert not bench.engine.done(tickets[0])
    bench.engine.complete_external(gate)
    bench.engine.wait_all(bench.tier.awaited(0, tickets[0]))
    assert float(bench.tier.weights(0)[0]) == 1.0
    bench.engine.wait(tickets[0])


def test_a_load_fails_with_what_it_follows(bench: Bench) -> None:
    gate = bench.engine.external()
    ticket = bench.tier.load(0, bench.source(torch.ones(NUMEL).to(bench.slots.compute)), [gate])
    bench.engine.complete_external(gate, "the read failed")
    with pytest.raises(Exception, match="the read failed"):
        bench.engine.wait_all([ticket])


def test_a_load_fails_with_the_error_of_its_read(bench: Bench, tmp_path: Path) -> None:
    """Not with one that repeats its text: who handles it asks for its type, errno and path."""
    path = tmp_path / "empty"
    path.touch()
    arena = Arena(4096, HugePages.OFF)
    page = Buffer(arena, [(0, 4096)], 4096)
    read = bench.engine.read(File(path), 0, [page])
    ticket = bench.tier.load(0, bench.source(torch.ones(NUMEL).to(bench.slots.compute)), [read])
    with pytest.raises(OSError, match="unexpected end of file") as failed:
        bench.engine.wait_all([ticket])
    assert failed.value.errno == errno.EIO
    assert failed.value.filename == str(path)


def test_slots_are_aligned_alike(bench: Bench) -> None:
    """Else products would choose other kernels, and the bits depend on the slot."""
    source = bench.source(torch.ones(NUMEL).to(bench.slots.compute))
    bench.engine.wait_all([bench.tier.load(slot, source, []) for slot in range(3)])
    slots = [bench.tier.weights(slot) for slot in range(3)] + [
        bench.tier.gradients(slot) for slot in range(2)
    ]
    assert [slot.data_ptr() % 64 for slot in slots] == [0] * 5


def test_a_gradient_lands_in_its_type(bench: Bench) -> None:
    torch.manual_seed(2)
    dtype = gradient_type(bench.slots)
    assert dtype == (torch.float32 if bench.slots.gradient is SlotGradient.SUM else torch.bfloat16)
    expected = []
    copied = []
    for _ in range(2):
        slot, guards = bench.tier.allocate_gradient()
        assert guards == []
        gradient = torch.randn(NUMEL).to(dtype)
        expected.append(gradient)
        bench.tier.gradients(slot).copy_(gradient)
        copied.append(bench.tier.copy_to_host(slot))
    for gradient, (buffer, after) in zip(expected, copied, strict=True):
        bench.engine.wait_all(after)
        assert buffer.nbytes == NUMEL * dtype.itemsize
        assert torch.equal(tensor_of(buffer, dtype), gradient)


def test_a_host_buffer_is_guarded_by_all_who_read_it(bench: Bench) -> None:
    readers = [bench.engine.external(), bench.engine.external()]
    after: list[int] = []
    for reading in ([], readers, [], []):  # two buffers, in turns
        slot, guards = bench.tier.allocate_gradient()
        bench.engine.wait_all(guards)
        _, after = bench.tier.copy_to_host(slot)
        bench.tier.free_gradient(slot, reading)
    for ticket in readers:
        assert not any(map(bench.engine.done, after))
        bench.engine.complete_external(ticket)
    bench.engine.wait_all(after)


@pytest.mark.parametrize(
    ("dtype", "weights", "gradients", "nbytes", "products"),
    [
        # 3,000 * 4 = 12,000 bytes: three pages each
        (torch.float32, 1, 1, 2 * 12288, 2 * 12288),
        (torch.bfloat16, 1, 1, 8192 + 12288, 2 * 8192),
        (torch.bfloat16, 4, 3, 4 * 8192 + 3 * 12288, 7 * 8192),
    ],
)
def test_bytes_of_slots(dtype: torch.dtype, weights: int, gradients: int, nbytes: int, products: int) -> None:
    slots = DeviceSlots(NUMEL, dtype, weights=weights, gradients=gradients)
    assert slots.nbytes == nbytes
    slots = replace(slots, gradient=SlotGradient.PRODUCT)
    assert slots.nbytes == products
    assert slots.host_bytes == products - weights * slots.weight_bytes


def test_weights_in_place_are_those_of_their_source() -> None:
    slots = DeviceSlots(NUMEL, torch.float32, weights=1, gradients=1)
    values = torch.arange(NUMEL, dtype=torch.float32)
    with Engine() as engine:
        tier = open_device_tier(engine, slots, torch.device("cpu"), HugePages.OFF, loads=WeightLoads.IN_PLACE)
        whole = Buffer(Arena(16384, HugePages.OFF), [(0, 16384)], NUMEL * 4)
        held = tier.in_place(whole)
        whole.copy_from(values.view(torch.uint8).numpy())
        assert isinstance(held, torch.Tensor)
        assert held.data_ptr() == whole.array().ctypes.data
        assert torch.equal(held, values)
        # What lies in several pieces is copied.
        scattered = Bench(engine, tier, slots).source(values + 1)
        assert tier.in_place(scattered) is None
        engine.wait_all([tier.load(0, scattered, [])])
        assert torch.equal(tier.weights(0), values + 1)
        tier.close()


def test_nothing_is_computed_with_in_place_where_weights_are_copied(bench: Bench) -> None:
    whole = Buffer(Arena(16384, HugePages.OFF), [(0, 16384)], NUMEL * bench.slots.compute.itemsize)
    assert bench.tier.in_place(whole) is None


def test_weights_are_computed_with_in_place_where_the_cpu_computes() -> None:
    cpu, gpu, free = torch.device("cpu"), torch.device("cuda"), LinkConfig()
    found = weights_in_place(Capability.AUTO, cpu, free)
    assert found
    assert "in the host cache (the CPU computes)" in describe_weights(found)
    assert not weights_in_place(Capability.OFF, cpu, free)
    for device, link in ((gpu, free), (cpu, LinkConfig(bandwidth=1 << 20))):
        found = weights_in_place(Capability.AUTO, device, link)
        assert not found
        assert "copied to slots" in describe_weights(found)
        with pytest.raises(CapabilityError, match="weights_in_place is set to on"):
            weights_in_place(Capability.ON, device, link)


@pytest.mark.parametrize("faked", [False, True])
def test_spare_buffers_are_beside_the_others(faked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, and a buffer of each kind: a gradient in the spare one, which is still read, holds up only the next one
    that is to go there.
    """
    slots = DeviceSlots(NUMEL, torch.float32, weights=1, gradients=1, spare=1)
    assert slots.host_bytes == 2 * slots.gradient_bytes
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine())
        tier: DeviceTier
        if faked:
            stack.enter_context(_faked(monkeypatch))
            tier = accelerated.AcceleratedTier(engine, slots, torch.device("cpu"), HugePages.OFF)
        else:
            tier = open_device_tier(engine, slots, torch.device("cpu"), HugePages.OFF)
        stack.callback(tier.close)
        reading = engine.external()
        copies = []
        for number, spare in enumerate((True, False, False, True)):
            slot, guards = tier.allocate_gradient()
            engine.wait_all(guards)
            tier.gradients(slot).fill_(number)
            copies.append(tier.copy_to_host(slot, spare=spare))
            tier.free_gradient(slot, [reading] if number == 0 else [])
            if number < 3:
                engine.wait_all(copies[-1][1])
        (first, _), *_, (last, after) = copies
        assert last is first
        assert copies[1][0] is copies[2][0] is not first
        assert not any(map(engine.done, after))
        assert float(tensor_of(first, torch.float32)[0]) == 0.0
        engine.complete_external(reading)
        engine.wait_all(after)
        assert float(tensor_of(first, torch.float32)[0]) == 3.0


def test_a_gradient_slot_is_free_when_its_copy_has_left(bench: Bench) -> None:
    """The optimizer still reads both host buffers: a slot can be written all the same. The third copy waits for the buffer
    that is to be free first.
    """
    reading = [bench.engine.external() for _ in range(3)]
    copies = []
    for number in range(3):
        slot, guards = bench.tier.allocate_gradient()
        bench.engine.wait_all(guards)  # returns: no slot waits for the optimizer
        bench.tier.gradients(slot).fill_(number)
        buffer, after = bench.tier.copy_to_host(slot)
        copies.append((buffer, after))
        bench.tier.free_gradient(slot, [reading[number]])
        if number < 2:
            bench.engine.wait_all(after)
    buffer, after = copies[2]
    assert not any(map(bench.engine.done, after))
    assert float(tensor_of(buffer, gradient_type(bench.slots))[0]) == 0.0
    bench.engine.complete_external(reading[0])
    bench.engine.wait_all(after)
    assert float(tensor_of(buffer, gradient_type(bench.slots))[-1]) == 2.0
    for ticket in reading[1:]:
        bench.engine.complete_external(ticket)
