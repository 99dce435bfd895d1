"""Loads the simulated device ``simgpu`` into this process, and lets tierstore's engine and threads tell it their order.

::

    import simulated

    simulated.load(Path(directory))  # of simulated_build.build(), before tierstore is imported
    tensor = torch.ones(8, device="simgpu")
    ...
    simulated.violations()  # {"mul reads on stream 3 ..., unordered with: h2d writes on ...": 1}
    simulated.counts()  # {"kernels": 12, "h2d.async": 3, "h2d.bytes": 4096, "sync.stream": 1, ...}

A backend is global to its process: tests call it in processes of their own (``simulated_runs``). There are eight
devices. Values are the CPU's and exact, and a run does not depend on timing: everything is done at once, and an access
is a violation when no event, ticket or wait orders it after the one before.

What is told: kernels, copies, collectives, events and waits by torch itself; the engine's operations, with the host
memory that they read and write, by ``RecordingEngine``; threads by ``threading.Thread`` and ``queue.SimpleQueue``.
What is not: accesses of host memory by torch's CPU kernels and by numpy.

Counts: ``kernels``, ``op.NAME``; for h2d, d2h and d2d ``.async``, ``.blocking``, ``.bytes``, ``.pageable_bytes``;
``sync.item``, ``sync.op``, ``sync.stream``, ``sync.event``, ``sync.device`` (the host waits for the device);
``event.record``, ``event.wait``; ``collective.NAME``; ``memory.allocations``.
"""

from __future__ import annotations

import importlib.util
import itertools
import queue
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_native: Any = None


def load(directory: Path) -> None:
    """Makes ``simgpu`` the process's accelerator. ``directory`` holds what ``simulated_build.build`` built."""
    global _native
    spec = importlib.util.spec_from_file_location("_simgpu", directory / "_simgpu.so")
    _native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_native)
    torch.utils.rename_privateuse1_backend("simgpu")
    _native.register_hooks()
    torch._register_device_module("simgpu", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _collectives, devices=["simgpu"])
    _watch_threads()
    _watch_engines()


def violations() -> dict[str, int]:
    """Accesses that nothing orders, and how often."""
    return _native.violations()


def counts() -> dict[str, int]:
    return _native.counts()


def reset() -> None:
    """Forgets counts and violations, not the order of what was done."""
    _native.reset()


def set_memory(nbytes: int, device: int = 0) -> None:
    """What the device has; beyond it allocation raises torch's OutOfMemoryError."""
    _native.set_memory(device, nbytes)


def note_host(what: str, address: int, nbytes: int, *, written: bool) -> None:
    """An access of host memory by the calling thread."""
    _native.note_host(what, [(address, nbytes, written)])


def widen_products() -> None:
    """From now on products of bf16 matrices are made in fp32 and rounded once. Without AVX-512, the CPU's are slow."""
    _native.widen_products(True)


# Recording --------------------------------------------------------------------------------------------------


#: The main thread; streams of nodes that are no stream's.
MAIN = -1
HOST, ENGINE = -1, -2


class Node(NamedTuple):
    """Something that ``thread`` (-1: the main one) queued or did, after its previous nodes and those in ``after``.

    ``stream``: the device's stream; HOST, the thread itself; ENGINE, its ``ticket``. ``operations``: of floating point, in
    products. ``nbytes``: what a kernel reads and writes, a copy or a collective moves, the engine reads and writes of host
    memory or of files. ``begin_ns``, ``end_ns``: when the thread did it (CLOCK_MONOTONIC), and a stream's work with it.
    What an engine may leave until it has nothing more urgent is called ``engine idle ...``.
    """

    what: str
    thread: int
    stream: int
    ticket: int
    operations: float
    nbytes: int
    after: list[int]
    begin_ns: int
    end_ns: int


#: The external tickets of copies, with their engines, that a recording has so far.
_submitted: list[tuple[Any, int]] = []


def record() -> None:
    """Begin to write down the graph of what is queued and waited for, in program order.

    It does not depend on timing: engines say of no ticket that it is done until a thread waits for it, so every order is
    kept, and the thread that submits a copy puts it on its stream, behind the tickets that it follows.
    """
    _native.record()


def mark(what: str) -> None:
    """Note that the calling thread came here."""
    _native.record_mark(what)


def record_steps(step: Callable[[], object], count: int) -> list[Node]:
    """The graph of ``count`` calls of ``step``, with a mark ``step`` before the first and after each."""
    record()
    mark("step")
    for _ in range(count):
        step()
        mark("step")
    return recorded()


