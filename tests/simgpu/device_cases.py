"""Cases of the simulated device alone, for a process that has loaded it: races by hand, and what is counted.

Each that has a race in it has a twin with the one line that mends it. A case is called on a rank of a world of its own
(``simulated_ranks`` of tests/conftest.py).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import simulated
import torch
import torch.distributed as dist

from tierstore import _native
from tierstore._native import Arena, Buffer
from tierstore.tiers.accelerated import CopyStream

CASES: dict[str, Callable[[], None]] = {}
DEVICE = "simgpu:0"
BYTES = 4096


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def run_case(mesh: object, name: str) -> None:
    """The case ``name``, after all that others left under way."""
    torch.accelerator.synchronize()
    simulated.reset()
    CASES[name]()


def raced() -> bool:
    """Whether there were violations since the last time; what is under way ends."""
    found = simulated.violations()
    torch.accelerator.synchronize()
    simulated.reset()
    return bool(found)


def counted(*names: str) -> tuple[int, ...]:
    found = simulated.counts()
    return tuple(found.get(name, 0) for name in names)


class Host:
    """An engine and two buffers in an arena, pinned or not."""

    def __init__(self, *, pinned: bool = True) -> None:
        self.engine = simulated.recording_engine()(backend=_native.IoBackend.THREADS)
        self.arena = Arena(2 * BYTES)
        self.buffers = [Buffer(self.arena, [(i * BYTES, BYTES)], BYTES) for i in range(2)]
        self.pinned = pinned
        if pinned:
            assert simulated.registration.cudaHostRegister(self.arena.address, self.arena.nbytes, 0) == 0

    def tensor(self, number: int = 0) -> torch.Tensor:
        return torch.from_numpy(self.buffers[number].array())

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *args: object) -> None:
        if self.pinned:
            assert simulated.registration.cudaHostUnregister(self.arena.address) == 0
        self.engine.close()


# Values -----------------------------------------------------------------------------------------------------


@case
def computes_with_the_bits_of_the_cpu() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    index = torch.tensor([2, 0, 2])

    def value(device: str) -> list[torch.Tensor]:
        x, y = (each.detach().clone().to(device).requires_grad_() for each in (a, b))
        z = torch.nn.functional.silu(x @ y)[index.to(device)].t().contiguous()
        z.view(-1).square().sum().backward()
        return [each.detach().cpu() for each in (z, x.grad, y.grad) if each is not None]

    assert all(map(torch.equal, value("cpu"), value("simgpu")))
    assert not raced()


@case
def refuses_what_a_real_device_refuses() -> None:
    on_device = torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        on_device + torch.ones(4)
    with pytest.raises((TypeError, RuntimeError)):
        on_device.numpy()
    assert torch.equal(
        (on_device + torch.tensor(1.0)).cpu(), torch.full((4,), 2.0)
    )  # a scalar may come from the host


@case
def is_the_accelerator_of_torch() -> None:
    assert torch.accelerator.is_available()
    assert str(torch.accelerator.current_accelerator()) == "simgpu"
    assert torch.accelerator.device_count() == 8
    assert torch.get_device_module(DEVICE).get_device_name() == "simulated device"
    assert dist.get_default_backend_for_device("simgpu") == "simccl"


@case
def fresh_memory_is_no_number() -> None:
    assert torch.empty(8, device=DEVICE).isnan().all()
    before = torch.ones(8, device=DEVICE)
    address = before.data_ptr()
    del before
    again = torch.empty(8, device=DEVICE)
    assert again.data_ptr() == address
    assert again.isnan().all()


@case
def memory_runs_out() -> None:
    free, total = torch.accelerator.get_memory_info(0)
    simulated.set_memory(total - free + (1 << 20))  # of what others of this world have left
    before = torch.accelerator.get_memory_info(0)
    held = torch.empty(1 << 19, dtype=torch.uint8, device=DEVICE)
    after = torch.accelerator.get_memory_info(0)
    assert before[0] - after[0] == 1 << 19
    with pytest.raises(torch.OutOfMemoryError, match="simgpu"):
        torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    simulated.set_memory(8 << 30)
    del held


# Streams ----------------------------------------------------------------------------------------------------


def on_two_streams(*, ordered: bool) -> None:
    tensor, side = torch.ones(4, device=DEVICE), torch.Stream(DEVICE)
    made = torch.Event(DEVICE)
    made.record()
    if ordered:
        side.wait_event(made)
    with side:
        tensor.mul_(2)


@case
def a_missing_event_is_found() -> None:
    on_two_streams(ordered=False)
    said = "\n".join(simulated.violations())
    assert "aten::mul.out reads on stream " in said
    assert "of device 0, unordered with: aten::fill_.Scalar writes on stream 0 of device 0" in said
    assert raced()
    on_two_streams(ordered=True)
    assert not raced()


@case
def an_event_holds_what_was_queued_before_it() -> None:
    tensor, side = torch.ones(4, device=DEVICE), torch.Stream(DEVICE)
    early = torch.accelerator.current_stream().record_event()
    tensor.add_(1)
    side.wait_event(early)
    with side:
        tensor.mul_(2)
    assert raced()


@case
def reads_do_not_exclude_one_another() -> None:
    tensor, side = torch.ones(4, device=DEVICE), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.sum()
    tensor.sum()
    assert not simulated.violations()
    tensor.zero_()  # while the other stream may still read
    assert raced()


def after_the_host_waited(wait: Callable[[torch.Stream], object]) -> bool:
    tensor, side = torch.ones(4, device=DEVICE), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.mul_(2)
    wait(side)
    tensor.add_(1)
    return raced()


@case
def waits_of_the_host_order_what_it_queues_next() -> None:
    assert after_the_host_waited(lambda side: None)
    assert not after_the_host_waited(lambda side: side.synchronize())
    assert not after_the_host_waited(lambda side: side.record_event().synchronize())
    assert not after_the_host_waited(lambda side: torch.accelerator.synchronize())


def freed_in_use(*, recorded: bool) -> tuple[bool, bool]:
    """Whether the memory came back at once, and raced."""
    tensor, side = torch.ones(64, device=DEVICE), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.sum()
    if recorded:
        tensor.record_stream(side)
    address = tensor.data_ptr()
    del tensor
    again = torch.ones(64, device=DEVICE)
    return again.data_ptr() == address, raced()


@case
def memory_freed_in_use_is_found() -> None:
    assert freed_in_use(recorded=False) == (True, True)
    assert freed_in_use(recorded=True) == (False, False)


@case
def the_backward_pass_has_a_thread_of_its_own() -> None:
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    threads = []
    x.register_hook(lambda gradient: threads.append(threading.get_ident()))
    (x * 2).sum().backward()
    assert threads != [threading.get_ident()]
    x.grad.sum().item()
    assert not raced()


# Host memory and tickets ------------------------------------------------------------------------------------


@case
def copies_are_counted_by_what_they_do_to_the_host() -> None:
    on_device = torch.ones(16, device=DEVICE)
    simulated.reset()
    with Host() as host:
        pinned = host.tensor().view(torch.float32)[:16]
        on_device.copy_(pinned, non_blocking=True)
        pinned.copy_(on_device, non_blocking=True)
        assert counted("h2d.async", "d2h.async", "h2d.blocking", "d2h.blocking") == (1, 1, 0, 0)
        assert counted("h2d.bytes", "d2h.bytes", "h2d.pageable_bytes") == (64, 64, 0)
        assert torch.accelerator.synchronize() is None
    pageable = torch.ones(16)
    on_device.copy_(pageable, non_blocking=True)
    pageable.copy_(on_device, non_blocking=True)  # blocks all the same
    on_device.copy_(pageable)
    assert counted("h2d.async", "d2h.async", "h2d.blocking", "d2h.blocking") == (2, 1, 1, 1)
    assert counted("h2d.pageable_bytes", "d2h.pageable_bytes") == (128, 64)
    on_device.sum().item()
    on_device.nonzero()
    assert counted("sync.item", "sync.op", "sync.device") == (1, 1, 1)
    assert counted("op.aten::nonzero", "kernels") == (1, 2)
    assert not raced()


def landed(*, waited: bool) -> None:
    """A copy into pinned memory that the engine then reads."""
    with Host() as host:
        source = torch.ones(BYTES, dtype=torch.uint8, device=DEVICE)
        host.tensor().copy_(source, non_blocking=True)
        if waited:
            torch.accelerator.current_stream().synchronize()
        host.engine.wait(host.engine.copy(host.buffers[1], host.buffers[0]))
        torch.accelerator.synchronize()


@case
def a_race_in_pinned_memory_is_found() -> None:
    landed(waited=False)
    assert any("engine copy reads" in said for said in simulated.violations())
    assert raced()
    landed(waited=True)
    assert not raced()


def uploaded(*, waited: bool, pinned: bool) -> bool:
    """Memory that the engine fills, then copied up; and filled again while the copy may be under way."""
    with Host(pinned=pinned) as host:
        filled = host.engine.fill_zero(host.buffers[0])
        if waited:
            host.engine.wait(filled)
        target = torch.empty(BYTES, dtype=torch.uint8, device=DEVICE)
        target.copy_(host.tensor(), non_blocking=True)
        host.engine.wait(filled)
        found = raced()
        torch.accelerator.synchronize()
    simulated.reset()
    return found


@case
def a_ticket_orders_when_it_was_waited_for() -> None:
    for pinned in (True, False):
        assert uploaded(waited=False, pinned=pinned)
        assert not uploaded(waited=True, pinned=pinned)


def refilled(*, pinned: bool) -> bool:
    with Host(pinned=pinned) as host:
        host.engine.wait(host.engine.fill_zero(host.buffers[0]))
        target = torch.empty(BYTES, dtype=torch.uint8, device=DEVICE)
        target.copy_(host.tensor(), non_blocking=True)
        host.engine.wait(host.engine.fill_zero(host.buffers[0]))
        found = raced()
        torch.accelerator.synchronize()
    return found


@case
def only_pinned_memory_is_read_later() -> None:
    assert refilled(pinned=True)
    assert not refilled(pinned=False)


@case
def tickets_follow_one_another() -> None:
    with Host() as host:
        engine, (one, other) = host.engine, host.buffers
        first = engine.fill_zero(one)
        engine.copy(other, one, after=[first])
        assert not raced()
        engine.copy(other, one, after=[first])  # two copies to one place
        assert raced()


def through_an_external(*, follows: bool) -> bool:
    with Host() as host:
        engine, source = host.engine, torch.ones(BYTES, dtype=torch.uint8, device=DEVICE)
        landing = engine.external()
        # Noted when the external ticket is done, after the copy.
        used = engine.copy(host.buffers[1], host.buffers[0], after=[landing] if follows else [])
        host.tensor().copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        engine.complete_external(landing)
        engine.wait(used)
    return raced()


@case
def an_external_ticket_has_the_clock_of_who_completed_it() -> None:
    assert through_an_external(follows=False)
    assert not through_an_external(follows=True)


@case
def asking_is_knowing() -> None:
    with Host() as host:
        ticket = host.engine.fill_zero(host.buffers[0])
        while not host.engine.done(ticket):
            pass
        torch.empty(BYTES, dtype=torch.uint8, device=DEVICE).copy_(host.tensor(), non_blocking=True)
        assert not raced()
        torch.accelerator.synchronize()


@case
def memory_is_unpinned_when_no_copy_is_under_way() -> None:
    for waits in (False, True):
        with Host() as host:
            target = torch.empty(BYTES, dtype=torch.uint8, device=DEVICE)
            target.copy_(host.tensor(), non_blocking=True)
            if waits:
                torch.accelerator.synchronize()
        assert raced() is not waits


@case
def memory_is_unpinned_while_the_engine_goes_on() -> None:
    with Host() as host:
        gate = host.engine.external()
        filled = host.engine.fill_zero(host.buffers[0], after=[gate])
        host.engine.complete_external(gate)
        while not host.engine.stats()["compute_ops"]:  # over, but nobody has asked
            pass
    assert not raced()
    assert filled


@case
def registration_fails_as_on_cuda() -> None:
    with Host() as host:
        assert simulated.registration.cudaHostRegister(host.arena.address + BYTES, BYTES, 0) == 712
        assert simulated.registration.cudaHostUnregister(host.arena.address + BYTES) == 713


# Threads ----------------------------------------------------------------------------------------------------


def by_another_thread(*, waits: bool) -> bool:
    """A thread that waits for a ticket of the one that started it, and hands on what it found by a queue."""
    with Host() as host:
        handed: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        ticket = host.engine.fill_zero(host.buffers[0])

        def run() -> None:
            host.engine.wait(ticket)
            handed.put(torch.zeros(1))

        thread = threading.Thread(target=run)
        thread.start()
        if waits:
            handed.get()
        torch.empty(BYTES, dtype=torch.uint8, device=DEVICE).copy_(host.tensor(), non_blocking=True)
        found = raced()
        thread.join()
        torch.accelerator.synchronize()
    return found


@case
def threads_have_seen_what_they_were_handed() -> None:
    assert by_another_thread(waits=False)
    assert not by_another_thread(waits=True)


# Recording --------------------------------------------------------------------------------------------------


@case
def records_what_follows_what() -> None:
    """A product; its copy to the host on another stream, behind a ticket and the product; a second kernel, which follows the
    first alone; a ticket that follows the copy; the host waits for it.
    """
    square, stream_event = torch.ones(32, 32, device=DEVICE), torch.Event(DEVICE)
    with Host() as host:
        copies = CopyStream(host.engine, torch.device(DEVICE), "test")
        simulated.record()
        product = square @ square
        stream_event.record()

        def copy() -> None:
            copies.stream.wait_event(stream_event)
            host.tensor().copy_(product.view(-1).view(torch.uint8), non_blocking=True)

        first = host.engine.fill_zero(host.buffers[0])
        copied = copies.submit([first], copy).ticket
        product.neg()
        last = host.engine.copy(host.buffers[1], host.buffers[0], after=[copied])
        host.engine.wait(last)
        simulated.mark("end")
        found = simulated.recorded()
        copies.close()
    assert [(node.what.removeprefix("engine "), node.nbytes, node.after) for node in found] == [
        ("aten::mm.out", 3 * BYTES, []),
        ("fill_zero", BYTES, []),
        ("wait", 0, []),  # in this run alone: the tickets are the copy's to wait for
        ("d2h", BYTES, [0, 1]),
        ("aten::neg.out", 2 * BYTES, [0]),
        ("copy", 2 * BYTES, [1, 3]),
        ("wait", 0, [5]),
        ("end", 0, []),
    ]
    assert found[0].operations == 2 * 32**3
    assert [node.ticket for node in found if node.stream == simulated.ENGINE] == [first, last]
    assert not raced()


# Collectives ------------------------------------------------------------------------------------------------


@case
def collectives_are_ordered_by_their_wait() -> None:
    dist.init_process_group("cpu:gloo,simgpu:simccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.ones(4, device=DEVICE)
        work = dist.all_reduce(tensor, async_op=True)
        tensor.zero_()  # while it may still be sent
        assert simulated.violations()
        work.wait()
        assert raced()
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor.add_(1)
        assert not raced()
        assert tensor.tolist() == [1, 1, 1, 1]
    finally:
        dist.destroy_process_group()