def recorded() -> list[Node]:
    """The graph since ``record``, which ends with it. Nodes name earlier ones.

    What has no cost of its own (external tickets, barriers, what other threads wait for to complete them) is left out:
    what follows it follows what it follows.
    """
    for engine, ticket in _submitted:
        engine.wait_unrecorded([ticket])
    _submitted.clear()
    found = [Node(*each) for each in _native.recorded()]
    passed_on = [
        node.what in ("engine external", "engine barrier") or (node.stream == HOST and node.thread != MAIN)
        for node in found
    ]
    numbers, kept = {}, []
    for index, node in enumerate(found):
        after: set[int] = set()
        through = [*node.after]
        while through:
            before = through.pop()
            if passed_on[before]:
                through += found[before].after
            else:
                after.add(before)
        if not passed_on[index]:
            numbers[index] = len(kept)
            kept.append(node._replace(after=sorted(numbers[before] for before in after)))
    return kept


def _submit_at_once(stream: Any, after: Sequence[int], copy: Callable[[], None]) -> Any:
    """``CopyStream.submit`` while recording: what would wait in another thread for tickets is queued behind them."""
    from tierstore.tiers.accelerated import DeviceCopy

    engine, before = stream._engine, [earlier for earlier in after if earlier]
    submitted = DeviceCopy(stream.stream, before, copy, engine.external(after=before))
    _submitted.append((engine, submitted.ticket))
    begun_ns = _native.now_ns()
    engine.wait_unrecorded(before)
    _native.record_wait(engine.number, [], begun_ns)
    _native.record_following(engine.number, before)
    submitted.queue()
    _native.record_following(engine.number, [])
    stream._running.put(submitted)
    return submitted


class HostRegistration:
    """The two calls of ``torch.cuda.cudart()`` that register memory. ``refuse`` lets registrations fail."""

    refuse = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuse:
            return 1  # cudaErrorInvalidValue
        return 0 if _native.pin(address, nbytes) else 712  # cudaErrorHostMemoryAlreadyRegistered

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if _native.unpin(address) else 713  # cudaErrorHostMemoryNotRegistered


registration = HostRegistration()


def _device_module() -> types.ModuleType:
    """``torch.simgpu``: of ``torch.cuda`` what torch itself and tierstore call."""
    module = types.ModuleType("torch.simgpu")
    contents: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: _native.DEVICES,
        "current_device": lambda: _native.current_device(),
        "set_device": lambda device: _native.set_device(torch.device(device).index or 0),
        "get_device_name": lambda device=None: "simulated device",
        "get_device_properties": lambda device: types.SimpleNamespace(
            uuid=f"simulated-{torch.device(device).index}"
        ),
        "cudart": lambda: registration,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        # Numbers are drawn from the CPU's generator.
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "_is_in_bad_fork": lambda: False,
    }
    for name, value in contents.items():
        setattr(module, name, value)
    return module


def _collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout)
    return _native.Collectives(gloo, rank, size)


def _watch_engines() -> None:
    """Engines that stores open from now on are recorded."""
    import tierstore.store.opening
    from tierstore.tiers.accelerated import CopyStream, DeviceCopy

    tierstore.store.opening.Engine = recording_engine()  # type: ignore[misc]
    submit = CopyStream.submit

    def submits(stream: CopyStream, after: Sequence[int], copy: Callable[[], None]) -> DeviceCopy:
        return (_submit_at_once if _native.recording() else submit)(stream, after, copy)

    CopyStream.submit = submits  # type: ignore[method-assign]


# Threads ----------------------------------------------------------------------------------------------------


class _Queue:
    """``queue.SimpleQueue``; whoever takes an item has seen what its sender had."""

    def __init__(self) -> None:
        self._items: Any = _SimpleQueue()

    def put(self, item: Any, *args: Any) -> None:
        self._items.put((_native.release(), item), *args)

    def get(self, *args: Any, **keywords: Any) -> Any:
        clock, item = self._items.get(*args, **keywords)
        _native.acquire(clock)
        return item

    def get_nowait(self) -> Any:
        return self.get(False)

    def empty(self) -> bool:
        return self._items.empty()

    def __class_getitem__(cls, item: Any) -> type[_Queue]:
        return cls


_SimpleQueue = queue.SimpleQueue


def _watch_threads() -> None:
    queue.SimpleQueue = _Queue  # type: ignore[misc, assignment]
    start, join = threading.Thread.start, threading.Thread.join
    ended: dict[threading.Thread, Any] = {}

    def started(thread: threading.Thread) -> None:
        clock, run = _native.release(), thread.run

        def runs() -> None:
            _native.enter_thread(thread.name)
            _native.acquire(clock)
            try:
                run()
            finally:
                ended[thread] = _native.release()

        thread.run = runs  # type: ignore[method-assign]
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if thread in ended and not thread.is_alive():
            _native.acquire(ended[thread])

    threading.Thread.start = started  # type: ignore[method-assign]
    threading.Thread.join = joined  # type: ignore[method-assign]


# The engine -------------------------------------------------------------------------------------------------

_Buffers = Sequence[Any]

#: What each operation of the engine reads and writes in host memory, from its arguments.
_ACCESSES: dict[str, Callable[..., tuple[_Buffers, _Buffers]]] = {
    "read": lambda file, offset, sections, *rest, **options: ((), sections),
    "write": lambda file, offset, sections, *rest, **options: (sections, ()),
    "copy": lambda dst, src, **options: ([src], [dst]),
    "fill_zero": lambda dst, **options: ((), [dst]),
    "widen": lambda dst, src, *rest, **options: ([src], [dst]),
    "accumulate": lambda dst, src, *rest, **options: ([src], [dst]),
    "sum_of_squares": lambda src, *rest, **options: ([src], ()),
    "adamw": lambda weight, exp_avg, exp_avg_sq, grad, *rest, scales=(), **options: (
        [] if grad is None else [grad],
        [*weight, exp_avg, exp_avg_sq, *scales],
    ),
    "sync": lambda *rest, **options: ((), ()),
    "punch": lambda *rest, **options: ((), ()),
    "barrier": lambda *rest, **options: ((), ()),
    "hold": lambda *rest, **options: ((), ()),
    "external": lambda *rest, **options: ((), ()),
}


def recording_engine() -> type[Any]:
    """An ``Engine`` whose tickets have clocks: a thread has seen what a ticket did when it has waited for it, or asked
    and heard that it is done.
    """
    from tierstore import _native as tierstore_native

    numbers = itertools.count(1)

    class RecordingEngine(tierstore_native.Engine):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.number = next(numbers)

        def complete_external(self, ticket: int, *error: str) -> None:
            _native.complete(self.number, ticket)
            _native.record_completion(self.number, ticket)
            super().complete_external(ticket, *error)

        def wait(self, ticket: int, *timeout_s: float | None) -> None:
            self.wait_all([ticket], *timeout_s)

        def wait_all(self, tickets: Sequence[int], *timeout_s: float | None) -> None:
            begun_ns = _native.now_ns()
            try:
                self.wait_unrecorded(tickets, *timeout_s)
            finally:
                _native.record_wait(self.number, list(tickets), begun_ns)

        def wait_unrecorded(self, tickets: Sequence[int], *timeout_s: float | None) -> None:
            try:
                super().wait_all(tickets, *timeout_s)
            finally:
                self._know([each for each in tickets if super(RecordingEngine, self).done(each)])

        def done(self, ticket: int) -> bool:
            done = super().done(ticket) and not _native.recording()
            if done:
                self._know([ticket])
            return done

        def drain_notified(self) -> list[int]:
            tickets = super().drain_notified()
            self._know(tickets)
            return tickets

        def _know(self, tickets: Sequence[int]) -> None:
            _native.host_knows(self.number, tickets)

        def close(self) -> None:
            super().close()
            _native.close_engine(self.number)

        def __exit__(self, *args: object) -> None:
            self.close()

    def recorded(name: str) -> Callable[..., int]:
        native = getattr(tierstore_native.Engine, name)

        def operation(self: RecordingEngine, *args: Any, **options: Any) -> int:
            begun_ns = _native.now_ns()
            ticket: int = native(self, *args, **options)
            reads, writes = _ACCESSES[name](*args, **options)
            spans = [
                (piece.ctypes.data, piece.nbytes, written)
                for buffers, written in ((reads, False), (writes, True))
                for buffer in buffers
                for piece in buffer.arrays()
            ]
            after = options.get("after", args[0] if name == "barrier" else ())
            _native.issue(self.number, ticket, list(after), name == "external", f"engine {name}", spans)
            # AdamW and sums read what they write.
            both = name in ("adamw", "accumulate")
            nbytes = sum(size * (1 + (both and written)) for _, size, written in spans)
            nbytes = args[1] if name == "hold" else nbytes
            idle = options.get("priority") is tierstore_native.Priority.IDLE
            what = f"engine {'idle ' if idle else ''}{name}"
            _native.record_ticket(what, self.number, ticket, list(after), nbytes, begun_ns)
            return ticket

        return operation

    for name in _ACCESSES:
        setattr(RecordingEngine, name, recorded(name))
    return RecordingEngine
